"""A rewrite small enough to test the switch with: ``tanh(x @ w)`` and a loop over masked experts become toy ops."""

import sys
from dataclasses import dataclass, field
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import fx, nn


@dataclass(frozen=True)
class Candidate:
    spelling: str
    module_path: str
    source: str
    became: str | None = None
    reason: str | None = None
    meaning: str = ""
    detail: str = ""
    copied_bytes: int = 0
    K: int | None = None
    E: int | None = None
    D: int | None = None
    F: int | None = None


@dataclass(frozen=True)
class Report:
    """What ``lowering.rewrite.RewriteReport`` says, as far as the switch and ``explain`` read it."""

    candidates: tuple[Candidate, ...]
    direct: tuple[str, ...] = ()
    runs: list = field(default_factory=list)

    @property
    def rewritten(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.reason is None]

    @property
    def declined(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.reason is not None]


def tanh_layer(x, w):
    return torch.tanh(x @ w)


class LoopMoE(nn.Module):
    """Experts in a loop that selects tokens by ``torch.where``: the spelling that Dynamo does not capture by default."""

    def __init__(self, D: int = 8, E: int = 3, K: int = 2, activation=torch.relu):
        super().__init__()
        self.K = K
        self.activation = activation
        self.gate = nn.Parameter(torch.randn(D, E))
        self.w_EDD = nn.Parameter(torch.randn(E, D, D))

    def forward(self, x_TD):
        weights_TK, experts_TK = torch.topk(F.softmax(x_TD @ self.gate, -1), self.K, dim=-1)
        out_TD = torch.zeros_like(x_TD)
        for e in range(self.w_EDD.shape[0]):
            tokens, choices = torch.where(experts_TK == e)
            hidden = self.activation(x_TD[tokens] @ self.w_EDD[e])
            out_TD.index_add_(0, tokens, hidden * weights_TK[tokens, choices, None])
        return out_TD


def _loop(x_TD, weights_TK, experts_TK, w_EDD):
    out_TD = torch.zeros_like(x_TD)
    for e in range(w_EDD.shape[0]):
        share_T1 = (weights_TK * (experts_TK == e)).sum(-1, keepdim=True)
        out_TD = out_TD + torch.relu(x_TD @ w_EDD[e]) * share_T1
    return out_TD


def define_ops() -> torch.library.Library:
    """The ops that the toy rewrite inserts; keep the result alive for as long as they are needed."""
    library = torch.library.Library("moeblaze_toys", "FRAGMENT")
    library.define("tanh_mm(Tensor x, Tensor w) -> Tensor")
    library.define("tanh_mm_backward(Tensor dy, Tensor y, Tensor x, Tensor w) -> (Tensor, Tensor)")
    library.define("loop(Tensor x, Tensor weights, Tensor experts, Tensor w) -> Tensor")
    library.impl("tanh_mm", tanh_layer, "CPU")
    library.impl("tanh_mm_backward", lambda dy, y, x, w: _tanh_gradients(dy, y, x, w), "CPU")
    library.impl("loop", _loop, "CPU")
    ops = torch.ops.moeblaze_toys

    def fake(name):
        return lambda function: torch.library.register_fake(f"moeblaze_toys::{name}", function, lib=library)

    fake("tanh_mm")(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
    fake("tanh_mm_backward")(lambda dy, y, x, w: (torch.empty_like(x), torch.empty_like(w)))
    fake("loop")(lambda x, weights, experts, w: torch.empty_like(x))
    torch.library.register_autograd(
        "moeblaze_toys::tanh_mm",
        lambda ctx, dy: ops.tanh_mm_backward(dy, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output, *inputs),
        lib=library,
    )
    return library


def _tanh_gradients(dy, y, x, w):
    inner = dy * (1 - y * y)
    return inner @ w.t(), x.t() @ inner


def rewrite_graph(gm: fx.GraphModule) -> Report:
    """Replace what matches, in place."""
    candidates = [*_rewrite_tanh(gm.graph), *_rewrite_loop(gm.graph)]
    gm.graph.lint()
    return Report(tuple(candidates))


def _rewrite_tanh(graph: fx.Graph):
    for node in graph.find_nodes(op="call_function", target=torch.tanh):
        product = node.args[0]
        if getattr(product.target, "__name__", "") != "matmul":
            continue
        candidate = _candidate("tanh", node, became="tanh_mm")
        _replace(graph, node, torch.ops.moeblaze_toys.tanh_mm.default, product.args)
        graph.erase_node(product)
        yield candidate


def _rewrite_loop(graph: fx.Graph):
    adds = graph.find_nodes(op="call_method", target="index_add_")
    if not adds:
        return
    if not graph.find_nodes(op="call_function", target=torch.relu):
        yield _candidate("loop", adds[-1], reason="ACTIVATION", meaning="not a fused one", detail="sigmoid")
        return
    yield _candidate("loop", adds[-1], became="loop op")
    x_TD = adds[0].args[0].args[0]
    w_EDD = next(node for node in graph.nodes if "w_edd" in node.name.lower())
    topk = graph.find_nodes(op="call_function", target=torch.topk)[0]
    weights, experts = sorted(topk.users, key=lambda user: user.args[1])
    output = graph.output_node()
    with graph.inserting_before(output):
        new = graph.call_function(torch.ops.moeblaze_toys.loop.default, (x_TD, weights, experts, w_EDD))
    new.meta["example_value"] = x_TD.meta["example_value"]
    for target in {add.args[0] for add in adds} | set(adds):
        output.replace_input_with(target, new)
    for node in reversed(graph.nodes):
        # Assertions on the sizes keep what they look at alive.
        if not node.users and node.op in ("call_function", "call_method"):
            graph.erase_node(node)


def _candidate(spelling: str, node: fx.Node, **fields) -> Candidate:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return Candidate(spelling, stack[-1][0] if stack else "", f"line of {node.name}", **fields)


def _replace(graph: fx.Graph, node: fx.Node, target, args) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(target, args)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def install(monkeypatch) -> None:
    """Stand in for ``lowering/rewrite/rewrite.py``."""
    module = ModuleType("moeblaze_ops.lowering.rewrite.rewrite")
    module.rewrite_graph = rewrite_graph
    monkeypatch.setitem(sys.modules, module.__name__, module)
