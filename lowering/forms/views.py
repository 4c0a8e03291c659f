"""Canonical forms of operators: many spellings, few value kinds.

A form is a function ``form(view, *args, **kwargs)`` registered under every name its operator has as a function and as
a method; it returns `Value`s, or raises `NotCanonical`. Value kinds and their ``args``:

    reshape (x)          permute (x, dims)      slice (x, dim, start, step)     select (x, dim, index)
    expand (x)           stack (xs, dim)        cat (xs, dim)
    cast (x)             full (number)          arange (start, step)
and those of `forms.pointwise`, `forms.products`, `forms.indexing` and `forms.vmap`. A new spelling of a
known kind is one function in one of them, or in `forms.masks`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, NotCanonical, Value
from moeblaze_ops.lowering.graph.operators import called_instead
from moeblaze_ops.lowering.graph.sizes import Size, same_shape, same_size, size_of
from moeblaze_ops.lowering.graph.stored_numbers import stored_number, underflows_no_earlier

TABLE: dict[str, Callable] = {}
"""Every canonical form by operator name."""


def form(*names: str) -> Callable:
    def register(function: Callable) -> Callable:
        def checked(view: GraphView, *args: Any, **kwargs: Any) -> Any:
            try:
                args, kwargs = _by_place(args, kwargs)
                return function(view, *args, **kwargs)
            except (TypeError, IndexError, ValueError, AttributeError) as error:
                # A call in a style this form does not know (arguments by other names, Python numbers for tensors).
                raise NotCanonical(names[0]) from error

        TABLE.update(dict.fromkeys(names, checked))
        return function

    return register


def short_forms(forms: dict[tuple[str, ...], Callable]) -> None:
    """Register operators that are others with some arguments, by all their names: a line each."""
    for names, function in forms.items():
        form(*names)(function)


def _by_place(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The operands of a call where a form has them, if they are given by the names that torch gives them."""
    for place, names in enumerate(_OPERANDS):
        if len(args) == place and (name := next((name for name in names if name in kwargs), None)) is not None:
            args, kwargs = (*args, kwargs[name]), {key: value for key, value in kwargs.items() if key != name}
    return args, kwargs


_OPERANDS = ("condition", "tensors", "tensor", "input"), ("other",)
"""Names of first and of second operands."""


def require(condition: bool, why: str) -> None:
    if not condition:
        raise NotCanonical(why)


def output_shape(view: GraphView) -> tuple[Size, ...]:
    return tuple(map(size_of, fake_of(view._node).shape))


def output_dtype(view: GraphView) -> torch.dtype:
    return fake_of(view._node).dtype


def tensor(x: Any) -> Value:
    require(isinstance(x, Value), "a tensor")
    return x


def axis(x: Value, dim: int) -> int:
    return dim % max(len(x.shape), 1)


# Views.


def reshaped(view: GraphView, x: Value, shape: tuple[Size, ...]) -> Value:
    shape = tuple(shape)
    if x.op == "reshape":
        x = x.args[0]
    if same_shape(shape, x.shape):
        return x
    return view.make("reshape", x, shape=shape, dtype=x.dtype)


@form("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel")
def _reshape(view: GraphView, x: Any, *args: Any, **kwargs: Any) -> Value:
    x = tensor(x)
    require(output_dtype(view) == x.dtype, "view as another dtype")
    return reshaped(view, x, output_shape(view))


@form("detach")
def _detach(view: GraphView, x: Any) -> Value:
    if view.numbers_only or not torch.is_grad_enabled() or not tensor(x).dtype.is_floating_point:
        return tensor(x)
    require(not x.of_state, "a parameter without gradient is one of its own")
    return view.make("pointwise", "detach", (x,), (), shape=x.shape, dtype=x.dtype)


@form("flip")
def _flip(view: GraphView, x: Any, *places: Any, dims: Any = ()) -> Value:
    """Of what has as many elements as only the data tell, as hits have; others are tensors of their own in another order."""
    given = {axis(tensor(x), d) for own in (*places, dims) for d in (own if isinstance(own, (list, tuple)) else [own])}
    require(given == {0} and bool(free_unbacked_symbols(x.shape[0])), "a size that only the data tell")
    return view.make("slice", x, 0, x.shape[0] - 1, -1, shape=x.shape, dtype=x.dtype)


@form("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
def _dropout(view: GraphView, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False, **kwargs: Any) -> Value:
    """The kind ``dropout (x, p, node)``: each call draws anew. Of other dropouts only that they draw nothing."""
    training = kwargs.get("train", training)
    p = float(p) if isinstance(p, torch.SymFloat) and training else p  # a guard, as that of torch's operator
    if p == 0 or training is False:
        return tensor(x)
    of_elements = called_instead(view._node)[0] in ("dropout", "dropout_")
    require(of_elements and type(p) in (int, float) and training is True, "dropout of elements, with a number as probability")
    return view.make("dropout", tensor(x), p, view._node)


def permuted(view: GraphView, x: Value, dims: Sequence[int]) -> Value:
    dims = tuple(axis(x, d) for d in dims)
    if x.op == "permute":
        x, dims = x.args[0], tuple(x.args[1][d] for d in dims)
    if dims == tuple(range(len(dims))):
        return x
    return view.make("permute", x, dims, shape=tuple(x.shape[d] for d in dims), dtype=x.dtype)


def _reordered(name: str) -> Callable:
    """The form of a method that only puts axes in another order: the one that it puts axes in whose sizes tell them apart."""

    def apply(view: GraphView, x: Any, *args: Any, **kwargs: Any) -> Value:
        sized = torch.empty(tuple(range(len(tensor(x).shape))), device="meta")
        return permuted(view, x, getattr(torch.Tensor, name)(sized, *args, **kwargs).shape)

    return form(name)(apply)


for _name in ("transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "permute", "t", "adjoint"):
    _reordered(_name)


@form("getattr")
def _getattr(view: GraphView, x: Any, name: str) -> Any:
    # From torch 2.15 on these are captured as aten.numpy_T and aten.mT.
    require(name in ("T", "mT"), name)
    return TABLE["numpy_T" if name == "T" else "mT"](view, x)


def sliced(view: GraphView, x: Value, dim: int, start: Size, step: int, length: Size) -> Value:
    if start == 0 and step == 1 and same_size(length, x.shape[dim]):
        return x
    _require_known(x.shape[dim])
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    return view.make("slice", x, dim, start, step, shape=shape, dtype=x.dtype)


def _require_known(size: Size) -> None:
    # Some of the true elements of a mask would look like all of them.
    require(not free_unbacked_symbols(size), "a whole axis, where only the data tell its size")


def selected(view: GraphView, x: Value, dim: int, index: int) -> Value:
    _require_known(x.shape[dim])
    if isinstance(index, int) and index < 0:
        require(isinstance(x.shape[dim], int), "negative index on a symbolic axis")
        index += x.shape[dim]
    return view.make("select", x, dim, index, shape=(*x.shape[:dim], *x.shape[dim + 1 :]), dtype=x.dtype)


@form("narrow")
def _narrow(view: GraphView, x: Any, dim: int, start: int, length: int) -> Value:
    require(isinstance(start, int) and start >= 0, "start")
    return sliced(view, tensor(x), axis(x, dim), start, 1, length)


@form("unbind")
def _unbind(view: GraphView, x: Any, dim: int = 0) -> tuple[Value, ...]:
    d = axis(tensor(x), dim)
    return tuple(selected(view, x, d, i) for i in range(x.shape[d]))


@form("chunk", "tensor_split")
def pieces(view: GraphView, x: Any, sizes: Any = None, dim: int = 0, **kwargs: Any) -> tuple[Value, ...]:
    d, start, found = axis(tensor(x), dim), 0, []
    for piece in fake_of(view._node):
        length = size_of(piece.shape[d])
        found.append(sliced(view, x, d, start, 1, length))
        start = start + length
    require(same_size(start, x.shape[d]), "one part behind another")  # not ``x.tensor_split([2, 1])``
    return tuple(found)


def expanded(view: GraphView, x: Value, shape: tuple[Size, ...]) -> Value:
    return x if x.shape == shape else view.make("expand", x, shape=shape, dtype=x.dtype)


@form("repeat", "tile")
def tiled(view: GraphView, x: Any, *sizes: Any, **named: Any) -> Value:
    times = [n for own in (*sizes, *named.values()) for n in (own if isinstance(own, (tuple, list)) else [own])]
    rank = max(len(times), len(tensor(x).shape))
    pairs = zip(*((*[1] * (rank - len(own)), *own) for own in (times, x.shape)), strict=True)
    whole = tuple(n for pair in pairs for n in pair)
    apart = tuple(n if i % 2 else 1 for i, n in enumerate(whole))
    return reshaped(view, expanded(view, reshaped(view, x, apart), whole), output_shape(view))


def concatenated(view: GraphView, xs: Any, d: int) -> Value:
    if d < len(xs[0].shape) - 1 and all(x.shape[d] == 1 for x in xs):  # slots of ids and weights stay one tensor
        return view.make("stack", tuple(selected(view, x, d, 0) for x in xs), d)
    return view.make("cat", tuple(map(tensor, xs)), d)


@form("pad", "constant_pad_nd")
def _pad(view: GraphView, x: Any, pad: Any, mode: str = "constant", value: Any = None) -> Value:
    """A number before and behind the elements of the last axes: ``F.pad(counts.cumsum(0), (1, 0))``, not ``mode="reflect"``."""
    require(mode == "constant" and all(isinstance(n, int) and n >= 0 for n in pad), "so many of one number")
    for i, sizes in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        shape, d = tensor(x).shape, len(x.shape) - 1 - i
        if x.op == "prefix" and x.args[1] == d and not value and not sizes[1]:  # the running sum of what stands behind zeros
            padded = _pad(view, x.args[0], (*[0, 0] * i, *sizes))
            x = view.make("prefix", padded, d, shape=padded.shape, dtype=x.dtype)
            continue
        before, behind = (filled(view, value or 0, (*shape[:d], n, *shape[d + 1 :]), x.dtype) for n in sizes)
        parts = tuple(part for part in (before, x, behind) if part is x or part.shape[d])
        if len(parts) > 1:
            x = view.make("cat", parts, d, shape=(*shape[:d], sum(sizes) + shape[d], *shape[d + 1 :]), dtype=x.dtype)
    return x


# Numbers.


def cast(view: GraphView, x: Value, dtype: torch.dtype) -> Value:
    if x.dtype == dtype:
        return x
    over = through_scatter(view, x, -math.inf, lambda source: cast(view, source, dtype)) if dtype.is_floating_point else None
    made = over or view.make("cast", x, shape=x.shape, dtype=dtype)
    made.fades = x.fades and underflows_no_earlier(dtype, x.dtype)
    return made


def is_scattered_over(x: Value, number: float) -> bool:
    """True if ``x`` is values stored by `scatter` into a tensor of one number."""
    return x.op == "scatter" and not x.args[4] and x.args[0].op == "full" and x.args[0].args[0] == number


def through_scatter(view: GraphView, x: Value, number: float, function: Callable[[Value], Value]) -> Value | None:
    """What a function makes of values stored over minus infinity, of which it makes ``number``, and of axes in another order."""
    if x.op == "permute":
        turned = through_scatter(view, x.args[0], number, function)
        return None if turned is None else permuted(view, turned, x.args[1])
    if not is_scattered_over(x, -math.inf):
        return None
    _, dim, index, source, _ = x.args
    source = function(source)
    base = full(view, number, x.shape, source.dtype)
    return view.make("scatter", base, dim, index, source, False, shape=x.shape, dtype=source.dtype)


def full(view: GraphView, number: float, shape: tuple[Size, ...], dtype: torch.dtype) -> Value:
    return view.make("full", number, shape=shape, dtype=dtype)


def filled(view: GraphView, number: float, shape: tuple[Size, ...], dtype: torch.dtype) -> Value:
    """A tensor whose elements are a number, as its dtype holds it: ``torch.full((), 1.5, dtype=torch.long)`` is 1."""
    stored = stored_number(number, dtype)
    require(stored is not None, "a number that the dtype holds")
    return full(view, stored, shape, dtype)


def _filled(view: GraphView, number: Any) -> Value:
    require(isinstance(number, (int, float)), "a number")
    return filled(view, number, output_shape(view), output_dtype(view))


@form("tensor")
def _tensor(view: GraphView, data: Any, **kwargs: Any) -> Value:
    return _filled(view, data[0] if isinstance(data, (list, tuple)) and len(data) == 1 else data)


@form("arange")
def _arange(view: GraphView, *args: Any, **kwargs: Any) -> Value:
    has_start = len(args) > 1 or (len(args) == 1 and "end" in kwargs)
    start = args[0] if has_start else kwargs.get("start", 0)
    step = args[2] if len(args) > 2 else kwargs.get("step", 1)
    require(isinstance(start, int) and isinstance(step, int), "a static start, and whole steps")
    return view.make("arange", start, step)


# Memory that nothing was written to may hold zeros as well as anything else.
_ZEROS = ("zeros", "zeros_like", "new_zeros", "zero", "empty", "empty_like", "new_empty")
_CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double", "long", "int", "bool", "cpu")

short_forms({
    ("contiguous", "clone", "left_as_it_is"): lambda view, x, *args, **kwargs: tensor(x),
    ("stack",): lambda view, xs, dim=0: view.make("stack", tuple(map(tensor, xs)), dim % (len(xs[0].shape) + 1)),
    ("mT",): lambda view, x: TABLE["transpose"](view, x, -2, -1),
    ("numpy_T",): lambda view, x: permuted(view, x, tuple(reversed(range(len(tensor(x).shape))))),
    ("select",): lambda view, x, dim, index: selected(view, tensor(x), axis(x, dim), index),
    ("expand", "expand_as", "broadcast_to"): lambda view, x, *args, **kwargs: expanded(view, tensor(x), output_shape(view)),
    _CASTS: lambda view, x, *args, **kwargs: cast(view, tensor(x), output_dtype(view)),
    _ZEROS: lambda view, *args, **kwargs: _filled(view, 0),
    ("ones", "ones_like", "new_ones"): lambda view, *args, **kwargs: _filled(view, 1),
    ("full", "full_like", "new_full", "fill"): lambda view, like, fill_value, **kwargs: _filled(view, fill_value),
    ("copy",): lambda view, x, source, non_blocking=False: cast(view, expanded(view, tensor(source), tensor(x).shape), x.dtype),
})  # fmt: skip
