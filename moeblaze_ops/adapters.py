"""``LoRAFactors``: the parameters of one low-rank adapter on a layer's experts."""

import math

import torch
from torch import Tensor, nn


class LoRAFactors(nn.Module):
    """A and B of both projections: the weights become ``W + scale * B @ A``.

    Args:
        w_up, w_down: the weights [E, outputs, inputs] that the adapter is for; device and dtype are theirs.
        rank: r of A [E, r, inputs] and B [E, outputs, r].
        scale: what their product is multiplied by, such as alpha / r.
    """

    def __init__(self, w_up: Tensor, w_down: Tensor, rank: int, scale: float) -> None:
        super().__init__()
        self.rank, self.scale = rank, scale
        self.up_a, self.up_b = _factors(w_up, rank)
        self.down_a, self.down_b = _factors(w_down, rank)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise A as the weight of an ``nn.Linear``, and B as zeros: the adapter changes nothing then."""
        for a, b in ((self.up_a, self.up_b), (self.down_a, self.down_b)):
            bound = 1 / math.sqrt(a.shape[2])
            a.uniform_(-bound, bound)
            b.zero_()

    @property
    def up(self) -> tuple[Tensor, Tensor, float]:
        return self.up_a, self.up_b, self.scale

    @property
    def down(self) -> tuple[Tensor, Tensor, float]:
        return self.down_a, self.down_b, self.scale

    @torch.no_grad()
    def add_to(self, w_up: Tensor, w_down: Tensor) -> None:
        """Add the products to the weights, in place."""
        w_up.baddbmm_(self.up_b, self.up_a, alpha=self.scale)
        w_down.baddbmm_(self.down_b, self.down_a, alpha=self.scale)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale}"


def _factors(weight: Tensor, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    E, outputs, inputs = weight.shape
    return nn.Parameter(weight.new_empty(E, rank, inputs)), nn.Parameter(weight.new_empty(E, outputs, rank))
