"""What ranks send back is waited for where it is first read: a shared expert behind the layer is computed beside it.

    out = layer(x) + shared(x)      # start the sums, shared(x), wait for them, add
    out = shared(x) + layer(x)      # shared(x) comes first: nothing stands between the layer and the sum

So they do by copy engines and in an all-to-all. A wait for a reduce-scatter has no value of its own, and Inductor puts it back.
Backward needs no such step: one operator holds what travels there, and what is computed beside it.
"""

import operator
from typing import Any

import torch
from torch import fx

from moeblaze_ops.ops.sharded.all_to_all import sum_rows
from moeblaze_ops.ops.sharded.collectives import arrived, sum_parts

_STARTS = (sum_parts, torch.ops._c10d_functional.all_to_all_single.default)
WAITS = (arrived, torch.ops._c10d_functional.wait_tensor.default)
_STEPS = (sum_rows, torch.ops.aten.slice.Tensor, torch.ops.aten.view.default)
"""What the sums go through before anybody reads them."""

_EXPERTS = (
    torch.ops.moeblaze.expert_down.default,
    torch.ops.moeblaze.expert_mlp.default,
    torch.ops.moeblaze.expert_mlp_ranged.default,
    torch.ops.moeblaze.expert_mlp_chunked.default,
)


def wait_late(wait: fx.Node) -> None:
    """Move a wait for what experts computed to where its result is first read, with the steps between."""
    if not _is_of_experts(wait.args[0]):
        return
    steps = [wait]
    while len(steps[-1].users) == 1 and (user := next(iter(steps[-1].users))).target in _STEPS:
        steps.append(user)
    if steps[-1].users:
        reader = min(steps[-1].users)
        for step in steps:
            reader.prepend(step)


def _is_of_experts(started: fx.Node) -> bool:
    start = started.args[0] if started.target is operator.getitem else started
    if start.target not in _STARTS:
        return False
    given: Any = start.args[0]
    sent = given[0] if start.target is sum_parts else given
    while sent.target in _STEPS:
        sent = sent.args[0]
    return sent.target in _EXPERTS
