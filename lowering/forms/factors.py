"""Which matrices are weights with low-rank additions, so that sums with them are made one value.

Such a sum is the same whatever its parts are; made of others, it is no operand of a layer.
"""

from moeblaze_ops.lowering.graph.computed_weights import VIEWS, is_computed_weight
from moeblaze_ops.lowering.graph.functional_view import Value


def is_given(value: Value) -> bool:
    """A matrix that the caller passes in, one that is computed of the model's state, or one with a low-rank addition."""
    while value.op in (*VIEWS, "index") and not is_computed_weight(value):
        value = value.args[0][0] if value.op in ("stack", "cat") else value.args[0]
    return is_computed_weight(value) or (value.op in ("input", "low_rank") and value.dtype.is_floating_point)


def look_into(product: Value) -> None:
    """A low-rank addition is of the model's state as well, and is taken apart all the same."""
    pending = [product]
    while pending:
        value = pending.pop()
        if value.of_state and value.op in ("cast", "permute", "pointwise", "contract"):
            value.of_state = False
            if value.op != "contract":
                pending += value.args[1] if value.op == "pointwise" else value.args[:1]


def is_low_rank(value: Value) -> bool:
    """A product of two matrices that the caller passes in, over fewer ranks than either has rows; multiples and sums of such."""
    pending = [value]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.op in ("cast", "permute"):
            pending.append(value.args[0])
        elif value.op == "pointwise" and value.args[0] in ("add", "mul"):
            tensors = [x for x in value.args[1] if not is_scale(x)]
            if not tensors or (len(tensors) > 1 and value.args[0] == "mul"):
                return False
            pending += tensors
        elif not _is_of_few_ranks(value):
            return False
    return True


def _is_of_few_ranks(value: Value) -> bool:
    if value.op != "contract" or len(value.args[0]) != 2 or not all(map(_is_factor, value.args[0])):
        return False
    xs, labels, out = value.args
    sizes = {letter: size for x, label in zip(xs, labels, strict=True) for letter, size in zip(label, x.shape, strict=True)}
    ranks = [size for letter, size in sizes.items() if letter not in out]
    outer = [sizes[letter] for letter in out if not all(letter in label for label in labels)]
    known = all(isinstance(size, int) for size in (*ranks, *outer))
    return len(ranks) == 1 and len(outer) == 2 and known and ranks[0] < min(outer)


def _is_factor(value: Value) -> bool:
    """A matrix that the caller passes in, one that is computed of the model's state, or a multiple of one."""
    while not is_given(value) and (value.op == "cast" or (value.op == "pointwise" and value.args[0] == "mul")):
        if value.op == "cast":
            value = value.args[0]
            continue
        tensors = [x for x in value.args[1] if not is_scale(x)]
        if len(tensors) != 1:
            return False
        value = tensors[0]
    return is_given(value)


def is_scale(value: Value) -> bool:
    """A number, or numbers that are passed in, along one axis: one for each expert, or no scale after all."""
    return value.op == "full" or (sum(size != 1 for size in value.shape) < 2 and is_given(value))
