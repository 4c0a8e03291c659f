"""An override of torchtitan's routed experts: tokens are read through row numbers, where torchtitan sorts and copies them.

    torchrun -m torchtitan.train ... --override.imports moeblaze_ops.integrations.torchtitan.routed_experts

It needs torchtitan 0.3. Parameters keep their names, shapes and placements, so checkpoints and FSDP are those of torchtitan.
Products are in bf16, as there. It works with and without ``--compile.enable``.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from moeblaze_ops.functional import moe

try:
    from torchtitan.config.override import derive, override
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
except ImportError as error:
    raise ImportError("moeblaze_ops.integrations.torchtitan needs torchtitan 0.3: pip install torchtitan") from error


class FusedRoutedExperts(RoutedExperts):
    """Dispatch, experts and combine of torchtitan as one call of ``moe``. The dispatcher is built, and has nothing to do."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        experts = self.inner_experts
        w1_EFD, w2_EDF, w3_EFD = (
            (weight.to_local() if isinstance(weight, DTensor) else weight).bfloat16()
            for weight in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD)
        )
        out_BLD = moe(x_BLD.bfloat16(), topk_scores_BLK, topk_expert_ids_BLK, w3_EFD, w2_EDF, w_gate=w1_EFD)
        return out_BLD.type_as(x_BLD)

    def parallelize(self, parallel_dims: Any) -> None:
        if parallel_dims.ep_enabled:
            raise NotImplementedError("routed_experts: expert_parallel_degree must be 1; above it leave the override out")
        super().parallelize(parallel_dims)


@override(target=RoutedExperts.Config, exact=True, description="moeblaze: dispatch, experts and combine without copies of tokens")
def routed_experts(config: RoutedExperts.Config) -> FusedRoutedExperts.Config:
    if type(config.inner_experts) is not GroupedExperts.Config:
        kind = type(config.inner_experts).__qualname__
        raise TypeError(f"routed_experts: inner_experts must be GroupedExperts.Config, got {kind}")
    return derive(config, FusedRoutedExperts.Config)
