"""``replay_routing``: routers choose the experts that they are told to, and weigh them as they would."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moeblaze_ops.arguments.validation_values import ID_DTYPES, check_tensor, kind_of, refuse, refuse_type
from moeblaze_ops.ops.route import WATCHERS
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
    reach the router through them. Layers may be written in any way, compiled, rewritten or not. Backward belongs inside where
    layers are checkpointed, which calls them again. A compiled model is compiled once more for the context, and not again for
    other ids of the same shape.

    Args:
        model: any module.
        ids: by the name of the module that chooses, as in ``RoutingRecord.ids``: expert ids. Shape [T, K], int32 or int64, on
            the device of the scores. Modules that are not named choose for themselves. A record also says from how many experts
            was chosen, which tells that choice from one of K groups.
        mask: True for tokens that have a record; the others choose for themselves. Shape [T], bool, for all modules or by name.
            None: all tokens have one.

    Raises:
        ValueError: a name is no module's, shapes do not fit, or a module does not choose K of each of T tokens once in a call.
        TypeError: an argument is of a wrong type.
    """
    widths = ids.widths if isinstance(ids, RoutingRecord) else {}
    named = _checked(model, ids.ids if isinstance(ids, RoutingRecord) else ids, mask)
    originals = {module: module.__dict__.get("forward") for module in named}
    try:
        for module, (name, ids_TK, mask_T) in named.items():
            module.forward = _replayed(module.forward, name, ids_TK, mask_T, widths.get(name))
        yield
    finally:
        for module, original in originals.items():
            if original is None:
                del module.forward
            else:
                module.forward = original


def _replayed(forward: Callable, name: str, ids_TK: Tensor, mask_T: Tensor | None, width: int | None) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        replay = _Replay(ids_TK, mask_T, width)
        WATCHERS.append(replay.watch_route)
        try:
            with replay:
                output = forward(*args, **kwargs)
        finally:
            WATCHERS.pop()
        if replay.count != 1:
            T, K = ids_TK.shape
            rule = f"choose {K} experts for each of {T} tokens once in a call (see ids)"
            refuse("replay_routing", name or "the model", rule, f"{replay.count} such choices")
        return output

    return run


class _Replay(Watch):
    """Choices of K for each of T tokens, of ``width`` if that is known, are taken at given ids."""

    def __init__(self, ids_TK: Tensor, mask_T: Tensor | None, width: int | None):
        super().__init__()
        self.ids_TK, self.mask_T, self.width, self.count = ids_TK, mask_T, width, 0

    def notice(self, choice: Choice) -> Tensor | None:
        if choice.ids_TK.shape != self.ids_TK.shape or self.width not in (None, choice.width):
            return None
        self.count += 1
        own_TK = choice.ids_TK
        ids_TK = self.ids_TK if self.mask_T is None else torch.where(self.mask_T.unsqueeze(-1), self.ids_TK, own_TK)
        return ids_TK.reshape(choice.ids.shape)


def _checked(
    model: nn.Module, ids: Mapping[str, Tensor], mask: Tensor | Mapping[str, Tensor] | None
) -> dict[nn.Module, tuple[str, Tensor, Tensor | None]]:
    """Of each module that is told what to choose: its name, the ids in int64, and the mask."""
    if not isinstance(model, nn.Module):
        refuse_type("replay_routing", "model", "be an nn.Module", kind_of(model))
    if not isinstance(ids, Mapping):
        refuse_type("replay_routing", "ids", "be a record, or a mapping from names to tensors", kind_of(ids))
    if not (mask is None or isinstance(mask, Tensor | Mapping)):
        refuse_type("replay_routing", "mask", "be a tensor, or a mapping from names to tensors", kind_of(mask))
    modules = dict(getattr(model, "_orig_mod", model).named_modules())
    checked = {}
    for name, ids_TK in ids.items():
        if name not in modules:
            refuse("replay_routing", "ids", "be named after modules of the model", repr(name))
        argument = f"ids[{name!r}]"
        check_tensor("replay_routing", argument, ids_TK)
        if ids_TK.dtype not in ID_DTYPES:
            refuse_type("replay_routing", argument, "be int32 or int64", ids_TK.dtype)
        if ids_TK.dim() != 2:
            refuse("replay_routing", argument, "have shape [T, K]", f"shape {list(ids_TK.shape)}")
        mask_T = mask.get(name) if isinstance(mask, Mapping) else mask
        if mask_T is not None:
            _check_mask(name, mask_T, ids_TK)
        checked[modules[name]] = name, ids_TK.long(), mask_T
    return checked


def _check_mask(name: str, mask_T: Tensor, ids_TK: Tensor) -> None:
    argument = f"mask[{name!r}]"
    check_tensor("replay_routing", argument, mask_T)
    if mask_T.dtype != torch.bool:
        refuse_type("replay_routing", argument, "be bool", mask_T.dtype)
    if list(mask_T.shape) != [ids_TK.shape[0]]:
        refuse("replay_routing", argument, f"have shape [{ids_TK.shape[0]}] (tokens of ids)", f"shape {list(mask_T.shape)}")
