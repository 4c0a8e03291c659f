"""Canonical forms of reductions and matrix products; see `forms.views` for how forms work.

sum, any (x, dims, keepdim)     prefix (x, dim)     contract (xs, labels, out_labels): an einsum
"""

import math
import string
from typing import Any

import torch

from moeblaze_ops.lowering.forms.pointwise import pointwise, times
from moeblaze_ops.lowering.forms.views import axis, cast, form, full, output_dtype, require, reshaped, short_forms, tensor
from moeblaze_ops.lowering.graph.functional_view import GraphView, NotCanonical, Value


def _dims(x: Value, dim: Any) -> tuple[int, ...]:
    if dim is None or dim == ():
        return tuple(range(len(x.shape)))
    return tuple(sorted(axis(x, d) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))))


def _summed(kind: str, view: GraphView, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    x = tensor(x)
    if dtype is not None:
        x = cast(view, x, dtype)
    return view.make(kind, x, _dims(x, dim), keepdim)


@form("sum")
def _sum(view: GraphView, x: Any, *args: Any, axis: Any = None, **kwargs: Any) -> Value:
    if isinstance(x, tuple):  # builtins.sum over a list of tensors stays a chain of adds in the graph
        raise NotCanonical("sum of a list")
    args = (args,) if len(args) > 1 and all(type(a) is int for a in args) else args
    return _summed("sum", view, x, *args, **(kwargs if axis is None else {"dim": axis, **kwargs}))


@form("isin")
def _isin(view: GraphView, x: Any, among: Any, *, assume_unique: bool = False) -> Value:
    """``any(x == element)``, over the elements ``among`` which those of ``x`` are looked for."""
    x, among = (of if isinstance(of, Value) else full(view, of, (), torch.int64) for of in (x, among))
    elements = reshaped(view, among, (math.prod(among.shape),))
    each, shape = reshaped(view, x, (*x.shape, 1)), (*x.shape, *elements.shape)
    equal = view.make("pointwise", "eq", (each, elements), (), shape=shape, dtype=torch.bool)
    return view.make("any", equal, (len(x.shape),), False, shape=x.shape, dtype=torch.bool)


@form("all")
def _all(view: GraphView, x: Any, dim: Any = None, keepdim: bool = False) -> Value:
    """``not any(not x)``."""
    require(output_dtype(view) == torch.bool, "a flag")
    flags = cast(view, tensor(x), torch.bool)
    some = view.make("any", _flags(view, "not", flags), _dims(flags, dim), keepdim)
    return view.make("pointwise", "not", (some,), ())


def _flags(view: GraphView, name: str, x: Value, *others: Value) -> Value:
    return view.make("pointwise", name, (x, *others), (), shape=x.shape, dtype=torch.bool)


def contract(view: GraphView, xs: tuple[Value, ...], labels: tuple[str, ...], out: str, shape: tuple | None = None) -> Value:
    dtype = output_dtype(view)
    return view.make("contract", tuple(cast(view, tensor(x), dtype) for x in xs), labels, out, shape=shape)


@form("einsum")
def _einsum(view: GraphView, equation: Any, *operands: Any) -> Value:
    if isinstance(equation, Value):
        equation, operands = _written_out((equation, *operands))
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = tuple(operands[0])
    left, arrow, out = equation.replace(" ", "").partition("->")
    out = out if arrow else _implied_output(left)
    labels, out = _without_ellipses(left.split(","), out, [len(tensor(x).shape) for x in operands])
    require(all(len(set(label)) == len(label) for label in labels), "no diagonal")
    return contract(view, operands, labels, out)


def _written_out(args: tuple) -> tuple[str, tuple]:
    """The equation and the operands of tensors that each have a list of numbers of their axes behind them."""
    letters: dict[Any, str] = {Ellipsis: "...", **dict(enumerate(string.ascii_uppercase + string.ascii_lowercase))}
    operands, lists = args[0 : len(args) // 2 * 2 : 2], args[1::2]
    labels = ["".join(letters[n] for n in axes) for axes in lists]
    out = "->" + "".join(letters[n] for n in args[-1]) if len(args) % 2 else ""
    return ",".join(labels) + out, operands


def _implied_output(left: str) -> str:
    """Any ellipsis, and in alphabetical order the letters that stand there once."""
    letters = left.replace("...", "").replace(",", "")
    return ("..." if "..." in left else "") + "".join(sorted(c for c in letters if letters.count(c) == 1))


def _without_ellipses(labels: list[str], out: str, ranks: list[int]) -> tuple[tuple[str, ...], str]:
    """Labels with a letter for every axis; those of an ellipsis are aligned at its right end."""
    free = [letter for letter in string.ascii_letters if letter not in "".join((*labels, out))]
    widths = [rank - len(label) + 3 if "..." in label else 0 for label, rank in zip(labels, ranks, strict=True)]
    written = [label.replace("...", "".join(free[:width][::-1])) for label, width in zip(labels, widths, strict=True)]
    return tuple(written), out.replace("...", "".join(free[: max(widths)][::-1]))


@form("matmul", "mm", "bmm", "__matmul__")
def _matmul(view: GraphView, a: Any, b: Any) -> Value:
    ranks = len(tensor(a).shape), len(tensor(b).shape)
    require(min(ranks) >= 2, "matrices")
    batch = "ijklmn"[: max(ranks) - 2]
    left, right = batch[len(batch) - (ranks[0] - 2) :], batch[len(batch) - (ranks[1] - 2) :]
    return contract(view, (a, b), (left + "xy", right + "yz"), batch + "xz")


@form("tensordot")
def _tensordot(view: GraphView, a: Any, b: Any, dims: Any = 2, out: Any = None) -> Value:
    ranks = len(tensor(a).shape), len(tensor(b).shape)
    left, right = (range(ranks[0] - dims, ranks[0]), range(dims)) if isinstance(dims, int) else dims
    letters = iter(string.ascii_letters)
    labels = [[next(letters) for _ in range(rank)] for rank in ranks]
    summed = set()
    for i, j in zip(left, right, strict=True):
        labels[1][axis(b, j)] = labels[0][axis(a, i)]
        summed.add(labels[0][axis(a, i)])
    free = [letter for letter in (*labels[0], *labels[1]) if letter not in summed]
    return contract(view, (a, b), ("".join(labels[0]), "".join(labels[1])), "".join(free))


@form("linear")
def _linear(view: GraphView, x: Any, weight: Any, bias: Any = None) -> Value:
    batch = "ijklmn"[: len(tensor(x).shape) - 1]
    units = "z"[: len(tensor(weight).shape) - 1]
    shape = (*x.shape[:-1], *weight.shape[:-1])  # that of the output, unless a bias of several rows is added to one
    product = contract(view, (x, weight), (batch + "y", units + "y"), batch + units, shape)
    return product if bias is None else pointwise(view, "add", product, cast(view, bias, product.dtype))


@form("addmm", "baddbmm")
def _addmm(view: GraphView, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Value:
    require(beta == 1, "no scale of what is added to")
    product = times(view, alpha, _matmul(view, a, b))
    return pointwise(view, "add", product, cast(view, tensor(bias), product.dtype))


short_forms({
    ("any",): lambda view, x, *args, **kwargs: _summed("any", view, x, *args, **kwargs),
    ("count_nonzero",): lambda view, x, dim=None: view.make(
        "sum", _flags(view, "ne", tensor(x), full(view, 0, (), x.dtype)), _dims(x, dim), False
    ),
    ("cumsum",): lambda view, x, dim, dtype=None: view.make(
        "prefix", tensor(x) if dtype is None else cast(view, tensor(x), dtype), axis(x, dim)
    ),
})  # fmt: skip
