"""What is recognised, in which form, and what is left alone for which reason."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moeblaze_ops
from moeblaze_ops.lowering.match.reasons import Reason
from tests.corpus import lookalikes, twins
from tests.corpus.changed_matches import certified_without_proofs
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager, rewrite_of

pytestmark = pytest.mark.usefixtures("fp64")


@pytest.mark.parametrize("name", lookalikes.LOOKALIKES)
def test_lookalike_is_left_alone(name):
    backend = rewrite_of(lookalikes.build(name), torch.randn(10, zoo.D))
    reason = lookalikes.LOOKALIKES[name][1]
    assert not backend.rewritten
    assert backend.reasons == ([reason] if reason else [])
    assert not any("moeblaze" in operator or "expert_up" in operator for operator in backend.operators())


def test_every_layer_of_the_zoo_has_a_twin():
    names = [function.__name__ for function in (*zoo.SEPARATE, *(entry[0] for entry in zoo.STACKED))]
    assert sorted(names) == sorted(twins.TWINS) and len(names) >= 30


@pytest.mark.parametrize("name", twins.TWINS)
def test_twin_is_left_alone_or_right(name):
    """And its statement tells, without any proof."""
    found = []
    asked = None if name in twins.STILL_LAYERS | twins.MIXTURES else lambda gm: found.extend(certified_without_proofs(gm))
    backend = check_against_eager(twins.build(name), torch.randn(10, zoo.D), before=asked)
    assert len(backend.rewritten) == (name in twins.STILL_LAYERS) and not found


class _Residual(nn.Module):
    def __init__(self, layer: nn.Module, norm: nn.Module):
        super().__init__()
        self.layer, self.norm = layer, norm

    def forward(self, x):
        out = self.layer(self.norm(x))
        return (x + out[0], *out[1:]) if isinstance(out, tuple) else x + out


def _rms_norm() -> nn.Module:
    return nn.RMSNorm(zoo.D)


@pytest.mark.parametrize(("name", "norm"), [
    ("capacity", nn.Identity), ("partial_sum_read", nn.Identity), ("partial_sum_read", _rms_norm),
    ("one_expert_without_gradient", _rms_norm), ("expert_choice_of_others", _rms_norm),
])  # fmt: skip
def test_residual_add_around_a_lookalike_is_no_candidate(name, norm):
    backend = rewrite_of(_Residual(lookalikes.build(name), norm()), torch.randn(10, zoo.D))
    reason = lookalikes.LOOKALIKES[name][1]
    assert backend.reasons == ([reason] if reason else []) and not backend.rewritten
    assert all("lookalikes.py" in candidate.source for candidate in backend.candidates)


@pytest.mark.parametrize("name", ["experts_read_the_buffer", "offsets_shifted_by_one", "not_unsorted", "expert_output_read"])
def test_residual_add_is_not_explained(name):
    explanation = moeblaze_ops.explain(_Residual(lookalikes.build(name), nn.Identity()), torch.randn(10, zoo.D))
    (candidate,) = explanation.candidates
    assert "lookalikes.py" in candidate.where and candidate.reason.startswith(lookalikes.LOOKALIKES[name][1])


@pytest.mark.parametrize("name", ["offsets_shifted_by_one", "hidden_read"])
def test_layers_beside_a_declined_one(name):
    """Neither a layer before nor one behind it takes over its reason, and it keeps its own."""
    rewritten = (zoo.StackedMoE(zoo.sorted_transformers, "packed_linear") for _ in range(2))
    before, behind = (_Residual(layer, nn.RMSNorm(zoo.D)) for layer in rewritten)
    declined = _Residual(lookalikes.build(name), nn.RMSNorm(zoo.D))

    def network(x):
        out = declined(before(x))
        return behind(out[0] if isinstance(out, tuple) else out), out

    backend = rewrite_of(network, torch.randn(10, zoo.D))
    assert [candidate.reason for candidate in backend.candidates] == [None, lookalikes.LOOKALIKES[name][1], None]


class _ScaledInput(nn.Module):
    """RMSNorm written out: its scale stands outside the product with the weights, like a routing weight on the input."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.weight = layer, nn.Parameter(torch.rand(zoo.D))

    def forward(self, x):
        normed = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return self.layer(normed)


@pytest.mark.parametrize("name", ["stacked_loop", "sorted_transformers_bias", "einsum_weighted_tokens"])
def test_scale_of_a_norm_belongs_to_the_tokens(name):
    backend = check_against_eager(_ScaledInput(zoo.stacked(name)), torch.randn(2, 5, zoo.D))
    assert len(backend.rewritten) == 1 and not backend.reasons


def test_every_reason_but_the_defensive_ones_has_a_lookalike():
    seen = {Reason[reason] for _, reason, *_ in lookalikes.LOOKALIKES.values() if reason}
    defensive = {"LAYOUT", "WEIGHT_LAYOUT", "OPERAND_CHANGED", "CONTEXT", "OPERANDS", "INTERNAL"}
    assert {reason.name for reason in seen} | defensive == {reason.name for reason in Reason}


def test_candidate_says_what_it_is():
    layer = zoo.StackedMoE(zoo.sorted_transformers, "packed_linear")
    (found,) = rewrite_of(nn.Sequential(nn.Tanh(), layer), torch.randn(2, 5, zoo.D)).candidates
    assert (found.T, found.K, found.E, found.D, found.F) == (10, zoo.K, zoo.E, zoo.D, zoo.FF)
    assert (found.spelling, found.activation, found.dtype) == ("sorted grouped_mm", "swiglu", torch.float64)
    assert found.became == "expert_up(swiglu) -> expert_down" and found.reason is None and found.copied_bytes == 0
    assert "sorted.py:" in found.source and "1" in found.module_path


def test_place_of_a_sum_is_where_it_is_written():
    """Not in the library module in which Dynamo may trace the additions of ``sum``."""

    def summed(self, x, weights, ids):
        return sum(expert(x) * (weights * (ids == e)).sum(-1, keepdim=True) for e, expert in enumerate(self.experts))

    (found,) = rewrite_of(zoo.ModuleListMoE(summed), torch.randn(10, zoo.D)).rewritten
    assert "test_match.py:" in found.source


def test_decline_says_where():
    (found,) = rewrite_of(lookalikes.build("hidden_read"), torch.randn(10, zoo.D)).candidates
    assert found.reason == "EXTRA_USER" and "lookalikes.py:" in found.source and found.meaning
    assert found.became is None


UNREAD = {
    "comparison": lambda h, y, out: y != 0,
    "of the activations": lambda h, y, out: h.isnan().any(),
    "of a partial sum": lambda h, y, out: (out.clone() * 2).view(-1),
    "random numbers": lambda h, y, out: torch.rand_like(y),
}


@pytest.mark.parametrize("name", UNREAD)
def test_results_that_nobody_reads_are_no_users(name):
    """But one that draws numbers is: the next ones of the generator would be others."""

    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e, mlp in enumerate(self.experts):
            h = F.silu(mlp.w1(x)) * mlp.w3(x)
            y = mlp.w2(h)
            UNREAD[name](h, y, out)
            out += y * (weights * (ids == e)).sum(-1, keepdim=True)
        return out

    backend = rewrite_of(zoo.ModuleListMoE(combine, zoo.GluMLP), torch.randn(10, zoo.D))
    assert backend.reasons == (["EXTRA_USER"] if name == "random numbers" else [])


def test_symbolic_token_count_is_reported_as_text():
    layer = zoo.ModuleListMoE(zoo.masked_sum)
    (found,) = check_against_eager(layer, torch.randn(10, zoo.D), dynamic=True).rewritten
    assert isinstance(found.T, str)


def test_dense_network_holds_no_candidate():
    mlp = nn.Sequential(nn.Embedding(7, zoo.D), zoo.GluMLP(), nn.LayerNorm(zoo.D), nn.Linear(zoo.D, 3))
    assert rewrite_of(mlp, torch.randint(0, 7, (4, 5))).candidates == []
