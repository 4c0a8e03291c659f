"""Which operator a node calls, told by the object that it calls and not by its name.

    F.silu(x), x.silu(), torch.ops.aten.silu(x)     silu
    torch.ops.mylib.silu(x)                         nothing known: its namespace is not torch's
    silu(x), of the user, under allow_in_graph      nothing known: torch has another function of that name

What is not known has no name, so that nothing is concluded from it.
"""

import sys
from types import BuiltinFunctionType, FunctionType, MethodWrapperType
from typing import Any

import torch
from torch import fx

_NAMESPACES = frozenset(("aten", "prims"))
OTHERS = {"transformers::grouped_mm_fallback"}
"""Operators of other namespaces that compute what torch's operators of the same name do."""

CALLS: dict[str, fx.Node] = {}
"""Operators of other namespaces, and calls that compute the same; placeholders of their graphs are the arguments in order."""

GROUPED_PRODUCTS = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
"""Names of the products of groups of rows, which end at offsets."""

PROJECTIONS = frozenset(("linear", "matmul", "mm", "bmm", "einsum", "addmm", "baddbmm", *GROUPED_PRODUCTS))
"""Operators that multiply by matrices, among others by those of experts and routers."""

OURS: set[Any] = set()
"""Functions that tracing puts into graphs: each has a form of its own name."""

_PYTHON = frozenset(("_operator", "builtins", "math"))
_NAMES: dict[Any, str] = {}
"""What was found to be torch's or Python's own; anything else is not kept alive here."""


def operator_name(node: fx.Node) -> str:
    """The name that an operator has as a method and as a function alike, "" for one that is neither torch's nor Python's.

    ``view``, ``index_add_``, ``linear``, ``add`` (of ``operator.add``).
    """
    if node.op not in ("call_function", "call_method"):
        return ""
    if _is_of_numpy(node.target):
        return _name_in_numpy(node)
    known = _NAMES.get(node.target)
    if known is None:
        known = _name(node.target)
        if known and not isinstance(node.target, str):  # a method of tensors may become another
            _NAMES[node.target] = known
    return known


def overloads_of(target: Any) -> list[torch._ops.OpOverload]:
    """The overload that is called, or all that may be where the overload is chosen at the call; of functions, none."""
    if isinstance(target, torch._ops.OpOverload):
        return [target]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, overload) for overload in target.overloads()]
    return []


def called_instead(node: fx.Node) -> tuple[str, tuple, dict[str, Any]]:
    """The name and the arguments by which a node's form is found: its own, or those of the call that it was declared to be.

        torch.ops.torchtitan.deterministic_scatter_add(out, index, src)     scatter_add, (out, 0, index, src), {}
    """
    for overload in overloads_of(node.target)[:1]:
        if (call := CALLS.get(overload.name().partition(".")[0])) is not None:
            behind = overload._schema.arguments[len(node.args) :]
            given = [*node.args, *(node.kwargs.get(argument.name, argument.default_value) for argument in behind)]
            places = dict(zip(call.graph.find_nodes(op="placeholder"), given, strict=True))
            return operator_name(call), *fx.node.map_arg((call.args, call.kwargs), places.__getitem__)
    return operator_name(node), node.args, node.kwargs


def _name(target: Any) -> str:
    if isinstance(target, FunctionType) and target in OURS:
        return target.__name__
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if isinstance(target, torch._ops.OpOverloadPacket):
        qualified = target._qualified_op_name
        return target.__name__ if qualified in OTHERS or qualified.partition("::")[0] in _NAMESPACES else ""
    if isinstance(target, str):
        return target if _is_own(getattr(torch.Tensor, target, None)) else ""
    return target.__name__ if _is_own(target) else ""


_READ_ONE = frozenset(("abs", "absolute", "neg", "negative", "exp", "log", "sqrt", "copy", "tolist", "asarray", "nonzero", "T"))
_READ_TWO = frozenset((
    "add", "sub", "subtract", "mul", "multiply", "truediv", "divide", "floordiv", "mod", "pow", "matmul", "dot", "getitem",
    "eq", "ne", "lt", "le", "gt", "ge", "equal", "less", "greater", "maximum", "minimum", "sum", "prod", "mean", "std", "var",
    "max", "min", "amax", "amin", "any", "all", "argmax", "argmin", "argsort", "cumsum", "bincount", "unique", "astype", "item",
    "round", "array", "reshape", "ravel", "flatten", "transpose", "concatenate", "stack", "flatnonzero", "count_nonzero",
))  # fmt: skip
"""What numpy computes from that many arguments; one more may be the array to write to."""


def _is_of_numpy(target: Any) -> bool:
    """True if Dynamo wraps an operator, a function or a method of numpy, as ``wrapped_add``."""
    return type(target).__module__ == "torch._dynamo.utils" and type(target).__name__.startswith("numpy_")


def _name_in_numpy(node: fx.Node) -> str:
    """The name of what only computes, in numpy, "" for what may write to its arrays or draw random numbers.

    ``wrapped_add`` of ``np.add(a, b)``, and nothing of ``np.add(a, b, a)`` and ``a += b``.
    """
    name = node.target.__name__
    operator = name.removeprefix("wrapped_").strip("_")
    reads = operator in _READ_TWO or (operator in _READ_ONE and len(node.args) == 1)
    return name if reads and len(node.args) <= 2 and "out" not in node.kwargs else ""


def _is_own(function: Any) -> bool:
    """True if a function or a method of tensors is torch's or Python's.

    ``F.silu`` is. A function of the user is not, whatever names it took over from torch's (``functools.wraps(F.silu)``) and
    wherever it was put (``F.silu = silu``).
    """
    if isinstance(function, MethodWrapperType):  # ``torch.Tensor.mT.__get__``
        function = function.__self__
    if hasattr(function, "__objclass__"):
        return function.__objclass__ in torch.Tensor.__mro__
    module = getattr(function, "__module__", None) or ""
    root = module.partition(".")[0]
    if isinstance(function, BuiltinFunctionType):
        return root == "torch" or root in _PYTHON
    if not isinstance(function, FunctionType) or root != "torch":
        return False
    found: Any = sys.modules.get(module)
    if "<locals>" in function.__qualname__:  # ``torch.unique``, which chooses between functions
        found = getattr(found, function.__name__, None)
    else:
        for part in function.__qualname__.split("."):
            found = getattr(found, part, None)
    wraps = [function]
    while (inner := getattr(wraps[-1], "__wrapped__", None)) is not None:
        wraps.append(inner)
    homes = {getattr(each, "__globals__", {}).get("__name__", "").partition(".")[0] for each in wraps}
    return found is function and homes == {"torch"}
