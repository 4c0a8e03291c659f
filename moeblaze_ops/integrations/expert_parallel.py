"""The expert parallelism "moeblaze" of transformers: experts stay on their ranks, tokens and routing indices go to them.

    from transformers.distributed import DistributedConfig

    sharded = DistributedConfig(ep_size=8, fsdp_size=8, ep_implementation="moeblaze")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=sharded)

No routed copy of a token is made and no host waits for a device. Experts that the ops cannot express go transformers' own way,
"all_to_all", with a warning that says why.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AllReduceEP, AllToAllEP, EPImplementationInterface

from moeblaze_ops.arguments import weight_storage as storage
from moeblaze_ops.integrations.transformers import NAME, Operands, as_operands, experts_forward, operands_of, warn
from moeblaze_ops.kernels.formulas.named import is_gated
from moeblaze_ops.ops.sharded.exchange import choose_exchange, moe_over_ranks, refuse_to_move_tokens
from moeblaze_ops.ops.sharded.hosts import prepare


class MoeblazeEP(AllToAllEP):
    """Experts of a module over the ranks of ``ep_mesh``.

    Where these share one batch (``ep_size == tp_size``), each computes its experts of all tokens, and an all-reduce adds them up;
    otherwise tokens travel as ``config.exchange`` and ``config.transport`` say. The ranks of ``tp_mesh``, which hold the same
    tokens, take a slice of them each.
    """

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts, self.num_experts = experts, experts.num_experts * ep_mesh.size()
        self.group = ep_mesh.get_group().group_name
        self.of_one_batch = AllReduceEP(experts, ep_mesh, tp_mesh) if self.shares_batch else None
        if self.of_one_batch is not None:
            self.of_one_batch.experts_forward = functools.partial(experts_forward, experts)
        else:
            prepare(self.group)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sums of the experts of all ranks.

        Args:
            hidden_states: tokens of this rank. Shape [T, D].
            top_k_index: expert ids over all ranks. Shape [T, K]; ids below 0 or from E on are unused slots.
            top_k_weights: routing weights. Shape [T, K].

        Returns:
            Shape and dtype of ``hidden_states``. Gradients of the experts' weights are sums over the tokens of all ranks.

        Warns:
            UserWarning: the ops cannot express the module's activation, gate or flags; it ran as "all_to_all".
        """
        refuse_to_move_tokens(f"ep_implementation={NAME!r}")
        operands = operands_of(self.experts)
        if isinstance(operands, str):
            warn(f"{type(self.experts).__name__} runs as ep_implementation='all_to_all', not as {NAME!r}: {operands}")
            return super().__call__(hidden_states, top_k_index, top_k_weights)
        if self.of_one_batch is not None:
            return self.of_one_batch(hidden_states, top_k_index, top_k_weights)
        if self.tp_mesh.size() == 1:
            return self._over_ranks(operands, hidden_states, top_k_index, top_k_weights)
        own = (self._slice(each) for each in (hidden_states, top_k_index, top_k_weights))
        out = self._over_ranks(operands, *own).contiguous()
        shape, stride = hidden_states.shape, (hidden_states.shape[1], 1)
        return DTensor.from_local(out, self.tp_mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()

    def _slice(self, of_all: Tensor) -> Tensor:
        """The part of this rank of what the ranks of ``tp_mesh`` share; backward gathers the gradients of the others."""
        shared = DTensor.from_local(of_all, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(placements=[Shard(0)]).to_local()

    def _over_ranks(self, operands: Operands, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        exchange = _exchange(self.group, top_k_index.shape[1], hidden_states.is_cuda)
        x, weights = as_operands(operands, hidden_states, top_k_weights)
        form = {"gated": is_gated(operands.activation), "interleaved": operands.interleaved}
        w_up = storage.packed_up(operands.w_up, transposed=operands.transposed, **form)
        b_up = [] if operands.b_up is None else [storage.packed_up(operands.b_up, **form)]
        b_down = [] if operands.b_down is None else [operands.b_down]
        w_down = storage.down(operands.w_down, transposed=operands.transposed)
        ids = torch.where(top_k_index < self.num_experts, top_k_index, -1)
        out = moe_over_ranks(x, weights, ids, [w_up], b_up, [w_down], b_down, operands.activation, *exchange)
        return out.to(hidden_states.dtype)


@torch.compiler.assume_constant_result
def _exchange(group: str, K: int, on_gpu: bool) -> tuple:
    return tuple(choose_exchange(group, K, on_gpu))


EPImplementationInterface.register(NAME, MoeblazeEP)
torch.compiler.allow_in_graph(moe_over_ranks)
