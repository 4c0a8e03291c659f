"""Scores that the graph holds by expert, [E, T], as in Meta's own Llama 4: every expert on every token, scaled by its score."""

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tools.rewrite_harness import check_against_eager, compiled

E, K, D, FF, T = 4, 2, 8, 16, 12


def of_all_experts(scores_ET: Tensor, x: Tensor) -> Tensor:
    """The position of each token, once for each expert."""
    return torch.arange(x.shape[0]).view(1, -1).expand(scores_ET.size(0), -1).reshape(-1, 1).expand(-1, D)


def scattered(logits_ET: Tensor, values: Tensor, ids: Tensor, base: float = float("-inf")) -> Tensor:
    return torch.full_like(logits_ET.transpose(0, 1), base).scatter_(1, ids, values)


def llama4(logits_ET: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    return torch.sigmoid(scattered(logits_ET, values, ids).transpose(0, 1))


def llama4_in_fp32(logits_ET: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    return torch.sigmoid(scattered(logits_ET, values, ids).t().to(torch.float32)).to(logits_ET.dtype)


def turned_last(logits_ET: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    return scattered(logits_ET, values, ids).sigmoid().permute(1, 0)


def softmax_of_chosen(logits_ET: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    return scattered(logits_ET, values.softmax(-1), ids, 0.0).T


def sigmoid_of_all(logits_ET: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """An expert that was not chosen has a score of one half."""
    return torch.sigmoid(scattered(logits_ET, values, ids, 0.0).transpose(0, 1))


def never_turned(logits_ET: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """Scores of tokens by expert, read as scores of experts by token."""
    return torch.sigmoid(scattered(logits_ET, values, ids)).reshape(E, -1)


def softmax_over_tokens(logits_ET: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    return scattered(logits_ET, values, ids).transpose(0, 1).nan_to_num(neginf=-1e4).softmax(1)


class Layer(nn.Module):
    def __init__(self, scores: Callable, *, shared: bool = True, detached: bool = False, shifted: bool = False):
        super().__init__()
        self.scores, self.detached, self.shifted = scores, detached, shifted
        self.router = nn.Parameter(torch.randn(D, E))
        self.w1, self.w3 = (nn.Parameter(0.3 * torch.randn(E, D, FF)) for _ in range(2))
        self.w2 = nn.Parameter(0.3 * torch.randn(E, FF, D))
        self.shared = nn.Linear(D, D) if shared else None

    def forward(self, x_BSD):
        x = x_BSD.view(-1, D)
        logits_ET = torch.matmul(x, self.router).transpose(0, 1)
        values, ids = torch.topk(logits_ET.transpose(0, 1), K, dim=1)
        scores_ET = self.scores(logits_ET, values, ids)
        tokens = of_all_experts(scores_ET, x)
        rows = torch.gather(x, dim=0, index=tokens) * scores_ET.reshape(-1, 1)
        rows = (rows.detach() if self.detached else rows).view(E, -1, D)
        y = torch.bmm(F.silu(torch.bmm(rows, self.w1)) * torch.bmm(rows, self.w3), self.w2)
        out = torch.zeros_like(x) if self.shared is None else self.shared(x)
        out.scatter_add_(dim=0, index=(tokens + 1) % T if self.shifted else tokens, src=y.view(-1, D))
        return out.view(x_BSD.shape)


pytestmark = pytest.mark.usefixtures("scratch")


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize(("scores", "shared", "dynamic"), [
    (llama4, False, False), (llama4, True, True), (turned_last, False, True), (turned_last, True, False),
    (softmax_of_chosen, False, True), (softmax_of_chosen, True, False),
], ids=lambda value: getattr(value, "__name__", value))  # fmt: skip
def test_training(scores, shared, dynamic):
    layer = Layer(scores, shared=shared)
    rewriting = check_against_eager(layer, torch.randn(2, T // 2, D), dynamic=dynamic)
    assert len(rewriting.rewritten) == 1 and not {"bmm", "scatter_add_"} & set(rewriting.operators())


@pytest.mark.parametrize("scores", [llama4, llama4_in_fp32], ids=lambda f: f.__name__)
def test_router_is_fused(scores, fused_routers):
    rewriting = check_against_eager(Layer(scores), torch.randn(2, T // 2, D))
    assert len(rewriting.rewritten) == 1 and "route.default" in rewriting.operators()


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("scores", [sigmoid_of_all, never_turned, softmax_over_tokens], ids=lambda f: f.__name__)
def test_lookalikes_stay(scores, fused_routers):
    rewriting = check_against_eager(Layer(scores), torch.randn(2, T // 2, D))
    assert rewriting.reasons and not rewriting.rewritten


@pytest.mark.usefixtures("fp64")
def test_rows_of_the_next_token_stay():
    rewriting = check_against_eager(Layer(llama4, shifted=True), torch.randn(2, T // 2, D))
    assert not rewriting.rewritten


@pytest.mark.usefixtures("fp64")
def test_other_values_have_their_own_router(fused_routers):
    def other(logits_ET, values, ids):
        return llama4(logits_ET, 2 * values, ids)

    rewriting = check_against_eager(Layer(other), torch.randn(2, T // 2, D))
    assert len(rewriting.rewritten) == 1 and "route.default" not in rewriting.operators()


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("grad", (True, False))
def test_detached_rows(grad, fused_routers):
    """Meta's code hands its experts rows without gradient: a fused router would have one."""
    layer, x = Layer(llama4, detached=True), torch.randn(2, T // 2, D)
    if grad:
        rewriting = check_against_eager(layer, x)
        assert "route.default" not in rewriting.operators()
    else:
        run, rewriting = compiled(layer)
        with torch.no_grad():
            torch.testing.assert_close(run(x), layer(x))
    assert len(rewriting.rewritten) == 1
