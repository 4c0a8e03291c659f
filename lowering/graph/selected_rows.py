"""Masks of rows that were selected by what they are a mask of."""

from moeblaze_ops.lowering.graph.functional_view import Value


def before_rows(mask: Value) -> tuple[Value, Value] | None:
    """The mask ``[T, K]`` of all rows, and the numbers of those with any true element, where ``mask`` is of these rows alone.

        some = (ids == e).any(-1);  weights[some][ids[some] == e]           weights[ids == e]
        (ids[some] == e).nonzero()                                          has the columns of (ids == e).nonzero()
    """
    selected = [part for part in mask.args[1] if part.shape] if mask.op == "pointwise" else []
    if len(selected) != 1 or selected[0].op != "index":
        return None
    ids, (rows, *others), first = selected[0].args
    if first != 0 or any(other is not None for other in others) or rows.op != "nonzero" or rows.args[0].op != "any":
        return None
    whole, dims, keepdim = rows.args[0].args
    name, parts, params = mask.args
    before = tuple(ids if part is selected[0] else part for part in parts)
    is_whole = whole.op == "pointwise" and whole.args == (name, before, params)
    return (whole, rows) if is_whole and len(whole.shape) == 2 and dims == (1,) and not keepdim else None
