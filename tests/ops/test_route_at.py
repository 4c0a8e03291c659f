"""The weights of given experts: those of ``route`` at its own choice, and autograd's gradient at any."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

from moeblaze_ops.ops.route import SIGMOID_EPS, route
from moeblaze_ops.ops.route_at import route_at

E, K, T = 9, 3, 21
SCORINGS = [("softmax", False), ("softmax", True), ("softmax_topk", False), ("sigmoid", False), ("sigmoid", True)]


def definition(logits, ids, scoring, renormalize, scale):
    if scoring == "softmax_topk":
        return logits.gather(1, ids).softmax(1) * scale
    weights = (logits.sigmoid() if scoring == "sigmoid" else logits.softmax(1)).gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + (SIGMOID_EPS if scoring == "sigmoid" else 0))
    return weights * scale


def make(repeated=False, dtype=torch.float64):
    torch.manual_seed(0)
    ids = torch.rand(T, E).argsort(1)[:, :K]
    if repeated:
        ids[::2, 1] = ids[::2, 0]
    return torch.randn(T, E, dtype=dtype, requires_grad=True), ids


@pytest.mark.parametrize("repeated", [False, True], ids=["distinct", "repeated"])
@pytest.mark.parametrize(("scoring", "renormalize"), SCORINGS)
def test_weights_and_gradients(scoring, renormalize, repeated):
    logits, ids = make(repeated)
    got, expected = (f(logits, ids, scoring, renormalize, 2.5) for f in (route_at, definition))
    torch.testing.assert_close(got, expected)
    dweights = torch.randn_like(got)
    torch.testing.assert_close(*(torch.autograd.grad(w, logits, dweights) for w in (got, expected)))


@pytest.mark.parametrize(("scoring", "renormalize"), SCORINGS)
def test_at_the_choice_of_route_nothing_changes(scoring, renormalize):
    logits, _ = make(dtype=torch.float32)
    weights, ids = route(logits, K, scoring=scoring, renormalize=renormalize, scale=2.5)
    assert torch.equal(route_at(logits, ids, scoring, renormalize, 2.5), weights)


@pytest.mark.parametrize(("scoring", "renormalize"), SCORINGS)
def test_forward_mode_and_differences(scoring, renormalize):
    logits, ids = make(repeated=True)
    assert gradcheck(lambda x: route_at(x, ids, scoring, renormalize, 1.5), logits, check_forward_ad=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_opcheck(dtype):
    logits, ids = make(dtype=torch.float32)
    opcheck(route_at, (logits, ids.to(dtype), "softmax", True, 1.0))
    opcheck(route_at, (logits.detach().T.contiguous().T, ids.to(dtype).T.contiguous().T, "sigmoid", True, 1.0))


REJECTED = {
    r"experts_TK must have shape \[21, K\]": (lambda x, ids: (x, ids[:3]), ValueError),
    "with K at most 32": (lambda x, ids: (x, ids[:, :1].expand(-1, 33)), ValueError),
    "experts_TK must be int32 or int64": (lambda x, ids: (x, ids.short()), TypeError),
    r"logits_TE must have 2 dimensions \[T, E\]": (lambda x, ids: (x[None], ids), ValueError),
}


@pytest.mark.parametrize("message", REJECTED)
def test_bad_operands_are_rejected(message):
    change, error = REJECTED[message]
    with pytest.raises(error, match=message):
        route_at(*change(*make()), "softmax", False, 1.0)
