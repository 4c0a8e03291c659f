"""Experts whose weights are the result of an operator: dequantised, parametrized, cast; backward repeats it."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import moeblaze_ops
from tests.corpus.codecs import NF4, Int8, unpacked
from tests.corpus.zoo.catalogue import grouped_mm_fallback
from tests.tools.rewrite_harness import check_against_eager, rewrite_of

pytestmark = pytest.mark.usefixtures("fp64")

T, D, H, E, K, R = 24, 16, 24, 4, 2, 3


class Layer(nn.Module):
    """Stacked experts, dense and masked, or a loop over those in use; ``weight`` gives what is multiplied by."""

    def __init__(self, make=nn.Parameter):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.w_up, self.w_down = (make(torch.randn(shape) / shape[-1] ** 0.5) for shape in ((E, 2 * H, D), (E, D, H)))

    def weight(self, stored, x):
        return stored

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        w_up, w_down = self.weight(self.w_up, x), self.weight(self.w_down, x)
        out = torch.zeros_like(x)
        for e in range(E):
            gate, up = F.linear(x, w_up[e]).chunk(2, dim=-1)
            out = out + (weights * (chosen == e)).sum(-1, keepdim=True) * F.linear(F.silu(gate) * up, w_down[e])
        return out


class Dequantised(Layer):
    """``codec`` stores the weights."""

    def __init__(self, codec=Int8):
        super().__init__(codec)

    def weight(self, stored, x):
        return stored().to(x.dtype)


class UnpackedByAnOperator(Dequantised):
    """An operator of its own, without gradient, as those of libraries are."""

    def __init__(self):
        super().__init__(NF4)

    def weight(self, stored, x):
        with torch.no_grad():
            return unpacked(stored.codes, stored.scales).to(x.dtype)


class Adapted(Dequantised):
    """Factors on top of what is dequantised (QLoRA)."""

    def __init__(self, codec=NF4):
        super().__init__(codec)
        shapes = {"w_up": (2 * H, D), "w_down": (D, H)}
        self.a = nn.ParameterDict({name: torch.randn(E, R, inputs) / inputs**0.5 for name, (_, inputs) in shapes.items()})
        self.b = nn.ParameterDict({name: torch.randn(E, outputs, R) for name, (outputs, _) in shapes.items()})

    def weight(self, stored, x):
        name = "w_up" if stored is self.w_up else "w_down"
        return torch.baddbmm(super().weight(stored, x), self.b[name], self.a[name], alpha=0.5)


class Normed(Layer):
    """A norm of each row, by hand."""

    def weight(self, stored, x):
        return 3.0 * stored / stored.norm(dim=2, keepdim=True)


class Made(Layer):
    """Some function of the stored weights."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def weight(self, stored, x):
        return self.function(stored)


def parametrized(make):
    layer = Layer()
    for name in ("w_up", "w_down"):
        make(layer, name)
    return layer


class Doubled(nn.Module):
    def forward(self, w):
        return w + w.tanh()


PLAIN = "expert_up(swiglu) -> expert_down"
LAYERS = {
    "int8": Dequantised,
    "nf4": lambda: Dequantised(NF4),
    "operator_without_gradient": UnpackedByAnOperator,
    "normed": Normed,
    "weight_norm": lambda: parametrized(lambda layer, name: parametrizations.weight_norm(layer, name)),
    "parametrized": lambda: parametrized(lambda layer, name: parametrize.register_parametrization(layer, name, Doubled())),
    "product_of_matrices": lambda: Made(lambda w: w @ (torch.ones(w.shape[-1], w.shape[-1]) + w[0].T @ w[0])),
    "experts_in_another_order": lambda: Made(lambda w: w.flip(0)),
    "rolled": lambda: Made(lambda w: w.tanh().roll(1, 0)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_computed_weights_are_operands(name):
    backend = check_against_eager(LAYERS[name](), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [PLAIN]


@pytest.mark.parametrize("codec", [Int8, NF4])
def test_factors_on_dequantised_weights(codec):
    backend = check_against_eager(Adapted(codec), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [f"expert_up(swiglu, rank {R}) -> expert_down(rank {R})"]
    assert "baddbmm" not in backend.operators()


def test_in_a_checkpointed_block():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Dequantised()

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False)

    backend = check_against_eager(Block(), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [PLAIN]


OF_TOKENS = {
    "scaled_by_tokens": lambda w, x: w * x.mean(),
    "scaled_by_features_of_tokens": lambda w, x: w + x.mean(0),
}


@pytest.mark.parametrize("change", OF_TOKENS)
def test_weights_that_are_made_of_tokens_are_equal_or_left_alone(change):
    class OfTokens(Layer):
        def weight(self, stored, x):
            width = stored.shape[-1]
            return OF_TOKENS[change](stored, x[:, :1].expand(-1, width))

    backend = check_against_eager(OfTokens(), torch.randn(T, D))
    assert backend.rewritten == []


def test_a_weight_that_is_written_to_afterwards_is_left_alone_or_equal():
    class Written(Dequantised):
        def weight(self, stored, x):
            w = super().weight(stored, x)
            w[0] = x.mean()
            return w

    check_against_eager(Written(), torch.randn(T, D))


def kept_beside(model, x, run):
    """Sizes, in elements, of the tensors that are kept for backward beside the model's."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    sizes = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.itemsize
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(x)
    out.sum().backward()
    return sorted(sizes.values())


ROUNDED = {
    "stored": lambda w: w.bfloat16().to(w.dtype),
    "in eight bits": lambda w: w.to(torch.float8_e4m3fn).to(w.dtype),
    "turned": lambda w: w.mT.half().to(w.dtype).mT,
    "each": lambda w: torch.stack([own.to(w.dtype) for own in w.bfloat16()]),
    "a sum": lambda w: (w + 1).half().to(w.dtype),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_weights_that_are_rounded_and_cast_back(name):
    """As layers are trained that are to be stored in fewer bits: the products are those of the rounded weights."""

    class Rounded(Layer):
        def weight(self, stored, x):
            return ROUNDED[name](stored)

    rewriting = check_against_eager(Rounded(), torch.randn(T, D), tolerance=1e-9)
    assert len(rewriting.rewritten) == 1


def test_rounded_weights_of_no_module():
    """What a caller gives is not looked into further than to a tensor: nothing says that it stays."""

    def layer(x, weights, chosen, w_up, w_down):
        w_up, w_down = w_up.bfloat16().to(x.dtype), w_down.bfloat16().to(x.dtype)
        share = ((weights * (chosen == e)).sum(-1, keepdim=True) for e in range(E))
        return sum(own * F.linear(F.silu(F.linear(x, w_up[e])), w_down[e]) for e, own in enumerate(share))

    args = torch.randn(T, D), torch.rand(T, K), torch.randint(0, E, (T, K)), torch.randn(E, H, D), torch.randn(E, D, H)
    assert rewrite_of(layer, *args).reasons == ["DTYPE_PATH"]


def partitioned(gm, inputs):
    """Inductor up to what is kept for backward, which it decides before it generates code."""
    return compile_fx(gm, inputs, inner_compile=lambda part, inputs, **settings: make_boxed_func(part.forward))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [("nf4", partitioned), ("operator_without_gradient", "moeblaze"), ("normed", partitioned), ("adapted", partitioned)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_computed_weights_are_not_kept_for_backward(name, backend, monkeypatch):
    """With wide experts and few tokens nothing that is kept has the size of the weights."""
    monkeypatch.setitem(globals(), "H", 512)
    monkeypatch.setitem(globals(), "D", 64)
    layer, x = (Adapted() if name == "adapted" else LAYERS[name]()), torch.randn(3, D, requires_grad=True)
    torch._dynamo.reset()
    with moeblaze_ops.enabled(), inductor_config.patch(fallback_by_default=True):
        kept = kept_beside(layer, x, torch.compile(layer, backend=backend, fullgraph=True))
    assert kept[-1] < E * D * H
    assert x.grad is not None
    assert kept_beside(layer, x, layer)[-1] >= E * D * H


@pytest.mark.parametrize("of_gate, of_up", [(1, 2), (2, 1), (2, 2)])
def test_scaled_weights_beside_a_bias(of_gate, of_up):
    """A number before the bias of one half is not one before the input of both."""

    class Scaled(Layer):
        def __init__(self):
            super().__init__()
            self.b_gate, self.b_up = nn.Parameter(torch.randn(E, H)), nn.Parameter(torch.randn(E, H))
            self.w_gate, self.w_up = nn.Parameter(torch.randn(E, H, D)), nn.Parameter(torch.randn(E, H, D))
            self.b_down = nn.Parameter(torch.randn(E, D))

        def forward(self, x):
            weights, ids = self.router(x).softmax(dim=-1).topk(K)
            order = ids.flatten().argsort(stable=True)
            chosen, token = ids.flatten()[order], order // K
            ends = torch.bincount(chosen, minlength=E).cumsum(0).to(torch.int32)
            w_gate, w_up = (of_gate * self.w_gate).transpose(-2, -1), (of_up * self.w_up).transpose(-2, -1)
            gate = grouped_mm_fallback(x[token], w_gate, ends) + self.b_gate[chosen]
            up = grouped_mm_fallback(x[token], w_up, ends) + self.b_up[chosen]
            y = grouped_mm_fallback(gate * torch.sigmoid(gate) * up, self.w_down.transpose(-2, -1), ends) + self.b_down[chosen]
            return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order, None])

    check_against_eager(Scaled(), torch.randn(T, D))
