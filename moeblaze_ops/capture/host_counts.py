"""Counts that a function copies to the host: where, and the tensors that they are copies of.

    counts = torch.bincount(ids, minlength=E).tolist()      as it is without ``tolist``
    parts = torch.split(rows, counts)                       ``rows``, in groups of these sizes
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_COPIES = frozenset(("cpu", "detach", "numpy", "tolist"))
_TO_HOST = frozenset(("numpy", "tolist"))


@dataclass(frozen=True)
class Host:
    """What a name holds after ``statement``: numbers, or parts of ``rows`` that are as large as numbers say.

    ``tensor`` gives the numbers as a tensor. ``from_zero``: a zero stands before these numbers.
    """

    statement: ast.Assign
    tensor: ast.expr
    rows: ast.expr | None = None
    from_zero: bool = False


Resolve = Callable[[ast.expr], Any]


def hosts_of(preceding: Sequence[ast.stmt], resolve: Resolve) -> dict[str, Host]:
    """The names that hold counts, or what was split by counts, after some statements."""
    hosts: dict[str, Host] = {}
    for statement in preceding:
        found = None
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found = host(statement, value, hosts, resolve)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                hosts.pop(node.id, None)
        if found is not None:
            hosts[name] = found
    return hosts


def host(statement: ast.Assign, value: ast.expr, hosts: dict[str, Host], resolve: Resolve) -> Host | None:
    """What a name that ``value`` is assigned to holds, if it is for the host."""
    if (split := _split(value, hosts, resolve)) is not None:
        rows, sizes = split
        return Host(statement, sizes, rows)
    match value:
        case ast.BinOp(left=ast.List(elts=[ast.Constant(value=0)]), op=ast.Add(), right=numbers):
            tensor = numbers_on_device(numbers, hosts, resolve)
            return tensor and Host(statement, tensor, from_zero=True)
        case ast.List(elts=[ast.Constant(value=0), ast.Starred(value=numbers)]):
            tensor = numbers_on_device(numbers, hosts, resolve)
            return tensor and Host(statement, tensor, from_zero=True)
    tensor = numbers_on_device(value, hosts, resolve)
    return tensor and Host(statement, tensor)


def numbers_on_device(e: ast.expr, hosts: dict[str, Host], resolve: Resolve) -> ast.expr | None:
    """The tensor that an expression for a list or an array of numbers copies; None where it copies none."""
    match e:
        case ast.Name(id=name):
            known = hosts.get(name)
            return e if known is not None and known.rows is None and not known.from_zero else None
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in _TO_HOST and resolve(e.func) is None:
            return without_copies(inner)
        case ast.Call(func=ast.Name() as func, args=[inner], keywords=[]) if resolve(func) in (list, tuple):
            return numbers_on_device(inner, hosts, resolve)
        case ast.Call(func=func, args=[inner, *along]) if _is_numpy_cumsum(resolve(func)) and _along_first(along, e.keywords):
            return _cumulated(numbers_on_device(inner, hosts, resolve))
        case ast.Call(func=ast.Attribute(value=inner, attr="cumsum")) if _along_first(e.args, e.keywords):
            return _cumulated(numbers_on_device(inner, hosts, resolve))
    return None


def bincounts_of(e: ast.expr, preceding: Sequence[ast.stmt]) -> list[ast.expr]:
    """The calls of ``bincount``, or other mentions of it, that may make a tensor as long as its data say."""
    found: list[ast.expr] = []
    seen: set[str] = set()
    pending = [e]
    while pending:
        called: set[int] = set()
        for node in ast.walk(pending.pop()):
            match node:
                case ast.Call(func=ast.Attribute(attr="bincount") as func):
                    found.append(node)
                    called.add(id(func))
                case ast.Attribute(attr="bincount") if id(node) not in called:
                    found.append(node)
                case ast.Name(id=name) if name not in seen:
                    seen.add(name)
                    pending += [s.value for s in preceding if isinstance(s, ast.Assign) and _sets(s, name)]
    return found


def counted_below(call: ast.expr, resolve: Resolve) -> tuple[ast.expr, ast.expr] | None:
    """What a ``bincount`` counts, and how many numbers it gives where all that it counts is below that."""
    match call:
        case ast.Call(func=func, args=[ids], keywords=[ast.keyword("minlength", size)]) if resolve(func) is torch.bincount:
            return ids, size
        case ast.Call(func=ast.Attribute(value=ids) as func, args=[], keywords=[ast.keyword("minlength", size)]):
            return (ids, size) if resolve(func) is None else None
    return None


def _sets(statement: ast.Assign, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for target in statement.targets for node in ast.walk(target))


def split_sizes(e: ast.expr, resolve: Resolve) -> ast.expr | None:
    """The sizes of ``torch.split`` along the first axis."""
    arguments = _split_arguments(e, resolve)
    return arguments and arguments[1]


def _split(e: ast.expr, hosts: dict[str, Host], resolve: Resolve) -> tuple[ast.expr, ast.expr] | None:
    """The rows of ``torch.split`` along the first axis, and the tensor with its sizes."""
    arguments = _split_arguments(e, resolve)
    tensor = arguments and numbers_on_device(arguments[1], hosts, resolve)
    return tensor and (arguments[0], tensor)


def _split_arguments(e: ast.expr, resolve: Resolve) -> tuple[ast.expr, ast.expr] | None:
    match e:
        case ast.Call(func=ast.Name() as func, args=[inner], keywords=[]) if resolve(func) in (list, tuple):
            return _split_arguments(inner, resolve)
        case ast.Call(func=func, args=[rows, *rest]) if resolve(func) is torch.split:
            pass
        case ast.Call(func=ast.Attribute(value=rows, attr="split") as func, args=rest) if resolve(func) is None:
            pass
        case _:
            return None
    options = {keyword.arg: keyword.value for keyword in e.keywords}
    arguments = dict(zip(("sizes", "dim"), rest, strict=False)) | options
    sizes = arguments.get("sizes", options.get("split_size_or_sections", options.get("split_size")))
    along = arguments.get("dim")
    if sizes is None or (along is not None and not is_zero(along)):
        return None
    match rows:
        case ast.Subscript(value=whole, slice=ast.Slice(lower=None, upper=ast.Call() as end, step=None)):
            rows = whole if is_total(end, sizes, resolve) else rows
    return rows, sizes


def is_total(e: ast.expr, sizes: ast.expr, resolve: Resolve) -> bool:
    """Whether ``e`` is the sum of ``sizes``: rows behind it are in no group."""
    match e:
        case ast.Call(func=func, args=[of], keywords=[]):
            return resolve(func) is sum and ast.dump(of) == ast.dump(sizes)
    return False


def without_copies(e: ast.expr) -> ast.expr:
    """The tensor that an expression for a tensor on the host is a copy of."""
    match e:
        case ast.Call(func=ast.Attribute(value=inner, attr=attr), args=[], keywords=[]) if attr in _COPIES:
            return without_copies(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="to"), args=[ast.Constant(value="cpu")], keywords=[]):
            return without_copies(inner)
    return e


def _cumulated(tensor: ast.expr | None) -> ast.expr | None:
    if tensor is None:
        return None
    return ast.Call(ast.Attribute(tensor, "cumsum", ast.Load()), [ast.Constant(0)], [])


def _is_numpy_cumsum(function: Any) -> bool:
    return (getattr(function, "__module__", None), getattr(function, "__name__", None)) == ("numpy", "cumsum")


def _along_first(args: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> bool:
    return all(map(is_zero, args)) and all(k.arg in ("axis", "dim") and is_zero(k.value) for k in keywords)


def is_zero(e: ast.expr) -> bool:
    return isinstance(e, ast.Constant) and type(e.value) is int and e.value == 0
