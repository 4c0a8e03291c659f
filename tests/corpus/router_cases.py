"""Named router options and logits for the tests of ``route``."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Router:
    """The options of ``route``; ``biased`` asks for a bias."""

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    biased: bool = False

    def arguments(self, logits_TE: Tensor, bias_E: Tensor | None = None) -> tuple:
        """Everything that the op takes."""
        options = (self.top_k, self.scoring, self.renormalize, self.scale, self.num_groups, self.top_groups)
        return (logits_TE, bias_E, *options)

    def bias(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor | None:
        """Multiples of 1/8, so that a biased score is seldom within a rounding of another."""
        if not self.biased:
            return None
        return (torch.randint(-8, 8, (self.num_experts,)) / 8).to(device=device, dtype=dtype)


ROUTERS = {
    "softmax": Router(16, 4),
    "renormalized": Router(16, 4, renormalize=True),
    "softmax_topk": Router(16, 4, "softmax_topk"),
    "sigmoid": Router(16, 4, "sigmoid"),
    "softmax_biased": Router(16, 4, renormalize=True, biased=True),
    "softmax_topk_biased": Router(16, 4, "softmax_topk", biased=True),
    "softmax_groups": Router(20, 3, scale=16.0, num_groups=4, top_groups=2),
    "sigmoid_groups": Router(32, 4, "sigmoid", True, 2.5, num_groups=8, top_groups=3, biased=True),
    "sigmoid_odd_groups": Router(21, 5, "sigmoid", True, 2.5, num_groups=3, top_groups=2),
    "odd_experts": Router(7, 3, "sigmoid", True),
    "one_choice": Router(7, 1),
    "all_experts": Router(6, 6),
    "one_expert": Router(1, 1, "softmax", True),
}

LOGITS = ("distinct", "ties", "all_equal", "signed_zeros", "special_values", "one_token", "zero_tokens")


def make_logits(case: str, num_experts: int, dtype: torch.dtype = torch.float32, num_tokens: int = 19) -> Tensor:
    """Logits [T, E] of a named case. Those of ``distinct`` differ by more than a gradient check perturbs them."""
    T = {"one_token": 1, "zero_tokens": 0}.get(case, num_tokens)
    if case == "ties":
        logits = torch.randint(-4, 4, (T, num_experts)) / 4
    elif case == "all_equal":
        logits = torch.full((T, num_experts), 0.5)
    elif case == "signed_zeros":
        logits = torch.where(torch.rand(T, num_experts) < 0.5, 0.0, -0.0)
    elif case == "special_values":
        values = torch.tensor([math.nan, math.inf, -math.inf, 100.0, -100.0, 0.0, 1.0])
        logits = values[torch.randint(0, len(values), (T, num_experts))]
        logits[: min(T, 2)] = torch.tensor([[math.nan], [-math.inf]])[: min(T, 2)]
    else:
        ranks = torch.stack([torch.randperm(num_experts) for _ in range(T)]) if T else torch.empty(0, num_experts)
        logits = (ranks + 0.4 * torch.rand(T, num_experts)) * 4 / max(4, num_experts) - 2
    return logits.to(dtype)
