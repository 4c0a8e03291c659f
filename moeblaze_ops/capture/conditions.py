"""Conditions on whether a group of tokens is empty: ``if mask.any():``, ``if idx.numel() == 0:``, ``if counts[e] > 0:``."""

import ast
from collections.abc import Hashable, Sequence

import torch

from moeblaze_ops.capture.emptiness import COUNTED_AT, Reader
from moeblaze_ops.capture.trees.syntax import number

_MIRRORED = {ast.Eq: ast.Eq, ast.NotEq: ast.NotEq, ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}


def empty_when(test: ast.expr, reader: Reader, block: Sequence[ast.stmt]) -> tuple[Hashable, bool] | None:
    """The group that has nothing in it when ``test`` has the outcome that is returned with it.

    ``block``: the statement with the condition and those behind it. A number is looked for in a tensor only where they compare
    the two, too: it might be a list or a dictionary otherwise.
    """
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = empty_when(operand, reader, block)
            return inner and (inner[0], not inner[1])
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn() as op], comparators=[right]):
            group = _occurring(left, right, reader, block)
            return None if group is None else (group, isinstance(op, ast.NotIn))
        case ast.Compare(left=ast.Constant() as left, ops=[op], comparators=[right]) if type(op) in _MIRRORED:
            return empty_when(ast.Compare(right, [_MIRRORED[type(op)]()], [left]), reader, block)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            group = _counted(left, reader)
            outcome = COUNTED_AT.get(type(op), {}).get(number(right))
            return None if group is None or outcome is None else (group, outcome)
    if (group := _all_differ(test, reader)) is not None:
        return group, True
    group = _counted(test, reader)
    group = _any(test, reader) if group is None else group
    return None if group is None else (group, False)


def counted_in(test: ast.expr, reader: Reader) -> str | None:
    """The name of the counts that a condition reads one element of, or of the numbers that it looks for one among."""
    for node in ast.walk(test):
        match node:
            case ast.Subscript(value=ast.Name(id=name)) if reader.read(node).kind == "count":
                return name
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[ast.Name(id=name) as among]):
                if reader.read(among).present:
                    return name
    return None


def _occurring(e: ast.expr, among: ast.expr, reader: Reader, block: Sequence[ast.stmt]) -> Hashable | None:
    """The group of the elements that equal ``e``, where a condition asks whether it is among ids, or among numbers of them."""
    value = reader.read(among)
    if value.present and value.kind in ("hit_ids", "hit_list"):
        return ast.Eq, value.of, reader.read(e).key
    if value.kind != "other":
        return None
    equal = reader.read(ast.Compare(among, [ast.Eq()], [e])).group
    known = any(mask.kind == "mask" and mask.group == equal for mask in reader.values.values())
    comparing = (node for s in block for node in ast.walk(s) if isinstance(node, ast.Compare | ast.Call))
    return equal if known or any(reader.copy().read(node).group == equal for node in comparing) else None


def _all_differ(e: ast.expr, reader: Reader) -> Hashable | None:
    """The group of the elements that equal what ``e`` asks whether all differ from."""
    match e:
        case ast.Call(func=ast.Attribute(value=inner, attr="item"), args=[], keywords=[]):
            return _all_differ(inner, reader)
        case ast.Call(func=ast.Name(), args=[inner], keywords=[]) if reader.resolve(e.func) is bool:
            return _all_differ(inner, reader)
        case ast.Call(func=func, args=[mask], keywords=[]) if reader.resolve(func) is torch.all:
            pass
        case ast.Call(func=ast.Attribute(value=mask, attr="all"), args=[], keywords=[]) if reader.resolve(e.func) is None:
            pass
        case _:
            return None
    match mask:
        case ast.Compare(left=left, ops=[ast.NotEq()], comparators=[right]):
            equal = reader.read(ast.Compare(left, [ast.Eq()], [right]))
            return equal.group if equal.kind == "mask" else None
    return None


def _any(e: ast.expr, reader: Reader) -> Hashable | None:
    """The group of the mask that ``e`` asks whether any element of it is true."""
    match e:
        case ast.Call(func=ast.Attribute(value=inner, attr="item"), args=[], keywords=[]):
            return _any(inner, reader)
        case ast.Call(func=ast.Name(), args=[inner], keywords=[]) if reader.resolve(e.func) is bool:
            return _any(inner, reader)
        case ast.Call(func=func, args=[mask], keywords=[]) if reader.resolve(func) is torch.any:
            return _group(mask, reader, "mask", "onehot", "other")
        case ast.Call(func=ast.Attribute(value=mask, attr="any"), args=[], keywords=[]) if reader.resolve(e.func) is None:
            return _group(mask, reader, "mask", "onehot", "other")
    return None


def _counted(e: ast.expr, reader: Reader) -> Hashable | None:
    """The group whose members ``e`` counts."""
    match e:
        case ast.Call(func=ast.Attribute(value=inner, attr="item"), args=[], keywords=[]):
            return _counted(inner, reader)
        case ast.Call(func=ast.Name(), args=[inner], keywords=[]) if reader.resolve(e.func) is int:
            return _counted(inner, reader)
        case ast.Call(func=ast.Attribute(value=rows, attr="numel" | "nelement"), args=[], keywords=[]):
            return _group(rows, reader, "rows", "mask")
        case ast.Call(func=ast.Attribute(value=rows, attr="size"), args=[ast.Constant(value=0)], keywords=[]):
            return _group(rows, reader, "rows")
        case ast.Subscript(value=ast.Attribute(value=rows, attr="shape"), slice=ast.Constant(value=0)):
            return _group(rows, reader, "rows")
        case ast.Call(func=ast.Name(), args=[rows], keywords=[]) if reader.resolve(e.func) is len:
            return _group(rows, reader, "rows")
        case ast.Call(func=ast.Attribute(value=mask, attr="sum" | "count_nonzero"), args=[], keywords=[]) if (
            reader.resolve(e.func) is None
        ):
            return _group(mask, reader, "mask", "onehot")
        case ast.Call(func=func, args=[mask], keywords=[]) if reader.resolve(func) in (torch.sum, torch.count_nonzero):
            return _group(mask, reader, "mask", "onehot")
    return _group(e, reader, "count")


def _group(e: ast.expr, reader: Reader, *kinds: str) -> Hashable | None:
    value = reader.read(e)
    return value.group if value.kind in kinds else None
