"""What single expressions say, whatever stands around them: numbers, axes, views."""

import ast
from collections.abc import Callable, Hashable
from typing import Any

ARITHMETIC = (ast.FloorDiv, ast.Mod, ast.Add, ast.Sub, ast.Mult)
ELEMENTWISE = frozenset(("div", "floor_divide", "remainder", "long", "int", "to", "clone", "contiguous"))
"""Methods that give as many elements as a tensor has, from nothing else than numbers."""
VIEWS = frozenset(("view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "t", "permute", "transpose"))
"""Methods that give the elements of a tensor in another shape."""


def mentions(key: Hashable, part: Hashable) -> bool:
    """Whether ``part`` is, or is part of, a key."""
    return key == part or (isinstance(key, tuple) and any(mentions(inner, part) for inner in key))


def elements_of(key: Hashable) -> Hashable:
    """The key of the tensor that a tensor with this key has the elements of, in whatever shape."""
    while isinstance(key, tuple) and key[0] in VIEWS:
        key = key[1]
    return key


def is_in_place(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr.endswith("_") and not call.func.attr.startswith("_")


def counting(loop: ast.For, resolve: Callable[[ast.expr], Any]) -> str | None:
    """The variable of a loop that is a number, and no tensor, at the start of every round."""
    match loop.iter, loop.target:
        case ast.Call(func=func), ast.Name(id=name) if resolve(func) is range:
            return name
        case ast.Call(func=func), ast.Tuple(elts=[ast.Name(id=name), _]) if resolve(func) is enumerate:
            return name
    return None


def number(e: ast.expr | None) -> int | float | None:
    """The number that a literal is."""
    return e.value if isinstance(e, ast.Constant) and type(e.value) in (int, float) else None


def is_true(e: ast.expr | None) -> bool:
    return isinstance(e, ast.Constant) and e.value is True


def is_zero(args: list[ast.expr]) -> bool:
    return len(args) == 1 and number(args[0]) == 0


def is_empty_list(e: ast.expr) -> bool:
    return isinstance(e, ast.List) and not e.elts


def is_whole(e: ast.expr) -> bool:
    """The slice of a whole axis."""
    return isinstance(e, ast.Slice) and e.lower is e.upper is e.step is None


def is_path(e: ast.expr) -> bool:
    """A name, or an attribute of one."""
    return isinstance(e, ast.Name) or (isinstance(e, ast.Attribute) and is_path(e.value))


def without_views(e: ast.expr) -> ast.expr:
    """The tensor whose elements, in any shape, ``e`` gives."""
    while isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute) and e.func.attr in VIEWS:
        e = e.func.value
    return e


def is_last_of_two(args: list[ast.expr], options: dict[str | None, ast.expr]) -> bool:
    axes = [*args, *options.values()]
    return len(axes) == 1 and ast.unparse(axes[0]) in ("1", "-1")


def axes_of(args: list[ast.expr], options: dict[str | None, ast.expr]) -> tuple[int, ...]:
    """The axes that a reduction takes away, where they are literals."""
    axes = args[0] if len(args) == 1 and not options else options.get("dim") if not args and len(options) == 1 else None
    try:
        found = ast.literal_eval(axes) if axes is not None else ()
    except (ValueError, TypeError):
        return ()
    found = (found,) if type(found) is int else found
    return tuple(found) if isinstance(found, (tuple, list)) and all(type(axis) is int for axis in found) else ()


def axis_left(summed: tuple[tuple[int, ...], ...]) -> tuple[int, int] | None:
    """Of a tensor that has one axis left after reductions along others: which one, and how many there were."""
    rank = 1 + sum(map(len, summed))
    left = list(range(rank))
    for axes in summed:
        if any(not -len(left) <= axis < len(left) for axis in axes) or len({axis % len(left) for axis in axes}) < len(axes):
            return None
        gone = {axis % len(left) for axis in axes}
        left = [axis for i, axis in enumerate(left) if i not in gone]
    return left[0], rank


def sums_last_two(args: list[ast.expr], options: dict[str | None, ast.expr]) -> bool:
    """Whether the axes of a sum are the last two of three."""
    return set(axes_of(args, options)) in ({-1, -2}, {1, 2})
