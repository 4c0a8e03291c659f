"""Replace the matched layers of a Dynamo graph by ``torch.ops.moeblaze``, and report what was found.

``rewrite_graph`` is the entry. It visits the bodies of higher-order operators (activation checkpointing) too, changes
nothing that was not proven, and finds nothing when run again.
"""

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import moeblaze_ops.dispatch
import moeblaze_ops.expert_mlp
import moeblaze_ops.experts_down
import moeblaze_ops.experts_up
import moeblaze_ops.routing  # noqa: F401
from moeblaze_ops import config
from moeblaze_ops.activations import is_gated
from moeblaze_ops.lowering.inductor_api import counters
from moeblaze_ops.lowering.layouts import WeightView
from moeblaze_ops.lowering.match import Decline, Matcher, MoEMatch
from moeblaze_ops.lowering.operands import Operand
from moeblaze_ops.lowering.patterns_activation import emit
from moeblaze_ops.lowering.patterns_router import RouterMatch, match_router
from moeblaze_ops.lowering.reasons import Reason
from moeblaze_ops.lowering.values import fake_of, target_name
from moeblaze_ops.memory import KEEP, LayerSizes, choose_keep
from moeblaze_ops.validation import require

log = logging.getLogger("moeblaze")

_ops = torch.ops.moeblaze


@dataclass(frozen=True)
class Candidate:
    """One layer that was looked at.

    ``became`` is the text of what replaced it; ``reason`` (a name of `reasons.Reason`) and ``detail`` say why it was
    left alone. Sizes are ints, or text for symbolic ones.
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
    stacked_copy: bool = False


@dataclass
class RewriteReport:
    """What became of every candidate of one graph, bodies of higher-order operators included."""

    candidates: list[Candidate] = field(default_factory=list)

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
        ``declined_<reason>``) and logged at debug level by the logger ``moeblaze``.
    """
    report = RewriteReport()
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            _rewrite_one(module, report)
    return report


def _rewrite_one(gm: fx.GraphModule, report: RewriteReport) -> None:
    matcher = Matcher(gm.graph)
    results = matcher.matches()
    routers = {result.root: match_router(matcher.view, result) for result in results if isinstance(result, MoEMatch)}
    for result in results:
        if isinstance(result, MoEMatch):
            became = _replace(gm.graph, result, routers[result.root])
            result = became if isinstance(became, Decline) else result
        candidate = _declined(result) if isinstance(result, Decline) else _rewritten(result, became)
        report.candidates.append(candidate)
        counters["moeblaze"]["rewritten" if candidate.reason is None else f"declined_{candidate.reason}"] += 1
        outcome = candidate.became or f"{candidate.reason}: {candidate.detail}"
        log.debug("%s (%s): %s", candidate.module_path, candidate.source, outcome)
    if any(isinstance(result, MoEMatch) for result in results):
        gm.graph.lint()
        gm.recompile()


def _declined(result: Decline) -> Candidate:
    at = result.node if _source(result.node) else result.root
    return Candidate(
        _module_path(result.root), _source(at), reason=result.reason.name, meaning=result.reason.value,
        detail=result.detail, dtype=getattr(fake_of(result.root), "dtype", None),
    )  # fmt: skip


def _rewritten(result: MoEMatch, became: str) -> Candidate:
    return Candidate(
        module_path=_module_path(result.root),
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
        stacked_copy=result.stacked_copy,
    )


def _source(node: fx.Node) -> str:
    """``file:line`` of the user's code that made a node."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    file, line = lines[-1].split('"')[1], lines[-1].split("line ")[1].split(",")[0]
    return f"{file}:{line}"


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return paths[-1] if paths else ""


class _Inserter:
    """Adds nodes after one node, each with the fake value that it gives."""

    def __init__(self, graph: fx.Graph, after: fx.Node):
        self._graph, self._after, self._meta = graph, after, after.meta
        self.nodes: list[fx.Node] = []
        fakes = (fake_of(node) for node in graph.nodes)
        self._mode = next(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))

    def call(self, target: Callable | str, *args: Any, **kwargs: Any) -> fx.Node:
        with self._graph.inserting_after(self._after):
            create = self._graph.call_method if isinstance(target, str) else self._graph.call_function
            node = create(target, args, kwargs)
        self.nodes.append(node)
        fakes = fx.node.map_arg(args, fake_of)
        function = getattr(torch.Tensor, target) if isinstance(target, str) else target
        with self._mode:
            node.meta["example_value"] = function(*fakes, **kwargs)
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self._meta:
                node.meta[key] = self._meta[key]
        self._after = node
        return node

    def items(self, node: fx.Node, count: int) -> list[fx.Node]:
        return [self.call(operator.getitem, node, i) for i in range(count)]

    def weight(self, view: WeightView) -> fx.Node:
        """The tensor that the ops take, by views of the stored one (and a stack of separate ones)."""
        stored = [self._viewed(node, view) for node in view.nodes]
        tensor = self.call(torch.stack, stored) if view.stacked else stored[0]
        if view.half is not None:
            tensor = self.call("narrow", tensor, 1, view.half, 1)
        return self.call("to", tensor, view.dtype) if view.cast else tensor

    def _viewed(self, node: fx.Node, view: WeightView) -> fx.Node:
        if tuple(fake_of(node).shape) != view.sizes:
            node = self.call("reshape", node, view.sizes)
        if view.order != tuple(range(len(view.order))):
            node = self.call("permute", node, view.order)
        return node

    def rows(self, operand: Operand, width: int) -> fx.Node:
        """An operand as ``[T, width]`` in the dtype it is used in."""
        node, fake = operand.node, fake_of(operand.node)
        if fake.dim() != 2 or fake.shape[1] != width:
            node = self.call("reshape", node, (-1, width))
        return node if fake.dtype == operand.dtype else self.call("to", node, operand.dtype)


def _replace(graph: fx.Graph, match: MoEMatch, router: RouterMatch | None) -> Decline | str:
    """Put the ops in place of a match, and say which; nothing is changed if they do not take its operands."""
    insert = _Inserter(graph, match.root)
    try:
        out, became = _insert_ops(insert, match, router)
    except (TypeError, ValueError, NotImplementedError) as error:
        for node in reversed(insert.nodes):
            graph.erase_node(node)
        return Decline(match.root, match.root, Reason.OPERANDS, str(error))
    _redirect(graph, match, insert, out)
    _erase(graph, match)
    return became


def _insert_ops(insert: "_Inserter", match: MoEMatch, router: RouterMatch | None) -> tuple[fx.Node, str]:
    x_TD = insert.rows(match.x, match.D)
    weights_TK, experts_TK = _routing_operands(insert, match, router)
    w_up = [insert.weight(view) for view in match.w_up]
    b_up = [insert.weight(view) for view in match.b_up]
    w_down = [insert.weight(match.w_down)]
    b_down = [insert.weight(match.b_down)] if match.b_down is not None else []
    routing = insert.items(insert.call(_ops.dispatch.default, experts_TK, match.E), 4)
    if _keeps_input(match, fake_of(x_TD)):
        became = f"expert_mlp({match.activation})"
        parameters = (w_up, b_up, w_down, b_down, weights_TK)
        out = insert.call(
            _ops.expert_mlp.default, x_TD, *parameters, *routing, match.activation, match.weights_on_input
        )
        return _in_result_dtype(insert, match, out), became
    up_weights, down_weights = (weights_TK, None) if match.weights_on_input else (None, weights_TK)
    became = f"expert_up({match.activation}) -> expert_down"
    up = insert.call(_ops.expert_up.default, x_TD, w_up, b_up, up_weights, *routing, match.activation)
    h_NGF, a_NF = insert.items(up, 2)
    if match.formula is not None:
        h_NGF, a_NF = _activated(insert, match, h_NGF), None
        became = "expert_up -> unfused activation -> expert_down"
    out = insert.call(_ops.expert_down.default, h_NGF, a_NF, w_down, b_down, down_weights, *routing, match.activation)
    return _in_result_dtype(insert, match, out), became


def _in_result_dtype(insert: "_Inserter", match: MoEMatch, out: fx.Node) -> fx.Node:
    result = fake_of(match.region.carriers[0])
    return out if result.dtype == match.dtype else insert.call("to", out, result.dtype)


def _keeps_input(match: MoEMatch, x_TD: torch.Tensor) -> bool:
    """Whether the layer becomes one op that leaves no pre-activation behind, as ``moe`` decides it for ``config.keep``."""
    keep = config.keep
    require(keep in KEEP, "rewrite", "config.keep", f"be one of {', '.join(KEEP)}", repr(keep))
    if match.formula is not None:
        return False  # it is computed on the pre-activation
    if not torch.is_grad_enabled():
        return True
    if keep != "auto":
        return keep == "input"
    if free_unbacked_symbols(x_TD):
        return False
    gated = is_gated(match.activation)
    sizes = LayerSizes(D=match.D, F=match.F, E=match.E, K=match.K, dtype=match.dtype, gated=gated)
    return choose_keep(x_TD.shape[0], sizes, x_TD.device) == "input"


def _routing_operands(insert: "_Inserter", match: MoEMatch, router: RouterMatch | None) -> tuple[fx.Node | None, fx.Node]:
    """Routing weights and expert ids: those of the graph, or of the fused router in its place."""
    if router is None:
        weights_TK = insert.rows(match.weights, match.K) if match.weights is not None else None
        return weights_TK, insert.rows(match.experts, match.K)
    logits = fake_of(router.logits)
    logits_TE = insert.rows(Operand(router.logits, logits.dtype), logits.shape[-1])
    options = (router.scoring, router.renormalize, router.scale, 1, 1)
    routed = insert.call(_ops.route.default, logits_TE, None, match.K, *options)
    weights_TK, experts_TK = insert.items(routed, 2)
    for dtype in (fake_of(match.weights.node).dtype, match.weights.dtype):
        if fake_of(weights_TK).dtype != dtype:
            weights_TK = insert.call("to", weights_TK, dtype)
    return weights_TK, experts_TK


def _activated(insert: _Inserter, match: MoEMatch, h_NGF: fx.Node) -> fx.Node:
    """The user's own pointwise functions on the rows of the pre-activation, ``[N, 1, F]``."""
    wide = match.dtype if match.dtype.itemsize >= 4 else torch.float32
    rows = h_NGF if wide == match.dtype else insert.call("to", h_NGF, wide)
    halves = {symbol: insert.call("select", rows, 1, i) for i, symbol in enumerate(match.symbols)}
    activated = emit(match.formula, halves, insert.call, {})
    activated = activated if wide == match.dtype else insert.call("to", activated, match.dtype)
    return insert.call("unsqueeze", activated, 1)


def _redirect(graph: fx.Graph, match: MoEMatch, insert: _Inserter, out: fx.Node) -> None:
    """Whoever reads the old result after the root reads the new one."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    after = order[match.root]
    inserted = set(insert.nodes)
    for carrier in match.region.carriers:
        readers = [u for u in carrier.users if order[u] > after and u not in inserted]
        if readers:
            replacement = out if fake_of(carrier).dim() == 2 else _unflattened(insert, out, match, carrier)
            for reader in readers:
                reader.replace_input_with(carrier, replacement)


def _unflattened(insert: _Inserter, out: fx.Node, match: MoEMatch, carrier: fx.Node) -> fx.Node:
    sizes = []
    for axis, size in enumerate(fake_of(carrier).shape):
        known = isinstance(size, int)
        sizes.append(size if known else insert.call(torch.ops.aten.sym_size.int, match.x.node, axis))
    return insert.call("reshape", out, tuple(sizes))


_ASSERTS = frozenset((
    "_assert_scalar", "_assert_async", "sym_constrain_range_for_size", "sym_constrain_range", "_check", "_check_is_size",
))  # fmt: skip


def _erase(graph: fx.Graph, match: MoEMatch) -> None:
    """Erase the region as far as nobody else uses it, with the assertions about its data-dependent sizes."""
    dead = set(match.region.nodes)
    for node in graph.nodes:
        if node not in dead and _is_plumbing(node) and any(n in dead for n in node.all_input_nodes):
            dead.add(node)
    own = set(match.region.nodes)
    while kept := {n for n in dead if any(u not in dead for u in n.users) or _lost_its_input(n, dead, own)}:
        dead -= kept
    for node in reversed(list(graph.nodes)):
        if node in dead:
            graph.erase_node(node)


def _lost_its_input(node: fx.Node, dead: set[fx.Node], own: set[fx.Node]) -> bool:
    return node not in own and not any(n in dead for n in node.all_input_nodes)


def _is_plumbing(node: fx.Node) -> bool:
    """Reads a size or a part of a result, or asserts something about one."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = target_name(node)
    tensor = isinstance(fake_of(node), (torch.Tensor, tuple, list))
    return name in _ASSERTS or name == "getitem" or (not tensor and fake_of(node) is not None)
