"""PEFT's adapters on stacked weights (``target_parameters``) as Dynamo can trace them.

PEFT registers a parametrization of the module that holds the weight, and takes it off again, in every forward: the module is of
a new class each time, which breaks the graph and fails every guard on its class. Here the sum is read in the place of the weight
instead, and the class is what it was. That is one sum, where a parametrization makes one to see its shape and one to be read.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.nn.utils.stateless import _reparametrize_module  # what torch.func.functional_call is made of; Dynamo knows it

from moeblaze_ops.lowering.torch_internals import callers

_DORA_FILE = "peft/tuners/lora/dora.py"
_DORA = (
    "PEFT's DoRA divides products by the norms of W + s * B @ A, which no operator does (train with use_dora=False, "
    "call merge_and_unload() for inference)"
)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_everywhere = False
_while_tracing: ContextVar[bool] = ContextVar("moeblaze_traces_peft", default=False)


def set_everywhere(on: bool) -> None:
    """Set whether PEFT's wrappers of parameters are so in eager mode, too, as between the graphs of a frame that breaks."""
    global _everywhere
    _everywhere = on


@contextlib.contextmanager
def seen_through() -> Iterator[None]:
    """A context for a frame that Dynamo traces: PEFT's wrappers of parameters, if it is loaded, are as described above."""
    wrapper = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    if hasattr(wrapper, "_activate_lora"):
        _install(wrapper)
    token = _while_tracing.set(True)
    try:
        yield
    finally:
        _while_tracing.reset(token)


@functools.cache
def _install(wrapper: Any) -> None:
    as_written = wrapper._activate_lora

    @functools.wraps(as_written)
    def activate_lora(self: Any, active_adapters: list[str]) -> Any:
        adapters = [name for name in active_adapters if name in self.lora_A]
        with_sum = adapters and _is_seen_through() and _has_plain_sum(self)
        return _sum_in_place(self, adapters) if with_sum else as_written(self, active_adapters)

    wrapper._activate_lora = activate_lora


@torch.compiler.assume_constant_result
def _is_seen_through() -> bool:
    return _everywhere or _while_tracing.get()


def _has_plain_sum(self: Any) -> bool:
    """True if the sum is one of plain tensors: not of a weight in 8 bits or packed, nor of one that other ranks hold (ZeRO 3)."""
    w = self.get_param()
    return w.dtype in _DTYPES and w.dim() > 1 and not parametrize.is_parametrized(self.get_base_layer(), self.parameter_name)


@contextlib.contextmanager
def _sum_in_place(self: Any, adapters: list[str]) -> Iterator[None]:
    """A context in which the weight of a wrapper reads as ``W + s * B @ A``, of PEFT's own factors."""
    w = self.get_param()
    if len(adapters) == 1 and self.num_experts > 1 and hasattr(self, "get_delta_factors"):
        lhs, rhs, scale = self.get_delta_factors(adapters[0])
        with torch.autocast(w.device.type, enabled=False):
            w = torch.baddbmm(w, lhs, rhs, alpha=scale)
    else:
        w = w + functools.reduce(torch.add, [self.get_delta_weight(name) for name in adapters])
    with _reparametrize_module(self.get_base_layer(), {self.parameter_name: w}):
        yield


def branch_in_its_words(why: str | None) -> str | None:
    """``line: why`` a branch was left; what PEFT's DoRA does inside is no matter of the line that stopped its tracing."""
    return f"{why.partition(': ')[0]}: {_DORA}" if why and _DORA_FILE in why else why


def error_in_its_words(error: Exception) -> tuple[str, str]:
    """What stopped Dynamo in a frame, and the line (``file:number``) if it is known; of PEFT's DoRA what that does."""
    return (_DORA, "") if callers.was_in(error, _DORA_FILE) else (str(error), callers.place_of(error))
