"""Experts of a drawn layer as a part of a larger parameter: of one layer among three, or of a flat tensor with other elements."""

import random
import re

from tests.corpus.fuzz.layer import Layer

# The sizes of the parameter, and the text of a part of it. ``first``, ``rest``: sizes of the part, E or E * H the first.
_PARTS = (
    ("3, {first}, {rest}", "[{i}]"),
    ("3 * ({first}), {rest}", "[{i} * {first} : ({i} + 1) * {first}]"),
    ("3 * ({first}), {rest}", ".view(3, {first}, {rest})[{i}]"),
    ("3 * ({first}), {rest}", "[{i}::3]"),
    ("{first}, 3, {rest}", "[:, {i}]"),
    ("40 + {first} * {product}", "[8 * {i} : 8 * {i} + {first} * {product}].view({first}, {rest})"),
)


def take_parts(layer: Layer, rng: random.Random) -> None:
    """Make some weights and biases of experts a part of a larger parameter."""
    for position, (name, shape) in enumerate(layer.parameters):
        first, *rest = shape.split(", ")
        if name in ("w_router", "b_router", "w_shared") or rng.random() < 0.3:
            continue
        sizes, part = rng.choice(_PARTS)
        names = {"first": first, "rest": ", ".join(rest), "product": " * ".join(rest), "i": rng.randrange(3)}
        layer.parameters[position] = name, sizes.format(**names)
        for lines in (layer.expert, layer.body):
            lines[:] = [re.sub(rf"self\.{name}\b", f"self.{name}{part.format(**names)}", line) for line in lines]
