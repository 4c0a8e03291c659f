"""Inductor: lowerings, rewrites and the order of what it generates.

It takes seconds to import, so functions here import it when they are called: a process that only switches rewriting on has not
paid for it yet.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import fx

from moeblaze_ops.lowering import patches


def inductor_is_loaded() -> bool:
    """True if Inductor's lowerings are imported, as they are from the first graph that it compiles."""
    return "torch._inductor.lowering" in sys.modules


def register_lowering(op: torch._ops.OpOverload, lower: Callable) -> None:
    """Let ``lower`` turn calls of ``op`` into Inductor IR, with its arguments as they are."""
    from torch._inductor.lowering import register_lowering

    register_lowering(op, type_promotion_kind=None)(lower)


def register_visit(op: torch._ops.OpOverload, visit: Callable[[fx.Node], Any], *, joint: bool = True) -> None:
    """Show each call of ``op`` to ``visit`` once autograd is done, before Inductor joins sums and products.

    With ``joint`` they are those of one graph of forward and backward, before Inductor partitions it.
    """
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.pattern_matcher import CallFunctionVarArgs, register_graph_pattern

    passes = joint_graph.patterns if joint else post_grad.pass_patterns[1]
    register_graph_pattern(CallFunctionVarArgs(op), pass_dict=passes)(lambda match, *_, **__: visit(match.output_node()))


def launch_nothing_for_no_rows() -> None:
    """Let kernels over two axes be launched for a number of rows that only a run knows and that is 0.

    Inductor of torch 2.11 divides by it; a rank that sends no token to any expert would raise.
    """

    def generate(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if "== 0" not in self.y_grid:
            is_python = self.mode == "python"
            self.y_grid = (
                f"(0 if y_grid_div_ == 0 else {self.y_grid})" if is_python else f"(y_grid_div_ == 0 ? 0 : {self.y_grid})"
            )

    patches.install("launches", {"Grid2DWithYZOverflow.generate": generate})


def keep_order_of_talk(ops: tuple[torch._ops.OpOverload, ...]) -> None:
    """Let collectives, and ``ops`` in which ranks wait for each other, run in the order of the graph.

    Inductor chooses an order by the memory that it takes with the sizes of this rank, and ranks have different sizes.
    """
    from torch._inductor import ir

    def is_talk(operation: Any) -> bool:
        op = getattr(operation, "op_overload", None)
        if isinstance(op, torch._ops.OpOverload) and op.namespace == "_c10d_functional":  # mode="lite" makes no kernel of it
            return op is not torch.ops._c10d_functional.wait_tensor.default
        return op in ops or (isinstance(operation, ir._CollectiveKernel) and not isinstance(operation, ir._WaitKernel))

    def update(original: Callable, self: Any) -> None:
        _keep_order(self, filter(is_talk, self.operations))
        original(self)

    patches.install("order", {"GraphLowering._update_scheduler": update})


def _keep_order(graph: Any, operations: Iterable) -> None:
    previous: list[str] = []
    for operation in operations:
        graph.additional_buffer_deps[operation.get_operation_name()].update(previous)
        previous = [buffer.get_name() for buffer in operation.get_outputs()] or previous


def _graph() -> Any:
    """The graph that is being lowered."""
    from torch._inductor.virtualized import V

    return V.graph


def _lowered(lower: Callable[[], Any]) -> tuple[Any, list]:
    """What ``lower()`` gives, and the operations that it adds to the graph.

    Ops that have a Python function as ``op.implementation`` are called as that by the generated code. Where the code is C++, or a
    graph, the ops are called.
    """
    from torch._inductor import ir

    num_before = len(_graph().operations)
    results = lower()
    added = _graph().operations[num_before:]
    if not (_graph().cpp_wrapper or _graph().fx_wrapper):
        for operation in added:
            if isinstance(operation, ir.FallbackKernel) and hasattr(operation.op_overload, "implementation"):
                operation.set_python_kernel_name(None)
                operation.set_python_kernel_name(f"{operation.python_kernel_name}.implementation")
    return results, added


def fallback(op: torch._ops.OpOverload, *, gives_none: bool = False) -> Callable:
    """The lowering that calls ``op`` from the generated code, or its ``implementation`` where it has one.

    ``gives_none``: the implementation may return None in place of each tensor.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler

    handler = fallback_handler(op, add_to_fallback_set=False)

    def call(*args, **kwargs):
        results, added = _lowered(lambda: handler(*args, **kwargs))
        for operation in added if gives_none else ():
            if isinstance(operation, ir.MultiOutput):
                operation.skip_size_stride_alignment_checks = True
        return results

    return call


def call_for_its_effect(op: torch._ops.OpOverload, *args: Any) -> None:
    """Let the generated code call an op although nobody reads what it gives."""
    fallback(op)(*args)
    _graph().operations[-1].has_side_effects = lambda: True


def makes_cuda_graphs() -> bool:
    """True if the graph that Inductor compiles runs in CUDA graphs."""
    return inductor_config.triton.cudagraphs


def may_return_nothing() -> bool:
    """True if code that is about to be generated may return None in place of a tensor, and write to memory that it is not given.

    Code in C++ has handles of tensors. A CUDA graph would write to the memory of its capture for ever.
    """
    from torch._inductor.virtualized import V

    code_in_cpp = inductor_config.cpp_wrapper or getattr(inductor_config, "fx_wrapper", False)
    return not code_in_cpp and not V.aot_compilation and not inductor_config.triton.cudagraphs


def is_packaging() -> bool:
    """True if the graph that is being lowered is for AOTInductor."""
    return _graph().aot_mode


def current_node() -> fx.Node:
    """The node of the graph that is being lowered."""
    return _graph().current_node


def is_given_away(node: fx.Node, value: Any) -> bool:
    """True if the lowering of the only user of ``node``, ``value`` in Inductor's IR, may write into its memory.

    So it is for what forward saved for this backward graph and for nobody else. A graph with such inputs raises when it is
    asked to keep them (``retain_graph=True``): backward runs once.
    """
    from torch._inductor import ir

    return len(node.users) == 1 and isinstance(getattr(getattr(value, "data", None), "data", None), ir.DonatedBuffer)


def trace(function: Callable, fakes: list) -> fx.GraphModule:
    """``function`` as a graph of ATen ops and kernel launches, traced on these fake tensors and symbolic sizes."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    # Without the table Inductor finds ops that have "both a fallback and a decomp".
    with V.fake_mode:
        return make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="real")(*fakes)


def inline(graph: fx.GraphModule, inputs: list, name: str, in_order: bool = False) -> Any:
    """The outputs of ``graph`` on Inductor values, lowered node by node into the graph being compiled.

    ``in_order``: calls and kernels that are not Inductor's own run in the order of ``graph``; it moves them elsewhere, to save
    memory.
    """
    from torch._inductor import ir
    from torch._inductor.codegen.subgraph import inline_subgraph_to_ir_nodes

    boxes = [ir.TensorBox.create(value) if isinstance(value, ir.StorageBox) else value for value in inputs]
    outputs, added = _lowered(lambda: inline_subgraph_to_ir_nodes(graph, boxes, name))
    if in_order:
        _keep_order(_graph(), (each for each in added if isinstance(each, ir.ExternKernel)))
    return outputs
