"""Routers, experts and layers of the zoo; a layer takes ``x`` ([T, D] or [B, S, D]) and routes by itself."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, FF, E, K = 16, 24, 4, 2


class Router(nn.Module):
    """Softmax, top-k, renormalised."""

    def __init__(self, E: int = E, K: int = K, normalise: bool = True):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.K, self.normalise = K, normalise

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = F.softmax(self.gate(x), dim=-1, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
        weights, ids = torch.topk(p, self.K, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), ids


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.2)


class GluMLP(nn.Module):
    """The Llama expert: three bias-free linears."""

    def __init__(self, act=F.silu):
        super().__init__()
        self.w1, self.w3 = nn.Linear(D, FF, bias=False), nn.Linear(D, FF, bias=False)
        self.w2 = nn.Linear(FF, D, bias=False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class PlainMLP(nn.Module):
    """The classic expert: two linears with biases."""

    def __init__(self, act=F.gelu):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, FF), nn.Linear(FF, D)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class BareMLP(nn.Module):
    """Two weights and one function: what is traced soonest, for loops to which it is one what experts are."""

    def __init__(self):
        super().__init__()
        self.up, self.down = _parameter(FF, D), _parameter(D, FF)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, self.up)), self.down)


class ModuleListMoE(nn.Module):
    """Separate experts, bare ones unless another is named, and one function that runs and combines them."""

    def __init__(self, combine, expert=BareMLP, E: int = E, K: int = K, **router):
        super().__init__()
        self.router = Router(E, K, **router)
        self.experts = nn.ModuleList(expert() for _ in range(E))
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        return self.combine(self, x, weights, ids)


class StackedMoE(nn.Module):
    """Stacked parameters in one of the usual storages."""

    def __init__(self, experts, storage: str = "split", E: int = E, K: int = K, bias: bool = False, **router):
        super().__init__()
        self.router = Router(E, K, **router)
        self.E, self.K, self.experts = E, K, experts
        if storage == "split":  # x @ w1[e]
            self.w1, self.w3, self.w2 = _parameter(E, D, FF), _parameter(E, D, FF), _parameter(E, FF, D)
        elif storage == "linear":  # F.linear(x, w1[e])
            self.w1, self.w3, self.w2 = _parameter(E, FF, D), _parameter(E, FF, D), _parameter(E, D, FF)
        elif storage == "packed":  # x @ gate_up[e], [gate | up]
            self.gate_up, self.down = _parameter(E, D, 2 * FF), _parameter(E, FF, D)
        elif storage == "packed_linear":
            self.gate_up, self.down = _parameter(E, 2 * FF, D), _parameter(E, D, FF)
        elif storage == "rows":  # DBRX: experts concatenated along rows
            self.w1, self.v1, self.w2 = _parameter(E * FF, D), _parameter(E * FF, D), _parameter(E * FF, D)
        if bias:
            self.gate_up_bias, self.down_bias = _parameter(E, 2 * FF), _parameter(E, D)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        return self.experts(self, x, weights, ids)


def flat(x, weights, ids):
    """The three with one axis of tokens."""
    return x.reshape(-1, x.shape[-1]), weights.reshape(-1, weights.shape[-1]), ids.reshape(-1, ids.shape[-1])
