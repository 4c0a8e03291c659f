"""Changes to a captured graph, one node at a time: other arguments, other operators, values turned, written to or read.

A change leaves the fakes of the nodes as they were. `propagate` computes them again, and raises where it gave no program.
"""

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

FUNCTIONS = (
    (operator.add, operator.sub, operator.mul, torch.maximum, torch.minimum),
    (operator.iadd, operator.isub, operator.imul),
    (operator.eq, operator.ne, operator.le, operator.ge, operator.lt, operator.gt),
    (F.silu, F.relu, torch.sigmoid, torch.tanh, F.softplus, torch.exp, torch.abs),
    (torch.floor_divide, operator.floordiv, operator.mod, operator.mul),
)  # fmt: skip
METHODS = (
    ("sum", "mean", "amax", "prod", "amin"), ("any", "all"), ("cumsum", "cumprod"), ("index_add_", "index_copy_"),
    ("index_add", "index_copy"), ("scatter_add", "scatter"), ("scatter_add_", "scatter_"), ("eq", "ne", "ge", "le", "gt", "lt"),
    ("add", "sub", "mul"), ("add_", "sub_", "mul_", "copy_"), ("argmax", "argmin"), ("view", "reshape"),
    ("softmax", "log_softmax"), ("relu", "sigmoid", "tanh"),
)  # fmt: skip
"""Operators that take the same arguments."""

Node = fx.Node


def fake_of(node: Node) -> Any:
    return node.meta.get("example_value")


def clone(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own, with the same fakes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def propagate(gm: fx.GraphModule) -> None:
    """Compute the fakes of a changed graph; raises what its operators raise."""
    fakes = [fake_of(node) for node in gm.graph.nodes if node.op == "placeholder"]
    env: dict[Node, Any] = {}
    with next(fake.fake_mode for fake in fakes if hasattr(fake, "fake_mode")):
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                env[node] = fake_of(node)
            elif node.op != "output":
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                function = node.target if node.op == "call_function" else getattr(type(args[0]), node.target)
                env[node] = node.meta["example_value"] = function(*args, **kwargs)
    gm.graph.lint()
    gm.recompile()


@dataclass
class Changer:
    """Draws changes to the graph of a layer with ``experts`` experts. Each says what it did, "" where nothing was to change."""

    graph: fx.Graph
    rng: random.Random
    experts: int

    def change(self) -> str:
        changes = (
            self.another_input, self.another_constant, self.another_constant, self.another_operator, self.turned, self.turned,
            self.left_out, self.written, self.read, self.returned, self.arguments_exchanged,
        )  # fmt: skip
        return self.rng.choice(changes)()

    @property
    def _calls(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.op in ("call_function", "call_method")]

    @property
    def _tensors(self) -> list[Node]:
        return [node for node in self.graph.nodes if isinstance(fake_of(node), Tensor)]

    def _before(self, node: Node) -> list[Node]:
        nodes = list(self.graph.nodes)
        return [n for n in nodes[: nodes.index(node)] if isinstance(fake_of(n), Tensor)]

    def another_input(self) -> str:
        """``index_add_(0, token, y)`` with another vector of integers for ``token``."""
        node = self.rng.choice(self._calls)
        inputs = [n for n in node.all_input_nodes if isinstance(fake_of(n), Tensor)]
        if not inputs:
            return ""
        old = self.rng.choice(inputs)
        alike = _alike if self.rng.random() < 0.7 else _alike_in_rank
        others = [n for n in self._before(node) if n is not old and alike(n, old)]
        if not others:
            return ""
        new = self.rng.choice(others)
        node.replace_input_with(old, new)
        return f"{node} reads {new} for {old}"

    def another_constant(self) -> str:
        """``ids == 3`` to ``ids == 4``, ``dim=-1`` to ``dim=0``, ``descending=True`` to ``False``."""
        places = [(node, path, value) for node in self._calls for path, value in _numbers((node.args, node.kwargs))]
        if not places:
            return ""
        node, path, old = self.rng.choice(places)
        if isinstance(old, bool):
            new: Any = not old
        elif isinstance(old, int):
            new = self.rng.choice((old + 1, old - 1, 0, 1, -1, old * 2, -old))
        else:
            new = self.rng.choice((old / 2, -old, 0.0, old + 1))
        node.args, node.kwargs = _with((node.args, node.kwargs), path, new)
        return "" if new == old else f"{node} has {new} for {old}"

    def another_operator(self) -> str:
        """``silu`` to ``tanh``, ``index_add_`` to ``index_copy_``."""
        choices = [
            (node, name)
            for node in self._calls
            for family in (FUNCTIONS if node.op == "call_function" else METHODS)
            for name in (family if node.target in family else ())
            if name != node.target
        ]
        if not choices:
            return ""
        node, new = self.rng.choice(choices)
        old, node.target = node.target, new
        return f"{node} is {_name(new)} for {_name(old)}"

    def turned(self) -> str:
        """``weights`` to ``weights.flip(0)``, ``ids`` to ``(ids + 1) % E``, for one reader or for all."""
        node = self.rng.choice([n for n in self._tensors if n.users])
        inputs = [n for n in self.graph.nodes if n.op in ("placeholder", "get_attr")]
        users = list(node.users)
        with self.graph.inserting_before((inputs[-1] if node in inputs else node).next):
            new = self._turned(node)
        readers = users if self.rng.random() < 0.5 else [self.rng.choice(users)]
        for user in readers:
            user.replace_input_with(node, new)
        return f"{', '.join(map(str, readers))} reads {_name(new.target)} of {node}"

    def _turned(self, node: Node) -> Node:
        fake: Any = fake_of(node)
        dim, E = self.rng.randrange(max(1, fake.dim())), self.experts

        def method(name: str, *args: Any, **kwargs: Any) -> Node:
            return self.graph.call_method(name, (node, *args), kwargs)

        def function(target: Callable, *args: Any) -> Node:
            return self.graph.call_function(target, args)

        ways: list[Callable[[], Node]] = [lambda: method("clone"), lambda: method("contiguous")]
        if fake.dim():
            ways += [
                lambda: method("flip", dim), lambda: method("roll", 1, dim), lambda: method("transpose", 0, -1),
                lambda: self.graph.call_method("reshape", (method("transpose", 0, -1), *fake.shape)),
                lambda: function(operator.getitem, node, slice(None)), lambda: method("select", dim, 0),
                lambda: method("narrow", dim, 0, max(1, fake.shape[dim] - 1)),
            ]  # fmt: skip
        if fake.dtype.is_floating_point:
            ways += [
                lambda: function(operator.neg, node), lambda: function(operator.mul, node, 2), lambda: method("abs"),
                lambda: function(operator.add, node, 1), lambda: function(operator.mul, node, node), lambda: method("detach"),
                lambda: function(operator.mul, node, 0), lambda: method("relu"), lambda: method("clamp", 0.0, 0.5),
                lambda: method("requires_grad_"),
            ]  # fmt: skip
            if fake.dim():
                ways += [
                    lambda: method("cumsum", dim), lambda: method("softmax", dim),
                    lambda: function(operator.sub, node, method("mean", dim, keepdim=True)),
                    lambda: function(operator.truediv, node, method("sum", dim, keepdim=True)),
                ]  # fmt: skip
        elif fake.dtype == torch.bool:
            ways.append(lambda: method("logical_not"))
            if fake.dim():
                ways += [
                    lambda: function(operator.and_, node, method("roll", 1, dim)),
                    lambda: function(operator.or_, node, method("roll", 1, dim)),
                ]  # fmt: skip
        else:
            ways += [
                lambda: function(operator.mod, function(operator.add, node, 1), E), lambda: function(operator.mod, node, 2),
                lambda: function(operator.sub, E - 1, node), lambda: function(operator.floordiv, node, 2),
                lambda: function(operator.sub, node, 1), lambda: function(operator.mul, node, 0), lambda: method("clamp", 0, 1),
                lambda: method("int"), lambda: method("to", torch.uint8),
            ]  # fmt: skip
            if fake.dim():
                ways += [
                    lambda: function(operator.getitem, method("sort", dim), 0), lambda: method("argsort", dim),
                    lambda: method("cumsum", dim),
                ]  # fmt: skip
        return self.rng.choice(ways)()

    def left_out(self) -> str:
        """``weights / weights.sum(-1, keepdim=True)`` to ``weights``."""
        choices = [(node, n) for node in self._calls for n in node.all_input_nodes if _alike(n, node)]
        if not choices:
            return ""
        node, instead = self.rng.choice(choices)
        node.replace_all_uses_with(instead)
        return f"{instead} for {node}"

    def written(self) -> str:
        """``ids[0] = ids[-1]``, ``h.mul_(2)`` or ``weights.copy_(probs)`` at any later place."""
        node = self.rng.choice(self._tensors)
        nodes = list(self.graph.nodes)
        later = [n for n in nodes[nodes.index(node) + 1 :] if n.op in ("call_function", "call_method")]
        if not later:
            return ""
        at = self.rng.choice(later)
        fake: Any = fake_of(node)
        writes: list[tuple[str, tuple]] = [("fill_", (True,)), ("logical_not_", ())]
        if fake.dtype != torch.bool:
            writes = [("zero_", ()), ("add_", (1,)), ("mul_", (2,)), ("fill_", (1,))]
        if others := [n for n in self._before(at) if n is not node and _alike(n, node)]:
            writes.append(("copy_", (self.rng.choice(others),)))
        with self.graph.inserting_before(at):
            if fake.dim() and self.rng.random() < 0.3:
                last = self.graph.call_function(operator.getitem, (node, -1))
                self.graph.call_function(operator.setitem, (node, 0, last))
                return f"{node}[0] = {node}[-1] before {at}"
            name, args = self.rng.choice(writes)
            self.graph.call_method(name, (node, *args))
        return f"{node}.{name}({', '.join(map(str, args))}) before {at}"

    def read(self) -> str:
        """``out + h.sum()``."""
        node = self.rng.choice([n for n in self._tensors if fake_of(n).dtype.is_floating_point])
        output = self.graph.output_node()
        out, *rest = output.args[0]
        with self.graph.inserting_before(output):
            total = self.graph.call_method("sum", (node,))
            output.args = ((self.graph.call_function(operator.add, (out, total)), *rest),)
        return f"the sum of {node} is added"

    def returned(self) -> str:
        """``return out, h``."""
        node, output = self.rng.choice(self._tensors), self.graph.output_node()
        output.args = ((*output.args[0], node),)
        return f"{node} is returned"

    def arguments_exchanged(self) -> str:
        """``a - b`` to ``b - a``, ``torch.where(hit, a, b)`` to ``torch.where(hit, b, a)``."""
        choices = [node for node in self._calls if sum(isinstance(arg, Node) for arg in node.args) >= 2]
        if not choices:
            return ""
        node = self.rng.choice(choices)
        args = list(node.args)
        i, j = self.rng.sample([i for i, arg in enumerate(args) if isinstance(arg, Node)], 2)
        args[i], args[j] = args[j], args[i]
        node.args = tuple(args)
        return f"{node} has its arguments {i} and {j} exchanged"


def _alike(a: Node, b: Node) -> bool:
    x, y = fake_of(a), fake_of(b)
    return isinstance(x, Tensor) and isinstance(y, Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype)


def _alike_in_rank(a: Node, b: Node) -> bool:
    return (fake_of(a).dim(), fake_of(a).dtype) == (fake_of(b).dim(), fake_of(b).dtype)


_PARTS_OF_SLICES = ("start", "stop", "step")


def _numbers(value: Any) -> list[tuple[tuple, Any]]:
    """The numbers in nested arguments, each with the keys that lead to it."""
    if isinstance(value, bool | int | float):
        return [((), value)]
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, tuple | list):
        parts = list(enumerate(value))
    elif isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, slice):
        parts = [(name, getattr(value, name)) for name in _PARTS_OF_SLICES]
    return [((key, *path), number) for key, part in parts for path, number in _numbers(part)]


def _with(value: Any, path: tuple, number: Any) -> Any:
    """Nested arguments with another number at the end of ``path``."""
    if not path:
        return number
    key, *rest = path
    if isinstance(value, slice):
        parts = {name: getattr(value, name) for name in _PARTS_OF_SLICES}
        return slice(*(parts | {key: number}).values())
    if isinstance(value, dict):
        return dict(value) | {key: _with(value[key], tuple(rest), number)}
    parts = [_with(part, tuple(rest), number) if i == key else part for i, part in enumerate(value)]
    return torch.Size(parts) if isinstance(value, torch.Size) else tuple(parts) if isinstance(value, tuple) else parts


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
