"""Argument checks of the functions and modules that users call, in the names and shapes in which they call them.

The ops check what reaches them again, in their own names. Errors are those of ``validation``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moeblaze_ops.arguments.validation import MAX_EXPERTS
from moeblaze_ops.arguments.validation_values import (
    FLOAT_DTYPES,
    ID_DTYPES,
    check_activation_text,
    check_choice,
    check_device_name,
    check_float_dtype,
    check_integer,
    check_not_traced,
    check_number,
    check_switch,
    check_tensor,
    kind_of,
    refuse,
    refuse_type,
)
from moeblaze_ops.kernels.formulas.named import is_gated, num_parameters

KEEP = ("preactivation", "h8", "input", "auto")
WEIGHT_ON = ("output", "input")
MAX_TOP_K = 32
"""Experts per token that ``route`` chooses at most."""
TOP_K_BOUNDS = f" (the experts, and at most {MAX_TOP_K})"
_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}
SCORINGS = ("softmax", "softmax_topk", "sigmoid")


def check_moe(
    x: Tensor, weights: Tensor, experts: Tensor, w_up: Tensor, w_down: Tensor, w_gate: Tensor | None,
    biases: dict[str, Tensor | None], activation: str, interleaved: bool, transposed: bool, weight_on: str, keep: str,
) -> None:  # fmt: skip
    """What ``moe`` is called with; ``biases`` are b_up, b_gate and b_down by name."""
    check_not_traced("moe")
    check_activation_text("moe", activation)
    check_choice("moe", "weight_on", weight_on, WEIGHT_ON)
    check_choice("moe", "keep", keep, KEEP)
    check_switch("moe", "interleaved", interleaved)
    check_switch("moe", "transposed", transposed)
    up_weights = {"w_up": w_up} if w_gate is None else {"w_up": w_up, "w_gate": w_gate}
    parameters = {**up_weights, "w_down": w_down, **{name: b for name, b in biases.items() if b is not None}}
    for name, tensor in {"x": x, "weights": weights, "experts": experts, **parameters}.items():
        check_tensor("moe", name, tensor)
    _check_tokens("moe", x)
    _check_routing(x, weights, experts)
    _check_parameters(up_weights, w_down, biases, x.shape[-1], activation, interleaved, transposed)
    E, K = w_up.shape[0], experts.shape[-1]
    if K > E:
        refuse("moe", "experts", f"have at most E={E} ids per token (experts of w_up)", K)
    autocast = _casts(x)
    for name, tensor in parameters.items():
        if tensor.device != x.device:
            refuse("moe", name, f"be on {x.device} like x", tensor.device)
        if tensor.dtype != x.dtype and not autocast:
            refuse_type("moe", name, f"have the dtype {x.dtype} of x", tensor.dtype)
        if autocast and tensor.dtype not in FLOAT_DTYPES:
            refuse_type("moe", name, "be a floating-point tensor", tensor.dtype)


def check_lora(
    x: Tensor, loras: dict[str, Sequence[Any]], w_up: Tensor, w_gate: Tensor | None, w_down: Tensor, transposed: bool
) -> None:
    """The low-rank additions that ``moe`` is called with, by name of the weight, once its weights are checked."""
    given = {name: adapters for name, adapters in loras.items() if adapters}
    if "lora_gate" in given and w_gate is None:
        refuse("moe", "lora_gate", "come with w_gate (pack it into lora_up otherwise)", "factors")
    E, outputs, D = (w_up.shape[axis] for axis in ((0, 2, 1) if transposed else (0, 1, 2)))
    F = w_down.shape[1 if transposed else 2]
    for name, adapters in given.items():
        for i, lora in enumerate(adapters):
            called = name if len(adapters) == 1 else f"{name}[{i}]"
            _check_factors(called, lora, x, E, *((F, D) if name == "lora_down" else (D, outputs)))


def check_activation_parameters(parameters: Any, activation: str, x: Tensor, E: int) -> None:
    """The parameters that the activation of ``moe`` reads."""
    expected = num_parameters(activation)
    if not isinstance(parameters, list | tuple):
        refuse_type("moe", "activation_parameters", "be a list of tensors", kind_of(parameters))
    if len(parameters) != expected:
        refuse("moe", "activation_parameters", f"hold {expected} tensors, those that {activation!r} reads", len(parameters))
    for i, parameter in enumerate(parameters):
        name = f"activation_parameters[{i}]"
        check_tensor("moe", name, parameter)
        if parameter.device != x.device:
            refuse("moe", name, f"be on {x.device} like x", parameter.device)
        if parameter.dtype not in FLOAT_DTYPES:
            refuse_type("moe", name, "be a floating-point tensor", parameter.dtype)
        if parameter.numel() != 1 and list(parameter.shape) != [E]:
            refuse("moe", name, f"have one element or shape [{E}]", f"shape {list(parameter.shape)}")


def _check_factors(name: str, lora: Any, x: Tensor, E: int, inputs: int, outputs: int) -> None:
    if not isinstance(lora, tuple | list) or len(lora) != 3:
        parts = f"({', '.join(map(kind_of, lora))})" if isinstance(lora, tuple | list) else kind_of(lora)
        refuse_type("moe", name, "be a tuple (A, B, scale)", parts)
    for part, tensor in zip(("A", "B"), lora, strict=False):
        check_tensor("moe", f"{part} of {name}", tensor)
        if tensor.device != x.device:
            refuse("moe", f"{part} of {name}", f"be on {x.device} like x", tensor.device)
        if tensor.dtype not in (x.dtype, torch.float32) and not _casts(x):
            refuse_type("moe", f"{part} of {name}", f"be float32 or {x.dtype}, the dtype of x", tensor.dtype)
    a, b, scale = lora
    if a.dim() != 3 or a.shape[0] != E or a.shape[1] == 0 or a.shape[2] != inputs:
        refuse("moe", f"A of {name}", f"have shape [{E}, r, {inputs}] with a rank r of 1 or more", f"shape {list(a.shape)}")
    expected = [E, outputs, a.shape[1]]
    if list(b.shape) != expected:
        refuse("moe", f"B of {name}", f"have shape {expected}", f"shape {list(b.shape)}")
    if isinstance(scale, Tensor):
        check_tensor("moe", f"scale of {name}", scale)
        if list(scale.shape) != [E]:
            refuse("moe", f"scale of {name}", f"be a number or have shape [{E}]", f"shape {list(scale.shape)}")
    elif isinstance(scale, bool) or not isinstance(scale, int | float | torch.SymFloat):
        refuse_type("moe", f"scale of {name}", "be a number or a tensor [E]", kind_of(scale))


def _casts(x: Tensor) -> bool:
    """True if autocast makes dtypes one before an op sees them."""
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def _check_tokens(op: str, x: Tensor) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        refuse(op, "x", "have shape [..., D]", f"shape {list(x.shape)}")
    check_float_dtype(op, "x", x)


def _check_routing(x: Tensor, weights: Tensor, experts: Tensor) -> None:
    if weights.dim() != x.dim():
        refuse("moe", "weights", f"have {x.dim()} dimensions, as x has", f"shape {list(weights.shape)}")
    if weights.shape[:-1] != x.shape[:-1]:
        refuse("moe", "weights", f"have leading shape {list(x.shape[:-1])} of x", list(weights.shape))
    if experts.shape != weights.shape:
        refuse("moe", "experts", f"have shape {list(weights.shape)} of weights", list(experts.shape))
    if experts.shape[-1] == 0:
        refuse("moe", "experts", "have 1 id per token or more", f"shape {list(experts.shape)}")
    if experts.dtype not in ID_DTYPES:
        refuse_type("moe", "experts", "be int32 or int64", experts.dtype)
    allowed = FLOAT_DTYPES if _casts(x) else (torch.float32, x.dtype)
    if weights.dtype not in allowed:
        refuse_type("moe", "weights", f"be float32 or {x.dtype}, the dtype of x", weights.dtype)
    for name, tensor in (("weights", weights), ("experts", experts)):
        if tensor.device != x.device:
            refuse("moe", name, f"be on {x.device} like x", tensor.device)


def _check_parameters(
    up_weights: dict[str, Tensor],
    w_down: Tensor,
    biases: dict[str, Tensor | None],
    D: int,
    activation: str,
    interleaved: bool,
    transposed: bool,
) -> None:
    """The shapes of weights and biases, as they are stored."""
    gated, apart = is_gated(activation), "w_gate" in up_weights
    b_up, b_gate = biases["b_up"], biases["b_gate"]
    if apart and not gated:
        refuse("moe", "activation", f"take a gate where w_gate is given: {_with_a_gate(activation)}", repr(activation))
    if apart and interleaved:
        refuse("moe", "interleaved", "be False when w_gate is given", interleaved)
    if b_gate is not None and not apart:
        refuse("moe", "b_gate", "come with w_gate (pack it into b_up otherwise)", "a tensor")
    if apart and (b_gate is None) != (b_up is None):
        refuse("moe", "b_gate", "be given exactly when b_up is", kind_of(b_gate))

    for name, w in (*up_weights.items(), ("w_down", w_down)):
        if w.dim() != 3:
            refuse("moe", name, "have 3 dimensions", f"shape {list(w.shape)}")
    w_up = up_weights["w_up"]
    E, outputs, inputs = (w_up.shape[axis] for axis in ((0, 2, 1) if transposed else (0, 1, 2)))
    if not 1 <= E <= MAX_EXPERTS:
        refuse("moe", "w_up", f"have 1 to {MAX_EXPERTS} experts on axis 0", f"shape {list(w_up.shape)}")
    if inputs != D:
        refuse("moe", "w_up", f"have size D={D} of x on axis {1 if transposed else 2}", f"shape {list(w_up.shape)}")
    packed = gated and not apart
    if outputs == 0 or (packed and outputs % 2):
        rule = "pack gate and up in an even number of outputs" if packed else "have 1 output or more"
        refuse("moe", "w_up", rule, outputs)
    if apart and up_weights["w_gate"].shape != w_up.shape:
        refuse("moe", "w_gate", f"have shape {list(w_up.shape)} of w_up", f"shape {list(up_weights['w_gate'].shape)}")
    F = outputs // 2 if packed else outputs
    expected = [E, F, D] if transposed else [E, D, F]
    if not gated and 2 * w_down.shape[1 if transposed else 2] == F:
        refuse("moe", "activation", f"take a gate where w_up packs gate and up: {_with_a_gate(activation)}", repr(activation))
    if list(w_down.shape) != expected:
        width = f"half the outputs of w_up, for {activation!r}" if packed else "the outputs of w_up"
        form = "[E, F, D]" if transposed else "[E, D, F]"
        refuse("moe", "w_down", f"have shape {expected} ({form}; F is {width})", f"shape {list(w_down.shape)}")
    shapes = {"b_up": [E, outputs], "b_gate": [E, outputs], "b_down": [E, D]}
    for name, b in biases.items():
        if b is not None and list(b.shape) != shapes[name]:
            refuse("moe", name, f"have shape {shapes[name]}", f"shape {list(b.shape)}")


def _with_a_gate(activation: str) -> str:
    """What an ungated activation is called with a gate, as the end of a rule."""
    gated = _GATED.get(activation, "a formula such as 'silu(g) * u'")
    return f"{activation} takes one argument, with a gate use {gated}"


def check_module(
    D: int,
    F: int,
    E: int,
    K: int,
    activation: str,
    activation_parameters: Any,
    bias: bool,
    renormalize: bool,
    keep: str | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """What ``MoE`` is made with."""
    _check_sizes("MoE", D, F, E)
    check_number("MoE", "K", K, 1, min(E, MAX_TOP_K), TOP_K_BOUNDS)
    check_activation_text("MoE", activation)
    expected = num_parameters(activation)
    if len(activation_parameters) != expected:
        rule = f"hold {expected} numbers, those that {activation!r} reads"
        refuse("MoE", "activation_parameters", rule, len(activation_parameters))
    for i, value in enumerate(activation_parameters):
        if isinstance(value, bool) or not isinstance(value, int | float):
            refuse_type("MoE", f"activation_parameters[{i}]", "be a number", kind_of(value))
    check_switch("MoE", "bias", bias)
    check_switch("MoE", "renormalize", renormalize)
    if keep is not None:
        check_choice("MoE", "keep", keep, KEEP)
    check_device_name("MoE", device)
    if dtype is not None:
        _check_dtype("MoE", dtype)


def check_module_input(x: Tensor, w_up: Tensor) -> None:
    """What a ``MoE`` with these up weights is called with."""
    check_not_traced("MoE")
    check_tensor("MoE", "x", x)
    _check_tokens("MoE", x)
    if x.shape[-1] != w_up.shape[2]:
        refuse("MoE", "x", f"have last size D={w_up.shape[2]}", f"shape {list(x.shape)}")
    if x.device != w_up.device:
        refuse("MoE", "x", f"be on {w_up.device} like w_up", x.device)
    if x.dtype != w_up.dtype and not _casts(x):
        refuse_type("MoE", "x", f"have the dtype {w_up.dtype} of w_up", x.dtype)


def check_memory_estimate(
    T: int,
    D: int,
    F: int,
    E: int,
    K: int,
    dtype: torch.dtype,
    keep: str | None,
    switches: dict[str, bool],
    device: torch.device | str | None,
) -> None:
    """What ``memory_estimate`` is called with; ``switches`` are its flags by name."""
    check_number("memory_estimate", "T", T, 0)
    _check_sizes("memory_estimate", D, F, E)
    check_number("memory_estimate", "K", K, 1, E, ", the experts")
    _check_dtype("memory_estimate", dtype)
    check_choice("memory_estimate", "keep", keep, KEEP)
    for name, value in switches.items():
        check_switch("memory_estimate", name, value)
    check_device_name("memory_estimate", device)
    index = None if device is None else torch.device(device).index
    if index is not None and torch.device(device).type == "cuda" and index >= max(1, torch.cuda.device_count()):
        refuse("memory_estimate", "device", f"be a GPU that is here (of {torch.cuda.device_count()})", repr(str(device)))


def _check_sizes(op: str, D: int, F: int, E: int) -> None:
    check_number(op, "D", D, 1)
    check_number(op, "F", F, 1)
    check_number(op, "E", E, 1, MAX_EXPERTS)


def _check_dtype(op: str, dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype):
        refuse_type(op, "dtype", "be a torch.dtype", kind_of(dtype))
    if dtype not in FLOAT_DTYPES:
        refuse_type(op, "dtype", "be bfloat16, float16, float32 or float64", dtype)


def check_route_call(
    logits: Tensor,
    top_k: int,
    bias: Tensor | None,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
) -> None:
    """What ``route`` is called with, but for what the op checks: the values of its options, and the bias."""
    check_not_traced("route")
    check_tensor("route", "logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        refuse("route", "logits", "have shape [..., E]", f"shape {list(logits.shape)}")
    if bias is not None:
        check_tensor("route", "bias", bias)
    check_number("route", "top_k", top_k, 1, min(logits.shape[-1], MAX_TOP_K), TOP_K_BOUNDS)
    check_integer("route", "num_groups", num_groups)
    check_integer("route", "top_groups", top_groups)
    check_choice("route", "scoring", scoring, SCORINGS)
    check_switch("route", "renormalize", renormalize)
    if isinstance(scale, bool) or not isinstance(scale, int | float | torch.SymFloat):
        refuse_type("route", "scale", "be a number", kind_of(scale))
