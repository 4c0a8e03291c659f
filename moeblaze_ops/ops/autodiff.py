"""What an op does under autograd: reverse mode by its gradient formula, forward mode by its rule for tangents.

``torch.library.register_autograd`` knows reverse mode alone: in forward mode (``torch.func.jvp``,
``torch.autograd.forward_ad``) an op would have no tangents, in silence, and ``torch.func.grad`` would fail. The kernel
made here serves all of them. At each level of ``torch.func``'s transforms the dispatcher calls it once.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

_LEVEL = 0
"""PyTorch's only level of forward mode; transforms nest by wrapping tensors instead."""


@dataclass
class _Call:
    """One call of an op: the dispatch keys it came with, and how its arguments and results hold tensors."""

    keyset: torch._C.DispatchKeySet
    arguments: TreeSpec
    in_transform: bool
    results: TreeSpec | None = None


def autograd_kernel(
    op: torch._ops.OpOverload, gradient: Callable, setup_context: Callable | None, forward_mode: Callable | None
) -> Callable:
    """The implementation of ``op`` at the dispatcher's Autograd key; it takes the dispatch keys, then the arguments.

    Args:
        op: an op without arguments by keyword only.
        gradient, setup_context: as for ``torch.library.register_autograd``.
        forward_mode: takes arguments of ``op`` that carry tangents, and returns results that carry theirs; None where
            forward mode is not available, which raises NotImplementedError.
    """
    name = op.overloadpacket.__name__

    def forward(ctx, call, *flat):
        args = tuple(tree_unflatten(list(flat), call.arguments))
        with _outer_levels() if call.in_transform else contextlib.nullcontext():
            results = _below_autograd(op, call.keyset, args)
        if setup_context is not None:
            setup_context(ctx, args, results)
        ctx.call = call
        flat_results, call.results = tree_flatten(results)
        return tuple(flat_results)

    def backward(ctx, *grads):
        needed = ctx.needs_input_grad
        ctx.needs_input_grad = tuple(tree_unflatten(list(needed[1:]), ctx.call.arguments))
        try:
            grads = tree_unflatten(list(grads), ctx.call.results)
            results = gradient(ctx, *(grads if isinstance(grads, tuple) else (grads,)))
        finally:
            ctx.needs_input_grad = needed
        flat, structure = tree_flatten(list(results) if isinstance(results, tuple) else [results])
        assert structure == ctx.call.arguments, f"{name}: gradients {structure} of arguments {ctx.call.arguments}"
        return None, *flat

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    of_tensors = type(f"{name}_gradient", (torch.autograd.Function,), methods)
    of_one_level = type(f"{name}_gradient_in_transform", (_SingleLevelFunction,), methods)

    def run(keyset, *args):
        if carries_tangents(args):
            if forward_mode is None:
                raise _no_forward_mode(name)
            return forward_mode(*_with_defaults(op, args))
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return _below_autograd(op, keyset, args)
        flat, structure = tree_flatten(list(_with_defaults(op, args)))
        call = _Call(keyset, structure, torch._C._are_functorch_transforms_active())
        if call.in_transform:
            with _one_level():
                results = of_one_level.apply(call, *flat)  # type: ignore[attr-defined]
        else:
            results = of_tensors.apply(call, *flat)  # type: ignore[attr-defined]
        return tree_unflatten(list(results), call.results)

    return run


def kernel_without_gradient(op: torch._ops.OpOverload) -> Callable:
    """The implementation at the Autograd key of an op that writes into its arguments: for gradients, without one."""
    name = op.overloadpacket.__name__

    def run(keyset, *args):
        if carries_tangents(args):
            raise _no_forward_mode(name)
        return _below_autograd(op, keyset, args)

    return run


def carries_tangents(args: Sequence[Any]) -> bool:
    """Whether a tensor in ``args`` carries a tangent of the innermost level of forward mode."""
    # A graph of ``torch.compile`` enters transforms, but not the level that Python counts.
    if forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active():
        return False
    return any(_tangent(leaf) is not None for leaf in tree_leaves(args))


def parted(args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """``args`` without tangents, and the tangents in their places, None where there is none."""
    return tree_map(_primal, list(args)), tree_map(_tangent, list(args))


def carrying(primal: Tensor, tangent: Tensor) -> Tensor:
    """``primal`` with a tangent."""
    return torch._VF._make_dual(primal, tangent.to(primal.dtype), level=_LEVEL)


def or_zeros(tangents: Any, primals: Any) -> Any:
    """``tangents`` with zeros of the primals in place of None."""
    if isinstance(primals, list):
        return [or_zeros(tangent, primal) for tangent, primal in zip(tangents, primals, strict=True)]
    return torch.zeros_like(primals) if tangents is None and primals is not None else tangents


def _primal(leaf: Any) -> Any:
    return torch._VF._unpack_dual(leaf, level=_LEVEL)[0] if isinstance(leaf, Tensor) else leaf


def _tangent(leaf: Any) -> Tensor | None:
    return torch._VF._unpack_dual(leaf, level=_LEVEL)[1] if isinstance(leaf, Tensor) else None


@contextlib.contextmanager
def _one_level() -> Iterator[None]:
    """A context in which a transform takes an ``autograd.Function`` for autograd of its own level."""
    functorch = torch._C._functorch
    before = functorch.get_single_level_autograd_function_allowed()
    functorch.set_single_level_autograd_function_allowed(True)
    try:
        yield
    finally:
        functorch.set_single_level_autograd_function_allowed(before)


@contextlib.contextmanager
def _outer_levels() -> Iterator[None]:
    """A context for what a transform calls at the levels around it: autograd has switched itself off for this level."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


def _no_forward_mode(name: str) -> NotImplementedError:
    rule = "forward-mode AD is not available, take the gradient in reverse mode (backward, torch.func.vjp)"
    return NotImplementedError(f"{name}: {rule}")


def _below_autograd(op: torch._ops.OpOverload, keyset: torch._C.DispatchKeySet, args: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _with_defaults(op: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[Any, ...]:
    """All arguments; the dispatcher drops trailing ones that equal their default."""
    return *args, *(argument.default_value for argument in op._schema.arguments[len(args) :])
