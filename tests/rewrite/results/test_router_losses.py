"""Losses of a router beside its layer, in the code that Inductor generates for a CUDA device; no device is needed."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import moeblaze_ops
from moeblaze_ops.ops.router_sums import router_sums
from tests.tools import fakecuda

T, D, HIDDEN, E, K = 80, 64, 128, 16, 2  # more slots than one kernel groups
SHAPES = ((T, D), (E, D), (E, 2 * HIDDEN, D), (E, D, HIDDEN))


def layer(x, router, w_up, w_down, loss_of):
    """The layer, and a loss that is made of the logits and the ids."""
    logits = F.linear(x, router)
    weights, experts = moeblaze_ops.route(logits, K)
    loss = loss_of(logits, experts)
    return moeblaze_ops.moe(x, weights, experts, w_up, w_down), loss


def both(logits, experts):
    return moeblaze_ops.load_balancing_loss(logits, K, ids=experts) + moeblaze_ops.router_z_loss(logits)


def of_two_sets(logits, experts):
    """The second loss is of other logits."""
    return moeblaze_ops.load_balancing_loss(logits, K, ids=experts) + moeblaze_ops.router_z_loss(2 * logits)


def of_other_tokens(logits, experts):
    """The second loss is of some tokens."""
    kept = torch.arange(logits.shape[0]) % 2 == 0
    balance = moeblaze_ops.load_balancing_loss(logits, K, ids=experts)
    return balance + moeblaze_ops.router_z_loss(logits, mask=kept)


def as_written(logits, experts):
    """The loss of transformers' models."""
    fraction = F.one_hot(experts.long(), E).float().mean(0)
    return E * (fraction * logits.float().softmax(-1).mean(0)).sum()


def over_slots_too(logits, experts):
    fraction = F.one_hot(experts.long(), E).sum((0, 1)) / experts.numel()
    return (fraction * logits.float().softmax(-1).mean(0)).sum()


def mean_over_both(logits, experts):
    return (F.one_hot(experts.long(), E).float().mean((0, 1)) * logits.float().softmax(-1).mean(0)).sum()


def by_experts(logits, experts):
    """Of each token, not over tokens."""
    return (F.one_hot(experts.long(), E).float().mean(1) * logits.float().softmax(-1)).sum()


def of_other_ids(logits, experts):
    """Ids that no layer has."""
    return (F.one_hot(experts.long() * 2 % E, E).float().mean(0) * logits.float().softmax(-1).mean(0)).sum()


def step(*arguments, loss_of):
    out, loss = layer(*arguments, loss_of)
    return out.float().square().sum() + loss


def training(loss_of):
    """Gradients as compiled, in eager mode, and the code of forward and backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = [(torch.randn(shape) * 0.1).requires_grad_() for shape in SHAPES]
    sources: list[str] = []
    compiled = torch.compile(step, backend=fakecuda.shadow_backend(sources), fullgraph=True)
    gradients = [torch.autograd.grad(run(*inputs, loss_of=loss_of), inputs) for run in (compiled, step)]
    assert len(sources) == 2
    return *gradients, *sources


@pytest.mark.parametrize(("loss_of", "passes"), [(both, 1), (of_two_sets, 2), (of_other_tokens, 2)])
def test_gradient_of_the_logits_in_one_pass(loss_of, passes):
    """The router's own gradient is added in that of the losses, and losses of the same logits and tokens are one."""
    got, expected, forward, backward = training(loss_of)
    for compiled, eager in zip(got, expected, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    assert fakecuda.launches(backward).count("_router_sums_backward_kernel") == passes
    assert "'added_ptr': '*fp32'" in backward
    assert fakecuda.launches(forward).count("_count_kernel") == 1, "counts are those of dispatch"


def test_counts_of_other_ids_are_taken():
    def loss_of(logits, experts):
        return moeblaze_ops.load_balancing_loss(logits, K, ids=experts.flip(0).roll(1, 1))

    assert fakecuda.launches(training(loss_of)[2]).count("_count_kernel") == 2


def forward_code(loss_of, dynamic=False) -> str:
    fakecuda.require_fake_cuda()
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in SHAPES]
    return fakecuda.generated_code(lambda *given: layer(*given, loss_of), tuple(inputs), dynamic=dynamic)


@pytest.mark.parametrize(("loss_of", "counted", "dynamic"), [
    (as_written, 2, False), (as_written, 2, True), (over_slots_too, 1, True), (mean_over_both, 1, False),
    (mean_over_both, 1, True), (by_experts, 1, True), (of_other_ids, 1, False),
])  # fmt: skip
def test_ids_are_counted_not_compared(loss_of, counted, dynamic, monkeypatch):
    """Sums over slots too are what dispatch counts, so that one count is left."""
    monkeypatch.setenv("CI", "1")  # Inductor is stricter there
    code = forward_code(loss_of, dynamic)
    assert fakecuda.launches(code).count("_count_kernel") == counted
    compared = [name for name in fakecuda.launches(code) if "_eq_" in name]
    assert bool(compared) == (loss_of in (by_experts, of_other_ids))


def test_added_gradient():
    torch.manual_seed(0)
    logits, more = torch.randn(7, 5, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64).T
    dsums, dsquares = torch.randn(5, dtype=torch.float64), torch.randn((), dtype=torch.float64)
    sums, squares = router_sums(leaf := logits.clone().requires_grad_(), None)
    (alone,) = torch.autograd.grad((sums, squares), leaf, (dsums, dsquares))
    got = torch.ops.moeblaze.router_sums_backward(dsums, dsquares, logits, None, more)
    torch.testing.assert_close(got, alone + more)
