"""In which runs rows are looked at that are stored. Whatever is said here, all rows are stored, in their order.

A loop over experts that joins their rows and their outputs has one run for each expert:

    out.index_add_(0, torch.cat(tokens), torch.cat(outputs))
    out.index_add_(0, torch.arange(T).repeat(E), torch.stack(outputs).flatten(0, 1))
"""

from collections.abc import Iterator
from itertools import accumulate

from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.graph.sizes import Size, same_size

_KEEP_ROWS = frozenset(("reshape", "expand", "cast", "pointwise", "select", "index", "slice"))


def joined_sizes(index: Value, stored: Value) -> tuple[Size, ...]:
    """How long the runs are of what the rows of ``index``, or those of what is stored, are joined of; else one run of all."""
    rows = index.shape[0]
    of_index, of_stored = ([v for v in _behind(of) if v.op == "cat" and v.args[1] == 0] for of in (index, stored))
    of_stored = [v for v in of_stored if len({x.shape[0] for x in v.args[0]}) == 1]  # as of E parts of C rows
    joined = next((v for v in (*of_index, *of_stored) if same_size(v.shape[0], rows)), None)
    held = (v for v in (*_behind(stored), *_behind(index)) if _holds_experts(v))
    apart = next((v for v in held if same_size(v.shape[0] * v.shape[1], rows)), None)
    sizes = tuple(x.shape[0] for x in joined.args[0]) if joined else (apart.shape[1],) * apart.shape[0] if apart else (rows,)
    starts = accumulate(sizes, initial=0)
    # A single row at a symbolic place has no index variable that its place could be told from.
    told = all(isinstance(start, int) or size != 1 for start, size in zip(starts, sizes, strict=False))
    return sizes if told else (rows,)


def _holds_experts(value: Value) -> bool:
    """True if a value [E, T, ...] was put together of one for each expert, or slot."""
    return value.op in ("stack", "cat") and value.args[1] == 0 and len(value.shape) > 1 and isinstance(value.shape[0], int)


def _behind(value: Value) -> Iterator[Value]:
    """The values that ``value`` has its rows from."""
    stack = [value]
    while stack:
        top = stack.pop()
        yield top
        if top.op in _KEEP_ROWS:
            for arg in top.args:
                stack += [v for v in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(v, Value)]
