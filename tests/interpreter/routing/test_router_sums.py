import pytest
import torch

from moeblaze_ops.kernels.routing.dispatch import launch_expert_counts
from moeblaze_ops.kernels.routing.route import launch_route_at, launch_route_backward
from moeblaze_ops.kernels.routing.router_sums import launch_router_sums, launch_router_sums_backward
from moeblaze_ops.ops.route import route_backward
from moeblaze_ops.ops.route_at import route_at
from moeblaze_ops.ops.router_sums import expert_counts, router_sums, router_sums_backward


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(("sizes", "dtype"), [((700, 7), torch.float32), ((0, 3), torch.float32), ((70, 40), torch.bfloat16)])
def test_sums_match_the_cpu(sizes, dtype, masked):
    torch.manual_seed(0)
    logits = torch.randn(sizes[::-1]).to(dtype).T
    kept = torch.rand(2 * sizes[0])[::2] > 0.4 if masked else None
    torch.testing.assert_close(launch_router_sums(logits, kept), router_sums(logits, kept))
    for given in ((torch.randn(sizes[1]), torch.randn(())), (None, torch.randn(())), (torch.randn(()).expand(sizes[1]), None)):
        gradient = launch_router_sums_backward(*given, logits, kept)
        assert gradient.is_contiguous()
        torch.testing.assert_close(gradient, router_sums_backward(*given, logits, kept))
        more = torch.randn(sizes).to(dtype)
        added = launch_router_sums_backward(*given, logits, kept, more)
        torch.testing.assert_close(added, router_sums_backward(*given, logits, kept, more))


@pytest.mark.parametrize(
    ("scoring", "renormalize"), [("softmax", False), ("softmax", True), ("sigmoid", False), ("sigmoid", True)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_given_experts_match_the_cpu(scoring, renormalize, dtype):
    torch.manual_seed(0)
    logits, ids = torch.randn(30, 9), torch.randint(9, (3, 30)).to(dtype).T
    options = (scoring, renormalize, 1.5)
    weights = launch_route_at(logits, ids, *options)
    torch.testing.assert_close(weights, route_at(logits, ids, *options))
    backward = (torch.randn(30, 3), logits, weights, ids.contiguous(), *options)
    torch.testing.assert_close(launch_route_backward(*backward), route_backward(*backward))


def test_experts_that_there_are_not_weigh_nothing():
    weights = launch_route_at(torch.randn(2, 4), torch.tensor([[1, 4], [-1, -7]]), "softmax_topk", False, 1.0)
    assert weights.tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize("E", [5, 1500])
def test_counts_match_the_cpu(E):
    torch.manual_seed(0)
    ids = torch.randint(-1, E + 1, (400, 3))
    assert torch.equal(launch_expert_counts(ids, E), expert_counts(ids, E))
