"""True if a graph, captured with what only a rewrite justifies, may be compiled: what is wrong, each with its line."""

from collections.abc import Collection, Iterable, Iterator

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from moeblaze_ops.lowering.graph.effects import ASSERTS, acts_beside_tensors, has_effect
from moeblaze_ops.lowering.graph.fake_values import fake_of, needs_gradient, storage_of
from moeblaze_ops.lowering.graph.functional_view import GRADIENT_MODES, graphs_of, target_name, written_nodes
from moeblaze_ops.lowering.graph.stored_numbers import is_integral
from moeblaze_ops.lowering.obligations.ids_in_range import unknown_counted_ids
from moeblaze_ops.lowering.obligations.markers import LEAF, left_as_it_is
from moeblaze_ops.lowering.torch_internals.callers import places
from moeblaze_ops.lowering.torch_internals.frames import is_of_host
from moeblaze_ops.ops.register import NAMESPACE


def unproven(gm: fx.GraphModule) -> str | None:
    """What keeps a graph from being what the program computes: numbers that the host shares, counts of what are no experts.

    And zeros that were to have a gradient.
    """
    if leaves := [node for graph in graphs_of(gm) for node in _leaves_that_are_seen(graph)]:
        return f"{', '.join(named(leaves))} is made with requires_grad=True, and what is made of it has no other gradient"
    if shared := [node for graph in graphs_of(gm) for node in _writes_to_shared(graph)]:
        return f"{', '.join(named(shared))} writes to numbers that another array or tensor shares"
    return "ids may be no numbers of experts" if any(map(unknown_counted_ids, graphs_of(gm))) else None


def has_numbers(gm: fx.GraphModule) -> bool:
    """True if numbers of a tensor's elements are in a graph, or what tracing made of them."""
    return any(target_name(node) in _OF_NUMBERS and not is_of_host(node) for node in all_nodes(gm))


_OF_NUMBERS = frozenset(("item", "counts_below", "rows_between", "rows_joined", "left_as_it_is"))


def remaining_effects(gm: fx.GraphModule, work: Collection[fx.Node]) -> list[str]:
    """The nodes of ``work`` that are still there and do more than give a value, or assert something, each with its line.

    What is written is proven to be what is there: where it is a count it is so without a rounding, and without a gradient.

        load[e] = (ids == e).sum()              but not  load[e] = weights[ids == e].sum()
    """
    left = [node for node in all_nodes(gm) if node in work]
    writes = (node for node in left if has_effect(node) and (acts_beside_tensors(node) or not _writes_counts(node)))
    return named([*writes, *(node for node in left if target_name(node) in ASSERTS)])


def _writes_counts(node: fx.Node) -> bool:
    """True if integers alone are written to a tensor without gradient, or what it holds itself."""
    written = {storage_of(target) for target in written_nodes(node)}
    others = [operand for operand in node.all_input_nodes if storage_of(operand) not in written]
    whole = all(isinstance(fake := fake_of(operand), torch.Tensor) and is_integral(fake.dtype) for operand in others)
    return bool(written) and None not in written and whole and not any(map(needs_gradient, node.all_input_nodes))


def _writes_to_shared(graph: fx.Graph) -> Iterator[fx.Node]:
    """What writes to numbers that an array on the host may share, after it was made.

        sizes = counts.numpy(); counts.zero_()      and not     sizes = counts.tolist(); counts.zero_()
    """
    shared: set[int] = set()
    for node in graph.nodes if any(node.target is left_as_it_is for node in graph.nodes) else ():
        if node.op != "output" and any(storage_of(written) in shared for written in written_nodes(node)):
            yield node
        if node.target is left_as_it_is and (storage := storage_of(node)) is not None:
            shared.add(storage)


def _leaves_that_are_seen(graph: fx.Graph) -> Iterator[fx.Node]:
    """What was to have a gradient of its own, where a reader is no new tensor that has one without it, or that has none.

        zeros = torch.zeros(T, D, requires_grad=True)
        zeros.index_add(0, token, y)            but not     zeros.view(-1), return zeros, zeros += y, which raises an error
    """
    leaves = [node for node in graph.nodes if LEAF in node.meta]
    switches = bool(leaves) and any(target_name(node) in GRADIENT_MODES for node in graph.nodes)
    for leaf in leaves:
        new = (isinstance(fake_of(user), torch.Tensor) and storage_of(user) != storage_of(leaf) for user in leaf.users)
        is_off = leaf.meta[LEAF] is False and not switches
        if not all(new) or not (is_off or all(map(needs_gradient, leaf.users))):
            yield leaf


def data_dependent_shapes(gm: fx.GraphModule, *, numbers: bool) -> list[fx.Node]:
    """The program's ops that make tensors of a size that only the data tell, or ``numbers`` on the host."""

    def depends_on_data(node: fx.Node) -> bool:
        value = node.meta.get("example_value")
        tensors = [tensor for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor)]
        told = bool(tensors) and bool(node.meta.get("unbacked_bindings"))  # also where a size is found to be another one
        return told or any(free_unbacked_symbols(tensor) for tensor in tensors)

    nodes = all_nodes(gm)
    dependent = {node for node in nodes if depends_on_data(node) or (tells_of_data(node) and target_name(node) != "item")}
    dependent |= {node for node in nodes if numbers and target_name(node) == "item" and not is_of_host(node)}
    sources = [node for node in nodes if node in dependent and dependent.isdisjoint(node.all_input_nodes)]
    return [node for node in sources if getattr(node.target, "namespace", "") != NAMESPACE]


def tells_of_data(node: fx.Node) -> bool:
    """True if a node brings a flag to the host, or gives as many elements as are true of a mask, or as numbers are counted."""
    name = target_name(node)
    if name == "item":
        return isinstance(fake_of(node), torch.SymBool)
    return name == "bincount" or (name in ("nonzero", "where", "argwhere", "unique") and len(node.args) == 1)


def why_they_stay(gm: fx.GraphModule, *, rewritten: bool) -> str:
    """Why sizes and numbers that only the data tell are still there when layers were ``rewritten``, or were not."""
    if not rewritten:
        return "no layer was recognised that takes it"
    if any(_reads_a_number(graph) for graph in graphs_of(gm)):
        return "the program keeps it, or reads it outside of the layer, where a tensor of counts would do"
    if any(_selects_rows(graph) for graph in graphs_of(gm)):
        return "rows that it selects are read beside the layer, as by an expert that is neither two projections nor its tokens"
    if any(map(_asserts_rows, graphs_of(gm))):
        return "an expert without tokens is an error, as in `h.view(len(h), -1)`; write the number of features in place of -1"
    return "what is asserted of it may fail"


def _asserts_rows(graph: fx.Graph) -> bool:
    """True if there have to be rows, whose number only the data tell: of none, no size can be found for the other axes."""
    claims = (fake_of(node.args[0]) for node in graph.nodes if target_name(node) == "_assert_scalar")
    told = (claim.node.expr for claim in claims if isinstance(claim, torch.SymBool))
    return any(isinstance(claim, sympy.Ne) and claim.rhs == 0 and free_unbacked_symbols(claim.lhs) for claim in told)


def _selects_rows(graph: fx.Graph) -> bool:
    """True if a node gives rows, whose number only the data tell, of a tensor with features."""
    tensors = (fake for node in graph.nodes if isinstance(fake := fake_of(node), torch.Tensor))
    rows = (fake for fake in tensors if fake.dtype.is_floating_point and fake.dim() > 1)
    return any(free_unbacked_symbols(fake.shape[:1]) for fake in rows)


def _reads_a_number(graph: fx.Graph) -> bool:
    """True if anything but an assertion reads a number on the host that only the data tell.

        self.counts = counts.tolist(), counts = x.new_tensor([len(rows)])       but not     assert counts[0].item() < 8
    """
    asserted: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if target_name(node) in ASSERTS or (node.users and asserted.issuperset(node.users)):
            asserted.add(node)
    numbers = (node for node in graph.nodes if node not in asserted and isinstance(fake_of(node), torch.SymInt))
    return any(free_unbacked_symbols(fake_of(number)) for number in numbers)


def all_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """All nodes, those of bodies of higher-order operators included."""
    return [node for graph in graphs_of(gm) for node in graph.nodes]


def named(nodes: Iterable[fx.Node]) -> list[str]:
    """Each node with its line, once."""
    return list(dict.fromkeys(f"{name_of(node)} ({line_of(node)[1]})" for node in nodes))


def name_of(node: fx.Node) -> str:
    """What a node is called without its number."""
    return node.name.rstrip("_0123456789")


def line_of(node: fx.Node) -> tuple[str, str]:
    """The function in which a node was traced, and its line as ``file:number``."""
    stack = places(node)
    return (stack[-1][2], f"{stack[-1][0]}:{stack[-1][1]}") if stack else ("", "source unknown")
