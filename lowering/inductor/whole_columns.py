"""The mask of a layer that is written for each expert, as one: columns of one tensor side by side are that tensor.

    torch.cat([(gates[:, e] > 0)[:, None] for e in range(E)], 1)                # gates > 0, if it has E columns
    torch.cat([(gates[:, e] > bounds[e])[:, None] for e in range(E)], 1)        # another number for each: stays

A loop over experts asks of each column by itself which tokens the expert takes. Side by side the answers say where ``dispatch``
has ids, and as they are written each is a kernel that writes one column. The graph has no writes any more, so equal calls of
columns are the call of all of them.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from moeblaze_ops.lowering.inductor.graph_writer import CAST, VIEWS, Writer, is_like

aten = torch.ops.aten
_VIEWS = (*VIEWS, aten.unsqueeze.default, aten.squeeze.dim)
_DEEPEST = 8
"""Calls between a column and what it is a column of, and between the mask and ``dispatch``."""


def join_columns(cat: fx.Node) -> None:
    """Let the users of ``cat`` read one tensor in place of its columns, if ``dispatch`` takes what becomes of it."""
    columns, axis = cat.args[0], cat.args[1] if len(cat.args) > 1 else 0
    value = cat.meta["val"]
    if value.dim() != 2 or axis not in (1, -1) or len(columns) < 2 or not _feeds_dispatch(cat, _DEEPEST):
        return
    if any(list(column.meta["val"].shape)[1:] != [1] for column in columns):
        return
    write = Writer(cat)
    whole = _whole(columns, write, _DEEPEST)
    if whole is not None and whole.meta["val"].dtype == value.dtype:
        write.instead(whole)


def _feeds_dispatch(node: fx.Node, depth: int) -> bool:
    """True if the ids of a layer are made of this node, element by element."""
    for user in node.users:
        if user.target == torch.ops.moeblaze.dispatch.default and user.args[0] is node:
            return True
        if depth and (_is_pointwise(user) or user.target in _VIEWS) and _feeds_dispatch(user, depth - 1):
            return True
    return False


def _is_pointwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    is_random = torch.Tag.nondeterministic_seeded in tags
    return node.target == CAST or (torch.Tag.pointwise in tags and not is_random)


def _whole(columns: Sequence[fx.Node], write: Writer, depth: int) -> fx.Node | None:
    """The tensor ``[T, n]`` whose columns, of shape [T] or [T, 1], these are, in their order; None if they are of no such."""
    first = columns[0]
    if depth == 0 or any(column.op != "call_function" or column.target != first.target for column in columns):
        return None
    sources = [column.args[0] for column in columns]
    if first.target == aten.select.int:
        return _selected(columns)
    if first.target in _VIEWS:
        return _whole(sources, write, depth - 1) if all(map(_is_column, sources)) else None
    if not all(map(_is_pointwise, columns)) or any(column.kwargs != first.kwargs for column in columns):
        return None
    if any(isinstance(argument, fx.Node) for argument in first.kwargs.values()):
        return None
    if len({len(column.args) for column in columns}) != 1:
        return None
    joined = [_argument(columns, given, write, depth) for given in zip(*(column.args for column in columns), strict=True)]
    if any(argument is None for argument in joined):
        return None
    return write(first.target, *joined, **first.kwargs)


def _argument(columns: Sequence[fx.Node], given: tuple[Any, ...], write: Writer, depth: int) -> Any:
    """The argument of the call of all columns: a number or scalar that all calls share, or the tensor of all; else None."""
    if not all(isinstance(argument, fx.Node) for argument in given):
        alike = all(type(argument) is type(given[0]) and argument == given[0] for argument in given)
        return given[0] if alike else None
    values = [argument.meta["val"] for argument in given]
    if all(argument is given[0] for argument in given) and (not isinstance(values[0], Tensor) or values[0].dim() == 0):
        return given[0]
    # Of the shape of the result: a row beside a column would be broadcast.
    fits = all(map(is_like, given, columns))
    return _whole(given, write, depth - 1) if fits and all(map(_is_column, given)) else None


def _is_column(node: Any) -> bool:
    value = node.meta["val"] if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and (value.dim() == 1 or (value.dim() == 2 and list(value.shape)[1:] == [1]))


def _selected(columns: Sequence[fx.Node]) -> fx.Node | None:
    """What all columns are selected from, if they are all of its columns in order."""
    whole = columns[0].args[0]
    numbers = [operator.index(column.args[2]) for column in columns if isinstance(column.args[2], int)]
    value = whole.meta["val"]
    is_whole = value.dim() == 2 and list(value.shape)[1:] == [len(columns)] and numbers == list(range(len(columns)))
    of_columns = all(column.args[0] is whole and column.args[1] in (1, -1) for column in columns)
    return whole if is_whole and of_columns else None
