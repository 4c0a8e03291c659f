"""A functional view of a Dynamo graph: what every node holds, and when.

Dynamo graphs mutate (``out.index_add_``, ``out[i] = ...``). `GraphView` walks the graph once and gives every node the
interned `Value` that it holds, and a new one to all aliases of a buffer whenever the buffer is written. Two nodes with
the same `Value` at a point of the graph hold the same numbers there; freshness of a buffer, absence of writes in
between and absence of aliases then need no search of their own.
"""

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, permutations
from typing import Any

import sympy
import torch
from torch import fx
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moeblaze_ops.lowering.graph.arguments import argument_of, written_arguments
from moeblaze_ops.lowering.graph.dtensors import dtensor_call
from moeblaze_ops.lowering.graph.fake_values import fake_of, needs_gradient, storage_of
from moeblaze_ops.lowering.graph.model_state import nodes_of_state
from moeblaze_ops.lowering.graph.operators import called_instead, operator_name, overloads_of
from moeblaze_ops.lowering.graph.sizes import Size, same_shape, same_size, size_of


class NotCanonical(Exception):
    """An operator was used in a way that has no canonical form; its result stays opaque."""


ELEMENTS_OF_FIRST = frozenset(("reshape", "permute", "slice", "select", "expand", "take", "index"))
"""Kinds of values of which each element is one of the first operand."""


class Value:
    """An interned tensor value: ``op`` applied to ``args`` (values and constants).

    ``bound`` is an exclusive upper bound of integer elements that are not negative, None where that is not known, and ``fades``
    says what `zero_stops_gradient` means by it: both hold of what has elements of such a value alone. None of its elements is
    there twice along the axis ``choices_along``. ``of_state`` says what `model_state` means by it.
    """

    __slots__ = ("args", "bound", "choices_along", "dtype", "fades", "is_permutation", "node", "of_state", "op", "shape")

    def __init__(self, op: str, args: tuple, shape: tuple[Size, ...], dtype: torch.dtype, node: fx.Node):
        self.op, self.args, self.shape, self.dtype, self.node = op, args, shape, dtype, node
        self.is_permutation = op == "argsort"
        self.bound: Size | None = shape[0] if self.is_permutation else None
        self.choices_along: int | None = 0 if self.is_permutation else None
        self.fades = False
        self.of_state = False

    def __repr__(self) -> str:
        return f"{self.op}@{self.node.name}"


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """What numbers of a floating-point dtype are computed in where that must not round them."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def graph_modules(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """A module, and the bodies of higher-order operators in it that run: a region that was inlined leaves one that does not."""
    found = [gm]
    for module in found:
        named = {node.target for node in module.graph.nodes if node.op in ("get_attr", "call_module")}
        for name, body in module.named_modules(remove_duplicate=False):
            if name in named and isinstance(body, fx.GraphModule) and body not in found:
                found.append(body)
    return found


def graphs_of(gm: fx.GraphModule) -> list[fx.Graph]:
    """The graphs of a module and of the bodies in it."""
    return [module.graph for module in graph_modules(gm)]


def target_name(node: fx.Node) -> str:
    """The name of torch's operator that a node computes, "" for anything else."""
    name = operator_name(node)
    return name if name and is_on_plain_tensors(node) else ""


def is_on_plain_tensors(node: fx.Node) -> bool:
    """True if no operand is of a class that computes operators in its own way, as DTensor does."""
    return not any(map(is_traceable_wrapper_subclass, map(fake_of, node.all_input_nodes)))


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "matmul")
_INPLACE_OPERATORS = {getattr(operator, f"i{name.strip('_')}"): name for name in _ARITHMETIC} | {operator.setitem: "setitem"}
_INPLACE_METHODS = {f"__{operator.__name__}__": name for operator, name in _INPLACE_OPERATORS.items()}


def inplace_name(node: fx.Node) -> str | None:
    """The functional name of an operator of torch that writes its first argument, or None for one that does not."""
    if node.op == "call_function" and node.target in _INPLACE_OPERATORS:
        return _INPLACE_OPERATORS[node.target]
    name = operator_name(node)
    if name.endswith("_") and not name.endswith("__"):
        return None if name in ("and_", "or_", "not_", "is_") else name[:-1]
    if name in _INPLACE_METHODS:
        return _INPLACE_METHODS[name]
    return name if argument_of(node, "inplace") else None


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node may write: its first argument, ``out=``, lists, mutable schemas, graph bodies that mutate.

    A function of the user under ``allow_in_graph`` may write to all that it is given.
    """
    written = written_arguments(node, operator_name(node))
    if inplace_name(node) is not None:
        written += [node.args[0] if node.args else node.kwargs.get("input")]
    for overload in overloads_of(node.target):
        for index, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                positional = index < len(node.args) and not argument.kwarg_only
                written.append(node.args[index] if positional else node.kwargs.get(argument.name))
    if _has_unknown_writes(node):
        written += node.all_input_nodes
    found: list[fx.Node] = []
    fx.node.map_arg(written, found.append)
    return [other for other in dict.fromkeys(found) if isinstance(fake_of(other), torch.Tensor)]


def is_written(nodes: set[fx.Node], since: fx.Node | None = None) -> bool:
    """True if something writes to memory of these nodes, behind the first of them or behind another one."""
    storages = {storage_of(node) for node in nodes}
    step = min(nodes) if since is None else since
    while step.op != "root" and not any(storage_of(written) in storages for written in written_nodes(step)):
        step = step.next
    return step.op != "root"


def constant_of(node: fx.Node, are_written: Callable[[set[fx.Node]], bool] = is_written) -> float | None:
    """The element of a tensor that is made of numbers of Python's alone, as torch computes it; None if anything writes to them.

        torch.ceil(4.5 * torch.tensor(1.25)).to(torch.int64)            6
    """
    fake = fake_of(node)
    constant = getattr(fake, "constant", None)
    if not isinstance(fake, FakeTensor) or constant is None or constant.numel() != 1 or fake.requires_grad:
        return None
    made_of = {node}
    stack = [node]
    while stack:
        operands = [operand for operand in stack.pop().all_input_nodes if operand not in made_of]
        made_of.update(operands)
        stack += operands
    is_made = all(step.op in ("call_function", "call_method") for step in made_of)
    return constant.item() if is_made and not are_written(made_of) else None


def _has_unknown_writes(node: fx.Node) -> bool:
    """True if nothing tells what a node writes: kernels and functions of the user, graph bodies that write somewhere."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        bodies = [body for operand in node.all_input_nodes if (body := _body(operand)) is not None]
        steps = [step for body in bodies for step in body.graph.nodes if step.op != "output"]
        return "mutation" in node.target.name() or not bodies or any(map(written_nodes, steps))
    calls = node.op in ("call_function", "call_method", "call_module")
    return calls and not operator_name(node) and not overloads_of(node.target) and not _dtensor_method(node)


def _dtensor_method(node: fx.Node) -> str:
    """The name of a form for a method of DTensor, "" for another node."""
    call = dtensor_call(node)
    return "" if call is None else f"DTensor.{call[0]}"


def _body(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a node hands to a higher-order operator."""
    owner = node.graph.owning_module
    if node.op != "get_attr" or owner is None or not isinstance(node.target, str):
        return None
    body = getattr(owner, node.target, None)
    return body if isinstance(body, fx.GraphModule) else None


GRADIENT_MODES = ("_set_grad_enabled", "_enter_inference_mode")
_GRADIENT_OFF = [("_set_grad_enabled", False)], [("_enter_inference_mode", True)]
_CONTEXT_ENDS = {"_exit_autocast": "_enter_autocast", "_exit_inference_mode": "_enter_inference_mode",
                 "_exit_dual_level": "_enter_dual_level"}  # fmt: skip


_DETACHING = frozenset(("detach", "_get_data_attr", "data"))


@dataclass
class GraphView:
    """Values of all nodes of one graph. ``table`` maps an operator's name to its canonical form.

    ``numbers_only``: values are what tensors hold, whether gradients get through or not. So they are for what is computed where
    gradients are off.
    """

    graph: fx.Graph
    table: dict[str, Callable]
    numbers_only: bool = False
    position: dict[fx.Node, int] = field(default_factory=dict)
    context: dict[fx.Node, tuple] = field(default_factory=dict)
    reads: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # operands, and what wrote to them last before a node
    writes: dict[fx.Node, fx.Node] = field(default_factory=dict)  # writing node -> the node it writes, the first of several
    numbers: dict[sympy.Symbol, Value] = field(default_factory=dict)  # what holds the numbers that only the data tell
    lengths: dict[Value, list[Size]] = field(default_factory=dict)  # how many rows masks of rows select
    splits: list[tuple[list[Size], Size]] = field(default_factory=list)  # sizes of the parts of an axis, and its own
    _now: dict[fx.Node, Any] = field(default_factory=dict)
    _history: dict[fx.Node, list[tuple[int, Any]]] = field(default_factory=dict)
    _aliases: dict[int, list[fx.Node]] = field(default_factory=dict)
    _all_writes: dict[tuple[fx.Node, fx.Node], None] = field(default_factory=dict)
    _last_writes: dict[int | fx.Node, fx.Node] = field(default_factory=dict)
    _places: dict[fx.Node, tuple[Size, ...]] = field(default_factory=dict)
    detached: set[fx.Node] = field(default_factory=set)  # views that autograd does not see as views
    _pool: dict[tuple, Value] = field(default_factory=dict)
    _node: fx.Node | None = None
    _never_graded: set[Value] = field(default_factory=set)  # numbers that have no gradient in any mode
    _of_state: frozenset[fx.Node] = frozenset()

    def __post_init__(self) -> None:
        self._of_state = nodes_of_state(self.graph)
        context: tuple = ()
        for index, node in enumerate(self.graph.nodes):
            self.position[node] = index
            self._node = node
            context = _next_context(context, node)
            self.context[node] = context
            self.reads[node] = self._read(node)
            if node.op != "output":
                self._visit(node)

    # What others ask.

    def value_at(self, node: fx.Node, position: int) -> Any:
        """What ``node`` holds right after the node at ``position`` ran."""
        history = self._history[node]
        after = bisect_right(history, position, key=operator.itemgetter(0))
        return history[after - 1][1] if after else None

    def value(self, node: fx.Node) -> Any:
        """What ``node`` holds when it is first computed (for a writing node: what it wrote)."""
        return self._history[node][0][1]

    def result(self, node: fx.Node) -> Any:
        """What ``node`` gives, or leaves in the tensor that it writes."""
        return self.value_at(self.writes.get(node, node), self.position[node])

    def all_writes(self) -> list[tuple[fx.Node, fx.Node]]:
        """Every writing node with each of the nodes that it writes, in graph order."""
        return list(self._all_writes)

    @cached_property
    def of_numbers(self) -> "GraphView":
        """The view of the same graph with ``numbers_only``: this one where nothing is detached or computed without gradients."""
        detaches = any((inplace_name(node) or operator_name(node)) == "detach" for node in self.position)
        alike = self.numbers_only or not (detaches or any(map(self._is_switched, self.position)))
        return self if alike else GraphView(self.graph, self.table, numbers_only=True)

    @cached_property
    def inputs(self) -> frozenset[fx.Node]:
        return frozenset(node for node in self.position if node.op in ("placeholder", "get_attr"))

    @cached_property
    def without_gradients(self) -> frozenset[fx.Node]:
        """Nodes of which no gradient is asked for."""
        return frozenset(node for node in self.position if not needs_gradient(self.writes.get(node, node)))

    def aliases(self, node: fx.Node) -> list[fx.Node]:
        storage = storage_of(node)
        return self._aliases.get(storage, [node]) if storage is not None else [node]

    # What canonical forms use to build values.

    def make(self, op: str, *args: Any, shape: tuple | None = None, dtype: torch.dtype | None = None) -> Value:
        fake = fake_of(self._node)
        if shape is None:
            shape = tuple(map(size_of, fake.shape))
        dtype = dtype or fake.dtype
        key = (op, args, shape, dtype)
        found = self._pool.get(key)
        if found is None:
            found = self._pool[key] = Value(op, args, shape, dtype, self._node)
            found.of_state = self._node in self._of_state
            if op in ELEMENTS_OF_FIRST:
                found.bound, found.fades = args[0].bound, args[0].fades
        return found

    def opaque(self, node: fx.Node, tag: Any = None) -> Any:
        fake = fake_of(node)
        if isinstance(fake, torch.Tensor):
            kind = "input" if node.op in ("placeholder", "get_attr") else "opaque"
            value = self.make(kind, node, tag, shape=tuple(map(size_of, fake.shape)), dtype=fake.dtype)
            value.node = node
            return value
        if isinstance(fake, (int, float, bool, torch.SymInt)):
            return size_of(fake) if isinstance(fake, torch.SymInt) else fake
        if isinstance(fake, (tuple, list)):
            return tuple(
                self.make("output", node, i, tag, shape=tuple(map(size_of, item.shape)), dtype=item.dtype)
                if isinstance(item, torch.Tensor) else size_of(item) if isinstance(item, torch.SymInt) else item
                for i, item in enumerate(fake)
            )  # fmt: skip
        return fake

    def with_part(self, part: Value, written: Value) -> Value | None:
        """The tensor that a view is a part of, with ``written`` there; None where its place is not known."""
        whole, *at = part.args
        make = partial(self.make, shape=whole.shape, dtype=whole.dtype)
        match part.op:
            case "index":
                return make("put", whole, at[0], written, False)
            case "select" if at[1] in range(len(parts := self._parts_along(whole, at[0]))):
                return make("stack", (*parts[: at[1]], written, *parts[at[1] + 1 :]), at[0])
            case "slice" if at[2] == 1 and isinstance(size := whole.shape[at[0]], int):
                dim, start, stop = *at[:2], at[1] + part.shape[at[0]]
                before, behind = (self._slice(whole, dim, *ends) for ends in ((0, start), (stop, size)))
                return make("cat", (*before, written, *behind), dim)
        return None

    def _parts_along(self, x: Value, dim: int) -> list[Value]:
        """The parts of a tensor along an axis; none where only a call tells how many."""
        if x.op == "stack" and x.args[1] == dim:
            return list(x.args[0])
        shape, n = (*x.shape[:dim], *x.shape[dim + 1 :]), x.shape[dim] if isinstance(x.shape[dim], int) else 0
        return [self.make("select", x, dim, i, shape=shape, dtype=x.dtype) for i in range(n)]

    def _slice(self, x: Value, dim: int, start: int, stop: int) -> list[Value]:
        """A slice of a tensor, unless it has no elements."""
        shape = (*x.shape[:dim], stop - start, *x.shape[dim + 1 :])
        return [self.make("slice", x, dim, start, 1, shape=shape, dtype=x.dtype)] if start < stop else []

    # The walk.

    def _visit(self, node: fx.Node) -> None:
        written = inplace_name(node)
        target = node.args[0] if written and node.args and isinstance(node.args[0], fx.Node) else None
        if target is not None and not isinstance(fake_of(target), torch.Tensor):
            target = None  # arithmetic on Python numbers
        value = self._compute(node, written if target is not None else None)
        self._record(node, value)
        if target is not None:
            self._note_write(node, target)
            if not isinstance(value, Value):  # setitem returns None, and has no value of its own where it stays opaque
                value = self.opaque(target, node)
            self._write(target, value, node)
        for other in written_nodes(node):
            if other is not target:
                self._note_write(node, other)
                self._write(other, self.opaque(other, node), node)
        storage = storage_of(node)
        if storage is not None:
            self._aliases.setdefault(storage, []).append(node)
            if self._is_detached(node):
                self.detached.add(node)

    def _read(self, node: fx.Node) -> list[fx.Node]:
        operands = node.all_input_nodes
        buffers = [_buffer(operand) for operand in operands] if self._last_writes else []
        return [*operands, *(self._last_writes[buffer] for buffer in buffers if buffer in self._last_writes)]

    def _note_write(self, node: fx.Node, target: fx.Node) -> None:
        self._all_writes[node, target] = None
        self.writes.setdefault(node, target)
        self._last_writes[_buffer(target)] = node

    def _is_detached(self, node: fx.Node) -> bool:
        """True if autograd may not see that a tensor shares memory; a function of the user may hide it."""
        name = operator_name(node)
        if name in _DETACHING or self.is_without_gradient(node):
            return True
        viewed = [operand for operand in node.all_input_nodes if storage_of(operand) == storage_of(node)]
        return bool(viewed) and (not name or not self.detached.isdisjoint(viewed))

    def _record(self, node: fx.Node, value: Any) -> None:
        self._now[node] = value
        self._history.setdefault(node, []).append((self.position[self._node], value))

    def _compute(self, node: fx.Node, written: str | None) -> Any:
        number = constant_of(node, lambda of: not self._written.isdisjoint(map(storage_of, of))) if written is None else None
        if number is not None:
            return self.make("full", number)
        name, args, kwargs = called_instead(node)
        form = self.table.get(written or name) if is_on_plain_tensors(node) else self.table.get(_dtensor_method(node))
        if form is None or "out" in node.kwargs:
            return self.opaque(node)
        args, kwargs = fx.node.map_arg((args, kwargs), lambda arg: self._now[arg])
        try:
            found = form(self, *args, **kwargs)
        except NotCanonical:
            return self.opaque(node)
        if not self.is_without_gradient(node):
            return found
        is_full = isinstance(found, Value) and found.op == "full" and not written
        alike = is_full or all(map(self._has_no_gradient, node.all_input_nodes))
        if alike and isinstance(found, Value):
            self._never_graded.add(found)
        return found if alike else self._without_gradient(found, self.opaque(node))

    @cached_property
    def _written(self) -> frozenset[int | None]:
        return frozenset(storage_of(written) for node in self.graph.nodes for written in written_nodes(node))

    def _without_gradient(self, found: Any, opaque: Any) -> Any:
        """What is computed without gradient: ids have none anyway."""
        if isinstance(found, tuple) and isinstance(opaque, tuple):
            return tuple(map(self._without_gradient, found, opaque))
        return found if isinstance(found, Value) and not found.dtype.is_floating_point else opaque

    def _has_no_gradient(self, node: fx.Node) -> bool:
        """True if a number has no gradient whether or not gradients are switched off."""
        value = self._now.get(node)
        known = isinstance(value, Value) and (not value.dtype.is_floating_point or value in self._never_graded)
        return known or not (needs_gradient(node) or self.is_without_gradient(node))

    def is_without_gradient(self, node: fx.Node) -> bool:
        """Numbers computed without gradient are not the same value as equal ones computed with it, where gradients matter."""
        fake = fake_of(node)
        if self.numbers_only or not self._is_switched(node) or isinstance(fake, torch.SymInt | torch.SymBool):
            return False
        fakes = fake if isinstance(fake, (tuple, list)) else [fake]
        if fake is None:
            fakes = list(map(fake_of, node.all_input_nodes))  # an element that Dynamo takes of a tensor for a list
        tensors = [part for part in fakes if isinstance(part, torch.Tensor)]
        return not tensors or any(tensor.dtype.is_floating_point for tensor in tensors)

    def _is_switched(self, node: fx.Node) -> bool:
        """True if a block that the graph itself switches gradients off or on for holds a node."""
        return any(name in GRADIENT_MODES for name, _ in self.context[node])

    def is_gradient_off(self, node: fx.Node) -> bool:
        """True if a block that the graph itself switches gradients off for holds a node."""
        modes = [(name, args[0]) for name, args in self.context[node] if name in GRADIENT_MODES]
        return modes[-1:] in _GRADIENT_OFF

    def has_tangents(self, node: fx.Node) -> bool:
        """True if a node may compute derivatives forward, which none of our operators does."""
        return any(name == "_enter_dual_level" for name, _ in self.context[node])

    def _write(self, target: fx.Node, value: Value, at: fx.Node) -> None:
        before = self._now[target]
        value = self.opaque(target, at) if _overlaps(fake_of(target)) else value
        storage = storage_of(target)
        same_buffer = self._aliases.get(storage, []) if storage is not None else [target]
        for alias in same_buffer:
            held, after = self._now[alias], None
            if held is before and self._is_same_place(alias, target):
                after = value
            elif before.op in ("index", "select", "slice") and before.args[0] is held and self._are_rows(target, alias):
                after = None if _overlaps(fake_of(alias)) else self.with_part(before, value)
            elif _is_reshape(alias, target) and (alias in self.detached) == (target in self.detached):
                after = self.make("reshape", value, shape=tuple(map(size_of, fake_of(alias).shape)), dtype=value.dtype)
            self._record(alias, self.opaque(alias, at) if after is None else after)
        if any(alias.op == "placeholder" for alias in same_buffer):
            # Two placeholders may be views of one tensor of the caller.
            for node in self.graph.nodes:
                if node is at:
                    break
                if node.op == "placeholder" and node not in same_buffer and isinstance(fake_of(node), torch.Tensor):
                    self._record(node, self.opaque(node, at))

    def _is_same_place(self, a: fx.Node, b: fx.Node) -> bool:
        """Both are the same part of their storage: two rows of a buffer that hold zeros are not."""
        one, other = self._place(a), self._place(b)
        return one == other or same_shape(one, other)

    def _place(self, node: fx.Node) -> tuple[Size, ...]:
        place = self._places.get(node)
        if place is None:
            fake = fake_of(node)
            place = self._places[node] = tuple(map(size_of, (*fake.shape, *fake.stride(), fake.storage_offset())))
        return place

    def _are_rows(self, part: fx.Node, whole: fx.Node) -> bool:
        """``part`` is a part of ``whole`` along an axis: one index of it, or a slice with bounds that only the data tell."""
        of = part.args[0]
        return isinstance(of, fx.Node) and isinstance(fake_of(of), torch.Tensor) and self._is_same_place(of, whole)


def _overlaps(fake: torch.Tensor) -> bool:
    """True if elements may share memory, as in ``row.expand(3, -1)`` and ``x.unfold(0, 3, 1)``: a write to one is to more."""
    axes = [(s, n) for s, n in zip(fake.stride(), fake.shape, strict=True) if type(n) is not int or n > 1]
    orders = ((order, accumulate((s * (n - 1) for s, n in order), initial=1)) for order in permutations(reversed(axes)))
    apart = (all(statically_known_true(s >= end) for (s, _), end in zip(*order, strict=False)) for order in orders)
    return not (is_contiguous_or_false(fake) or any(apart))


def _buffer(node: fx.Node) -> int | fx.Node:
    """What aliases share, a node itself if it has no memory to tell them by."""
    storage = storage_of(node)
    return node if storage is None else storage


def _is_reshape(a: fx.Node, b: fx.Node) -> bool:
    """Both hold all of their storage in row-major order."""
    fakes = fake_of(a), fake_of(b)
    numels = [math.prod(map(size_of, fake.shape)) for fake in fakes]
    return same_size(*numels) and all(is_contiguous_or_false(f) and size_of(f.storage_offset()) == 0 for f in fakes)


def _switches_on(name: str, settings: Sequence) -> bool:
    """True if the mode is on inside, or was before."""
    if name == "_enter_autocast":
        return settings[2] or torch.is_autocast_enabled(settings[0])
    return name != "_enter_inference_mode" or settings[0]


def _next_context(context: tuple, node: fx.Node) -> tuple:
    if node.op != "call_function":
        return context
    name = target_name(node)
    if name in _CONTEXT_ENDS.values():
        kinds = GRADIENT_MODES if name in GRADIENT_MODES else (name,)
        changes = _switches_on(name, node.args) or any(mode in kinds for mode, _ in context)
        return (*context, (name, node.args)) if changes else context
    if name in _CONTEXT_ENDS:
        begun = [i for i, entry in enumerate(context) if entry[0] == _CONTEXT_ENDS[name]]
        return (*context[: begun[-1]], *context[begun[-1] + 1 :]) if begun else context
    if name != "_set_grad_enabled":
        return context
    kept = tuple(entry for entry in context if entry[0] != name)
    return kept if kept != context else (*kept, (name, node.args))
