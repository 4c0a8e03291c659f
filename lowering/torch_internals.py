"""The private parts of torch.compile that the project stands on, and what differs in them from torch 2.11 to 2.15.

No other file imports ``torch._inductor``, and ``torch._dynamo`` only what follows it while it traces (`tracing`). Inductor
itself takes seconds to import, so functions here import it when they are called: a process that only switches rewriting on
has not paid for it yet.
"""

import builtins
import contextlib
import copy
import functools
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
from torch import fx, nn
from torch._dynamo import convert_frame, exc
from torch._dynamo.backends import registry
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.eval_frame import (
    _debug_get_cache_entry_list,
    cached_backends,
    innermost_backend,
    reset_code,
    set_code_exec_strategy,
    skip_code,
)
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy

from moeblaze_ops.lowering import patches

__all__ = [
    "counters",
    "dynamo_config",
    "inductor_config",
]

_STANDARD_LIBRARY = os.path.dirname(operator.__file__)

_looked_at_again = convert_frame.Tracker()
_seen_frames: ContextVar[list[CodeType] | None] = ContextVar("moeblaze_seen_frames", default=None)
_compiled_module: ContextVar[nn.Module | None] = ContextVar("moeblaze_compiled_module", default=None)


def overload_of(op: Any) -> torch._ops.OpOverload | None:
    """The overload of an operator that has one, also of what ``torch.library.custom_op`` gave; None for anything else."""
    if isinstance(op, torch.library.CustomOpDef):
        op = op._opoverload
    if isinstance(op, torch._ops.OpOverloadPacket) and len(op.overloads()) == 1:
        op = getattr(op, *op.overloads())
    return op if isinstance(op, torch._ops.OpOverload) else None


def marked_dynamic(placeholder: fx.Node) -> set[int]:
    """The axes of an input of Dynamo's graph that ``torch._dynamo.mark_dynamic`` was called for: a guard on one is an error."""
    argument = placeholder.meta.get("grapharg")
    return getattr(None if argument is None else argument.example, "_dynamo_dynamic_indices", set())


def install_key_hook(stamp: Callable[[Iterable[torch.device]], str]) -> None:
    """Make ``stamp(devices)`` part of the keys of the FX and AOTAutograd caches of graphs with inputs on these devices.

    AOTAutograd's details of a graph are a subclass of Inductor's, and all of their attributes are in the key. No setting of
    torch would do: one that the user replaces by ``options=``, or that backward is compiled without in a thread of autograd,
    is lost.
    """

    def replacement(original):
        @functools.wraps(original)
        def __init__(self, gm, example_inputs, *args, **kwargs):
            original(self, gm, example_inputs, *args, **kwargs)
            self.moeblaze = stamp({tensor.device for tensor in example_inputs if isinstance(tensor, torch.Tensor)})

        return __init__

    patches.install("keys", {"FxGraphHashDetails.__init__": replacement})
    if patches.why_off("keys"):
        # As its environment variable does, in all threads.
        torch.compiler.config._config["force_disable_caches"].env_value_force = True


def keep_graphs_with_functions_of(package: str) -> None:
    """Let AOTAutograd's cache take graphs that call Python functions of a package whose sources are in the keys.

    ``unsafe_marked_cacheable_functions`` is lost like any setting.
    """

    def replacement(original):
        @functools.wraps(original)
        def check_node_safe(node):
            is_ours = node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith(f"{package}.")
            if not is_ours:
                original(node)

        return check_node_safe

    patches.install("cacheable", {"autograd_cache.check_node_safe": replacement})


@functools.cache
def install_graph_hook(prepare: Callable[[fx.GraphModule], None]) -> None:
    """Call ``prepare(gm)`` for each graph that reaches Inductor, before it is looked up in a cache, from now on."""

    def replacement(original):
        @functools.wraps(original)
        def compile_fx_main(model, *args, **kwargs):
            if isinstance(model, fx.GraphModule):
                prepare(model)
            return original(model, *args, **kwargs)

        return compile_fx_main

    patches.install("graphs", {"compile_fx._compile_fx_main": replacement})


@dataclass(frozen=True)
class Frame:
    """A Python frame that Dynamo is about to compile."""

    code: CodeType
    backend: Callable
    export: bool

    @property
    def where(self) -> str:
        return f"{self.code.co_name} ({self.code.co_filename}:{self.code.co_firstlineno})"


def install_frame_hook(
    hook: Callable[[Callable[[CodeType], Any], Frame], Any], around: Callable[[Callable, Callable], Callable]
) -> None:
    """Let ``hook(compile_frame, frame)`` compile every frame from now on, by calling ``compile_frame(frame.code)``.

    It may pass other code with the same arguments and cells. Graphs go to ``around(backend, asked_for)``: what compiles them,
    and the backend that the user asked for.

    ``torch.compile`` has no public hook that runs before a frame is traced and knows its backend: a backend is called
    with finished graphs, attributes of a backend given by name are not looked at, and ``torch._dynamo.reset`` clears
    the compile callbacks. ``compile_frame`` has kept its signature from torch 2.11 to 2.15.
    """

    def replacement(original):
        signature = inspect.signature(original)

        @functools.wraps(original)
        def compile_frame(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            arguments = bound.arguments
            backend = _asked_for(arguments["compiler_fn"])
            arguments["compiler_fn"] = _in_place_of(arguments["compiler_fn"], around(arguments["compiler_fn"], backend))
            code = arguments["code"]
            seen = _seen_frames.get()
            if seen is not None and not _debug_get_cache_entry_list(code):
                seen.append(code)

            def compile_code(code: CodeType) -> Any:
                arguments["code"] = code
                return original(*bound.args, **bound.kwargs)

            given = (arguments["locals"].get(name) for name in ("self", "fn"))  # "fn" where Dynamo wraps a module of torch's own
            token = _compiled_module.set(next((value for value in given if isinstance(value, nn.Module)), None))
            try:
                return hook(compile_code, Frame(code, backend, arguments.get("export", False)))
            finally:
                _compiled_module.reset(token)

        return compile_frame

    patches.install("frames", {"convert_frame.compile_frame": replacement})


def run_as_written(function: Callable, *, calls_as_well: bool) -> None:
    """Let Dynamo compile no frame of ``function`` from now on, nor what it calls; it still traces a call of it in a frame.

    ``torch.compiler.disable`` would break the graph of that frame.
    """
    if calls_as_well:
        set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    else:
        skip_code(function.__code__)


def trace_alone(function: Callable, backend: Callable) -> None:
    """Let Dynamo trace a function without arguments while it compiles a frame, and give the graph to ``backend``.

    Modes of torch functions that the program is in do not hold for it, and counters stay as they are.
    """
    from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr as modes

    compile_frame, names, entered = inspect.unwrap(convert_frame.compile_frame), dict(function.__globals__), modes.stack
    modes.stack = []
    try:
        with counting_breaks(), contextlib.ExitStack() as without:
            for _ in range(torch._C._len_torch_function_stack()):  # torch 2.11 reads them here
                without.enter_context(torch.overrides._pop_mode_temporarily())
            compile_frame(function.__code__, names, {}, vars(builtins), (), backend, True, set())
    finally:
        modes.stack = entered


def compiled_module() -> nn.Module | None:
    """The module whose function is being compiled."""
    return _compiled_module.get()


def running_module() -> nn.Module | None:
    """The innermost module of which a function runs in this thread."""
    return next(_modules_on_stack(), None)


def name_among_callers(module: nn.Module) -> str:
    """The name of a module in the outermost one that calls it; without a name if that is itself."""
    names = (_name_in(outer, module) for outer in reversed([*_modules_on_stack()]))
    return next((name for name in names if name is not None), "")


def _modules_on_stack() -> Iterator[nn.Module]:
    frame = inspect.currentframe()
    while frame is not None:
        if (module := _module_of(frame)) is not None:
            yield module
        frame = frame.f_back


def _name_in(outer: nn.Module, module: nn.Module) -> str | None:
    """The name of a module in another: blocks are found before what is inside of them is looked at."""
    level, seen = {"": outer}, {outer}
    while level:
        if (name := next((name for name, each in level.items() if each is module), None)) is not None:
            return name
        below = [(f"{name}.{part}".lstrip("."), child) for name, each in level.items() for part, child in each.named_children()]
        level = {name: child for name, child in below if child not in seen}
        seen.update(level.values())
    return None


def is_of_module(placeholder: fx.Node) -> bool:
    """True if an input of Dynamo's graph is a parameter or a buffer of a module: another one where another module calls."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    return source is not None and (source.guard_source.is_unspecialized_nn_module() or source.guard_source.is_fsdp_module())


def after_call(then: Callable[[], None]) -> None:
    """Call ``then``, once, when the outermost call of a compiled function in this thread ends; now if there is none."""
    call = _outermost_call()
    if call is None:
        then()
    elif then not in (cleanups := call.f_locals["cleanups"]):
        cleanups.append(then)


def _outermost_call() -> FrameType | None:
    """The frame of Dynamo in which a function of ``torch.compile`` was called; at its end it calls what is in ``cleanups``."""
    found, frame = None, inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and "cleanups" in frame.f_locals:
            found = frame
        frame = frame.f_back
    return found


def _in_place_of(original: Callable, backend: Callable) -> Callable:
    """``backend`` as something that Dynamo takes for ``original``: with its attributes, which name the backend inside."""
    if backend is not original:
        vars(backend).update(getattr(original, "__dict__", {}))
        backend._torchdynamo_orig_backend = original
    return backend


def _asked_for(backend: Callable) -> Callable:
    """The backend that the user asked for, inside of what Dynamo wraps around it."""
    backend = innermost_backend(backend)
    optimizer = getattr(backend, "__self__", None)
    return innermost_backend(optimizer.backend_compile_fn) if isinstance(optimizer, DDPOptimizer) else backend


def places(node: fx.Node) -> list[tuple[str, int, str]]:
    """File, line and function of every call on the stack under which a node was traced, outermost first.

    Python's own library is left out: from torch 2.15 on the additions of ``sum`` are traced in ``operator.py``.
    """
    found = re.findall(r'File "(.+)", line (\d+), in (.+)', node.meta.get("stack_trace") or "")
    return [(file, int(line), function) for file, line, function in found if os.path.dirname(file) != _STANDARD_LIBRARY]


@dataclass(frozen=True)
class CallPath:
    """Functions that call each other, outermost first, each as file, line and name; and the ids of modules among them.

    Functions of torch and of Python's library are left out. What remains of a function after a graph break is that function.
    """

    calls: tuple[tuple[str, int, str], ...]
    modules: frozenset[int]


def path_of(node: fx.Node) -> CallPath:
    """Where a node was traced."""
    return _call_path(places(node), node.meta.get("nn_module_stack") or ())


def path_of_tracer(tx: Any) -> CallPath:
    """Where Dynamo's ``tx`` is in what it traces."""
    calls, modules = [], tx.nn_module_stack
    while tx is not None:
        calls.append((tx.f_code.co_filename, tx.lineno, tx.f_code.co_name))
        tx = tx.parent
    return _call_path(reversed(calls), modules)


def path_to(code: CodeType) -> CallPath:
    """How the function came to be called whose frame is compiled now; it is the last one, where it begins, or is resumed."""
    frame, calls, modules = inspect.currentframe(), [], set()
    while frame is not None and not _is_of_torch(frame.f_code.co_filename):  # our hooks
        frame = frame.f_back
    while frame is not None:
        if not _is_of_torch(frame.f_code.co_filename):
            calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            modules.add(id(_module_of(frame)))
        frame = frame.f_back
    return _call_path([*reversed(calls), (code.co_filename, code.co_firstlineno, code.co_name)], modules)


def _module_of(frame: FrameType) -> nn.Module | None:
    """The module that a method runs for. Up to Python 3.12 a frame keeps values that were asked for: they would live as long."""
    code = frame.f_code
    if "self" in code.co_varnames[: code.co_argcount]:
        name = "self"
    elif "fn" in code.co_freevars:
        name = "fn"  # where Dynamo wraps a module of torch's own
    else:
        return None
    values = frame.f_locals
    own = values.get(name)
    if isinstance(values, dict):
        values.clear()
    return own if isinstance(own, nn.Module) else None


def is_resumed(code: CodeType) -> bool:
    """Whether it is what remains of a function after a graph break."""
    return _RESUMES.match(code.co_name) is not None


_RESUMES = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+$")


def _is_of_torch(file: str) -> bool:
    return file.startswith(os.path.dirname(torch.__file__) + os.sep)


def _call_path(calls: Iterable[tuple[str, int, str]], modules: Iterable[str | int]) -> CallPath:
    kept: list[tuple[str, int, str]] = []
    for file, line, name in calls:
        if _is_of_torch(file) or os.path.dirname(file) == _STANDARD_LIBRARY:
            continue
        if (resumes := _RESUMES.match(name)) is not None:
            name = resumes[1]
            if kept and (kept[-1][0], kept[-1][2]) == (file, name):
                kept.pop()  # the function itself, which calls what remains of it
        kept.append((file, line, name))
    ids = (str(module).partition("@")[0] for module in modules)
    return CallPath(tuple(kept), frozenset(int(own) for own in ids if own.isdigit()))


def says_no_ops(error: Exception) -> bool:
    """Whether Dynamo gave a frame up for having no tensor operations in it."""
    return isinstance(error, exc.SkipFrame) and str(error).startswith("No ops traced")


def place_of(error: Exception) -> str:
    """``file:line`` of the user's code that Dynamo could not trace, or nothing."""
    stack = getattr(error, "real_stack", None) or ()
    own = [frame for frame in stack if not _is_of_torch(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def ends_in_break(gm: fx.GraphModule) -> bool:
    """Whether a graph that Dynamo captured stops before the end of its frame."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and reason.graph_break


def resumes(compiled: Any) -> bool:
    """Whether the bytecode that a frame was compiled to calls what remains of the frame, after a graph break."""
    bytecode = compiled.bytecode
    parts = [constant.co_name for constant in bytecode.co_consts if isinstance(constant, CodeType)]
    return any("resume_at" in name or "resume_in" in name for name in (*bytecode.co_names, *parts))


def look_again() -> None:
    """Let Dynamo look once more at the frames of which it compiled nothing: what breaks a plain graph may be captured now."""
    for reference in list(convert_frame.input_codes.seen):
        code = reference()
        if code is not None and code not in _looked_at_again and not _debug_get_cache_entry_list(code):
            _looked_at_again.add(code)
            reset_code(code)


@contextlib.contextmanager
def forgetting_frames(backend: Callable) -> Iterator[None]:
    """A context after which Dynamo knows neither ``backend`` nor the frames that this thread first showed it inside."""
    seen: list[CodeType] = []
    token = _seen_frames.set(seen)
    try:
        yield
    finally:
        _seen_frames.reset(token)
        for code in seen:
            reset_code(code)
        for number in [number for number, kept in list(cached_backends.items()) if compiler_of(kept) is backend]:
            del cached_backends[number]


@contextlib.contextmanager
def counting_breaks() -> Iterator[list[str]]:
    """A context that collects the reasons of graph breaks, and leaves Dynamo's counters as they were."""
    reasons: list[str] = []
    forget = counted_since()
    counters.clear()
    try:
        yield reasons
    finally:
        reasons.extend(counters["graph_break"])
        forget()


def counted_since() -> Callable[[], None]:
    """A function that sets Dynamo's counters back to what they are now."""
    before = copy.deepcopy(counters)

    def forget() -> None:
        counters.clear()
        counters.update(before)

    return forget


def breaks_since() -> Callable[[], list[str]]:
    """A function that says why graphs have broken since it was made."""
    before = dict(counters.get("graph_break", {}))
    return lambda: [reason for reason, count in counters.get("graph_break", {}).items() if count > before.get(reason, 0)]


def restarts(error: Exception) -> bool:
    """Whether an error says that Dynamo is to trace the frame once more."""
    return isinstance(error, exc.RestartAnalysis)


def register_backend(backend: Callable, name: str) -> None:
    """Register ``backend`` by name, unless its entry point is known: then ``lookup_backend`` registers what it loads."""
    if name not in registry._BACKENDS:
        registry.register_backend(backend, name=name)


def compiler_of(backend: Callable) -> Callable:
    """The function behind what ``torch.compile`` makes of its ``backend`` argument."""
    return getattr(backend, "compiler_fn", backend)


def is_inductor(backend: Callable) -> bool:
    """Whether a backend is Inductor, with ``options`` and ``mode`` or without."""
    return type(backend) is torch._TorchCompileInductorWrapper or backend is registry._COMPILER_FNS.get("inductor")


def inductor_backend(mode: str | None, options: Mapping[str, Any] | None, **keywords: Any) -> Callable:
    """Inductor as ``torch.compile(mode=mode, options=options)`` would make it."""
    return torch._TorchCompileInductorWrapper(mode, options, None, **keywords)


def inductor_is_loaded() -> bool:
    """Whether Inductor's lowerings are imported, as they are from the first graph that it compiles."""
    return "torch._inductor.lowering" in sys.modules


def register_lowering(op: torch._ops.OpOverload, lower: Callable) -> None:
    """Let ``lower`` turn calls of ``op`` into Inductor IR, with its arguments as they are."""
    from torch._inductor.lowering import register_lowering

    register_lowering(op, type_promotion_kind=None)(lower)


def register_rewrite(op: torch._ops.OpOverload, rewrite: Callable[[fx.Node], bool], *, joint: bool = False) -> None:
    """Offer each call of ``op`` on two values to ``rewrite``; when, see ``_offer``."""
    from torch._inductor.pattern_matcher import Arg, CallFunction

    _offer(CallFunction(op, Arg(), Arg()), rewrite, joint)


def register_visit(op: torch._ops.OpOverload, visit: Callable[[fx.Node], None], *, joint: bool = True) -> None:
    """Show each call of ``op``, of whatever arguments, to ``visit``; when, see ``_offer``."""
    from torch._inductor.pattern_matcher import CallFunctionVarArgs

    _offer(CallFunctionVarArgs(op), visit, joint)


def _offer(calls: Any, take: Callable[[fx.Node], Any], joint: bool) -> None:
    """Give calls to ``take`` once autograd is done, before Inductor joins sums and products.

    With ``joint`` they are those of one graph of forward and backward, before Inductor partitions it.
    """
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.pattern_matcher import register_graph_pattern

    passes = joint_graph.patterns if joint else post_grad.pass_patterns[1]
    register_graph_pattern(calls, pass_dict=passes)(lambda match, *_, **__: take(match.output_node()))


def launch_nothing_for_no_rows() -> None:
    """Let kernels over two axes be launched for a number of rows that only a run knows and that is 0.

    Inductor of torch 2.11 divides by it; a rank that sends no token to any expert would raise.
    """

    def replacement(original):
        @functools.wraps(original)
        def generate(self, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if "== 0" not in self.y_grid:
                is_python = self.mode == "python"
                self.y_grid = (
                    f"(0 if y_grid_div_ == 0 else {self.y_grid})" if is_python else f"(y_grid_div_ == 0 ? 0 : {self.y_grid})"
                )

        return generate

    patches.install("launches", {"Grid2DWithYZOverflow.generate": replacement})


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

    def replacement(original):
        @functools.wraps(original)
        def update(self: Any) -> None:
            _keep_order(self, filter(is_talk, self.operations))
            original(self)

        return update

    patches.install("order", {"GraphLowering._update_scheduler": replacement})


def _keep_order(graph: Any, operations: Iterable) -> None:
    previous: list[str] = []
    for operation in operations:
        graph.additional_buffer_deps[operation.get_operation_name()].update(previous)
        previous = [buffer.get_name() for buffer in operation.get_outputs()] or previous


def before_partition(visit: Callable[[fx.Graph], None]) -> None:
    """Show ``visit`` each graph of forward and backward, whatever its backend, before what backward finds is chosen."""

    def replacement(original):
        @functools.wraps(original)
        def classify(joint_module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            visit(joint_module.graph)
            return original(joint_module, *args, **kwargs)

        return classify

    patches.install("repeats", {"partitioners.classify_nodes": replacement})


def may_be_repeated(node: fx.Node) -> bool:
    """Whether the partitioner may compute a node of forward again in backward, although it is dear."""
    settings = torch._functorch.config
    return node.meta.get("recompute") is not None or settings.activation_memory_budget < 1 or settings.aggressive_recomputation


def keep_for_backward(node: fx.Node) -> None:
    """Let the partitioner save what backward needs of a node, and never compute it again."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def repeat_in_backward(node: fx.Node) -> None:
    """Let the partitioner compute a node of forward again for backward, and keep nothing of it; a user's own policy stays."""
    if node.meta.get("recompute") is None:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = _LAST_REGION


_LAST_REGION = 1 << 30
"""The partitioner keeps what a region of checkpointing hands to a later one: no region is later than this."""


def fallback(op: torch._ops.OpOverload) -> Callable:
    """The lowering that calls ``op`` from the generated code, or its ``implementation`` where it has one."""
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    handler = fallback_handler(op, add_to_fallback_set=False)

    def call(*args, **kwargs):
        num_before = len(V.graph.operations)
        results = handler(*args, **kwargs)
        _call_implementations(V.graph.operations[num_before:])
        return results

    return call


def for_its_effect(op: torch._ops.OpOverload) -> Callable:
    """``fallback`` of an op that is called although nobody reads what it gives."""
    from torch._inductor.virtualized import V

    def call(*args) -> None:
        fallback(op)(*args)
        V.graph.operations[-1].has_side_effects = lambda: True

    return call


def makes_cuda_graphs() -> bool:
    """Whether the graph that Inductor compiles runs in CUDA graphs."""
    return inductor_config.triton.cudagraphs


def _call_implementations(operations: list) -> None:
    """Have what is called in place of ops called by the generated code, as ``op.implementation``: a Python function.

    Where the code is C++, or a graph, the ops are called.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if V.graph.cpp_wrapper or V.graph.fx_wrapper:
        return
    for operation in operations:
        if isinstance(operation, ir.FallbackKernel) and hasattr(operation.op_overload, "implementation"):
            operation.set_python_kernel_name(None)
            operation.set_python_kernel_name(f"{operation.python_kernel_name}.implementation")


def may_return_nothing() -> bool:
    """True if code that is about to be generated may return None in place of a tensor, and write to memory that it is not given.

    Code in C++ has handles of tensors. A CUDA graph would write to the memory of its capture for ever.
    """
    from torch._inductor.virtualized import V

    code_in_cpp = inductor_config.cpp_wrapper or getattr(inductor_config, "fx_wrapper", False)
    return not code_in_cpp and not V.aot_compilation and not inductor_config.triton.cudagraphs


def results_may_be_none(op: torch._ops.OpOverload) -> Callable:
    """The lowering that calls ``op.implementation``, which may return None in place of each tensor, from the generated code."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    call_op = fallback(op)

    def call(*args, **kwargs):
        num_before = len(V.graph.operations)
        results = call_op(*args, **kwargs)
        for operation in V.graph.operations[num_before:]:
            if isinstance(operation, ir.MultiOutput):
                operation.skip_size_stride_alignment_checks = True
        return results

    return call


def saved_tensors_hooks_are_disabled() -> bool:
    """Whether ``torch.autograd.graph.disable_saved_tensors_hooks`` is in force."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


def is_packaging() -> bool:
    """Whether the graph that is being lowered is for AOTInductor."""
    from torch._inductor.virtualized import V

    return V.graph.aot_mode


def current_node() -> fx.Node:
    """The node of the graph that is being lowered."""
    from torch._inductor.virtualized import V

    return V.graph.current_node


def is_given_away(node: fx.Node, value: Any) -> bool:
    """Whether the lowering of the only user of ``node``, ``value`` in Inductor's IR, may write into its memory.

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
    from torch._inductor.virtualized import V

    boxes = [ir.TensorBox.create(value) if isinstance(value, ir.StorageBox) else value for value in inputs]
    num_before = len(V.graph.operations)
    outputs = inline_subgraph_to_ir_nodes(graph, boxes, name)
    _call_implementations(V.graph.operations[num_before:])
    if in_order:
        _keep_order(V.graph, (each for each in V.graph.operations[num_before:] if isinstance(each, ir.ExternKernel)))
    return outputs
