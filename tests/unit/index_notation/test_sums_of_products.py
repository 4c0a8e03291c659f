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
