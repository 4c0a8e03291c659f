"""What is said to be a sum of others is one, in numbers: of random products, joined as adapters are, rightly and wrongly."""

import random

import pytest
import torch

from moeblaze_ops.lowering.forms.sums_of_products import adds_up
from moeblaze_ops.lowering.graph.functional_view import Value

N = 3
"""All axes that are not of one element are as long, so that sizes do not tell them apart."""


def value(op, *args, shape):
    return Value(op, args, shape, torch.float64, None)


def product(xs, labels, out):
    sizes = dict(pair for x, label in zip(xs, labels, strict=True) for pair in zip(label, x.shape, strict=True) if pair[1] != 1)
    return value("contract", tuple(xs), tuple(labels), out, shape=tuple(sizes.get(c, 1) for c in out))


def pointwise(name, *xs):
    return value("pointwise", name, xs, (), shape=torch.broadcast_shapes(*(x.shape for x in xs)))


def number(x, held):
    """The tensor that a value is."""
    match x.op:
        case "contract":
            xs, labels, out = x.args
            return torch.einsum(f"{','.join(labels)}->{out}", *(number(part, held) for part in xs))
        case "slice":
            whole, dim, start, step = x.args
            return number(whole, held).index_select(dim, start + step * torch.arange(x.shape[dim]))
        case "cat":
            return torch.cat([number(part, held) for part in x.args[0]], x.args[1])
        case "low_rank":
            return number(x.args[0], held) + number(x.args[1], held)
        case "pointwise":
            a, b = (number(part, held) for part in x.args[1])
            return a + b if x.args[0] == "add" else a * b
    return held.setdefault(x, torch.rand(x.shape, dtype=torch.float64))


def drawn(rng, changes):
    """``x (W + s A B)`` and its two terms, with so many changes."""
    w_shape, a_shape = ((rng.choice((N, N, N, 1)), N) for _ in range(2))
    shapes = (N, N), w_shape, a_shape, (N, N), (1,), (N, N)
    x, w, a, b, s, other = (value("input", i, shape=shape) for i, shape in enumerate(shapes))
    labels, kept = {"x": "ti", "w": "oi", "a": "ri", "b": "or", "out": "to"}, {"x": x, "inner": x, "s": s, "a": a}
    outer, inner = "ti", "tr"
    for _ in range(changes):
        match rng.randrange(5):
            case 0:
                name = rng.choice(list(labels))
                labels[name] = labels[name][::-1]
            case 1:
                kept[rng.choice(("inner", "x", "a"))] = other
            case 2:
                kept["s"] = rng.choice((other, value("full", 2, shape=())))
            case 3:
                labels["a" if rng.random() < 0.5 else "b"] = "".join(rng.sample("oir", 2))
            case 4:
                inner = inner[::-1]
    added = pointwise("mul", s, product((kept["a"], b), (labels["a"], labels["b"]), "oi"))
    total = product((x, value("low_rank", w, added, shape=(N, N))), (outer, labels["w"]), "to")
    first = product((kept["x"], w), (labels["x"], labels["w"]), "to")
    second = product((product((kept["inner"], a), ("ti", "ri"), inner), b), ("tr", "or"), labels["out"])
    return total, (first, pointwise("mul", kept["s"], second)), (x, w, a, b, s, other)


@pytest.mark.parametrize("changes", [0, 1, 2])
def test_is_the_sum(changes):
    accepted = 0
    for seed in range(300):
        rng, held = random.Random(seed), {}
        torch.manual_seed(seed)
        total, parts, tensors = drawn(rng, changes)
        ends = rng.sample(tensors, rng.randint(0, len(tensors)))
        if adds_up(total, parts, ends):
            accepted += 1
            torch.testing.assert_close(number(total, held), sum(number(part, held) for part in parts))
    assert accepted >= (200 if changes == 0 else 10)


def test_an_index_that_no_factor_has_is_summed_over():
    """``sum over e of (W_e + A B)`` has A B as often as there are e."""
    x, w, a, b = (value("input", i, shape=(N,) * rank) for i, rank in enumerate((2, 3, 2, 2)))
    total = product((x, value("low_rank", w, product((a, b), ("ir", "ro"), "eio"), shape=w.shape)), ("ti", "eio"), "to")
    parts = product((x, w), ("ti", "eio"), "to"), product((product((x, a), ("ti", "ir"), "tr"), b), ("tr", "ro"), "to")
    assert not adds_up(total, parts, ())


def part(x, dim, start, step):
    return value("slice", x, dim, start, step, shape=(*x.shape[:dim], 2, *x.shape[dim + 1 :]))


def test_parts_of_products():
    """Of the rows or of the features, of tensors or of products, here and there of others."""
    accepted = []
    for seed in range(300):
        rng, held = random.Random(seed), {}
        torch.manual_seed(seed)
        x, w, other = (value("input", i, shape=(4, 4)) for i in range(3))
        draw = lambda rng=rng: (rng.randrange(2), *rng.choice(((0, 1), (1, 1), (0, 2), (2, 1))))  # noqa: E731
        (axis, *places), also = draw(), draw()
        whole = part(product((x, w), ("ti", "oi"), "to"), axis, *places)
        cut = [part(x, *also), w] if also[0] == 0 and rng.random() < 0.5 else [x, part(rng.choice((w, w, other)), *also)]
        of_parts = product(cut, ("ti", "oi"), "to")
        if of_parts.shape == whole.shape and adds_up(of_parts, (whole,), ()):
            accepted.append(axis)
            torch.testing.assert_close(number(of_parts, held), number(whole, held))
    assert len(accepted) >= 10


def test_pieces_of_products():
    accepted = 0
    for seed in range(200):
        rng, held = random.Random(seed), {}
        torch.manual_seed(seed)
        x, y, other = (value("input", i, shape=(4, 4)) for i in range(3))
        ws = [value("input", i, shape=(2, 4)) for i in (3, 4)]
        pieces = [product((rng.choice((x, x, x, x, y)), w), ("ti", "oi"), "to") for w in rng.sample(ws, 2)]
        whole = product((x, value("cat", tuple(ws), 0, shape=(4, 4))), ("ti", "oi"), "to")
        joined = value("cat", tuple(pieces), 1, shape=(4, 4))
        total, parts = (whole, (joined,)) if rng.random() < 0.5 else (pointwise("add", whole, other), (joined, other))
        if adds_up(total, parts, ()):
            accepted += 1
            torch.testing.assert_close(number(total, held), sum(number(part, held) for part in parts))
    assert accepted >= 10


def test_parts_along_what_is_summed_over():
    """``sum over i, j of x_i y_j W_i`` is not that of ``W_j``, for parts and pieces of W as for others."""
    x, y = (value("input", i, shape=(1, 2)) for i in range(2))
    w = value("input", 2, shape=(1, 4))
    for joined in (part(w, 1, 1, 1), value("cat", (x, y), 1, shape=(1, 4))):
        n = joined.shape[1]
        x, y = (value("input", i, shape=(1, n)) for i in range(2))
        total = product((x, y, joined), ("ai", "bj", "ci"), "abc")
        assert adds_up(total, (product((x, y, joined), ("ai", "bj", "ci"), "abc"),), ())
        assert not adds_up(total, (product((y, x, joined), ("bj", "ai", "cj"), "abc"),), ())


def test_pieces_are_no_sum():
    """``cat(a, b) c`` is not ``a c + b c``."""
    a, b, c = (value("input", i, shape=shape) for i, shape in enumerate(((N, 1), (N, 1), (1, 2))))
    joined = value("cat", (a, b), 1, shape=(N, 2))
    assert not adds_up(pointwise("mul", joined, c), (pointwise("mul", a, c), pointwise("mul", b, c)), ())
