"""Which tensors of a function are empty together: masks without a true element, and what is selected by them.

``Reader`` goes through assignments in order and gives every expression a ``Value``. Two expressions with one ``key``
are the same tensor; values of one ``group`` are empty together. What may write to a mask ends what is known of masks;
writing to rows never changes how many there are.
"""

import ast
import builtins
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from moeblaze_ops.capture import row_groups
from moeblaze_ops.capture.aliases import shared_with
from moeblaze_ops.capture.trees.syntax import (
    ARITHMETIC,
    ELEMENTWISE,
    VIEWS,
    axes_of,
    counting,
    elements_of,
    is_in_place,
    is_last_of_two,
    is_true,
    is_whole,
    is_zero,
    mentions,
    number,
    sums_last_two,
    without_views,
)

MODULE = "_moeblaze_row_groups"
"""The name of ``row_groups`` in changed code."""

_CALLS_BUILTIN = frozenset((range, len, enumerate, zip, int, float, bool, tuple, list, set, sorted, min, max, sum))
COUNTED_AT = {
    ast.Eq: {0: True},
    ast.NotEq: {0: False},
    ast.Gt: {0: False},
    ast.GtE: {1: False},
    ast.Lt: {1: True},
    ast.LtE: {0: True},
}
"""For a count compared with a number: which outcome means that there is nothing."""
_FLATTENING = frozenset(("squeeze", "flatten", "view", "reshape"))  # hits, [n, 1], without their last axis
_LISTS = {"hit_ids": "hit_list", "other": "listed"}  # the kind of a list of the elements of a tensor
_CASTS = frozenset(("to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "short"))
"""Methods that give the numbers of a tensor in another type: zeros and ones stay what they are."""
_COMPARING = {"eq": ast.Eq, "ne": ast.NotEq, "gt": ast.Gt, "greater": ast.Gt, "ge": ast.GtE}
_TRUE_OF_ONE = {ast.Eq: (1,), ast.NotEq: (0,), ast.Gt: (0, 0.5), ast.GtE: (1, 0.5)}
"""Numbers to compare zeros and ones with: false for a zero, true for a one."""


_COUNTED = ("counts", "bins")  # kinds of numbers that are above zero where an expert has tokens


@dataclass(frozen=True)
class Value:
    """What is known of an expression.

    Kinds: ``mask`` booleans; ``onehot`` one-hot rows, zero or one; ``counts`` the ones of a one-hot tensor [E, K, T] per expert;
    ``bins`` how often each number occurs among ids; ``count`` one element of counts or bins, ``group`` what it counts;
    ``hit`` which counts or bins are above zero; ``hits`` the nonzero rows of that, ``[n, 1]``, ``hit_split`` a tuple of
    ``hit_ids``, ``[n]``, ``hit_list`` a list or a set of these; ``listed`` a list of ids; ``expert_row`` and ``expert`` one
    element of hits; ``number`` that of a round; ``rows`` one row for each true element of a mask; ``split`` a tuple of such;
    ``other``.
    """

    key: Hashable
    group: Hashable
    kind: str = "other"
    of: Hashable = None  # for counts, sums, bins and what comes from them, the key of the tensor that is counted, or of the
    # ids; for one-hot rows of ids that have the experts in the last axis, or in the first of three, the key of the ids
    dims: int | None = None  # how many axes there are; of a split, in each part
    summed: tuple[tuple[int, ...], ...] = ()  # of sums, of where they are above zero, and of rows of that, which may be hits:
    # the axes that each reduction took away
    present: bool = False  # of hits: they are the numbers that occur among ids
    listed: bool = False  # of rows: they are a list


class Reader:
    """Values of expressions, at one place of a function.

    ``shared``: names that share memory, see `aliases`. ``joined``: lists that are only concatenated, see `appended_parts`.
    """

    _numbers = itertools.count()

    def __init__(
        self, module_globals: dict[str, Any], local_names: frozenset[str], shared: Mapping[str, frozenset[str]] | None = None
    ):
        self._globals, self._locals, self._shared = module_globals, local_names, shared or {}
        self.joined: frozenset[str] = frozenset()
        self.values: dict[str, Value] = {}

    def inside(self, stored: set[str]) -> "Reader":
        """The same knowledge where ``stored`` names may have any value."""
        copy = Reader(self._globals, self._locals, self._shared)
        copy.joined = self.joined
        copy.values = {name: value for name, value in self.values.items() if name not in stored}
        return copy

    def copy(self) -> "Reader":
        return self.inside(set())

    def meeting(self, others: Iterable["Reader"]) -> "Reader":
        """What this reader knows, and all ``others`` too: what holds behind blocks of which one ran."""
        met = self.copy()
        for other in others:
            met.values = {name: value for name, value in met.values.items() if other.values.get(name) == value}
        return met

    def in_every_round(self, loop: ast.For, stored: set[str]) -> "Reader":
        """What still holds wherever an iteration of ``loop``, which sets the names ``stored``, may have come to."""
        inner = self.inside(stored)
        before = dict(inner.values)
        for node in ast.walk(loop):
            match node:
                case ast.Call():
                    written = list(self._written(node))
                case ast.AugAssign(target=target) | ast.Subscript(value=target, ctx=ast.Store() | ast.Del()):
                    written = list(self._keys_behind(target))
                case _:
                    written = []
            for key in written:
                inner.forget_masks(key)
        inner.values = {name: value for name, value in inner.values.items() if before.get(name) is value}
        if (counter := counting(loop, self.resolve)) is not None:
            key = "number", loop.lineno
            inner.values[counter] = Value(key, key, "number")
        return inner

    def forget(self, names: set[str]) -> None:
        for name in names:
            self.values.pop(name, None)

    def forget_masks(self, written: Hashable = None) -> None:
        """Something may have been written to what has the key ``written``, or to any mask."""
        self.values = {
            name: value
            for name, value in self.values.items()
            if value.kind in ("rows", "split") or (written is not None and not mentions(value.key, written))
        }

    def resolve(self, e: ast.expr) -> Any:
        """The object that a dotted name of the module's globals, or of the builtins, is; None for anything else."""
        if isinstance(e, ast.Attribute):
            owner = self.resolve(e.value)
            return getattr(owner, e.attr, None) if owner is not None else None
        if isinstance(e, ast.Name) and e.id == MODULE:
            return row_groups
        if isinstance(e, ast.Name) and e.id not in self._locals:
            return self._globals.get(e.id, getattr(builtins, e.id, None))
        return None

    def execute(self, statement: ast.stmt) -> None:
        """Take in what a statement without inner blocks does; anything else makes all be forgotten."""
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                self._notice_writes(value)
                self.values[name] = self.read(value)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value) if all(isinstance(t, ast.Name) for t in targets):
                self._notice_writes(value)
                self._unpack([target.id for target in targets], value)
            case ast.Expr(value=value):
                self._notice_writes(value)
            case ast.Pass():
                pass
            case _:
                self.forget({node.id for node in ast.walk(statement) if isinstance(node, ast.Name)})
                self.forget_masks()

    def _unpack(self, names: list[str], value: ast.expr) -> None:
        whole = self.read(value)
        if whole.kind == "split":
            parts = [replace(whole, key=(whole.key, i), kind="rows") for i in range(len(names))]
        else:
            values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(names) else [None] * len(names)
            parts = [self._unknown() if e is None else self.read(e) for e in values]
        self.values.update(zip(names, parts, strict=True))

    def _notice_writes(self, e: ast.expr) -> None:
        for call in (node for node in ast.walk(e) if isinstance(node, ast.Call)):
            for written in list(self._written(call)):
                self.forget_masks(written)

    def _written(self, call: ast.Call) -> Iterator[Hashable]:
        """Keys of what a call may write to; None for anything."""
        if is_in_place(call):
            yield from self._keys_behind(call.func.value)
        if not self.is_pure(call):
            if isinstance(call.func, ast.Attribute) and self.resolve(call.func) is None:
                yield from self._keys_behind(call.func.value)  # as a list that loses an element
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                yield from [None] if isinstance(argument, ast.Starred) else self._keys_behind(argument)

    def _keys_behind(self, e: ast.expr) -> Iterator[Hashable]:
        """Keys of what a write to ``e`` may change."""
        yield self.read(e).key
        for name in shared_with(e, self._shared) & self.values.keys():
            yield self.values[name].key

    def is_pure(self, call: ast.Call) -> bool:
        """Whether a call only makes a value."""
        if any(keyword.arg in ("out", "inplace", None) for keyword in call.keywords):
            return False
        function = self.resolve(call.func)
        if function is not None and isinstance(call.func, ast.Attribute):
            owner = self.resolve(call.func.value)
            return any(owner is pure for pure in (torch, F, row_groups)) and not call.func.attr.endswith("_")
        if isinstance(call.func, ast.Name):
            return any(function is builtin for builtin in _CALLS_BUILTIN)
        return isinstance(call.func, ast.Attribute) and hasattr(torch.Tensor, call.func.attr)

    def only_makes(self, e: ast.expr) -> bool:
        """Whether an expression does nothing but give a value."""
        calls = [node for node in ast.walk(e) if isinstance(node, ast.Call)]
        named = any(isinstance(node, ast.NamedExpr) for node in ast.walk(e))
        return not named and all(map(self.is_pure, calls)) and not any(map(is_in_place, calls))

    def _unknown(self, kind: str = "other", group: Hashable = None) -> Value:
        key = "#", next(self._numbers)
        return Value(key, group or key, kind)

    # Expressions.

    def read(self, e: ast.expr) -> Value:
        match e:
            case ast.Name(id=name):
                return self.values.setdefault(name, self._unknown())
            case ast.Constant(value=value):
                return self._made("const", (type(value), value))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compared(self.read(left), op, right)
            case ast.BinOp(left=left, op=op, right=right):
                parts = self.read(left), self.read(right)
                rows = [part for part in parts if part.kind == "rows" and not part.listed]
                if len(rows) == 1 and isinstance(op, ARITHMETIC):
                    return _elementwise((type(op), *(part.key for part in parts)), *rows)
                both = isinstance(op, ast.BitAnd | ast.BitOr) and all(part.kind == "mask" for part in parts)
                return self._made(type(op), *(part.key for part in parts), kind="mask" if both else "other")
            case ast.UnaryOp(op=op, operand=operand):
                inner = self.read(operand)
                return self._made(type(op), inner.key, kind="mask" if isinstance(op, ast.Invert) else "other")
            case ast.Subscript(value=value, slice=index):
                return self._item(self.read(value), index)
            case ast.Call(func=func, args=args, keywords=keywords):
                return self._call(func, args, {keyword.arg: keyword.value for keyword in keywords})
        return self._unknown()

    def _made(self, *key: Hashable, kind: str = "other", of: Hashable = None) -> Value:
        return Value(key, key, kind, of)

    def _compared(self, left: Value, op: ast.cmpop, right: ast.expr) -> Value:
        if left.kind in _COUNTED and COUNTED_AT.get(type(op), {}).get(number(right)) is False:
            return replace(_hits_of(left), key=("hit", left.key), kind="hit")
        if isinstance(op, ast.Eq | ast.NotEq | ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            other = self.read(right)
            key = type(op), left.key, other.key
            if left.kind == "onehot" and number(right) in _TRUE_OF_ONE.get(type(op), ()):
                return replace(left, key=key, kind="mask")
            with_number = other.kind in ("expert", "number") or number(right) is not None
            mask = Value(key, (type(op), elements_of(left.key), other.key) if with_number else key, "mask")
            above = bool(left.summed) and COUNTED_AT.get(type(op), {}).get(number(right)) is False
            return replace(mask, of=left.of, summed=left.summed) if above else mask
        return self._unknown()

    def part_key(self, key: Hashable, index: Hashable, before: int, ellipsis: bool = False) -> Hashable:
        """The key of what an index with a key selects of a tensor, behind so many ``:``, or behind ``...``."""
        leading = [self._made("whole").key] * before + [self.read(ast.Constant(...)).key] * ellipsis
        return "item", key, *leading, index

    def _item(self, value: Value, index: ast.expr) -> Value:
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        first = next((part for part in parts if not (isinstance(part, ast.Constant) and part.value is None)), None)
        if first is None or any(isinstance(part, ast.Starred) for part in parts):
            return self._unknown()
        if value.kind in ("split", "hit_split") and number(first) is not None:
            return replace(value, key=(value.key, number(first)), kind="rows" if value.kind == "split" else "hit_ids")
        if value.kind == "expert_row" and len(parts) == 1 and number(first) == 0:
            return replace(value, kind="expert")
        if value.kind in ("counts", "bins") and len(parts) == 1 and not isinstance(first, ast.Slice):
            kind = "item" if value.kind == "counts" else ast.Eq
            return Value(("item", value.key, self.read(first).key), (kind, value.of, self.read(first).key), "count")
        if is_whole(first) and len(parts) == 1:
            return value
        if is_whole(first) and value.kind in ("rows", "hits"):
            if len(parts) != 2 or number(parts[1]) is None:
                return self._unknown()
            kind, dims = ("hit_ids" if value.kind == "hits" else "rows"), (1 if value.dims == 2 else None)
            return replace(value, key=(value.key, number(parts[1])), kind=kind, dims=dims)
        selected = [self._made("whole") if is_whole(part) else self.read(part) for part in parts]
        if any(isinstance(part, ast.Slice) and not is_whole(part) for part in parts):
            return self._unknown()
        if (by := selected[parts.index(first)]).kind in ("rows", "mask"):
            return self._unknown("rows", by.group)
        key = "item", value.key, *(part.key for part in selected)
        return Value(key, key, value.kind if value.kind in ("mask", "onehot") else "other")

    def _call(self, func: ast.expr, args: list[ast.expr], options: dict[str | None, ast.expr]) -> Value:
        function = self.resolve(func)
        if function is F.one_hot and args:
            return replace(self._unknown("onehot"), of=elements_of(self.read(args[0]).key))
        if function is None and isinstance(func, ast.Attribute) and func.attr == "bincount":
            function, args = torch.bincount, [func.value, *args]
        if function is torch.bincount and len(args) == 1 and options.keys() <= {"minlength"}:
            ids = self.read(without_views(args[0]))
            return Value(("bincount", ids.key), ids.group, "bins", ids.key)
        if function is torch.unique and len(args) == 1:
            return self._method(self.read(args[0]), "unique", args[1:], options)
        if function in (set, sorted, list, tuple) and len(args) == 1 and not options:
            of = self.read(args[0])
            if function is set and of.kind == "listed":
                return replace(of, kind="hit_list", present=True)
            return of if of.kind == "hit_list" else self._unknown()
        if function is torch.unbind and args:
            return self._method(self.read(args[0]), "unbind", args[1:], options)
        if function in (torch.where, torch.nonzero) and len(args) == 1:
            return self._nonzero(self.read(args[0]), function is torch.where or is_true(options.get("as_tuple")))
        if function is row_groups.rows:
            key = "row group", func.lineno
            return Value(key, key, "rows")
        if function is row_groups.take and len(args) == 3:
            return self._unknown("rows", self.read(args[1]).group)
        if function in (torch.greater, torch.gt, torch.ge, torch.ne, torch.eq) and len(args) == 2:
            return self._method(self.read(args[0]), function.__name__, args[1:], options)
        if function in (torch.any, torch.sum, torch.div, torch.floor_divide, torch.remainder) and args:
            return self._method(self.read(args[0]), function.__name__, args[1:], options)
        if function is int and len(args) == 1 and self.read(args[0]).kind in ("expert", "expert_row"):
            return replace(self.read(args[0]), kind="expert")
        if function is None and isinstance(func, ast.Attribute):
            return self._method(self.read(func.value), func.attr, args, options)
        return self._unknown()

    def _method(self, value: Value, name: str, args: list[ast.expr], options: dict[str | None, ast.expr]) -> Value:
        key = name, value.key, *(ast.dump(arg) for arg in (*args, *options.values()))
        if name == "nonzero":
            return self._nonzero(value, is_true(options.get("as_tuple")) or (len(args) == 1 and is_true(args[0])))
        if name in ("item", "squeeze", "tolist") and value.kind in ("expert", "expert_row"):
            return replace(value, kind="expert")
        if name in _FLATTENING and value.kind in ("hits", "hit_ids"):
            return replace(value, key=key, kind="hit_ids")
        if name == "unique" and value.kind == "other" and not args and options.keys() <= {"sorted"}:
            return Value(key, key, "hit_ids", elements_of(value.key), present=True)
        if name == "tolist" and (kind := _LISTS.get(value.kind)) is not None:
            return replace(value, key=key, group=key, kind=kind, of=elements_of(value.key) if kind == "listed" else value.of)
        if name == "tolist" and value.kind == "rows" and value.dims == 1:
            return replace(value, key=key, listed=True)
        if name in ("cpu", "detach") and value.kind in ("other", "hit_ids", "rows"):
            return value
        if name in ("tolist", "cpu", "item") and value.kind in ("bins", "count"):
            return value
        if name == "unbind" and value.kind == "rows" and is_last_of_two(args, options):
            return replace(value, kind="split", dims=1 if value.dims == 2 else None)
        if name in VIEWS and value.kind in ("rows", "mask", "onehot", "other"):
            first = name == "permute" and len(args) == 3 and number(args[0]) == 2
            if value.kind == "rows" and value.summed and name in _FLATTENING:
                return replace(value, key=key, dims=1)
            made = first and value.kind in ("onehot", "mask") and value.dims is None and not value.summed
            dims = len(args) if name == "permute" else None
            return replace(value, key=key, of=value.of if made else None, dims=dims, summed=())
        if value.kind == "onehot" and name in _CASTS:
            return replace(value, key=key, group=key)
        if value.kind == "mask" and name in _CASTS:
            return Value(key, value.group, "onehot")
        if name == "sum" and value.kind == "onehot" and value.dims == 3 and sums_last_two(args, options):
            return Value(key, key, "counts", value.key)
        if name in ("sum", "any") and (axes := axes_of(args, options)) and value.kind in ("onehot", "mask", "other"):
            base = value.of if value.summed else value.key
            group, kind = (key, "other") if name == "sum" else (value.group, "mask")
            return Value(key, group, kind, base, summed=(*value.summed, axes))
        if name == "any" and (args or options) and value.kind in ("mask", "onehot", "other"):
            return replace(value, key=key, kind="mask", summed=())
        if name in ("bool", "ne") and value.kind in ("mask", "onehot", "other") and (name == "bool" or is_zero(args)):
            return replace(value, key=key, kind="mask")
        if name in _COMPARING and len(args) == 1 and not options:
            return self._compared(value, _COMPARING[name](), args[0])
        if name in ELEMENTWISE and value.kind == "rows" and not value.listed:
            return _elementwise(key, value)
        if name == "index_select" and len(args) == 2 and self.read(args[1]).kind == "rows" and is_zero(args[:1]):
            return self._unknown("rows", self.read(args[1]).group)
        return self._unknown()

    def _nonzero(self, value: Value, split: bool) -> Value:
        key = "nonzero", value.key
        if value.kind in ("hit", *_COUNTED):
            return replace(_hits_of(value), key=key, kind="hit_split" if split else "hits")
        if value.kind in ("mask", "onehot", "other"):
            of = value.of if value.summed else None
            return Value(key, value.group, "split" if split else "rows", of, dims=1 if split else 2, summed=value.summed)
        return self._unknown()


def _elementwise(key: Hashable, rows: Value) -> Value:
    """What is computed of each element of ``rows`` with a number: there is none where there are no rows."""
    return Value(key, rows.group, "rows", dims=rows.dims)


def _hits_of(counted: Value) -> Value:
    """What is known of hits from what was counted."""
    return replace(counted, of=elements_of(counted.of), present=True) if counted.kind == "bins" else counted
