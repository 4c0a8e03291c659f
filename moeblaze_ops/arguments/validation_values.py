"""What one argument of a public function has to be, whatever the others are; the errors are those of ``validation``.

Each check costs a comparison when it passes: the text of an error is made when it is raised.
"""

import sys
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import torch
from torch import Tensor

from moeblaze_ops.kernels.formulas.named import NAMED, why_no_formula

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ID_DTYPES = (torch.int32, torch.int64)


def refuse(op: str, argument: str, rule: str, value: object) -> NoReturn:
    raise ValueError(f"{op}: {argument} must {rule}, got {value}")


def refuse_type(op: str, argument: str, rule: str, value: object) -> NoReturn:
    raise TypeError(f"{op}: {argument} must {rule}, got {value}")


def kind_of(value: Any) -> str:
    """A value as an error shows it: a number or a text itself, anything else by its type."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def check_tensor(op: str, name: str, value: Any) -> None:
    """A tensor of this process that has strides: not sparse, not nested, no ``DTensor``."""
    if not isinstance(value, Tensor):
        refuse_type(op, name, "be a tensor", kind_of(value))
    if value.layout != torch.strided:
        refuse_type(op, name, "be dense (to_dense())", f"layout {value.layout}")
    if value.is_nested:
        refuse_type(op, name, "be dense (to_padded_tensor())", "a nested tensor")
    if type(value) is not Tensor and _is_distributed(value):
        rule = "be a tensor of this process (to_local(), or full_tensor())"
        raise NotImplementedError(f"{op}: {name} must {rule}, got a DTensor")


def _is_distributed(tensor: Tensor) -> bool:
    # Where nobody has imported it, there is none; importing it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_float_dtype(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOAT_DTYPES or (tensor.dtype == torch.float64 and tensor.is_cuda):
        rule = "be bfloat16, float16, float32 or (on CPU) float64"
        refuse_type(op, name, rule, f"{tensor.dtype} on {tensor.device}")


def check_integer(op: str, name: str, value: Any) -> None:
    """An integer, of which a symbolic one is one and a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        refuse_type(op, name, "be an int", kind_of(value))


def check_number(op: str, name: str, value: Any, low: int, high: int | None = None, meaning: str = "") -> None:
    """An integer from ``low`` to ``high``."""
    check_integer(op, name, value)
    if value < low or (high is not None and value > high):
        rule = f"be at least {low}" if high is None else f"be between {low} and {high}"
        refuse(op, name, rule + meaning, value)


def check_switch(op: str, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        refuse_type(op, name, "be True or False", kind_of(value))


def check_choice(op: str, name: str, value: Any, choices: Collection[str]) -> None:
    """One of some names: any other text is a wrong value, anything else a wrong type."""
    if not isinstance(value, str):
        refuse_type(op, name, f"be one of {', '.join(choices)}", kind_of(value))
    if value not in choices:
        refuse(op, name, f"be one of {', '.join(choices)}", repr(value))


def check_activation_text(op: str, value: Any, more: str = "") -> None:
    """A name or a formula."""
    if isinstance(value, str) and value in NAMED:
        return
    rule = f"be one of {', '.join(NAMED)}{more}, or a formula such as 'silu(g) * u' or 'silu(h)'"
    if not isinstance(value, str):
        refuse_type(op, "activation", rule, kind_of(value))
    reason = why_no_formula(value)
    if reason is not None:
        refuse(op, "activation", rule, f"{value!r}: {reason}")


def check_device_name(op: str, value: Any) -> None:
    """None, or what ``torch.device`` takes."""
    if value is None:
        return
    if not isinstance(value, str | torch.device):
        refuse_type(op, "device", "be a device or its name", kind_of(value))
    try:
        torch.device(value)
    except RuntimeError:
        refuse(op, "device", "be a device or its name", repr(value))


def check_not_traced(op: str) -> None:
    """``torch.jit.trace`` would freeze the sizes of the traced call, and what was chosen by them."""
    if torch.jit.is_tracing():
        raise NotImplementedError(f"{op}: torch.jit.trace is not supported, use torch.compile or torch.export")


def not_scriptable(function: Callable) -> Callable:
    """``function``, which ``torch.jit.script`` refuses by its name, also where scripted code calls it."""

    def refuse_script() -> NoReturn:
        raise NotImplementedError(f"{function.__name__}: torch.jit.script is not supported, use torch.compile or torch.export")

    hook: Any = staticmethod(refuse_script) if isinstance(function, type) else refuse_script
    function.__prepare_scriptable__ = hook  # type: ignore[attr-defined]
    return function
