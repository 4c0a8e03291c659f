"""Canonical forms of pointwise functions, and of a softmax where it is one; see `forms.views` for how forms work.

    pointwise (name, xs, params)    number (changing)    softmax (x, dim)
"""

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.kernels.formulas.derivative import CLAMPS_MOVE_AT_BOUNDS
from moeblaze_ops.lowering.forms.low_rank import low_rank_sum
from moeblaze_ops.lowering.forms.sums_of_products import adds_up
from moeblaze_ops.lowering.forms.symbolic_floats import changing
from moeblaze_ops.lowering.forms.views import (
    axis,
    cast,
    form,
    full,
    output_dtype,
    output_shape,
    require,
    short_forms,
    sliced,
    tensor,
    through_scatter,
)
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value
from moeblaze_ops.lowering.graph.stored_numbers import is_integral, stored_number

_OF_NUMBERS: dict[str, dict[str, float | None]] = {
    "softplus": {"beta": 1.0, "threshold": 20.0}, "leaky_relu": {"negative_slope": 0.01}, "elu": {"alpha": 1.0},
    "hardshrink": {"lambd": 0.5}, "softshrink": {"lambd": 0.5},
    "celu": {"alpha": 1.0}, "hardtanh": {"min_val": -1.0, "max_val": 1.0}, "threshold": {"threshold": None, "value": None},
    **{name: {} for name in ("mish", "selu", "relu6", "hardswish", "hardsigmoid", "logsigmoid", "softsign")},
}  # fmt: skip
"""Pointwise functions of one tensor, and the names of the numbers that may stand beside it, with what they are if not given."""


def pointwise(view: GraphView, name: str, *args: Any, params: tuple = ()) -> Value:
    """A broadcasting function of tensors and numbers; numbers become values of rank 0."""
    dtype = output_dtype(view)
    if dtype == torch.bool and len(args) == 2:
        args = _compared(view, *args)
    args = tuple(changing(view, a, dtype) if isinstance(a, torch.SymFloat) else a for a in args)
    xs = tuple(full(view, a, (), dtype) if isinstance(a, int | float | bool) else _of_size(view, name, a, args) for a in args)
    if name == "add" and (joined := low_rank_sum(view, *xs)) is not None and adds_up(joined[0], xs, joined[1]):
        return joined[0]
    made = view.make("pointwise", name, xs, params)
    made.fades = name == "mul" and any(x.fades for x in xs) and all(x.fades or _is_flag(x) for x in xs)
    return made


def _of_size(view: GraphView, name: str, x: Any, beside: Sequence[Any]) -> Value:
    """A tensor, or a size that integers are less or greater than: ``place < capacity``; one that they equal is no number."""
    if not isinstance(x, sympy.Expr):
        return tensor(x)
    whole = all(other is x or (isinstance(other, Value) and other.dtype == torch.int64) for other in beside)
    require(whole and name in ("lt", "le", "gt", "ge") and not free_unbacked_symbols(x), "a number beside integers")
    return full(view, x, (), torch.int64)


def _compared(view: GraphView, *args: Any) -> tuple[Any, ...]:
    """Operands in the dtype that they are compared in: of bytes, 300 is 44; ``h > 0.1`` of bf16 is ``h > 0.10009765625``."""
    # Reading what a call tells would be a guard.
    numbers = (0.0 if isinstance(x, torch.SymFloat) else 0 if isinstance(x, sympy.Expr) else x for x in args)
    alike: Any = [torch.empty((1,) * len(x.shape), dtype=x.dtype, device="meta") if isinstance(x, Value) else x for x in numbers]
    dtype = torch.result_type(*alike)
    held = (stored_number(x, dtype) if type(x) is int and is_integral(dtype) else x for x in args)
    return tuple(cast(view, x, dtype) if isinstance(x, Value) else _beside(x, dtype) for x in held)


def _beside(x: Any, dtype: torch.dtype) -> Any:
    """A number as 16 bits hold it beside a tensor of them."""
    return stored_number(x, dtype) if type(x) is float and dtype.is_floating_point and dtype.itemsize == 2 else x


def times(view: GraphView, number: Any, x: Any) -> Any:
    """``number * x``, of a tensor or a number, as the keywords ``alpha`` and ``value`` have it."""
    require(isinstance(number, (int, float)), "a number")
    if number == 1 or not isinstance(x, Value):
        return x if number == 1 else number * x
    require(x.dtype.is_floating_point, "multiples of integers")
    factors = (full(view, number, (), x.dtype), x)
    return view.make("pointwise", "mul", factors, (), shape=x.shape, dtype=x.dtype)


def _pointwise_form(name: str, arity: int, *names: str) -> None:
    def apply(view: GraphView, *args: Any, **kwargs: Any) -> Value:
        kwargs.pop("inplace", None)
        alpha = kwargs.pop("alpha", 1)
        require((alpha == 1 or name in ("add", "sub", "rsub")) and not kwargs, "keywords")
        if arity == 2:
            first, second = args
            args = (times(view, alpha, first), second) if name == "rsub" else (first, times(view, alpha, second))
        if name in ("and", "or", "not"):
            require(output_dtype(view) == torch.bool, "bits of integers")
            args = tuple(cast(view, a, torch.bool) if isinstance(a, Value) else a for a in args)  # logical_not(2.5) is False
        require(name != "add" or output_dtype(view) != torch.bool, "a sum of booleans")
        return pointwise(view, name, *args[:arity])

    form(*names)(apply)


_OF_ONE = {
    "neg": ("neg", "negative"), "relu": ("relu",), "silu": ("silu",), "tanh": ("tanh",), "erf": ("erf", "special_erf"),
    "exp": ("exp",), "log": ("log",), "log1p": ("log1p", "special_log1p"), "expm1": ("expm1", "special_expm1"),
    "sin": ("sin",), "cos": ("cos",), "square": ("square",), "sqrt": ("sqrt",), "rsqrt": ("rsqrt",),
    "reciprocal": ("reciprocal",), "abs": ("abs", "absolute"), "not": ("logical_not", "bitwise_not", "invert", "inv"),
    "ceil": ("ceil",), "floor": ("floor",), "sign": ("sign",),
}  # fmt: skip
_OF_TWO = {
    "add": ("add", "__add__", "__radd__", "wrapped_add"), "sub": ("sub", "subtract", "wrapped_sub"),
    "rsub": ("rsub", "__rsub__"), "mul": ("mul", "multiply", "__mul__", "__rmul__"),
    "floordiv": ("floordiv", "floor_divide"), "mod": ("mod", "remainder"),
    "maximum": ("maximum",), "minimum": ("minimum",), "eq": ("eq", "__eq__"), "ne": ("ne", "__ne__"),
    "lt": ("lt", "less"), "le": ("le", "less_equal"), "gt": ("gt", "greater"), "ge": ("ge", "greater_equal"),
    "and": ("and_", "logical_and", "bitwise_and", "__and__"), "or": ("or_", "logical_or", "bitwise_or", "__or__"),
}  # fmt: skip
"""Pointwise functions of one and of two operands, and the operators that compute them."""

for _arity, _functions in enumerate((_OF_ONE, _OF_TWO), start=1):
    for _name, _names in _functions.items():
        _pointwise_form(_name, _arity, *_names)


def _with_numbers(name: str) -> None:
    """A pointwise function of one tensor, its other arguments numbers: never looked into, only repeated."""

    def apply(view: GraphView, x: Any, *params: Any, inplace: bool = False, **named: Any) -> Value:
        params = params[:-1] if params and params[-1] is False else params  # a positional `inplace`
        for keyword, default in islice(_OF_NUMBERS[name].items(), len(params), None):
            params = (*params, named.pop(keyword, default)) if named else params
        require(not named, "keywords")
        require(all(type(p) in (int, float) for p in params), "numbers")
        return pointwise(view, name, x, params=params)

    form(name)(apply)


for _name in _OF_NUMBERS:
    _with_numbers(_name)


@form("bitwise_xor", "logical_xor", "__xor__", "xor")
def _xor(view: GraphView, a: Any, b: Any) -> Value:
    """Zero where two integers are equal, false where two truth values are."""
    of_truths = all(isinstance(x, bool) or (isinstance(x, Value) and x.dtype == torch.bool) for x in (a, b))
    require(of_truths or output_dtype(view) != torch.bool, "numbers as truth values")
    return pointwise(view, "ne" if of_truths else "xor", a, b)


@form("prelu")
def _prelu(view: GraphView, x: Any, slope: Any) -> Value:
    require(tensor(slope).shape in ((), (1,)), "one slope")
    return pointwise(view, "prelu", x, slope)


def _is_flag(x: Value) -> bool:
    """True if all elements are 0 or 1 by comparisons: ``1 - F.one_hot(ids, E).float()``."""
    name, parts = x.args[:2] if x.op == "pointwise" else (x.op, x.args)
    if name == "cast" or (name == "sub" and parts[0].op == "full" and parts[0].args == (1,)):
        return _is_flag(parts[-1])
    return x.dtype == torch.bool or name == "eq"


@form("sigmoid", "special_expit")
def _sigmoid(view: GraphView, x: Any) -> Value:
    def of(x: Value) -> Value:
        return _fading(view.make("pointwise", "sigmoid", (x,), (), shape=x.shape, dtype=output_dtype(view)))

    return through_scatter(view, tensor(x), 0, of) or of(x)


def _fading(value: Value) -> Value:
    """A value, once it is known of it what `zero_stops_gradient` says."""
    value.fades = True
    return value


@form("softmax")
def _softmax(view: GraphView, x: Any, dim: int | None = None, *args: Any, dtype: Any = None, **kwargs: Any) -> Value:
    """Opaque, but where all other elements of a row are minus infinity: a softmax of the values alone."""

    def of(values: Value) -> Value:
        values = cast(view, values, output_dtype(view))
        return _fading(view.make("softmax", values, x.args[1], shape=values.shape, dtype=values.dtype))

    along = tensor(x).op == "scatter" and dim is not None and axis(x, dim) == x.args[1]
    return (through_scatter(view, x, 0, of) if along else None) or _fading(view.opaque(view._node))


@form("truediv", "div", "divide", "true_divide")
def _div(view: GraphView, a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    positions = isinstance(a, Value) and a.is_permutation and not (isinstance(b, (int, float)) and b < 0)  # both ways round down
    require(rounding_mode in (None, "floor") or (rounding_mode == "trunc" and positions), "rounding mode")
    if isinstance(b, torch.SymFloat) and b.node.hint and not rounding_mode:
        return pointwise(view, "mul", a, 1 / b)
    return pointwise(view, "floordiv" if rounding_mode else "div", a, b)


@form("pow")
def _pow(view: GraphView, x: Any, exponent: Any) -> Value:
    if isinstance(x, (int, float)):
        require(x > 0, "a base above zero")
        return pointwise(view, "exp", times(view, math.log(x), tensor(exponent)))
    require(isinstance(exponent, (int, float)), "a number as exponent")
    return pointwise(view, "square", x) if exponent == 2 else pointwise(view, "pow", x, params=(exponent,))


@form("glu")
def _glu(view: GraphView, x: Any, dim: int = -1) -> Value:
    d, half = axis(tensor(x), dim), output_shape(view)[axis(x, dim)]
    a, b = (sliced(view, x, d, start, 1, half) for start in (0, half))
    return pointwise(view, "mul", a, _sigmoid(view, b))


@form("clamp", "clip")
def _clamp(view: GraphView, x: Any, min: Any = None, max: Any = None) -> Value:
    if isinstance(min, Value) or isinstance(max, Value):
        require(None in (min, max), "one bound as a tensor")
        return _bounded(view, x, "lt" if max is None else "gt", min if max is None else max)
    # A guard, as Inductor's own: it generates code for a bound that is known.
    lower, upper = (float(bound) if isinstance(bound, torch.SymFloat) else bound for bound in (min, max))
    require(all(isinstance(bound, (int, float, type(None))) for bound in (lower, upper)), "bounds as numbers")
    return pointwise(view, "clamp", x, params=tuple(_beside(bound, tensor(x).dtype) for bound in (lower, upper)))


def _bounded(view: GraphView, x: Any, comparison: str, bound: Any) -> Value:
    """``bound`` where ``x`` lies on its other side.

    The gradient of a tie is that of ``x`` where a bound that is a number has one for it, else they share it.
    """
    x, bound = tensor(x), tensor(bound)
    require(x.dtype == bound.dtype == output_dtype(view), "numbers of one dtype")
    if not CLAMPS_MOVE_AT_BOUNDS:
        return pointwise(view, "maximum" if comparison == "lt" else "minimum", x, bound)
    outside = view.make("pointwise", comparison, (x, bound), (), shape=output_shape(view), dtype=torch.bool)
    return pointwise(view, "where", outside, bound, x)


@form("clamp_min", "clamp_max")
def _clamp_one(view: GraphView, x: Any, bound: Any) -> Value:
    upper = "max" in str(view._node.target)
    return _clamp(view, x, *((None, bound) if upper else (bound, None)))


@form("lerp")
def _lerp(view: GraphView, x: Any, end: Any, weight: Any) -> Value:
    require(isinstance(weight, (Value, int, float)), "a number")
    return pointwise(view, "add", x, pointwise(view, "mul", pointwise(view, "sub", end, x), weight))


@form("rrelu")
def _rrelu(
    view: GraphView, x: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Value:
    require(not training and lower <= upper, "a slope that is drawn")
    return pointwise(view, "leaky_relu", x, params=((lower + upper) / 2,))


def _scaled(name: str, inside: float, outside: float) -> Callable:
    """``outside * function(inside * x)``."""
    return lambda view, x: times(view, outside, pointwise(view, name, times(view, inside, tensor(x))))


short_forms({
    # What Dynamo makes of `addcmul_` with a number.
    ("fma",): lambda view, a, b, x: pointwise(view, "add", x, pointwise(view, "mul", a, b)),
    ("gelu",): lambda view, x, approximate="none": pointwise(view, "gelu_tanh" if approximate == "tanh" else "gelu", x),
    ("exp2", "special_exp2"): _scaled("exp", math.log(2), 1),
    ("log2",): _scaled("log", 1, 1 / math.log(2)),
    ("log10",): _scaled("log", 1, 1 / math.log(10)),
    ("logaddexp",): lambda view, a, b: pointwise(view, "add", a, pointwise(view, "softplus", pointwise(view, "sub", b, a))),
    ("tanhshrink",): lambda view, x: pointwise(view, "sub", x, pointwise(view, "tanh", x)),
    ("addcmul",): lambda view, x, a, b, *, value=1: pointwise(view, "add", x, times(view, value, pointwise(view, "mul", a, b))),
    ("addcdiv",): lambda view, x, a, b, *, value=1: pointwise(view, "add", x, times(view, value, pointwise(view, "div", a, b))),
    ("positive", "pos", "__pos__"): lambda view, x: tensor(x),
    ("isnan",): lambda view, x: pointwise(view, "ne", x, x),
    ("log_sigmoid",): lambda view, x: pointwise(view, "logsigmoid", x),
})  # fmt: skip
