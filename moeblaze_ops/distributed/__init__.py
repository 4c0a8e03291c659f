"""Experts over the GPUs of one mesh axis.

``shard_experts`` stores each expert on one rank of the axis. A layer sees its weights whole, so every spelling of it gives the
numbers of one process. Where ``torch.compile`` proves a layer, the rewriter moves its tokens instead of its weights
(``ops.sharded``).
"""

from moeblaze_ops.distributed.find_experts import Left
from moeblaze_ops.distributed.fsdp import expert_placement
from moeblaze_ops.distributed.gradients import clip_grad_norm_
from moeblaze_ops.distributed.shard_experts import ShardedExperts, Taken, shard_experts

__all__ = ["Left", "ShardedExperts", "Taken", "clip_grad_norm_", "expert_placement", "shard_experts"]
