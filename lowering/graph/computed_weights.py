"""Weights that a graph computes of its model's state: by a dequantisation, a parametrization, a norm.

Such a weight is a matrix like one that is passed in: what it is made of is not looked into.

    w = self.codes.to(x.dtype) * self.scales          but not  w = self.stored.to(x.dtype).mT     a view and a cast
    w = torch._weight_norm(self.v, self.g, 0)         but not  w = 2.0 * self.stored              a multiple
    w = self.stored.bfloat16().float()                but not  w = self.stored.bfloat16()         a cast that the operators do
"""

from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.graph.stored_numbers import rounds_between

VIEWS = ("reshape", "permute", "slice", "select", "cast", "expand", "stack", "cat", "lane")
"""Kinds of values that hold elements of others, in their places."""
_SHAPES = ("reshape", "cast")
_OTHERS = ("input", "low_rank", "full")


def is_computed_weight(value: Value) -> bool:
    """True if a value has at least two axes, and is the result of an operator that is no view, on the model's state alone.

    What such a result is cast to, or seen as in another shape, is a weight of its own.
    """
    while value.op in _SHAPES or (value.op == "permute" and value.args[0].op in _SHAPES):
        if value.op == "cast" and _is_rounded(value):
            return _is_of_state(value)
        value = value.args[0]
    return _is_of_state(value) and value.op not in (*VIEWS, *_OTHERS) and not _is_multiple(value)


def _is_of_state(value: Value) -> bool:
    return value.of_state and value.dtype.is_floating_point and sum(size != 1 for size in value.shape) > 1


def _is_rounded(value: Value) -> bool:
    """True if a value is cast to a dtype after it was rounded to another, which the operators do not."""
    dtypes = [value.dtype]
    while value.op in VIEWS and value.op not in ("stack", "cat"):
        value = value.args[0]
        if value.dtype != dtypes[0]:
            dtypes.insert(0, value.dtype)
    return rounds_between(dtypes)


def _is_multiple(value: Value) -> bool:
    """True if a value is a number times another value."""
    return value.op == "pointwise" and value.args[0] == "mul" and sum(x.op != "full" for x in value.args[1]) == 1
