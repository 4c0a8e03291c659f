"""What a function may read beside its arguments: numbers, flags, and which functions it calls.

    lambda h: F.silu(h) * self.factor                  a number of self
    def quick(h): return h * torch.sigmoid(SLOPE * h)  a global number
    lambda h, s=2.0: self.act(h) * s                   a default, and a function of self

Of objects those attributes are looked at that have a name, or a text, which the code of the functions on the way to them holds,
or that of their methods for signs; of lists of modules all. What is behind more than five functions or containers, what a
function counts, and what it asks the world outside, is not known.
"""

import dis
import functools
import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import pairwise
from numbers import Number
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

_NUMBERS = (Number, str, bytes, range, torch.dtype)
_NAMED = ("__init__", "__new__", "__call__", "__eq__", "__hash__", "__repr__", "__setattr__", "__delattr__", "__init_subclass__")
_LISTS = (list, tuple, set, frozenset, deque)
_DEPTH = 5
_Seen: TypeAlias = dict[tuple[int, frozenset[str], bool, int], tuple[int, Any]]
OF_TENSORS = ("tensor ", "array ")
"""How the text of what a tensor or an array holds begins."""


def values_read_by(function: Any, names: frozenset[str] = frozenset(), *, called: bool = True) -> tuple[str | CodeType, ...]:
    """What ``function`` may read now: numbers as text, and the code of functions that it may call.

    ``names`` are in the code of functions that hold it, where it is no function itself, and ``called`` says whether they call it.
    """
    return tuple(_read(function, names, {}, _DEPTH, called))


def globals_read_by(code: CodeType, found: dict[str, Any], names: frozenset[str]) -> tuple[str | CodeType, ...]:
    """What code may read now of the globals ``found``; ``names`` are its own, and those in what holds it."""
    seen: _Seen = {}
    held_by_code = _by_name(found, names & _globals_in(code))
    return tuple(each for held, called in held_by_code for each in _read(held, names, seen, _DEPTH, called))


def _read(value: Any, names: frozenset[str], seen: _Seen, depth: int, called: bool = True) -> Iterator[str | CodeType]:
    if value is None or isinstance(value, _NUMBERS):
        yield repr(value)
    elif isinstance(value, Tensor):
        yield f"tensor {id(value)}, written to {0 if value.is_inference() else value._version} times"
    elif hasattr(type(value), "tobytes"):  # of NumPy
        yield f"array {value.tobytes()!r}"
    else:
        code = _code_of(value) if called else None
        if code is not None:
            yield code
            names |= names_in(code)
        if isinstance(value, (*_LISTS, dict)):
            yield f"{len(value)} of"
        key = id(value), names, called, depth
        if key in seen:
            yield f"number {seen[key][0]} again"
        elif depth and not _is_of_torch(value):
            seen[key] = len(seen), value  # which keeps its id
            for held, called in _held_by(value, names):
                yield from _read(held, names, seen, depth - 1, called)


def _held_by(value: Any, names: frozenset[str]) -> Iterable[tuple[Any, bool]]:
    """What an object holds, and whether that may be called."""
    match value:
        case FunctionType():
            closed = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            cells = [(cell.cell_contents, may_call(name, names)) for name, cell in closed if cell != CellType()]
            return (*cells, *_all(value.__defaults__ or ()), *_all((value.__kwdefaults__ or {}).values()),
                    *_by_name(value.__globals__, names & _globals_in(value.__code__)), *_by_name(vars(value), names))  # fmt: skip
        case MethodType():
            return ((value.__func__, True), (value.__self__, False))
        case functools.partial():
            return (*_all((value.func, *value.args, *value.keywords.values())), *_by_name(vars(value), names))
        case ModuleType():
            return _by_name(vars(value), names)
        case _ if isinstance(value, _LISTS):
            return (*_all(value), *_attributes_of(value, names))
        case dict():
            return (*_all(value), *_all(value.values()), *_attributes_of(value, names))
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
    names = names | _called_by_signs(type(value))  # type: ignore[arg-type]
    todo, seen = sorted(names), names
    while todo:
        name = todo.pop()
        held = inspect.getattr_static(value, name, None)
        if held is None and isinstance(value, nn.Module):
            held = value._modules.get(name)
        method = held.__func__ if isinstance(held, classmethod | staticmethod) else getattr(held, "fget", None) or held
        if isinstance(method, FunctionType):
            new = names_in(method.__code__) - seen
            todo, seen = [*todo, *sorted(new)], seen | new
        if held is not None:
            yield (getattr(value, name) if inspect.ismemberdescriptor(held) else method), may_call(name, seen)


@functools.cache
def _called_by_signs(owner: type) -> frozenset[str]:
    """The methods of a user's class that no code names: ``self[0]`` calls ``__getitem__``, ``self.other`` ``__getattr__``."""
    found = (each for base in owner.__mro__ for each in vars(base).items() if isinstance(each[1], FunctionType))
    return frozenset(name for name, held in found if name.startswith("__") and name not in _NAMED and not _is_of_torch(held))


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
    return _names_loaded(code, "LOAD_")


@functools.cache
def _globals_in(code: CodeType) -> frozenset[str]:
    """Those of the names that may be of globals; no attribute is: ``self.act(h)`` says nothing of a function ``act``."""
    return _names_loaded(code, ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_CONST"))


def _names_loaded(code: CodeType, by: str | tuple[str, ...]) -> frozenset[str]:
    loads = [each for each in dis.get_instructions(code) if each.opname.startswith(by) and isinstance(each.argval, str)]
    follows = {each.offset: after for each, after in pairwise(dis.get_instructions(code))}
    whole = (f"{each.argval}()" for each in loads if follows[each.offset].opname not in ("LOAD_ATTR", "LOAD_METHOD"))
    inner = (_names_loaded(const, by) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(each.argval for each in loads).union(whole, *inner)


def _is_of_torch(value: Any) -> bool:
    """True if it is a function of torch, whose globals are none of the user's: ``F.silu``."""
    name = value.__globals__.get("__name__", "") if isinstance(value, FunctionType) else getattr(value, "__module__", "")
    return isinstance(value, FunctionType | type) and name.partition(".")[0] == "torch"
