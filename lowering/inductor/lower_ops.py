"""Inductor lowerings of the ops: each becomes its launcher's buffers and Triton kernels, inlined in the generated code.

A lowering traces the launcher on the fake tensors of the call (``torch.empty`` and kernel launches) and lowers that
graph in place of the op. So eager calls, compiled graphs and the interpreter run one kernel source, Inductor plans
the memory of every buffer in between, and pointwise neighbours fuse as they do around its own kernels. What a launcher
calls that is no Triton kernel stays a call: a custom op that writes into buffers which the launcher allocated.

Off CUDA, where an argument asks for a check on the host, and where experts stored apart need no copy because they lie
one after another in memory, the generated code calls the op. On a CPU it calls the op's implementation, without what comes
before it in eager code: arguments were checked when the graph was traced. Activations are Inductor's there.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from moeblaze_ops import config
from moeblaze_ops.arguments.separate_experts import reads_in_place
from moeblaze_ops.lowering.inductor import cpu_activations
from moeblaze_ops.lowering.inductor.accumulated_gradients import accumulate_in_place
from moeblaze_ops.lowering.inductor.pinned_routing import ROUTED, pin_before_partition
from moeblaze_ops.lowering.inductor.repeated_weights import repeat_weights
from moeblaze_ops.lowering.inductor.router_gradient import add_router_gradient
from moeblaze_ops.lowering.inductor.router_losses import count_by_dispatch, count_one_hot, join_router_gradients
from moeblaze_ops.lowering.inductor.router_products import replace_by_invariant_product, replace_router_product
from moeblaze_ops.lowering.inductor.whole_columns import join_columns
from moeblaze_ops.lowering.inductor.wide_products import narrow_router_product
from moeblaze_ops.lowering.torch_internals import inductor
from moeblaze_ops.ops.register import LAUNCHERS, ON_CPU, OVERWRITING, PACKAGED
from moeblaze_ops.ops.sharded.all_to_all import row_numbers
from moeblaze_ops.ops.sharded.apart import apart
from moeblaze_ops.ops.sharded.by_rank import expert_mlp_by_rank, expert_up_backward_by_rank
from moeblaze_ops.ops.sharded.collectives import gather_rows, meet, met, most_tokens, sum_parts
from moeblaze_ops.ops.sharded.experts_over_ranks import experts_over_ranks_backward, gradients_over_ranks
from moeblaze_ops.ops.weight_grad import expert_weight_grad, expert_weight_grad_or_add


def register_lowerings() -> None:
    """Register a lowering for every op that has a launcher or lists, what joins an op after autograd, and what is kept for it."""
    inductor.launch_nothing_for_no_rows()
    pin_before_partition()
    by_rank = (expert_mlp_by_rank, expert_up_backward_by_rank)
    talk = (most_tokens, row_numbers, meet, met, gather_rows, sum_parts, *by_rank, experts_over_ranks_backward)
    inductor.keep_order_of_talk(talk)
    inductor.register_lowering(met, _lower_met)
    inductor.register_lowering(apart, lambda x, number: x)
    inductor.register_visit(torch.ops.aten.add.Tensor, add_router_gradient, joint=False)
    inductor.register_visit(torch.ops.aten.mm.default, replace_router_product, joint=False)
    inductor.register_visit(torch.ops.aten.mm.default, narrow_router_product)
    for product in (torch.ops.aten.mm.default, torch.ops.aten.mm.dtype, torch.ops.aten.addmm.default):
        inductor.register_visit(product, replace_by_invariant_product, joint=False)
    inductor.register_visit(torch.ops.aten.cat.default, join_columns)
    inductor.register_visit(expert_weight_grad, accumulate_in_place, joint=False)
    inductor.register_lowering(expert_weight_grad_or_add, inductor.fallback(expert_weight_grad_or_add, gives_none=True))
    inductor.register_visit(torch.ops.aten.add.Tensor, join_router_gradients)
    inductor.register_visit(torch.ops.moeblaze.expert_counts.default, count_by_dispatch)
    for reduction in (torch.ops.aten.mean.dim, torch.ops.aten.sum.dim_IntList):
        inductor.register_visit(reduction, count_one_hot)
    for op in ROUTED:
        inductor.register_visit(op, repeat_weights)
    for op, launcher in LAUNCHERS.items():
        register_traced_lowering(op, launcher, _must_call)
    register_traced_lowering(experts_over_ranks_backward, lambda: gradients_over_ranks, _leaves_room, in_order=True)
    for op in cpu_activations.IMPLEMENTATIONS:
        inductor.register_lowering(ON_CPU[op], inductor.fallback(ON_CPU[op]))
    for op in PACKAGED.keys() - LAUNCHERS.keys():
        inductor.register_lowering(op, _call_of(op))
    # What add_router_gradient adds in place; Inductor itself refuses ops with a decomposition where $CI is set.
    in_place = torch.ops.aten.addmm_.default
    inductor.register_lowering(in_place, inductor.fallback(in_place))


def _lower_met(x: Any, shard: Any, group: str, layer: str, question: Any = None) -> Any:
    """The hosts meet, and x is read as it is. A CUDA graph has no hosts in it."""
    if not inductor.makes_cuda_graphs():
        inductor.call_for_its_effect(meet, shard, group, layer, question)
    return x


def register_traced_lowering(
    op: torch._ops.OpOverload,
    launcher: Callable[[], Callable],
    must_call: Callable[[torch._ops.OpOverload, list], bool],
    in_order: bool = False,
) -> None:
    """Lower ``op`` on CUDA to what ``launcher()`` does with the same arguments, unless ``must_call``.

    Args:
        op: an op tagged ``needs_exact_strides``, that returns tensors or lists of tensors.
        launcher: returns what takes the arguments of ``op`` in its order and returns its outputs, on fake tensors too.
        must_call: from the op and its arguments, fake: whether the generated code has to call the op.
        in_order: whether the calls and kernels that ``launcher()`` starts stay in its order.
    """
    call_op, call_on_cpu = _call_of(op), _call_of(op, ON_CPU.get(op, op))

    def lower(*args, **kwargs):
        node = inductor.current_node()
        leaves, structure = tree_flatten(_in_schema_order(op, node.args, node.kwargs))
        positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
        fakes = [leaves[i].meta["val"] for i in positions]

        def arguments(values: Sequence) -> list:
            filled = list(leaves)
            for i, value in zip(positions, values, strict=True):
                filled[i] = value
            return tree_unflatten(filled, structure)

        devices = {fake.device.type for fake in fakes if isinstance(fake, torch.Tensor)}
        if devices == {"cpu"}:
            as_called = config.batch_invariant or inductor.is_packaging()
            if op not in cpu_activations.IMPLEMENTATIONS or as_called:
                return call_on_cpu(*args, **kwargs)
            chosen = partial(cpu_activations.IMPLEMENTATIONS.get, op)
        elif "cuda" not in devices or must_call(op, arguments(fakes)):
            return call_op(*args, **kwargs)
        else:
            chosen = _overwriting_launcher(op, node, args) or launcher

        def launch(*values):
            return chosen()(*arguments(values))

        values, _ = tree_flatten(_in_schema_order(op, args, kwargs))
        return inductor.inline(inductor.trace(launch, fakes), [values[i] for i in positions], op.name(), in_order)

    lower.__name__ = f"lower_{op.overloadpacket.__name__}"
    inductor.register_lowering(op, lower)


def _call_of(op: torch._ops.OpOverload, called: torch._ops.OpOverload | None = None) -> Callable:
    """The lowering that calls ``op``, or ``called`` in its place, from the generated code; AOTInductor's calls ``op`` itself."""
    call_op, call_packaged = inductor.fallback(called or op), inductor.fallback(PACKAGED.get(op, op))

    def call(*args, **kwargs):
        return (call_packaged if inductor.is_packaging() else call_op)(*args, **kwargs)

    return call


def _in_schema_order(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list:
    rest = op._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]


def _overwriting_launcher(op: torch._ops.OpOverload, node: fx.Node, args: tuple) -> Callable | None:
    """The launcher that writes a result over an argument, where the memory of that argument is the graph's."""
    position, launcher = OVERWRITING.get(op, (len(args), None))
    given_away = position < len(args) and inductor.is_given_away(node.args[position], args[position])
    return launcher if given_away else None


def _leaves_room(op: torch._ops.OpOverload, args: list[Any]) -> bool:
    return config.collective_multiprocessors is not None


def _must_call(op: torch._ops.OpOverload, args: list[Any]) -> bool:
    checks_on_host = op is torch.ops.moeblaze.dispatch.default and config.check_expert_ids
    return checks_on_host or reads_in_place(op, args)
