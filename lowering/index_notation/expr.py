"""Scalar expressions: what one element of a tensor is, as a function of its indices.

Spellings of one layer differ in views, gathers, masks and scatters, and agree element by element. So a tensor is
described here by the expression of its element at symbolic indices, kept in one canonical form: sums and products are
flat and ordered, index arithmetic is a linear form, bound variables are numbered from the inside out. Expressions are
interned, hence equal ones are the same object.

Kinds (``Expr.kind``) and their ``args``:

    var     (level, extent, tag)        an index, 0 <= var < extent; tag "t" token, "d" feature, "r" any other
    const   (value,)
    linear  (constant, ((coefficient, atom), ...))      integer index arithmetic
    div, mod (expr, size)
    leaf    (value, indices)            element of a tensor whose inside is of no interest
    add, mul (terms)
    sum, any, prefix                    (var, body[, upto]); prefix sums var = 0..upto inclusive
    eq      (a, b)                      1 where equal, else 0
    call    (name, args, params)        pointwise function
    cast    (dtype, expr)
    nonzero (mask value, axis, row, extent)     coordinate of the row-th true element
    inverse (permutation value, index)
    group   (var, counts, row)          group of a row when group `var` has `counts` rows
    distinct (leaf value-expression, var)       1; records that `expr` must differ for different `var`
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

Indices: TypeAlias = tuple["Expr", ...]

CHOSEN = "chosen"
"""The function that is 1 where a weight is not zero, made by `fading.chosen`: the weight times it is the weight."""

DETACH = "detach"
"""The function that is what its argument is, and lets no gradient through."""

DROPOUT = "dropout"
"""The function that drops an element with a probability, its parameter, by a number drawn for this element alone."""

STORED = "stored"
"""The function that is what its argument is: what rows hold that are stored, among factors that say where they land."""

SCALED = "scaled"
"""The function that multiplies by its parameter: a number that is not one with those beside it."""

BINDERS = ("sum", "any", "prefix", "group")
"""Kinds that bind their first argument."""

MAX_OPERANDS = 2**13
"""Of one sum or product: many more than the experts and slots of a layer, which sums of sums of sums soon have."""


class TooLarge(Exception):
    """A sum or a product has too many operands to be looked into."""


class Expr:
    """One interned expression; compare with ``is``."""

    __slots__ = ("args", "children", "free", "has_dot", "height", "kind", "mentioned", "own", "uid")

    def __init__(self, kind: str, args: tuple, uid: int):
        self.kind, self.args, self.uid = kind, args, uid
        self.own: Expr | None = None  # what a count up to a row counts of that row itself
        parts = _parts(args)
        bound = frozenset(parts[:1]) if kind in BINDERS else frozenset()
        # A substitution reaches what ``distinct`` is of, on which its value does not depend.
        children = self.children = parts[1:] if kind in (*BINDERS, "distinct") else parts
        own = frozenset((self,)) if kind == "var" else frozenset()
        self.free: frozenset[Expr] = own.union(*(child.free for child in children)) - bound
        self.mentioned: frozenset[Expr] = own.union(*(part.mentioned for part in parts)) - bound
        self.height: int = max((c.height for c in children), default=0) + (kind in BINDERS)
        self.has_dot: bool = (kind == "sum" and args[0].args[2] == "d") or any(c.has_dot for c in children)

    def __repr__(self) -> str:
        return f"{self.kind}{self.args}"


def _parts(args: tuple) -> list[Expr]:
    """The expressions among arguments, in tuples as well."""
    found = [[arg] if isinstance(arg, Expr) else _parts(arg) if isinstance(arg, tuple) else [] for arg in args]
    return [part for own in found for part in own]


def factors_of(e: Expr) -> tuple[Expr, ...]:
    """What a product is of; anything else is its own only factor."""
    return e.args if e.kind == "mul" else (e,)


def split_number(e: Expr) -> tuple[float, tuple[Expr, ...]]:
    """The number of a product, 1 where it has none, and its other factors."""
    numbers = [f.args[0] for f in factors_of(e) if f.kind == "const"]
    return numbers[0] if numbers else 1, tuple(f for f in factors_of(e) if f.kind != "const")


def linear_parts(e: Expr) -> tuple[Any, tuple[tuple[Any, Expr], ...]]:
    """The constant of an index, and how often it has what else it is made of."""
    return e.args if e.kind == "linear" else (e.args[0], ()) if e.kind == "const" else (0, ((1, e),))


def complement_of(e: Expr) -> tuple[Expr, ...]:
    """The factors of what is taken from 1: m and n of ``1 - m n``; none of anything else."""
    if e.kind != "add" or len(e.args) != 2:
        return ()
    one, product = sorted(e.args, key=lambda part: part.kind != "const")
    number, factors = split_number(product)
    return factors if one.kind == "const" and (one.args[0], number) == (1, -1) else ()


def is_hidden(e: Expr) -> bool:
    """True if ``e`` is a number of each feature that is made of a projection: of a pre-activation, or of an expert's output."""
    return e.has_dot and any(var.args[2] == "d" for var in e.free)


def leaves_of(e: Expr) -> set[Any]:
    """The tensors that an expression reads."""
    return {leaf.args[0] for leaf in subexpressions(e, lambda s: s.kind == "leaf")}


def is_changing(e: Expr) -> bool:
    """True if ``e`` is a number of Python's that may be another at the next call."""
    return e.kind == "leaf" and e.args[0].op == "number"


def key_and_number(e: Expr) -> tuple[Expr, Expr] | tuple[None, None]:
    """What a comparison says to equal a number, and that; twice None for anything else."""
    key, number = sorted(e.args, key=lambda side: side.kind == "const") if e.kind == "eq" else (None, None)
    return (key, number) if number is not None and number.kind == "const" else (None, None)


def differ(a: Expr, b: Expr) -> bool:
    """Comparisons of the same expression with two numbers."""
    (key, number), (other, another) = key_and_number(a), key_and_number(b)
    return key is not None and key is other and number is not another


def subexpressions(e: Expr, accept: Callable[[Expr], bool], over: Expr | None = None) -> Iterator[Expr]:
    """Outermost sub-expressions that ``accept`` takes, each once; of those that depend on ``over``, a variable, alone."""
    seen: set[Expr] = set()
    stack = [e]
    while stack:
        top = stack.pop()
        if top in seen or (over is not None and over not in top.free):
            continue
        seen.add(top)
        if accept(top):
            yield top
        else:
            stack.extend(top.children)
