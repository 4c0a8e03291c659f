"""``declare``: a library's own operator computes what a call of one of torch's does, and is recognised as that."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from moeblaze_ops.arguments.validation import require, require_dtype
from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.operators import CALLS, operator_name
from moeblaze_ops.lowering.torch_internals.graphs import overload_of


def declare(op: Any, function: Callable, *examples: Sequence[Any]) -> None:
    """Let the rewriter take an operator of a library for the function of torch that it computes.

    An operator that is not torch's is opaque: a layer that goes through one is declined, and ``explain`` names it. What is
    declared holds for the process, and for all graphs that are compiled afterwards:

        declare(torch.ops.mylib.add_rows, lambda out, index, src: out.scatter_add(0, index, src), (out, index, src))

    Where a layer is rewritten, the operator goes with it. Where none is, it stays and runs.

    Args:
        op: the operator, ``torch.ops.mylib.add_rows`` or what ``torch.library.custom_op`` gave. It writes to none of its
            arguments, and gives one tensor.
        function: takes the arguments of ``op``, in order, and is one call of a function of torch or of a method of tensors.
            Constants may be added, and arguments stand in another order.
        examples: arguments to compare both for, one tuple or more, with all that makes a difference: indices that repeat, say.
            Tensors are not changed. Gradients are compared for floating tensors, for a random gradient of the result.

    Raises:
        TypeError: ``op`` is no operator.
        ValueError: ``op`` is torch's own, writes to an argument or has more results than one tensor; ``function`` is more
            than one call, or one that the rewriter knows nothing of; there is no example, or results or gradients of one
            differ by more than rounding (``torch.testing.assert_close``), in shape or in dtype.
    """
    overload = overload_of(op)
    require_dtype(overload is not None, "declare", "op", "be an operator of torch.library", repr(op))
    name, schema = overload.name().partition(".")[0], overload._schema
    require(overload.namespace not in ("aten", "prims", "moeblaze"), "declare", "op", "be of another library", name)
    gives_one = not schema.is_mutable and [str(result.type) for result in schema.returns] == ["Tensor"]
    require(gives_one, "declare", "op", "write to no argument and give one tensor", schema)
    call = _call_of(function, len(schema.arguments))
    rule = "be one call of a function of torch that the rewriter knows, with all arguments of the operator"
    require(call is not None, "declare", "function", rule, getattr(function, "__name__", repr(function)))
    require(bool(examples), "declare", "examples", "be one or more", "none")
    for example in examples:
        expected = _results(overload, example)
        try:
            torch.testing.assert_close(_results(function, example), expected, equal_nan=True)
        except Exception as error:  # also one of the function itself
            rule = "compute what the operator does, results and gradients"
            raise ValueError(f"declare: function must {rule}, got {type(error).__name__} ({error})") from error
    CALLS[name] = call


def _call_of(function: Callable, num_arguments: int) -> fx.Node | None:
    """The one call that a function makes, of all its arguments; None if it does anything else, or what has no form."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    arguments = [graph.placeholder(f"argument_{i}") for i in range(num_arguments)]
    try:
        result = function(*(fx.Proxy(argument, tracer) for argument in arguments))
    except Exception:  # it looks at numbers, or takes other arguments
        return None
    calls = list(graph.nodes)[num_arguments:]
    if not isinstance(result, fx.Proxy) or calls != [result.node] or set(result.node.all_input_nodes) != set(arguments):
        return None
    name = operator_name(result.node)
    return result.node if name in TABLE and not name.endswith("_") else None


def _results(run: Callable, example: Sequence[Any]) -> list[Tensor | None]:
    """What an operator gives for an example, and the gradient of each floating tensor in it."""
    own = tree_map(_leaf, tuple(example))
    result = run(*own)
    leaves = [leaf for leaf in tree_leaves(own) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves or not result.requires_grad:
        return [result.detach()]
    generator = torch.Generator(result.device).manual_seed(0)
    dresult = torch.randn(result.shape, dtype=result.dtype, device=result.device, generator=generator)
    return [result.detach(), *torch.autograd.grad(result, leaves, dresult, allow_unused=True)]


def _leaf(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value
