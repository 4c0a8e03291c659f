"""``MoE``: a plain module, router and experts, over ``moe``."""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from moeblaze_ops.adapters import LoRAFactors
from moeblaze_ops.arguments.traced_activations import resolved_activation
from moeblaze_ops.arguments.validation_calls import check_module, check_module_input
from moeblaze_ops.arguments.validation_values import check_number, kind_of, not_scriptable, refuse, refuse_type
from moeblaze_ops.functional import moe
from moeblaze_ops.kernels.formulas.named import is_gated
from moeblaze_ops.ops.route import route
from moeblaze_ops.ops.router_products import logits_of


@not_scriptable
class MoE(nn.Module):
    """A router (linear, softmax, top-k) and E experts.

    Args:
        D: model width. F: hidden width of an expert. E: experts. K: experts per token.
        activation: as in ``moe``; gated ones pack gate and up into one parameter.
        activation_parameters: what the learned parameters of the activation begin with, numbers. They are one fp32 parameter of
            the module, ``activation_parameters`` of shape [P].
        bias: biases on both projections.
        renormalize: scale the K weights of a token to sum to 1.
        keep: as in ``moe``.
    """

    def __init__(
        self,
        D: int,
        F: int,
        E: int,
        K: int,
        *,
        activation: str | Callable[..., Tensor] = "swiglu",
        activation_parameters: Sequence[float] = (),
        bias: bool = False,
        renormalize: bool = True,
        keep: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        formula: str = resolved_activation("MoE", activation, len(activation_parameters), dtype or torch.get_default_dtype())
        check_module(D, F, E, K, formula, activation_parameters, bias, renormalize, keep, device, dtype)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        outputs = 2 * F if is_gated(formula) else F
        self.K = K
        self.activation = formula
        self.renormalize = renormalize
        self.keep = keep
        self.router = nn.Linear(D, E, bias=False, **options)
        self.w_up = nn.Parameter(torch.empty(E, outputs, D, **options))
        self.w_down = nn.Parameter(torch.empty(E, D, F, **options))
        self.b_up = nn.Parameter(torch.empty(E, outputs, **options)) if bias else None
        self.b_down = nn.Parameter(torch.empty(E, D, **options)) if bias else None
        self.activation_parameters: nn.Parameter | None = None
        self._first_activation_parameters = tuple(activation_parameters)
        if activation_parameters:
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            self.activation_parameters = nn.Parameter(torch.empty(len(activation_parameters), device=device, dtype=wide))
        self.adapters = nn.ModuleDict()
        self.active_adapters: list[str] = []
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise each expert as two ``nn.Linear`` would, what the activation learns as given, and adapters anew."""
        self.router.reset_parameters()
        for weight, bias in ((self.w_up, self.b_up), (self.w_down, self.b_down)):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)
            if bias is not None:
                nn.init.uniform_(bias, -bound, bound)
        if self.activation_parameters is not None:
            with torch.no_grad():
                first = [self.activation_parameters.new_full((), value) for value in self._first_activation_parameters]
                self.activation_parameters.copy_(torch.stack(first))
        for adapter in self.adapters.values():
            cast("LoRAFactors", adapter).reset_parameters()

    def add_adapter(self, name: str, rank: int, *, scale: float = 1.0) -> LoRAFactors:
        """Add a low-rank adapter (LoRA) to the experts, active with those that are, and freeze all other parameters.

        Args:
            name: of the adapter, in ``adapters`` and in the state dict. What is in the list ``active_adapters`` is added to the
                weights, by its products alone: nothing of their size is written.
            rank: r of the factors A [E, r, inputs] and B [E, outputs, r] of both projections. B starts at zero.
            scale: what ``B @ A`` is multiplied by, such as alpha / r.

        Raises:
            ValueError, TypeError: there is such an adapter, or an argument breaks one of these rules.
        """
        check_number("MoE.add_adapter", "rank", rank, 1)
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            refuse_type("MoE.add_adapter", "scale", "be a number", kind_of(scale))
        if name in self.adapters:
            refuse("MoE.add_adapter", "name", "be new", repr(name))
        for own, parameter in self.named_parameters():
            if not own.startswith("adapters."):
                parameter.requires_grad_(False)
        adapter = LoRAFactors(self.w_up, self.w_down, rank, scale)
        self.adapters[name] = adapter
        self.active_adapters.append(name)
        return adapter

    def merge_adapters(self) -> None:
        """Add what is active to the weights, and forget all adapters. The parameters stay frozen."""
        for adapter in self._active():
            adapter.add_to(self.w_up, self.w_down)
        self.adapters.clear()
        self.active_adapters.clear()

    def forward(self, x: Tensor) -> Tensor:
        """Shape [..., D] to [..., D]."""
        check_module_input(x, self.w_up)
        active = self._active()
        weights, experts = route(logits_of(self.router, x), self.K, renormalize=self.renormalize)
        return moe(
            x,
            weights,
            experts,
            self.w_up,
            self.w_down,
            b_up=self.b_up,
            b_down=self.b_down,
            activation=self.activation,
            activation_parameters=() if self.activation_parameters is None else self.activation_parameters.unbind(),
            keep=self.keep,
            lora_up=[adapter.up for adapter in active],
            lora_down=[adapter.down for adapter in active],
        )

    def _active(self) -> list[LoRAFactors]:
        if not isinstance(self.active_adapters, list | tuple):
            refuse_type("MoE", "active_adapters", "be a list of names of adapters", kind_of(self.active_adapters))
        if unknown := [name for name in self.active_adapters if name not in self.adapters]:
            refuse(
                "MoE",
                "active_adapters",
                f"be names of adapters ({', '.join(self.adapters) or 'none was added'})",
                repr(unknown[0]),
            )
        return [cast("LoRAFactors", self.adapters[name]) for name in self.active_adapters]

    def extra_repr(self) -> str:
        E, _, D = self.w_up.shape
        return f"D={D}, F={self.w_down.shape[2]}, E={E}, K={self.K}, activation={self.activation!r}"
