"""Which names of a function may hold tensors that share memory: a write through one of them is seen through the others."""

import ast
from collections.abc import Iterator, Mapping

import torch

_COPYING = frozenset((
    "clone", "sum", "any", "all", "nonzero", "where", "bincount", "histc", "one_hot", "topk", "sort", "argsort", "cumsum", "mul",
    "add", "sub", "div", "eq", "ne", "gt", "ge", "lt", "le", "greater", "zeros", "ones", "empty", "full", "zeros_like",
    "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full", "softmax", "sigmoid",
    "index_select", "gather", "cat", "stack", "arange", "tolist", "item", "size", "numel",
))  # fmt: skip
"""Functions and methods of tensors whose results share no memory with anything; others may give views."""

_PASSING = frozenset(("enumerate", "zip", "reversed", "iter", "next", "list", "tuple"))


def sharing(function: ast.FunctionDef) -> dict[str, frozenset[str]]:
    """For every name that is set: the names that may share memory with it, itself among them.

    Arguments share none, nor do the results of modules and other functions.
    """
    groups: dict[str, set[str]] = {}

    def join(names: set[str]) -> None:
        merged = names.union(*(groups.get(name, ()) for name in names))
        groups.update(dict.fromkeys(merged, merged))

    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=targets, value=value):
                parts = [*targets, value]
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                parts = [target, value]
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                parts = [target, value]
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                parts = [target, value]
            case _:
                continue
        join({name for part in parts for name in owners(part)})
    return {name: frozenset(group) for name, group in groups.items()}


def owners(e: ast.expr) -> Iterator[str]:
    """Names whose memory an expression may give."""
    match e:
        case ast.Name(id=name):
            yield name
        case ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.Constant() | ast.Lambda():
            pass
        case ast.Attribute(attr="shape" | "dtype" | "device" | "ndim"):
            pass
        case ast.Subscript(value=inner) | ast.Starred(value=inner):
            yield from owners(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr=attr), args=args):
            of_tensors = hasattr(torch.Tensor, attr) or hasattr(torch, attr)
            for part in (inner, *args) if of_tensors and attr not in _COPYING else ():
                yield from owners(part)
        case ast.Call(func=ast.Name(id=name), args=args):
            for part in args if name in _PASSING else ():
                yield from owners(part)
        case _:
            for part in ast.iter_child_nodes(e):
                if isinstance(part, ast.expr):
                    yield from owners(part)


def shared_with(e: ast.expr, shared: Mapping[str, frozenset[str]]) -> set[str]:
    """Names that a write to what ``e`` gives may be seen through."""
    return set().union(*(shared.get(name, {name}) for name in owners(e)))
