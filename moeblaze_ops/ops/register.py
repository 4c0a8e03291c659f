"""The ``moeblaze`` operator namespace: one call that registers everything a first-class op needs."""

import functools
import sys
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._library.triton import set_wrap_triton_enabled
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import register_flop_formula

from moeblaze_ops.arguments.separate_experts import (
    OneByOne,
    copied,
    empty_joined,
    joined,
    with_experts_joined,
    with_shapes_joined,
)
from moeblaze_ops.arguments.traced_activations import follow_in_dynamo
from moeblaze_ops.arguments.validation import require, require_dtype
from moeblaze_ops.arguments.validation_values import check_tensor
from moeblaze_ops.ops.autodiff import autograd_kernel, differentiated, kernel_without_gradient
from moeblaze_ops.ops.direct import register_direct

NAMESPACE = "moeblaze"

LAUNCHERS: dict[torch._ops.OpOverload, Callable[[], Callable]] = {}
"""What returns the CUDA implementation of an op that Inductor inlines, and what its lowering traces."""

PACKAGED: dict[torch._ops.OpOverload, torch._ops.OpOverload] = {}
"""What code of AOTInductor calls in place of an op with lists: it hands over None for an empty list."""

ON_CPU: dict[torch._ops.OpOverload, torch._ops.OpOverload] = {}
"""What Inductor's code calls on a CPU in place of an op: its implementation, of arguments that were checked as fakes."""

OVERWRITING: dict[torch._ops.OpOverload, tuple[int, Callable[[], Callable]]] = {}
"""Of an op that can write a result over an argument: the argument's position, and a launcher that does so."""

_on_trace: list[Callable[[], None]] = []

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_packaged = torch.library.Library(f"{NAMESPACE}_packaged", "FRAGMENT")
_on_cpu = torch.library.Library(f"{NAMESPACE}_cpu", "FRAGMENT")
_WITHOUT_STRIDES = ("Sparse", "SparseCsr", "NestedTensor", "Quantized")
_OTHERS = ("MkldnnCPU", "MPS", "XPU", "XLA", "HPU", "PrivateUse1")
_REFUSED = (*(kind + device for kind in _WITHOUT_STRIDES for device in ("CPU", "CUDA")), *_OTHERS)
"""Dispatch keys of tensors that no op takes."""

_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)


def on_trace(call: Callable[[], None], with_function: Callable[[], None]) -> None:
    """Have ``call`` called whenever a compiler traces an op: before it looks up a cache or lowers anything.

    ``with_function`` is called before Dynamo traces a call with an activation that is a function.
    """
    _on_trace.append(call)
    follow_in_dynamo(with_function)


def register_op(
    name: str,
    schema: str,
    *,
    fake: Callable,
    cpu: Callable,
    launcher: Callable[[], Callable] | None = None,
    kernel: str | None = None,
    check: Callable | None = None,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
    forward_mode: Callable | None = None,
    autocast: tuple[int, ...] = (),
    flops: Callable | None = None,
    inline: bool = True,
    overwriting: tuple[int, Callable[[], Callable]] | None = None,
) -> torch._ops.OpOverload:
    """Define ``moeblaze::<name>`` and register all of its behaviour.

    An op that writes into its arguments has no gradient: it is for gradients, which are not differentiated.

    Implementations and formulas see the experts of every weight joined (see ``separate_experts``), backward as they were given.

    Args:
        name: operator name inside the namespace.
        schema: arguments and returns, in the dispatcher's schema language.
        fake: metadata-only implementation; raises the same errors as the real ones.
        cpu: eager implementation on CPU tensors.
        launcher: returns the CUDA implementation; called at the first CUDA call, so that importing
            this package does not import Triton.
        kernel: in place of ``launcher``: module and name of the function below ``kernels`` that is the CUDA implementation.
        check: called with the op's name and its arguments before each implementation.
        backward: gradient formula; without one the op raises on backward (the ``*_backward`` ops).
        setup_context: what ``backward`` keeps.
        forward_mode: takes arguments that carry tangents of forward-mode AD, and returns results that do; without one
            the op raises on tangents.
        autocast: positions of the arguments that autocast casts. Routing weights are never cast.
        flops: flop formula from the argument shapes.
        inline: let Inductor put what the launcher does in place of the op; otherwise generated code calls the op.
        overwriting: the position of an argument, and the launcher to inline where its memory is the compiled graph's own:
            one that writes a result over it.
    """
    launcher = launcher or _launcher_of(kernel)
    unchecked_fake, unchecked_cpu, unchecked_launcher = fake, cpu, launcher
    if check is not None:
        fake, cpu, launcher = _checked(name, check, fake), _checked(name, check, cpu), _checked_later(name, check, launcher)
    # Without these tags Inductor may hand an op other strides than its fake implementation saw.
    _library.define(f"{name}{schema}", tags=_TAGS)
    qualname = f"{NAMESPACE}::{name}"
    op = getattr(torch.ops.moeblaze, name).default
    torch.library.register_fake(qualname, _announced(with_experts_joined(op, fake, empty_joined)), lib=_library)
    # What is not inlined is made of ops, and they take tensors.
    join_on_cpu = OneByOne if inline else joined
    _library.impl(name, with_experts_joined(op, cpu, join_on_cpu), "CPU")
    _library.impl(name, _cuda_implementation(lambda: with_experts_joined(op, launcher(), joined)), "CUDA")
    for key in _REFUSED:
        _library.impl(name, _refusal(op), key)
    if inline:
        LAUNCHERS[op] = lambda: with_experts_joined(op, launcher(), copied)
        _define_on_cpu(name, schema, op, unchecked_fake, unchecked_cpu)
    if overwriting is not None:
        position, overwriting_launcher = overwriting
        if check is not None:
            overwriting_launcher = _checked_later(name, check, overwriting_launcher)
        OVERWRITING[op] = position, lambda: with_experts_joined(op, overwriting_launcher(), copied)
    differentiate = None
    if not op._schema.is_mutable:
        _define_packaged(name, schema, op)
        differentiate = differentiated(name, backward or _no_double_backward(name), setup_context)
    above = kernel_without_gradient(op) if differentiate is None else autograd_kernel(op, differentiate, forward_mode)
    _library.impl(name, above, "Autograd", with_keyset=True)
    if check is not None:
        on_cpu = with_experts_joined(op, unchecked_cpu, join_on_cpu, check=False)
        on_cuda = _cuda_implementation(lambda: with_experts_joined(op, unchecked_launcher(), joined, check=False))
        register_direct(op, on_cpu, on_cuda, differentiate)
    if autocast:
        for device in ("CPU", "CUDA"):
            _library.impl(name, _autocast_implementation(op, device, autocast), f"Autocast{device}")
    torch.library.register_vmap(qualname, _no_vmap(name), lib=_library)
    if flops is not None:
        register_flop_formula(getattr(torch.ops.moeblaze, name))(with_shapes_joined(op, flops))
    return op


def register_plain_op(name: str, schema: str, real: Callable, fake: Callable, launches: bool = False) -> torch._ops.OpOverload:
    """Define ``moeblaze::<name>``, with one implementation for every device, and no gradient of its own.

    ``launches``: it launches kernels itself, on a GPU, of which no trace is to see any.
    """
    _library.define(f"{name}{schema}", tags=_TAGS)
    _library.impl(name, real, "CompositeExplicitAutograd")
    if launches:
        _library.impl(name, _cuda_implementation(lambda: real), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(torch.ops.moeblaze, name).default


def number_of_data() -> torch.SymInt:
    """A size of 0 or more that nobody knows before the op runs.

    Not ``new_dynamic_size``: frames may be captured without ops whose output shape depends on data, and these are ours.
    """
    context = torch.library.get_ctx()
    if context._shape_env is None:
        return context.new_dynamic_size(min=0)
    count = context._shape_env.create_unbacked_symint()
    torch._check(count >= 0)
    return count


def _launcher_of(kernel: str) -> Callable[[], Callable]:
    module, _, name = kernel.partition(":")
    return lambda: getattr(import_module(f"moeblaze_ops.kernels.{module}"), name)


def _checked(name: str, check: Callable, implementation: Callable) -> Callable:
    def run(*args):
        check(name, *args)
        return implementation(*args)

    return run


def _checked_later(name: str, check: Callable, launcher: Callable[[], Callable]) -> Callable[[], Callable]:
    return lambda: _checked(name, check, launcher())


def _define_packaged(name: str, schema: str, op: torch._ops.OpOverload) -> None:
    """Define the twin of ``op`` that takes None for an empty list, if ``op`` takes lists.

    AOTInductor's proxy executor leaves the argument of an empty list unset (pytorch/pytorch#194324).
    """
    lists = [i for i, argument in enumerate(op._schema.arguments) if isinstance(argument.type, torch.ListType)]
    if not lists:
        return

    def call(*args):
        return op(*([] if i in lists and arg is None else arg for i, arg in enumerate(args)))

    arguments, arrow, results = schema.partition("->")
    _packaged.define(f"{name}{arguments.replace('[] ', '[]? ')}{arrow}{results}", tags=_TAGS)
    _packaged.impl(name, call, "CompositeImplicitAutograd")
    PACKAGED[op] = getattr(torch.ops.moeblaze_packaged, name).default


def _define_on_cpu(name: str, schema: str, op: torch._ops.OpOverload, fake: Callable, cpu: Callable) -> None:
    """Define the twin of ``op`` for compiled code, where autograd, autocast and the checks of arguments are behind us.

    Python code calls its ``implementation``, what is not Python calls the twin.
    """
    _on_cpu.define(f"{name}{schema}", tags=_TAGS)
    torch.library.register_fake(f"{NAMESPACE}_cpu::{name}", with_experts_joined(op, fake, empty_joined), lib=_on_cpu)
    implementation = with_experts_joined(op, cpu, OneByOne, check=False)
    _on_cpu.impl(name, implementation, "CPU")
    ON_CPU[op] = getattr(torch.ops.moeblaze_cpu, name).default
    ON_CPU[op].implementation = _with_names(op, implementation)  # type: ignore[attr-defined]


def _with_names(op: torch._ops.OpOverload, function: Callable) -> Callable:
    """``function`` of the arguments of ``op``, whose last ones may come by name, or not at all where they have a default."""
    arguments = [(argument.name, argument.default_value) for argument in op._schema.arguments]

    def run(*args, **named):
        return function(*args, *(named.get(*argument) for argument in arguments[len(args) :]))

    return run


def _announced(fake: Callable) -> Callable:
    """``fake``, after the calls that are asked for by ``on_trace``."""

    @functools.wraps(fake)
    def run(*args, **kwargs):
        # AOTInductor traces an exported program without a context.
        if TracingContext.try_get() is not None or "torch._inductor.lowering" in sys.modules:
            for call in _on_trace:
                call()
        return fake(*args, **kwargs)

    return run


def _cuda_implementation(launcher: Callable[[], Callable]) -> Callable:
    launcher = functools.cache(launcher)

    def launch(*args):
        # Triton launches on the current device, whatever device its arguments are on.
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        with set_wrap_triton_enabled(False), torch.cuda.device(device):
            return launcher()(*args)

    return launch


def _autocast_implementation(op: torch._ops.OpOverload, device: str, positions: tuple[int, ...]) -> Callable:
    """Cast the arguments at ``positions`` to the autocast dtype, then run the op with autocast off.

    ``torch.library.register_autocast`` would cast every floating argument, routing weights included.
    """
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

    def cast(value):
        dtype = torch.get_autocast_dtype(device.lower())
        eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if eligible else value

    def run(*args):
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return op(*(tree_map(cast, arg) if i in positions else arg for i, arg in enumerate(args)))

    return run


def _refusal(op: torch._ops.OpOverload) -> Callable:
    """What runs for tensors that are not strided, or on a device without kernels: an error that names the argument."""
    name = op.overloadpacket.__name__

    def refuse(*args):
        for argument, value in zip(op._schema.arguments, args, strict=False):
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, Tensor):
                    check_tensor(name, argument.name, tensor)
                    require_dtype(not tensor.is_quantized, name, argument.name, "not be quantized (dequantize())", tensor.dtype)
                    require(
                        tensor.device.type in ("cpu", "cuda"), name, argument.name, "be on a CPU or a CUDA GPU", tensor.device
                    )

    return refuse


def _no_double_backward(name: str) -> Callable:
    def backward(ctx, *grads):
        raise NotImplementedError(f"{name}: the gradient of a gradient is not available, differentiate once (create_graph=False)")

    return backward


def _no_vmap(name: str) -> Callable:
    def vmap(info, in_dims, *args):
        raise NotImplementedError(f"{name}: vmap is not supported, fold the mapped axis into the tokens")

    return vmap
