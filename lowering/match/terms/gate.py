"""Which fused activation a gate function computes, found by running it on symbols.

A gate takes rows that hold gate and up packed, ``[N, 2F]``, and gives activated rows ``[N, F]``. Running it on an
object that records arithmetic, instead of a tensor, shows both its formula and how the halves are packed. Whatever the
object does not know (a function, a branch on values, an attribute that is set) ends the run, and nothing is recognised.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from moeblaze_ops.lowering.index_notation.expr import Expr
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.index_notation.pointwise import apply_pointwise
from moeblaze_ops.lowering.match.terms.activation import Formulas


class _Unknown(Exception):
    """The gate did something whose meaning is not known here."""


def recognise_gate(gate: Callable, attributes: dict[str, Any], act_fn: Callable[[Any], Any] | None) -> tuple[str, bool] | None:
    """The fused activation that ``gate(self, gate_up)`` is, and whether it packs the halves interleaved.

    Args:
        gate: a method as found on its class.
        attributes: all that it may read of ``self`` besides ``act_fn``: plain numbers.
        act_fn: what ``self.act_fn`` does to a symbol, see ``pointwise``; None where there is none.

    Returns:
        None unless every step of the gate is known and together they are one of the fused, gated activations.
    """
    algebra = Algebra()
    formulas = Formulas(algebra)
    halves = formulas.gate, formulas.up
    rows = _Rows(*(_Element(algebra, half) for half in halves))
    module = _Frozen(attributes if act_fn is None else {**attributes, "act_fn": act_fn})
    try:
        result = gate(module, rows)
    except Exception:  # the run stops wherever it leaves what symbols can do
        return None
    if not isinstance(result, _Element) or rows.interleaved is None:
        return None
    named = formulas.name(result.e, halves)
    return (named[0], rows.interleaved) if named is not None and named[1] == halves else None


def pointwise(name: str) -> Callable[[Any], Any]:
    """The pointwise function ``name`` (``silu``, ``gelu``, ``gelu_tanh``, ``relu``, ``relu2``) of symbols."""

    def apply(x: "_Element") -> "_Element":
        return x.call("relu").call("square") if name == "relu2" else x.call(name)

    return apply


class _Frozen(SimpleNamespace):
    """The gate's ``self``: what it may read, and nothing that it may write."""

    def __init__(self, attributes: dict[str, Any]):
        super().__init__()
        self.__dict__.update(attributes)

    def __setattr__(self, name: str, value: Any) -> None:
        raise _Unknown(f"{name} is set")


class _Rows:
    """The packed rows: they can be taken apart in two halves, in one of two ways."""

    def __init__(self, gate: "_Element", up: "_Element"):
        self._halves = gate, up
        self.interleaved: bool | None = None

    def chunk(self, chunks: int, dim: int = 0) -> tuple["_Element", "_Element"]:
        if (chunks, dim) != (2, -1):
            raise _Unknown(f"chunk({chunks}, {dim})")
        self._take(interleaved=False)
        return self._halves

    def __getitem__(self, index: Any) -> "_Element":
        starts = [i for i, every_other in enumerate(_EVERY_OTHER) if index in every_other]
        if not starts:
            raise _Unknown(f"[{index}]")
        self._take(interleaved=True)
        return self._halves[starts[0]]

    def _take(self, *, interleaved: bool) -> None:
        if self.interleaved not in (None, interleaved):
            raise _Unknown("halves are taken in two ways")
        self.interleaved = interleaved


_EVERY_OTHER = [(..., slice(None, None, 2)), (..., slice(0, None, 2))], [(..., slice(1, None, 2))]


class _Element:
    """One element of the halves, or a function of it."""

    dtype = object()

    def __init__(self, algebra: Algebra, e: Expr):
        self._algebra, self.e = algebra, e

    def call(self, name: str, *others: Any, params: tuple = ()) -> "_Element":
        args = [self.e, *(self._expression(other) for other in others)]
        return _Element(self._algebra, apply_pointwise(self._algebra, name, args, params, integers=False))

    def _expression(self, value: Any) -> Expr:
        if isinstance(value, _Element):
            return value.e
        if type(value) in (int, float):
            return self._algebra.const(value)
        raise _Unknown(f"{value!r} in arithmetic")

    def __add__(self, other: Any) -> "_Element":
        return self.call("add", other)

    def __sub__(self, other: Any) -> "_Element":
        return self.call("sub", other)

    def __mul__(self, other: Any) -> "_Element":
        return self.call("mul", other)

    def __truediv__(self, other: Any) -> "_Element":
        return self.call("div", other)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> "_Element":
        return self.call("neg")

    def __bool__(self) -> bool:
        raise _Unknown("a branch on values")

    def clamp(self, min: float | None = None, max: float | None = None) -> "_Element":
        bounds = None if min == -math.inf else min, None if max == math.inf else max
        return self if bounds == (None, None) else self.call("clamp", params=bounds)

    def float(self) -> "_Element":
        return self

    def to(self, dtype: Any) -> "_Element":
        """Casts up and back only change where results are rounded, which the fused activations do once."""
        if dtype not in (self.dtype, torch.float32):
            raise _Unknown(f"to {dtype}")
        return self

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        options = {name: value for name, value in (kwargs or {}).items() if (name, value) not in _DEFAULTS}
        name = _FUNCTIONS.get(function)
        if name == "gelu" and options.pop("approximate", None) == "tanh":
            name = "gelu_tanh"
        x, others = args[0], args[1:]
        if name is None or options or not isinstance(x, _Element):
            raise _Unknown(f"{function}")
        return x.call(name, *others)


_DEFAULTS = ("inplace", False), ("approximate", "none")
_FUNCTIONS = {
    torch.sigmoid: "sigmoid", torch.tanh: "tanh", torch.erf: "erf", torch.exp: "exp", torch.square: "square",
    torch.relu: "relu", F.silu: "silu", F.relu: "relu", F.gelu: "gelu", F.sigmoid: "sigmoid", F.tanh: "tanh",
    torch.mul: "mul", torch.add: "add",
}  # fmt: skip
