"""What ``torch.utils.checkpoint`` calls in backward, made in forward: no public hook of torch runs in both."""

import functools
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint

_carriers: list[Callable[[Callable], Callable]] = []


def carry_over_checkpoints(carried: Callable[[Callable], Callable]) -> None:
    """Let backward call ``carried(function)`` in place of ``function``, from now on in this process."""
    if carried not in _carriers:
        _carriers.append(carried)
    _follow_checkpoints()


def _carried(function: Callable) -> Callable:
    return functools.reduce(lambda function, carried: carried(function), _carriers, function)


@functools.cache
def _follow_checkpoints() -> None:
    name = "_checkpoint_without_reentrant_generator"
    name += "_impl" if hasattr(checkpoint, f"{name}_impl") else ""  # from torch 2.14 on
    generator, forward = getattr(checkpoint, name), checkpoint.CheckpointFunction.forward

    @functools.wraps(generator)
    def carrying_generator(function: Callable, *args: Any, **kwargs: Any) -> Any:
        return generator(_carried(function), *args, **kwargs)

    def carrying_forward(ctx: Any, function: Callable, *args: Any) -> Any:
        again = _carried(function)
        output = forward(ctx, function, *args)
        ctx.run_function = again
        return output

    setattr(checkpoint, name, carrying_generator)
    checkpoint.CheckpointFunction.forward = staticmethod(carrying_forward)  # type: ignore[method-assign]
