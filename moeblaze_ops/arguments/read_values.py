"""What a function may read beside its arguments: numbers, flags, and which functions it calls.

    lambda h: F.silu(h) * self.factor                  a number of self
    def quick(h): return h * torch.sigmoid(SLOPE * h)  a global number
    lambda h, s=2.0: self.act(h) * s                   a default, and a function of self

Of objects those attributes are looked at that have a name, or a text, which the code of the functions on the way to them holds;
of lists of modules all. What a function counts, and what it asks the world outside, is not known.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_DEPTH = 5
_NUMBERS = (bool, int, float, str)


def values_read_by(function: Callable) -> tuple[str | CodeType, ...]:
    """What ``function`` may read now: numbers as text, and the code of functions that it may call."""
    return tuple(_read(function, frozenset(), _DEPTH))


def _read(value: Any, names: frozenset[str], depth: int) -> Iterator[str | CodeType]:
    if value is None or isinstance(value, _NUMBERS):
        yield repr(value)
    elif isinstance(value, Tensor):
        yield f"tensor {id(value)}, written to {0 if value.is_inference() else value._version} times"
    elif hasattr(value, "tobytes"):  # of NumPy
        yield repr(value.tobytes())
    else:
        code = _code_of(value)
        if code is not None:
            yield code
            names |= _names_in(code)
        if depth and not _is_of_torch(value):
            for held in _held_by(value, names):
                yield from _read(held, names, depth - 1)


def _held_by(value: Any, names: frozenset[str]) -> Iterable[Any]:
    match value:
        case MethodType():
            return (value.__func__, value.__self__)
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            found = names & value.__globals__.keys()
            return (*cells, *defaults, *(value.__globals__[name] for name in sorted(found)))
        case functools.partial():
            return (value.func, *value.args, *value.keywords.values())
        case ModuleType():
            return [vars(value)[name] for name in sorted(names & vars(value).keys())]
        case list() | tuple():
            return value
        case dict():
            return value.values()
        case nn.Sequential() | nn.ModuleList() | nn.ModuleDict():
            return (*value.children(), *_attributes_of(value, names))
        case _:
            return _attributes_of(value, names)


def _attributes_of(value: Any, names: frozenset[str]) -> Iterator[Any]:
    """The attributes of an object by these names, and by those in the code of its methods and properties among them."""
    todo, seen = sorted(names), set(names)
    while todo:
        name = todo.pop()
        held = inspect.getattr_static(value, name, None)
        if held is None and isinstance(value, nn.Module):
            held = value._modules.get(name)
        method = getattr(held, "fget", None) or getattr(held, "__func__", held)
        if isinstance(method, FunctionType):
            new = _names_in(method.__code__) - seen
            todo, seen = [*todo, *sorted(new)], seen | new
        if held is not None:
            yield getattr(value, name) if inspect.ismemberdescriptor(held) else method


def _code_of(value: Any) -> CodeType | None:
    """The code that calling ``value`` runs, as far as it is Python's."""
    if isinstance(value, FunctionType):
        return value.__code__
    call = getattr(type(value), "forward" if isinstance(value, nn.Module) else "__call__", None)
    return getattr(call, "__code__", None)


@functools.cache
def _names_in(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in code, and in that of functions inside of it; ``getattr`` takes them as texts."""
    texts = (const for const in code.co_consts if isinstance(const, str))
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(texts, *map(_names_in, inner))


def _is_of_torch(value: Any) -> bool:
    """True if it is a function of torch, whose globals are none of the user's: ``F.silu``."""
    return isinstance(value, FunctionType | type) and value.__module__.partition(".")[0] == "torch"
