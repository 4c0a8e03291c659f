"""Compile with the rewrite and without Inductor: numbers against eager, and the rewritten graph."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch._dynamo
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager

from moeblaze_ops import compile as switch
from moeblaze_ops.lowering.rewrite.rewrite import Candidate, RewriteReport, rewrite_graph

OLD_SPELLINGS = {
    "where", "nonzero", "one_hot", "index_add", "index_add_", "iadd", "setitem", "scatter", "scatter_add", "argsort", "sort",
    "bincount", "histc", "cumsum", "_grouped_mm", "grouped_mm_fallback", "einsum", "bmm", "matmul", "silu",
    "_assert_scalar.default",
}  # fmt: skip
"""Operators of which none is left of a layer that was replaced, whatever its spelling."""


@dataclass
class Rewriting:
    """A Dynamo backend that rewrites, and remembers what it saw.

    A graph runs as the rewrite left it, or by AOTAutograd, which takes half of a test's time. That our ops can be traced is
    shown once for each op and spelling; where tensors alias or are written to, AOTAutograd could see what eager mode does not.
    ``aot="once"``: of two spellings that became the same graph it traces the first. ``before`` is shown a copy of each graph
    before it is rewritten.
    """

    reports: list[RewriteReport] = field(default_factory=list)
    modules: list[fx.GraphModule] = field(default_factory=list)
    run: bool = True
    aot: bool | Literal["once"] = False
    before: Callable[[fx.GraphModule], object] | None = None

    def __call__(self, gm: fx.GraphModule, example_inputs: list) -> Callable:
        if self.before:
            self.before(copy.deepcopy(gm))
        report = rewrite_graph(gm)
        self.reports.append(report)
        self.modules.append(gm)
        # A graph in which nothing of ours stands runs as Dynamo gave it: AOTAutograd would trace it again for nothing.
        trace = _once_by_aot_autograd if self.aot == "once" else aot_eager
        return trace(gm, example_inputs) if self.aot and self.run and report.rewritten else gm.forward

    @property
    def candidates(self) -> list[Candidate]:
        return [candidate for report in self.reports for candidate in report.candidates]

    @property
    def rewritten(self) -> list[Candidate]:
        return [candidate for report in self.reports for candidate in report.rewritten]

    @property
    def reasons(self) -> list[str]:
        return [candidate.reason for report in self.reports for candidate in report.declined]

    def operators(self) -> list[str]:
        """Names of all operators left, bodies of higher-order operators included."""
        nodes = (n for gm in self.modules for m in gm.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes)
        return [_name(node) for node in nodes if node.op in ("call_function", "call_method")]


_traced_by_aot_autograd: set[str] = set()


def _once_by_aot_autograd(gm: fx.GraphModule, example_inputs: list) -> Callable:
    """``gm`` as AOTAutograd traces it, or as it is, if it has traced the same graph of the same inputs before."""
    outline = _outline(gm)
    if outline in _traced_by_aot_autograd:
        return gm.forward
    traced = aot_eager(gm, example_inputs)
    _traced_by_aot_autograd.add(outline)
    return traced


def _outline(gm: fx.GraphModule) -> str:
    """All of a graph but the names that its values have: those are names of the program's variables."""
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    lines = [f"{torch.is_grad_enabled()} {autocast} {torch.get_default_dtype()}"]
    for module in (m for m in gm.modules() if isinstance(m, fx.GraphModule)):
        numbers = {node: f"%{number}" for number, node in enumerate(module.graph.nodes)}
        storages: dict[int, str] = {}
        for node, number in numbers.items():
            args = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
            target = "" if node.op in ("placeholder", "get_attr") else node.target
            value = node.meta.get("example_value") if node.op in ("placeholder", "get_attr") else None
            if isinstance(value, Tensor):
                layout = value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.requires_grad
                value = *layout, type(value), storages.setdefault(value.untyped_storage()._cdata, number)
            lines.append(f"{number} {node.op} {target} {args} {value}")
    return "\n".join(lines)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def compiled(
    fn: Callable,
    *,
    run: bool = True,
    dynamic: bool | None = None,
    aot: bool | Literal["once"] = False,
    before: Callable[[fx.GraphModule], object] | None = None,
) -> tuple[Callable, Rewriting]:
    torch._dynamo.reset()
    backend = Rewriting(run=run, aot=aot, before=before)
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic), backend


@contextmanager
def rewriting_backend() -> Iterator[Callable]:
    """A backend that rewrites as Inductor would with the switch on, and runs the graph without compiling it."""

    def backend(gm: fx.GraphModule, example_inputs: list) -> Callable:
        switch.rewrite(gm)
        return _once_by_aot_autograd(gm, example_inputs) if _has_our_ops(gm) else gm.forward

    with switch.rewriting(backend):
        yield backend


def _has_our_ops(gm: fx.GraphModule) -> bool:
    nodes = (node for m in gm.modules() if isinstance(m, fx.GraphModule) for node in m.graph.nodes)
    return any(str(node.target).startswith("moeblaze.") for node in nodes)


def rewritten_in(records: list[switch.Record]) -> list[Candidate]:
    """The layers that were rewritten, but for those in attempts at a frame that were given up."""
    kept = [record.report for record in records if isinstance(record, switch.GraphRecord) and record.dropped is None]
    return [candidate for report in kept for candidate in report.rewritten]


def rewrite_of(fn: Callable, *args: Tensor) -> Rewriting:
    """Capture and rewrite, without running the result."""
    run, backend = compiled(fn, run=False)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run(*args)
    return backend


def check_against_eager(
    module: torch.nn.Module,
    *args: Tensor,
    dynamic: bool | None = None,
    tolerance: float | None = None,
    aot: bool = False,
    same_strides: bool = False,
    before: Callable[[fx.GraphModule], object] | None = None,
) -> Rewriting:
    """Outputs, their strides if asked for, and the gradients of every input and parameter agree with eager.

    Returns what was rewritten.
    """
    run, backend = compiled(module, dynamic=dynamic, aot=aot and "once", before=before)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        actual = _train(module, run, args)
    _assert_alike(actual, _train(module, module, args), tolerance, same_strides)
    return backend


class Captured:
    """A layer of one input that Dynamo traces once, to be rewritten as often as what the rewriter is told changes."""

    def __init__(self, module: torch.nn.Module, x: Tensor) -> None:
        self._module, self._x = module, x
        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            self._expected = _train(module, torch.compile(module, backend=self._keep, fullgraph=True), (x,))
        _assert_alike(self._expected, _train(module, module, (x,)))

    def check_against_eager(self) -> RewriteReport:
        """Outputs and the gradients of the input and each parameter agree with eager. Returns what was rewritten."""
        graph = copy.deepcopy(self._graph)
        report = rewrite_graph(graph)
        held = set(self._module.parameters())
        actual = _train(self._module, lambda x: graph(*(i if i in held else x for i in self._inputs)), (self._x,))
        _assert_alike(actual, self._expected)
        return report

    def _keep(self, gm: fx.GraphModule, example_inputs: list) -> Callable:
        self._graph = gm

        def run(*inputs: Tensor) -> tuple:
            self._inputs = inputs
            return gm(*inputs)

        return run


def _assert_alike(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float | None = None, same_strides: bool = False
) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        close = {} if tolerance is None else {"atol": tolerance * tensor.abs().max().item(), "rtol": tolerance}
        torch.testing.assert_close(actual[name], tensor, msg=lambda text, name=name: f"{name}: {text}", **close)
        if same_strides and name.startswith("output"):
            assert _strides(actual[name]) == _strides(tensor), name


def _strides(tensor: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides, but for axes of one element, of which the stride says nothing."""
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def assert_replaced(backend: Rewriting) -> None:
    """The layers of all graphs became operators, and nothing of them is left."""
    operators = backend.operators()
    layers = len(backend.rewritten)
    assert operators.count("dispatch.default") == layers > 0
    assert operators.count("expert_down.default") + operators.count("expert_mlp.default") == layers
    ups = operators.count("expert_up.default") + operators.count("expert_up_h8.default")
    assert ups == operators.count("expert_down.default")
    assert not OLD_SPELLINGS & set(operators), OLD_SPELLINGS & set(operators)
    assert not backend.reasons


def _train(module: torch.nn.Module, run: Callable, args: tuple[Tensor, ...]) -> dict[str, Tensor]:
    module.zero_grad()
    inputs = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    out = run(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(0)
    sum((o * torch.randn(o.shape, generator=generator).to(o.dtype)).sum() for o in out).backward()
    named = {f"output {i}": o.detach() for i, o in enumerate(out)}
    named |= {f"gradient of input {i}": a.grad for i, a in enumerate(inputs) if a.grad is not None}
    return named | {f"gradient of {n}": p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


__all__ = [
    "Captured", "Rewriting", "assert_replaced", "check_against_eager", "compiled", "rewrite_of", "rewriting_backend",
    "rewritten_in",
]  # fmt: skip
