"""Which nodes of a Dynamo graph do more than give a value."""

import torch
from torch import fx

from moeblaze_ops.lowering.graph.arguments import argument_of
from moeblaze_ops.lowering.graph.functional_view import written_nodes
from moeblaze_ops.lowering.graph.operators import operator_name, overloads_of

_COMPOSED = frozenset((
    "dropout1d", "dropout2d", "dropout3d", "fractional_max_pool2d", "fractional_max_pool3d", "gumbel_softmax", "pca_lowrank",
    "svd_lowrank",
))  # fmt: skip
"""What draws random numbers and is no operator that says so: functions of others that do."""
ASSERTS = frozenset((
    "_assert_scalar", "_assert_async", "sym_constrain_range_for_size", "sym_constrain_range", "_check", "_check_is_size",
))  # fmt: skip
"""What asserts something about sizes that only the data tell."""
_CHANGES_TENSORS = frozenset(("batch_norm", "instance_norm", "_set_tensor_requires_grad"))


def has_effect(node: fx.Node) -> bool:
    """True if a node may write to a tensor, draw random numbers, or run a graph or a function that may."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    return bool(written_nodes(node)) or "out" in node.kwargs or acts_beside_tensors(node)


def acts_beside_tensors(node: fx.Node) -> bool:
    """True if more may be seen of an operator than the tensors that it gives and writes to.

        torch.rand_like(h), h.bernoulli_()      the next number of torch's generator is another
        mylib.log(h), checkpoint(f, h)          of what is not torch's, and of graphs, nothing is known
    """
    if node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    name, overloads = operator_name(node), overloads_of(node.target)
    own = overloads or overloads_of(getattr(torch.ops.aten, name, None))
    draws = name in _COMPOSED or any(torch.Tag.nondeterministic_seeded in overload.tags for overload in own)
    is_known = name or overloads
    return not is_known or name in _CHANGES_TENSORS or (draws and argument_of(node, "training") is not False)
