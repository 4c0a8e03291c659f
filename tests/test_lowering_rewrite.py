"""Rewritten graphs compute what eager computes, outputs and all gradients, and nothing of the old spelling is left."""

import logging

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from moeblaze_ops import config, memory, row_ranges
from moeblaze_ops.lowering.rewrite import rewrite_graph
from tests import moe_zoo as zoo
from tests.rewrite_harness import check_against_eager, compiled, rewrite_of

_OLD = {
    "where", "nonzero", "one_hot", "index_add", "index_add_", "iadd", "setitem", "scatter", "scatter_add", "argsort", "sort",
    "bincount", "histc", "cumsum", "_grouped_mm", "grouped_mm_fallback", "einsum", "bmm", "matmul", "silu",
    "_assert_scalar.default",
}  # fmt: skip
_CASES = {function.__name__: (function, storage, bias) for function, storage, bias in zoo.STACKED}


@pytest.fixture
def fp64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _stacked(name: str, **options) -> nn.Module:
    function, storage, bias = _CASES[name]
    return zoo.StackedMoE(function, storage, bias=bias, **options)


def _assert_replaced(backend) -> None:
    operators = backend.operators()
    layers = len(backend.rewritten)
    assert operators.count("dispatch.default") == layers > 0
    assert operators.count("expert_down.default") + operators.count("expert_mlp.default") == layers
    assert operators.count("expert_up.default") == operators.count("expert_down.default")
    assert not _OLD & set(operators), _OLD & set(operators)
    assert not backend.reasons


@pytest.mark.parametrize("shape", [(10,), (2, 5)], ids=["TD", "BSD"])
@pytest.mark.parametrize("combine", zoo.SEPARATE, ids=lambda f: f.__name__)
def test_separate_experts(fp64, combine, shape):
    if combine is zoo.masked_stack_einsum and len(shape) == 2:
        pytest.skip("written for [T, D]")
    _assert_replaced(check_against_eager(zoo.ModuleListMoE(combine), torch.randn(*shape, zoo.D)))


@pytest.mark.parametrize("num_tokens, top_k", [(7, 1), (1, 2), (1, 1)])
@pytest.mark.parametrize("combine", zoo.SEPARATE, ids=lambda f: f.__name__)
def test_few_rows(fp64, combine, num_tokens, top_k):
    layer = zoo.ModuleListMoE(combine, K=top_k)
    _assert_replaced(check_against_eager(layer, torch.randn(num_tokens, zoo.D)))


@pytest.mark.parametrize("combine", [zoo.masked_stack_einsum, zoo.loop_mistral], ids=lambda f: f.__name__)
def test_biased_ungated_experts(fp64, combine):
    layer = zoo.ModuleListMoE(combine, expert=zoo.PlainMLP)
    _assert_replaced(check_against_eager(layer, torch.randn(10, zoo.D)))


@pytest.mark.parametrize("shape", [(10,), (2, 5)], ids=["TD", "BSD"])
@pytest.mark.parametrize("name", _CASES)
def test_stacked_experts(fp64, name, shape):
    backend = check_against_eager(_stacked(name), torch.randn(*shape, zoo.D))
    _assert_replaced(backend)
    assert not any(candidate.copied_bytes for candidate in backend.rewritten)


@pytest.mark.parametrize("name", _CASES)
def test_one_expert_per_token(fp64, name):
    _assert_replaced(check_against_eager(_stacked(name, K=1), torch.randn(7, zoo.D)))


@pytest.mark.parametrize("name", _CASES)
def test_one_row(fp64, name):
    """Sorted or not is the same then, so what sorts may be left as the operands."""
    backend = check_against_eager(_stacked(name, K=1), torch.randn(1, zoo.D))
    assert len(backend.rewritten) == 1 and not backend.reasons


@pytest.mark.parametrize("name", _CASES)
def test_one_token(fp64, name):
    _assert_replaced(check_against_eager(_stacked(name), torch.randn(1, zoo.D)))


@pytest.mark.parametrize("name", ["stacked_loop", "packed_loop", "sorted_transformers", "gathered_bmm", "dense_bmm"])
def test_dynamic_token_count(fp64, name):
    layer = _stacked(name)
    run, backend = compiled(layer, dynamic=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        for num_tokens in (6, 9, 14):
            x = torch.randn(num_tokens, zoo.D)
            torch.testing.assert_close(run(x), layer(x))
    assert len(backend.reports) == 1
    _assert_replaced(backend)


@pytest.mark.parametrize("name", _CASES)
def test_half_precision(name):
    torch.manual_seed(0)
    layer = _stacked(name).to(torch.bfloat16)
    # bf16 holds 8 bits; eager and the ops round at different places, a few times each.
    _assert_replaced(check_against_eager(layer, torch.randn(12, zoo.D).bfloat16(), tolerance=2**-4))


class _Autocast(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x)


@pytest.mark.parametrize("name", ["stacked_loop", "gpt_oss_loop", "gathered_bmm", "dense_bmm"])
def test_autocast_in_the_graph(name):
    torch.manual_seed(0)
    backend = check_against_eager(_Autocast(_stacked(name)), torch.randn(12, zoo.D), tolerance=2**-4)
    assert len(backend.rewritten) == 1 and backend.rewritten[0].dtype == torch.bfloat16


def test_operator_that_ignores_autocast_keeps_its_dtype(fp64):
    torch.set_default_dtype(torch.float32)
    (layer,) = rewrite_of(_Autocast(_stacked("sorted_index_add")), torch.randn(12, zoo.D)).rewritten
    assert layer.dtype == torch.float32


class _Block(nn.Module):
    """A residual block with a shared expert beside the routed ones."""

    def __init__(self, layer: nn.Module, checkpointed: bool = False):
        super().__init__()
        self.mix, self.norm, self.shared = nn.Linear(zoo.D, zoo.D), nn.LayerNorm(zoo.D), zoo.GluMLP()
        self.layer, self.checkpointed = layer, checkpointed

    def forward(self, x):
        x = x + self.mix(x)
        normed = self.norm(x)
        routed = checkpoint(self.layer, normed, use_reentrant=False) if self.checkpointed else self.layer(normed)
        return x + (routed + self.shared(normed))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    "layer",
    [
        lambda: zoo.ModuleListMoE(zoo.loop_mixtral),
        lambda: zoo.ModuleListMoE(zoo.masked_inplace),
        lambda: _stacked("sorted_torchtitan"),
    ],
    ids=["loop", "masked", "sorted"],
)
def test_layers_of_a_network(fp64, layer, checkpointed):
    network = nn.Sequential(*(_Block(layer(), checkpointed) for _ in range(3)))
    backend = check_against_eager(network, torch.randn(2, 5, zoo.D))
    assert len(backend.rewritten) == 3 and not backend.reasons
    assert [path.split(".")[1] for path in (c.module_path for c in backend.rewritten)] == ["0", "1", "2"]
    assert backend.operators().count("linear") >= 3 * 4  # router, mix and shared experts stay


@pytest.mark.parametrize("shape", [(10,), (2, 5)], ids=["TD", "BSD"])
@pytest.mark.parametrize("combine", [zoo.masked_sum, zoo.masked_inplace, zoo.loop_mistral], ids=lambda f: f.__name__)
def test_layers_back_to_back(fp64, combine, shape):
    """The input of a layer is the very node that the layer before it ends in."""
    network = nn.Sequential(*(zoo.ModuleListMoE(combine) for _ in range(3)))
    backend = check_against_eager(network, torch.randn(*shape, zoo.D))
    assert len(backend.rewritten) == 3
    _assert_replaced(backend)


def test_counts_used_elsewhere_stay(fp64):
    def with_load(self, x, weights, ids):
        mask = torch.nn.functional.one_hot(ids, len(self.experts))
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out += expert(x) * (weights * mask[..., e]).sum(-1, keepdim=True)
        return out, mask.sum((0, 1)).to(x.dtype) * weights.mean()

    backend = check_against_eager(zoo.ModuleListMoE(with_load), torch.randn(10, zoo.D))
    assert len(backend.rewritten) == 1 and "one_hot" in backend.operators()


def test_buffer_seen_through_a_view_is_replaced(fp64):
    def through_a_view(self, x, weights, ids):
        out = torch.zeros_like(x)
        flat, rows = out.view(-1, zoo.D), x.view(-1, zoo.D)
        weights, ids = weights.view(-1, weights.shape[-1]), ids.view(-1, ids.shape[-1])
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            flat.index_add_(0, token, expert(rows[token]) * weights[token, slot, None])
        out.add_(1.0)
        return out, flat * 2

    _assert_replaced(check_against_eager(zoo.ModuleListMoE(through_a_view), torch.randn(2, 5, zoo.D)))


def test_experts_of_the_first_choice_only(fp64):
    def first_choice(self, x, weights, ids):
        return zoo.masked_sum(self, x, weights[..., :1], ids[..., :1])

    (found,) = check_against_eager(zoo.ModuleListMoE(first_choice), torch.randn(10, zoo.D)).rewritten
    assert found.K == 1


def test_up_before_gate_is_two_halves(fp64):
    def up_first(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(self.E):
            up, gate = (x @ self.gate_up[e]).chunk(2, -1)
            out += ((up * torch.nn.functional.silu(gate)) @ self.down[e]) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out

    _assert_replaced(check_against_eager(zoo.StackedMoE(up_first, "packed"), torch.randn(10, zoo.D)))


def test_inference(fp64):
    layer = _stacked("sorted_transformers")
    run, backend = compiled(layer)
    x = torch.randn(10, zoo.D)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.inference_mode():
        torch.testing.assert_close(run(x), layer(x))
    _assert_replaced(backend)
    assert [candidate.became for candidate in backend.rewritten] == ["expert_mlp(swiglu)"], "nothing is kept"


@pytest.fixture
def free_memory(monkeypatch):
    """Pretends that so many bytes are free; None is unknown."""

    def pretend(num_bytes):
        memory.forget_choices()
        monkeypatch.setattr(memory, "free_bytes", lambda device: num_bytes)

    yield pretend
    memory.forget_choices()


@pytest.mark.parametrize("name", ["packed_loop", "sorted_transformers_bias", "gathered_einsum", "dense_llama4"])
def test_keep_input(fp64, monkeypatch, name):
    monkeypatch.setattr(config, "keep", "input")
    backend = check_against_eager(_stacked(name), torch.randn(2, 5, zoo.D))
    _assert_replaced(backend)
    assert "expert_mlp.default" in backend.operators()
    assert backend.rewritten[0].became == f"expert_mlp({backend.rewritten[0].activation})"


def test_keep_input_with_an_unfused_activation(fp64, monkeypatch):
    """It is applied to the pre-activation, which then exists."""
    monkeypatch.setattr(config, "keep", "input")
    layer = zoo.ModuleListMoE(zoo.masked_sum, expert=lambda: zoo.GluMLP(torch.nn.functional.mish))
    (found,) = check_against_eager(layer, torch.randn(10, zoo.D)).rewritten
    assert found.became == "expert_up -> unfused activation -> expert_down"


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("num_bytes", "op"), [(None, "expert_down.default"), (1 << 40, "expert_down.default"), (1000, "expert_mlp.default")]
)
def test_keep_auto_follows_the_free_memory(fp64, monkeypatch, free_memory, num_bytes, op, dynamic):
    monkeypatch.setattr(config, "keep", "auto")
    free_memory(num_bytes)
    backend = check_against_eager(_stacked("sorted_transformers"), torch.randn(10, zoo.D), dynamic=dynamic)
    _assert_replaced(backend)
    assert op in backend.operators()


def test_keep_auto_is_decided_again_for_more_tokens(fp64, monkeypatch, free_memory):
    monkeypatch.setattr(config, "keep", "auto")
    free_memory(300_000)
    layer = _stacked("stacked_loop")
    run, backend = compiled(layer, dynamic=True)
    for num_tokens in (4, 400, 8):
        x = torch.randn(num_tokens, zoo.D)
        torch.testing.assert_close(run(x), layer(x))
    became = [candidate.became for candidate in backend.rewritten]
    assert became == ["expert_up(swiglu) -> expert_down", "expert_mlp(swiglu)"]


_CHUNKED = ["packed_loop", "sorted_transformers_bias", "gathered_einsum", "dense_llama4"]


def _chunked(backend) -> bool:
    """Whether the layers of all graphs go in chunks; otherwise none does."""
    operators = backend.operators()
    count = operators.count("expert_mlp_chunked.default")
    assert count in (0, len(backend.rewritten)) and not backend.reasons
    assert operators.count("dispatch.default") == len(backend.rewritten) - count
    assert not _OLD & set(operators), _OLD & set(operators)
    return count > 0


@pytest.fixture
def chunks_of_1024(fp64, monkeypatch):
    monkeypatch.setattr(config, "max_layer_transient_bytes", 1)


@pytest.mark.parametrize("num_tokens", [1024, 1025, 2100])
@pytest.mark.parametrize("name", _CHUNKED)
def test_more_tokens_than_a_chunk(chunks_of_1024, monkeypatch, name, num_tokens):
    monkeypatch.setattr(config, "keep", "input")
    backend = check_against_eager(_stacked(name), torch.randn(num_tokens, zoo.D))
    assert _chunked(backend) == (num_tokens > 1024)
    (found,) = backend.rewritten
    assert found.became == f"expert_mlp{'_chunked' if num_tokens > 1024 else ''}({found.activation})"


@pytest.mark.parametrize("name", _CHUNKED)
def test_ranges_of_rows_in_backward(fp64, monkeypatch, name):
    """As ``moe`` chooses them; without gradients there is no backward that could go through ranges."""
    monkeypatch.setattr(config, "keep", "input")
    monkeypatch.setattr(config, "max_layer_transient_bytes", 600_000)
    layer, num_tokens = _stacked(name), 1500
    monkeypatch.setattr(row_ranges, "tokens_in_ranges", lambda *sizes: num_tokens)
    became = []
    for tokens in (num_tokens, num_tokens + 1):
        (found,) = check_against_eager(layer, torch.randn(tokens, zoo.D)).rewritten
        became.append(found.became.partition("(")[0])
    assert became == ["expert_mlp_ranged", "expert_mlp_chunked"]
    run, backend = compiled(layer)
    with torch.no_grad():
        run(torch.randn(num_tokens, zoo.D))
    assert _chunked(backend)


def test_more_tokens_than_a_chunk_for_separate_experts(chunks_of_1024, monkeypatch):
    monkeypatch.setattr(config, "keep", "input")
    layer = zoo.ModuleListMoE(zoo.loop_mixtral)
    assert _chunked(check_against_eager(layer, torch.randn(2, 600, zoo.D)))


def test_a_kept_preactivation_is_never_in_chunks(chunks_of_1024):
    layer, x = _stacked("stacked_loop"), torch.randn(1100, zoo.D)
    assert not _chunked(check_against_eager(layer, x))
    run, backend = compiled(layer)
    with torch.no_grad():
        torch.testing.assert_close(run(x), layer(x))
    assert _chunked(backend), "without gradients nothing is kept"


def test_one_graph_on_each_side_of_the_limit(chunks_of_1024, monkeypatch):
    monkeypatch.setattr(config, "keep", "input")
    layer = _stacked("stacked_loop")
    run, backend = compiled(layer)
    for num_tokens in (40, 1030, 9, 1024, 3000, 1025, 500):
        x = torch.randn(num_tokens, zoo.D)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), layer(x))
    became = [candidate.became for candidate in backend.rewritten]
    assert became == ["expert_mlp(swiglu)", "expert_mlp_chunked(swiglu)"]


def test_tokens_that_depend_on_data_are_not_in_chunks(chunks_of_1024, monkeypatch):
    monkeypatch.setattr(config, "keep", "input")
    layer = _stacked("gathered_einsum")
    backend = rewrite_of(lambda x, mask: layer(x[mask]), torch.randn(1100, zoo.D), torch.ones(1100, dtype=torch.bool))
    assert [candidate.became for candidate in backend.rewritten] == ["expert_mlp(swiglu)"]


def test_unknown_keep_is_declined(fp64, monkeypatch):
    monkeypatch.setattr(config, "keep", "all")
    (found,) = rewrite_of(_stacked("stacked_loop"), torch.randn(10, zoo.D)).candidates
    assert (found.reason, found.detail) == (
        "OPERANDS", "rewrite: config.keep must be one of preactivation, input, auto, got 'all'"
    )  # fmt: skip


def test_second_rewrite_finds_nothing(fp64):
    backend = rewrite_of(zoo.ModuleListMoE(zoo.loop_mixtral), torch.randn(10, zoo.D))
    (gm,) = backend.modules
    before = str(gm.graph)
    assert rewrite_graph(gm).candidates == [] and str(gm.graph) == before


def test_inserted_nodes_carry_meta(fp64):
    (gm,) = rewrite_of(_stacked("dense_bmm"), torch.randn(10, zoo.D)).modules
    inserted = [n for n in gm.graph.nodes if "moeblaze" in str(n.target)]
    assert len(inserted) == 3
    for node in inserted:
        assert "zoo_batched.py" in node.meta["stack_trace"] and "example_value" in node.meta
    assert inserted[-1].meta["example_value"].shape == (10, zoo.D)


def test_outcomes_are_counted_and_logged(fp64, caplog):
    counters["moeblaze"].clear()
    with caplog.at_level(logging.DEBUG, logger="moeblaze"):
        rewrite_of(zoo.ModuleListMoE(zoo.masked_sum), torch.randn(10, zoo.D))
    assert counters["moeblaze"] == {"rewritten": 1}
    assert "expert_up(swiglu) -> expert_down" in caplog.text


def _text(spelling: str) -> str:
    """Operators of a rewritten spelling and their operands; ids and weights are inputs of the graph."""
    layer, (function, *_) = _stacked(spelling), _CASES[spelling]
    weights, ids = torch.rand(10, zoo.K), torch.randint(0, zoo.E, (10, zoo.K))
    (gm,) = rewrite_of(lambda x, weights, ids: function(layer, x, weights, ids), torch.randn(10, zoo.D), weights, ids).modules
    lines = []
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            arguments = fx.node.map_arg(node.args, lambda n: n.name.replace("l_layer_parameters_", "").rstrip("_"))
            lines.append(f"{node.name} = {target}{arguments}")
    return "\n".join(lines)


def test_graph_of_a_packed_loop():
    assert_expected_inline(_text("packed_loop"), """\
x = reshape('l_x', -1, 16)
weights = reshape('l_weights', -1, 2)
ids = reshape('l_ids', -1, 2)
reshape_4 = reshape('gate_up', (4, 16, 2, 24))
permute = permute('reshape_4', (0, 2, 3, 1))
dispatch_default = dispatch.default('ids', 4)
getitem_36 = getitem('dispatch_default', 0)
getitem_37 = getitem('dispatch_default', 1)
getitem_38 = getitem('dispatch_default', 2)
getitem_39 = getitem('dispatch_default', 3)
expert_up_default = expert_up.default('x', ['permute'], [], None, 'getitem_36', 'getitem_37', 'getitem_38', 'getitem_39', 'swiglu')
getitem_40 = getitem('expert_up_default', 0)
getitem_41 = getitem('expert_up_default', 1)
expert_down_default = expert_down.default('getitem_40', 'getitem_41', ['down'], [], 'weights', 'getitem_36', 'getitem_37', 'getitem_38', 'getitem_39', 'swiglu')
reshape_3 = reshape('expert_down_default', (10, 16))""")  # noqa: E501


def test_graph_of_gathered_linear_weights():
    assert_expected_inline(_text("gathered_einsum"), """\
x = reshape('l_x', -1, 16)
weights = reshape('l_weights', -1, 2)
ids = reshape('l_ids', -1, 2)
reshape_3 = reshape('w1', (4, 1, 24, 16))
reshape_4 = reshape('w3', (4, 1, 24, 16))
permute = permute('w2', (0, 2, 1))
dispatch_default = dispatch.default('ids', 4)
getitem_3 = getitem('dispatch_default', 0)
getitem_4 = getitem('dispatch_default', 1)
getitem_5 = getitem('dispatch_default', 2)
getitem_6 = getitem('dispatch_default', 3)
expert_up_default = expert_up.default('x', ['reshape_3', 'reshape_4'], [], None, 'getitem_3', 'getitem_4', 'getitem_5', 'getitem_6', 'swiglu')
getitem_7 = getitem('expert_up_default', 0)
getitem_8 = getitem('expert_up_default', 1)
expert_down_default = expert_down.default('getitem_7', 'getitem_8', ['permute'], [], 'weights', 'getitem_3', 'getitem_4', 'getitem_5', 'getitem_6', 'swiglu')
view = view('expert_down_default', (10, 16))""")  # noqa: E501
