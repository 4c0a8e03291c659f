"""The experts implementation "moeblaze" of transformers, for code that does not go through ``torch.compile``.

    import moeblaze_ops

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moeblaze")

The model's own parameters are used as they are stored. A layer that the ops cannot express runs as transformers'
"grouped_mm", with a warning that says why.
"""

import inspect
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import guard_scalar

from moeblaze_ops.arguments.activations import ACTIVATIONS
from moeblaze_ops.arguments.packed_gates import formula_of_gate
from moeblaze_ops.functional import moe

try:
    from transformers import activations as _activations
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError("moeblaze_ops.integrations.transformers needs transformers 5: pip install 'moeblaze[hf]'") from error

NAME = "moeblaze"

_FALLBACK = "grouped_mm"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_POINTWISE = {
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}


def register() -> None:
    """Add "moeblaze" to transformers' experts implementations; the import of this module does so.

    Afterwards ``from_config`` and ``from_pretrained`` take it as ``experts_implementation``, and
    ``model.set_experts_implementation("moeblaze")`` switches a model that exists. Nothing else changes.
    """
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """A decorated experts module of transformers, computed by ``moeblaze_ops.moe``.

    Args:
        self: the module, with the flags and parameters that transformers' decorator documents.
        hidden_states: tokens. Shape [T, D].
        top_k_index: expert ids. Shape [T, K]; ids from ``num_experts`` on are unused slots.
        top_k_weights: routing weights. Shape [T, K].

    Returns:
        Shape and dtype of ``hidden_states``.

    Warns:
        UserWarning: the ops cannot express the module's activation, gate or flags; it ran as "grouped_mm". Once for each
            kind of module.
    """
    operands = operands_of(self)
    if isinstance(operands, str):
        warn(f"{type(self).__name__} runs as {_FALLBACK!r}, not as {NAME!r}: {operands}")
        return ALL_EXPERTS_FUNCTIONS[_FALLBACK](self, hidden_states, top_k_index, top_k_weights)
    x, weights = as_operands(operands, hidden_states, top_k_weights)
    experts = torch.where(top_k_index < operands.w_up.shape[0], top_k_index, -1)
    return moe(x, weights, experts, **operands._asdict()).to(hidden_states.dtype)


class Operands(NamedTuple):
    """What ``moe`` takes of a decorated experts module."""

    w_up: Tensor
    w_down: Tensor
    b_up: Tensor | None
    b_down: Tensor | None
    activation: str
    interleaved: bool
    transposed: bool


def operands_of(experts: Any) -> Operands | str:
    """What the ops take of an experts module, or the reason why they cannot express it."""
    w_up = experts.gate_up_proj if experts.has_gate else experts.up_proj
    act_fn = getattr(experts, "act_fn", None)
    activation, interleaved, reason = _recognise(type(experts), experts.has_gate, type(act_fn), _numbers(experts))
    reason = _why_not(experts, w_up, act_fn) or reason
    if reason is not None:
        return reason
    b_up = b_down = None
    if experts.has_bias:
        b_up, b_down = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias, experts.down_proj_bias
    return Operands(w_up, experts.down_proj, b_up, b_down, activation, interleaved, experts.is_transposed)


def as_operands(operands: Operands, hidden_states: Tensor, top_k_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and routing weights in dtypes that go with the weights."""
    x = hidden_states.to(operands.w_up.dtype)
    return x, top_k_weights if top_k_weights.dtype in (x.dtype, torch.float32) else top_k_weights.to(x.dtype)


def _why_not(self: Any, w_up: Tensor, act_fn: Any) -> str | None:
    """What of the module, besides its formula, the ops cannot express."""
    if getattr(self, "has_post_expert_norm", False):
        return "the experts are followed by a norm each"
    if "_apply_gate" in self.__dict__:
        return "_apply_gate was replaced on the module"
    if isinstance(act_fn, nn.Module) and (len(act_fn._forward_hooks) or len(act_fn._forward_pre_hooks)):
        return "act_fn has hooks"
    if w_up.dtype not in _DTYPES:
        return f"weights are stored as {w_up.dtype}"
    return None


def _numbers(self: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The plain attributes that the gate of a module may read, with their values, by which a compiled graph is guarded."""
    values = [(name, getattr(self, name, None)) for name in _names_in_gate(type(self))]
    return tuple((name, guard_scalar(value)) for name, value in values if isinstance(value, (int, float)))


@torch.compiler.assume_constant_result
def _names_in_gate(experts_class: Any) -> tuple[str, ...]:
    return inspect.unwrap(experts_class._apply_gate).__code__.co_names


@torch.compiler.assume_constant_result
def _recognise(
    experts_class: Any, has_gate: bool, act_class: type, numbers: tuple[tuple[str, Any], ...]
) -> tuple[str, bool, str | None]:
    """The activation of a kind of module, whether it is interleaved, and the reason if there is none."""
    act_name = _act_names().get(act_class)
    if not has_gate:
        reason = None if act_name else f"its activation {act_class.__name__} is not known"
        return act_name or "", False, reason
    found = formula_of_gate(experts_class._apply_gate, numbers, ACTIVATIONS[act_name].value if act_name else None)
    if isinstance(found, str):
        return "", False, f"its gate with {act_class.__name__} is no pointwise function of the halves: {found}"
    return *found, None


def _act_names() -> dict[type, str]:
    """The fused activation of each class of transformers whose instances all compute it."""
    library = {getattr(_activations, name, None): fused for name, fused in _POINTWISE.items()}
    return {nn.SiLU: "silu", nn.ReLU: "relu", **library}


@torch.compiler.assume_constant_result
def warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)


register()
