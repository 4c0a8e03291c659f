"""Numbers of a tensor's elements in the graph, where the program copies them to the host.

    sizes = counts.tolist()                     E numbers, each a symbol of Dynamo's and an `item` in the graph
    rows[start : start + sizes[e]]              bounds of symbols: how many rows, only the data tell
    rows[ends[e] : ends[e + 1]]                 so are bounds that are tensors of one element
    for n in counts.cpu().numpy()               an array is its numbers, as long as nobody writes to what it shares

Which rows these are is for the graph to say (`forms.splits`), and a rewrite takes the numbers out again.
"""

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._dynamo.utils import np, proxy_args_kwargs  # NumPy, or None: torch does not ask for it
from torch._dynamo.variables import (
    ConstantVariable,
    ListIteratorVariable,
    ListVariable,
    SliceVariable,
    SymNodeVariable,
    TupleVariable,
)
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import is_written, target_name
from moeblaze_ops.lowering.graph.sizes import same_size, size_of
from moeblaze_ops.lowering.obligations.ids_in_range import ids_below
from moeblaze_ops.lowering.obligations.known_sizes import cut_of, known_sizes_of, rows_of_groups
from moeblaze_ops.lowering.obligations.markers import counts_below, left_as_it_is, one_hot_below, rows_between, rows_joined
from moeblaze_ops.lowering.tracing import hit_loops
from moeblaze_ops.lowering.tracing.hit_loops import Counts, Declined, Taken, Total, is_along_first, running_sums

_RUNNING_SUMS = () if np is None else (np.cumsum,)

_MOST_NUMBERS = 512
"""Elements of a list that are traced one by one, each of them a symbol."""


class HostArray(VariableTracker):
    """A NumPy array of the numbers of a tensor with one axis: what is asked of it but its numbers gives the attempt up."""

    def __init__(self, items: list[VariableTracker], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.items = items

    def python_type(self) -> type:
        return np.ndarray

    def has_unpack_var_sequence(self, tx: Any) -> bool:
        return True

    def unpack_var_sequence(self, tx: Any) -> list[VariableTracker]:
        return list(self.items)

    def call_obj_hasattr(self, tx: Any, name: str) -> ConstantVariable:
        return ConstantVariable.create(hasattr(np.ndarray, name))

    def tp_iter_impl(self, tx: Any) -> VariableTracker:
        return ListIteratorVariable(list(self.items), mutation_type=ValueMutationNew())

    def call_method(self, tx: Any, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> Any:
        if name == "tolist" and not args and not kwargs:
            return ListVariable(list(self.items), mutation_type=ValueMutationNew())
        if name == "cumsum" and is_along_first([*args, *kwargs.values()]):
            return HostArray(running_sums(tx, self.items))
        if name == "__iter__":
            return self.tp_iter_impl(tx)
        return super().call_method(tx, name, args, kwargs)


def handled(tx: Any, function: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker | None:
    """What a function of Python, NumPy or torch gives for numbers of tensors, where it is other than Dynamo's.

    A bincount has at least as many elements as asked for, and becomes ``counts_below(ids, minlength)``, which has as many.
    """
    if function is torch.bincount:
        if (arguments := _counted(args, kwargs)) is not None:
            return _traced(tx, counts_below, arguments)
        if len(args) == 1 and not kwargs:
            counts = _traced(tx, torch.bincount, args)
            known = vars(tx.output).setdefault("_moeblaze_counted", {})
            known[counts.as_proxy().node] = args[0].call_method(tx, "clone", [], {})
            return counts
        return None
    if function is torch.repeat_interleave and len(args) > 1 and (size := _rows_repeated(tx, args[1])) is not None:
        return _traced(tx, function, args, {"output_size": size} | kwargs)
    if function is torch.tensor and len(args) == 1:
        return _made_of_numbers(tx, args[0], kwargs)
    if function is torch.nn.functional.one_hot:
        return _one_hot(tx, dict(zip(("tensor", "num_classes"), args, strict=False)) | kwargs)
    along_rows = function in (*_RUNNING_SUMS, *_JOINS) and kwargs.keys() <= {"axis", "dim"}
    if not args or (kwargs and not (along_rows and is_along_first(list(kwargs.values())))):
        return None
    if function is operator.getitem and isinstance(args[0], HostArray) and isinstance(args[1], ConstantVariable):
        index = args[1].value
        return args[0].items[index] if type(index) is int and -len(args[0].items) <= index < len(args[0].items) else None
    if function is operator.getitem and isinstance(args[0], TensorVariable) and (bounds := _bounds_of_data(tx, args[1])):
        rows, others = _slice(tx, args[0], bounds), _other_axes(args[1])
        if all(map(_is_whole, others)):
            return rows
        return _traced(tx, operator.getitem, [rows, TupleVariable([_whole(tx), *others])])  # rows[start:end, None]
    if function is operator.getitem and isinstance(args[0], TensorVariable) and (classes := _first_classes(tx, args[0], args[1])):
        return classes
    if function in (operator.add, operator.iadd) and len(args) == 2 and (count := _in_tensor(tx, *args)) is not None:
        return _traced(tx, function, [args[0], count])
    if function in _JOINS and (size := _known_rows(tx, args)) is not None:
        return _traced(tx, rows_joined, [args[0], size])
    if function is len and isinstance(args[0], HostArray):
        return ConstantVariable.create(len(args[0].items))
    if function in _RUNNING_SUMS and is_along_first(args[1:]):
        items = args[0].items if isinstance(args[0], HostArray | ListVariable) else []
        return HostArray(running_sums(tx, items)) if any(isinstance(n, SymNodeVariable) for n in items) else None
    return None


def handled_method(tx: Any, x: TensorVariable, name: str, args: list, kwargs: dict) -> VariableTracker | None:
    if name in ("tolist", "numpy"):
        fake = fake_value(x)
        if isinstance(fake.numel(), int) and fake.numel() > _MOST_NUMBERS:
            raise Declined(f"a list of {fake.numel()} numbers")
        are_integers = fake.dim() == 1 and not fake.dtype.is_floating_point and fake.dtype != torch.bool
        is_array = np is not None and name == "numpy" and are_integers
        if is_array and not args and not kwargs and isinstance(fake.shape[0], int):
            return HostArray(_traced(tx, left_as_it_is, [x]).call_method(tx, "tolist", [], {}).items)
    if name in ("tolist", "numpy") and not args and not kwargs and (counted := _counted_before(tx, x)) is not None:
        ids, number = counted
        counts = _traced(tx, counts_below, [ids, ConstantVariable.create(number)])
        return Counts(ids, counts.call_method(tx, "tolist", [], {}).items)
    if name == "new_tensor" and len(args) == 1 and not kwargs:
        return _selected_rows(tx, fake_value(x).dtype, fake_value(x).device, args[0])
    if name == "__setitem__" and (count := _in_tensor(tx, x, args[1])) is not None:
        return x.call_method(tx, name, [args[0], count], {})
    if name == "__setitem__" and all(map(_is_whole, _other_axes(args[0]))) and (bounds := _bounds_of_data(tx, args[0])):
        write = "copy_" if isinstance(args[1], TensorVariable) else "fill_"
        return _slice(tx, x, bounds).call_method(tx, write, [args[1]], {})
    return handled(tx, getattr(torch, name), [x, *args], kwargs) if name in ("bincount", "repeat_interleave") else None


def _one_hot(tx: Any, arguments: dict[str, VariableTracker]) -> VariableTracker | None:
    """A one-hot of as many classes as a tensor holds, which asserts what ``F.one_hot`` checks.

        F.one_hot(place, counts.max()), F.one_hot(place, counts.max().item())
    """
    ids, given = arguments.get("tensor"), arguments.get("num_classes")
    if given is None or type(ids) is not TensorVariable:
        return None
    if not _is_number_of_data(number := _number(tx, given)):
        return None if number is given else _traced(tx, torch.nn.functional.one_hot, [ids, number])
    of_ids, held = ids.as_proxy(), _holder(tx, ids, given)
    most = given.as_proxy() if held is None else held
    in_range = tx.output.create_proxy("call_function", torch.ge, (of_ids, 0), {})
    in_range = in_range & tx.output.create_proxy("call_function", torch.lt, (of_ids, most), {})
    tx.output.create_proxy("call_function", torch._assert_async, (in_range.all(), "one_hot: ids must be below num_classes"), {})
    made = _traced(tx, one_hot_below, [ids, number])
    clamped = given.as_proxy().node if held is None else held.node
    least = clamped.kwargs.get("min") if target_name(clamped) == "clamp" and len(clamped.kwargs) == 1 else None
    if type(least) is int and not is_written({clamped, of_ids.node}):
        vars(tx.output).setdefault("_moeblaze_one_hots", {})[made.as_proxy().node] = ids, least
    return made


def _first_classes(tx: Any, one_hot: TensorVariable, key: VariableTracker) -> VariableTracker | None:
    """A one-hot of as many classes as a subscript takes of another, where that is known to have so many.

        F.one_hot(place, max(place.max() + 1, C))[..., :C]
    """
    ids, least = vars(tx.output).get("_moeblaze_one_hots", {}).get(one_hot.as_proxy().node, (None, 0))
    whole, last = key.items if isinstance(key, TupleVariable) and len(key.items) == 2 else (None, None)
    if ids is None or not isinstance(last, SliceVariable) or not (isinstance(whole, ConstantVariable) and whole.value is ...):
        return None
    start, stop, step = last.items
    known = _is_none(start) and _is_none(step) and isinstance(stop, ConstantVariable) and type(stop.value) is int
    if not known or not 0 <= stop.value <= least or is_written({ids.as_proxy().node, one_hot.as_proxy().node}):
        return None
    _traced(tx, left_as_it_is, [one_hot])
    return _traced(tx, left_as_it_is, [_traced(tx, one_hot_below, [ids, stop])])


_COMPARISONS = {"<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq, "!=": torch.ne}


def compared(tx: Any, sign: str, x: VariableTracker, number: VariableTracker) -> VariableTracker | None:
    """The comparison of a tensor with a number that the data tell, as one with the tensor that holds the number."""
    if sign in _COMPARISONS and (isinstance(x, Taken) or isinstance(number, Taken)):
        return hit_loops.handled(None, getattr(operator, _COMPARISONS[sign].__name__), [x, number])
    if sign not in _COMPARISONS or type(x) is not TensorVariable or not _is_number_of_data(number):
        return None
    if (held := _holder(tx, x, number)) is None:
        return None
    return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", _COMPARISONS[sign], (x.as_proxy(), held), {}))


def settled_condition(tx: Any, condition: SymNodeVariable) -> bool | None:
    """What a comparison of numbers that the data tell is, where it is the same whatever they tell.

        if rows.shape[0] > sum(counts.tolist()):        all rows are counted
    """
    number = condition.sym_num
    if not isinstance(number, torch.SymBool) or len(free_unbacked_symbols(number)) < 2:
        return None
    found = number.node.expr.xreplace(known_sizes_of(tx.output.graph))
    return bool(found) if found in (sympy.true, sympy.false) else None


def _holder(tx: Any, x: VariableTracker, number: VariableTracker) -> torch.fx.Proxy | None:
    """The tensor that a number was read from, where that may stand beside ``x`` as well: the number may go then.

        place < counts.max().item()         place < counts.max()
    """
    read = number.as_proxy().node
    if target_name(read) != "item" or read.graph is not tx.output.graph or is_written({read.args[0]}):
        return None
    held = fake_of(read.args[0])
    if held is None or held.device != fake_value(x).device or held.dim() or held.dtype.is_floating_point:
        return None
    return torch.fx.Proxy(read.args[0], tx.output.current_tracer)


def _selected_rows(tx: Any, dtype: torch.dtype, device: torch.device, numbers: VariableTracker) -> VariableTracker | None:
    """How many rows masks select, in a tensor that is made of these numbers: it counts what is true instead.

        x.new_tensor([len(rows) for rows in parts])     torch.stack([mask.count_nonzero().to(x.dtype) for mask in masks])
    """
    items = numbers.items if isinstance(numbers, ListVariable) else []
    counts = _counts_of(tx, dtype, device, items)
    return _traced(tx, torch.stack, [ListVariable(counts)]) if counts else None


def _made_of_numbers(tx: Any, numbers: VariableTracker, settings: dict[str, VariableTracker]) -> VariableTracker | None:
    """What ``torch.tensor`` makes of numbers of selected rows, on a device that it is told."""
    known = {name: setting for name, setting in settings.items() if name in ("dtype", "device") and setting.is_python_constant()}
    given = {name: setting.as_python_constant() for name, setting in known.items()}
    if len(given) < len(settings) or given.get("device") is None:
        return None
    return _selected_rows(tx, given.get("dtype") or torch.int64, torch.device(given["device"]), numbers)


def _counts_of(tx: Any, dtype: torch.dtype, device: torch.device, numbers: list[VariableTracker]) -> list[VariableTracker]:
    """What numbers of selected rows count, each in a tensor; nothing where one is another number.

        load[e] += len(rows)            load[e] += mask.count_nonzero()
        load[e] += len(rows[:C])        load[e] += (mask & (mask.cumsum(0) <= C)).count_nonzero()
    """
    if not all(isinstance(number, SymNodeVariable) for number in numbers):
        return []
    mask_of: dict[Any, torch.fx.Node | None] = {}
    for node in tx.output.graph.nodes:
        if target_name(node) in ("nonzero", "where") and len(node.args) == 1:
            size = size_of(tree_leaves(fake_of(node))[0].shape[0])
            mask_of[size] = None if size in mask_of else node.args[0]
    counts = []
    for whole, stop in map(cut_of, map(_size_of, numbers)):
        mask = mask_of.get(whole)
        if mask is None or is_written({mask}) or fake_of(mask).device != device:
            return []
        true = wrap_fx_proxy(tx, torch.fx.Proxy(mask, tx.output.current_tracer).flatten())
        if stop is not None:
            true = true if fake_of(mask).dtype == torch.bool else true.call_method(tx, "bool", [], {})
            number = true.call_method(tx, "cumsum", [ConstantVariable.create(0)], {})
            true = _traced(tx, torch.logical_and, [true, _traced(tx, torch.le, [number, ConstantVariable.create(stop)])])
        counts.append(_traced(tx, torch.count_nonzero, [true]).call_method(tx, "to", [ConstantVariable.create(dtype)], {}))
    return counts


def _in_tensor(tx: Any, x: VariableTracker, number: VariableTracker) -> VariableTracker | None:
    """A number of selected rows as a tensor, where one of the dtype of ``x`` holds it as it would hold a number of Python's."""
    fake = fake_value(x) if isinstance(x, TensorVariable) else None
    held = fake is not None and fake.dtype in (torch.int32, torch.int64, torch.float32, torch.float64)
    return next(iter(_counts_of(tx, fake.dtype, fake.device, [number])), None) if held else None


_JOINS = (torch.cat, torch.concat, torch.concatenate, torch.vstack)


def _known_rows(tx: Any, args: list[VariableTracker]) -> VariableTracker | None:
    """How many rows parts have in all, where the data tell how many each of them has, and not how many these are."""
    parts = getattr(args[0], "items", [])
    along_rows = len(args) == 1 or is_along_first(args[1:])
    tensors = [fake_value(part) for part in parts if isinstance(part, TensorVariable) and fake_value(part).dim() > 1]
    if not along_rows or len(tensors) != len(parts) or not any(free_unbacked_symbols(part.shape[0]) for part in tensors):
        return None
    return _as_variable(tx, _settled(tx, sum(part.shape[0] for part in tensors)))


def _rows_repeated(tx: Any, counts: VariableTracker) -> VariableTracker | None:
    """How many rows there are where each is repeated as often as a tensor tells: as many as that counts ids."""
    total = rows_of_groups(tx.output.graph, counts.as_proxy().node) if isinstance(counts, TensorVariable) else None
    return None if total is None else _as_variable(tx, sympy.sympify(total))


def _as_variable(tx: Any, total: sympy.Expr) -> VariableTracker | None:
    """A number of rows, where the data do not tell it and the graph has it."""
    if total.is_Integer:
        return ConstantVariable.create(int(total))
    if free_unbacked_symbols(total):
        return None
    for node in reversed(tx.output.graph.nodes):  # another tensor has as many
        fake = node.meta.get("example_value")
        if isinstance(fake, torch.Tensor) and fake.dim() > 0 and not fake.is_nested and same_size(size_of(fake.shape[0]), total):
            rows = torch.fx.Proxy(node, tx.output.current_tracer)
            return wrap_fx_proxy(tx, tx.output.create_proxy("call_method", "size", (rows, 0), {}))
    return None


def _is_all(tx: Any, stop: VariableTracker, size: Any) -> bool:
    """True if the stop of a slice is the size of the axis, by what is known of numbers.

        rows[: sum(counts.tolist())]
    """
    return isinstance(stop, SymNodeVariable) and same_size(_settled(tx, fake_value(stop)), size_of(size))


def _settled(tx: Any, size: torch.SymInt) -> sympy.Expr:
    """A size that the data seem to tell, by those that they do not where it is known."""
    several = len(free_unbacked_symbols(size)) > 1
    return sympy.expand(size.node.expr.xreplace(known_sizes_of(tx.output.graph) if several else {}))


def _slice(tx: Any, x: VariableTracker, bounds: list[VariableTracker]) -> VariableTracker:
    """Rows between two bounds: as many as in a slice with the same bounds, where there was one.

    Dynamo knows nothing of its size, and torch 2.11 cannot tell that what is written to one fits.
    """
    start, stop = bounds
    if _size_of(start) == 0 and _is_all(tx, stop, fake_value(x).shape[0]):
        return _traced(tx, operator.getitem, [x, _whole(tx)])
    known = vars(tx.output).setdefault("_moeblaze_slices", {})
    key = (tx.output.current_tracer, *map(_size_of, bounds), size_of(fake_value(x).shape[0]))
    if key in known:
        arguments = [x, *bounds, known[key].call_method(tx, "size", [ConstantVariable.create(0)], {})]
        return _traced(tx, rows_between, arguments)
    known[key] = _traced(tx, operator.getitem, [x, SliceVariable(bounds, tx)])
    return known[key]


def _traced(tx: Any, function: Callable, arguments: list[VariableTracker], named: dict | None = None) -> VariableTracker:
    """A call of ``function`` in the graph, and what Dynamo knows of its result."""
    return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", function, *proxy_args_kwargs(arguments, named or {})))


def _counted(args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> list[VariableTracker] | None:
    """The ids that a bincount without weights counts, and how many counts it gives at least, if a number says so."""
    arguments = dict(zip(("input", "weights", "minlength"), args, strict=False)) | kwargs
    least = arguments.get("minlength")
    plain = "weights" not in arguments or _is_none(arguments["weights"])
    known = isinstance(least, ConstantVariable) and isinstance(least.value, int) and least.value > 0
    return [arguments["input"], least] if plain and known and fake_value(arguments["input"]).dim() == 1 else None


def _counted_before(tx: Any, counts: TensorVariable) -> tuple[VariableTracker, int] | None:
    """The ids that a bincount without ``minlength`` counted, as they were, and what all of them are known to be below."""
    node = counts.as_proxy().node
    chain = {node}
    while target_name(node) in ("cpu", "to", "long", "int", "detach"):
        node = node.args[0]
        chain.add(node)
    ids = vars(tx.output).get("_moeblaze_counted", {}).get(node)
    if ids is None or fake_value(ids).numel() == 0 or is_written(chain):
        return None
    number = ids_below(node.graph, ids.as_proxy().node)
    return (ids, number) if number is not None and number <= _MOST_NUMBERS else None


def _bounds_of_data(tx: Any, key: VariableTracker) -> list[VariableTracker] | None:
    """The bounds of a subscript that is a slice of the first axis, where the data tell one of them."""
    first = next(iter(key.items), None) if isinstance(key, TupleVariable) else key
    if not isinstance(first, SliceVariable):
        return None
    start, stop, step = (_number(tx, bound) for bound in first.items)
    of_data = any(map(_is_number_of_data, (start, stop)))
    start = ConstantVariable.create(0) if _is_none(start) else start
    return [start, stop] if of_data and _is_none(step) and not _is_none(stop) else None


def _other_axes(key: VariableTracker) -> list[VariableTracker]:
    """What a subscript says of axes behind the first."""
    return key.items[1:] if isinstance(key, TupleVariable) else []


def _number(tx: Any, bound: VariableTracker) -> VariableTracker:
    """A bound of a slice as a number, where it is a tensor that holds one."""
    bound = bound.tensor if isinstance(bound, Total) else bound
    if type(bound) is not TensorVariable or fake_value(bound).dtype.is_floating_point or fake_value(bound).numel() != 1:
        return bound
    return bound.call_method(tx, "item", [], {})


def fake_value(variable: VariableTracker) -> Any:
    """What Dynamo computes with in the place of a tensor or a number that it traces."""
    return variable.as_proxy().node.meta["example_value"]


def _is_number_of_data(variable: VariableTracker) -> bool:
    return isinstance(variable, SymNodeVariable) and bool(free_unbacked_symbols(fake_value(variable)))


def _size_of(bound: VariableTracker) -> Any:
    return fake_value(bound).node.expr if isinstance(bound, SymNodeVariable) else bound.as_python_constant()


def _is_none(value: VariableTracker) -> bool:
    return isinstance(value, ConstantVariable) and value.value is None


def _whole(tx: Any) -> SliceVariable:
    return SliceVariable([ConstantVariable.create(None)], tx)


def _is_whole(part: VariableTracker) -> bool:
    return isinstance(part, SliceVariable) and all(map(_is_none, part.items))
