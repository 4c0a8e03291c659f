"""Weights of other sizes, and other K, in one process: these are guarded, the number of tokens stays a symbol."""

import pytest
import torch
from torch.nn import functional as F

import moeblaze_ops
from tests.tools.rewrite_harness import rewriting_backend


def layer(x, router, w_up, w_down, top_k=4):
    weights, ids = F.linear(x, router).softmax(-1).topk(top_k // 2, -1)
    out = torch.zeros_like(x)
    for e in range(w_up.shape[0]):
        token, k = torch.where(ids == e)
        out = out.index_add(0, token, F.silu(x[token] @ w_up[e].T) @ w_down[e].T * weights[token, k, None])
    return out


def arguments(T, D, H, E):
    return torch.randn(T, D), torch.randn(E, D), torch.randn(E, H, D), torch.randn(E, D, H)


@pytest.mark.parametrize("dynamic", [None, True])
def test_each_size_of_weights_is_rewritten(dynamic):
    torch._dynamo.reset()
    with rewriting_backend() as backend, moeblaze_ops.compile.recording() as records:
        run = torch.compile(layer, backend=backend, dynamic=dynamic)
        for sizes in ((32, 16, 24, 4), (48, 24, 16, 4), (64, 16, 40, 8), (80, 24, 16, 4), (7, 16, 40, 8)):
            given = arguments(*sizes)
            torch.testing.assert_close(run(*given), layer(*given), rtol=1e-4, atol=1e-4)
    found = [candidate for record in records for candidate in record.report.candidates]
    assert [candidate.F for candidate in found] == [24, 16, 40], "other numbers of tokens compile nothing"
    assert all(candidate.became for candidate in found) and all(isinstance(candidate.T, str) for candidate in found[1:])


@pytest.mark.parametrize("dynamic", [None, True])
def test_each_number_of_experts_a_token_is_rewritten(dynamic):
    torch._dynamo.reset()
    with rewriting_backend() as backend, moeblaze_ops.compile.recording() as records:
        run = torch.compile(layer, backend=backend, dynamic=dynamic)
        for T, K in ((32, 2), (48, 3), (20, 4), (64, 3), (3, 3), (7, 2)):
            given = *arguments(T, 16, 24, 4), 2 * K  # a guard on half of a symbol does not make it a number
            torch.testing.assert_close(run(*given), layer(*given), rtol=1e-4, atol=1e-4)
    found = [candidate for record in records for candidate in record.report.candidates]
    assert all(candidate.became for candidate in found) and [candidate.K for candidate in found][:3] == [2, 3, 4]


def test_what_the_user_marks_as_dynamic_is_not_guarded():
    torch._dynamo.reset()
    given = arguments(32, 16, 24, 4)
    torch._dynamo.mark_dynamic(given[2], 1)
    torch._dynamo.mark_dynamic(given[3], 2)
    with rewriting_backend() as backend, moeblaze_ops.compile.recording() as records:
        torch.testing.assert_close(torch.compile(layer, backend=backend)(*given), layer(*given), rtol=1e-4, atol=1e-4)
    assert not [candidate for record in records if hasattr(record, "report") for candidate in record.report.rewritten]
