"""The canonical form of a weight with a low-rank addition (LoRA), however the addition is written.

    low_rank (weight, product)      the sum of a matrix that the caller passes in and of products of such matrices

It is one matrix to whoever multiplies by it, and is looked into where the operands of a layer are found. A product beside the
weight's own is a product with such a sum: ``x W + s (x A) B = x (W + s A B)``.

    F.linear(x, w + 2.0 * (b @ a))                          but not  F.linear(x, m * (w + b @ a) / norm)
    F.linear(x, w) + 2.0 * F.linear(F.linear(x, a), b)      but not  F.linear(x, w) + F.linear(F.linear(dropped, a), b)
    F.linear(x, w)[:, :n] + F.linear(F.linear(x, a), b)     but not  F.silu(F.linear(x, w))[:, :n] + F.linear(F.linear(x, a), b)
    F.linear(x, w) + torch.cat((F.linear(F.linear(x, a), b), F.linear(F.linear(x, a2), b2)), -1)
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

from moeblaze_ops.lowering.forms.factors import is_given, is_low_rank, is_scale, look_into
from moeblaze_ops.lowering.forms.sums_of_products import without_casts
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.graph.sizes import Size, same_shape, same_size

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


Joined: TypeAlias = tuple[Value, list[Value]]
"""A sum as one value, and what it is made of."""


def low_rank_sum(view: GraphView, a: Value, b: Value) -> Joined | None:
    """What ``a + b`` is where one is a weight, or a product with one, and the other one its low-rank addition.

    Whether it is that is for `sums_of_products` to say.
    """
    for left, right in ((a, b), (b, a)):
        if not same_shape(left.shape, right.shape):
            continue
        if is_given(left) and is_low_rank(right) and not is_low_rank(left):
            look_into(right)
            return view.make("low_rank", left, right), [left, right]
        if (joined := _joined(view, left, right)) is not None:
            return joined
    return None


def _is_number(value: Value) -> bool:
    """One number: of a product's features each may have its own otherwise, which is no scale of the weight."""
    return is_scale(value) and all(size == 1 for size in value.shape)


def _joined(view: GraphView, product: Value, addition: Value) -> Joined | None:
    """``x W + s (x A) B`` as the product of x and ``W + s A B``; a bias that was added to the first stays outside."""
    numbers, second = _without_numbers(addition)
    joined_products = {"contract": _joined_products, "grouped_mm": _joined_groups, "cat": _joined_pieces}.get(second.op)
    if joined_products is None:
        return None
    product, op = _of_parts(view, product), "contract" if second.op == "cat" else second.op
    if (first := without_casts(product)).op == op:
        return joined_products(view, first, numbers, second)
    if product.op != "pointwise" or product.args[0] != "add" or len(product.args[1]) != 2:
        return None
    for inner, bias in (product.args[1], product.args[1][::-1]):
        first = without_casts(inner)
        fits = inner.shape == product.shape and first.op == op
        if fits and (joined := joined_products(view, first, numbers, second)) is not None:
            return view.make("pointwise", "add", (joined[0], bias), ()), [*joined[1], _whole(bias)]
    return None


def _joined_pieces(view: GraphView, product: Value, numbers: Sequence[Value], second: Value) -> Joined | None:
    """``x W + cat(x A B, ...)`` as the product of x and ``W + cat(A B, ...)``."""
    pieces, dim = second.args
    starts = accumulate((piece.shape[dim] for piece in pieces), initial=0)
    parts = [_part(view, product, dim, start, 1, piece.shape[dim]) for start, piece in zip(starts, pieces, strict=False)]
    joined = [found for part, piece in zip(parts, pieces, strict=True) if (found := _joined(view, part, piece)) is not None]
    if numbers or len(joined) < len(pieces) or any(total.op != "contract" for total, _ in joined):
        return None
    xs, labels, out = product.args
    place = next(i for i, label in enumerate(labels) if out[dim] in label)
    w, sums = xs[place], tuple(total.args[0][1].args[1] for total, _ in joined)
    added = view.make("cat", sums, labels[place].index(out[dim]), shape=w.shape, dtype=w.dtype)
    xs = (*xs[:place], view.make("low_rank", w, added, shape=w.shape, dtype=w.dtype), *xs[place + 1 :])
    return view.make("contract", xs, labels, out, shape=product.shape, dtype=product.dtype), [x for _, own in joined for x in own]


def _part(view: GraphView, x: Value, dim: int, start: Size, step: int, length: Size) -> Value:
    return view.make("slice", x, dim, start, step, shape=(*x.shape[:dim], length, *x.shape[dim + 1 :]), dtype=x.dtype)


def _of_parts(view: GraphView, part: Value) -> Value:
    """A part of a product's features as the product with a part of the weight, and a part of a sum as the sum of parts."""
    if (sliced := without_casts(part)).op != "slice":
        return part
    whole, dim, start, step = sliced.args
    whole = without_casts(whole)

    def cut(x: Value, axis: int) -> Value:
        return _part(view, x, axis, start, step, sliced.shape[dim])

    match whole.op, whole.args:
        case "contract", (xs, labels, out):
            axes = [label.find(out[dim]) for label in labels]
            xs = tuple(x if axis < 0 else cut(x, axis) for x, axis in zip(xs, axes, strict=True))
            return view.make("contract", xs, labels, out, shape=part.shape, dtype=whole.dtype)
        case "grouped_mm", (rows, w, ends) if dim == 1:
            return view.make("grouped_mm", rows, cut(w, 2), ends, shape=part.shape, dtype=whole.dtype)
        case "pointwise", ("add", xs, _) if all(x.shape and same_size(x.shape[-1], whole.shape[dim]) for x in xs):
            xs = tuple(_of_parts(view, cut(x, len(x.shape) - 1)) for x in xs)
            return view.make("pointwise", "add", xs, (), shape=part.shape, dtype=whole.dtype)
    return part


def _whole(value: Value) -> Value:
    """What a value is a part of."""
    while value.op == "slice":
        value = value.args[0]
    return value


def _joined_products(view: GraphView, product: Value, numbers: Sequence[Value], second: Value) -> Joined | None:
    for x, w, lx, lw in _sides(product):
        for u, b, lu, lb in _sides(second):
            first = without_casts(u)
            if first.op != "contract" or not (is_given(w) and is_given(b)):
                continue
            for other, a, lo, la in _sides(first):
                if without_casts(other) is not without_casts(x) or not is_given(a):
                    continue
                labels = _labels(product, second, first, (lx, lw), (lu, lb), (lo, la))
                if labels is not None and _fits(w, lw, (a, b), labels):
                    total = _scaled(view, numbers, w, (a, b), labels, lw)
                    return _times_sum(view, product, x, lx, lw, total), [x, _whole(w), a, b, *numbers]
    return None


def _labels(product: Value, second: Value, first: Value, own: tuple, outer: tuple, inner: tuple) -> tuple[str, str] | None:
    """Letters of A and B in those of the product with W, where the two products are one with a product of A and B."""
    (lx, lw), (lu, lb), (lo, la) = own, outer, inner
    names = dict(zip(second.args[2], product.args[2], strict=True))
    ranks = [letter for letter in lb if letter not in names]
    if len(ranks) != 1 or ranks[0] not in lu:
        return None
    fresh = next(letter for letter in _LETTERS if letter not in lx + lw)
    names[ranks[0]] = fresh
    below = dict(zip(first.args[2], (names.get(letter) for letter in lu), strict=True))
    for letter, known in zip(lo, lx, strict=True):
        if below.setdefault(letter, known) != known:
            return None
    if any(below.get(letter) is None for letter in la):
        return None
    of_a, of_b = "".join(below[letter] for letter in la), "".join(names[letter] for letter in lb)
    is_product = set(of_a) | set(of_b) == {*lw, fresh} and fresh in of_a and fresh in of_b and fresh not in product.args[2]
    summed = set(lw) - set(product.args[2])
    return (of_a, of_b) if is_product and summed <= set(of_a) and summed.isdisjoint(of_b) else None


def _fits(w: Value, lw: str, factors: Sequence[Value], labels: Sequence[str]) -> bool:
    """True if the product of the factors is no larger than the weight: one that all experts share has no sum with theirs."""
    sizes = dict(zip(lw, w.shape, strict=True))
    axes = [axis for factor, label in zip(factors, labels, strict=True) for axis in zip(label, factor.shape, strict=True)]
    return all(same_size(size, 1) or same_size(size, sizes[letter]) for letter, size in axes if letter in sizes)


def _joined_groups(view: GraphView, product: Value, numbers: Sequence[Value], second: Value) -> Joined | None:
    rows, w, ends = product.args
    u, b, ends_b = second.args
    first = without_casts(u)
    if first.op != "grouped_mm" or not (ends is ends_b is first.args[2]):
        return None
    other, a, _ = first.args
    if without_casts(other) is not without_casts(rows) or not all(map(is_given, (w, a, b))):
        return None
    total = _scaled(view, numbers, w, (a, b), ("eir", "ero"), "eio")
    joined = view.make("grouped_mm", rows, total, ends, shape=product.shape, dtype=product.dtype)
    return joined, [rows, _whole(w), a, b, *numbers]


def _scaled(view: GraphView, numbers: Sequence[Value], w: Value, xs: tuple[Value, ...], labels: tuple, out: str) -> Value:
    """The sum of a weight and a multiple of a product, which no node of the graph holds."""
    total = view.make("contract", xs, labels, out, shape=w.shape, dtype=w.dtype)
    for number in numbers:
        total = view.make("pointwise", "mul", (number, total), (), shape=w.shape, dtype=w.dtype)
    return view.make("low_rank", w, total, shape=w.shape, dtype=w.dtype)


def _times_sum(view: GraphView, product: Value, x: Value, lx: str, lw: str, total: Value) -> Value:
    return view.make("contract", (x, total), (lx, lw), product.args[2], shape=product.shape, dtype=product.dtype)


def _sides(product: Value) -> list[tuple[Value, Value, str, str]]:
    """The operands of a product of two, in both orders, with their letters."""
    xs, labels, _ = product.args
    return [] if len(xs) != 2 else [(*xs, *labels), (*xs[::-1], *labels[::-1])]


def _without_numbers(value: Value) -> tuple[list[Value], Value]:
    """The numbers that a value is multiplied by, and the rest."""
    numbers: list[Value] = []
    while True:
        value = without_casts(value)
        factors = value.args[1] if value.op == "pointwise" and value.args[0] == "mul" else ()
        rest = [x for x in factors if not _is_number(x)]
        if len(rest) != 1 or len(rest) == len(factors):
            return numbers, value
        numbers += [x for x in factors if _is_number(x)]
        (value,) = rest
