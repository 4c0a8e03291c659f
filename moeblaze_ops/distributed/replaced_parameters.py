"""Parameters in whose place ``shard_experts`` stored others: an optimizer that holds them would train no expert, in silence."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

_SHOWN = 3
_names = WeakTensorKeyDictionary()
_hooks: list[RemovableHandle] = []


def note_replaced(parameter: nn.Parameter, name: str) -> None:
    """Remember a parameter that the model does not hold any more, while somebody else does."""
    _names[parameter] = name


def watch_optimizers() -> None:
    """Have optimizers looked at before they step, as long as any such parameter lives."""
    if _names and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, *_: Any) -> None:
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.grad is None)
    held = [p for p in trained if p in _names]
    if held:
        names = ", ".join(_names[p] for p in held[:_SHOWN]) + ", ..." * (len(held) > _SHOWN)
        raise RuntimeError(f"shard_experts: an optimizer must be made after it, got one that holds what it replaced: {names}")
    if not _names:
        while _hooks:
            _hooks.pop().remove()
