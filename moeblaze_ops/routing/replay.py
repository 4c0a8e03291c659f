"""``replay_routing``: routers choose the experts that they are told to, and weigh them as they would."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moeblaze_ops.arguments.validation_values import check_tensor, kind_of, refuse, refuse_type
from moeblaze_ops.routing.checkpoints import carry_over_checkpoints
from moeblaze_ops.routing.choice import Choice, Watch
from moeblaze_ops.routing.record import RoutingRecord


@contextlib.contextmanager
def replay_routing(
    model: nn.Module, ids: RoutingRecord | Mapping[str, Tensor], *, mask: Tensor | Mapping[str, Tensor] | None = None
) -> Iterator[None]:
    """Let the routers of ``model`` choose given experts while the context is open.

        with moeblaze_ops.replay_routing(model, record):
            loss(model(tokens)).backward()

    The weights are those that the router gives these experts now, by its own scores, normalisation and scale, and gradients
    reach the router through them. Layers may be written in any way, compiled, rewritten or not. A compiled model is compiled once
    more for the context, and not again for other ids of the same shape.

    A context is that of the thread that opens it; of several that are open for a module the innermost counts. What
    ``torch.utils.checkpoint`` calls again in backward has the ids of its own forward, wherever backward runs. Other functions
    that call layers again in backward need it inside of the context.

    Args:
        model: any module.
        ids: by the name of the module that chooses, as in ``RoutingRecord.ids``: expert ids. Shape [T, K], any integer dtype, on
            the device of the scores. T are the tokens of one call, or of several in order: the next call begins where the last
            one ended, and behind the last token it begins anew. A token with a negative id has no record. Modules that are not
            named choose for themselves. A record also says from how many experts was chosen, which tells that choice from one
            of K groups.
        mask: True for tokens that have a record; the others choose for themselves. Shape [T], bool, for all modules or by name.
            None: all tokens have one whose ids are not negative.

    Raises:
        ValueError: a name is no module's, shapes do not fit, ids are none of an expert, a module does not choose K of each of its
            tokens once in a call, or its calls end before the tokens do.
        TypeError: an argument is of a wrong type.
    """
    told = _checked(model, ids, mask)
    carry_over_checkpoints(_carried)
    with _telling({**_of_thread.told, **told}):
        yield
    for own in told.values():
        if own.position != 0:
            rule = f"choose for all {len(own.ids_TK)} tokens of ids, in one call of the context or several"
            refuse("replay_routing", own.called, rule, f"{own.position} of them")


@dataclass
class _Told:
    """What the first of ``modules`` is told to choose, the others call it: ``ids_TK`` from ``position`` on."""

    modules: list[nn.Module]
    name: str
    ids_TK: Tensor
    mask_T: Tensor | None
    width: int | None
    largest: int = 0
    position: int = 0

    @property
    def called(self) -> str:
        return self.name or "the model"


class _OfThread(threading.local):
    """What modules are told in this thread, by their ids."""

    def __init__(self) -> None:
        self.told: dict[int, _Told] = {}


class _Here(threading.local):
    """What one module is told in this thread."""

    def __init__(self) -> None:
        self.told: _Told | None = None


@dataclass
class _Replaced:
    """The ``forward`` that a module had as an attribute of its own, and for what it has another one, in all threads.

    What is told here is read from it and not by a key: that would be a constant of compiled code, which blocks share.
    """

    forward: Callable | None
    told: list[_Told] = field(default_factory=list)
    here: _Here = field(default_factory=_Here)


_of_thread = _OfThread()
_replaced: dict[int, _Replaced] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def _telling(told: dict[int, _Told]) -> Iterator[None]:
    """Tell modules what to choose in this thread, and tell the others nothing."""
    before = _of_thread.told
    with _lock:
        for own in told.values():
            for module in own.modules:
                _replace(module, own)
        _tell(told)
    try:
        yield
    finally:
        with _lock:
            _tell(before)
            for own in told.values():
                for module in own.modules:
                    _restore(module, own)


def _tell(told: dict[int, _Told]) -> None:
    for key in (_of_thread.told.keys() | told.keys()) & _replaced.keys():
        _replaced[key].here.told = told.get(key)
    _of_thread.told = told


def _replace(module: nn.Module, told: _Told) -> None:
    key = id(module)
    if key not in _replaced:
        _replaced[key] = _Replaced(module.__dict__.get("forward"))
        module.forward = _replayed(module.forward, _replaced[key])
    _replaced[key].told.append(told)


def _restore(module: nn.Module, told: _Told) -> None:
    replaced = _replaced[id(module)]
    replaced.told = [other for other in replaced.told if other is not told]
    if not replaced.told:
        del module.forward, _replaced[id(module)]
        if replaced.forward is not None:
            module.forward = replaced.forward


def _carried(function: Callable) -> Callable:
    """``function`` in a later call: modules are told what they are told now."""
    now = {key: replace(told) for key, told in _of_thread.told.items()}

    def again(*args: Any, **kwargs: Any) -> Any:
        with _telling({key: replace(told) for key, told in now.items()}):
            return function(*args, **kwargs)

    return again


def _replayed(forward: Callable, replaced: _Replaced) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        told = replaced.here.told
        if told is None and _is_thread_of_autograd():
            told = _told_elsewhere(replaced)
        if told is None:
            if torch.compiler.is_compiling():
                # Behind it Dynamo lets a replay be entered in a region of checkpointing.
                with _Nothing():
                    pass
            return forward(*args, **kwargs)
        replay = _Replay(told)
        with replay:
            output = forward(*args, **kwargs)
        replay.end()
        return output

    return run


def _is_thread_of_autograd() -> bool:
    """True if autograd has made this thread, for backward on a device: no context can have been opened in it."""
    return isinstance(threading.current_thread(), threading._DummyThread)


_is_thread_of_autograd._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _told_elsewhere(replaced: _Replaced) -> _Told | None:
    """What a module is told that backward calls again by another function than ``torch.utils.checkpoint``."""
    told = [told for told in replaced.told if _replaced.get(id(told.modules[0])) is replaced]
    if not told:
        return None
    if len(told) > 1 or torch.compiler.is_compiling():
        rule = "be called again in backward by torch.utils.checkpoint, or in eager mode with one replay open"
        refuse("replay_routing", told[0].called, rule, f"{len(told)} replays")
    return told[0]


class _Nothing(TorchFunctionMode):
    """A mode that changes nothing."""


class _Replay(Watch):
    """A call of a module that is told what to choose: K for each of its tokens, of ``width`` if that is known."""

    def __init__(self, told: _Told):
        super().__init__()
        self.told, self.num_choices, self.T = told, 0, 0

    def notice(self, choice: Choice) -> Tensor | None:
        told, own_TK = self.told, choice.ids_TK
        (T, K), (total, told_K) = own_TK.shape, told.ids_TK.shape
        if told_K != K or told.width not in (None, choice.width) or told.position + T > total:
            return None
        if not torch.compiler.is_compiling() and told.largest >= choice.width:
            refuse("replay_routing", f"ids[{told.name!r}]", f"be below {choice.width}, the experts", told.largest)
        self.num_choices, self.T = self.num_choices + 1, T
        # A copy: the layer may write to its ids.
        ids_TK = self._part(told.ids_TK, T).clone()
        if told.mask_T is not None:
            ids_TK = torch.where(self._part(told.mask_T, T).unsqueeze(-1), ids_TK, own_TK)
        return ids_TK.reshape(choice.ids.shape)

    def _part(self, given: Tensor, T: int) -> Tensor:
        """Of this call; the whole is not cut, so that no position becomes a part of a graph."""
        return given if len(given) == T else given.narrow(0, self.told.position, T)

    def end(self) -> None:
        told, (total, K) = self.told, self.told.ids_TK.shape
        if self.num_choices != 1:
            done = f" after {told.position}" if told.position else ""
            rule = f"choose {K} experts for each of {total} tokens once in a call (see ids)"
            refuse("replay_routing", told.called, rule, f"{self.num_choices} such choices{done}")
        if total != self.T:
            told.position = (told.position + self.T) % total


def _checked(
    model: nn.Module, ids: RoutingRecord | Mapping[str, Tensor], mask: Tensor | Mapping[str, Tensor] | None
) -> dict[int, _Told]:
    """What each module is told to choose."""
    if not isinstance(model, nn.Module):
        refuse_type("replay_routing", "model", "be an nn.Module", kind_of(model))
    widths, ids = (ids.widths, ids.ids) if isinstance(ids, RoutingRecord) else ({}, ids)
    if not isinstance(ids, Mapping):
        refuse_type("replay_routing", "ids", "be a record, or a mapping from names to tensors", kind_of(ids))
    if not (mask is None or isinstance(mask, Tensor | Mapping)):
        refuse_type("replay_routing", "mask", "be a tensor, or a mapping from names to tensors", kind_of(mask))
    if not ids:
        refuse("replay_routing", "ids", "name a module or more", "none")
    modules = dict(getattr(model, "_orig_mod", model).named_modules())
    told = []
    for name, ids_TK in ids.items():
        if name not in modules:
            refuse("replay_routing", "ids", "be named after modules of the model", repr(name))
        argument = f"ids[{name!r}]"
        check_tensor("replay_routing", argument, ids_TK)
        if ids_TK.is_floating_point() or ids_TK.is_complex() or ids_TK.dtype == torch.bool:
            refuse_type("replay_routing", argument, "be integers", ids_TK.dtype)
        if ids_TK.dim() != 2:
            refuse("replay_routing", argument, "have shape [T, K]", f"shape {list(ids_TK.shape)}")
        mask_T = mask.get(name) if isinstance(mask, Mapping) else mask
        if mask_T is not None:
            _check_mask(name, mask_T, ids_TK)
        callers = [modules[name[:dot]] for dot, letter in enumerate(name) if letter == "."] + [modules[""]] * (name != "")
        told.append(_Told([modules[name], *callers], name, ids_TK.long(), mask_T, widths.get(name)))
    return {id(own.modules[0]): own for own in _with_bounds(told)}


def _with_bounds(told: list[_Told]) -> Iterator[_Told]:
    """Told with the largest ids of those that count, and with masks where there are negative ones; the host waits once."""
    filled = [own for own in told if own.ids_TK.numel()]
    known = [own.ids_TK if own.mask_T is None else own.ids_TK.masked_fill(~own.mask_T.unsqueeze(-1), 0) for own in filled]
    bounds = torch.stack([torch.stack(ids_TK.aminmax()).to(known[0].device) for ids_TK in known]).tolist() if known else []
    found = dict(zip((own.name for own in filled), bounds, strict=True))
    for own in told:
        smallest, largest = found.get(own.name, (0, 0))
        if smallest < 0:
            has_record_T = (own.ids_TK >= 0).all(1)
            mask_T = has_record_T if own.mask_T is None else own.mask_T & has_record_T
            yield replace(own, mask_T=mask_T, largest=largest)
        else:
            yield replace(own, largest=largest)


def _check_mask(name: str, mask_T: Tensor, ids_TK: Tensor) -> None:
    argument = f"mask[{name!r}]"
    check_tensor("replay_routing", argument, mask_T)
    if mask_T.dtype != torch.bool:
        refuse_type("replay_routing", argument, "be bool", mask_T.dtype)
    if list(mask_T.shape) != [ids_TK.shape[0]]:
        refuse("replay_routing", argument, f"have shape [{ids_TK.shape[0]}] (tokens of ids)", f"shape {list(mask_T.shape)}")
