"""``accumulate_grad``: gradients of expert weights that are added in place, where they are computed.

Autograd hands over a gradient as a tensor of its own and adds it to ``.grad`` afterwards. For experts that tensor is as
large as they are. Backward formulas ask ``buffers_of`` first, and return no gradient for what they have added.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from moeblaze_ops.arguments.separate_experts import are_apart
from moeblaze_ops.arguments.validation import require, require_dtype
from moeblaze_ops.arguments.validation_values import check_tensor


@dataclass(frozen=True)
class _Target:
    """Where the gradient of a parameter goes: ``buffer``, or its ``.grad`` if None."""

    buffer: Tensor | None


_targets = WeakTensorKeyDictionary()


class Accumulation:
    """What ``accumulate_grad`` has set up for one parameter; ``remove`` ends it."""

    def __init__(self, parameter: Tensor, hook: torch.utils.hooks.RemovableHandle | None) -> None:
        self._parameter, self._hook = parameter, hook

    def remove(self) -> None:
        _targets.pop(self._parameter, None)
        if self._hook is not None:
            self._hook.remove()


def accumulate_grad(parameter: Tensor, buffer: Tensor | None = None) -> Accumulation:
    """From now on, ``backward`` adds the gradient of an expert weight in place, without a tensor of its size.

    Without ``buffer`` it is added to ``parameter.grad`` where that exists; the first gradient becomes ``.grad`` as always.
    With a ``buffer`` (``main_grad`` in some trainers) it is added there, and ``.grad`` stays None. A gradient that reaches
    the parameter in another way (compiled code, autocast, another use of the parameter) is added to the buffer as soon as
    autograd has it, from a temporary: the sum is complete either way.

    What is added in place never exists as a tensor that autograd could hand to anyone. A parameter with hooks of its own
    therefore goes through autograd. DDP's hooks, which nothing on the parameter shows, get no gradient: reduce what was
    summed yourself. ``torch.autograd.grad`` finds no gradient either.

    Args:
        parameter: a leaf that is given to ``moe`` or the ops, itself or as a view: up, gate or down weights in one tensor.
        buffer: what is added to. Shape and strides of the parameter, its dtype or fp32.

    Returns:
        A handle, whose ``remove()`` ends this.

    Raises:
        ValueError, TypeError: the parameter is no leaf that requires gradients, or the buffer does not fit it.

    Numerics: a layer's sum over tokens, in fp32, is added to what is there and rounded once.
    """
    check_tensor("accumulate_grad", "parameter", parameter)
    is_leaf = parameter.is_leaf and parameter.requires_grad
    require(is_leaf, "accumulate_grad", "parameter", "be a leaf that requires gradients", f"shape {list(parameter.shape)}")
    require(parameter not in _targets, "accumulate_grad", "parameter", "accumulate once (remove() the other)", "a second call")
    hook = None
    if buffer is not None:
        check_tensor("accumulate_grad", "buffer", buffer)
        for name in ("shape", "stride", "device"):
            given, expected = _attribute(buffer, name), _attribute(parameter, name)
            require(given == expected, "accumulate_grad", "buffer", f"have {name} {expected} of the parameter", given)
        allowed = (torch.float32, parameter.dtype)
        require_dtype(buffer.dtype in allowed, "accumulate_grad", "buffer", f"be float32 or {parameter.dtype}", buffer.dtype)
        require(not buffer.requires_grad, "accumulate_grad", "buffer", "not require gradients", "requires_grad=True")
        hook = parameter.register_post_accumulate_grad_hook(_move_grad)
    _targets[parameter] = _Target(buffer)
    return Accumulation(parameter, hook)


def _attribute(tensor: Tensor, name: str):
    value = getattr(tensor, name)
    return value() if callable(value) else list(value) if name == "shape" else value


def _move_grad(parameter: Tensor) -> None:
    # Called without a gradient too, when all of it was added in place.
    if parameter.grad is not None:
        _targets[parameter].buffer.add_(parameter.grad)
        parameter.grad = None


def buffers_of(weights: Sequence[Tensor], num_experts: int) -> list[Tensor] | None:
    """Views of what the gradients of these weights are added to, in the weights' form; None: autograd takes them.

    Args:
        weights: an argument of an op: parameters or views of them.
        num_experts: E. Experts stored apart go through autograd.
    """
    # With create_graph the gradient itself is needed, for the error that says that it cannot be differentiated.
    if not _targets or torch.is_grad_enabled() or are_apart(weights, num_experts):
        return None
    buffers = [_buffer_of(weight) for weight in weights]
    return None if any(buffer is None for buffer in buffers) else buffers


def _buffer_of(weight: Tensor) -> Tensor | None:
    parameter = weight if weight._base is None else weight._base
    target = _targets.get(parameter)
    if target is None or _num_hooks(parameter) > (target.buffer is not None):
        return None
    buffer = parameter.grad if target.buffer is None else target.buffer
    fits = buffer is not None and buffer.layout == torch.strided and buffer.stride() == parameter.stride()
    if not fits or weight.dtype != parameter.dtype:
        return None
    offset = buffer.storage_offset() + weight.storage_offset() - parameter.storage_offset()
    return buffer.as_strided(weight.shape, weight.stride(), offset)


def _num_hooks(parameter: Tensor) -> int:
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
