"""Which nodes of a Dynamo graph do more than give a value."""


import torch
from torch import fx

from moeblaze_ops.lowering.graph.arguments import argument_of
from moeblaze_ops.lowering.graph.functional_view import written_nodes
from moeblaze_ops.lowering.graph.operators import operator_name, overloads_of

_RANDOM = frozenset((
    "dropout", "alpha_dropout", "feature_alpha_dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d",
    "bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
    "randperm", "rrelu", "gumbel_softmax", "native_dropout", "scaled_dot_product_attention", "fractional_max_pool2d",
    "cauchy", "exponential", "geometric", "log_normal", "random", "uniform",
))  # fmt: skip
ASSERTS = frozenset((
    "_assert_scalar", "_assert_async", "sym_constrain_range_for_size", "sym_constrain_range", "_check", "_check_is_size",
))  # fmt: skip
"""What asserts something about sizes that only the data tell."""
_CHANGES_TENSORS = frozenset(("batch_norm", "instance_norm", "_set_tensor_requires_grad"))


def has_effect(node: fx.Node) -> bool:
    """Whether a node may write to a tensor, draw random numbers, or run a graph or a function that may."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    return bool(written_nodes(node)) or "out" in node.kwargs or acts_beside_tensors(node)


def acts_beside_tensors(node: fx.Node) -> bool:
    """Whether more may be seen of an operator than the tensors that it gives and writes to.

        torch.rand_like(h), h.bernoulli_()      the next number of torch's generator is another
        mylib.log(h), checkpoint(f, h)          of what is not torch's, and of graphs, nothing is known
    """
    if node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if overloads := overloads_of(node):
        return any(torch.Tag.nondeterministic_seeded in op.tags for op in overloads)
    name = operator_name(node)
    draws = name.removesuffix("_") in _RANDOM and argument_of(node, "training") is not False
    return not name or draws or name in _CHANGES_TENSORS
