"""Which activation an expression between the two projections is: a name that has several spellings, or its own formula."""

import math
from collections.abc import Iterator
from itertools import permutations

import torch

from moeblaze_ops.kernels.formulas.constants import as_used
from moeblaze_ops.kernels.formulas.derivative import derivative
from moeblaze_ops.kernels.formulas.expression import (
    GATED_SYMBOLS,
    PARAMETER_SYMBOLS,
    UNGATED_SYMBOLS,
    ZERO,
    Node,
    symbol,
    symbols_of,
)
from moeblaze_ops.kernels.formulas.named import CLAMP_ALPHA, CLAMP_LIMIT, IDENTITY, SILU_LIMIT, formula_of, name_of
from moeblaze_ops.kernels.formulas.text import check_root
from moeblaze_ops.lowering.forms.symbolic_floats import is_changing
from moeblaze_ops.lowering.index_notation.expr import Expr, subexpressions
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.index_notation.pointwise import apply_pointwise
from moeblaze_ops.lowering.match.terms.pointwise_formula import to_formula


class Formulas:
    """The fused activations as expressions of one algebra, in every form people write."""

    def __init__(self, algebra: Algebra):
        self._algebra = algebra
        self.gate = algebra.var(-2, 0, "r")
        self.up = algebra.var(-3, 0, "r")
        self.parameters = tuple(algebra.var(-20 - i, 0, "r") for i in range(len(PARAMETER_SYMBOLS)))
        self._read: dict[str, dict[Expr, None]] = {}
        self._named = {
            double: {self._as_used(e, double): name for name, forms in self._all() for e in forms} for double in (False, True)
        }

    def name(self, activation: Expr, halves: tuple[Expr, ...]) -> tuple[str, tuple[Expr, ...]] | None:
        """The activation's name and its pre-activations in the order (gate, up), or None if it is not a fused one.

        Numbers that may change count as what they are now, with a guard where that gives a name.
        """
        double = _is_double(halves)
        numbers = {e: e.args[0].args[0] for e in subexpressions(activation, is_changing)}
        present = {e: self._algebra.const(number.present) for e, number in numbers.items()}
        for order in permutations(halves):
            symbols = dict(zip(order, (self.gate, self.up), strict=False))
            used = self._as_used(self._algebra.substitute(activation, symbols | present), double)
            name = self._named[double].get(used)
            if name is not None:
                for number in numbers.values():
                    number.guard()
                self._remember(name, activation, symbols)
                return name, order
        return None

    def spellings(self, activation: str) -> list[Expr]:
        """What was read as an activation, in the symbols ``gate``, ``up`` and ``parameters``."""
        return list(self._read.get(activation, ()))

    def _remember(self, name: str, activation: Expr, symbols: dict[Expr, Expr]) -> None:
        self._read.setdefault(name, {})[self._algebra.substitute(activation, symbols)] = None

    def text(self, activation: Expr, halves: tuple[Expr, ...], parameters: tuple[Expr, ...] = ()) -> tuple[str, tuple[Expr, ...]]:
        """The formula of an activation that has no name, and its pre-activations in the order (gate, up).

            F.mish(gate) * up.clamp(-5, 5)                   but not  gate.softmax(-1) * up

        ``parameters`` are what it calls p0, p1 and so on.

        Raises:
            ValueError: it is none; the message says what it does instead.
        """
        names = GATED_SYMBOLS if len(halves) == 2 else UNGATED_SYMBOLS
        learned = dict(zip(parameters, map(symbol, PARAMETER_SYMBOLS), strict=False))
        found: tuple[Node, tuple[Expr, ...]] | None = None
        for order in permutations(halves):
            root = to_formula(activation, dict(zip(order, map(symbol, names), strict=True)) | learned)
            if found is None or _is_linear(root, names[-1]):
                found = root, order
        root, order = found
        check_root(root)
        name = IDENTITY if root is symbol("h") else name_of(root, double=_is_double(halves))
        symbols = dict(zip(order, (self.gate, self.up), strict=False)) | dict(zip(parameters, self.parameters, strict=False))
        self._remember(name, activation, symbols)
        return name, order

    def _as_used(self, e: Expr, double: bool) -> Expr:
        """Constants as arithmetic has them, so that 1 / sqrt(2) written in two ways is one number."""
        constants = subexpressions(e, lambda part: part.kind == "const" and isinstance(part.args[0], float))
        return self._algebra.substitute(e, {c: self._algebra.const(as_used(c.args[0], double)) for c in constants})

    def _all(self) -> Iterator[tuple[str, list[Expr]]]:
        g, u = self.gate, self.up
        for gated, ungated, forms in (
            ("swiglu", "silu", self._silu(g)),
            ("geglu", "gelu", self._gelu(g)),
            ("geglu_tanh", "gelu_tanh", self._gelu_tanh(g)),
            ("reglu", "relu", [self._call("relu", g)]),
        ):
            yield ungated, forms
            yield gated, [self._algebra.mul(e, u) for e in forms]
        yield "relu2", [self._call("square", self._call("relu", g))]
        yield "swiglu_clamped", [self._clamped(g, u)]
        yield "swiglu_limited", self._limited(g, u)

    def _call(self, name: str, *args: Expr, params: tuple = ()) -> Expr:
        return apply_pointwise(self._algebra, name, list(args), params, integers=False)

    def _scaled(self, number: float, e: Expr) -> Expr:
        return self._algebra.mul(self._algebra.const(number), e)

    def _silu(self, g: Expr) -> list[Expr]:
        exponential = self._call("exp", self._scaled(-1, g))
        by_hand = self._call("div", g, self._algebra.add(self._algebra.one, exponential))
        return [self._call("silu", g), by_hand]

    def _gelu(self, g: Expr) -> list[Expr]:
        by_hand = self._algebra.add(self._algebra.one, self._call("erf", self._scaled(1 / math.sqrt(2), g)))
        return [self._call("gelu", g), self._algebra.mul(self._algebra.const(0.5), g, by_hand)]

    def _gelu_tanh(self, g: Expr) -> list[Expr]:
        cube = self._scaled(0.044715, self._algebra.mul(g, g, g))
        cube_pow = self._scaled(0.044715, self._call("pow", g, params=(3,)))
        scale = self._algebra.const(math.sqrt(2 / math.pi))

        def by_hand(cubed: Expr) -> Expr:
            inner = self._algebra.mul(scale, self._algebra.add(g, cubed))
            outer = self._algebra.add(self._algebra.one, self._call("tanh", inner))
            return self._algebra.mul(self._algebra.const(0.5), g, outer)

        return [self._call("gelu_tanh", g), by_hand(cube), by_hand(cube_pow)]

    def _bounded(self, g: Expr, u: Expr, limit: float) -> tuple[Expr, Expr]:
        return self._call("clamp", g, params=(None, limit)), self._call("clamp", u, params=(-limit, limit))

    def _limited(self, g: Expr, u: Expr) -> list[Expr]:
        g, u = self._bounded(g, u, SILU_LIMIT)
        return [self._algebra.mul(silu, u) for silu in self._silu(g)]

    def _clamped(self, g: Expr, u: Expr) -> Expr:
        g, u = self._bounded(g, u, CLAMP_LIMIT)
        gate = self._call("sigmoid", self._scaled(CLAMP_ALPHA, g))
        return self._algebra.mul(self._algebra.add(u, self._algebra.one), g, gate)


def _is_double(halves: tuple[Expr, ...]) -> bool:
    """Whether an activation is computed in fp64: so it is of tensors in fp64."""
    leaves = [leaf for half in halves for leaf in subexpressions(half, lambda e: e.kind == "leaf")]
    return any(leaf.args[0].dtype == torch.float64 for leaf in leaves)


def without_gradient(activation: str) -> frozenset[str]:
    """What an activation reads to which it passes no gradient: what it only compares.

        g > p0, in where(g > p0, g, u)          p0
    """
    root = formula_of(activation)
    return frozenset(name for name in symbols_of(root) if derivative(root, symbol(name)) is ZERO)


def _is_linear(root: Node, name: str) -> bool:
    return name not in symbols_of(derivative(root, symbol(name)))
