"""Formulas of activations: their text, their canonical form, their derivative, and what is refused."""

import collections
import functools
import math
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops import MoE, moe
from moeblaze_ops.arguments.activations import activate, activation_gradient
from moeblaze_ops.arguments.read_values import values_read_by
from moeblaze_ops.arguments.traced_activations import trace_activation
from moeblaze_ops.kernels.formulas.expression import below
from moeblaze_ops.kernels.formulas.named import NAMED, formula_of, is_gated, is_zero_at_zero, value_at_zero
from moeblaze_ops.kernels.formulas.program import gradient_program, value_program
from moeblaze_ops.kernels.formulas.text import MOST_CHARACTERS, parse, to_text
from tests.corpus import activations
from tests.corpus.fuzz.activations import check


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_formulas_agree_with_autograd(first):
    """The fuzzer's own comparison: value and gradient in fp64, fp32 and bf16."""
    assert sum(check(seed) is not None for seed in range(first, first + 20)) > 10


def test_a_function_may_call_operators_by_name():
    """Whatever is asked of ``torch.ops`` is there."""
    assert trace_activation(lambda g, u: torch.ops.aten.silu(g) * u) == "swiglu"


@pytest.mark.parametrize("text", [*NAMED.values(), *map(trace_activation, activations.ALL.values())])
def test_text_of_a_formula_is_read_as_itself(text):
    formula = formula_of(text)
    assert parse(to_text(formula)) is formula
    shown = {node for node in below(formula) if node.args}
    assert shown and len(value_program(text).partition("|")[0].split(";")) >= 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("silu(g) * u", "g * sigmoid(g) * u"),
        ("g / (1 + exp(-g)) * u", "silu(g) * u"),
        ("0.5 * h * (1 + tanh(h))", "h * sigmoid(2 * h)"),
        ("h / 4", "h * 0.25"),
        ("-(-h)", "h"),
        ("h ** 2", "h * h"),
        ("h ** 0.5", "sqrt(h)"),
        ("2 * (3 * h)", "h * 6"),
        ("where(~(h > 0), h, 1.0)", "where(h > 0, 1.0, h)"),
        ("clamp(h, None, None)", "h"),
        ("h - -h", "h * 2"),
    ],
)
def test_equal_spellings_are_one_formula(one, other):
    assert formula_of(one) is formula_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("h - 1", "1 - h"),
        ("clamp(h, 0.0, None)", "relu(h)"),  # their gradients differ at zero
        ("maximum(h, 0.0)", "relu(h)"),
        ("g * u", "g + u"),
        ("where(h > 0, h, 0)", "where(h >= 0, h, 0)"),
        ("h * 0", "h * 1"),
        ("log(1 + exp(h))", "softplus(h)"),  # it overflows
        ("log1p(exp(h))", "softplus(h)"),
        ("h * where(h > 0, 1, 0)", "where(h > 0, h, 0)"),  # of NaN
        ("where((h > 0) & (h < 1), h, 0)", "where((h > 0) | (h < 1), h, 0)"),
    ],
)
def test_near_misses_are_two(one, other):
    assert formula_of(one) is not formula_of(other)


def test_a_factor_of_zero_keeps_what_is_not_finite():
    h = torch.tensor([[[float("inf"), float("nan"), 1.0]]])
    assert activate(h, "h * 0.0").isnan().tolist() == [[True, True, False]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no expression"),
        ("swish", "no symbol, number or known function"),
        ("g * h", "a function of g, h instead of g and u"),
        ("3.0", "a function of no symbol"),
        ("h > 0", "a comparison instead of a number"),
        ("h + (h > 0)", "add of a comparison"),
        ("where(h, h, 0)", "where of a number"),
        ("h ** u", "pow whose exponent are no numbers"),
        ("clamp(h, h, 1.0)", "clamp whose bounds are no numbers"),
        ("relu(h, h)", "no function relu of 2 arguments"),
        ("h.real", "no symbol, number or known function"),
        ("h[0]", "no symbol, number or known function"),
        ("(lambda: h)()", "no symbol, number or known function"),
        ("__import__('os').getcwd()", "no symbol, number or known function"),
        ("h if h else h", "no symbol, number or known function"),
        ("True * h", "no symbol, number or known function"),
        ("h / 0.0 * (1.0 / 0.0)", "div of 1.0, 0.0"),
        ("h" + " + h * 1.5" * MOST_CHARACTERS, "characters"),
        ("h < 1 < 2", "no symbol, number or known function"),
    ],
)
def test_what_is_no_formula_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        parse(text)


def test_a_long_formula_is_refused():
    text = "h"
    for number in range(300):
        text = f"sin({text} + {number})" if len(text) < 1900 else text
    with pytest.raises(ValueError, match="more than 200 steps"):
        parse(text)


class _Glu(nn.Module):
    def forward(self, gate, up):
        return F.silu(gate) * up


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda g, u: F.silu(g) * u, "swiglu"),
        (lambda g, u: u * (torch.sigmoid(g) * g), "swiglu"),
        (_Glu(), "swiglu"),
        (F.silu, "silu"),
        (torch.sigmoid, "sigmoid(h)"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (lambda h: F.relu(h).pow(2), "relu2"),
        (lambda h: (h.float() * 2).to(h.dtype), "h * 2.0"),
        (lambda h, slope=0.2: F.leaky_relu(h, slope), "where(h > 0.0, h, h * 0.2)"),
        (lambda h: h.masked_fill(h < 0, 0.5), "where(h < 0.0, 0.5, h)"),
        (lambda h: h * (h > 0), "h * where(h > 0.0, 1.0, 0.0)"),
        (lambda h: h * (1 - (h > 0).to(h.dtype)), "h * (1.0 - where(h > 0.0, 1.0, 0.0))"),
        (lambda h: h.masked_fill(h.isnan() | (h == 0.5), 0), "where((h != h) | (h == 0.5), 0.0, h)"),
        (lambda h: h + h.sign(), "h + where(h > 0.0, 1.0, where(h < 0.0, -1.0, 0.0))"),
    ],
)
def test_function_is_traced(function, expected):
    assert trace_activation(function) == expected


def _with_parameter():
    beta = nn.Parameter(torch.ones(()))
    return lambda g, u: g * torch.sigmoid(beta * g) * u


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda g, u: g.softmax(-1) * u, "softmax"),
        (lambda g, u: g.flip(-1) * u, "flip"),
        (lambda h: h.mean(), "mean"),
        (lambda h: h * h.mean(-1, keepdim=True), "mean"),
        (lambda h: h.t(), r"aten\.t\."),
        (lambda g, u: torch.cat([g, u]), "cat"),
        (lambda g, u: F.dropout(g, 0.5) * u, "it calls aten"),
        (lambda h: h + torch.rand_like(h), "rand"),
        (lambda h: h.mul_(2), "copy_"),
        (lambda h: h.detach() * h, "detach|alias"),
        (lambda h: h if h.sum() > 0 else -h, "value out of a tracing tensor"),
        (lambda h: h.round(), "round"),
        (lambda h: h.int() * h, "casts to torch.int32"),
        (lambda h: torch.div(h, 2, rounding_mode="floor"), "in a way|rounds|floor"),
        (lambda h: 3.0, "shape of its arguments"),
        (lambda h: h > 0, "a comparison"),
        (lambda a, b, c: a, "positional arguments"),
        (_with_parameter(), "a tensor that is none of its arguments"),
        (nn.PReLU(), "a tensor that is none of its arguments"),
    ],
)
def test_what_is_not_pointwise_is_refused(function, reason):
    with pytest.raises(ValueError, match=reason):
        trace_activation(function)


def test_refusal_names_argument_rule_and_value():
    rule = r"MoE: activation must be a pointwise function of \(gate, up\), or of h alone, got .*softmax"
    with pytest.raises(ValueError, match=rule):
        MoE(8, 8, 2, 1, activation=lambda g, u: g.softmax(-1) * u)


def test_layer_of_a_function_is_that_of_its_formula():
    torch.manual_seed(0)
    layer = MoE(16, 24, 4, 2, activation=activations.GATED["mish_glu"])
    assert "g * tanh(softplus(g)) * u" in repr(layer)
    x = torch.randn(20, 16)
    weights, experts = torch.rand(20, 4).topk(2)
    operands = (x, weights, experts, layer.w_up, layer.w_down)
    expected = moe(*operands, activation="mish(g) * u")
    assert torch.equal(moe(*operands, activation=activations.GATED["mish_glu"]), expected)
    function = activations.GATED["mish_glu"]
    compiled = torch.compile(lambda *args: moe(*args, activation=function), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands), expected)


def test_what_a_program_computes_twice_it_computes_once():
    assert value_program("silu(g) * u") == "sigmoid 0;mul 0 3;mul 4 1|5"
    steps, _, results = gradient_program("silu(g) * u").partition("|")
    assert len(steps.split(";")) == 9 and steps.count("sigmoid") == 1 and len(results.split(" ")) == 3
    assert value_program("identity") == "|0" and gradient_program("identity") == "|0 2 2"


@pytest.mark.parametrize(("activation", "zero"), [
    *((name, True) for name in NAMED), ("exp(h)", False), ("u + 1.0", False), ("g / u", False), ("p0 * h", False),
    ("where(h < 0.0, exp(h), h)", True), ("where(h <= 0.0, exp(h), h)", False),
    ("where(~((h < 0.0) | (h > 1.0)) & (h != 1.0), h, exp(h))", True),
])  # fmt: skip
def test_activation_of_zeros(activation, zero):
    assert is_zero_at_zero(activation) == zero
    if zero:
        assert not activate(torch.zeros(1, 2 if is_gated(activation) else 1, 3), activation).any()


@pytest.mark.parametrize(("activation", "value"), [
    ("h / (abs(h) + 2.0)", 0), ("exp(h) * 3.0", 3), ("h / (p0 - 1.0)", 0), ("where(h < 0.0, 1.0 / h, h)", 0), ("g / u", math.nan),
    ("log(h) * h", math.nan), ("maximum(h / h, h)", math.nan), ("maximum(h, h / h)", math.nan), ("minimum(h, h / h)", math.nan),
])  # fmt: skip
def test_value_at_zero(activation, value):
    assert math.isnan(value_at_zero(activation)) if math.isnan(value) else value_at_zero(activation) == value


def test_an_unused_half_has_no_gradient():
    h_N2F, da_NF = torch.randn(4, 2, 3), torch.randn(4, 3)
    gradient = activation_gradient(da_NF, h_N2F, "tanh(g)")
    assert not gradient[:, 1].any() and gradient[:, 0].all()


def test_a_number_that_a_function_reads_may_change():
    """Its formula is that of now, in eager and in compiled code."""
    scale = 2.0

    def doubled(h):
        return F.silu(h) * scale

    class Scaled(nn.Module):
        factor = 1.0

        def __init__(self):
            super().__init__()
            self.power = 2.0

        def forward(self, h):
            return F.relu(h) ** self.power

    class Slotted:
        __slots__ = ()

        def __call__(self, h):
            return F.gelu(h)

    scaled = Scaled()
    x, weights, experts = torch.randn(5, 4), torch.rand(5, 2), torch.rand(5, 3).topk(2).indices
    w_up, w_down = torch.randn(2, 3, 4, 4)

    def layer(x, activation):
        return moe(x, weights, experts, w_up, w_down, activation=activation)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for number in (2.0, 0.5, 3.0):
        scale, scaled.power = number, number
        for run in (layer, compiled):
            torch.testing.assert_close(run(x, doubled), layer(x, f"silu(h) * {number}"))
            torch.testing.assert_close(run(x, scaled), layer(x, f"relu(h) ** {number}"))
    torch.testing.assert_close(layer(x, Slotted()), layer(x, "gelu"))


SLOPE = 1.0


def _of_a_global(h):
    return h * torch.sigmoid(SLOPE * h)


class _Reader(nn.Module):
    """Its activations read a number in other places than their own cells."""

    def __init__(self):
        super().__init__()
        self.number, self.numbers, self.inner = 1.0, [1.0], nn.CELU()
        self.layers, self.tensor, self.array = nn.Sequential(self.inner), torch.ones(()), np.ones(1)

    @property
    def half(self):
        return self.number / 2

    def scaled(self, h):
        return F.silu(h) * self.number

    def activation(self, name):
        def of_a_default(h, number=self.number):
            return F.silu(h) * number

        return {
            "attribute": lambda h: F.silu(h) * self.number,
            "element": lambda h: F.silu(h) * self.numbers[0],
            "module": lambda h: self.inner(h),
            "layers": self.layers,
            "text": lambda h: F.silu(h) * getattr(self, "number"),  # noqa: B009
            "tensor": lambda h: F.silu(h) * self.tensor.item(),
            "array": lambda h: F.silu(h) * float(self.array[0]),
            "property": lambda h: F.silu(h) * self.half,
            "another function": lambda h: self.scaled(h),
            "default": of_a_default,
            "method": self.scaled,
            "partial": functools.partial(torch.mul, other=self.number),
        }[name]

    def forward(self, x, name, *operands):
        return moe(x, *operands, activation=_of_a_global if name == "global" else self.activation(name))


@pytest.mark.parametrize(
    "name",
    ["attribute", "element", "module", "layers", "text", "tensor", "array", "property", "another function", "default", "method",
     "partial", "global"],
)  # fmt: skip
def test_a_number_that_is_read_elsewhere_may_change(name, monkeypatch):
    """Compiled code is compiled once more; where the number is in a tensor, or the function has all of self, the graph breaks."""
    x, weights, experts = torch.randn(5, 4), torch.rand(5, 2), torch.rand(5, 3).topk(2).indices
    w_up, w_down = torch.randn(2, 3, 4, 4)
    reader = _Reader()
    torch._dynamo.reset()
    compiled = torch.compile(reader, backend="eager", fullgraph=name not in ("text", "tensor", "array"))
    for number in (1.0, 0.5, 2.0):
        reader.number = reader.numbers[0] = reader.array[0] = reader.inner.alpha = number
        reader.tensor.fill_(number)
        monkeypatch.setattr(sys.modules[__name__], "SLOPE", number)
        function = _of_a_global if name == "global" else reader.activation(name)
        rows = torch.einsum("td,tkfd->tkf", x, w_up[experts])
        expected = torch.einsum("tk,tkf,tkdf->td", weights, function(rows), w_down[experts])
        for run in (reader, compiled):
            torch.testing.assert_close(run(x, name, weights, experts, w_up, w_down), expected, rtol=1e-4, atol=1e-4)


class _Signs:
    """Its methods are called by signs, or by another name."""

    def __init__(self):
        self.number, self.other = 1.0, types.SimpleNamespace()

    def __getitem__(self, _):
        return self.number

    def __len__(self):
        return int(self.number * 4)

    def __getattr__(self, name):
        if name != "any_name":
            raise AttributeError(name)
        return self.__dict__["number"]

    def scaled(self, h):
        return F.silu(h) * self.number


class _Dict(dict):
    pass


def _calls(depth, number):
    """A function behind many."""
    inner = _calls(depth - 1, number) if depth else lambda h: F.silu(h) * number[0]
    return lambda h: inner(h)


@functools.wraps(F.silu)
def _wrapping(h):
    return F.silu(h) * _wrapped_number[0]


_wrapped_number = [1.0]


@pytest.mark.parametrize(
    "name",
    ["item", "len", "getattr", "bound", "wraps", "calls", "nested", "key", "frozenset", "deque", "bytes", "dtype", "attribute",
     "dict", "subclass", "moved"],
)  # fmt: skip
def test_what_else_a_function_reads_may_change(name):
    signs, owner, box, nested, named, moved = _Signs(), _Signs(), [1.0], [[[1.0]]], {"a": 1.0}, [[1.0], []]
    signs.bound, own = owner.scaled, _Dict(a=1.0)

    def act(h):
        return F.silu(h) * act.number

    functions = {
        "item": lambda h: F.silu(h) * signs[0],
        "len": lambda h: F.silu(h) * len(signs),
        "getattr": lambda h: F.silu(h) * signs.any_name,
        "bound": lambda h: signs.bound(h),
        "wraps": _wrapping,
        "calls": _calls(2, box),
        "nested": lambda h: F.silu(h) * nested[0][0][0],
        "key": lambda h: F.silu(h) * max(named),
        "frozenset": lambda h: F.silu(h) * max(box[0]),
        "deque": lambda h: F.silu(h) * box[0][0],
        "bytes": lambda h: F.silu(h) * float(box[0]),
        "dtype": lambda h: F.silu(h) * box[0].itemsize,
        "attribute": act,
        "dict": lambda h: F.silu(h) * named["a"],
        "subclass": lambda h: F.silu(h) * own["a"],
        "moved": lambda h: F.silu(h) * (2 * len(moved[0]) + 1),
    }
    x, weights, experts = torch.randn(5, 4), torch.rand(5, 2), torch.rand(5, 3).topk(2).indices
    w_up, w_down = torch.randn(2, 3, 4, 4)
    torch._dynamo.reset()
    function = functions[name]
    compiled = torch.compile(lambda: moe(x, weights, experts, w_up, w_down, activation=function), backend="eager", fullgraph=True)
    for number in (1.0, 0.5, 2.0):
        signs.number = owner.number = act.number = own["a"] = _wrapped_number[0] = nested[0][0][0] = number
        named.clear()
        named.update({number: 1.0} if name == "key" else {"a": number})
        kinds = {"frozenset": frozenset([number]), "deque": collections.deque([number]), "bytes": str(number).encode(),
                 "dtype": torch.float32 if number < 1 else torch.float64}  # fmt: skip
        box[0], moved[:] = kinds.get(name, number), ([[1.0], []] if number == 1 else [[], [1.0]])
        rows = function(torch.einsum("td,tkfd->tkf", x, w_up[experts]))
        expected = torch.einsum("tk,tkf,tkdf->td", weights, rows, w_down[experts])
        for run in (compiled, lambda: moe(x, weights, experts, w_up, w_down, activation=function)):
            torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)


def _writes_an_attribute(reader, number):
    reader.number = number
    return lambda h: F.silu(h) * reader.number


def _writes_an_element(reader, number):
    reader.numbers[0] = number
    return lambda h: F.silu(h) * reader.numbers[0]


def _writes_a_global(reader, number):
    global SLOPE
    SLOPE = number
    return lambda h: F.silu(h) * SLOPE


def _writes_a_cell(reader, number):
    reader.set_closed(number)
    return reader.closed


@pytest.mark.parametrize("write", [_writes_an_attribute, _writes_an_element, _writes_a_global, _writes_a_cell])
def test_a_number_that_traced_code_writes_is_that_of_now(write):
    x, weights, experts = torch.randn(5, 4), torch.rand(5, 2), torch.rand(5, 3).topk(2).indices
    w_up, w_down = torch.randn(2, 3, 4, 4)
    reader, slope = _Reader(), 1.0

    def set_slope(number):
        nonlocal slope
        slope = number

    reader.set_closed, reader.closed = set_slope, lambda h: F.silu(h) * slope
    torch._dynamo.reset()
    operands = x, weights, experts, w_up, w_down
    compiled = torch.compile(lambda number: moe(*operands, activation=write(reader, number)), backend="eager")
    for number in (2.0, 0.5, 3.0):
        torch.testing.assert_close(compiled(number), moe(*operands, activation=f"silu(h) * {number}"))


def test_an_attribute_is_no_global_of_its_name():
    found = {"layer": types.SimpleNamespace(act=F.silu, factor=2.0), "act": 1.0, "factor": 1.0}
    function = eval("lambda h: layer.act(h) * layer.factor", found)
    before = values_read_by(function)
    found |= {"act": 2.0, "factor": 3.0}
    assert values_read_by(function) == before
    found["layer"].factor = 3.0
    assert values_read_by(function) != before


def test_layers_of_one_class_have_their_own_numbers():
    """Blocks that are compiled one by one share code: what is guarded is what the block at hand reads."""
    operands = torch.randn(5, 4), torch.rand(5, 2), torch.rand(5, 3).topk(2).indices, *torch.randn(2, 3, 4, 4)
    readers = [_Reader() for _ in range(3)]
    torch._dynamo.reset()
    for reader, number in zip(readers, (2.0, 0.5, 3.0), strict=True):
        reader.number = number
        reader.compile(backend="eager", fullgraph=True)
    for reader in (*readers, *readers):
        expected = moe(*operands, activation=f"silu(h) * {reader.number}")
        torch.testing.assert_close(reader(operands[0], "attribute", *operands[1:]), expected)


class _AllEqual:
    """Equal to any other one, and without a hash, as dataclasses are."""

    def __init__(self, function):
        self.function = function

    def __eq__(self, other):
        return isinstance(other, _AllEqual)

    def __call__(self, h):
        return self.function(h)


def test_functions_are_told_apart_by_what_they_are():
    assert trace_activation(_AllEqual(F.silu)) == "silu"
    assert trace_activation(_AllEqual(F.gelu)) == "gelu"


def _straight_through(h):
    with torch.no_grad():
        rest = F.relu(h) - h
    return h + rest


def _hooked(h):
    if h.requires_grad:
        h.register_hook(torch.neg)
    return F.silu(h)


@pytest.mark.parametrize("function", [lambda h: h * F.silu(h).data, _hooked])
def test_what_asks_for_gradients_is_refused(function):
    with pytest.raises(ValueError, match="depends on whether gradients flow"):
        trace_activation(function)


@pytest.mark.parametrize("function", [_straight_through, torch.no_grad()(F.silu), torch.inference_mode()(F.relu)])
def test_what_has_no_gradient_is_refused(function):
    with pytest.raises(ValueError, match="computes without gradients"):
        trace_activation(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda h: F.silu(h) * h.shape[-1] ** -0.5,
        lambda h: F.silu(h) / h.size(-1),
        lambda h: F.silu(h) * (2.0 if len(h) > 5 else 1.0),
        lambda h: h / h.numel(),
        lambda h: F.relu(h) if h.shape[-1] == 64 else F.silu(h),
        lambda h: h * torch.full((), h.shape[0] / 2),
    ],
)
def test_what_depends_on_sizes_is_refused(function):
    with pytest.raises(ValueError, match="depends on how large its arguments are"):
        trace_activation(function)


def test_a_constant_of_the_shape_of_an_argument_is_a_number():
    assert trace_activation(lambda h: h * torch.full(h.shape, 0.5)) == trace_activation(lambda h: h * 0.5)
    assert trace_activation(lambda h: torch.where(h > 0, h, torch.zeros_like(h))) == "where(h > 0.0, h, 0.0)"
