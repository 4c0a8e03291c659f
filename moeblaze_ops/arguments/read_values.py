"""What a function may read beside its arguments: numbers, flags, and which functions it calls.

    lambda h: F.silu(h) * self.factor                  a number of self
    def quick(h): return h * torch.sigmoid(SLOPE * h)  a global number
    lambda h, s=2.0: self.act(h) * s                   a default, and a function of self

Of objects those attributes are looked at that have a name, or a text, which the code of the functions on the way to them holds;
of lists of modules all. What a function counts, and what it asks the world outside, is not known.
"""

import dis
import functools
import inspect
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_DEPTH = 5
_NUMBERS = (bool, int, float, str)


OF_TENSORS = ("tensor ", "array ")
"""How the text of what a tensor or an array holds begins."""


def values_read_by(function: Any, names: frozenset[str] = frozenset(), *, called: bool = True) -> tuple[str | CodeType, ...]:
    """What ``function`` may read now: numbers as text, and the code of functions that it may call.

    ``names`` are in the code of functions that hold it, where it is no function itself, and ``called`` says whether they call it.
    """
    return tuple(_read(function, names, _DEPTH, called))


def values_of(found: dict[str, Any], names: frozenset[str]) -> tuple[str | CodeType, ...]:
    """What code with these names may read now of what is ``found`` by name."""
    return tuple(each for held, called in _by_name(found, names) for each in _read(held, names, _DEPTH, called))


def _read(value: Any, names: frozenset[str], depth: int, called: bool = True) -> Iterator[str | CodeType]:
    if value is None or isinstance(value, _NUMBERS):
        yield repr(value)
    elif isinstance(value, Tensor):
        yield f"tensor {id(value)}, written to {0 if value.is_inference() else value._version} times"
    elif hasattr(value, "tobytes"):  # of NumPy
        yield f"array {value.tobytes()!r}"
    else:
        code = _code_of(value) if called else None
        if code is not None:
            yield code
            names |= names_in(code)
        if depth and not _is_of_torch(value):
            for held, called in _held_by(value, names):
                yield from _read(held, names, depth - 1, called)


def _held_by(value: Any, names: frozenset[str]) -> Iterable[tuple[Any, bool]]:
    """What an object holds, and whether that may be called."""
    match value:
        case FunctionType():
            closed = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            cells = [(cell.cell_contents, may_call(name, names)) for name, cell in closed if cell != CellType()]
            return (*cells, *_all(value.__defaults__ or ()), *_all((value.__kwdefaults__ or {}).values()),
                    *_by_name(value.__globals__, names))  # fmt: skip
        case MethodType():
            return ((value.__func__, True), (value.__self__, False))
        case functools.partial():
            return _all((value.func, *value.args, *value.keywords.values()))
        case ModuleType():
            return _by_name(vars(value), names)
        case list() | tuple():
            return _all(value)
        case dict():
            return _all(value.values())
        case nn.Sequential() | nn.ModuleList() | nn.ModuleDict():
            return (*_all(value.children()), *_attributes_of(value, names))
        case _:
            return _attributes_of(value, names)


def may_call(name: str, names: frozenset[str]) -> bool:
    """True if what has this name may be called by the code that ``names`` are of, by which it was found."""
    return f"{name}()" in names


def _all(values: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    return ((value, True) for value in values)


def _by_name(found: dict[str, Any], names: frozenset[str]) -> list[tuple[Any, bool]]:
    return [(found[name], may_call(name, names)) for name in sorted(names & found.keys())]


def _attributes_of(value: Any, names: frozenset[str]) -> Iterator[tuple[Any, bool]]:
    """The attributes of an object by these names, and by those in the code of its methods and properties among them."""
    todo, seen = sorted(names), names
    while todo:
        name = todo.pop()
        held = inspect.getattr_static(value, name, None)
        if held is None and isinstance(value, nn.Module):
            held = value._modules.get(name)
        method = getattr(held, "fget", None) or getattr(held, "__func__", held)
        if isinstance(method, FunctionType):
            new = names_in(method.__code__) - seen
            todo, seen = [*todo, *sorted(new)], seen | new
        if held is not None:
            yield (getattr(value, name) if inspect.ismemberdescriptor(held) else method), may_call(name, seen)


def _code_of(value: Any) -> CodeType | None:
    """The code that calling ``value`` runs, as far as it is Python's."""
    if isinstance(value, FunctionType | MethodType):
        return getattr(value, "__code__", None)
    call = getattr(type(value), "forward" if isinstance(value, nn.Module) else "__call__", None)
    return getattr(call, "__code__", None)


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """The names of globals, attributes and cells in code, and in that of functions inside of it; ``getattr`` takes them as texts.

    A name that is more than taken an attribute of stands there as a call, too: ``self.act(h)`` gives self, act and act().
    """
    loads = [each for each in dis.get_instructions(code) if each.opname.startswith("LOAD_") and isinstance(each.argval, str)]
    follows = {each.offset: after for each, after in pairwise(dis.get_instructions(code))}
    whole = (f"{each.argval}()" for each in loads if follows[each.offset].opname not in ("LOAD_ATTR", "LOAD_METHOD"))
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(each.argval for each in loads).union(whole, *map(names_in, inner))


def _is_of_torch(value: Any) -> bool:
    """True if it is a function of torch, whose globals are none of the user's: ``F.silu``."""
    return isinstance(value, FunctionType | type) and value.__module__.partition(".")[0] == "torch"
