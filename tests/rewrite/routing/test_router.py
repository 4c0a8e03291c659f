"""The router before a rewritten layer becomes ``moeblaze::route`` where it is one, and stays where it is not."""

import pytest
import torch
import torch.nn.functional as F

from tests.corpus.router_layers import (
    BIAS,
    LOOKALIKES,
    ROUTERS,
    D,
    E,
    K,
    Layer,
    T,
    chosen_without_gradient,
    limited_to_groups,
    renormalized,
)
from tests.tools.rewrite_harness import check_against_eager, compiled

pytestmark = pytest.mark.usefixtures("fused_routers")

@pytest.mark.parametrize("router", ROUTERS)
def test_a_router_is_fused(router):
    rewriting = check_against_eager(Layer(router), torch.randn(T, D))
    assert len(rewriting.rewritten) == 1
    assert any("route" in name for name in rewriting.operators())


@pytest.mark.parametrize("router", ROUTERS)
def test_low_precision_logits_are_scored_in_fp32(router):
    layer = Layer(router, torch.bfloat16)
    # bf16 rounds h, a, y and the sum over experts: a few times 2^-8 of the largest value.
    rewriting = check_against_eager(layer, torch.randn(T, D, dtype=torch.bfloat16), tolerance=3e-2)
    assert any("route" in name for name in rewriting.operators())


def test_weights_of_one_slot_are_cast_behind_the_mask():
    class PerSlot(Layer):
        def forward(self, x):
            weights, experts = self.route(self.gate(x))
            out = torch.zeros_like(x)
            for k in range(K):
                for e in range(E):
                    chosen = (weights[:, k] * (experts[:, k] == e)).to(x.dtype)
                    gate, up = F.linear(x, self.up[e]).chunk(2, -1)
                    out += F.linear(F.silu(gate) * up, self.down[e]) * chosen[:, None]
            return out

    layer = PerSlot(renormalized, torch.bfloat16)
    rewriting = check_against_eager(layer, torch.randn(T, D, dtype=torch.bfloat16), tolerance=3e-2)
    assert len(rewriting.rewritten) == 1


def test_a_choice_without_gradient_is_fused():
    rewriting = check_against_eager(Layer(chosen_without_gradient), torch.randn(T, D))
    assert any("route" in name for name in rewriting.operators())


@pytest.mark.parametrize("router", LOOKALIKES)
def test_a_lookalike_stays(router):
    rewriting = check_against_eager(Layer(router), torch.randn(T, D))
    assert len(rewriting.rewritten) == 1
    assert not any("route" in name for name in rewriting.operators())


def test_scores_in_low_precision_stay():
    rewriting = check_against_eager(
        Layer(lambda logits: torch.topk(F.softmax(logits, dim=-1), K), torch.bfloat16),
        torch.randn(T, D, dtype=torch.bfloat16),
        tolerance=3e-2,
    )
    assert not any("route" in name for name in rewriting.operators())


def test_scores_changed_before_the_choice_stay():
    def changed(logits):
        scores = F.softmax(logits, dim=-1, dtype=torch.float32)
        scores.mul_(0.5)
        return torch.topk(scores, K)

    layer, x = Layer(changed), torch.randn(T, D)
    run, rewriting = compiled(layer)
    with torch.no_grad():
        torch.testing.assert_close(run(x), layer(x))
    assert len(rewriting.rewritten) == 1
    assert not any("route" in name for name in rewriting.operators())


@pytest.mark.parametrize("of_all", [False, True])
def test_weights_written_through_a_part_stay(of_all):
    def changed(logits):
        values, ids = torch.topk(logits, K)
        weights = F.softmax(logits if of_all else values, dim=-1, dtype=torch.float32)
        first = weights[0]
        first.mul_(0.5)
        return (weights.gather(-1, ids) if of_all else weights).to(logits.dtype), ids

    layer, x = Layer(changed, torch.float64), torch.randn(T, D, dtype=torch.float64)
    run, rewriting = compiled(layer)
    with torch.no_grad():
        torch.testing.assert_close(run(x), layer(x), rtol=1e-6, atol=1e-6)
    assert len(rewriting.rewritten) == 1
    assert not any("route" in name for name in rewriting.operators())


def test_a_bias_changed_later_stays():
    class Balanced(Layer):
        def __init__(self):
            super().__init__(lambda logits: limited_to_groups(logits, bias=self.bias))
            self.register_buffer("bias", BIAS.clone())

        def forward(self, x):
            out = super().forward(x)
            self.bias.add_(0.5)
            return out

    layer, x = Balanced(), torch.randn(T, D)
    run, rewriting = compiled(layer)
    actual = run(x)
    layer.bias.copy_(BIAS)
    torch.testing.assert_close(actual, layer(x))
    assert len(rewriting.rewritten) == 1
    assert not any("route" in name for name in rewriting.operators())


def test_more_choices_than_the_groups_hold_stay():
    rewriting = check_against_eager(Layer(lambda logits: limited_to_groups(logits, count=3)), torch.randn(T, D))
    assert len(rewriting.rewritten) == 1
    assert not any("route" in name for name in rewriting.operators())


class Scattered(Layer):
    """Scores of all experts, read at the chosen ones; Llama 4's multiply the experts' inputs."""

    def __init__(self, scores, dtype=torch.float32, on_input=False):
        super().__init__(None, dtype)
        self.scores, self.on_input = scores, on_input

    def forward(self, x):
        values, experts = torch.topk(self.gate(x), K, dim=-1)
        scores = self.scores(values, experts)
        out = torch.zeros_like(x)
        for e in range(E):
            score = scores[:, e, None] * (experts == e).any(-1, keepdim=True)
            gate, up = F.linear(x * score if self.on_input else x, self.up[e]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[e])
            out = out + (y if self.on_input else y * score)
        return out


def scattered(values, experts, base=float("-inf"), dim=1):
    return torch.full((T, E), base, dtype=values.dtype).scatter_(dim, experts, values)


def changed_under_its_other_name(values, experts):
    base = torch.full((T, E), float("-inf"), dtype=values.dtype)
    scores = base.scatter_(1, experts, values)
    base.copy_(scattered(values * 2, experts))
    return torch.sigmoid(scores.float()).to(values.dtype)


SCATTERED = {
    "llama4": lambda values, experts: torch.sigmoid(scattered(values, experts).float()).to(values.dtype),
    "sigmoid": lambda values, experts: scattered(values, experts).sigmoid(),
    "makeMoE": lambda values, experts: F.softmax(scattered(values, experts), dim=-1),
    "in fp32": lambda values, experts: scattered(values.float(), experts).softmax(-1).to(values.dtype),
}
SCATTERED_LOOKALIKES = {
    "softmax over all": lambda values, experts: F.softmax(scattered(values, experts, base=0.0), dim=-1),
    "softmax over tokens": lambda values, experts: F.softmax(scattered(values, experts), dim=0),
    "the next expert": lambda values, experts: scattered(values, (experts + 1) % E).sigmoid(),
    "other values": lambda values, experts: scattered(values * 2, experts).sigmoid(),
    "in another order": lambda values, experts: scattered(values.flip(1), experts).sigmoid(),
    "a number": lambda values, experts: torch.full((T, E), float("-inf")).scatter_(1, experts, 0.5).sigmoid(),
    "changed under its other name": changed_under_its_other_name,
}
STILL_LAYERS = (
    "softmax over all", "softmax over tokens", "other values", "in another order", "a number", "changed under its other name",
)  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "on_input"), [
    *((name, (torch.float32, torch.bfloat16)[number % 2], number % 4 > 1) for number, name in enumerate(SCATTERED)),
    ("llama4", torch.bfloat16, True), ("makeMoE", torch.bfloat16, True),
], ids=str)  # fmt: skip
def test_scattered_scores_are_fused(name, dtype, on_input):
    layer = Scattered(SCATTERED[name], dtype, on_input)
    tolerance = 3e-2 if dtype == torch.bfloat16 else None
    rewriting = check_against_eager(layer, torch.randn(T, D, dtype=dtype), tolerance=tolerance)
    assert len(rewriting.rewritten) == 1
    assert "route.default" in rewriting.operators()


@pytest.mark.parametrize("name", SCATTERED_LOOKALIKES)
def test_scattered_lookalikes_stay(name):
    rewriting = check_against_eager(Scattered(SCATTERED_LOOKALIKES[name]), torch.randn(T, D))
    assert len(rewriting.rewritten) == (name in STILL_LAYERS)
    assert "route.default" not in rewriting.operators()


def test_scattered_scores_that_are_returned_stay():
    class Returned(Scattered):
        def forward(self, x):
            return super().forward(x), self.kept

    def keep(values, experts):
        layer.kept = SCATTERED["llama4"](values, experts)
        return layer.kept

    layer = Returned(keep)
    rewriting = check_against_eager(layer, torch.randn(T, D))
    assert len(rewriting.rewritten) == 1 and "route.default" not in rewriting.operators()
