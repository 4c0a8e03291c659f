"""Sums over a router's tokens and counts of its experts: against their definitions, gradients included."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

from moeblaze_ops.ops.dispatch import dispatch
from moeblaze_ops.ops.router_sums import expert_counts, router_sums, router_sums_backward

SIZES = {"few": (37, 5), "one_expert": (4, 1), "one_token": (1, 8), "no_tokens": (0, 6), "many_experts": (9, 300)}


def make(sizes, masked, dtype=torch.float64):
    torch.manual_seed(0)
    logits = (3 * torch.randn(sizes)).to(dtype)
    return logits, torch.rand(sizes[0]) > 0.4 if masked else None


def definition(logits, kept):
    p, squares = logits.softmax(1), logits.logsumexp(1).square()
    kept = torch.ones(len(logits), dtype=torch.bool) if kept is None else kept
    return p[kept].sum(0), squares[kept].sum()


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sums_and_gradients(sizes, masked):
    logits, kept = make(sizes, masked)
    logits.requires_grad_()
    dsums, dsquares = torch.randn(sizes[1], dtype=torch.float64), torch.randn((), dtype=torch.float64)
    got, expected = router_sums(logits, kept), definition(logits, kept)
    torch.testing.assert_close(got, expected)
    for given in ((dsums, dsquares), (dsums, None), (None, dsquares)):
        chosen = [number for number, gradient in enumerate(given) if gradient is not None]
        gradients = [
            torch.autograd.grad([sums[i] for i in chosen], logits, [given[i] for i in chosen], retain_graph=True)
            for sums in (got, expected)
        ]
        torch.testing.assert_close(*gradients)


def test_gradients_by_differences_and_forward():
    logits, kept = make((6, 4), True)
    assert gradcheck(lambda x: router_sums(x, kept), logits.requires_grad_(), check_forward_ad=True)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_opcheck(masked):
    logits, kept = make((7, 5), masked, torch.float32)
    opcheck(router_sums, (logits.requires_grad_(), kept))
    opcheck(router_sums, (logits.detach().T.contiguous().T, kept))
    opcheck(router_sums_backward, (torch.randn(5), None, logits.detach(), kept))
    opcheck(expert_counts, (torch.randint(-1, 5, (7, 2)), 5))


def test_tokens_that_do_not_count_may_be_anything():
    logits, kept = make((5, 4), False, torch.float32)[0], torch.tensor([True, False, True, True, True])
    logits[1] = float("nan")
    logits.requires_grad_()
    sums, squares = router_sums(logits, kept)
    (gradient,) = torch.autograd.grad(sums[0] + squares, logits)
    assert sums.isfinite().all() and squares.isfinite() and gradient.isfinite().all() and not gradient[1].any()


def test_low_precision_is_summed_in_fp32():
    logits, _ = make((64, 8), False, torch.bfloat16)
    logits.requires_grad_()
    sums, squares = router_sums(logits, None)
    assert sums.dtype == squares.dtype == torch.float32
    torch.testing.assert_close((sums, squares), definition(logits.float(), None))
    assert torch.autograd.grad(squares, logits)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(40, 3), (0, 2), (1, 1)], ids=str)
def test_counts_are_those_of_dispatch(shape, dtype):
    torch.manual_seed(0)
    ids = torch.randint(-1, 8, shape).to(dtype)
    counts = expert_counts(ids, 7)
    assert counts.dtype == torch.int32
    assert torch.equal(counts, dispatch(ids, 7)[1].diff())


REJECTED = {
    r"router_sums: logits_TE must have 2 dimensions \[T, E\]": (lambda x: router_sums(x[0], None), ValueError),
    r"router_sums: kept_T must have shape \[3\]": (lambda x: router_sums(x, torch.ones(2, dtype=torch.bool)), ValueError),
    "router_sums: kept_T must be bool": (lambda x: router_sums(x, torch.ones(3)), TypeError),
    r"router_sums_backward: dsums_E must have shape \[4\]": (
        lambda x: router_sums_backward(torch.ones(3), None, x, None),
        ValueError,
    ),
    "router_sums_backward: dsquares must be torch.float32": (
        lambda x: router_sums_backward(None, torch.ones((), dtype=torch.float64), x, None),
        TypeError,
    ),
    "expert_counts: experts_TK must be int32 or int64": (lambda x: expert_counts(x, 4), TypeError),
}


@pytest.mark.parametrize("message", REJECTED)
def test_bad_operands_are_rejected(message):
    call, error = REJECTED[message]
    with pytest.raises(error, match=message):
        call(torch.randn(3, 4))
