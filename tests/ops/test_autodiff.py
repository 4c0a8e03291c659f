"""Forward-mode AD and the transforms of ``torch.func`` over the ops: right, or an error that names the way round."""

import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

import moeblaze_ops
from moeblaze_ops import config
from moeblaze_ops.arguments.activations import ACTIVATIONS
from moeblaze_ops.arguments.validation_calls import SCORINGS
from moeblaze_ops.kernels.formulas.named import is_gated
from moeblaze_ops.ops.autodiff import differentiated
from tests.tools.rewrite_harness import compiled

ops = torch.ops.moeblaze
DTYPE = torch.float64


def finite_difference(run, primals, tangents, step=1e-6):
    ahead = run(*(p + step * t for p, t in zip(primals, tangents, strict=True)))
    behind = run(*(p - step * t for p, t in zip(primals, tangents, strict=True)))
    return (ahead - behind) / (2 * step)


def assert_tangents(run, *primals):
    """``run`` under both interfaces of forward mode, along each of its arguments and along all."""
    torch.manual_seed(1)
    primals = tuple(p.detach() for p in primals)
    directions = [torch.randn_like(p) for p in primals]
    chosen = [tuple(d if i == j else torch.zeros_like(d) for j, d in enumerate(directions)) for i in range(len(primals))]
    for tangents in (*chosen, tuple(directions)):
        expected = finite_difference(run, primals, tangents)
        out, got = jvp(run, primals, tangents)
        assert torch.equal(out, run(*primals))
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    with forward_ad.dual_level():
        dual = run(*map(forward_ad.make_dual, primals, directions))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, expected, rtol=1e-6, atol=1e-7)


def layer_arguments(activation="swiglu", T=7, D=6, F=4, E=5, K=2):
    torch.manual_seed(0)
    x, w_down = torch.randn(T, D, dtype=DTYPE), torch.randn(E, D, F, dtype=DTYPE)
    w_up = torch.randn(E, F * (2 if is_gated(activation) else 1), D, dtype=DTYPE)
    weights, experts = torch.rand(T, E, dtype=DTYPE).topk(K)
    return x, weights, experts, w_up, w_down, torch.randn(w_up.shape[:2], dtype=DTYPE), torch.randn(E, D, dtype=DTYPE)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_moe(activation, weight_on):
    x, weights, experts, w_up, w_down, b_up, b_down = layer_arguments(activation)

    def run(x, weights, w_up, w_down, b_up, b_down):
        biases = {"b_up": b_up, "b_down": b_down}
        return moeblaze_ops.moe(x, weights, experts, w_up, w_down, activation=activation, weight_on=weight_on, **biases)

    assert_tangents(run, x, weights, w_up, w_down, b_up, b_down)


def test_experts_apart():
    x, weights, experts, w_up, w_down, b_up, b_down = layer_arguments()
    routing = ops.dispatch(experts, 5)

    def run(x, w_up, b_up, w_down, b_down):
        w_up, b_up = (list(tensor.unflatten(1, (2, -1)).split(1)) for tensor in (w_up, b_up))
        h, a = ops.expert_up(x, w_up, b_up, None, *routing, "swiglu")
        return ops.expert_down(h, a, list(w_down.mT.split(1)), list(b_down.split(1)), weights, *routing, "swiglu")

    assert_tangents(run, x, w_up, b_up, w_down, b_down)


@pytest.mark.parametrize("limit", [None, 1 << 10], ids=["whole", "in parts"])
@pytest.mark.parametrize("gradients", [True, False])
def test_moe_that_keeps_its_input(limit, gradients, monkeypatch):
    monkeypatch.setattr(config, "max_layer_transient_bytes", limit)
    x, weights, experts, w_up, w_down, *_ = layer_arguments(T=40)
    with torch.set_grad_enabled(gradients):
        assert_tangents(lambda *args: moeblaze_ops.moe(*args[:2], experts, *args[2:], keep="input"), x, weights, w_up, w_down)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("renormalize", [True, False])
def test_route(scoring, renormalize):
    torch.manual_seed(0)
    logits, bias = torch.randn(6, 8, dtype=DTYPE), torch.randn(8, dtype=DTYPE)
    assert_tangents(
        lambda logits: moeblaze_ops.route(logits, 3, bias=bias, scoring=scoring, renormalize=renormalize, scale=2.0)[0], logits
    )


def test_router_logits():
    torch.manual_seed(0)
    assert_tangents(ops.router_logits, torch.randn(6, 8, dtype=DTYPE), torch.randn(4, 8, dtype=DTYPE))


class Dense(nn.Module):
    """A layer that is rewritten."""

    def __init__(self, D=8, F=16, E=4):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False, dtype=DTYPE)
        self.up = nn.Parameter(torch.randn(E, F, D, dtype=DTYPE))
        self.down = nn.Parameter(torch.randn(E, D, F, dtype=DTYPE))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(4):
            weight = (weights * (chosen == e)).sum(dim=-1, keepdim=True)
            out = out + weight * (F.silu(x @ self.up[e].T) @ self.down[e].T)
        return out


@pytest.fixture
def dense():
    torch.manual_seed(0)
    return Dense().requires_grad_(False), torch.randn(6, 8, dtype=DTYPE), torch.randn(6, 8, dtype=DTYPE)


def test_rewritten_layer_called_with_a_tangent(dense):
    model, x, tangent = dense
    _, expected = jvp(model, (x,), (tangent,))
    run, backend = compiled(model)
    with forward_ad.dual_level():
        try:
            got = forward_ad.unpack_dual(run(forward_ad.make_dual(x, tangent))).tangent
        except torch._dynamo.exc.Unsupported as refused:
            pytest.skip(f"torch.compile takes no tangents: {refused.msg}")
    assert len(backend.rewritten) == 1
    torch.testing.assert_close(got, expected)


def test_layer_in_a_compiled_jvp(dense):
    """The rewriter leaves a graph alone that holds the transform; what it computes is right either way."""
    model, x, tangent = dense
    run, backend = compiled(lambda x, tangent: jvp(model, (x,), (tangent,))[1])
    torch.testing.assert_close(run(x, tangent), jvp(model, (x,), (tangent,))[1])
    assert len(backend.rewritten) == 0


def test_moe_in_a_compiled_jvp():
    x, weights, experts, w_up, w_down, *_ = layer_arguments()

    def run(x, tangent):
        return jvp(lambda x: moeblaze_ops.moe(x, weights, experts, w_up, w_down), (x,), (tangent,))[1]

    tangent = torch.randn_like(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(x, tangent), run(x, tangent))


@pytest.mark.parametrize("keep", ["preactivation", "input"])
def test_reverse_mode_transforms(keep):
    layer = moeblaze_ops.MoE(D=8, F=6, E=4, K=2, keep=keep).double()
    x = torch.randn(5, 8, dtype=DTYPE)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return functional_call(layer, parameters, (x,)).square().mean()

    gradients = grad(loss)(parameters, x)
    for name, expected in zip(parameters, torch.autograd.grad(layer(x).square().mean(), parameters.values()), strict=True):
        assert torch.equal(gradients[name], expected)
    out, pull = vjp(layer, x)
    leaf = x.clone().requires_grad_()
    assert torch.equal(pull(torch.ones_like(out))[0], torch.autograd.grad(layer(leaf).sum(), leaf)[0])


def test_gradient_of_a_tangent():
    """Reverse over forward: the rule for tangents is made of ops that have gradients."""
    x, weights, experts, w_up, w_down, *_ = layer_arguments()
    tangent = torch.randn_like(x)

    def run(x):
        return jvp(lambda x: moeblaze_ops.moe(x, weights, experts, w_up, w_down), (x,), (tangent,))[1]

    step = torch.randn_like(x)
    along = finite_difference(lambda x: run(x).square().sum(), (x,), (step,))
    torch.testing.assert_close((grad(lambda x: run(x).square().sum())(x) * step).sum(), along, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda f, x: vmap(f)(torch.stack([x, x])), "expert_up: vmap is not supported, fold the mapped axis into the tokens"),
        (lambda f, x: jacfwd(f)(x), "expert_up: vmap is not supported"),
        (lambda f, x: jacrev(f)(x), "expert_down_backward: vmap is not supported"),
        (lambda f, x: grad(lambda x: grad(lambda x: f(x).sum())(x).sum())(x), "the gradient of a gradient is not available"),
        (lambda f, x: jvp(grad(lambda x: f(x).square().sum()), (x,), (x,)), "expert_down_backward: forward-mode AD is not av"),
        (lambda f, x: hessian(lambda x: f(x).sum())(x), "is not"),
    ],
    ids=["vmap", "jacfwd", "jacrev", "grad of grad", "jvp of grad", "hessian"],
)
def test_what_is_not_available_says_so(transform, message):
    x, weights, experts, w_up, w_down, *_ = layer_arguments()
    with pytest.raises(NotImplementedError, match=message):
        transform(lambda x: moeblaze_ops.moe(x, weights, experts, w_up, w_down), x)


def test_ops_that_write_take_no_tangents():
    rows, offsets = torch.randn(4, 3, dtype=DTYPE), torch.tensor([0, 2, 4], dtype=torch.int32)
    slots = torch.arange(4, dtype=torch.int32)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="expert_bias_grad_add: forward-mode AD"):
        dual = forward_ad.make_dual(rows, rows)
        ops.expert_bias_grad_add(dual, torch.zeros(2, 3, dtype=DTYPE), None, slots, offsets, 1, False)


def test_autograd_keeps_no_function():
    """What computes an op may hold what it took, down_proj's input, which nobody needs until backward."""
    weight = torch.randn(2, requires_grad=True)

    def compute(x):
        return x * held

    held, run = torch.randn(2), differentiated("twice", lambda ctx, grad: grad, None)
    function, alive = compute, weakref.ref(compute)
    out = run(function, [weight])
    del compute, function
    assert alive() is None and torch.autograd.grad(out.sum(), weight)[0].tolist() == [1, 1]


@pytest.mark.parametrize("run", [lambda moe: moe, torch.compiler.disable], ids=["in_the_graph", "beside_it"])
def test_backward_that_a_compiled_function_calls(run):
    """Dynamo would trace the gradient formulas of what ran in eager mode."""
    torch.manual_seed(0)
    x, weights = torch.randn(6, 8, requires_grad=True), torch.rand(6, 2)
    w_up, w_down = torch.randn(3, 12, 8, requires_grad=True), torch.randn(3, 8, 12)
    layer = run(moeblaze_ops.moe)

    def step(x):
        out = layer(x, weights, torch.tensor([[0, 2]] * 6), w_up, w_down, activation="silu")
        return torch.autograd.grad(out.square().sum(), (x, w_up))

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(step, backend="eager")(x), step(x))
