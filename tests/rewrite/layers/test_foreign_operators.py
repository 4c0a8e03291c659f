"""Operators are known by identity: what only has the name of one is opaque, and stays."""

import functools
import operator
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.effects import has_effect
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, inplace_name, target_name, written_nodes
from moeblaze_ops.lowering.graph.operators import operator_name
from moeblaze_ops.lowering.rewrite.rewrite import rewrite_graph
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import assert_replaced, check_against_eager, compiled

_LIBRARY = torch.library.Library("namesake", "DEF")


@functools.cache
def _operator(name: str) -> torch._ops.OpOverloadPacket:
    """An operator that is not torch's, with a name that one of torch's has."""
    _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    return getattr(torch.ops.namesake, name)


def _function(name: str, wrapped=None):
    """A function of the user with a name that one of torch's has, and all else that can be taken over from it."""

    def function(*args, **kwargs):
        return torch.tanh(args[0]) * 3

    if wrapped is not None:
        functools.update_wrapper(function, wrapped)
    function.__name__ = function.__qualname__ = name
    return function


def _graph_of(target) -> tuple[torch.fx.Graph, torch.fx.Node]:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(target, (x,))
    x.meta["example_value"] = y.meta["example_value"] = torch.randn(4, 6)
    graph.output(y)
    return graph, y


def test_foreign_operators_are_opaque():
    for name in TABLE:
        is_method = name.startswith("__") or "." in name  # no operator has such a name
        operators = () if is_method else (_operator(name), _operator(name).default)
        for target in (*operators, _function(name)):
            graph, node = _graph_of(target)
            assert target_name(node) == "" and inplace_name(node) is None, name
            assert GraphView(graph, TABLE).value(node).op == "opaque", name


@pytest.mark.parametrize("name", ["relu", "silu", "topk", "index_add_", "view", "add", "__rsub__", "mT", "softmax", "einsum"])
def test_torchs_own_operators_have_their_names(name):
    own = [getattr(home, name) for home in (F, torch, torch.ops.aten, operator) if callable(getattr(home, name, None))]
    method = torch.fx.Graph().call_method(name, ())
    assert [operator_name(_graph_of(target)[1]) for target in own] == [name] * len(own)
    assert operator_name(method) == (name if hasattr(torch.Tensor, name) else "")


def test_methods_that_a_user_adds_to_tensors_are_not_torchs(monkeypatch):
    graph, _ = _graph_of(F.silu)
    call = graph.call_method("silu", (next(iter(graph.nodes)),))
    assert target_name(call) == ""
    monkeypatch.setattr(torch.Tensor, "silu", _function("silu", F.silu), raising=False)
    assert target_name(call) == ""


def test_functions_that_take_the_place_of_torchs_are_not_torchs(monkeypatch):
    imitation = _function("silu", F.silu)
    imitation.__module__, imitation.__qualname__ = F.silu.__module__, F.silu.__qualname__
    assert operator_name(_graph_of(imitation)[1]) == ""
    monkeypatch.setattr(F, "silu", imitation)
    assert operator_name(_graph_of(imitation)[1]) == ""
    without_gradient = torch.no_grad()(imitation)  # written in torch, and computes what the user's function does
    monkeypatch.setattr(F, "silu", without_gradient)
    assert operator_name(_graph_of(without_gradient)[1]) == ""


def test_names_of_inputs_are_no_operators():
    graph = torch.fx.Graph()
    assert target_name(graph.placeholder("topk")) == target_name(graph.get_attr("softmax")) == ""


class _Tripled(torch.Tensor):
    """Tensors whose ``silu`` is another function."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, _, size, stride):
        return _Tripled(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, _, args=(), kwargs=None):
        inner = [arg.inner if isinstance(arg, _Tripled) else arg for arg in args]
        return _Tripled(torch.tanh(inner[0]) * 3 if function is torch.ops.aten.silu.default else function(*inner, **kwargs or {}))


def test_operators_on_a_class_that_computes_them_in_its_own_way_are_opaque():
    graph, node = _graph_of(F.silu)
    assert GraphView(graph, TABLE).value(node).op == "pointwise"
    for each in graph.nodes:
        each.meta["example_value"] = _Tripled(torch.randn(4, 6))
    assert target_name(node) == "" and GraphView(graph, TABLE).value(node).op == "opaque"


# What may write.


def _mutable(schema: str):
    name = schema.partition("(")[0]
    if not hasattr(torch.ops.namesake, name):
        _LIBRARY.define(schema)
    return getattr(torch.ops.namesake, name).default


@pytest.mark.parametrize("schema, writes", [
    ("fill_(Tensor(a!) x) -> Tensor(a!)", True),
    ("noted(Tensor(a!) x) -> ()", True),
    ("add_(Tensor x) -> Tensor", False),
])  # fmt: skip
def test_schemas_tell_what_foreign_operators_write(schema, writes):
    _, node = _graph_of(_mutable(schema))
    assert inplace_name(node) is None
    assert written_nodes(node) == (list(node.all_input_nodes) if writes else [])
    assert has_effect(node) == writes


def test_functions_of_the_user_may_write_what_they_are_given():
    _, node = _graph_of(_function("silu"))
    assert written_nodes(node) == list(node.all_input_nodes) and has_effect(node)


def _higher_order(target, body=None) -> tuple[torch.fx.GraphModule, torch.fx.Node]:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.randn(4, 6)
    bodies = () if body is None else (graph.get_attr("body"),)
    y = graph.call_function(target, (), {"kwargs": {"x": x}, "bodies": bodies})
    graph.output(y)
    return torch.fx.GraphModule(torch.nn.ModuleDict({} if body is None else {"body": body}), graph), x


def _body_that(step) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.randn(4, 6)
    graph.output(step(graph, x))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("target, step, writes", [
    ("triton_kernel_wrapper_mutation", None, True),
    ("flat_apply", None, True),
    ("tag_activation_checkpoint", lambda graph, x: graph.call_function(F.silu, (x,)), False),
    ("tag_activation_checkpoint", lambda graph, x: graph.call_method("add_", (x, 1)), True),
    ("tag_activation_checkpoint", lambda graph, x: graph.call_function(_function("silu"), (x,)), True),
], ids=["triton", "flat_apply", "body", "body that writes", "body of a function of the user"])  # fmt: skip
def test_higher_order_operators_write_what_their_bodies_do(target, step, writes):
    gm, x = _higher_order(getattr(torch.ops.higher_order, target), step and _body_that(step))
    (node,) = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert target_name(node) == ""
    assert written_nodes(node) == ([node for node in gm.graph.nodes if node.name == x.name] if writes else [])


def test_flattened_view_of_a_function_of_the_user_may_be_detached():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(_function("view"), (x,))
    graph.call_method("zero_", (y,))
    graph.output(x)
    x.meta["example_value"] = torch.randn(4, 6)
    y.meta["example_value"] = x.meta["example_value"].view(-1)
    view = GraphView(graph, TABLE)
    assert view.value_at(x, 10).op in ("opaque", "input")


# Layers with an operator of torch in them taken for a foreign one of the same name.


def _captured(module: nn.Module) -> torch.fx.GraphModule:
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(module, backend=keep, fullgraph=True)(torch.randn(10, zoo.D))
    return graphs[0]


_SPELLINGS_OF_A_NAME = 3
_foreign_in: Counter[str] = Counter()
"""In how many spellings a name was taken for a foreign operator's: after some, another shows nothing new."""


# Of all spellings of the zoo, those that have its operators between them.
@pytest.mark.parametrize("spelling", [
    zoo.masked_add_method, zoo.masked_addcmul, zoo.masked_scaled_tokens, zoo.loop_mixtral, zoo.loop_nonzero,
    zoo.loop_dense_scores, zoo.loop_deepseek, zoo.loop_scatter_add, zoo.loop_minimind, zoo.loop_flat_mask, zoo.loop_joined_slots,
    zoo.joined_hits, zoo.joined_slots, zoo.joined_unsort, zoo.joined_inverse, zoo.nonzero_loop, zoo.nonzero_where,
    zoo.nonzero_stored, zoo.dense_modules, zoo.dense_then_gather, zoo.stacked_loop, zoo.stacked_linear_loop,
    zoo.sorted_transformers, zoo.sorted_transformers_bias, zoo.sorted_index_add, zoo.sorted_rows,
], ids=lambda spelling: spelling.__name__)  # fmt: skip
def test_no_foreign_operator_is_ever_replaced(spelling):
    torch.manual_seed(0)
    name = spelling.__name__
    gm = _captured(zoo.stacked(name) if name in zoo.BY_NAME else zoo.separate(spelling))
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    others = ("", "sym_size", "_assert_scalar", "zeros")  # a buffer of which all is written may go
    names = [name for name in dict.fromkeys(target_name(node) for node in calls) if name not in others]
    for name in (name for name in names if _foreign_in[name] < _SPELLINGS_OF_A_NAME):
        _foreign_in[name] += 1
        graph = torch.fx.Graph(gm)
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        graph.output(graph.graph_copy(gm.graph, copies))
        own = next((node.target for node in calls if node.op == "call_function" and target_name(node) == name), None)
        foreign, target = [], _function(name, own)
        for node in calls:
            copy = copies[node]
            if target_name(node) == name and isinstance(fake_of(node), (torch.Tensor, tuple)):
                copy.op, copy.target = "call_function", target
                foreign.append(copy)
        rewrite_graph(torch.fx.GraphModule(gm, graph))
        left = set(graph.nodes)
        assert all(node in left for node in foreign), name


# Compiled as a user would.


@torch.library.custom_op("namesakes::silu", mutates_args=())
def _foreign_silu(x: torch.Tensor) -> torch.Tensor:
    return 3 * torch.tanh(x)


@_foreign_silu.register_fake
def _(x):
    return torch.empty_like(x)


_foreign_silu.register_autograd(
    lambda ctx, grad: grad * 3 * (1 - torch.tanh(ctx.saved_tensors[0]) ** 2),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.compiler.allow_in_graph
def silu(x):
    return 3 * torch.tanh(x)


@torch.library.custom_op("namesakes::topk", mutates_args=())
def _foreign_topk(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    best = scores.max(-1, keepdim=True)
    return best.values.repeat(1, k), best.indices.repeat(1, k)


@_foreign_topk.register_fake
def _(scores, k):
    return scores.new_empty(scores.shape[0], k), scores.new_empty(scores.shape[0], k, dtype=torch.int64)


@torch.library.custom_op("namesakes::index_add", mutates_args=())
def _foreign_index_add(x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return x.index_add(dim, index, 2 * source)


@_foreign_index_add.register_fake
def _(x, dim, index, source):
    return torch.empty_like(x)


@torch.library.custom_op("namesakes::add_", mutates_args=("x",))
def _foreign_add_(x: torch.Tensor, y: torch.Tensor) -> None:
    x.mul_(0.5)


@torch.library.custom_op("namesakes::scrub", mutates_args=("ids",))
def _scrub(ids: torch.Tensor) -> None:
    ids.zero_()


def _share(weights, ids, e):
    return (weights * (ids == e)).sum(-1, keepdim=True)


def custom_activation(self, x, weights, ids):
    silu = torch.ops.namesakes.silu
    return sum((silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] * _share(weights, ids, e) for e in range(self.E))


def allowed_activation(self, x, weights, ids):
    return sum((silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] * _share(weights, ids, e) for e in range(self.E))


def ids_that_repeat(self, x, weights, ids):
    with torch.no_grad():
        _, ids = torch.ops.namesakes.topk(self.router.gate(x), self.K)
    out = torch.zeros_like(x)
    for e in range(self.E):
        token, slot = torch.where(ids == e)
        out[token] += (F.silu(x[token] @ self.w1[e]) * (x[token] @ self.w3[e])) @ self.w2[e] * weights[token, slot, None]
    return out


def doubled_rows(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(self.E):
        token, slot = torch.where(ids == e)
        rows = (F.silu(x[token] @ self.w1[e]) * (x[token] @ self.w3[e])) @ self.w2[e] * weights[token, slot, None]
        out = torch.ops.namesakes.index_add(out, 0, token, rows)
    return out


def halved_buffer(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(self.E):
        out += (F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] * _share(weights, ids, e)
        torch.ops.namesakes.add_(out, x)
    return out


def scrubbed_ids(self, x, weights, ids):
    ids = ids.clone()
    first = (F.silu(x @ self.w1[0]) * (x @ self.w3[0])) @ self.w2[0] * _share(weights, ids, 0)
    torch.ops.namesakes.scrub(ids)
    others = range(1, self.E)
    return first + sum((F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] * _share(weights, ids, e) for e in others)


@pytest.mark.parametrize("spelling", [custom_activation, allowed_activation, ids_that_repeat, halved_buffer],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_layers_of_foreign_operators_stay(fp64, spelling):
    # Foreign operators without a formula for their gradient are no part of what is differentiated.
    backend = check_against_eager(zoo.StackedMoE(spelling, "split"), torch.randn(10, zoo.D))
    assert not backend.rewritten


def test_what_a_foreign_operator_writes_to_is_read_afterwards(fp64):
    """The first expert has other ids than the others, which are a layer."""
    (found,) = check_against_eager(zoo.StackedMoE(scrubbed_ids, "split"), torch.randn(10, zoo.D)).rewritten
    assert found.E == zoo.E - 1


def test_foreign_index_add_stays(fp64):
    layer, x = zoo.StackedMoE(doubled_rows, "split"), torch.randn(10, zoo.D)
    run, backend = compiled(layer)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        torch.testing.assert_close(run(x), layer(x))
    assert not backend.rewritten


def plain_activation(self, x, weights, ids):
    return sum((F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] * _share(weights, ids, e) for e in range(self.E))


def test_the_same_layer_of_torchs_operators_is_replaced(fp64):
    assert_replaced(check_against_eager(zoo.StackedMoE(plain_activation, "split"), torch.randn(10, zoo.D)))


def foreign_tokens(self, x, weights, ids):
    return plain_activation(self, torch.ops.namesakes.silu(x), weights, ids)


def test_tokens_of_a_foreign_operator_are_an_operand(fp64):
    backend = check_against_eager(zoo.StackedMoE(foreign_tokens, "split"), torch.randn(10, zoo.D))
    assert len(backend.rewritten) == 1 and "silu" in backend.operators()
