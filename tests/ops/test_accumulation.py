"""Gradients that are added in place: the same sums, no temporaries, and autograd wherever that cannot be."""

import copy

import pytest
import torch

import moeblaze_ops
from moeblaze_ops import config
from tests.tools.op_harness import OurOps

ops = torch.ops.moeblaze
T, D, F, E, K = 1100, 16, 24, 4, 2
KEEPS = ("preactivation", "input", "chunked")
ADD, NEW = "expert_weight_grad_add", "expert_weight_grad"


@pytest.fixture
def make_layer(monkeypatch):
    """A layer and its input for each value of ``keep``; the third one is "input" in chunks of 1024 tokens."""

    def make(keep, dtype=torch.float64, **options):
        torch.manual_seed(0)
        monkeypatch.setattr(config, "max_layer_transient_bytes", 1 if keep == "chunked" else 1 << 40)
        kept = "input" if keep == "chunked" else keep
        module = moeblaze_ops.MoE(D, F, E, K, keep=kept, dtype=dtype, **options)
        return module, torch.randn(T, D, dtype=dtype, requires_grad=True)

    return make


def backward(module, x):
    """Names of the ops that ran in backward."""
    loss = module(x).square().sum()
    with OurOps() as ours:
        loss.backward()
    return ours.names


def gradients_of(module, x, steps):
    for _ in range(steps):
        backward(module, x)
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("options", [{}, {"bias": True, "activation": "relu2"}], ids=["gated", "ungated_bias"])
def test_gradients_are_added_to_grad(make_layer, keep, options):
    module, x = make_layer(keep, **options)
    expected = gradients_of(copy.deepcopy(module), x, 3)
    for p in (module.w_up, module.w_down):
        moeblaze_ops.accumulate_grad(p)
    assert ADD not in backward(module, x) or keep == "chunked"
    grads = [p.grad for p in module.parameters()]
    for _ in range(2):
        names = backward(module, x)
        assert names.count(ADD) == 2 * (2 if keep == "chunked" else 1) and NEW not in names
    for p, grad, want in zip(module.parameters(), grads, expected, strict=True):
        assert p.grad is grad
        torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("keep", KEEPS)
def test_gradients_are_added_to_fp32_buffers(make_layer, keep):
    module, x = make_layer(keep, torch.bfloat16)
    exact = copy.deepcopy(module).double()
    wide = [x.detach().double(), *(p.detach().double() for p in module.parameters())]
    parameters = (module.w_up, module.w_down)
    buffers = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    for p, buffer in zip(parameters, buffers, strict=True):
        moeblaze_ops.accumulate_grad(p, buffer)
    x_TD, weights, experts = x, torch.rand(T, K), torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    for _ in range(2):
        moeblaze_ops.moe(x_TD, weights, experts, *parameters, keep=module.keep).float().sum().backward()
    moeblaze_ops.moe(wide[0], weights.double(), experts, exact.w_up, exact.w_down).sum().backward()
    for p, buffer, want in zip(parameters, buffers, (exact.w_up.grad, exact.w_down.grad), strict=True):
        assert p.grad is None
        # Intermediates are rounded to bf16, the sums over tokens and over both steps are not.
        assert (buffer - 2 * want).norm() < 1e-2 * (2 * want).norm()
        assert not torch.equal(buffer, buffer.bfloat16().float())


def test_gradients_that_come_another_way_are_moved_to_the_buffer(make_layer):
    """As those of code that another compiler than Inductor made, and of another use of the weight."""
    module, x = make_layer("preactivation")
    twin = copy.deepcopy(module)
    gradients_of(twin, x, 2)
    buffer = torch.zeros_like(module.w_up)
    moeblaze_ops.accumulate_grad(module.w_up, buffer)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    backward(compiled, x)
    assert module.w_up.grad is None and buffer.any()
    backward(module, x)
    torch.testing.assert_close(buffer, twin.w_up.grad)
    # Another use of the weight, in the same backward.
    before = buffer.clone()
    (module(x).square().sum() + 3 * module.w_up.sum()).backward()
    torch.testing.assert_close(buffer - before, twin.w_up.grad / 2 + 3)


def test_split_and_transposed_weights_are_views_of_their_buffers():
    torch.manual_seed(1)
    x, weights = torch.randn(50, D), torch.rand(50, K)
    experts = torch.randint(0, E, (50, K))
    shapes = {"w_gate": (E, D, F), "w_up": (E, D, F), "w_down": (E, F, D)}
    given = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}

    def run():
        moeblaze_ops.moe(x, weights, experts, **given, transposed=True).square().sum().backward()

    run()
    expected = {name: 2 * w.grad for name, w in given.items()}
    for w in given.values():
        moeblaze_ops.accumulate_grad(w)
    with OurOps() as ours:
        run()
    assert ours.names.count(ADD) == 2 and NEW not in ours.names
    for name, w in given.items():
        torch.testing.assert_close(w.grad, expected[name])


@pytest.mark.parametrize("hooked", ["hook", "post_accumulate_hook"])
def test_hooks_of_a_parameter_are_called(make_layer, hooked):
    module, x = make_layer("preactivation")
    gradients_of(module, x, 1)
    moeblaze_ops.accumulate_grad(module.w_up)
    seen = []
    register = {"hook": "register_hook", "post_accumulate_hook": "register_post_accumulate_grad_hook"}[hooked]
    getattr(module.w_up, register)(lambda value: seen.append(value.shape))
    assert NEW in backward(module, x) and len(seen) == 1


def test_remove_ends_it(make_layer):
    module, x = make_layer("input")
    gradients_of(module, x, 1)
    buffer = torch.zeros_like(module.w_up)
    handles = [moeblaze_ops.accumulate_grad(module.w_up, buffer), moeblaze_ops.accumulate_grad(module.w_down)]
    assert backward(module, x).count(ADD) == 2
    kept = buffer.clone()
    for handle in handles:
        handle.remove()
    assert ADD not in backward(module, x)
    assert torch.equal(buffer, kept) and module.w_up.grad is not None


def test_nothing_is_added_where_the_gradient_is_differentiated(make_layer):
    module, x = make_layer("preactivation")
    gradients_of(module, x, 1)
    moeblaze_ops.accumulate_grad(module.w_up)
    with pytest.warns(UserWarning, match="create_graph"):
        loss = module(x).square().sum()
        with OurOps() as ours:
            loss.backward(create_graph=True)
    assert ADD not in ours.names


@pytest.mark.parametrize("way", ["grad of the weight", "grad of x", "backward to x"])
def test_what_does_not_accumulate_leaves_sums_alone(make_layer, way):
    module, x = make_layer("preactivation")
    (want,) = torch.autograd.grad(module(x).square().sum(), [module.w_up])
    gradients_of(module, x, 1)
    moeblaze_ops.accumulate_grad(module.w_up)
    before = module.w_up.grad.clone()
    loss = module(x).square().sum()
    with OurOps() as ours:
        if way == "grad of the weight":
            assert torch.equal(torch.autograd.grad(loss, [module.w_up])[0], want)
        elif way == "grad of x":
            torch.autograd.grad(loss, x)
        else:
            loss.backward(inputs=[x])
    assert ADD not in ours.names and torch.equal(module.w_up.grad, before)


def test_frozen_weights_stay_without_gradients(make_layer):
    module, x = make_layer("chunked")
    buffer = torch.zeros_like(module.w_up)
    moeblaze_ops.accumulate_grad(module.w_up, buffer)
    module.w_up.requires_grad_(False)
    backward(module, x)
    assert not buffer.any() and module.w_down.grad is not None


@pytest.mark.parametrize(
    ("buffer", "error", "message"),
    [
        (lambda w: torch.zeros(E, D, F), ValueError, r"buffer must have shape \[4, 48, 16\] of the parameter, got \[4, 16, 24\]"),
        (lambda w: torch.zeros(E, D, 2 * F).mT, ValueError, r"buffer must have stride \(768, 16, 1\) of the parameter"),
        (lambda w: torch.zeros_like(w, dtype=torch.float16), TypeError, "buffer must be float32 or torch.float64"),
        (lambda w: torch.zeros_like(w, requires_grad=True), ValueError, "buffer must not require gradients"),
    ],
)
def test_accumulate_grad_rejects_a_buffer(make_layer, buffer, error, message):
    module, _ = make_layer("input")
    with pytest.raises(error, match=f"accumulate_grad: {message}"):
        moeblaze_ops.accumulate_grad(module.w_up, buffer(module.w_up))


def test_accumulate_grad_rejects_a_view_and_a_second_call(make_layer):
    module, _ = make_layer("input")
    with pytest.raises(ValueError, match="accumulate_grad: parameter must be a leaf that requires gradients"):
        moeblaze_ops.accumulate_grad(module.w_up.view(-1))
    moeblaze_ops.accumulate_grad(module.w_up)
    with pytest.raises(ValueError, match="accumulate_grad: parameter must accumulate once"):
        moeblaze_ops.accumulate_grad(module.w_up)
