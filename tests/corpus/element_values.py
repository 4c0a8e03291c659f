"""What formulas of elements are as numbers: an operator is run, and the formula of each element of its result is computed.

`wrong_elements(function, *tensors)` captures a function as Dynamo does, and compares every node's elements, at the node and at
the end of the graph, with their formulas. Nothing is said of values that have no form, and of functions that are not listed here.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator, Unroll
from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.index_notation.expr import Expr


class Unknown(Exception):
    """A formula whose number is not known here."""


_FUNCTIONS: dict[str, Callable] = {
    **{name: getattr(torch, name) for name in (
        "sigmoid", "tanh", "erf", "exp", "log", "log1p", "expm1", "sin", "cos", "sqrt", "rsqrt", "reciprocal", "abs", "relu",
        "maximum", "minimum", "lt", "le", "gt", "ge", "pow", "clamp",
    )},
    **{name: getattr(F, name) for name in (
        "softplus", "leaky_relu", "elu", "celu", "hardtanh", "threshold", "mish", "selu", "relu6", "hardswish", "hardsigmoid",
        "logsigmoid", "softsign", "gelu", "hardshrink", "softshrink",
    )},
    "mod": torch.remainder, "floordiv": torch.floor_divide, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "prelu": lambda x, slope: torch.where(x >= 0, x, x * slope), "where": lambda mask, a, b: torch.where(mask != 0, a, b),
    "or": lambda a, b: (a != 0) | (b != 0), "chosen": lambda x: x != 0, "scaled": lambda x, number: x * number,
}  # fmt: skip


class Run:
    """A graph that is run once: what each node held when another one had run, and the numbers of formulas over that."""

    def __init__(self, gm: fx.GraphModule, inputs: list[Tensor]):
        self.view, self.evaluator = GraphView(gm.graph, TABLE), Evaluator()
        self.held: dict[tuple[fx.Node, fx.Node], Any] = {}
        now: dict[fx.Node, Any] = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        for node in gm.graph.nodes:
            if node.op in ("call_function", "call_method"):
                args, kwargs = fx.map_arg((node.args, node.kwargs), now.__getitem__)
                now[node] = (
                    getattr(args[0], node.target)(*args[1:], **kwargs)
                    if node.op == "call_method"
                    else node.target(*args, **kwargs)
                )
            if node.op != "output":
                self.held |= {(other, node): _copy(value) for other, value in now.items()}
                self.last = node

    def number(self, e: Expr, at: dict[Expr, int]) -> float:
        """What ``e`` is where its variables are ``at``."""
        args = e.args
        match e.kind:
            case "var" if e in at:
                return at[e]
            case "const":
                return args[0]
            case "linear":
                return args[0] + sum(c * self.number(atom, at) for c, atom in args[1])
            case "div" | "mod":
                quotient, remainder = divmod(self.number(args[0], at), args[1])
                return quotient if e.kind == "div" else remainder
            case "leaf":
                return self._held_by(args[0])[tuple(int(self.number(i, at)) for i in args[1])].item()
            case "add":
                return sum(self.number(term, at) for term in args)
            case "mul":
                return math.prod(self.number(factor, at) for factor in args)
            case "sum" | "any" | "prefix":
                end = self.number(args[2], at) + 1 if e.kind == "prefix" else args[0].args[1]
                numbers = [self.number(args[1], {**at, args[0]: i}) for i in range(int(end))]
                return int(any(numbers)) if e.kind == "any" else sum(numbers)
            case "group":
                row, sizes = self.number(args[2], at), (self.number(args[1], {**at, args[0]: i}) for i in range(args[0].args[1]))
                return sum(end <= row for end in itertools.accumulate(sizes))
            case "eq":
                return int(self.number(args[0], at) == self.number(args[1], at))
            case "nonzero":
                return self._held_by(args[0]).bool().nonzero()[int(self.number(args[2], at)), args[1]].item()
            case "inverse":
                return self._held_by(args[0]).argsort()[int(self.number(args[1], at))].item()
            case "cast":
                return torch.tensor(self.number(args[1], at), dtype=torch.float64).to(args[0]).item()
            case "call" if args[0] in _FUNCTIONS:
                xs = (torch.tensor(self.number(x, at), dtype=torch.float64) for x in args[1])
                return _FUNCTIONS[args[0]](*xs, *args[2]).item()
        raise Unknown(e.kind)

    def _held_by(self, value: Value) -> Tensor:
        node, *which = value.args if value.op in ("input", "opaque", "output") else (None,)
        if node is None:
            raise Unknown(value.op)
        at = which[-1] if isinstance(which[-1], fx.Node) else node
        held = self.held[node, at]
        return held[which[0]] if value.op == "output" else held


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else tuple(map(_copy, value)) if isinstance(value, tuple | list) else value


def wrong_elements(function: Callable, *tensors: Tensor) -> Iterator[str]:
    """The elements of all nodes that are not what their formula says, as text; none of them has a formula that it has not."""
    graphs = []

    def backend(gm: fx.GraphModule, inputs: list[Tensor]) -> Callable:
        graphs.append((gm, [tensor.clone() for tensor in inputs]))
        return gm.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*(tensor.clone() for tensor in tensors))
    ((gm, inputs),) = graphs
    with torch.no_grad():
        run = Run(gm, inputs)
    nodes = [node for node in run.view.position if node.op != "output"]
    for node, at in ((one, at) for one in nodes for at in dict.fromkeys((one, run.last))):
        values = run.view.value_at(node, run.view.position[at])
        held = run.held[node, at]
        for value, real in zip(values, held, strict=True) if isinstance(values, tuple) else [(values, held)]:
            if isinstance(value, Value) and isinstance(real, Tensor):
                yield from (f"{node.name}: {text}" for text in _wrong(run, value, real))


def _wrong(run: Run, value: Value, real: Tensor) -> Iterator[str]:
    sizes = zip(value.shape, real.shape, strict=True)
    variables = [run.evaluator.algebra.var(axis, size, "r") for axis, (size, _) in enumerate(sizes)]
    for place in itertools.product(*map(range, real.shape)):
        at = dict(zip(variables, place, strict=True))
        for indices in (tuple(map(run.evaluator.algebra.const, place)), tuple(variables)):
            try:
                formula = run.evaluator.element(value, indices)
                number = run.number(formula, at)
            except (Unknown, Unroll):
                continue
            if not math.isclose(number, real[place].item(), rel_tol=1e-9, abs_tol=1e-9) and math.isfinite(real[place].item()):
                yield f"{list(place)} is {real[place].item()}, and its formula {formula} is {number}"
