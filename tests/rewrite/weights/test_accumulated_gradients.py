"""Weight gradients that compiled backward adds in place: the same sums as those of plain PyTorch, whoever looks at them."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor_config

import moeblaze_ops
from moeblaze_ops.ops import weight_grad
from moeblaze_ops.ops.weight_grad import expert_weight_grad, expert_weight_grad_add
from tests.tools import fakecuda

E, D, H, K, T = 4, 32, 48, 2, 96


class Loop(nn.Module):
    """A loop over the hits of each expert, weights packed as ``nn.Linear`` stores them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Parameter(torch.randn(E, D) * 0.1)
        self.w_up = nn.Parameter(torch.randn(E, 2 * H, D) * D**-0.5)
        self.w_down = nn.Parameter(torch.randn(E, D, H) * H**-0.5)

    @property
    def experts(self) -> list[nn.Parameter]:
        return [self.w_up, self.w_down]

    def forward(self, x):
        weights, chosen = torch.topk((x @ self.router.T).softmax(-1), K)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(chosen == e)
            gate, up = F.linear(x[token], self.w_up[e]).chunk(2, dim=-1)
            rows = F.linear(F.silu(gate) * up, self.w_down[e])
            out.index_add_(0, token, rows * weights[token, slot, None])
        return out


@pytest.fixture(scope="module")
def compiled():
    """The loop, compiled while its weights accumulate; tests make their own parameters accumulate."""
    layer = Loop()
    run = torch.compile(layer, backend="moeblaze")
    handles = [moeblaze_ops.accumulate_grad(p) for p in layer.experts]
    run(tokens(0)).sum().backward()
    for handle in handles:
        handle.remove()
    return layer, run


@pytest.fixture
def layer(compiled):
    layer, _ = compiled
    layer.zero_grad()
    return layer


@pytest.fixture
def run(compiled):
    return compiled[1]


@pytest.fixture
def accumulate():
    """``accumulate_grad`` until the test ends."""
    handles = []

    def begin(*args):
        handles.append(moeblaze_ops.accumulate_grad(*args))
        return handles[-1]

    yield begin
    for handle in handles:
        handle.remove()


@pytest.fixture
def calls(monkeypatch):
    """The ops that compute weight gradients, in order."""
    ops, original = [], weight_grad.call
    monkeypatch.setattr(weight_grad, "call", lambda op, *args: (ops.append(op), original(op, *args))[1])
    return ops


ADDED, RETURNED = [expert_weight_grad_add] * 2, [expert_weight_grad] * 2


def tokens(seed: int) -> torch.Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(layer: Loop, *seeds: int, extra: float = 0.0) -> list[torch.Tensor]:
    """Those of plain PyTorch, summed over a backward for each seed."""
    twin = copy.deepcopy(layer)
    twin.zero_grad()
    for seed in seeds:
        (twin(tokens(seed)).square().sum() + extra * twin.w_up.sum()).backward()
    return [p.grad for p in twin.experts]


def backward(run, seed: int) -> None:
    run(tokens(seed)).square().sum().backward()


def assert_close(got, want) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


def test_microbatches_are_added_to_grad(layer, run, accumulate, calls):
    for p in layer.experts:
        accumulate(p)
    backward(run, 1)
    assert calls == RETURNED, "the first gradient becomes .grad"
    grads = [p.grad for p in layer.experts]
    backward(run, 2)
    backward(run, 3)
    assert calls == [*RETURNED, *ADDED, *ADDED]
    assert all(p.grad is grad for p, grad in zip(layer.experts, grads, strict=True))
    assert_close(grads, gradients(layer, 1, 2, 3))
    layer.zero_grad()
    backward(run, 4)
    assert_close([p.grad for p in layer.experts], gradients(layer, 4))
    assert_close(grads, gradients(layer, 1, 2, 3))


def test_microbatches_are_added_to_a_buffer(layer, run, accumulate, calls):
    """An attribute of the parameter in some trainers; forwards may run ahead of backwards."""
    for p in layer.experts:
        p.main_grad = torch.zeros_like(p)
        accumulate(p, p.main_grad)
    losses = [run(tokens(seed)).square().sum() for seed in (1, 2)]
    for loss in losses:
        loss.backward()
    assert calls == [*ADDED, *ADDED]
    assert all(p.grad is None for p in layer.experts)
    assert_close([p.main_grad for p in layer.experts], gradients(layer, 1, 2))


def test_one_weight_may_accumulate_without_the_other(layer, run, accumulate, calls):
    buffer = torch.zeros_like(layer.w_down)
    accumulate(layer.w_down, buffer)
    backward(run, 1)
    assert sorted(map(str, calls)) == sorted(map(str, [expert_weight_grad, expert_weight_grad_add]))
    assert layer.w_down.grad is None
    assert_close([layer.w_up.grad, buffer], gradients(layer, 1))


def test_gradients_of_another_use_are_added_as_well(layer, run, accumulate):
    accumulate(layer.w_up)
    for seed in (1, 2):
        (run(tokens(seed)).square().sum() + 3 * layer.w_up.sum()).backward()
    assert_close([p.grad for p in layer.experts], gradients(layer, 1, 2, extra=3.0))


@pytest.mark.parametrize("way", ["grad of the weights", "grad of x", "backward to x"])
def test_what_does_not_accumulate_in_plain_pytorch_leaves_sums_alone(layer, run, accumulate, calls, way):
    for p in layer.experts:
        accumulate(p)
    backward(run, 1)
    before = [p.grad.clone() for p in layer.experts]
    calls.clear()
    x = tokens(2)
    loss = run(x).square().sum()
    if way == "grad of the weights":
        assert_close(torch.autograd.grad(loss, layer.experts), gradients(layer, 2))
    elif way == "grad of x":
        torch.autograd.grad(loss, x)
    else:
        loss.backward(inputs=[x])
    assert expert_weight_grad_add not in calls
    assert all(torch.equal(p.grad, grad) for p, grad in zip(layer.experts, before, strict=True))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_see_what_they_see_in_plain_pytorch(layer, run, accumulate, register):
    seen = {}
    twin = copy.deepcopy(layer)
    for p in layer.experts:
        accumulate(p)
    for side, weight in (("ours", layer.w_up), ("plain", twin.w_up)):
        seen[side] = []

        def note(value, values=seen[side]):
            values.append((value if value.grad is None else value.grad).clone())

        getattr(weight, register)(note)
    for seed in (1, 2):
        backward(run, seed)
        backward(twin, seed)
    assert_close(seen["ours"], seen["plain"])
    assert_close([p.grad for p in layer.experts], [p.grad for p in twin.experts])
    layer.w_up._backward_hooks, layer.w_up._post_accumulate_grad_hooks = None, None


def test_saved_tensors_hooks_take_parameters_away(layer, run, accumulate, calls):
    """What comes out of them is another tensor: its gradient goes through autograd."""
    for p in layer.experts:
        p.grad = torch.zeros_like(p)
        accumulate(p)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, torch.clone):
        loss = run(tokens(1)).square().sum()
    loss.backward()
    assert calls == RETURNED
    assert_close([p.grad for p in layer.experts], gradients(layer, 1))


def test_remove_holds_for_what_is_compiled(layer, run, accumulate, calls):
    handle = accumulate(layer.w_up)
    backward(run, 1)
    handle.remove()
    backward(run, 2)
    assert calls == [*RETURNED, *RETURNED]
    assert_close([p.grad for p in layer.experts], gradients(layer, 1, 2))


class Operator(Loop):
    """The layer by ``moe``, of weights that ``prepare`` makes of the parameters."""

    def __init__(self, prepare, dtype=torch.float32, times=1) -> None:
        super().__init__()
        self.prepare, self.times = prepare, times
        self.to(dtype)

    def forward(self, x):
        weights, chosen = torch.topk(F.linear(x, self.router.to(x.dtype)).float().softmax(-1), K)
        for _ in range(self.times):
            x = moeblaze_ops.moe(x, weights, chosen, *self.prepare(self.w_up, self.w_down))
        return x


def as_they_are(w_up, w_down):
    return w_up, w_down


def rounded(w_up, w_down):
    return w_up.bfloat16(), w_down.bfloat16()


def copied(w_up, w_down):
    return w_up.view(E, H, 2, D).transpose(1, 2).reshape(E, 2 * H, D), w_down.mT.contiguous().mT


def backward_code(layer: nn.Module, dtype=torch.float32, accumulates=True) -> str:
    """What Inductor writes for backward of a Hopper GPU."""
    fakecuda.require_fake_cuda()
    handles = [moeblaze_ops.accumulate_grad(p) for p in layer.experts] if accumulates else []
    sources: list[str] = []
    torch._dynamo.reset()
    try:
        run = torch.compile(layer, backend=fakecuda.shadow_backend(sources))
        run(torch.randn(T, D, dtype=dtype, requires_grad=True)).float().sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return sources[-1]


def test_sums_in_fp32_of_products_in_bf16_are_not_rounded(accumulate, calls):
    layer = Operator(rounded)
    for p in layer.experts:
        p.grad = torch.zeros_like(p)
        accumulate(p)
    x = tokens(1).detach().bfloat16()
    torch.compile(layer, backend="moeblaze")(x).float().square().sum().backward()
    assert calls[-2:] == ADDED, "those before them are traced, where no cache has the graph"
    exact = Operator(as_they_are)
    exact(x.float()).square().sum().backward()
    for p, want in zip(layer.experts, exact.experts, strict=True):
        assert (p.grad - want.grad).norm() < 2e-2 * want.grad.norm()
        assert not torch.equal(p.grad, p.grad.bfloat16().float())


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        (lambda: Operator(as_they_are), torch.float32),
        (lambda: Operator(as_they_are, torch.bfloat16), torch.bfloat16),
        (lambda: Operator(rounded), torch.bfloat16),
    ],
    ids=["fp32", "bf16", "fp32 for products in bf16"],
)
def test_the_call_takes_the_place_of_the_kernels(layer, dtype):
    code = backward_code(layer(), dtype)
    assert code.count("expert_weight_grad_or_add.default.implementation(") == 2
    assert "_expert_weight_grad_kernel" not in code and "moeblaze_hopper.weight_grad" not in code


@pytest.mark.parametrize(
    ("layer", "settings"),
    [
        (lambda: Operator(copied), {}),
        (lambda: Operator(as_they_are, times=2), {}),
        (lambda: Operator(as_they_are), {"triton.cudagraphs": True}),
        (lambda: Operator(as_they_are), {"cpp_wrapper": True}),
        (lambda: Operator(as_they_are), None),
    ],
    ids=["copies", "two layers of one weight", "CUDA graphs", "code in C++", "nothing accumulates"],
)
def test_other_gradients_stay_as_they_are(layer, settings):
    with inductor_config.patch(settings) if settings else nullcontext():
        code = backward_code(layer(), accumulates=settings is not None)
    assert "expert_weight_grad_or_add" not in code and "_expert_weight_grad_kernel" in code
