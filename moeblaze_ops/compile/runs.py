"""For what a compiled graph runs: blocks of equal code share one, and each of them has layers of its own."""

import functools
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import fx

from moeblaze_ops.compile.records import Place
from moeblaze_ops.lowering.torch_internals import callers, frames

_MOST = 1024
"""Places that are noted of one graph, which is one that gathers its weights anew in each call where there are more."""


def noting_places(gm: fx.GraphModule, report: Any, compiled: Callable) -> Callable:
    """``compiled``, which notes in ``report`` each place that it runs for.

    Two places are told apart by the first and the last parameter or buffer that the graph reads of a module.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    of_modules = [number for number, node in enumerate(inputs) if frames.is_of_module(node)]
    if not (report.candidates or report.direct):
        return compiled
    ends = itemgetter(of_modules[0], of_modules[-1]) if of_modules else lambda args: (None, None)
    seen: set[tuple[int, int]] = set()
    is_method = frames.compiled_module() is not None

    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        first, last = ends(args)
        key = id(first), id(last)
        if key not in seen and len(seen) < _MOST:
            seen.add(key)
            # A function that is given a module has no name for it.
            place = Place.of(callers.running_module()) if is_method else Place("", "", hash(key))
            if place not in report.runs:
                report.runs.append(place)
        return compiled(*args)

    return run
