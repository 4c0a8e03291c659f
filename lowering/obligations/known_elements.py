"""Elements of tensors of hits in the round of an expert, where the program does that round for no other.

    for e in hit:                           3 in the round of expert 3
        experts[e], (e + 1) % E             3 and 4
        ids[e], e + offset                  not known: they are made of other tensors, too
"""

from typing import Any

import torch
from torch import fx

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.forms.masks import hits_in
from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, constant_of, is_written, target_name
from moeblaze_ops.lowering.graph.operators import PROJECTIONS
from moeblaze_ops.lowering.obligations.markers import hit_number


def known_element(node: fx.Node) -> float | None:
    """The only element of a tensor that is made of elements of hits alone, or of numbers alone; None for any other tensor."""
    fake = fake_of(node)
    if (constant := constant_of(node)) is not None:
        return constant
    chain = _chain(node) if isinstance(fake, torch.Tensor) and not fake.is_floating_point() else None
    if chain is None or not all(isinstance(size, int) and size == 1 for size in fake.shape) or is_written(chain):
        return None
    value, evaluator = _value(node, chain), Evaluator()
    element = evaluator.try_element(value, (evaluator.algebra.zero,) * len(value.shape))
    return int(element.args[0]) if element is not None and element.kind == "const" else None


_MOST_EXPERTS = 512
"""What has more places is a mask of tokens."""


def experts_among(hits: fx.Node) -> list[int] | None:
    """The experts that may be among ``hits``, the places of a mask's true elements, in their order; None if it is not known.

    Of a mask with more rows than ids have numbers, those rows are never hit.
    """
    steps, evaluator = _steps_behind_projections(hits), Evaluator()
    if is_written(steps | _operands(steps), since=min(steps)):
        view = GraphView(hits.graph, TABLE, numbers_only=True)
        value = view.value_at(hits, len(view.position))
    else:
        value = _value(hits, steps)
    mask, falls = hits_in(value) or (None, False)
    if mask is None or not isinstance(mask.shape[0], int) or mask.shape[0] > _MOST_EXPERTS:
        return None
    hit = (evaluator.try_element(mask, (evaluator.algebra.const(e),)) for e in range(mask.shape[0]))
    experts = [e for e, element in enumerate(hit) if element is not evaluator.algebra.zero]
    return experts[::-1] if falls else experts


_LONGEST_CHAIN = 16


def _chain(node: fx.Node) -> set[fx.Node] | None:
    """The operators that make a tensor from elements of hits, and these; None where it is made of anything else."""
    chain: set[fx.Node] = set()
    stack = [node]
    while stack:
        step = stack.pop()
        if step in chain:
            continue
        chain.add(step)
        if step.target is not hit_number:
            if len(chain) > _LONGEST_CHAIN or step.op not in ("call_function", "call_method") or not step.all_input_nodes:
                return None
            stack.extend(step.all_input_nodes)
    return chain


def _steps_behind_projections(hits: fx.Node) -> set[fx.Node]:
    """The operators that make hits, as far as they are looked into and no product with an input of the graph is between.

        one_hot(x.matmul(router).topk(2).indices, E).sum((0, 1)).nonzero()          all of them but the first
    """
    steps: set[fx.Node] = set()
    stack = [hits]
    while stack:
        step = stack.pop()
        known = step.op in ("call_function", "call_method") and target_name(step) in TABLE
        reads_input = any(operand.op in ("placeholder", "get_attr") for operand in step.all_input_nodes)
        if step is hits or (known and step not in steps and not (reads_input and target_name(step) in PROJECTIONS)):
            steps.add(step)
            stack += step.all_input_nodes
    return steps


def _operands(steps: set[fx.Node]) -> set[fx.Node]:
    return {operand for step in steps for operand in step.all_input_nodes} - steps


def _value(node: fx.Node, steps: set[fx.Node]) -> Any:
    """What the last of some ``steps`` holds, where nothing is known of what they are given."""
    copies, graph = {}, fx.Graph()
    for given in sorted(_operands(steps)):
        copies[given] = graph.placeholder(given.name)
        copies[given].meta["example_value"] = fake_of(given)
    for step in sorted(steps):
        copies[step] = graph.node_copy(step, copies.__getitem__)
        copies[step].meta["example_value"] = fake_of(step)
    return GraphView(graph, TABLE, numbers_only=True).value(copies[node])
