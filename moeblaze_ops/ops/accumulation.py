"""``accumulate_grad``: gradients of expert weights that are added in place, where they are computed.

Autograd hands over a gradient as a tensor of its own and adds it to ``.grad`` afterwards. For experts that tensor is as
large as they are. Backward formulas ask ``buffers_of`` first, and return no gradient for what they have added. What is in force
is asked for in each backward, by compiled code as well: it decides what happens to this gradient, as autograd would.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
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
    the parameter in another way (see below, or another use of the parameter) is added to the buffer as soon as autograd has it,
    from a temporary: the sum is complete either way.

    So it is in eager layers, and in layers that are compiled while ``accumulate_grad`` holds for any parameter, with Inductor.
    Gradients are returned to autograd as tensors of their own where

    - the parameter has hooks of its own, or its copy comes out of saved-tensor hooks;
    - the backward that runs does not end in ``.grad``: ``torch.autograd.grad``, ``backward(inputs=)``;
    - the experts are stored apart, or sharded (``fully_shard``, ``shard_experts``);
    - compiled code is a CUDA graph or C++, sums the gradients of several layers, or goes by ranges of rows or chunks of tokens.

    DDP reduces what ``.grad`` holds, as always, and nothing that goes to a buffer: reduce that yourself.

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


def is_in_use() -> bool:
    """True if ``accumulate_grad`` holds for any parameter."""
    return bool(_targets)


def buffers_of(weights: Sequence[Tensor], num_experts: int) -> list[Tensor] | None:
    """Views of what the gradients of these weights are added to, in the weights' form; None: autograd takes them.

    Args:
        weights: an argument of an op: parameters or views of them.
        num_experts: E. Experts stored apart go through autograd.
    """
    if not _targets or are_apart(weights, num_experts):
        return None
    parameters = [weight if weight._base is None else weight._base for weight in weights]
    if any(weight.dtype != parameter.dtype for weight, parameter in zip(weights, parameters, strict=True)):
        return None
    buffers = buffers_of_parameters(parameters)
    if buffers is None:
        return None
    given = zip(weights, parameters, buffers, strict=True)
    return [_at(buffer, weight, int(weight.storage_offset() - parameter.storage_offset())) for weight, parameter, buffer in given]


def buffers_of_parameters(parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """What the gradients of these parameters are added to, of their strides; None if autograd takes one of them."""
    # With create_graph the gradient itself is needed, for the error that says that it cannot be differentiated.
    if not _targets or torch.is_grad_enabled():
        return None
    buffers = [_buffer_of(parameter) for parameter in parameters]
    return None if any(buffer is None for buffer in buffers) else buffers


def in_form_of(weights: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors`` as weights of the same memory, of these shapes and strides."""
    return [_at(tensor, weight, 0) for tensor, weight in zip(tensors, weights, strict=True)]


def _at(tensor: Tensor, like: Tensor, offset: int) -> Tensor:
    return tensor.as_strided(like.shape, like.stride(), tensor.storage_offset() + offset)


def _buffer_of(parameter: Tensor) -> Tensor | None:
    target = _targets.get(parameter)
    if target is None or _num_hooks(parameter) > (target.buffer is not None) or not _will_accumulate(parameter):
        return None
    buffer = parameter.grad if target.buffer is None else target.buffer
    fits = buffer is not None and buffer.layout == torch.strided and buffer.stride() == parameter.stride()
    return buffer if fits else None


def _will_accumulate(parameter: Tensor) -> bool:
    """True if the backward that runs ends in ``parameter.grad``: ``torch.autograd.grad`` and ``backward(inputs=)`` may not."""
    node = get_gradient_edge(parameter).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # no backward runs, or one of torch.autograd.grad of this parameter
        return False


def _num_hooks(parameter: Tensor) -> int:
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
