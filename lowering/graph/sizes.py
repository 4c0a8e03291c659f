"""Sizes of axes: numbers, or expressions of symbols that Dynamo has for what only a call tells."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
from torch.fx.experimental.symbolic_shapes import statically_known_true

Size: TypeAlias = int | sympy.Expr

_settled: ContextVar[dict[sympy.Symbol, sympy.Expr] | None] = ContextVar("settled", default=None)


@contextmanager
def settling(sizes: dict[sympy.Symbol, sympy.Expr]) -> Iterator[None]:
    """A context in which some sizes that only the data tell are known as others."""
    token = _settled.set(sizes)
    try:
        yield
    finally:
        _settled.reset(token)


def size_of(dim: Any) -> Size:
    """The size of a tensor axis as an int when it is known, else as a sympy expression."""
    expression = dim.node.expr if hasattr(dim, "node") else dim
    for part in expression.atoms(sympy.Function) if hasattr(dim, "node") else ():
        if statically_known_true(dim.node.shape_env.create_symintnode(part, hint=None) == 1):  # x[: len(x) // 2] of 3 rows
            expression = expression.xreplace({part: sympy.S.One})
    if (settled := _settled.get()) and isinstance(expression, sympy.Expr):
        expression = expression.xreplace(settled)
    return int(expression) if getattr(expression, "is_Integer", True) else expression


def same_size(a: Size, b: Size) -> bool:
    return a == b if isinstance(a, int) and isinstance(b, int) else _expanded(a) == _expanded(b)


def is_at_most(number: Size | float, size: Size) -> bool:
    """True if a number is known to be no more than a size; of symbols, where they are the same."""
    return number <= size if isinstance(number, int | float) and isinstance(size, int) else same_size(number, size)


@lru_cache(maxsize=1 << 16)
def _expanded(size: Size) -> sympy.Expr:
    return sympy.expand(size)


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


def exact_quotient(number: Size, size: Size) -> Size | None:
    """``number / size`` where that is known to be whole."""
    if isinstance(number, int) and isinstance(size, int):
        return number // size if number % size == 0 else None
    ratio = sympy.cancel(sympy.sympify(number) / sympy.sympify(size))
    if sympy.denom(ratio) != 1:
        return None
    return int(ratio) if ratio.is_Integer else ratio
