"""Replace the matched layers of a Dynamo graph by ``torch.ops.moeblaze``, and report what was found.

``rewrite_graph`` is the entry. It visits the bodies of higher-order operators (activation checkpointing) too, changes
nothing that was not proven, and finds nothing when run again.
"""

import logging
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from moeblaze_ops.arguments.validation import require
from moeblaze_ops.kernels.devices import capability, why_no_kernels
from moeblaze_ops.lowering.graph.effects import has_effect
from moeblaze_ops.lowering.graph.fake_values import fake_of, storage_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, graph_modules, target_name
from moeblaze_ops.lowering.graph.model_state import mark_state_in_bodies
from moeblaze_ops.lowering.graph.sizes import same_size, settling, size_of
from moeblaze_ops.lowering.match.internal_errors import tolerate
from moeblaze_ops.lowering.match.match_result import Decline, MoEMatch
from moeblaze_ops.lowering.match.matcher import Matcher, view_of
from moeblaze_ops.lowering.match.operands.find_operands import Operand
from moeblaze_ops.lowering.match.operands.specialized_sizes import SymbolicSizes, specialize
from moeblaze_ops.lowering.match.reasons import Declined, Reason, prove
from moeblaze_ops.lowering.obligations.assertions import proven_assertions
from moeblaze_ops.lowering.obligations.checked_ids import assert_in_range, checked_ids
from moeblaze_ops.lowering.obligations.known_sizes import known_sizes
from moeblaze_ops.lowering.rewrite.insert_ops import insert_layer_ops
from moeblaze_ops.lowering.rewrite.inserter import Inserter
from moeblaze_ops.lowering.rewrite.kept_rows import hold_kept
from moeblaze_ops.lowering.rewrite.parts import has_parts, hold_parts
from moeblaze_ops.lowering.rewrite.repeated_regions import renamed_by_calls
from moeblaze_ops.lowering.rewrite.result_layout import has_strides_of, laid_out, no_holes
from moeblaze_ops.lowering.rewrite.rows_that_stay import hold_what_stays
from moeblaze_ops.lowering.rewrite.sharded import drop_unread_gathers, join_gathers, meet_before_gathers
from moeblaze_ops.lowering.router.match_router import RouterMatch, match_router
from moeblaze_ops.lowering.statement.certify import refusal
from moeblaze_ops.lowering.torch_internals.callers import module_path_of, places
from moeblaze_ops.lowering.torch_internals.frames import counters
from moeblaze_ops.lowering.torch_internals.graphs import is_in_order
from moeblaze_ops.lowering.undoable_edits import Edits
from moeblaze_ops.ops import direct

log = logging.getLogger(__name__)

_ONE_A_LAYER = frozenset(f"moeblaze::{name}" for name in ("expert_down", "expert_mlp", "expert_mlp_chunked", "expert_mlp_ranged"))


@dataclass(frozen=True)
class Candidate:
    """One layer that was looked at.

    ``became`` is the text of what replaced it; ``reason`` (a name of `reasons.Reason`) and ``detail`` say why it was
    left alone. Sizes are ints, or text for symbolic ones. ``copied_bytes`` of separate expert weights are joined by a copy in
    forward, and again in backward.
    """

    module_path: str
    source: str
    became: str | None = None
    reason: str | None = None
    meaning: str = ""
    detail: str = ""
    spelling: str = ""
    activation: str = ""
    T: int | str | None = None
    K: int | None = None
    E: int | None = None
    D: int | None = None
    F: int | None = None
    dtype: torch.dtype | None = None
    copied_bytes: int = 0


@dataclass
class RewriteReport:
    """What became of every candidate of one graph, bodies of higher-order operators included."""

    candidates: list[Candidate] = field(default_factory=list)
    direct: list[str] = field(default_factory=list)
    """The modules of layers that call the operators themselves."""
    runs: list = field(default_factory=list)
    """For what the code made of the graph was run, as far as it is noted."""

    @property
    def rewritten(self) -> list[Candidate]:
        return [c for c in self.candidates if c.reason is None]

    @property
    def declined(self) -> list[Candidate]:
        return [c for c in self.candidates if c.reason is not None]


def rewrite_graph(gm: fx.GraphModule) -> RewriteReport:
    """Rewrite every proven layer of ``gm`` and its bodies in place.

    Args:
        gm: a graph as Dynamo captured it: torch-level nodes, fakes in ``meta["example_value"]``.

    Returns:
        Every candidate in graph order. Also counted in ``torch._dynamo.utils.counters["moeblaze"]`` (``rewritten``, and
        ``declined_<reason>``) and logged at info level, below ``moeblaze_ops``. An error of our own leaves the graph,
        or the body, as it was; its layers are then declined as ``INTERNAL``.

    Raises:
        Exception: such an error, where ``config.strict`` is set.
    """
    report = RewriteReport()
    modules = graph_modules(gm)
    for module in modules:
        mark_state_in_bodies(module.graph)
        before, direct = len(report.candidates), len(report.direct)
        _rewrite_one(module, report)
        found, called = report.candidates[before:], report.direct[direct:]
        for named_as in renamed_by_calls(modules, module):
            report.candidates += [replace(candidate, module_path=named_as(candidate.module_path)) for candidate in found]
            report.direct += map(named_as, called)
    return report


def _rewrite_one(gm: fx.GraphModule, report: RewriteReport) -> None:
    if not is_in_order(gm.graph):
        return
    report.direct += map(module_path_of, filter(_is_direct_layer, gm.graph.nodes))
    join_gathers(gm.graph)
    _erase_unread(gm.graph)
    results: list[MoEMatch | Decline] = []
    edits = Edits(gm.graph)
    _hold_numbers(edits)
    try:
        view, sizes, (results, views) = _search(edits)
        with settling(sizes):
            matched = [result for result in results if isinstance(result, MoEMatch)]
            inside = {node for match in matched for node in match.region.nodes if node is not match.root}
            assert inside.isdisjoint(match.root for match in matched), "a layer ends inside of another"
            routers = {match.root: match_router(views[match.root], match) for match in matched}
        proven = proven_assertions(view) if matched else set()
        with settling(sizes):
            candidates = [_replaced(edits, result, routers.get(result.root)) for result in results]
            layers = [r for r, c in zip(results, candidates, strict=True) if isinstance(r, MoEMatch) and c.reason is None]
            _assert_ids(edits, layers, views)
        if edits.mark():
            gm.graph.lint()
        dead = _dead(gm.graph, layers, proven if layers else set())
    except Exception as error:
        edits.undo()
        detail = tolerate(error)
        candidates = [_declined(decline) for decline in _failed(gm.graph, results, detail)]
    else:
        _erase(gm, dead)
        _erase_unread(gm.graph)
    meet_before_gathers(gm.graph)
    for candidate in candidates:
        report.candidates.append(candidate)
        counters["moeblaze"]["rewritten" if candidate.reason is None else f"declined_{candidate.reason}"] += 1
        left = f"left alone, {candidate.reason}: {candidate.detail}"
        outcome = left if candidate.reason else f"rewritten to {candidate.became}"
        log.info("%s (%s): %s", candidate.module_path, candidate.source, outcome)


def _hold_numbers(edits: Edits) -> None:
    """Insert tensors of the numbers that the program may change, which operators read where an activation has one.

        F.silu(h) * (self.scale / self.steps)           # from the second value of ``scale`` on
    """
    floats = [node for node in edits.graph.nodes if isinstance(fake_of(node), torch.SymFloat)]
    numbers = [node for node in floats if not free_unbacked_symbols(fake_of(node))]
    sources = {source for node in numbers for source in node.all_input_nodes}
    inputs = [fake_of(node) for node in edits.graph.find_nodes(op="placeholder") if node not in sources]
    tensors = [fake for fake in inputs if isinstance(fake, torch.Tensor)]
    device = next((fake.device for fake in tensors if fake.device.type != "cpu"), "cpu")
    dtype = torch.float64 if any(fake.dtype == torch.float64 for fake in tensors) else torch.float32
    for node, name in product(numbers, ("mul", "div")):
        insert = Inserter(edits, node)
        # A product with a tensor, and a quotient, are what AOTAutograd takes for a number that need not be guarded.
        insert.call(name, insert.call(torch.ones, (), dtype=dtype, device=device), node)


def _erase_unread(graph: fx.Graph) -> None:
    """Erase operators whose tensors nobody reads, which are no users of what a layer computes: compilers drop them anyway.

    y = expert(x); y != 0; out += share * y                 torch.rand_like(y) stays: it draws numbers
    """
    for node in reversed(graph.nodes):
        if node.users or not target_name(node) or has_effect(node) or node.meta.get("unbacked_bindings"):
            continue
        if all(isinstance(value, torch.Tensor) for value in tree_leaves(fake_of(node))):
            graph.erase_node(node)


def _is_direct_layer(node: fx.Node) -> bool:
    """True if ``moe`` made the node and a layer has one such: what a rewrite inserts stands where the layer's own code does.

    moe(x, weights, experts, w_up, w_down)      expert_down, in ``direct.call``; expert_up, dispatch: no
    """
    is_one = isinstance(node.target, torch._ops.OpOverload) and node.target.name() in _ONE_A_LAYER
    return is_one and any(file == direct.__file__ for file, *_ in places(node))


def _search(edits: Edits) -> tuple[GraphView, dict, tuple]:
    """As ``_looked_through``, which looks again if layers may be added to parts of buffers."""
    mark = edits.mark()
    found = view, _, (results, _) = _looked_through(edits)
    ends = [(result, end) for result in results for end in (result.root, *result.root.users) if end in view.writes]
    targets = [view.writes[end] for result, end in ends if isinstance(result, Decline) or not no_holes(fake_of(view.writes[end]))]
    filled = {storage_of(target): None for target in targets if storage_of(target) is not None and has_parts(view, target)}
    buffers: dict[int | None, None] = {}
    while filled != buffers:
        buffers = filled
        edits.undo(mark)
        held = hold_parts(edits, buffers)
        found = view, _, (results, _) = _looked_through(edits)
        roots = [result.root for result in results if isinstance(result, MoEMatch)]
        filled = {held[part]: None for root in roots if (part := storage_of(view.writes.get(root, root))) in held}
    return found


def _looked_through(edits: Edits) -> tuple[GraphView, dict, tuple]:
    """A view of the graph, sizes that only the data tell, and the matches; a layer's widths and K are guarded on the way."""
    hold_kept(edits)
    hold_what_stays(edits)
    graph = edits.graph
    while True:
        view = view_of(graph)
        sizes = known_sizes(view)
        try:
            with settling(sizes):
                return view, sizes, _matches(view_of(graph) if sizes else view)
        except SymbolicSizes as symbolic:
            specialize(symbolic.sizes)


def _matches(view: GraphView) -> tuple[list[MoEMatch | Decline], dict[fx.Node, GraphView]]:
    """Layers and failed attempts in graph order, and the view of the graph that each was found in."""
    results: list[MoEMatch | Decline] = []
    views: dict[fx.Node, GraphView] = {}
    for one in [view, view.of_numbers] if any(map(view.is_gradient_off, view.position)) else [view]:
        found = Matcher(one, refusal, results).matches()
        results += found
        views |= {result.root: one for result in found}
    return sorted(results, key=lambda result: view.position[result.root]), views


def _failed(graph: fx.Graph, results: list[MoEMatch | Decline], detail: str) -> list[Decline]:
    """What becomes of the results where something went wrong: no layer of the graph is rewritten."""
    somewhere = next((node for node in graph.nodes if _source(node)), graph.output_node())
    roots = [result.root for result in results if isinstance(result, MoEMatch)] or [somewhere]
    internal = [Decline(root, root, Reason.INTERNAL, detail) for root in roots]
    return [*(result for result in results if isinstance(result, Decline)), *internal]


def _declined(result: Decline) -> Candidate:
    at = result.node if _source(result.node) else result.root
    return Candidate(
        module_path_of(result.root), _source(at), reason=result.reason.name, meaning=result.reason.value,
        detail=result.detail, dtype=getattr(fake_of(result.root), "dtype", None),
    )  # fmt: skip


def _rewritten(result: MoEMatch, became: str) -> Candidate:
    return Candidate(
        module_path=module_path_of(result.root),
        source=_source(result.root),
        became=became,
        spelling=result.spelling,
        activation=result.activation,
        T=result.T if isinstance(result.T, int) else str(result.T),
        K=result.K,
        E=result.E,
        D=result.D,
        F=result.F,
        dtype=result.dtype,
        copied_bytes=result.copied_bytes,
    )


def _source(node: fx.Node) -> str:
    """``file:line`` of the user's code that made a node."""
    stack = places(node)
    return f"{stack[-1][0]}:{stack[-1][1]}" if stack else ""


def _replaced(edits: Edits, result: MoEMatch | Decline, router: RouterMatch | None) -> Candidate:
    """Put the ops in place of a match; nothing is changed if they do not take its operands."""
    if isinstance(result, Decline):
        return _declined(result)
    mark, insert = edits.mark(), Inserter(edits, result.root, result.copied)
    device = fake_of(result.x.node).device
    autocast_off = insert.without_autocast(device.type) if result.region.in_autocast else nullcontext()
    try:
        lacks = why_no_kernels(device, capability(device)) if device.type == "cuda" else None
        prove(lacks is None, Reason.OPERANDS, lacks or "")
        with autocast_off:
            out, became = insert_layer_ops(insert, result, router)
        copied = _redirect(edits, result, insert, out)
    except Declined as declined:
        edits.undo(mark)
        return _declined(Decline(result.root, declined.node or result.root, declined.reason, declined.detail))
    except (TypeError, ValueError, NotImplementedError) as error:
        edits.undo(mark)
        return _declined(Decline(result.root, result.root, Reason.OPERANDS, str(error)))
    return _rewritten(result, f"{became} -> a copy in the strides of the result" if copied else became)


def _assert_ids(edits: Edits, layers: list[MoEMatch], views: dict[fx.Node, GraphView]) -> None:
    """Assert what the operators of replaced layers check of ids."""
    for layer in layers:
        for checked in checked_ids(views[layer.root], layer.region.nodes):
            assert_in_range(edits, checked)


def _redirect(edits: Edits, match: MoEMatch, insert: Inserter, out: fx.Node) -> bool:
    """Whoever reads the old result after the root reads the new one; whether that had to be copied to have the same strides."""
    if match.base is not None:
        out = insert.call(torch.add, insert.rows(Operand(match.base, fake_of(match.base).dtype), match.out_width), out)
    inserted = set(insert.nodes)
    result: fx.Node | None = None
    copied = False

    def successor(carrier: fx.Node) -> fx.Node:
        if result is None:
            return _in_shape(insert, out, match, carrier)
        shaped = _in_shape(insert, result, match, carrier)  # a view of the first, as the buffers were views of one another
        prove(has_strides_of(shaped, carrier), Reason.LAYOUT, "views of it have several", carrier)
        return shaped

    for carrier in match.region.carriers:
        readers = [u for u in edits.holder(carrier).users if match.root < u and u not in inserted]
        if not readers:
            edits.succeed(carrier, partial(successor, carrier))  # where a layer behind this one may find its tokens
            continue
        if result is None:
            rows = successor(carrier)
            result = laid_out(insert, rows, carrier)
            copied = result is not rows
        edits.redirect(readers, carrier, successor(carrier))
    return copied


def _in_shape(insert: Inserter, out: fx.Node, match: MoEMatch, carrier: fx.Node) -> fx.Node:
    shape, wanted = (tuple(map(size_of, fake_of(node).shape)) for node in (out, carrier))
    alike = len(shape) == len(wanted) and (len(shape) == 2 or all(map(same_size, shape, wanted)))
    return out if alike else _unflattened(insert, out, match, carrier)


def _unflattened(insert: Inserter, out: fx.Node, match: MoEMatch, carrier: fx.Node) -> fx.Node:
    """``out`` in the shape of ``carrier``, of which one size may follow from the others."""
    sizes = [size if isinstance(size, int) else _read_size(insert, match, size) for size in fake_of(carrier).shape]
    require(sizes.count(None) <= 1, "rewrite", "the result", "have sizes that the graph's inputs have", fake_of(carrier).shape)
    return insert.call("reshape", out, tuple(-1 if size is None else size for size in sizes))


def _read_size(insert: Inserter, match: MoEMatch, size: torch.SymInt) -> fx.Node | None:
    """A node that gives a symbolic size: an input that is that size, or an axis of one."""
    for node in (match.x.node, *match.x.node.graph.find_nodes(op="placeholder")):
        fake = fake_of(node)
        if isinstance(fake, torch.SymInt) and same_size(size_of(fake), size_of(size)):
            return node
        for axis, extent in enumerate(fake.shape if isinstance(fake, torch.Tensor) else ()):
            if same_size(size_of(extent), size_of(size)):
                return insert.call(torch.ops.aten.sym_size.int, node, axis)
    return None


def _dead(graph: fx.Graph, replaced: list[MoEMatch], proven: set[fx.Node]) -> list[fx.Node]:
    """The regions as far as nobody else uses them, and assertions that are ``proven``, of numbers that nobody else uses."""
    own = set().union(*(match.region.nodes for match in replaced))
    dead = own | proven
    read = {operand for node in proven for operand in node.all_input_nodes}
    for node in reversed(graph.nodes):
        if node in read and node.op in ("call_function", "call_method") and dead.issuperset(node.users) and not has_effect(node):
            dead.add(node)
            read.update(node.all_input_nodes)
    for node in graph.nodes:
        if node not in dead and _is_plumbing(node) and any(n in dead for n in node.all_input_nodes):
            dead.add(node)
    while kept := {n for n in dead if not dead.issuperset(n.users) or (n not in own and _reads_other_sizes(n, dead))}:
        dead -= kept
    return [node for node in graph.nodes if node in dead]


def _erase(gm: fx.GraphModule, dead: list[fx.Node]) -> None:
    for node in reversed(dead):
        gm.graph.erase_node(node)
    if dead:
        drop_unread_gathers(gm.graph)
        gm.recompile()


def _reads_other_sizes(node: fx.Node, dead: set[fx.Node]) -> bool:
    """True if a node reads a number, or a tensor of a size, that only the data tell and that stays."""
    fakes = (fake for operand in node.all_input_nodes if operand not in dead for fake in tree_leaves(fake_of(operand)))
    return any(isinstance(fake, (torch.Tensor, torch.SymInt, torch.SymBool)) and free_unbacked_symbols(fake) for fake in fakes)


def _is_plumbing(node: fx.Node) -> bool:
    """True if a node reads a part of a result, or sizes, as ``rows.size()`` does of all axes."""
    if node.op not in ("call_function", "call_method"):
        return False
    fake = fake_of(node)
    is_of_numbers = fake is not None and not any(isinstance(each, torch.Tensor) for each in tree_leaves(fake))
    return target_name(node) == "getitem" or is_of_numbers
