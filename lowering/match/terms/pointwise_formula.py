"""From an expression in index notation to the formula that kernels compute.

Sums and products of index notation know numbers only: a mask is 1 or 0 there. Here a product with a mask is a choice again,
so that what is left out counts for nothing, whatever it is.
"""

import math
from functools import reduce

from moeblaze_ops.kernels.formulas import composites
from moeblaze_ops.kernels.formulas.composites import COMPOSITES
from moeblaze_ops.kernels.formulas.expression import ARITY, COMPARISONS, ONE, ZERO, Node, apply, number, symbols_of
from moeblaze_ops.lowering.index_notation.expr import SCALED, Expr


def to_formula(e: Expr, symbols: dict[Expr, Node]) -> Node:
    """The formula of an expression of symbols, numbers and pointwise functions.

    Raises:
        ValueError: it is made of something else, such as another feature or row, an expert's number or a parameter.
    """
    made: dict[Expr, Node] = dict(symbols)

    def read(e: Expr) -> Node:
        if e not in made:
            made[e] = _number(_read(e))
        return made[e]

    def _read(e: Expr) -> Node:
        if (mask := read_mask(e)) is not None:
            return mask
        match e.kind:
            case "const":
                return number(e.args[0])
            case "add":
                return reduce(lambda a, b: apply("add", a, b), map(read, _numbers_last(e.args)))
            case "mul":
                masks = [mask for part in e.args if (mask := read_mask(part)) is not None]
                others = sorted((read(part) for part in e.args if read_mask(part) is None), key=_place)
                product = reduce(lambda a, b: apply("mul", a, b), others, ONE)
                return apply("where", _all(masks), product, ZERO) if masks else product
            case "call":
                return called(*e.args)
        raise ValueError(_instead(e))

    def called(name: str, args: tuple[Expr, ...], params: tuple) -> Node:
        if name == "where":
            mask = read_mask(args[0])
            if mask is None:
                raise ValueError("a condition that is no comparison")
            return apply("where", mask, read(args[1]), read(args[2]))
        if name == "clamp":
            bounds = (none if bound is None else bound for bound, none in zip(params, (-math.inf, math.inf), strict=True))
            return apply("clamp", read(args[0]), *map(number, bounds))
        operands = [*map(read, args), *map(number, params)]
        if name == SCALED:
            return apply("mul", *operands)
        if name == "softplus":
            return composites.softplus(*operands)
        if name in COMPOSITES:
            return COMPOSITES[name](*operands)
        return apply(name, *operands) if name in ARITY else _unknown(name)

    def read_mask(e: Expr) -> Node | None:
        """A comparison, or several of them: ``1 - mask`` is its opposite, a product of masks holds where all of them do."""
        if e.kind == "eq":
            return apply("eq", *map(read, e.args))
        if e.kind == "call" and e.args[0] in COMPARISONS:
            return apply(e.args[0], *map(read, e.args[1]))
        if e.kind == "call" and e.args[0] == "or":
            masks = [read_mask(part) for part in e.args[1]]
            return None if None in masks else apply("or", *masks)
        if e.kind == "mul":
            masks = [read_mask(part) for part in e.args]
            return None if None in masks else _all(masks)
        if e.kind == "add" and len(e.args) == 2:
            for one, other in (e.args, e.args[::-1]):
                if one.kind == "const" and one.args[0] == 1 and other.kind == "mul":
                    signs = [part for part in other.args if part.kind == "const"]
                    masks = [read_mask(part) for part in other.args if part.kind != "const"]
                    if [sign.args[0] for sign in signs] == [-1] and masks and None not in masks:
                        return apply("not", _all(masks))
        return None

    return read(e)


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


def _number(node: Node) -> Node:
    """A mask as the number that it is in index notation."""
    return apply("where", node, ONE, ZERO) if node.is_logical else node


def _place(factor: Node) -> tuple[bool, bool]:
    """What is of the gate alone stands first in a product, so that the gradients of both halves share it; numbers last."""
    return factor.is_number, "u" in symbols_of(factor)


def _all(masks: list[Node]) -> Node:
    return reduce(lambda a, b: apply("and", a, b), masks)


def _numbers_last(parts: tuple[Expr, ...]) -> list[Expr]:
    return sorted(parts, key=lambda part: part.kind == "const")


def _unknown(name: str) -> Node:
    raise ValueError(f"'{name}' is no function of formulas")
