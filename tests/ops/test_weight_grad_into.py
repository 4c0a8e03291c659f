"""Gradients that are added to tensors: the sum of what was there and of what the plain ops return."""

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from tests.corpus.layers import ROUTINGS, STORAGES, make_layer

ops = torch.ops.moeblaze
TOP_K = 2


def up_and_down(layer):
    """Arguments of ``expert_weight_grad`` for both projections, weights on the input of the first."""
    slots, offsets = layer.routing[:2]
    N, dtype = slots.shape[0], layer.x_TD.dtype
    (_, G, F, _), halves = layer.w_up[0].shape, len(layer.w_up)
    dh, wa = (torch.randn(N, groups, F, dtype=torch.float64).to(dtype) for groups in (G * halves, 1))
    for like, grouped, weights in ((layer.w_up, dh, layer.weights_TK), (layer.w_down, wa, None)):
        yield layer.x_TD, grouped, [w.detach() for w in like], weights, slots, offsets, TOP_K


def random_like(tensors, dtype):
    return [torch.randn_like(t, dtype=torch.float64).to(dtype) for t in tensors]


def make(case="ragged_tail", stored_as="packed", dtype=torch.float64, **options):
    layer = make_layer(case, stored_as=stored_as, dtype=dtype, requires_grad=False, **options)
    layer.x_TD, layer.weights_TK = layer.x_TD.detach(), layer.weights_TK.detach()
    return layer


@pytest.mark.parametrize("case", ROUTINGS)
def test_expert_weight_grad_add_matches_reference(case):
    torch.manual_seed(0)
    for gathered, grouped, like, *rest in up_and_down(make(case)):
        sums = random_like(like, torch.float64)
        expected = [a + b for a, b in zip(sums, ops.expert_weight_grad(gathered, grouped, like, *rest), strict=True)]
        ops.expert_weight_grad_add(gathered, grouped, sums, *rest)
        torch.testing.assert_close(sums, expected)


@pytest.mark.parametrize("stored_as", STORAGES)
def test_expert_weight_grad_add_matches_reference_for_every_storage(stored_as):
    torch.manual_seed(1)
    for gathered, grouped, like, *rest in up_and_down(make(stored_as=stored_as)):
        sums = random_like(like, torch.float64)
        expected = [a + b for a, b in zip(sums, ops.expert_weight_grad(gathered, grouped, like, *rest), strict=True)]
        ops.expert_weight_grad_add(gathered, grouped, sums, *rest)
        torch.testing.assert_close(sums, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_expert_weight_grad_add_rounds_once(dtype):
    """To fp32 nothing is rounded; to the dtype itself the sum is, once, however large what was there is."""
    torch.manual_seed(2)
    for gathered, grouped, like, *rest in up_and_down(make("unused_slots", dtype=dtype)):
        exact = [torch.zeros_like(w, dtype=torch.float32) for w in like]
        ops.expert_weight_grad_add(gathered, grouped, exact, *rest)
        for rounded, sums in zip(ops.expert_weight_grad(gathered, grouped, like, *rest), exact, strict=True):
            torch.testing.assert_close(sums.to(dtype), rounded, rtol=torch.finfo(dtype).eps, atol=1e-6)
        before = [100 * start for start in random_like(like, dtype)]
        sums = [start.clone() for start in before]
        ops.expert_weight_grad_add(gathered, grouped, sums, *rest)
        for got, start, added in zip(sums, before, exact, strict=True):
            assert torch.equal(got, (start.float() + added).to(dtype))


def test_experts_without_rows_keep_what_they_have():
    torch.manual_seed(3)
    layer = make("empty_expert", bias=True)
    for gathered, grouped, like, *rest in up_and_down(layer):
        sums = random_like(like, torch.float64)
        for w in sums:
            w[-1] = float("nan")
        ops.expert_weight_grad_add(gathered, grouped, sums, *rest)
        assert all(w[-1].isnan().all() and w[:-1].isfinite().all() for w in sums)
    db_EC = torch.full((5, 24), float("nan"), dtype=torch.float64)
    db_EC[:-1] = 1
    ops.expert_bias_grad_add(layer.x_TD, db_EC, None, *layer.routing[:2], TOP_K, True)
    assert db_EC[:-1].isfinite().all() and db_EC[-1].isnan().all()


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_expert_bias_grad_add_matches_reference(gathered, weighted):
    torch.manual_seed(4)
    layer = make("unused_slots")
    slots, offsets = layer.routing[:2]
    rows = torch.randn(layer.x_TD.shape[0] if gathered else slots.shape[0], 13, dtype=torch.float64)
    rest = (layer.weights_TK if weighted else None, slots, offsets, TOP_K, gathered)
    db_EC = torch.randn(5, 13, dtype=torch.float64)
    expected = db_EC + ops.expert_bias_grad(rows, *rest)
    ops.expert_bias_grad_add(rows, db_EC, *rest)
    torch.testing.assert_close(db_EC, expected)


@pytest.mark.parametrize("case", ["unused_slots", "zero_tokens"])
@pytest.mark.parametrize("stored_as", ["packed", "split_transposed"])
def test_adding_opcheck(case, stored_as):
    torch.manual_seed(5)
    layer = make(case, stored_as, dtype=torch.float32)
    for gathered, grouped, like, *rest in up_and_down(layer):
        opcheck(ops.expert_weight_grad_add.default, (gathered, grouped, random_like(like, torch.float32), *rest))
    rest = (layer.weights_TK, *layer.routing[:2], TOP_K, True)
    opcheck(ops.expert_bias_grad_add.default, (layer.x_TD, torch.randn(5, 24), *rest))


@pytest.mark.parametrize("stored_as", ["packed", "split_transposed"])
def test_expert_weight_grad_or_add_returns_gradients_of_parameters(stored_as):
    """What it adds, and when, is tested where compiled code calls it."""
    torch.manual_seed(5)
    for gathered, grouped, like, *rest in up_and_down(make(stored_as=stored_as, dtype=torch.float32)):
        parameters = [w.as_strided((w.numel(),), (1,)) for w in like]
        gradients = ops.expert_weight_grad_or_add(gathered, grouped, like, *rest, parameters)
        for got, want in zip(gradients, ops.expert_weight_grad(gathered, grouped, like, *rest), strict=True):
            assert torch.equal(got.as_strided(want.shape, want.stride()), want)
        opcheck(ops.expert_weight_grad_or_add.default, (gathered, grouped, like, *rest, parameters))


def test_adding_compiles_in_place():
    torch.manual_seed(6)
    gathered, grouped, like, *rest = next(up_and_down(make()))
    sums = random_like(like, torch.float64)
    expected = [w.clone() for w in sums]
    ops.expert_weight_grad_add(gathered, grouped, expected, *rest)
    torch.compile(ops.expert_weight_grad_add, backend="aot_eager", fullgraph=True)(gathered, grouped, sums, *rest)
    assert all(torch.equal(a, b) for a, b in zip(sums, expected, strict=True))


def test_adding_counts_its_flops():
    gathered, grouped, like, *rest = next(up_and_down(make()))
    counts = []
    for run in (ops.expert_weight_grad, ops.expert_weight_grad_add):
        with FlopCounterMode(display=False) as counter:
            run(gathered, grouped, random_like(like, torch.float64), *rest)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_expert_weight_grad_add_rejects_another_dtype():
    gathered, grouped, like, *rest = next(up_and_down(make(dtype=torch.bfloat16)))
    message = r"expert_weight_grad_add: dw must be float32 or torch.bfloat16, got torch.float16"
    with pytest.raises(TypeError, match=message):
        ops.expert_weight_grad_add(gathered, grouped, random_like(like, torch.float16), *rest)


def test_expert_weight_grad_add_rejects_another_shape():
    gathered, grouped, like, *rest = next(up_and_down(make()))
    message = r"expert_weight_grad_add: like must have shape \[5, 2, 12, 24\], got shape \[5, 2, 24, 12\]"
    with pytest.raises(ValueError, match=message):
        ops.expert_weight_grad_add(gathered, grouped, [w.mT.contiguous() for w in like], *rest)


def test_expert_bias_grad_add_rejects_another_shape():
    layer = make()
    message = r"expert_bias_grad_add: db_EC must have shape \[5, 24\], got shape \[5, 23\]"
    with pytest.raises(ValueError, match=message):
        ops.expert_bias_grad_add(layer.x_TD, layer.x_TD.new_zeros(5, 23), None, *layer.routing[:2], TOP_K, True)
