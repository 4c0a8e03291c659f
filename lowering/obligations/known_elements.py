"""Elements of tensors of hits in the round of an expert, where the program does that round for no other.

    for e in hit:                           3 in the round of expert 3
        experts[e], (e + 1) % E             3 and 4
        ids[e], e + offset                  not known: they are made of other tensors, too
"""

import torch
from torch import fx

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.forms.masks import hit_mask
from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.fake_values import fake_of, storage_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, written_nodes
from moeblaze_ops.lowering.obligations.markers import hit_number


def known_element(node: fx.Node) -> int | None:
    """The only element of a tensor that is made of elements of hits alone; None for any other tensor."""
    fake = fake_of(node)
    chain = _chain(node) if isinstance(fake, torch.Tensor) and not fake.is_floating_point() else None
    if chain is None or not all(isinstance(size, int) and size == 1 for size in fake.shape) or is_written(chain):
        return None
    copies, graph = {}, fx.Graph()
    for step in sorted(chain):
        if step.target is hit_number:
            hits = graph.placeholder(step.args[0].name)
            hits.meta["example_value"] = fake_of(step.args[0])
            copies[step] = graph.call_function(hit_number, (hits, step.args[1]))
        else:
            copies[step] = graph.node_copy(step, copies.__getitem__)
        copies[step].meta["example_value"] = fake_of(step)
    evaluator = Evaluator()
    value = GraphView(graph, TABLE, numbers_only=True).value(copies[node])
    element = evaluator.try_element(value, (evaluator.algebra.zero,) * len(value.shape))
    return int(element.args[0]) if element is not None and element.kind == "const" else None


_MOST_EXPERTS = 512
"""What has more places is a mask of tokens."""


def experts_among(hits: fx.Node) -> list[int] | None:
    """The experts that may be among ``hits``, the places of a mask's true elements; None where they are not known to be.

    Of a mask with more rows than ids have numbers, those rows are never hit.
    """
    view, evaluator = GraphView(hits.graph, TABLE, numbers_only=True), Evaluator()
    mask = hit_mask(view.value_at(hits, len(view.position)))
    if mask is None or not isinstance(mask.shape[0], int) or mask.shape[0] > _MOST_EXPERTS:
        return None
    hit = (evaluator.try_element(mask, (evaluator.algebra.const(e),)) for e in range(mask.shape[0]))
    return [e for e, element in enumerate(hit) if element is not evaluator.algebra.zero]


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


def is_written(chain: set[fx.Node]) -> bool:
    """Whether something writes to memory of these nodes."""
    storages = {storage_of(node) for node in chain}
    step = min(chain)
    while step.op != "root" and not any(storage_of(written) in storages for written in written_nodes(step)):
        step = step.next
    return step.op != "root"
