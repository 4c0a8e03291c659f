"""Weights that a graph computes of its model's state: by a dequantisation, a parametrization, a norm.

Such a weight is a matrix like one that is passed in: what it is made of is not looked into.

    w = self.codes.to(x.dtype) * self.scales          but not  w = self.stored.to(x.dtype).mT     a view and a cast
    w = torch._weight_norm(self.v, self.g, 0)         but not  w = 2.0 * self.stored              a multiple
"""

from moeblaze_ops.lowering.graph.functional_view import Value

VIEWS = ("reshape", "permute", "slice", "select", "cast", "expand", "stack", "cat", "lane")
"""Kinds of values that hold elements of others, in their places."""
_SHAPES = ("reshape", "cast")
_OTHERS = ("input", "low_rank", "full", "spread", "tile")


def is_computed_weight(value: Value) -> bool:
    """Whether a value has at least two axes, and is the result of an operator that is no view, on the model's state alone.

    What such a result is cast to, or seen as in another shape, is a weight of its own.
    """
    while value.op in _SHAPES or (value.op == "permute" and value.args[0].op in _SHAPES):
        value = value.args[0]
    if not value.of_state or not value.dtype.is_floating_point or value.op in (*VIEWS, *_OTHERS):
        return False
    return sum(size != 1 for size in value.shape) > 1 and not _is_multiple(value)


def _is_multiple(value: Value) -> bool:
    """Whether a value is a number times another value."""
    return value.op == "pointwise" and value.args[0] == "mul" and sum(x.op != "full" for x in value.args[1]) == 1
