"""Launches made again: what a function of tensors launched, at other addresses.

To launch a kernel an op chooses a plan, takes views, describes them for TMA, and Triton takes the descriptors apart: some 100 us,
longer than many a kernel runs. All of it but the addresses follows from the geometry of the arguments and the settings. So the
first call of a geometry compiles, the second one notes what reaches the driver, and the others repeat that at addresses of
their own.

    out = op(x[:1024], w)        # noted; repeated for any x and w of these shapes, strides, dtypes and alignments
    out = op(x, x[1:])           # never noted: two arguments are different parts of one memory

Nor is a call noted that computes anything besides views, one that returns views, or a launcher that is not made like those of
Triton 3.6 and 3.7. An operator is a view by its schema; some (``reshape``) copy where they must, but an address of their own is
one that nobody knows.
"""

import threading
import types
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime.driver import driver

from moeblaze_ops.kernels.known_calls import Call, KnownCalls, taken_apart
from moeblaze_ops.kernels.launch import allows_tf32, run_compiled, shown, shown_to
from moeblaze_ops.kernels.multiprocessors import left_free
from moeblaze_ops.kernels.settings import settings

_ALIGNMENT = 16
_STREAM, _FUNCTION = 3, 4
"""Where a driver's launcher takes them, behind the sizes of the grid."""
_aten = torch.ops.aten
_NEW = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)

_ZEROS = (_aten.new_zeros.default, _aten.zeros.default)
"""They are new where they are empty."""

Again = Callable[[list[int], int], Any]
"""Repeats launches, from the addresses of the arguments' tensors and a stream, and returns what is new."""


class _Noted:
    """What is known of the calls of a geometry: how they are repeated, None where that is not clear, or nothing yet."""

    def __init__(self) -> None:
        self.is_known = False
        self.again: Again | None = None


class Repeated:
    """A function which launches kernels on the tensors that it is given, and launches them again where it did before."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._calls: KnownCalls[_Noted] = KnownCalls()

    def __call__(self, *args: Any) -> Any:
        bind_context()
        call = None if shown() is not None else taken_apart(args)
        if call is None:
            return self._function(*args)
        like = self.like(call)
        if like is None:
            self.remember(call)
            return self._function(*args)
        return like(*args)

    def like(self, call: Call) -> Callable[..., Any] | None:
        """What does for the arguments of ``call`` what the function does; None where no call like this one is remembered."""
        addresses = [tensor.data_ptr() for tensor in call.tensors]
        noted = self._calls.find(call, _state(addresses))
        if noted is None:
            return None
        if not noted.is_known:
            return partial(self._note, noted)
        again = noted.again
        if again is None or _is_watched():
            return self._function
        device = call.tensors[0].get_device()
        return lambda *_: _run(again, addresses, device)

    def remember(self, call: Call) -> None:
        """Note the launches of the next call like this one."""
        self._calls.remember(call, _Noted(), _state([tensor.data_ptr() for tensor in call.tensors]))

    def _note(self, noted: _Noted, *args: Any) -> Any:
        call = taken_apart(args)
        assert call is not None, "it was taken apart to be found"
        with _Recorder(call.tensors) as recorder, shown_to(recorder.run):
            results = self._function(*args)
        noted.is_known, noted.again = True, recorder.noted(results)
        return results


def _state(addresses: list[int]) -> list[Hashable]:
    """What launches depend on besides: alignments, settings, and which tensors begin at one address."""
    state: list[Hashable] = [address % _ALIGNMENT for address in addresses]
    chosen = settings()
    state += (left_free(), allows_tf32(), chosen.hopper, chosen.batch_invariant)
    state += (chosen.max_transient_bytes, chosen.check_expert_ids)
    if len(set(addresses)) < len(addresses):
        state += map(addresses.index, addresses)
    return state


_threads = threading.local()


def _run(again: Again, addresses: list[int], device: int) -> Any:
    bind_context()
    if torch._C._cuda_getDevice() == device:
        return again(addresses, torch._C._cuda_getCurrentRawStream(device))
    with torch.cuda.device(device):
        return again(addresses, torch._C._cuda_getCurrentRawStream(device))


def bind_context() -> None:
    """The driver describes tensors in a context of the thread, which gets one when it first asks the runtime for anything: one of
    autograd may have come here without."""
    if not hasattr(_threads, "bound"):
        torch.cuda.mem_get_info()
        _threads.bound = True


def _is_watched() -> bool:
    """True if a profiler wants to be told of launches."""
    return bool(getattr(knobs.runtime.launch_enter_hook, "calls", ()))


class _Unclear(Exception):
    """Something that is not known to be the same in another call."""


class _Recorder(TorchDispatchMode):
    """Notes what is launched on this thread while it is entered."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._temporaries: list[Tensor] = []
        self._launches: list[tuple[str, set[int]]] = []  # with the temporaries that each takes
        self._taken: set[int] = set()
        self._names: dict[str, Any] = {}
        self._is_clear = _are_apart(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _NEW or (func in _ZEROS and result.numel() == 0):
            self._temporaries.append(result)
        else:
            self._is_clear = self._is_clear and func.is_view
        return result

    def run(self, compiled: Any, programs: int, args: tuple) -> None:
        """Run a kernel and note how; ``compiled`` is None where it was compiled and run only now."""
        holder = None if compiled is None else _holder(compiled)
        if holder is None:
            self._is_clear = False
            if compiled is not None:
                run_compiled(compiled, programs, args)
            return
        reached: list[tuple] = []
        maps: list[tuple[Any, tuple]] = []
        note_launch = _noting(holder, lambda _, given: reached.append(given))
        note_map = _noting(_filler(), lambda made, given: maps.append((made, given)))
        with _LOCK, note_launch, note_map:
            run_compiled(compiled, programs, args)
        self._taken = set()
        try:
            (given,) = reached
            is_known = given[:_STREAM] == (programs, 1, 1) and given[_FUNCTION] == compiled.function
            self._is_clear = self._is_clear and is_known
            arguments = [self._written(value, maps) for value in (*given[:_STREAM], *given[_FUNCTION:])]
            arguments.insert(_STREAM, "stream")
            self._launches.append((f"{self._named(getattr(*holder))}({', '.join(arguments)})", self._taken))
        except (_Unclear, ValueError, IndexError):
            self._is_clear = False

    def noted(self, results: Any) -> Again | None:
        """What repeats the launches and gives such results, or None where that is not clear."""
        try:
            self._taken = set()
            returned = self._returned(results)
        except _Unclear:
            self._is_clear = False
        if not self._is_clear:
            return None
        # A temporary is made before the launch that first takes it, and ends behind the last one, as it does in the function.
        lines: list[str] = []
        made: set[int] = set()
        steps = [*self._launches, (f"return {returned}", self._taken)]
        for step, (launched, taken) in enumerate(steps):
            for i in sorted(taken - made):
                lines += [f"new{i} = {self._named(_maker(self._temporaries[i]))}()", f"at{i} = new{i}.data_ptr()"]
            made |= taken
            lines.append(launched)
            later = set[int]().union(*(others for _, others in steps[step + 1 :]))
            lines += [f"del new{i}" for i in sorted(taken - later) if step + 1 < len(steps)]
        names = self._names | {"fill": getattr(*_filler())}
        exec("\n    ".join(["def again(at, stream):", *lines]), names)
        return names["again"]

    def _returned(self, results: Any) -> str:
        """The results of the function, as an expression: new tensors and None, also in lists and tuples."""
        if results is None:
            return "None"
        if type(results) is list or type(results) is tuple:
            inner = "".join(f"{self._returned(result)}, " for result in results)
            return f"[{inner}]" if type(results) is list else f"({inner})"
        for i, tensor in enumerate(self._temporaries):
            if isinstance(results, Tensor) and _is_same(tensor, results):
                self._taken.add(i)
                return f"new{i}"
        raise _Unclear

    def _written(self, value: Any, maps: list[tuple[Any, tuple]]) -> str:
        """The argument of a launcher, as an expression."""
        for made, (address, *described) in maps:
            if made is value:
                return f"fill({self._address(address)}, *{self._named(tuple(described))})"
        if isinstance(value, Tensor):
            return self._address(value.data_ptr())
        if isinstance(value, tuple | list):
            inner = "".join(f"{self._written(v, maps)}, " for v in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        return self._named(value)

    def _named(self, value: Any) -> str:
        name = f"k{len(self._names)}"
        self._names[name] = value
        return name

    def _address(self, address: int) -> str:
        """Where an address is: in an argument, or in a tensor that the function made."""
        if address == 0:
            return "0"
        for index, tensor in enumerate(self._tensors):
            if _contains(tensor, address):
                return f"at[{index}] + {address - tensor.data_ptr()}"
        for i, tensor in enumerate(self._temporaries):
            if _contains(tensor, address):
                self._taken.add(i)
                return f"at{i} + {address - tensor.data_ptr()}"
        raise _Unclear


_LOCK = threading.Lock()


def _are_apart(tensors: list[Tensor]) -> bool:
    """True if those that lie in one memory begin at one address."""
    begins: dict[int, int] = {}
    for tensor in tensors:
        memory = tensor.untyped_storage().data_ptr()
        if memory and begins.setdefault(memory, tensor.data_ptr()) != tensor.data_ptr():
            return False
    return True


def _contains(tensor: Tensor, address: int) -> bool:
    memory = tensor.untyped_storage()
    return memory.data_ptr() <= address < memory.data_ptr() + memory.nbytes()


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """True if one is the other, perhaps detached, as a mode gets to see what functions make."""
    described = [(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype) for t in (tensor, other)]
    return described[0] == described[1]


def _maker(tensor: Tensor) -> Callable[[], Tensor]:
    return partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _holder(compiled: Any) -> tuple[Any, str] | None:
    """The object and its attribute that hold the driver's own launcher of a kernel; None where Triton has it elsewhere."""
    outer = getattr(compiled.run, "launch", None)
    if not isinstance(outer, types.FunctionType):
        return None if outer is None else (compiled.run, "launch")
    cells = dict(zip(outer.__code__.co_freevars, outer.__closure__ or (), strict=True))
    return (cells["launcher"], "cell_contents") if "launcher" in cells else None


def _filler() -> tuple[Any, str]:
    """The object and its attribute that make a TMA descriptor of an address and the rest."""
    utils = driver.active.utils
    return utils, "fill_tma_descriptor_tiled" if hasattr(utils, "fill_tma_descriptor_tiled") else "fill_tma_descriptor"


@contextmanager
def _noting(holder: tuple[Any, str], note: Callable[[Any, tuple], None]) -> Iterator[None]:
    """A context in which calls that this thread makes of what is held are told to ``note``, with their results."""
    original, thread = getattr(*holder), threading.get_ident()

    def noting(*args: Any) -> Any:
        result = original(*args)
        if threading.get_ident() == thread:
            note(result, args)
        return result

    setattr(*holder, noting)
    try:
        yield
    finally:
        setattr(*holder, original)
