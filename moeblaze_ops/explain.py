"""``explain``: which MoE layers of a model are rewritten, what that saves, and why the others are not.

``moeblaze_ops.report`` says the same of what was compiled for real.
"""

import os
import re
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moeblaze_ops.arguments.validation_values import kind_of, refuse_type
from moeblaze_ops.explanation import (
    Candidate,
    Explanation,
    code_at,
    frame_name,
    left_alone,
    module_name,
    short_place,
    with_code,
)
from moeblaze_ops.plain_words import checkpoints_eagerly, in_plain_words
from moeblaze_ops.unchanged import as_it_is, unchanged

one_at_a_time = threading.RLock()
"""Dynamo's lists of backends, counters and frames, which a dry run sets back, are those of all threads."""


@dataclass
class _Run:
    """One run of a captured graph: the module it belongs to, and the bytes each node keeps for backward, before and after."""

    names: dict[str, str]
    before: dict[str, int]
    after: dict[str, int]


@dataclass
class _Graph:
    """One captured graph: what the rewrite removed and inserted, each with its module's path, and its runs."""

    report: Any
    removed: dict[str, str]
    inserted: dict[str, str]
    runs: list[_Run] = field(default_factory=list)

    def kept_by(self, module_path: str, run: _Run) -> tuple[int | None, int | None]:
        """Bytes kept by what was removed from, and by what was inserted into, one module and what is inside of it."""
        paths = [entry.module_path for entry in self.report.rewritten]
        if not run.before or paths.count(module_path) != 1:
            return None, None

        def kept(bytes_of: dict[str, int], path_of: dict[str, str]) -> int:
            return sum(bytes_of.get(name, 0) for name, path in path_of.items() if _innermost(path, paths) == module_path)

        return kept(run.before, self.removed), kept(run.after, self.inserted)


def explain(model: Callable, *inputs: Any, **keywords: Any) -> Explanation:
    """What a compile with rewriting would make of ``model(*inputs, **keywords)``: an object whose text says it.

    The model runs twice, without compiling anything and without backward: layers as written, and rewritten. Buffers,
    random number generators, the switch and what is compiled stay as they are. Grad mode counts: bytes kept for
    backward are those of this call. Threads that explain at the same time do so one after another.

    In a program: ``print(moeblaze_ops.explain(model, x))``; a prompt or a notebook shows the text by itself.
    """
    model = checked_model("explain", model)
    with one_at_a_time, unchanged(model):
        return explained(model, inputs, keywords)[0]


def checked_model(op: str, model: Any) -> Callable:
    """What is called for ``model``: the module itself where that is compiled.

    Raises:
        TypeError: ``model`` is no module and no function.
    """
    if isinstance(model, type):
        refuse_type(op, "model", "be a module or a function", f"the class {model.__name__}: make one of it first")
    if not callable(model):
        refuse_type(op, "model", "be a module or a function", kind_of(model))
    return getattr(model, "_orig_mod", model)


def explained(
    model: Callable, inputs: Sequence[Any], keywords: dict[str, Any], eager_numbers: bool = False
) -> tuple[Explanation, Any]:
    """What ``explain`` returns, and what the model returns where its layers are rewritten.

    With ``eager_numbers`` those are left that would draw other random numbers than eager mode.
    """
    from moeblaze_ops import compile as switch

    names = _Names(model)
    graphs: list[_Graph] = []

    def observe(captured: fx.GraphModule, rewritten: fx.GraphModule, report: Any) -> Callable:
        before, after = _module_paths(captured), _module_paths(rewritten)
        removed = {name: path for name, path in before.items() if name not in after}
        inserted = {name: path for name, path in after.items() if name not in before}
        graph = _Graph(report, removed, inserted)
        graphs.append(graph)
        placeholders = [node.name for node in captured.graph.find_nodes(op="placeholder")]

        def run(*args: Any) -> Any:
            output, after = _run_and_measure(rewritten, args)
            before = {}
            if torch.is_grad_enabled():
                with as_it_is(args):
                    before = _run_and_measure(captured, args)[1]
            graph.runs.append(_Run(names.of_parameters(dict(zip(placeholders, args, strict=True))), before, after))
            return output

        return run

    with one_at_a_time, switch.eager_random_numbers() if eager_numbers else nullcontext():
        output, records, breaks = switch.dry_run(unseen(model), observe, *inputs, **keywords)
    notes = dict.fromkeys(notes_of(records, breaks, bool(graphs), switch))
    candidates = tuple(_candidates(records, graphs, names, switch))
    return Explanation(candidates, tuple(notes), direct_layers(records, switch)), output


def direct_layers(records: list, switch: types.ModuleType) -> int:
    """Layers that call the operators themselves, of the graphs that were kept, however often they were compiled."""
    graphs = [record for record in records if isinstance(record, switch.GraphRecord) and record.dropped is None]
    layers = {
        (place.model, place.name_of(path), number)
        for record in graphs
        for path, count in Counter(record.report.direct).items()
        for place in record.places
        for number in range(count)
    }
    return len(layers)


def _candidates(records: list, graphs: list[_Graph], names: "_Names", switch: types.ModuleType) -> Iterator[Candidate]:
    for entry, record in {id(entry): (entry, record) for entry, record, *_ in switch.outcomes(records)}.values():
        graph = next((graph for graph in graphs if graph.report is record.report), None)
        for run in (graph.runs if graph else []) or [_Run({}, {}, {})]:
            name = names.of(entry.module_path, list(run.names.values()))
            yield candidate_of(entry, record, name, graph=graph, run=run)


def candidate_of(
    entry: Any, record: Any, name: str, mode: str = "", graph: _Graph | None = None, run: _Run | None = None
) -> Candidate:
    """What became of the layer of this name, of a dry run with the bytes of ``run``."""
    run = run or _Run({}, {}, {})
    source = short_place(entry.source)
    where = f"{name} ({source})" if name and source else name or source
    spelling = entry.spelling or "unrecognised"
    if entry.reason is not None:
        detail = _with_names(entry.detail, run.names)
        return left_alone(where, spelling, entry.source, entry.reason, entry.meaning, detail, mode)
    if record.dropped is not None:
        return Candidate(where, spelling, reason=f"its function runs as written: {in_plain_words(record.dropped)}", mode=mode)
    before, after = graph.kept_by(entry.module_path, run) if graph else (None, None)
    idle = (name for layer in record.idle if layer.module_path == entry.module_path for name in layer.inputs)
    zeros = tuple(run.names.get(name, _unnamed(name)) for name in idle)
    return Candidate(where, spelling, entry.became, None, before, after, entry.copied_bytes, zeros=zeros, mode=mode)


def notes_of(records: list, breaks: list[tuple[str, str]], captured: bool, switch: types.ModuleType) -> Iterator[str]:
    """What a text says below its layers: what was captured otherwise than written, and what was not captured."""
    if reason := switch.why_no_attempts():
        yield reason
    without_ops = 0
    for record in records:
        if isinstance(record, switch.CaptureRecord):
            yield from map(with_code, (*record.done, *record.left))
        if isinstance(record, switch.FrameRecord):
            if record.without_ops:
                without_ops += 1
                continue
            loop = ", inside a loop, which makes Dynamo skip all of it" if record.in_loop else ""
            is_part = checkpoints_eagerly(record.reason)
            left = "what {} checkpoints is not compiled" if is_part else "nothing of {} itself is compiled"
            yield f"{left.format(frame_name(record.where))}: {in_plain_words(record.reason)}{_at(record.line)}{loop}"
    for reason, line in breaks:
        yield f"graph break: {in_plain_words(reason)}{_at(line)}"
    if without_ops:
        yield f"functions without tensor operations, which are not compiled: {without_ops}"
    if not captured:
        yield "no graph was captured, so there was nothing to rewrite"


def _at(line: str) -> str:
    code = code_at(line)
    return f" at {short_place(line)}" + (f" ({code})" if code else "") if line else ""


class _Names:
    """The names of modules as the model's author knows them."""

    def __init__(self, model: Callable | None) -> None:
        model = getattr(model, "func", getattr(model, "__self__", model))
        self.model = model if isinstance(model, nn.Module) else None
        modules = dict(self.model.named_modules()) if self.model is not None else {}
        self.modules = {module_name(name) for name, module in modules.items() if not isinstance(module, _CONTAINERS)}

    def of_parameters(self, inputs: dict[str, Any]) -> dict[str, str]:
        """The names of the inputs of a graph that are parameters now: FSDP2 has others while a module runs."""
        parameters = self.model.named_parameters() if self.model is not None else ()
        name_of = {id(parameter): module_name(name) for name, parameter in parameters}
        return {name: name_of[id(value)] for name, value in inputs.items() if id(value) in name_of}

    def of(self, module_path: str, parameters: list[str]) -> str:
        """The name of a module that Dynamo calls ``module_path``, in a graph that reads these parameters of the model."""
        path = module_name(module_path)
        if self.model is None:
            return path
        # In a function that is compiled on its own, paths begin there; what its parameters share leads to it.
        root = os.path.commonprefix([name.split(".")[:-1] for name in parameters])
        parts = path.split(".") if path else []
        for count in range(len(root), -1, -1):
            if ".".join([*root[:count], *parts]) in self.modules:
                return ".".join([*root[:count], *parts]) or (type(self.model).__name__ if parameters else "")
        suffixes = (".".join(parts[start:]) for start in range(1, len(parts)))
        return next((name for name in suffixes if name in self.modules), path)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _with_names(text: str, names: dict[str, str]) -> str:
    """``text`` with the names of parameters and arguments in place of what Dynamo calls them."""
    for placeholder, name in names.items():
        text = re.sub(rf"\b{placeholder}\b", name, text, flags=re.IGNORECASE)
    text = re.sub(r"\bl_\w+?_(modules|parameters)_\w+", lambda named: _unnamed(named[0]), text, flags=re.IGNORECASE)
    return re.sub(r"'l_(\w+?)_'", r"'\1'", text, flags=re.IGNORECASE)


def _unnamed(placeholder: str) -> str:
    """The name of the parameter that Dynamo calls ``placeholder``, as far as its text says it."""
    placeholder = re.sub(r"_dict_modules_checkpoint_wrapped_module", "", placeholder, flags=re.IGNORECASE)
    name = re.sub(r"^l_+(self_+|\w+?_+(?=(modules|parameters|buffers)_))?", "", placeholder, flags=re.IGNORECASE).strip("_")
    return re.sub(r"(^|_+)(modules|parameters|buffers)_+", ".", name).strip(".")


def _module_paths(gm: fx.GraphModule) -> dict[str, str]:
    """The path of the module that made each node, by name of the node."""
    return {node.name: _path(node) for node in gm.graph.nodes}


def _path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""


def _innermost(path: str, layers: list[str]) -> str | None:
    """The layer that a module is a part of; the empty path is that of the model itself."""
    return max((layer for layer in layers if _is_inside(path, layer)), key=len, default=None)


def _is_inside(path: str, module_path: str) -> bool:
    return module_path in ("", path) or (path.startswith(module_path) and path[len(module_path)] in ".[")


def _run_and_measure(gm: fx.GraphModule, args: tuple) -> tuple[Any, dict[str, int]]:
    """The output of ``gm`` run node by node, and the bytes that each node makes autograd keep."""
    interpreter = _Interpreter(gm)
    known = {_storage(value): value for value in args if isinstance(value, Tensor)}
    kept: dict[str, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in known:
            # Holding on to what was seen keeps its address from being used again.
            known[_storage(tensor)] = tensor
            size = sum(part.untyped_storage().nbytes() for part in _parts(tensor))
            kept[interpreter.running] = kept.get(interpreter.running, 0) + size
        return tensor

    for parameter in gm.parameters():
        known[_storage(parameter)] = parameter
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return interpreter.run(*args), kept


class _Interpreter(fx.Interpreter):
    running = ""

    def run_node(self, n: fx.Node) -> Any:
        self.running = n.name
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if target is not torch.ops.higher_order.invoke_subgraph:
            return super().call_function(target, args, kwargs)
        body, _, *operands = args  # a region that is compiled once; called by itself, it would be traced
        return body(*operands)


def _storage(tensor: Tensor) -> tuple[torch.device | int, ...]:
    return (tensor.device, *(part.untyped_storage()._cdata for part in _parts(tensor)))


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that one of a class of its own consists of, such as codes and scales."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


def unseen(model: Callable) -> Callable:
    """``model`` as a function that Dynamo has not seen: what it knows about the model, it keeps by code object."""
    if isinstance(model, nn.Module) and (model._forward_hooks or model._forward_pre_hooks):
        # Hooks gather what forward reads (FSDP2), and are a part of what is compiled.
        def call(*inputs: Any, **keywords: Any) -> Any:
            return model(*inputs, **keywords)

        return types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    method = model.forward if isinstance(model, nn.Module) else model
    function = getattr(method, "__func__", method)
    if not isinstance(function, types.FunctionType):
        return model
    copied = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(copied, method.__self__) if hasattr(method, "__self__") else copied
