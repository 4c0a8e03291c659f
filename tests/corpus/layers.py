"""Random expert layers for the tests: named routings, every weight storage, any dtype and device."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeblaze_ops.arguments import weight_storage as storage
from moeblaze_ops.kernels.formulas.named import is_gated
from tests.corpus import reference

E, K, D, F = 5, 2, 24, 12

ROUTINGS = (
    "one_token",
    "empty_expert",
    "all_to_one_expert",
    "ragged_tail",
    "unused_slots",
    "repeated_expert",
    "zero_tokens",
)
STORAGES = ("packed", "interleaved", "transposed", "transposed_interleaved", "split", "split_transposed")


def routing(name: str, num_experts: int = E, top_k: int = K, device: str = "cpu") -> Tensor:
    """Expert ids [T, K] of a named case; ids of a token are distinct unless the case says otherwise."""
    num_tokens = {"one_token": 1, "zero_tokens": 0, "ragged_tail": 67 * num_experts // top_k + 1}.get(name, 19)
    choices = range(num_experts - 1) if name == "empty_expert" else range(num_experts)
    distinct = [torch.randperm(len(choices))[:top_k] for _ in range(num_tokens)]
    experts_TK = torch.stack(distinct) if distinct else torch.empty(0, top_k, dtype=torch.int64)
    if name == "all_to_one_expert":
        experts_TK = torch.full((num_tokens, top_k), -1)
        experts_TK[:, 0] = num_experts - 2
    elif name == "unused_slots":
        experts_TK[torch.rand(experts_TK.shape) < 0.4] = -1
    elif name == "repeated_expert":
        experts_TK[:, 1] = experts_TK[:, 0]
    return experts_TK.to(device)


@dataclass
class Layer:
    """Leaf tensors as a user stores them, and the ops' logical views of them."""

    x_TD: Tensor
    weights_TK: Tensor
    experts_TK: Tensor
    stored: list[Tensor]
    w_up: list[Tensor]
    b_up: list[Tensor]
    w_down: list[Tensor]
    b_down: list[Tensor]
    activation: str
    routing: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.routing = torch.ops.moeblaze.dispatch(self.experts_TK, self.w_down[0].shape[0])

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x_TD, self.weights_TK, *self.stored]

    def run(self, weight_on: str = "output") -> Tensor:
        """The layer through the ops."""
        on_input, on_output = (self.weights_TK, None) if weight_on == "input" else (None, self.weights_TK)
        h, a = torch.ops.moeblaze.expert_up(self.x_TD, self.w_up, self.b_up, on_input, *self.routing, self.activation)
        a = a if a.shape[0] == h.shape[0] else None
        return torch.ops.moeblaze.expert_down(h, a, self.w_down, self.b_down, on_output, *self.routing, self.activation)

    def oracle(self, weight_on: str = "output") -> Tensor:
        """The layer through the oracle."""
        return reference.moe(
            self.x_TD, self.weights_TK, self.experts_TK, self.w_up, self.w_down, self.b_up, self.b_down,
            self.activation, weight_on,
        )  # fmt: skip

    def to(self, dtype: torch.dtype, device: str | None = None) -> "Layer":
        """The same numbers in another dtype or on another device, as new leaves with the same storage."""
        return _build(
            [t.detach() for t in (self.x_TD, self.weights_TK)],
            [t.detach() for t in self.stored],
            self.experts_TK,
            self.activation,
            self._storage,
            dtype,
            device or self.x_TD.device.type,
        )

    _storage: str = "packed"


def make_layer(
    case: str = "ragged_tail",
    activation: str = "swiglu",
    stored_as: str = "packed",
    bias: bool = False,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    sizes: tuple[int, int, int, int] = (E, K, D, F),
    requires_grad: bool = True,
) -> Layer:
    """A random layer; values are of the size that training sees, so that tolerances mean something."""
    num_experts, top_k, width, hidden = sizes
    experts_TK = routing(case, num_experts, top_k)
    num_tokens = experts_TK.shape[0]
    gated = is_gated(activation)
    x_TD = torch.randn(num_tokens, width)
    weights_TK = torch.rand(num_tokens, top_k) + 0.1
    stored = []
    for _ in range(2 if gated and stored_as.startswith("split") else 1):
        outputs = hidden * (2 if gated and not stored_as.startswith("split") else 1)
        up = torch.randn(num_experts, outputs, width) / width**0.5
        stored.append(up.transpose(1, 2).contiguous() if "transposed" in stored_as else up)
    w_down = torch.randn(num_experts, width, hidden) / hidden**0.5
    stored.append(w_down.transpose(1, 2).contiguous() if "transposed" in stored_as else w_down)
    if bias:
        outputs = hidden * (2 if gated and not stored_as.startswith("split") else 1)
        stored += [torch.randn(num_experts, outputs) for _ in range(len(stored) - 1)] + [
            torch.randn(num_experts, width)
        ]
    layer = _build([x_TD, weights_TK], stored, experts_TK, activation, stored_as, dtype, device)
    for leaf in layer.leaves:
        leaf.requires_grad_(requires_grad)
    return layer


def _build(tokens, stored, experts_TK, activation, stored_as, dtype, device) -> Layer:
    num_up = 2 if is_gated(activation) and stored_as.startswith("split") else 1
    weights_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    x_TD = tokens[0].to(dtype=dtype, device=device).clone().requires_grad_()
    weights_TK = tokens[1].to(dtype=weights_dtype, device=device).clone().requires_grad_()
    stored = [t.to(dtype=dtype, device=device).clone().requires_grad_() for t in stored]
    ups, (down,), biases = stored[:num_up], stored[num_up : num_up + 1], stored[num_up + 1 :]
    gated = is_gated(activation) and num_up == 1
    interleaved, transposed = "interleaved" in stored_as, "transposed" in stored_as
    layer = Layer(
        x_TD=x_TD,
        weights_TK=weights_TK,
        experts_TK=experts_TK.to(device),
        stored=stored,
        w_up=[storage.packed_up(w, gated=gated, interleaved=interleaved, transposed=transposed) for w in ups],
        b_up=[storage.packed_up(b, gated=gated, interleaved=interleaved) for b in biases[:-1]],
        w_down=[storage.down(down, transposed=transposed)],
        b_down=biases[-1:],
        activation=activation,
    )
    layer._storage = stored_as
    return layer
