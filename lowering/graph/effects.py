"""Which nodes of a Dynamo graph do more than give a value."""


import torch
from torch import fx

from moeblaze_ops.lowering.graph.functional_view import written_nodes
from moeblaze_ops.lowering.graph.operators import operator_name, overloads_of

_RANDOM = frozenset((
    "dropout", "alpha_dropout", "feature_alpha_dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d",
    "bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
    "randperm", "rrelu", "gumbel_softmax", "native_dropout", "scaled_dot_product_attention", "fractional_max_pool2d",
))  # fmt: skip
ASSERTS = frozenset((
    "_assert_scalar", "_assert_async", "sym_constrain_range_for_size", "sym_constrain_range", "_check", "_check_is_size",
))  # fmt: skip
"""What asserts something about sizes that only the data tell."""
_UPDATES_STATISTICS = frozenset(("batch_norm", "instance_norm"))


def has_effect(node: fx.Node) -> bool:
    """Whether a node may write to a tensor, draw random numbers, or run a graph or a function that may."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if written_nodes(node) or "out" in node.kwargs:
        return True
    if overloads := overloads_of(node):
        return any(torch.Tag.nondeterministic_seeded in op.tags for op in overloads)
    name = operator_name(node)
    return not name or name in _RANDOM or name in _UPDATES_STATISTICS
