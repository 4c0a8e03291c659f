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
from torch.utils._pytree import tree_leaves, tree_map

_LEVEL = 0
"""PyTorch's only level of forward mode; transforms nest by wrapping tensors instead."""

_Counts = list[int | None]
"""Of arguments or results, how many tensors each list among them has; None for what is no list."""


@dataclass
class _Call:
    """One call of an op: what computes its results, and how its arguments and results hold tensors."""

    function: Callable
    arguments: _Counts
    results: _Counts | None = None


def differentiated(name: str, gradient: Callable, setup_context: Callable | None) -> Callable:
    """``run(function, args)``, which is ``function(*args)`` with results that autograd knows the gradient of.

    Args:
        name: of the op that ``function`` computes.
        gradient, setup_context: as for ``torch.library.register_autograd``.
    """

    def forward(ctx, call, *flat):
        args = _in_lists(flat, call.arguments)
        results = call.function(*args)
        if setup_context is not None:
            setup_context(ctx, args, results)
        flat_results, call.results = _flat(results if isinstance(results, tuple) else (results,))
        # Not the function: it may hold tensors, and would until backward.
        ctx.arguments, ctx.results = call.arguments, call.results
        return tuple(flat_results)

    def backward(ctx, *grads):
        # Where a compiled function calls backward of what ran in eager mode, Dynamo would trace this, and cannot.
        return (torch.compiler.disable(formula) if torch.compiler.is_dynamo_compiling() else formula)(ctx, *grads)

    def formula(ctx, *grads):
        needed = ctx.needs_input_grad
        ctx.needs_input_grad = _in_lists(needed[1:], ctx.arguments)
        try:
            results = gradient(ctx, *_in_lists(grads, ctx.results))
        finally:
            ctx.needs_input_grad = needed
        flat, counts = _flat(results if isinstance(results, tuple) else (results,))
        assert counts == ctx.arguments, f"{name}: gradients {counts} of arguments {ctx.arguments}"
        return None, *flat

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    of_tensors = type(f"{name}_gradient", (torch.autograd.Function,), methods)
    of_one_level = type(f"{name}_gradient_in_transform", (_SingleLevelFunction,), methods)

    def run(function: Callable, args: Sequence[Any]) -> Any:
        flat, counts = _flat(args)
        call = _Call(function, counts)
        if torch._C._are_functorch_transforms_active():
            call.function = _in_outer_levels(function)
            with _one_level():
                results = of_one_level.apply(call, *flat)  # type: ignore[attr-defined]
        else:
            results = of_tensors.apply(call, *flat)  # type: ignore[attr-defined]
        results = _in_lists(results, call.results)
        return results if len(results) > 1 else results[0]

    return run


def autograd_kernel(op: torch._ops.OpOverload, differentiate: Callable, forward_mode: Callable | None) -> Callable:
    """The implementation of ``op`` at the dispatcher's Autograd key; it takes the dispatch keys, then the arguments.

    Args:
        op: an op without arguments by keyword only.
        differentiate: what ``differentiated`` made for it.
        forward_mode: takes arguments of ``op`` that carry tangents, and returns results that carry theirs; None where
            forward mode is not available, which raises NotImplementedError.
    """
    name = op.overloadpacket.__name__
    complete = with_defaults(op)

    def run(keyset, *args):
        if carries_tangents(args):
            if forward_mode is None:
                raise _no_forward_mode(name)
            return forward_mode(*complete(args))
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return _below_autograd(op, keyset, args)
        return differentiate(lambda *args: _below_autograd(op, keyset, args), complete(args))

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
    """True if a tensor in ``args`` carries a tangent of the innermost level of forward mode."""
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


def _in_outer_levels(function: Callable) -> Callable:
    """``function`` as a transform calls it at the levels around it: autograd has switched itself off for this level."""

    def run(*args: Any) -> Any:
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return function(*args)

    return run


def _no_forward_mode(name: str) -> NotImplementedError:
    rule = "forward-mode AD is not available, take the gradient in reverse mode (backward, torch.func.vjp)"
    return NotImplementedError(f"{name}: {rule}")


def _below_autograd(op: torch._ops.OpOverload, keyset: torch._C.DispatchKeySet, args: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def with_defaults(op: torch._ops.OpOverload) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that completes arguments; the dispatcher drops trailing ones that equal their default."""
    defaults = tuple(argument.default_value for argument in op._schema.arguments)
    return lambda args: (*args, *defaults[len(args) :])


def _flat(values: Sequence[Any]) -> tuple[list[Any], _Counts]:
    """All values with those in lists, one after another, and the counts that ``_in_lists`` takes."""
    flat: list[Any] = []
    counts: _Counts = []
    for value in values:
        if isinstance(value, list | tuple):
            flat += value
            counts.append(len(value))
        else:
            flat.append(value)
            counts.append(None)
    return flat, counts


def _in_lists(flat: Sequence[Any], counts: _Counts) -> tuple[Any, ...]:
    values: list[Any] = []
    start = 0
    for count in counts:
        values.append(flat[start] if count is None else list(flat[start : start + count]))
        start += count or (count is None)
    return tuple(values)
