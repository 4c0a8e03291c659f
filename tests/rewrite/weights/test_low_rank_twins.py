"""Layers whose low-rank factors are read wrongly, as code in the field has done: each is what it computes, or left alone.

    b.view(O, R, E).permute(2, 0, 1)        lora_B as PEFT stores it, experts on the fastest axis
    b.view(O, E, R).permute(1, 0, 2)        the twin that takes experts for the slower one: another function

A twin differs from the layer in its output (asserted), and its numbers are those of eager mode.
"""

import pytest
import torch
import torch.nn.functional as F

import moeblaze_ops
from tests.corpus.zoo import catalogue  # noqa: F401
from tests.rewrite.weights.test_low_rank import ADDITIONS, BECAME, D, E, H, K, PeftLike, R, Split, SplitGroups, Stacked, T
from tests.tools.rewrite_harness import check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")


def _experts_slower(b):
    """Factors [E, O, R], read as if their memory, in PEFT's order [O, R, E], were [O, E, R]."""
    return b.permute(1, 2, 0).reshape(b.shape[1], E, -1).permute(1, 0, 2)


TWINS = {
    "experts_swapped": lambda a, b, s: (a, _experts_slower(b), s),
    "experts_swapped_in_a": lambda a, b, s: (a.transpose(0, 1).reshape(a.shape), b, s),
    "b_transposed": lambda a, b, s: (a, b.reshape(E, R, -1).mT, s),
    "a_transposed": lambda a, b, s: (a.reshape(E, -1, R).mT, b, s),
    "scale_twice": lambda a, b, s: (a, b * s, s),
    "scale_left_out": lambda a, b, s: (a, b, 1.0),
    "adapter_of_another_expert": lambda a, b, s: (a.roll(1, 0), b.roll(1, 0), s),
    "factor_of_another_expert": lambda a, b, s: (a, b.flip(0), s),
    "adapter_of_one_expert_for_all": lambda a, b, s: (a[1:2].expand_as(a), b[1:2].expand_as(b), s),
    "ranks_reversed": lambda a, b, s: (a, b.flip(2), s),
}


class StackedTwin(Stacked):
    def __init__(self, spelling, rows, twin):
        super().__init__(lambda w, a, b, s: ADDITIONS[spelling](w, *twin(a, b, s)), rows)


class PeftTwin(PeftLike):
    def __init__(self, twin):
        super().__init__()

        def add(w, a, b, s):
            a, b, s = twin(a.view(E, R, -1), b.view(-1, R, E).permute(2, 0, 1), s)
            return torch.baddbmm(w, b, a, alpha=s)

        self.add = add


class SplitTwin(Split):
    def __init__(self, twin):
        super().__init__()
        self.twin = twin

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        out, kept = torch.zeros_like(x), self.s
        up_a, up_b, self.s = self.twin(self.up_a, self.up_b, kept)
        down_a, down_b, _ = self.twin(self.down_a, self.down_b, kept)
        for e in range(E):
            gate, up = self.project(x, self.w_up[e], up_a[e], up_b[e]).chunk(2, dim=-1)
            y = self.project(F.silu(gate) * up, self.w_down[e], down_a[e], down_b[e])
            out = out + (weights * (chosen == e)).sum(-1, keepdim=True) * y
        self.s = kept
        return out


class GroupsTwin(SplitGroups):
    def __init__(self, twin):
        super().__init__(None)
        self.twin = twin

    def project(self, rows, ends, w, a, b):
        a, b, s = self.twin(a, b, self.s)
        grouped_mm = torch.ops.moe_zoo.grouped_mm_fallback
        return grouped_mm(rows, w.mT, ends) + s * grouped_mm(grouped_mm(rows, a.mT, ends), b.mT, ends)


LAYERS = {
    "bmm": lambda twin: StackedTwin("bmm", "masked", twin),
    "scaled_factor": lambda twin: StackedTwin("scaled_factor", "masked", twin),
    "einsum": lambda twin: StackedTwin("einsum", "masked", twin),
    "baddbmm_grouped": lambda twin: StackedTwin("baddbmm", "grouped", twin),
    "peft": PeftTwin,
    "split_products": SplitTwin,
    "split_groups": GroupsTwin,
}


def plain(a, b, s):
    return a, b, s


@pytest.mark.parametrize("layer", LAYERS)
def test_the_layer_itself_becomes_products(layer):
    """What the twins are twins of."""
    backend = check_against_eager(LAYERS[layer](plain), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [BECAME]


# How a layer is spelled decides where its factors are found, and a twin what is found: each meets two or more of the other.
CASES = [(layer, twin) for i, layer in enumerate(LAYERS) for j, twin in enumerate(TWINS) if (i + j) % 7 in (0, 3)]


@pytest.mark.parametrize(("layer", "twin"), CASES)
def test_twins_of_compiled_layers_are_equal_or_left_alone(layer, twin):
    x, module, itself = torch.randn(T, D), LAYERS[layer](TWINS[twin]), LAYERS[layer](plain)
    itself.load_state_dict(module.state_dict())
    assert not torch.allclose(module(x), itself(x), rtol=1e-3)
    backend = check_against_eager(module, x)
    assert backend.rewritten or backend.reasons


@pytest.mark.parametrize("twin", TWINS)
def test_twins_given_to_moe_are_their_merged_weights(twin):
    """The output and all gradients, in fp64; and not those of the factors themselves."""
    read, s = TWINS[twin], 2.0
    torch.manual_seed(0)
    x, weights, experts = torch.randn(T, D), torch.rand(T, K), torch.rand(T, E).topk(K).indices
    w_up, w_down = torch.randn(E, 2 * H, D) / D**0.5, torch.randn(E, D, H) / H**0.5
    shapes = ((E, R, D), (E, 2 * H, R), (E, R, H), (E, D, R))
    leaves = [x.requires_grad_(), *((torch.randn(shape) / shape[-1] ** 0.5).requires_grad_() for shape in shapes)]
    _, up_a, up_b, down_a, down_b = leaves

    def run(read, merge):
        up, down = read(up_a, up_b, s), read(down_a, down_b, s)
        if not merge:
            return moeblaze_ops.moe(x, weights, experts, w_up, w_down, lora_up=up, lora_down=down)
        whole = [w + scale * b @ a for w, (a, b, scale) in ((w_up, up), (w_down, down))]
        return moeblaze_ops.moe(x, weights, experts, *whole)

    out, expected, itself = run(read, False), run(read, True), run(plain, False)
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(out, itself, rtol=1e-3)
    dout = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(y, leaves, dout) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("scale", [2.0, 0.0])
def test_a_scale_of_zero(scale):
    """Factors that add nothing have a gradient of zeros in eager mode, none where they were left out."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router = torch.nn.Linear(D, E, bias=False)
            self.w_up, self.w_down = (torch.nn.Parameter(torch.randn(E, *sizes)) for sizes in ((H, D), (D, H)))
            self.a, self.b = (torch.nn.Parameter(torch.randn(E, *sizes)) for sizes in ((R, D), (H, R)))

        def forward(self, x):
            weights, ids = self.router(x).softmax(-1).topk(K, -1)
            out = torch.zeros_like(x)
            for e in range(E):
                h = x @ self.w_up[e].T + (x @ self.a[e].T) @ self.b[e].T * scale
                out = out + (weights * (ids == e)).sum(-1, keepdim=True) * (F.silu(h) @ self.w_down[e].T)
            return out

    backend = check_against_eager(Scaled(), torch.randn(T, D))
    assert len(backend.rewritten) == (scale != 0)
    assert "INTERNAL" not in backend.reasons
