"""What a rewritten layer keeps for backward, and in which parts it goes through its tokens: what ``config`` asks for."""

import pytest
import torch

from moeblaze_ops import config
from moeblaze_ops.memory import estimate, row_ranges
from tests.corpus.zoo import catalogue as zoo
from tests.corpus.zoo.catalogue import stacked
from tests.tools.rewrite_harness import OLD_SPELLINGS, assert_replaced, check_against_eager, compiled, rewrite_of


def test_inference(fp64):
    layer = stacked("sorted_transformers")
    run, backend = compiled(layer, aot=True)
    x = torch.randn(10, zoo.D)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.inference_mode():
        torch.testing.assert_close(run(x), layer(x))
    assert_replaced(backend)
    assert [candidate.became for candidate in backend.rewritten] == ["expert_mlp(swiglu)"], "nothing is kept"


@pytest.fixture
def free_memory(monkeypatch):
    """Pretends that so many bytes are free; None is unknown."""

    def pretend(num_bytes):
        estimate.forget_choices()
        monkeypatch.setattr(estimate, "free_bytes", lambda device: num_bytes)

    yield pretend
    estimate.forget_choices()


@pytest.mark.parametrize("name", ["packed_loop", "sorted_transformers_bias", "gathered_einsum", "dense_llama4"])
def test_keep_input(fp64, monkeypatch, name):
    monkeypatch.setattr(config, "keep", "input")
    backend = check_against_eager(stacked(name), torch.randn(2, 5, zoo.D))
    assert_replaced(backend)
    assert "expert_mlp.default" in backend.operators()
    assert backend.rewritten[0].became == f"expert_mlp({backend.rewritten[0].activation})"


@pytest.mark.parametrize("name", ["sorted_transformers_bias", "dense_llama4"])
def test_keep_eight_bits(monkeypatch, name):
    """The output as it is with h kept, bit for bit; gradients by what 8 bits lose."""
    layer, x, results = stacked(name), torch.randn(10, zoo.D), {}
    for keep in ("preactivation", "h8"):
        monkeypatch.setattr(config, "keep", keep)
        torch._dynamo.reset()
        run, backend = compiled(layer, aot=True)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            out = run(x)
        assert_replaced(backend)
        results[keep] = [out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))]
    assert backend.rewritten[0].became == f"expert_up_h8({backend.rewritten[0].activation}) -> expert_down"
    kept, eight_bits = results.values()
    assert torch.equal(kept[0], eight_bits[0])
    for ours, theirs in zip(eight_bits[1:], kept[1:], strict=True):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()
    assert not torch.equal(kept[1], eight_bits[1])


def test_keep_input_with_a_formula(fp64, monkeypatch):
    monkeypatch.setattr(config, "keep", "input")
    layer = zoo.ModuleListMoE(zoo.masked_sum, expert=lambda: zoo.GluMLP(torch.nn.functional.mish))
    (found,) = check_against_eager(layer, torch.randn(10, zoo.D)).rewritten
    assert found.became == "expert_mlp(g * tanh(softplus(g)) * u)"


@pytest.mark.parametrize(
    ("num_bytes", "op", "dynamic"),
    [(None, "expert_down.default", False), (1 << 40, "expert_down.default", True), (1000, "expert_mlp.default", True)],
)
def test_keep_auto_follows_the_free_memory(fp64, monkeypatch, free_memory, num_bytes, op, dynamic):
    monkeypatch.setattr(config, "keep", "auto")
    free_memory(num_bytes)
    backend = check_against_eager(stacked("sorted_transformers"), torch.randn(10, zoo.D), dynamic=dynamic)
    assert_replaced(backend)
    assert op in backend.operators()


def test_keep_auto_is_decided_again_for_more_tokens(fp64, monkeypatch, free_memory):
    monkeypatch.setattr(config, "keep", "auto")
    free_memory(300_000)
    layer = stacked("stacked_loop")
    run, backend = compiled(layer, dynamic=True, aot=True)
    for num_tokens in (4, 400, 8):
        x = torch.randn(num_tokens, zoo.D)
        torch.testing.assert_close(run(x), layer(x))
    became = [candidate.became for candidate in backend.rewritten]
    assert became == ["expert_up(swiglu) -> expert_down", "expert_mlp(swiglu)"]


_CHUNKED = ["packed_loop", "sorted_transformers_bias", "gathered_einsum", "dense_llama4"]


def _chunked(backend) -> bool:
    """True if the layers of all graphs go in chunks; otherwise none does."""
    operators = backend.operators()
    count = operators.count("expert_mlp_chunked.default")
    assert count in (0, len(backend.rewritten)) and not backend.reasons
    assert operators.count("dispatch.default") == len(backend.rewritten) - count
    assert not OLD_SPELLINGS & set(operators), OLD_SPELLINGS & set(operators)
    return count > 0


@pytest.fixture
def chunks_of_1024(fp64, monkeypatch):
    monkeypatch.setattr(config, "max_layer_transient_bytes", 1)


@pytest.mark.parametrize(("name", "num_tokens"), zip(_CHUNKED, (1024, 1025, 2100, 1025), strict=True))
def test_more_tokens_than_a_chunk(chunks_of_1024, monkeypatch, name, num_tokens):
    monkeypatch.setattr(config, "keep", "input")
    backend = check_against_eager(stacked(name), torch.randn(num_tokens, zoo.D))
    assert _chunked(backend) == (num_tokens > 1024)
    (found,) = backend.rewritten
    assert found.became == f"expert_mlp{'_chunked' if num_tokens > 1024 else ''}({found.activation})"


@pytest.mark.parametrize("name", _CHUNKED)
def test_ranges_of_rows_in_backward(fp64, monkeypatch, name):
    """As ``moe`` chooses them; without gradients there is no backward that could go through ranges."""
    monkeypatch.setattr(config, "keep", "input")
    monkeypatch.setattr(config, "max_layer_transient_bytes", 600_000)
    layer, num_tokens = stacked(name), 1500
    monkeypatch.setattr(row_ranges, "tokens_in_ranges", lambda *sizes: num_tokens)
    became = []
    for tokens in (num_tokens, num_tokens + 1):
        (found,) = check_against_eager(layer, torch.randn(tokens, zoo.D)).rewritten
        became.append(found.became.partition("(")[0])
    assert became == ["expert_mlp_ranged", "expert_mlp_chunked"]
    run, backend = compiled(layer, aot=True)
    with torch.no_grad():
        run(torch.randn(num_tokens, zoo.D))
    assert _chunked(backend)


def test_more_tokens_than_a_chunk_for_separate_experts(chunks_of_1024, monkeypatch):
    monkeypatch.setattr(config, "keep", "input")
    layer = zoo.ModuleListMoE(zoo.loop_mixtral, zoo.GluMLP)
    assert _chunked(check_against_eager(layer, torch.randn(2, 600, zoo.D)))


def test_a_kept_preactivation_is_never_in_chunks(chunks_of_1024):
    layer, x = stacked("stacked_loop"), torch.randn(1100, zoo.D)
    assert not _chunked(check_against_eager(layer, x))
    run, backend = compiled(layer, aot=True)
    with torch.no_grad():
        torch.testing.assert_close(run(x), layer(x))
    assert _chunked(backend), "without gradients nothing is kept"


def test_one_graph_on_each_side_of_the_limit(chunks_of_1024, monkeypatch):
    monkeypatch.setattr(config, "keep", "input")
    layer = stacked("stacked_loop")
    run, backend = compiled(layer, aot=True)
    for num_tokens in (40, 1030, 9, 1024, 3000, 1025, 500):
        x = torch.randn(num_tokens, zoo.D)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), layer(x))
    became = [candidate.became for candidate in backend.rewritten]
    assert became == ["expert_mlp(swiglu)", "expert_mlp_chunked(swiglu)"]


def test_tokens_that_depend_on_data_are_not_in_chunks(chunks_of_1024, monkeypatch):
    monkeypatch.setattr(config, "keep", "input")
    layer = stacked("gathered_einsum")
    backend = rewrite_of(lambda x, mask: layer(x[mask]), torch.randn(1100, zoo.D), torch.ones(1100, dtype=torch.bool))
    assert [candidate.became for candidate in backend.rewritten] == ["expert_mlp(swiglu)"]
