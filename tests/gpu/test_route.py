"""``route`` on a GPU: eager and compiled, forward and backward, against the CPU."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from moeblaze_ops.ops.route import route, route_backward
from tests.corpus.router_cases import LOGITS, ROUTERS, Router, make_logits

pytestmark = pytest.mark.gpu

op = torch.ops.moeblaze.route
SCORINGS = ("softmax", "softmax_topk", "sigmoid")
NUM_CHOICES = {7: (1, 2, 7), 128: (1, 2, 8, 32), 384: (1, 8, 32), 4096: (1, 8, 32)}
SIZES = [(E, K) for E, choices in NUM_CHOICES.items() for K in choices]


@pytest.fixture(autouse=True)
def poisoned_buffers():
    """Fill every uninitialised buffer with NaN, so that an element that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def choice_scores(router, logits_TE, bias_E):
    logits_TE = logits_TE.float()
    scores_TE = {"softmax": logits_TE.softmax(1), "softmax_topk": logits_TE, "sigmoid": logits_TE.sigmoid()}
    return scores_TE[router.scoring] + (0 if bias_E is None else bias_E)


def assert_same_choices(router, got, expected, logits_TE, bias_E):
    """Equal ids where no two choice scores are within a rounding; else choices as good as the CPU's to a few roundings."""
    assert torch.all((got >= 0) & (got < router.num_experts))
    assert all(len(set(row)) == router.top_k for row in got.tolist())
    rounded = router.scoring == "sigmoid" and (router.num_groups > 1 or not logits_TE.isfinite().all())
    if bias_E is None and not rounded:
        assert torch.equal(got, expected)
    elif not logits_TE.isnan().any():
        choice_TE = choice_scores(router, logits_TE, bias_E)
        # exp and the division are within a few roundings of the CPU's, at values of at most 1 + bias.
        torch.testing.assert_close(choice_TE.gather(1, got.long()), choice_TE.gather(1, expected.long()), rtol=0, atol=1e-6)


def assert_matches_cpu(router, logits_TE, run=op):
    """Forward and backward on the GPU against the CPU op on the same logits, and against a second run."""
    bias_E = router.bias()
    on_gpu = [t if t is None else t.cuda() for t in (logits_TE, bias_E)]
    on_gpu[0].requires_grad_()
    weights, experts = run(*router.arguments(*on_gpu))
    assert weights.dtype == torch.float32 and experts.dtype == torch.int32
    _, expected_experts = op(*router.arguments(logits_TE, bias_E))
    assert_same_choices(router, experts.cpu(), expected_experts, logits_TE, bias_E)
    dweights = torch.randn(weights.shape)
    (dlogits,) = torch.autograd.grad(weights, on_gpu[0], dweights.cuda())
    truth = exact_weights(router, logits_TE.double(), experts.cpu())
    # exp rounds its argument, of at most 16 outside the special values, to fp32.
    torch.testing.assert_close(weights.detach().cpu(), truth.float(), rtol=1e-5, atol=1e-12, equal_nan=True)
    options = (router.scoring, router.renormalize, router.scale)
    expected = route_backward(dweights.double(), logits_TE.double(), truth, experts.cpu(), *options)
    # One rounding to the dtype of the logits, and sums of K products in fp32 that may cancel to nothing.
    products = (dweights.double() * truth).nan_to_num().abs()
    scale = products.max().item() if products.numel() else 0.0
    eps = torch.finfo(logits_TE.dtype).eps + 64 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(dlogits.cpu().double(), expected, rtol=0, atol=eps * scale + 1e-30, equal_nan=True)
    again_weights, again_experts = run(*router.arguments(*on_gpu))
    (again,) = torch.autograd.grad(again_weights, on_gpu[0], dweights.cuda())
    for first, second in ((weights, again_weights), (experts, again_experts), (dlogits, again)):
        assert torch.equal(first.nan_to_num(), second.nan_to_num())


def exact_weights(router, logits_TE, experts_TK):
    """Weights of given experts in fp64."""
    chosen = logits_TE.gather(1, experts_TK.long())
    if router.scoring == "softmax_topk":
        return chosen.softmax(1) * router.scale
    scores = chosen.sigmoid() if router.scoring == "sigmoid" else logits_TE.softmax(1).gather(1, experts_TK.long())
    if router.renormalize:
        scores = scores / (scores.sum(1, keepdim=True) + (1e-20 if router.scoring == "sigmoid" else 0))
    return scores * router.scale


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("case", LOGITS)
def test_every_router(name, case):
    torch.manual_seed(0)
    assert_matches_cpu(ROUTERS[name], make_logits(case, ROUTERS[name].num_experts))


@pytest.mark.parametrize(("num_experts", "top_k"), SIZES)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("case", ["distinct", "ties"])
def test_every_size(num_experts, top_k, scoring, case):
    torch.manual_seed(1)
    for renormalize in (False, True):
        router = Router(num_experts, top_k, scoring, renormalize, 2.5)
        assert_matches_cpu(router, make_logits(case, num_experts, num_tokens=131))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("num_experts", "num_groups"), [(160, 8), (256, 8), (384, 3), (4096, 64)])
def test_groups(scoring, num_experts, num_groups):
    torch.manual_seed(2)
    router = Router(num_experts, 6, scoring, True, 2.5, num_groups, num_groups // 2 + 1)
    assert_matches_cpu(router, make_logits("distinct", num_experts, num_tokens=67))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["softmax", "softmax_topk", "sigmoid_groups"])
def test_low_precision_logits(name, dtype):
    torch.manual_seed(3)
    router = ROUTERS[name]
    assert_matches_cpu(router, make_logits("ties", router.num_experts, dtype))


@pytest.mark.parametrize("name", ["softmax", "softmax_groups", "sigmoid"])
def test_strided_logits_and_weight_gradients(name):
    torch.manual_seed(4)
    router = ROUTERS[name]
    logits = make_logits("distinct", router.num_experts).cuda()
    expected_weights, expected_experts = op(*router.arguments(logits))
    strided = logits.t().contiguous().t().requires_grad_()
    weights, experts = op(*router.arguments(strided))
    assert torch.equal(experts, expected_experts)
    # Another layout of the same row sums it in another order.
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=0)
    (from_expanded,) = torch.autograd.grad(weights.sum(), strided, retain_graph=True)
    (from_dense,) = torch.autograd.grad(weights, strided, torch.ones_like(weights))
    assert torch.equal(from_expanded, from_dense)


def test_offsets_beyond_int32():
    logits = torch.zeros(2**20 + 3, 4096, device="cuda", dtype=torch.bfloat16)
    last = torch.randn(5, 4096, device="cuda").bfloat16()
    logits[-5:] = last
    weights, experts = route(logits, 2)
    expected_weights, expected_experts = route(last, 2)
    assert torch.equal(weights[-5:], expected_weights) and torch.equal(experts[-5:], expected_experts)


@pytest.mark.parametrize("name", ["softmax", "softmax_groups", "sigmoid_groups"])
def test_compiled_route_matches_cpu(name):
    torch.manual_seed(5)
    router = ROUTERS[name]
    compiled = torch.compile(lambda *arguments: op(*arguments), fullgraph=True)
    for num_tokens in (19, 300):
        assert_matches_cpu(router, make_logits("distinct", router.num_experts, num_tokens=num_tokens), compiled)


def test_generated_code_launches_the_kernels():
    logits = torch.randn(300, 64, device="cuda", requires_grad=True)
    compiled = torch.compile(lambda logits: route(logits, 8)[0])
    _, codes = run_and_get_code(lambda: compiled(logits).sum().backward())
    code = "\n".join(line.split("#", 1)[0] for line in "\n".join(codes).splitlines())
    assert "torch.ops.moeblaze." not in code
    assert "_route_kernel" in code and "_route_backward_kernel" in code


@pytest.mark.parametrize("E", [7, 128, 4096])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_sums_for_losses_match_the_cpu(E, masked):
    torch.manual_seed(0)
    logits, ids = torch.randn(5000, E).bfloat16(), torch.randint(-1, E, (5000, 4))
    kept = torch.rand(5000) > 0.3 if masked else None
    dsums, dsquares = torch.randn(E), torch.randn(())
    on_gpu = [t if t is None else t.cuda() for t in (dsums, dsquares, logits, kept)]
    sums = torch.ops.moeblaze.router_sums(*on_gpu[2:])
    # Sums of 5000 numbers in another order.
    torch.testing.assert_close([s.cpu() for s in sums], list(torch.ops.moeblaze.router_sums(logits, kept)), rtol=1e-4, atol=1e-4)
    gradient = torch.ops.moeblaze.router_sums_backward(*on_gpu)
    expected = torch.ops.moeblaze.router_sums_backward(dsums, dsquares, logits, kept)
    torch.testing.assert_close(gradient.cpu(), expected, rtol=2e-2, atol=1e-4)
    assert torch.equal(torch.ops.moeblaze.expert_counts(ids.cuda(), E).cpu(), torch.ops.moeblaze.expert_counts(ids, E))


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("renormalize", [False, True])
def test_given_experts_match_the_cpu(scoring, renormalize):
    torch.manual_seed(0)
    logits, ids = torch.randn(3000, 128), torch.randint(128, (3000, 8))
    results = []
    for device in ("cpu", "cuda"):
        leaf = logits.to(device, copy=True).requires_grad_()
        weights = torch.ops.moeblaze.route_at(leaf, ids.to(device), scoring, renormalize, 2.5)
        weights.backward(torch.linspace(-1, 1, 24000, device=device).view(3000, 8))
        results.append((weights.detach().cpu(), leaf.grad.cpu()))
    torch.testing.assert_close(*results)
