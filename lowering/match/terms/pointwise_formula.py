"""From an expression in index notation to the formula that kernels compute.

Sums and products of index notation know numbers only: a mask is 1 or 0 there, and so it is in a formula, beside a number.
"""

import math
from collections.abc import Iterable
from functools import reduce

from moeblaze_ops.kernels.formulas import composites
from moeblaze_ops.kernels.formulas.composites import COMPOSITES
from moeblaze_ops.kernels.formulas.expression import ARITY, MASKS, Node, apply, as_number, number, symbols_of
from moeblaze_ops.lowering.index_notation.expr import SCALED, Expr, complement_of


class NoFormulaError(ValueError):
    """An expression is none of symbols, numbers and pointwise functions."""


def to_formula(e: Expr, symbols: dict[Expr, Node]) -> Node:
    """The formula of an expression of symbols, numbers and pointwise functions.

    Raises:
        NoFormulaError: it is made of something else, such as another feature or row, an expert's number or a parameter.
        ValueError: there is no such function of such numbers and masks.
    """
    made: dict[Expr, Node] = dict(symbols)

    def read(e: Expr) -> Node:
        if e not in made:
            made[e] = _read(e)
        return made[e]

    def read_number(e: Expr) -> Node:
        """A mask as the number that it is in index notation."""
        return as_number(read(e))

    def _read(e: Expr) -> Node:
        match e.kind:
            case "const":
                return number(e.args[0])
            case "eq":
                return apply("eq", *map(read_number, e.args))
            case "add":
                masks = [*map(read, complement_of(e))]
                if masks and all(mask.is_logical for mask in masks):
                    return apply("not", _chain("and", masks))
                return _chain("add", map(read_number, sorted(e.args, key=lambda part: part.kind == "const")))
            case "mul":
                if all(part.is_logical for part in map(read, e.args)):
                    return _chain("and", map(read, e.args))
                return _chain("mul", sorted(map(read_number, e.args), key=_place))
            case "call":
                return called(*e.args)
        raise NoFormulaError(e)

    def called(name: str, args: tuple[Expr, ...], params: tuple) -> Node:
        if name == "clamp":
            params = tuple(none if bound is None else bound for bound, none in zip(params, (-math.inf, math.inf), strict=True))
        if not all(isinstance(param, int | float) for param in params):
            raise ValueError(f"'{name}' of a number that only a call tells")
        of_masks = MASKS.get(name, 0)
        operands = [*map(read, args[:of_masks]), *map(read_number, args[of_masks:]), *map(number, params)]
        if name == SCALED:
            return apply("mul", *operands)
        if name == "softplus":
            return composites.softplus(*operands)
        if name in COMPOSITES:
            return COMPOSITES[name](*operands)
        if name not in ARITY:
            raise ValueError(f"'{name}' is no function of formulas")
        return apply(name, *operands)

    return read_number(e)


def _chain(function: str, parts: Iterable[Node]) -> Node:
    return reduce(lambda a, b: apply(function, a, b), parts)


def _place(factor: Node) -> tuple[bool, bool]:
    """What is of the gate alone stands first in a product, so that the gradients of both halves share it; numbers last."""
    return factor.is_number, "u" in symbols_of(factor)
