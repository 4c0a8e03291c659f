"""Numbers in formulas: what is folded is the same function in floating point, and a number is its own."""

import math
import random

import pytest
import sympy
import torch
import torch.nn.functional as F

from moeblaze_ops.arguments.activations import activation_of
from moeblaze_ops.arguments.traced_activations import trace_activation
from moeblaze_ops.kernels.formulas.expression import apply, number, symbol
from moeblaze_ops.kernels.formulas.named import NAMED
from moeblaze_ops.kernels.formulas.text import parse, to_text
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.index_notation.pointwise import apply_pointwise
from moeblaze_ops.lowering.match.terms.activation import Formulas
from moeblaze_ops.lowering.match.terms.pointwise_formula import to_formula

NUMBERS = [1.0, -1.0, 2.0, 0.5, 3.0, 1e-4, 1e8, -1e8, 12582912.0, -12582912.0, 1e30, 1e-30]
VALUES = [0.0, -0.0, 1.0, -1.5, 0.3, 7.25, -60.0, 3e-5, 1e4, 1e10, -1e10, 1e-10, math.nan, math.inf, -math.inf]


class OfTorch:
    """The functions of a program as torch computes them, and the largest number on the way."""

    def __init__(self, h):
        self.scale = torch.zeros_like(h)
        self.h = h

    def call(self, name, a, *args):
        functions = {"sub": torch.sub, "rsub": torch.rsub, "div": torch.div, "mul": torch.mul, "add": torch.add, "neg": torch.neg}
        functions |= {"silu": F.silu, "relu": F.relu, "eq": torch.eq, "ne": torch.ne, "gt": torch.gt, "where": torch.where}
        args = [torch.tensor(arg) if isinstance(arg, float) and name == "where" else arg for arg in args]
        result = functions[name](a, *args)
        if result.is_floating_point():
            self.scale = torch.maximum(self.scale, result.abs().nan_to_num(0, 0, 0))
        return result


class OfFormulas:
    h = symbol("h")

    def call(self, name, *args):
        a, *others = [number(arg) if isinstance(arg, float) else arg for arg in args]
        if name == "mul":
            others = [apply("where", x, number(1), number(0)) if x.is_logical else x for x in others]
        if name == "rsub":
            return apply("sub", *others, a)
        return apply("mul", a, apply("sigmoid", a)) if name == "silu" else apply(name, a, *others)


class Weight:
    """Of which each element is a number of its own."""

    is_permutation, dtype = False, torch.float32


class OfTheNormalForm:
    """``h`` is a pre-activation: a sum over the features of a token."""

    def __init__(self):
        self.algebra = Algebra()
        feature, width = self.algebra.var(1, 4, "d"), self.algebra.var(0, 4, "d")
        self.h = self.algebra.sum(feature, self.algebra.leaf(Weight(), (width, feature)))

    def call(self, name, *args):
        args = [self.algebra.const(arg) if isinstance(arg, float) else arg for arg in args]
        return apply_pointwise(self.algebra, name, args, (), integers=False)


def program(seed):
    """A chain of functions, of which the next one takes what the last one gave."""
    rng = random.Random(seed)
    names = ["add", "sub", "rsub", "mul", "mul", "div", "neg", "clean", "fill", "relu", "silu", "mask", "choose", "share"]
    steps = [(rng.choice(names), rng.choice(NUMBERS)) for _ in range(rng.randint(2, 5))]

    def run(of):
        h = of.h
        for name, value in steps:
            if name == "clean":
                h = of.call("where", of.call("eq", h, h), h, 0.0)
            elif name == "fill":
                h = of.call("where", of.call("ne", h, h), 2.0, h)
            elif name == "mask":
                h = of.call("mul", h, of.call("gt", h, value))
            elif name == "choose":
                h = of.call("where", of.call("gt", h, value), h, 0.0)
            elif name == "share":
                h = of.call("div", h, of.call("add", of.call("mul", h, h), value))
            else:
                h = of.call(name, h, *([] if name in ("neg", "relu", "silu") else [value]))
        return h

    return run, steps


def check(run, steps, root, dtype):
    h = torch.tensor(VALUES).to(dtype).float()
    of_torch = OfTorch(h)
    expected = run(of_torch)
    found = activation_of(to_text(root)).value(h) if root is not symbol("h") else h
    found = found if isinstance(found, torch.Tensor) else torch.full_like(h, found)
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf()), (steps, to_text(root))
    finite = expected.isfinite()
    error = (found - expected).abs()[finite]
    assert (error <= 1e-6 * of_torch.scale[finite] + 1e-36).all(), (steps, to_text(root), found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_what_is_folded_is_the_same_function(first, dtype):
    for seed in range(first, first + 100):
        run, steps = program(seed)
        of_algebra = OfTheNormalForm()
        element = run(of_algebra)
        check(run, steps, to_formula(element, {of_algebra.h: symbol("h")}), dtype)
        check(run, steps, run(OfFormulas()), dtype)


@pytest.mark.parametrize(
    ("one", "other"),
    [("(h + 1) + 0.5", "h + 1.5"), ("(h * 0.5) * 2", "h"), ("(h * 0.5) * (u * 4)", "h * u * 2"), ("-(h * 1e30)", "h * -1e30")],
)
def test_numbers_that_are_one(one, other):
    one, other = (text.replace("h", "g") if "u" in one else text for text in (one, other))
    assert parse(one) is parse(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("(h + 1e8) - 1e8", "h"),
        ("(h + 1) - 1", "h"),
        ("(h * 1e30) * 1e-30", "h"),
        ("(h * 1e-30) * 1e-30", "h * 1e-60"),
        ("(h * 1e30) * sigmoid(h)", "(h * sigmoid(h)) * 1e30"),
    ],
)
def test_numbers_that_are_two(one, other):
    assert parse(one) is not parse(other)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda h: h / (1 + torch.exp(-h)), "silu"),
        (lambda h: h / (1.000049 + torch.exp(-h)), None),
        (lambda g, u: g.clamp(max=7.0) * torch.sigmoid(1.702 * g.clamp(max=7.0)) * (u.clamp(-7.0, 7.0) + 1), "swiglu_clamped"),
        (lambda g, u: g.clamp(max=7.0) * torch.sigmoid(1.70204 * g.clamp(max=7.0)) * (u.clamp(-7.0, 7.0) + 1), None),
    ],
)
@pytest.mark.parametrize("double", [False, True])
def test_a_function_has_the_name_of_its_own_numbers(function, name, double):
    """To their last bit in fp32, or in fp64: the number of another function keeps its formula."""
    found = trace_activation(function, double=double)
    assert found == name if name else found not in NAMED


@pytest.mark.parametrize(
    ("factor", "name"),
    [(1 / math.sqrt(2), "gelu"), (math.sqrt(0.5), "gelu"), (0.70710678, "gelu"), (0.70711, None), (0.7071, None)],
)
def test_a_layers_activation_has_the_name_of_its_own_numbers(factor, name):
    algebra = Algebra()
    h = algebra.var(-2, 0, "r")
    error = apply_pointwise(algebra, "erf", [algebra.mul(algebra.const(factor), h)], (), integers=False)
    by_hand = algebra.mul(algebra.const(0.5), h, algebra.add(algebra.one, error))
    found = Formulas(algebra).name(by_hand, (h,), double=False)
    assert (found and found[0]) == name


def test_a_number_that_only_a_call_tells_is_in_no_formula():
    algebra = Algebra()
    h = algebra.var(-2, 0, "r")
    with pytest.raises(ValueError, match="'clamp' of a number that only a call tells"):
        to_formula(algebra.call("clamp", (h,), sympy.Symbol("s0"), None), {h: symbol("h")})
