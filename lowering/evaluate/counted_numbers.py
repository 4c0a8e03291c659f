"""Which number a count is of, among the counts of all numbers. Whatever is said here is compared with the count."""

from moeblaze_ops.lowering.graph.sizes import same_size
from moeblaze_ops.lowering.index_notation.expr import Expr, key_and_number, subexpressions
from moeblaze_ops.lowering.index_notation.normal_form import Algebra


def count_of_any(algebra: Algebra, count: Expr) -> tuple[Expr, Expr, int] | None:
    """A variable, the counts of all that it may be, and of which number the count is."""
    compared = {e: key_and_number(e) for e in subexpressions(count, lambda e: e.kind == "eq")}
    numbers = {number for _, number in compared.values() if number is not None}
    bounds = {algebra.extent(key) for key, _ in compared.values() if key is not None}
    if len(numbers) != 1 or len(bounds) != 1 or None in bounds:
        return None
    (number,), (bound,) = numbers, bounds
    var = algebra.var(0, bound, "r")

    def of_any(e: Expr) -> Expr:
        """``e`` with the variable for the number where it is compared, and where it is an index of so many."""
        if e.kind == "leaf":
            places = zip(e.args[1], e.args[0].shape, strict=True)
            indices = (var if i is number and same_size(n, bound) else of_any(i) for i, n in places)
            return algebra.leaf(e.args[0], tuple(indices))
        key, _ = compared.get(e, (None, None))
        return algebra._rebuild(e, of_any) if key is None else algebra.eq(of_any(key), var)

    return var, of_any(count), number.args[0]
