"""``record_routing``: the experts that each router of a model chooses, as tensors."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import get_ident, local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from moeblaze_ops.arguments.validation_values import kind_of, refuse_type
from moeblaze_ops.explanation import folded
from moeblaze_ops.routing.checkpoints import carry_over_checkpoints
from moeblaze_ops.routing.choice import Choice, Watch


@dataclass(repr=False)
class RoutingRecord:
    """What was chosen while a record was taken.

    ``ids`` has, by the name of the module whose forward chose, ids ``[T, K]`` in int64 of the tokens of all its calls, in order.
    Of a module that chooses several times, groups first say, it is the last choice of each call. ``widths`` has the number of
    what was chosen from: the experts.
    """

    ids: dict[str, Tensor] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, choice: Choice) -> None:
        ids = choice.ids_TK.long()
        self.ids[name] = torch.cat([self.ids[name], ids]) if name in self.ids else ids
        self.widths[name] = choice.width

    def __str__(self) -> str:
        alike: dict[str, list[str]] = {}
        for name, ids_TK in self.ids.items():
            experts = f" of {self.widths[name]}" if name in self.widths else ""
            alike.setdefault(f"{ids_TK.shape[0]} tokens, {ids_TK.shape[1]}{experts} experts each", []).append(name)
        lines = [f"  {name or 'the model'}: {choice}" for choice, names in alike.items() for name in folded(names)]
        return "\n".join([f"choices of {len(self.ids)} {'router' if len(self.ids) == 1 else 'routers'}", *lines])

    __repr__ = __str__


@contextlib.contextmanager
def record_routing(model: nn.Module, *, layers: Callable[[str, nn.Module], bool] | None = None) -> Iterator[RoutingRecord]:
    """Record what the routers of ``model`` choose while the context is open.

        with moeblaze_ops.record_routing(model) as record, torch.no_grad():
            model(tokens)
        record.ids["layers.0.mlp.gate"]  # [T, K]

    A choice is a ``torch.topk`` along the last axis, or ``moeblaze_ops.route``, of a module of the model. Whatever is compiled
    runs as written in the meantime, so that layers are recorded whether or not they are rewritten. A layer that is called
    several times has the tokens of all calls. Under ``replay_routing`` a record is what the routers would have chosen. What
    ``torch.utils.checkpoint`` calls again in backward is not recorded again, and runs as written, as it did in forward; backward
    of what was called outside belongs outside.

    Args:
        model: any module.
        layers: takes the name of a module that chooses, and the module, and says whether it is recorded. None: all. Sparse
            attention may choose positions: leave it out by name.

    Raises:
        TypeError: ``model`` is no module, or ``layers`` no function.
    """
    record = RoutingRecord()
    with watching("record_routing", model, layers, record.add):
        yield record


@contextlib.contextmanager
def watching(
    op: str, model: nn.Module, layers: Callable[[str, nn.Module], bool] | None, notice: Callable[[str, Choice], None]
) -> Iterator[None]:
    """Call ``notice`` with the name of each module that has chosen, and its last choice, when it returns."""
    if not isinstance(model, nn.Module):
        refuse_type(op, "model", "be an nn.Module", kind_of(model))
    if layers is not None and not callable(layers):
        refuse_type(op, "layers", "be a function of a name and a module", kind_of(layers))
    calls = _Calls(model)
    carry_over_checkpoints(_carried)

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        choice, name = calls.leave(module), calls.names.get(module)
        if choice is not None and (layers is None or layers(name, module)):
            notice(name, choice)

    handles = [register_module_forward_pre_hook(calls.enter), register_module_forward_hook(leave, always_call=True)]
    _here.watches += 1
    try:
        with torch.compiler.set_stance("force_eager"), calls:
            yield
    finally:
        _here.watches -= 1
        for handle in handles:
            handle.remove()


class _Here(local):
    """Of this thread: how many watch modules, and whether it repeats what was watched."""

    def __init__(self) -> None:
        self.watches, self.repeats = 0, False


_here = _Here()


def _carried(function: Callable) -> Callable:
    """``function`` in a later call: of what is watched now, it runs as written again, and is not watched."""
    if not (_here.watches or _here.repeats):
        return function

    def again(*args: Any, **kwargs: Any) -> Any:
        before, _here.repeats = _here.repeats, True
        try:
            with torch.compiler.set_stance("force_eager"):
                return function(*args, **kwargs)
        finally:
            _here.repeats = before

    return again


class _Calls(Watch):
    """The modules of a model that this thread is calling, each with its last choice so far."""

    def __init__(self, model: nn.Module):
        super().__init__()
        model = getattr(model, "_orig_mod", model)
        self.names = {module: name for name, module in model.named_modules()}
        self._open: list[tuple[nn.Module, Choice | None]] = []
        self._thread = get_ident()

    def enter(self, module: nn.Module, args: tuple) -> None:
        if self._is_watched(module):
            self._open.append((module, None))

    def leave(self, module: nn.Module) -> Choice | None:
        # A call that raised, or was left by an exception, has no end of its own.
        while self._is_watched(module) and self._open:
            called, choice = self._open.pop()
            if called is module:
                return choice
        return None

    def notice(self, choice: Choice) -> None:
        if self._open and not _here.repeats:
            # A copy: the layer may write to its ids, or have the next ones written to the same memory.
            self._open[-1] = self._open[-1][0], Choice(choice.ids.detach().clone(), choice.width)

    def _is_watched(self, module: nn.Module) -> bool:
        return module in self.names and get_ident() == self._thread and not _here.repeats
