from itertools import cycle, product

import pytest
import torch

from moeblaze_ops.kernels.routing.route import launch_route, launch_route_backward
from moeblaze_ops.ops.route import route_backward
from tests.corpus import reference
from tests.corpus.router_cases import LOGITS, ROUTERS, Router, make_logits

LARGE = {
    "many_experts": Router(384, 8, "sigmoid", True, 2.5, num_groups=8, top_groups=4, biased=True),
    "many_choices": Router(4096, 32, "softmax"),
    "groups_of_20": Router(160, 6, "softmax", scale=16.0, num_groups=8, top_groups=3),
}


def assert_forward_matches_reference(router, logits_TE):
    arguments = router.arguments(logits_TE, router.bias())
    weights_TK, experts_TK = launch_route(*arguments)
    expected_weights, expected_experts = reference.route(*arguments)
    assert weights_TK.dtype == torch.float32 and experts_TK.dtype == torch.int32
    assert torch.equal(experts_TK, expected_experts)
    torch.testing.assert_close(weights_TK, expected_weights, equal_nan=True)


def assert_backward_matches_cpu(router, logits_TE):
    arguments = router.arguments(logits_TE, router.bias())
    weights_TK, experts_TK = torch.ops.moeblaze.route(*arguments)
    dweights_TK = torch.randn(router.top_k, logits_TE.shape[0]).t()
    backward = (dweights_TK, logits_TE, weights_TK, experts_TK, router.scoring, router.renormalize, router.scale)
    dlogits_TE = launch_route_backward(*backward)
    assert dlogits_TE.dtype == logits_TE.dtype and dlogits_TE.is_contiguous()
    torch.testing.assert_close(dlogits_TE, route_backward(*backward), equal_nan=True)


# All logits meet each way to score, a bias and groups; the other routers meet ties, and each one more.
ALL_LOGITS = ("softmax", "softmax_topk_biased", "sigmoid_groups")
CASES = [*product(ALL_LOGITS, LOGITS), *((name, "ties") for name in ROUTERS if name not in ALL_LOGITS)]
CASES += [(name, case) for name, case in zip(ROUTERS, cycle(LOGITS), strict=False) if (name, case) not in CASES]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_route_matches_reference(name, case):
    torch.manual_seed(0)
    router = ROUTERS[name]
    assert_forward_matches_reference(router, make_logits(case, router.num_experts))


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("case", ["distinct", "ties"])
def test_route_matches_reference_for_many_experts(name, case):
    torch.manual_seed(1)
    router = LARGE[name]
    logits_TE = make_logits(case, router.num_experts, num_tokens=3)
    assert_forward_matches_reference(router, logits_TE)
    assert_backward_matches_cpu(router, logits_TE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["softmax", "sigmoid_groups"])
def test_route_computes_in_fp32(name, dtype):
    torch.manual_seed(2)
    router = ROUTERS[name]
    logits_TE = make_logits("ties", router.num_experts, dtype)
    assert_forward_matches_reference(router, logits_TE)
    assert_backward_matches_cpu(router, logits_TE)


@pytest.mark.parametrize("name", ["softmax", "softmax_groups", "sigmoid_groups"])
def test_route_reads_strided_logits(name):
    torch.manual_seed(3)
    router = ROUTERS[name]
    contiguous = make_logits("distinct", router.num_experts)
    for strided in (contiguous.t().contiguous().t(), torch.stack([contiguous, contiguous], 2)[..., 1]):
        assert_forward_matches_reference(router, strided)
        assert_backward_matches_cpu(router, strided)


@pytest.mark.parametrize(
    ("name", "case"),
    [*((name, "distinct") for name in ROUTERS), *zip(ROUTERS, cycle(["ties", "one_token", "zero_tokens"]), strict=False)],
)
def test_route_backward_matches_the_cpu_implementation(name, case):
    torch.manual_seed(4)
    router = ROUTERS[name]
    assert_backward_matches_cpu(router, make_logits(case, router.num_experts))
