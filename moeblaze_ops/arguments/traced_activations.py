"""From a Python function of (gate, up), or of h, and perhaps of parameters, to the formula that it computes.

The function is called once on small tensors while ATen's calls are recorded. Each call has a meaning here, or the function
is refused: what mixes rows or features, is random, computes without gradients, or reads a tensor that is none of its arguments
or how large these are, is no formula.
"""

import inspect
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import tracing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from moeblaze_ops.arguments.read_values import values_read_by
from moeblaze_ops.arguments.validation_values import refuse
from moeblaze_ops.kernels.formulas import composites
from moeblaze_ops.kernels.formulas.expression import (
    GATED_SYMBOLS,
    MASKS,
    PARAMETER_SYMBOLS,
    UNGATED_SYMBOLS,
    Node,
    apply,
    as_number,
    number,
    symbol,
)
from moeblaze_ops.kernels.formulas.named import name_of
from moeblaze_ops.kernels.formulas.text import check_root

_aten = torch.ops.aten
_traced = WeakIdKeyDictionary()


def trace_activation(function: Callable, num_parameters: int = 0, *, double: bool = False) -> str:
    """The name or the text of the formula that ``function`` computes; it is called once as long as it reads the same values.

    Its last ``num_parameters`` arguments are what the formula calls p0, p1 and so on. ``double``: it is used in fp64.

    Raises:
        ValueError: it is no pointwise function of its arguments; the message says what it does, as the end of a sentence.
    """
    try:
        texts = _traced.setdefault(function, {})
    except TypeError:  # nothing refers weakly to an instance of a class with __slots__
        texts = {}
    key = num_parameters, values_read_by(function), double
    if key not in texts:
        texts[key] = _trace(function, num_parameters, double)
    return texts[key]


def resolved_activation(op: str, activation: Any, num_parameters: int, dtype: torch.dtype | None) -> Any:
    """The name or the text of an activation that is a function, used in a dtype; anything else as it is.

    Raises:
        ValueError: a function is no pointwise one.
    """
    if isinstance(activation, str | type) or not callable(activation):
        return activation
    double = dtype == torch.float64
    if not torch.compiler.is_dynamo_compiling():
        return _resolved(op, activation, num_parameters, double)
    _load()
    _dynamo.comptime(_dynamo.find)
    if _is_found():
        return _resolved_as_found(op, num_parameters, double)
    return _dynamo.run_in_python(op, activation, num_parameters, double)


def _resolved(op: str, activation: Callable, num_parameters: int, double: bool) -> str:
    try:
        return trace_activation(activation, num_parameters, double=double)
    except ValueError as error:
        refuse(op, "activation", "be a pointwise function of (gate, up), or of h alone", error)


_dynamo = SimpleNamespace(load=None, function=None)
"""How Dynamo is asked for a function in the code that it traces, and what it was last asked for."""


def follow_in_dynamo(load: Callable[[], Any]) -> None:
    """Let ``load()``, which is called before Dynamo traces a call with a function, hand over its means by ``in_dynamo_by``."""
    _dynamo.load = load


def in_dynamo_by(comptime: Callable, function_in: Callable[[Any, str], Callable | None], disable: Callable) -> None:
    """Find functions by ``function_in(context, name)``, where ``comptime`` gives the context of traced code.

    Where that is None, the call is left to Python, by ``disable``: the graph breaks.
    """

    def find(context: Any) -> None:
        _dynamo.function = function_in(context, "activation")

    _dynamo.comptime, _dynamo.find, _dynamo.run_in_python = comptime, find, disable(_resolved)


def _load() -> None:
    _dynamo.load()


def _is_found() -> bool:
    return _dynamo.function is not None


def _resolved_as_found(op: str, num_parameters: int, double: bool) -> str:
    function, _dynamo.function = _dynamo.function, None  # which may hold a model
    return _resolved(op, function, num_parameters, double)


for _now in (_load, _is_found, _resolved_as_found):
    vars(_now)["_dynamo_marked_constant"] = True


def _trace(function: Callable, num_parameters: int, double: bool) -> str:
    names = GATED_SYMBOLS if _num_arguments(function) - num_parameters == 2 else UNGATED_SYMBOLS
    given = [torch.linspace(-1, 1, 6).reshape(2, 3) for _ in names] + [torch.tensor(0.5) for _ in range(num_parameters)]

    def run(*given: Tensor) -> Tensor:
        with _WithGradients():
            return function(*given)

    try:
        # Dynamo may be tracing the caller, whose sizes and guards are none of this function's.
        with tracing(None), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            traced = make_fx(torch.func.functionalize(run))(*given)
            root = _read(traced, [symbol(name) for name in (*names, *PARAMETER_SYMBOLS[:num_parameters])])
            if _depends_on_sizes(make_fx(torch.func.functionalize(run), tracing_mode="symbolic")(*given)):
                raise ValueError("it depends on how large its arguments are")
        check_root(root)
        return name_of(root, double=double)
    except Exception as error:
        raise ValueError(f"{_name(function)}: {error}") from error


def _depends_on_sizes(traced: fx.GraphModule) -> bool:
    """True if other sizes could give another function.

    h / h.shape[-1], F.relu(h) if len(h) == 4 else h      but not  h * torch.full(h.shape, 0.5)
    """
    sizes = [
        node for node in traced.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
    ]
    others = [user for node in sizes for user in node.users if user not in sizes]
    return bool(traced.shape_env.guards) or any(user.target is not _aten.full.default or user.args[1] in sizes for user in others)


_ASKS_FOR_GRADIENTS = (Tensor.data.__get__, Tensor.requires_grad.__get__)  # type: ignore[attr-defined]


class _WithGradients(TorchFunctionMode):
    """Refuses what is computed where no gradient flows: a formula has one everywhere."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _ASKS_FOR_GRADIENTS:
            raise ValueError("it depends on whether gradients flow")
        result = func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled() and isinstance(result, Tensor) and result.is_floating_point():
            raise ValueError("it computes without gradients")
        return result


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _num_arguments(function: Callable) -> int:
    """Arguments without a default; of a function whose signature is unknown 1."""
    try:
        parameters = inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function).parameters
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters.values())


def _read(traced: fx.GraphModule, symbols: list[Node]) -> Node:
    values: dict[fx.Node, Any] = {}
    given = iter(symbols)
    shape = torch.Size((2, 3))
    for node in traced.graph.nodes:
        match node.op:
            case "placeholder":
                values[node] = next(given)
            case "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = _called(node.target, args, kwargs)
            case "get_attr":
                raise ValueError("it reads a tensor that is none of its arguments (activation_parameters are arguments)")
            case "output":
                (result,) = node.args
                fake = result.meta["val"] if isinstance(result, fx.Node) else None
                if not isinstance(fake, Tensor) or fake.shape != shape:
                    raise ValueError("its result has not the shape of its arguments")
                return values[result]
    raise AssertionError("a graph without an output")


def _called(target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    if target is operator.getitem:
        return args[0] if args[1] == 0 else None
    meaning = _MEANINGS.get(getattr(target, "overloadpacket", None))
    if meaning is None:
        raise ValueError(f"it calls {target}")
    try:
        return meaning(*args, **kwargs)
    except TypeError as error:
        raise ValueError(f"it calls {target} in a way that has no meaning here") from error


def _nodes(*values: Any, masks: int = 0) -> list[Node]:
    """Numbers, behind as many ``masks``: a mask among them is one or zero."""
    nodes = [value if isinstance(value, Node) else number(value) for value in values]
    return [*nodes[:masks], *map(as_number, nodes[masks:])]


def _function(op: str) -> Callable[..., Node]:
    return lambda *args: apply(op, *_nodes(*args, masks=MASKS.get(op, 0)))


def _composite(function: Callable[..., Node]) -> Callable[..., Node]:
    return lambda *args: function(*_nodes(*args))


def _sum(op: str) -> Callable[..., Node]:
    return lambda a, b, alpha=1: apply(op, *_nodes(a), _scaled(b, alpha))


def _scaled(value: Any, factor: float) -> Node:
    return apply("mul", *_nodes(value, factor))


def _div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Node:
    if rounding_mode is not None:
        raise ValueError("it rounds")
    return apply("div", *_nodes(a, b))


def _gelu(x: Node, *, approximate: str = "none") -> Node:
    return composites.gelu_tanh(x) if approximate == "tanh" else composites.gelu(x)


def _clamp(x: Node, min: float | None = None, max: float | None = None) -> Node:
    return apply("clamp", *_nodes(x, -math.inf if min is None else min, math.inf if max is None else max))


def _addcmul(x: Any, a: Any, b: Any, *, value: float = 1) -> Node:
    return apply("add", *_nodes(x), _scaled(apply("mul", *_nodes(a, b)), value))


def _same(x: Node, **options: Any) -> Node:
    """Of copies and casts: an activation is computed in fp32 and rounded once."""
    dtype = options.get("dtype")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"it casts to {dtype}")
    return x if dtype is None else as_number(x)


def _constant(value: float) -> Callable[..., Node]:
    return lambda *args, **options: number(value)


_FUNCTIONS = ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "sigmoid", "tanh", "erf", "log1p", "expm1", "sin", "cos", "relu",
              "mul", "maximum", "minimum", "lt", "le", "gt", "ge", "eq", "ne", "where", "pow")  # fmt: skip
_COMPOSITES = ("silu", "mish", "softplus", "leaky_relu", "elu", "celu", "hardsigmoid", "hardswish", "hardtanh",
               "reciprocal", "sign", "threshold", "hardshrink", "softshrink")  # fmt: skip

_MEANINGS: dict[Any, Callable[..., Any]] = {
    **{getattr(_aten, name): _function(name) for name in _FUNCTIONS},
    **{getattr(_aten, name): _composite(getattr(composites, name)) for name in _COMPOSITES},
    _aten.add: _sum("add"),
    _aten.sub: _sum("sub"),
    _aten.rsub: lambda a, b, alpha=1: apply("sub", *_nodes(b), _scaled(a, alpha)),
    _aten.div: _div,
    _aten.gelu: _gelu,
    _aten.clamp: _clamp,
    _aten.clamp_min: lambda x, min: _clamp(x, min),
    _aten.clamp_max: lambda x, max: _clamp(x, None, max),
    _aten.square: _composite(composites.square),
    _aten.lerp: lambda a, b, weight: apply("add", *_nodes(a), apply("mul", apply("sub", *_nodes(b, a)), *_nodes(weight))),
    _aten.exp2: lambda x: apply("exp", _scaled(x, math.log(2))),
    _aten.log2: lambda x: _scaled(apply("log", x), 1 / math.log(2)),
    _aten.log_sigmoid_forward: _composite(composites.logsigmoid),
    _aten.addcmul: _addcmul,
    _aten.isnan: lambda x: apply("ne", x, x),
    _aten.masked_fill: lambda x, mask, value: apply("where", mask, *_nodes(value, x)),
    _aten.logical_and: _function("and"),
    _aten.logical_or: _function("or"),
    _aten.logical_not: _function("not"),
    _aten.bitwise_and: _function("and"),
    _aten.bitwise_or: _function("or"),
    _aten.bitwise_not: _function("not"),
    _aten.clone: _same,
    _aten._to_copy: _same,
    _aten.zeros_like: _constant(0.0),
    _aten.ones_like: _constant(1.0),
    _aten.full_like: lambda x, value, **options: number(value),
    _aten.scalar_tensor: lambda value, **options: number(value),
    _aten.full: lambda size, value, **options: number(value),
}
