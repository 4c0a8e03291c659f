"""Token rounding: counts that are multiples of a tile, by the tokens that weigh most, in shapes that do not depend on data."""

import pytest
import torch

import moeblaze_ops

E, K, SPARE, TILE = 5, 2, 2, 4


def routing(num_tokens: int, seed: int = 0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, E, generator=generator, dtype=dtype) * torch.arange(1, E + 1)
    return scores.softmax(-1).topk(K + SPARE)


def by_hand(weights, experts, spare: int, tile: int, mode: str) -> set[tuple[int, int]]:
    """The kept pairs (token, slot), expert by expert in Python."""
    width, kept = experts.shape[1], set()
    for e in range(E):
        have = [(t, k) for t in range(len(experts)) for k in range(width) if experts[t, k] == e]
        ranked = sorted(have, key=lambda slot: (slot[1] >= width - spare, -weights[slot].item(), slot[0]))
        chosen = sum(k < width - spare for _, k in have)
        down, up = chosen // tile * tile, -(-chosen // tile) * tile
        wants_up = mode == "up" or (mode == "nearest" and 2 * (chosen - down) >= tile)
        kept.update(ranked[: up if wants_up and up <= len(have) else down])
    return kept


@pytest.mark.parametrize("mode", ["nearest", "up", "down"])
@pytest.mark.parametrize("spare", [0, SPARE])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 50])
def test_matches_experts_one_by_one(num_tokens, spare, mode):
    for seed in range(5):
        weights, experts = (tensor[:, : K + spare] for tensor in routing(num_tokens, seed))
        new_weights, new_experts = moeblaze_ops.round_routing(weights, experts, E, spare=spare, tile=TILE, mode=mode)
        kept = {tuple(slot) for slot in (new_experts >= 0).nonzero().tolist()}
        assert kept == by_hand(weights, experts, spare, TILE, mode)
        assert torch.equal(new_experts, torch.where(new_experts >= 0, experts, -1))
        assert torch.equal(new_weights, torch.where(new_experts >= 0, weights, 0))
        assert new_experts.dtype == experts.dtype
        counts = torch.bincount(new_experts[new_experts >= 0], minlength=E)
        assert not (counts % TILE).any()


def test_all_to_one_expert():
    weights, experts = torch.rand(10, 1), torch.full((10, 1), 3)
    _, rounded = moeblaze_ops.round_routing(weights, experts, E, tile=TILE)
    assert (rounded == 3).sum() == 8
    assert set(weights[rounded >= 0].tolist()) == set(weights.flatten().topk(8).values.tolist())


def test_unused_slots_stay_unused():
    weights, experts = torch.rand(9, 2), torch.full((9, 2), -1)
    experts[:, 0], experts[0, 1] = 2, E
    rounded_weights, rounded = moeblaze_ops.round_routing(weights, experts, E, tile=1)
    assert torch.equal(rounded[:, 0], experts[:, 0]) and (rounded[:, 1] == -1).all() and not rounded_weights[:, 1].any()


def test_a_tile_of_one_changes_nothing():
    weights, experts = routing(20)
    rounded = moeblaze_ops.round_routing(weights[:, :K], experts[:, :K], E, tile=1)
    assert torch.equal(rounded[0], weights[:, :K]) and torch.equal(rounded[1], experts[:, :K])


def test_shapes_of_sequences():
    weights, experts = (tensor.view(4, 5, -1) for tensor in routing(20))
    flat = moeblaze_ops.round_routing(*routing(20), E, spare=SPARE, tile=TILE)
    rounded = moeblaze_ops.round_routing(weights, experts.int(), E, spare=SPARE, tile=TILE)
    assert torch.equal(rounded[0].view(20, -1), flat[0]) and torch.equal(rounded[1].view(20, -1), flat[1].int())


def _layer(scores, x, w_up, w_down, tile=TILE):
    weights, experts = moeblaze_ops.round_routing(*scores.softmax(-1).topk(K + SPARE), E, spare=SPARE, tile=tile)
    return moeblaze_ops.moe(x, weights, experts, w_up, w_down, activation="silu")


def _operands(num_tokens):
    torch.manual_seed(0)
    shapes = (num_tokens, E), (num_tokens, 6), (E, 3, 6), (E, 6, 3)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_gradients():
    assert torch.autograd.gradcheck(_layer, _operands(9))


def test_matches_the_experts_that_are_left():
    scores, x, w_up, w_down = _operands(30)
    weights, experts = scores.softmax(-1).topk(K + SPARE)
    kept = by_hand(weights, experts, SPARE, TILE, "nearest")
    expected = torch.zeros_like(x)
    for t, k in kept:
        e = experts[t, k]
        y = torch.nn.functional.silu(x[t] @ w_up[e].T) @ w_down[e].T
        expected = expected + torch.nn.functional.one_hot(torch.tensor(t), 30).unsqueeze(1) * y * weights[t, k]
    actual = _layer(scores, x, w_up, w_down)
    torch.testing.assert_close(actual, expected)
    grads = [torch.autograd.grad(out.square().sum(), (scores, x, w_up, w_down)) for out in (actual, expected)]
    for grad, right in zip(*grads, strict=True):
        torch.testing.assert_close(grad, right)


def test_compiles_once_for_several_numbers_of_tokens():
    run = torch.compile(_layer, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_tokens in (9, 30, 17):
            torch.testing.assert_close(run(*_operands(num_tokens)), _layer(*_operands(num_tokens)))
