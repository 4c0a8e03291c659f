"""Inductor lowerings of the ops: each becomes its launcher's buffers and Triton kernels, inlined in the generated code.

A lowering traces the launcher on the fake tensors of the call (``torch.empty`` and kernel launches) and lowers that
graph in place of the op. So eager calls, compiled graphs and the interpreter run one kernel source, Inductor plans
the memory of every buffer in between, and pointwise neighbours fuse as they do around its own kernels. What a launcher
calls that is no Triton kernel stays a call: a custom op that writes into buffers which the launcher allocated.

Off CUDA, and where an argument asks for a check on the host, the generated code calls the op.
"""

from collections.abc import Callable

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from moeblaze_ops import config
from moeblaze_ops.library import LAUNCHERS
from moeblaze_ops.lowering import inductor_api


def register_lowerings() -> None:
    """Register a lowering for every op of the namespace."""
    for op, launcher in LAUNCHERS.items():
        register_traced_lowering(op, launcher, _checks_on_host if op is torch.ops.moeblaze.dispatch.default else _never)


def register_traced_lowering(op: torch._ops.OpOverload, launcher: Callable[[], Callable], must_call: Callable[[], bool]) -> None:
    """Lower ``op`` on CUDA to what ``launcher()`` does with the same arguments, unless ``must_call()``.

    Args:
        op: an op tagged ``needs_exact_strides``, that returns tensors or lists of tensors.
        launcher: returns what takes the arguments of ``op`` in its order and returns its outputs, on fake tensors too.
        must_call: whether the generated code has to call the op.
    """
    call_op = inductor_api.fallback(op)

    def lower(*args, **kwargs):
        node = inductor_api.current_node()
        leaves, structure = tree_flatten(_in_schema_order(op, node.args, node.kwargs))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
        fakes = [leaves[i].meta["val"] for i in positions]
        if must_call() or not any(isinstance(fake, torch.Tensor) and fake.device.type == "cuda" for fake in fakes):
            return call_op(*args, **kwargs)

        def launch(*values):
            filled = list(leaves)
            for i, value in zip(positions, values, strict=True):
                filled[i] = value
            return launcher()(*tree_unflatten(filled, structure))

        values, _ = tree_flatten(_in_schema_order(op, args, kwargs))
        return inductor_api.inline(inductor_api.trace(launch, fakes), [values[i] for i in positions], op.name())

    lower.__name__ = f"lower_{op.overloadpacket.__name__}"
    inductor_api.register_lowering(op, lower)


def _in_schema_order(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list:
    rest = op._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]


def _checks_on_host() -> bool:
    return config.check_expert_ids


def _never() -> bool:
    return False
