"""Which activation an expression between the two projections is: a name that has several spellings, or its own formula."""

from itertools import permutations

import torch

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
from moeblaze_ops.kernels.formulas.named import IDENTITY, NAMED, formula_of, name_of
from moeblaze_ops.kernels.formulas.text import check_root
from moeblaze_ops.lowering.index_notation.expr import Expr, is_changing, subexpressions
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.terms.pointwise_formula import NoFormulaError, to_formula

_SYMBOLS = {1: UNGATED_SYMBOLS, 2: GATED_SYMBOLS}


class Formulas:
    """What was read as activations, as expressions of one algebra."""

    def __init__(self, algebra: Algebra):
        self._algebra = algebra
        self.gate = algebra.var(-2, 0, "r")
        self.up = algebra.var(-3, 0, "r")
        self.parameters = tuple(algebra.var(-20 - i, 0, "r") for i in range(len(PARAMETER_SYMBOLS)))
        self._read: dict[str, dict[Expr, None]] = {}
        self._names: dict[tuple[Expr, bool], str | None] = {}

    def name(self, activation: Expr, halves: tuple[Expr, ...], double: bool) -> tuple[str, tuple[Expr, ...]] | None:
        """The activation's name and its pre-activations in the order (gate, up), or None if it is not a fused one.

        Numbers that may change count as what they are now, with a guard where that gives a name. ``double``: it is in fp64.
        """
        numbers = {e: e.args[0].args[0] for e in subexpressions(activation, is_changing)}
        present = {e: self._algebra.const(number.present) for e, number in numbers.items()}
        for order in permutations(halves):
            symbols = dict(zip(order, (self.gate, self.up), strict=False))
            name = self._named(self._algebra.substitute(activation, symbols | present), len(halves), double)
            if name is not None:
                for number in numbers.values():
                    number.guard()
                self._remember(name, activation, symbols)
                return name, order
        return None

    def _named(self, activation: Expr, num_halves: int, double: bool) -> str | None:
        """The name of a function of ``gate`` and ``up``, in whatever way it is written."""
        if (activation, double) not in self._names:
            symbols = dict(zip((self.gate, self.up), map(symbol, _SYMBOLS[num_halves]), strict=False))
            try:
                name = name_of(to_formula(activation, symbols), double=double)
            except ValueError:
                name = ""
            self._names[activation, double] = name if name in NAMED else None
        return self._names[activation, double]

    def spellings(self, activation: str) -> list[Expr]:
        """What was read as an activation, in the symbols ``gate``, ``up`` and ``parameters``."""
        return list(self._read.get(activation, ()))

    def _remember(self, name: str, activation: Expr, symbols: dict[Expr, Expr]) -> None:
        self._read.setdefault(name, {})[self._algebra.substitute(activation, symbols)] = None

    def text(
        self, activation: Expr, halves: tuple[Expr, ...], parameters: tuple[Expr, ...], double: bool
    ) -> tuple[str, tuple[Expr, ...]]:
        """The formula of an activation that has no name, and its pre-activations in the order (gate, up).

            F.mish(gate) * up.clamp(-5, 5)                   but not  gate.softmax(-1) * up

        ``parameters`` are what it calls p0, p1 and so on.

        Raises:
            ValueError: it is none; the message says what it does instead.
        """
        names = _SYMBOLS[len(halves)]
        learned = dict(zip(parameters, map(symbol, PARAMETER_SYMBOLS), strict=False))
        found: tuple[Node, tuple[Expr, ...]] | None = None
        for order in permutations(halves):
            try:
                root = to_formula(activation, dict(zip(order, map(symbol, names), strict=True)) | learned)
            except NoFormulaError as error:
                raise ValueError(_instead(*error.args)) from None
            if found is None or _is_linear(root, names[-1]):
                found = root, order
        root, order = found
        check_root(root)
        name = IDENTITY if root is symbol("h") else name_of(root, double=double)
        symbols = dict(zip(order, (self.gate, self.up), strict=False)) | dict(zip(parameters, self.parameters, strict=False))
        self._remember(name, activation, symbols)
        return name, order


def is_double(halves: tuple[Expr, ...]) -> bool:
    """True if an activation is computed in fp64: so it is of tensors in fp64."""
    leaves = [leaf for half in halves for leaf in subexpressions(half, lambda e: e.kind == "leaf")]
    return any(leaf.args[0].dtype == torch.float64 for leaf in leaves)


def without_gradient(activation: str) -> frozenset[str]:
    """What an activation reads to which it passes no gradient: what it only compares.

        g > p0, in where(g > p0, g, u)          p0
    """
    root = formula_of(activation)
    return frozenset(name for name in symbols_of(root) if derivative(root, symbol(name)) is ZERO)


_KINDS = {
    "leaf": "it reads another tensor, of tokens or of features",
    "var": "it depends on which expert or which feature it is",
    "sum": "it mixes features or rows",
}


def _instead(e: Expr) -> str:
    """What an expression does that no formula does."""
    if e.kind == "cast":
        return f"it casts to {e.args[0]}"
    if e.kind == "leaf" and e.args[0].op in ("opaque", "output"):
        target = e.args[0].node.target
        return f"it reads what '{getattr(target, '__name__', target)}' gives, which is no function of formulas"
    return _KINDS.get(e.kind, f"'{e.kind}' is no pointwise function")


def _is_linear(root: Node, name: str) -> bool:
    return name not in symbols_of(derivative(root, symbol(name)))
