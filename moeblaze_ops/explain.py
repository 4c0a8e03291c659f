"""``explain``: which MoE layers of a model are rewritten, what that saves, and why the others are not."""

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn


@dataclass(frozen=True)
class Candidate:
    """A layer that looks like a Mixture-of-Experts.

    ``kept_before`` and ``kept_after`` are the bytes that autograd keeps for it until backward, without parameters and
    the model's inputs: measured on the captured graph as eager mode runs it, and on the rewritten one. None where that
    is unknown. ``copied`` bytes of separate expert weights are joined by a copy in forward, and again in backward.
    """

    where: str
    spelling: str
    became: str | None = None
    reason: str | None = None
    kept_before: int | None = None
    kept_after: int | None = None
    copied: int = 0

    def __str__(self) -> str:
        if self.became is None:
            return f"{self.where}: {self.spelling}, left alone: {self.reason}"
        kept = ""
        if self.kept_before is not None and self.kept_after is not None:
            kept = f"; kept for backward: {_size(self.kept_before)} before, {_size(self.kept_after)} after"
        copied = f"; separate weights joined by a copy in each pass: {_size(self.copied)}" if self.copied else ""
        return f"{self.where}: {self.spelling} -> {self.became}{kept}{copied}"


@dataclass(frozen=True)
class Explanation:
    """What a compile with rewriting would make of a model."""

    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        rewritten = sum(candidate.became is not None for candidate in self.candidates)
        head = f"moeblaze: {rewritten} of {len(self.candidates)} MoE layers rewritten"
        return "\n".join([head, *(f"  {line}" for line in self.candidates), *(f"  note: {line}" for line in self.notes)])


@dataclass
class _Graph:
    """One captured graph, and the bytes that each node keeps for backward, before and after the rewrite."""

    report: Any
    removed: dict[str, str]
    inserted: dict[str, str]
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)

    def kept_by(self, module_path: str) -> tuple[int | None, int | None]:
        """Bytes kept by what was removed from, and by what was inserted into, one module."""
        paths = [entry.module_path for entry in self.report.rewritten]
        if not self.before or paths.count(module_path) != 1:
            return None, None
        before = sum(self.before.get(name, 0) for name, path in self.removed.items() if _is_inside(path, module_path))
        return before, sum(self.after.get(name, 0) for name, path in self.inserted.items() if path == module_path)


def explain(model: Callable, *inputs: Any, **keywords: Any) -> Explanation:
    """Trace ``model(*inputs, **keywords)`` as a compile with rewriting would, and print and return what came of it.

    The model runs twice, without compiling anything and without backward: layers as written, and rewritten. Buffers,
    random number generators, the switch and what is compiled stay as they are. Grad mode counts: bytes kept for
    backward are those of this call.
    """
    from moeblaze_ops import compile as switch

    model = getattr(model, "_orig_mod", model)
    graphs: list[_Graph] = []

    def observe(captured: fx.GraphModule, rewritten: fx.GraphModule, report: Any) -> Callable:
        before, after = _module_paths(captured), _module_paths(rewritten)
        removed = {name: path for name, path in before.items() if name not in after}
        inserted = {name: path for name, path in after.items() if name not in before}
        graph = _Graph(report, removed, inserted)
        graphs.append(graph)

        def run(*args: Any) -> Any:
            if torch.is_grad_enabled():
                _, graph.before = _run_and_measure(captured, args)
            output, graph.after = _run_and_measure(rewritten, args)
            return output

        return run

    with _unchanged(model):
        records, breaks = switch.dry_run(_fresh(model), observe, *inputs, **keywords)
    candidates, notes = _candidates(records, graphs, switch), _notes(records, breaks, graphs, switch)
    explanation = Explanation(tuple(dict.fromkeys(candidates)), tuple(dict.fromkeys(notes)))
    print(explanation)
    return explanation


def _candidates(records: list, graphs: list[_Graph], switch: types.ModuleType) -> Iterator[Candidate]:
    records = [record for record in records if isinstance(record, switch.GraphRecord)]
    # A layer in a frame that was dropped may have been rewritten as a frame of its own, or looked at again.
    kept = [record.report for record in records if record.dropped is None]
    settled = {entry.source for report in kept for entry in report.rewritten}
    declined = {entry.source for report in kept for entry in report.declined}
    for record in records:
        graph = next((graph for graph in graphs if graph.report is record.report), None)
        entries = record.report.rewritten + record.report.declined
        for entry in entries:
            again = entry.source in settled or (entry.reason is not None and entry.source in declined)
            if record.dropped is None or not again:
                yield _candidate(entry, record.dropped, graph)
        settled.update(entry.source for entry in entries)


def _candidate(entry: Any, dropped: str | None, graph: _Graph | None) -> Candidate:
    path = re.sub(r"^L\['\w+'\]\.?", "", entry.module_path)
    where = f"{path} ({entry.source})" if path else entry.source
    spelling = entry.spelling or "unrecognised"
    if entry.reason is not None:
        detail = f" ({entry.detail})" if entry.detail else ""
        return Candidate(where, spelling, reason=f"{entry.reason}, {entry.meaning}{detail}")
    if dropped is not None:
        return Candidate(where, spelling, reason=f"its function also holds something else: {_first_line(dropped)}")
    before, after = graph.kept_by(entry.module_path) if graph else (None, None)
    return Candidate(where, spelling, entry.became, kept_before=before, kept_after=after, copied=entry.copied_bytes)


def _notes(records: list, breaks: list[str], graphs: list[_Graph], switch: types.ModuleType) -> Iterator[str]:
    if reason := switch.why_switch_has_no_effect():
        yield f"torch.compile would run no pass of ours: {reason}"
    for record in records:
        if isinstance(record, switch.CaptureRecord):
            if record.dropped is None:
                yield from record.done
            else:
                yield from (f"kept after all: {line}; {_first_line(record.dropped)}" for line in record.done)
            yield from record.left
        if isinstance(record, switch.FrameRecord):
            loop = ", inside a loop, which makes Dynamo skip all of it" if "loop" in record.reason.lower() else ""
            yield f"nothing of {record.where} itself is compiled: {_first_line(record.reason)}{loop}"
    for reason in breaks:
        yield f"graph break: {_first_line(reason)}"
    if not graphs:
        yield "no graph was captured, so there was nothing to rewrite"


def _module_paths(gm: fx.GraphModule) -> dict[str, str]:
    """The path of the module that made each node, by name of the node."""
    return {node.name: _path(node) for node in gm.graph.nodes}


def _path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""


def _is_inside(path: str, module_path: str) -> bool:
    return path == module_path or (path.startswith(module_path) and path[len(module_path)] in ".[")


def _run_and_measure(gm: fx.GraphModule, args: tuple) -> tuple[Any, dict[str, int]]:
    """The output of ``gm`` run node by node, and the bytes that each node makes autograd keep."""
    interpreter = _Interpreter(gm)
    known = {_storage(value): value for value in args if isinstance(value, Tensor)}
    kept: dict[str, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in known:
            # Holding on to what was seen keeps its address from being used again.
            known[_storage(tensor)] = tensor
            kept[interpreter.running] = kept.get(interpreter.running, 0) + tensor.untyped_storage().nbytes()
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


def _storage(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _fresh(model: Callable) -> Callable:
    """``model`` as a function that Dynamo has not seen: what it knows about the model, it keeps by code object."""
    method = model.forward if isinstance(model, nn.Module) else model
    function = getattr(method, "__func__", method)
    if not isinstance(function, types.FunctionType):
        return model
    copied = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return types.MethodType(copied, method.__self__) if hasattr(method, "__self__") else copied


@contextlib.contextmanager
def _unchanged(model: Callable) -> Iterator[None]:
    """A context after which the buffers of ``model`` and the random number generators are what they were."""
    buffers = list(model.buffers()) if isinstance(model, nn.Module) else []
    copies = [buffer.detach().clone() for buffer in buffers]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, kept in zip(buffers, copies, strict=True):
                    buffer.copy_(kept)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"
