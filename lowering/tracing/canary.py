"""Two functions that Dynamo traces before the first attempt: one whose branches must be taken, and one that must be given up.

Under which names Dynamo's functions are found, and what they take, is compared when they are replaced (`patches`). That Dynamo
still calls them where a branch must see it shows only when it traces.
"""

import functools
from collections.abc import Callable

import torch
from torch import fx

from moeblaze_ops.lowering.obligations.markers import branch_begins
from moeblaze_ops.lowering.torch_internals.frames import trace_alone
from moeblaze_ops.lowering.tracing.branches import Branches
from moeblaze_ops.lowering.tracing.watch import tracing


@functools.cache
def why_not_watched() -> str | None:
    """What Dynamo does unseen, or None; asked while it compiles a frame."""
    branches, graphs, error = _traced(_skips_idle_experts)
    begun = [node for gm in graphs for node in gm.graph.nodes if node.target is branch_begins]
    if branches.left or error or len(begun) != 2:
        return f"a branch on data is not traced: {branches.left or error or 'it is not seen'}"
    branches, *_ = _traced(_moves_an_iterator)
    if "an iterator would be moved on" not in (branches.left or ""):
        return f"an iterator that a branch on data moves on is not refused: {branches.left or 'it is not seen'}"
    return None


def _traced(function: Callable) -> tuple[Branches, list[fx.GraphModule], Exception | None]:
    branches, graphs = Branches(), []

    def backend(gm: fx.GraphModule, example_inputs: list) -> Callable:
        graphs.append(gm)
        return gm.forward

    try:
        with tracing(branches):
            trace_alone(function, backend)
    except Exception as error:
        return branches, graphs, error
    return branches, graphs, None


def _skips_idle_experts() -> torch.Tensor:
    x, ids = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
    for e in range(2):
        rows = torch.where(ids == e)[0]
        if len(rows) == 0:
            continue
        x = x.index_add(0, rows, x[rows])
    return x


def _moves_an_iterator() -> torch.Tensor:
    x, ids, numbers = torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64), iter((1, 2))
    for e in range(2):
        rows = torch.where(ids == e)[0]
        if len(rows) == 0:
            continue
        x = x.index_add(0, rows, x[rows] * next(numbers))
    return x
