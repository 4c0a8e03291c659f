"""A function called with its graphs captured and rewritten, but not compiled: what ``explain`` looks at."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from moeblaze_ops.compile.attempts import rewrite
from moeblaze_ops.compile.records import Record, kept_apart
from moeblaze_ops.compile.switch import rewriting
from moeblaze_ops.lowering.torch_internals import frames, inductor


def eager_random_numbers() -> contextlib.AbstractContextManager:
    """A context in which numbers are drawn as eager mode draws them: layers that draw some inside stay as they are."""
    return inductor.inductor_config.patch(fallback_random=True)


def dry_run(
    function: Callable, observe: Callable[[fx.GraphModule, fx.GraphModule, Any], Callable], *args: Any, **kwargs: Any
) -> tuple[Any, list[Record], list[tuple[str, str]]]:
    """Call ``function`` with its graphs captured and rewritten as a compile would, but not compiled.

    Args:
        function: what to call; Dynamo must not have seen its code yet.
        observe: called with each graph as captured, as rewritten, and the report; returns what runs in its place.
        args, kwargs: of ``function``.

    Returns:
        What ``function`` returns, the records, and the graph breaks with their lines. What Dynamo learnt about code that it had
        not seen before is forgotten.
    """
    from moeblaze_ops.lowering.obligations.branches import always_taken

    captured: list[fx.GraphModule] = []
    observers = [observe]

    def rewrite_copied(gm: fx.GraphModule) -> Any:
        captured[:] = [always_taken(gm)]
        return rewrite(gm)

    def backend(gm: fx.GraphModule, example_inputs: list) -> Callable:
        return observers[0](captured[0], gm, rewrite(gm))

    with (
        contextlib.ExitStack() as at_end,
        rewriting(backend, rewrite_copied),
        frames.dynamo_config.patch(optimize_ddp=False),  # which would cut what was captured
        kept_apart() as records,
        frames.forgetting_frames(backend),
        frames.counting_breaks() as breaks,
    ):
        # What holds the model: Dynamo keeps the backend of a compile that raised.
        at_end.callback(observers.clear)
        at_end.callback(captured.clear)
        output = torch.compile(function, backend=backend)(*args, **kwargs)
    return output, records, breaks
