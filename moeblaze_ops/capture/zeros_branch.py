"""Branches of which one gives zeros for an expert without tokens, where the other stores rows of its tokens over zeros.

    if mask.any():                                     y = torch.zeros_like(x)
        y = torch.zeros_like(x)                        y[mask] = expert(x[mask])
        y[mask] = expert(x[mask])        becomes       outs.append(y)
        outs.append(y)
    else:
        outs.append(torch.zeros_like(x))

Without tokens nothing is stored, and both give the same zeros.
"""

import ast
from collections.abc import Iterator, Sequence

import torch

from moeblaze_ops.capture.appended_parts import is_append
from moeblaze_ops.capture.emptiness import Reader
from moeblaze_ops.capture.guards import TO_ROWS, loaded, stored

_ZEROS = (torch.zeros, torch.zeros_like)


def split_off_zeros(
    body: Sequence[ast.stmt], other: Sequence[ast.stmt], reader: Reader
) -> tuple[ast.Assign, list[ast.stmt]] | None:
    """The statement of ``body`` that makes the zeros which ``other`` makes, too, and those that only store rows over them.

    None where the two differ in more; an append of the zeros to a list, which both end in, is left out.
    """
    rest = list(body)
    match body[-1:], other:
        case _, [ast.Assign(targets=[ast.Name(id=name)], value=zeros)]:
            pass
        case [ast.Expr(value=last)], [ast.Expr(value=only)] if is_append(body[-1]) and is_append(other[0]):
            kept, zeros = last.args[0], only.args[0]
            if ast.dump(last.func) != ast.dump(only.func) or not isinstance(kept, ast.Name):
                return None
            name = kept.id
            rest.pop()
        case _:
            return None
    makes = [s for s in rest if isinstance(s, ast.Assign) and ast.dump(s.value) == ast.dump(zeros)]
    made = next((s for s in makes if [ast.dump(t) for t in s.targets] == [ast.dump(ast.Name(name, ast.Store()))]), None)
    if made is None or not _makes_zeros(zeros, reader) or loaded(zeros) & set().union(*map(stored, body)):
        return None
    rest.remove(made)
    mentions = sum(isinstance(node, ast.Name) and node.id == name for s in rest for node in ast.walk(s))
    return (made, rest) if mentions == sum(1 for s in rest for _ in _stores(s, name)) else None


def _makes_zeros(e: ast.expr, reader: Reader) -> bool:
    """Whether an expression gives new zeros, whatever the tensors that it reads hold."""
    if not isinstance(e, ast.Call) or not reader.only_makes(e):
        return False
    function = reader.resolve(e.func)
    return function in _ZEROS or (function is None and isinstance(e.func, ast.Attribute) and e.func.attr == "new_zeros")


def _stores(s: ast.stmt, name: str) -> Iterator[ast.stmt]:
    """Statements that write to rows of ``name``."""
    for node in ast.walk(s):
        match node:
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=to))]) if to == name:
                yield node
            case ast.AugAssign(target=ast.Subscript(value=ast.Name(id=to))) if to == name:
                yield node
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=to), attr=attr))) if to == name:
                if attr.removesuffix("_") in TO_ROWS and attr.endswith("_"):
                    yield node
