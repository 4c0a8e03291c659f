"""Rewritten graphs compute what eager computes, outputs and all gradients, and nothing of the old spelling is left.

The match of each spelling states what its graph computes, and states something else once it is changed.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.corpus import changed_matches
from tests.corpus.zoo import catalogue as zoo
from tests.corpus.zoo.catalogue import stacked
from tests.corpus.zoo.changed import changed
from tests.tools.rewrite_harness import assert_replaced, check_against_eager, compiled, rewrite_of

_CASES = [function.__name__ for function, *_ in zoo.STACKED]


def _sequence_first() -> torch.Tensor:
    """Tokens in two axes, whose strides the result has to have as well. Tokens in one are those of the tests of few rows."""
    return torch.randn(5, 2, zoo.D).transpose(0, 1)


@pytest.mark.parametrize("combine", zoo.SEPARATE, ids=lambda f: f.__name__)
def test_separate_experts(fp64, combine):
    flat = combine is zoo.masked_stack_einsum  # that one is written for [T, D]
    x = torch.randn(zoo.D, 10).t() if flat else _sequence_first()
    with changed_matches.matches() as matches:
        assert_replaced(check_against_eager(zoo.ModuleListMoE(combine, zoo.GluMLP), x, aot=True, same_strides=True))
    changed_matches.assert_changes_are_refused(*matches[0])


# One row, one expert a token, or one token, for spellings that read their axes in different ways.
@pytest.mark.parametrize(
    "combine, num_tokens, top_k",
    [
        (zoo.masked_sum, 1, 1), (zoo.masked_per_slot, 1, 2), (zoo.loop_mixtral, 7, 1), (zoo.loop_boolean_mask, 7, 1),
        (zoo.loop_flat_mask, 1, 2), (zoo.loop_joined_slots, 1, 1), (zoo.joined_hits, 7, 1), (zoo.joined_inverse, 1, 1),
        (zoo.nonzero_where, 1, 1), (zoo.nonzero_stored, 1, 2), (zoo.dense_modules, 1, 1), (zoo.dense_then_gather, 7, 1),
    ],
    ids=lambda f: getattr(f, "__name__", None),
)  # fmt: skip
def test_few_rows(fp64, combine, num_tokens, top_k):
    layer = zoo.ModuleListMoE(combine, zoo.GluMLP, K=top_k)
    backend = check_against_eager(layer, torch.randn(num_tokens, zoo.D))
    assert len(backend.rewritten) == 1 and not backend.reasons
    if combine is not zoo.nonzero_stored:  # scores of one token are read as they were scattered
        assert_replaced(backend)


@pytest.mark.parametrize("combine", [zoo.masked_stack_einsum, zoo.loop_mistral], ids=lambda f: f.__name__)
def test_biased_ungated_experts(fp64, combine):
    layer = zoo.ModuleListMoE(combine, expert=zoo.PlainMLP)
    assert_replaced(check_against_eager(layer, torch.randn(10, zoo.D)))


_BIAS, _HIDDEN = "self.down_bias[e] * share", "(F.silu(gate) * up * share) @ self.down[e]"
_BIASES = {
    "weighted behind": (_HIDDEN, "share * ((F.silu(gate) * up) @ self.down[e])"),
    "subtracted": (f"{_HIDDEN} + {_BIAS}", f"{_HIDDEN} - -1 * {_BIAS}"),
    "doubled": (f"{_HIDDEN} + {_BIAS}", f"2 * ({_HIDDEN}) + 2 * {_BIAS}"),
    "whole": (_BIAS, "self.down_bias[e]"),
    "squared": (_BIAS, f"{_BIAS} * share"),
    "doubled alone": (_BIAS, f"{_BIAS} * 2"),
    "detached": (_BIAS, "self.down_bias[e] * share.detach()"),
    "rounded": (_BIAS, "self.down_bias[e] * share.bfloat16()"),
    "of the token": (_BIAS, f"{_BIAS} * x[token]"),
    "dropped": (_BIAS, f"F.dropout({_BIAS}, 1.0)"),
}


@pytest.mark.parametrize("name", _BIASES)
def test_biases_by_the_weight_of_the_output_or_by_another_one(fp64, name):
    layer = zoo.StackedMoE(changed(zoo.weighted_bias_loop, _BIASES[name]), "packed", bias=True)
    backend = check_against_eager(layer, torch.randn(10, zoo.D))
    assert len(backend.rewritten) == (name in ("weighted behind", "subtracted", "doubled"))


@pytest.mark.parametrize("name", _CASES)
def test_stacked_experts(fp64, name):
    with changed_matches.matches() as matches:
        backend = check_against_eager(stacked(name), _sequence_first(), aot=True, same_strides=True)
    assert_replaced(backend)
    changed_matches.assert_changes_are_refused(*matches[0])
    assert not any(candidate.copied_bytes for candidate in backend.rewritten)


@pytest.mark.parametrize(
    "name, num_tokens, top_k",
    [
        ("weighted_bias_loop", 1, 2), ("weighted_bias_loop", 7, 1), ("stacked_loop", 1, 1), ("sorted_transformers", 7, 1),
        ("sorted_torchtune", 1, 2), ("sorted_scaled_wide", 1, 1),
        ("gathered_bmm", 1, 2), ("dense_einsum", 7, 1), ("dense_llama4", 1, 1), ("einsum_masked_tokens", 7, 1),
    ],
)  # fmt: skip
def test_few_rows_of_stacked_experts(fp64, name, num_tokens, top_k):
    backend = check_against_eager(stacked(name, K=top_k), torch.randn(num_tokens, zoo.D))
    assert len(backend.rewritten) == 1 and not backend.reasons
    if (num_tokens, top_k) != (1, 1):  # sorted or not is the same for one row, so what sorts may be left as the operands
        assert_replaced(backend)


@pytest.mark.parametrize("name", ["stacked_loop", "packed_loop", "sorted_transformers", "gathered_bmm", "dense_bmm"])
def test_dynamic_token_count(fp64, name):
    layer = stacked(name)
    run, backend = compiled(layer, dynamic=True, aot=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        for num_tokens in (6, 9, 14):
            x = torch.randn(num_tokens, zoo.D)
            torch.testing.assert_close(run(x), layer(x))
    assert len(backend.reports) == 1
    assert_replaced(backend)


@pytest.mark.parametrize("name", ["gpt_oss_loop", "gathered_bmm", "dense_bmm", "sorted_scaled_wide", "einsum_dispatched"])
def test_half_precision(name):
    torch.manual_seed(0)
    layer = stacked(name).to(torch.bfloat16)
    # bf16 holds 8 bits; eager and the ops round at different places, a few times each.
    assert_replaced(check_against_eager(layer, torch.randn(12, zoo.D).bfloat16(), tolerance=2**-4))


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
    backend = check_against_eager(_Autocast(stacked(name)), torch.randn(12, zoo.D), tolerance=2**-4, aot=True)
    assert len(backend.rewritten) == 1 and backend.rewritten[0].dtype == torch.bfloat16


def test_operator_that_ignores_autocast_keeps_its_dtype(fp64):
    torch.set_default_dtype(torch.float32)
    (layer,) = rewrite_of(_Autocast(stacked("sorted_index_add")), torch.randn(12, zoo.D)).rewritten
    assert layer.dtype == torch.float32


@pytest.mark.parametrize("combine", [zoo.loop_mixtral, zoo.masked_sum], ids=lambda f: f.__name__)
def test_weights_of_another_low_precision_than_that_of_autocast(combine):
    """They are stacked as they are stored: under autocast torch stacks no fp16 where it computes in bf16."""
    torch.manual_seed(0)
    layer = zoo.ModuleListMoE(combine)
    layer.experts.half()
    backend = check_against_eager(_Autocast(layer), torch.randn(12, zoo.D), tolerance=2**-4, aot=True)
    assert len(backend.rewritten) == 1 and backend.rewritten[0].dtype == torch.bfloat16


def test_weights_that_autocast_leaves_in_fp64_are_an_error_as_written():
    layer = zoo.ModuleListMoE(zoo.masked_sum)
    layer.experts.double()
    run, backend = compiled(_Autocast(layer))
    # A graph of torch 2.11 that raises leaves autocast on.
    with torch.autocast("cpu", enabled=False), pytest.raises(RuntimeError, match="same dtype"):
        run(torch.randn(12, zoo.D))
    assert backend.reasons == ["DTYPE_PATH"]


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


@pytest.mark.parametrize(
    ("layer", "checkpointed"),
    [
        pytest.param(lambda: zoo.ModuleListMoE(zoo.loop_mixtral), False, id="loop-plain"),
        pytest.param(lambda: zoo.ModuleListMoE(zoo.masked_inplace), True, id="masked-checkpointed"),
        pytest.param(lambda: stacked("sorted_torchtitan"), False, id="sorted-plain"),
        pytest.param(lambda: stacked("sorted_torchtitan"), True, id="sorted-checkpointed"),
    ],
)
def test_layers_of_a_network(fp64, layer, checkpointed):
    network = nn.Sequential(*(_Block(layer(), checkpointed) for _ in range(2)))
    backend = check_against_eager(network, torch.randn(2, 5, zoo.D), aot=True)
    assert len(backend.rewritten) == 2 and not backend.reasons
    assert [path.split(".")[1] for path in (c.module_path for c in backend.rewritten)] == ["0", "1"]
    assert backend.operators().count("linear") >= 2 * 4  # router, mix and shared experts stay


@pytest.mark.parametrize(
    ("combine", "shape"),
    [
        (zoo.masked_sum, (10,)),
        (zoo.masked_inplace, (2, 5)),
        (zoo.masked_add_method, (10,)),
        (zoo.loop_mistral, (2, 5)),
        (zoo.loop_mixtral, (10,)),
        (zoo.loop_mixtral, (2, 5)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_layers_back_to_back(fp64, combine, shape):
    """The input of a layer is the very node that the layer before it ends in."""
    network = nn.Sequential(*(zoo.ModuleListMoE(combine) for _ in range(2)))
    backend = check_against_eager(network, torch.randn(*shape, zoo.D))
    assert len(backend.rewritten) == 2
    assert_replaced(backend)


class _Between(nn.Module):
    """Two layers, and what is done to the tokens in between."""

    def __init__(self, combine, change):
        super().__init__()
        self.first, self.second, self.change = zoo.ModuleListMoE(combine), zoo.ModuleListMoE(combine), change

    def forward(self, x):
        out = self.first(x)
        self.change(out)
        return self.second(out)


def _first_token_is_zero(out):
    out[0] = 0


@pytest.mark.parametrize(("combine", "change"), [
    (zoo.masked_sum, _first_token_is_zero), (zoo.masked_inplace, lambda out: out.mul_(2)),
    (zoo.masked_add_method, lambda out: out.t()[3].add_(1)), (zoo.loop_mixtral, lambda out: out.view(-1)[:9].zero_()),
])  # fmt: skip
def test_tokens_that_are_written_to_between_layers(fp64, combine, change):
    """The second layer reads what was written, wherever it finds its tokens."""
    backend = check_against_eager(_Between(combine, change), torch.randn(10, zoo.D))
    assert len(backend.rewritten) == 2 and not backend.reasons


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

    assert_replaced(check_against_eager(zoo.ModuleListMoE(through_a_view), torch.randn(2, 5, zoo.D)))


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

    assert_replaced(check_against_eager(zoo.StackedMoE(up_first, "packed"), torch.randn(10, zoo.D)))


def test_ids_read_off_a_mask(fp64):
    def read_off(self, x, weights, ids):
        return zoo.masked_sum(self, x, weights, torch.nn.functional.one_hot(ids, len(self.experts)).argmax(-1))

    assert len(check_against_eager(zoo.ModuleListMoE(read_off), torch.randn(10, zoo.D)).rewritten) == 1


def test_product_with_a_vector(fp64):
    """F.linear takes a vector in place of its matrix."""

    def scaled(self, x, weights, ids):
        weights = weights * F.linear(x, x[0])[:, None]
        masks = F.one_hot(ids, len(self.experts)).to(x.dtype)
        return sum(expert(x) * (masks[..., e] * weights).sum(-1, keepdim=True) for e, expert in enumerate(self.experts))

    assert check_against_eager(zoo.ModuleListMoE(scaled), torch.randn(5, zoo.D)).rewritten
