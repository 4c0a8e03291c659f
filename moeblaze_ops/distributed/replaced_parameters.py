"""Parameters in whose place ``shard_experts`` stored others: an optimizer that holds them would train no expert, in silence."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

_SHOWN = 3
_replaced = WeakTensorKeyDictionary()
_hooks: list[RemovableHandle] = []


def note_replaced(parameter: nn.Parameter, name: str) -> None:
    """Remember a parameter that the model does not hold any more, while somebody else does, and the gradient that it had."""
    _replaced[parameter] = name, parameter.grad


def watch_optimizers() -> None:
    """Have optimizers looked at before they step, as long as any such parameter lives."""
    if _replaced and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, *_: Any) -> None:
    known = ((p, *_replaced[p]) for group in optimizer.param_groups for p in group["params"] if p in _replaced)
    held = [name for p, name, grad in known if p.requires_grad and (p.grad is None or p.grad is grad)]
    if held:
        names = ", ".join(held[:_SHOWN]) + ", ..." * (len(held) > _SHOWN)
        raise RuntimeError(f"shard_experts: an optimizer must be made after it, got one that holds what it replaced: {names}")
    if not _replaced:
        while _hooks:
            _hooks.pop().remove()
