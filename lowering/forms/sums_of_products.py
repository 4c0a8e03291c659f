"""That a value is the sum of others: they have the same products of tensors, each summed over as many indices.

    x (W + s A B)  =  x W + s (x A) B           sum over i of x_i W_io, and sum over i, r of s x_i A_ir B_ro
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import count, product
from typing import Any, TypeAlias

from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.graph.sizes import Size, same_shape, same_size

Letter: TypeAlias = tuple[str, Any, Size] | None
"""An index of the result, the group of its row, or what is summed over, with its extent; None for the only index of an axis."""
Factor: TypeAlias = tuple[Value | None, tuple[Letter, ...]]
"""A tensor at an index, or, without a tensor, what is summed over."""


def adds_up(total: Value, parts: Sequence[Value], ends: Iterable[Value]) -> bool:
    """True if ``total`` is the sum of ``parts``; ``ends`` are not looked into, whatever they are."""
    at = tuple(None if same_size(n, 1) else ("of", axis, n) for axis, n in enumerate(total.shape))
    found = (_products(part, at, frozenset(map(without_casts, ends)), count()) for part in (total, *parts))
    own, *others = (Counter(map(_named, products)) for products in found)
    return all(same_shape(part.shape, total.shape) for part in parts) and own == sum(others, Counter())


def without_casts(value: Value) -> Value:
    """What a value is, but for roundings to other floats."""
    while value.op == "cast" and value.dtype.is_floating_point and value.args[0].dtype.is_floating_point:
        value = value.args[0]
    return value


def _products(value: Value, at: tuple[Letter, ...], ends: Container[Value], new: Iterator[int]) -> list[list[Factor]]:
    """The products that add up to an element."""
    value, args = without_casts(value), without_casts(value).args
    op = "end" if value in ends else args[0] if value.op == "pointwise" else value.op

    def of(x: Value, letters: Sequence[Letter]) -> list[list[Factor]]:
        """The products of an operand, whose axes are the last ones of those with these letters."""
        own = letters[len(letters) - len(x.shape) :]
        return _products(x, tuple(None if same_size(n, 1) else c for c, n in zip(own, x.shape, strict=True)), ends, new)

    match op:
        case "low_rank" | "add":
            return [found for x in (args if op == "low_rank" else args[1]) for found in of(x, at)]
        case "slice" | "cat" if at[args[1]] is None or at[args[1]][0] == "of":
            x, dim, *places = args
            if op == "slice":
                return of(x, (*at[:dim], ("of", (at[dim], *places), x.shape[dim]), *at[dim + 1 :]))
            found, start = [], 0
            for piece in x:
                place = ("of", (at[dim], start, "in"), piece.shape[dim])
                found += [[*own, (None, (place,))] for own in of(piece, (*at[:dim], place, *at[dim + 1 :]))]
                start = start + piece.shape[dim]
            return found
        case "mul":
            factors = [of(x, at) for x in args[1]]
        case "contract":
            xs, labels, out = args
            axes = [axis for x, label in zip(xs, labels, strict=True) for axis in zip(label, x.shape, strict=True)]
            over = {c: ("over", next(new), n) for c, n in axes if c not in out and not same_size(n, 1)}
            letters = dict(zip(out, at, strict=True)) | over
            factors = [of(x, [letters.get(c) for c in label]) for x, label in zip(xs, labels, strict=True)]
            factors.append([[(None, (letter,)) for letter in over.values()]])
        case "grouped_mm" if at[0] is None or at[0][0] == "of":
            rows, weights, offsets = args
            feature, group = ("over", next(new), rows.shape[1]), ("of", (offsets, at[0]), weights.shape[0])
            factors = [of(rows, (at[0], feature)), of(weights, (group, feature, at[1])), [[(None, (feature,))]]]
        case _:
            return [[(value, at)]]
    return [[factor for part in chosen for factor in part] for chosen in product(*factors)]


def _named(factors: list[Factor]) -> tuple:
    """A product with the letters that it sums over numbered as its tensors have them."""
    names: dict[Letter, int] = {}

    def named(letter: Letter) -> tuple | None:
        return letter if letter is None or letter[0] == "of" else (names.setdefault(letter, len(names)), letter[2])

    tensors = sorted((factor for factor in factors if factor[0] is not None), key=lambda factor: id(factor[0]))
    found = tuple((tensor, tuple(map(named, at))) for tensor, at in tensors)
    return found, frozenset(Counter(named(letter) for tensor, at in factors if tensor is None for letter in at).items())
