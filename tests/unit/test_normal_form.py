"""Canonical forms of index arithmetic, sums and bound variables."""

import pytest
import sympy
import torch
from torch import fx

from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.index_notation.normal_form import Algebra


@pytest.fixture
def algebra():
    return Algebra()


def test_row_major_position_splits_and_joins(algebra):
    t, k = algebra.var(0, 10, "t"), algebra.var(1, 2, "r")
    position = algebra.linear(0, [(2, t), (1, k)])
    assert algebra.div(position, 2) is t and algebra.mod(position, 2) is k
    s = algebra.var(2, 20, "r")
    assert algebra.linear(0, [(2, algebra.div(s, 2)), (1, algebra.mod(s, 2))]) is s


def test_symbolic_sizes_split_too(algebra):
    B, S = sympy.symbols("B S", positive=True, integer=True)
    b, s = algebra.var(0, B, "t"), algebra.var(1, S, "t")
    position = algebra.linear(0, [(S, b), (1, s)])
    assert algebra.div(position, S) is b and algebra.mod(position, S) is s


def test_multiples_of_symbolic_sizes_may_be_equal(algebra):
    """Whether B divides 6, and 2 divides B, is not known."""
    B = sympy.Symbol("B", positive=True, integer=True)
    token = algebra.var(0, 7, "t")
    for constant, scale in ((-6, B), (-B, 2), (-6, 2 * B), (2 * B, -4)):
        assert algebra.eq(algebra.linear(constant, [(scale, token)]), algebra.zero).kind == "eq"
    assert algebra.eq(algebra.linear(-6, [(2, token)]), algebra.zero) is algebra.eq(token, algebra.const(3))


def test_remainder_that_may_overflow_stays(algebra):
    t, k = algebra.var(0, 10, "t"), algebra.var(1, 3, "r")
    position = algebra.linear(0, [(2, t), (1, k)])
    assert algebra.div(position, 2).kind == "div" and algebra.mod(position, 2).kind == "mod"


def test_position_in_nothing_stays(algebra):
    """As of the slots of a layer with a K of zero."""
    s = algebra.var(0, 0, "r")
    assert algebra.div(s, 0).kind == "div" and algebra.mod(s, 0).kind == "mod"
    assert algebra.div(algebra.const(3), 0).kind == "div"


def test_marks_stand_outside_of_what_is_rounded(algebra):
    """Of no integer: (3.5 * mark).to(torch.int64) is rounded down, and half of a mark is none."""
    t, half = algebra.var(0, 10, "t"), algebra.const(0.5)
    mark, score = algebra.eq(t, algebra.const(3)), algebra.call("exp", (t,))
    product = algebra.mul(mark, score)
    assert algebra.cast(torch.bfloat16, product) is algebra.mul(mark, algebra.cast(torch.bfloat16, score))
    assert algebra.cast(torch.float32, mark) is mark
    threshold = algebra.mul(algebra.call("ge", (score, half)), score)
    assert algebra.cast(torch.bfloat16, threshold).kind == "cast"
    assert algebra.cast(torch.int64, product).kind == "cast"
    assert algebra.cast(torch.bfloat16, algebra.mul(half, score)).kind == "cast"


def test_order_of_terms_and_factors_is_forgotten(algebra):
    a, b, c = (algebra.var(i, 5, "r") for i in range(3))
    assert algebra.add(a, algebra.add(b, c)) is algebra.add(algebra.add(c, a), b)
    assert algebra.mul(a, algebra.mul(b, algebra.const(2))) is algebra.mul(algebra.const(2.0), b, a)
    assert algebra.mul(a, algebra.zero) is algebra.zero


@pytest.mark.parametrize("number", [2.0, 1.0, True, -3.0])
def test_whole_numbers_are_ints_whoever_names_them_first(number):
    algebra = Algebra()
    assert algebra.const(number) is algebra.const(int(number))
    assert type(algebra.const(int(number)).args[0]) is int


@pytest.mark.parametrize("number", [0.5, 2.0**60, float("inf"), float("-inf")])
def test_other_numbers_stay(algebra, number):
    assert algebra.const(number).args == (number,) and type(algebra.const(number).args[0]) is float


def test_comparison_equals_its_square_and_a_product_does_not(algebra):
    a, b = algebra.var(0, 5, "r"), algebra.var(1, 5, "r")
    same = algebra.eq(a, b)
    assert algebra.mul(same, same) is same
    assert algebra.mul(a, a) is not a


def test_names_of_bound_variables_do_not_matter(algebra):
    t = algebra.var(0, 10, "t")
    sums = []
    for level in (3, 7):
        k, j = algebra.var(level, 4, "r"), algebra.var(level + 1, 6, "r")
        inner = algebra.sum(j, algebra.call("f", (t, k, j)))
        sums.append(algebra.sum(k, algebra.call("g", (k, inner))))
    assert sums[0] is sums[1]


def test_opened_sum_closes_to_itself(algebra):
    t, k = algebra.var(0, 10, "t"), algebra.var(1, 4, "r")
    total = algebra.sum(k, algebra.call("f", (t, k)))
    assert algebra.sum(*algebra.open(total)) is total


def test_factors_without_the_variable_leave_the_sum(algebra):
    t, k = algebra.var(0, 10, "t"), algebra.var(1, 4, "r")
    weight = algebra.call("w", (t, k))
    assert algebra.sum(k, algebra.mul(t, weight)) is algebra.mul(t, algebra.sum(k, weight))
    assert algebra.sum(k, t) is algebra.mul(t, algebra.const(4))


def test_new_variables_are_none_that_is_bound(algebra):
    """Beside the variable of a binder, too, inside of which others are bound."""
    (bound, *_), new = algebra.sum(algebra.var(0, 3, "r"), algebra.call("f", (algebra.var(0, 3, "r"),))).args, algebra.fresh
    assert new([algebra.var(bound.args[0] - 1, 3, "r")], 3).args[0] == 0 and new([], 3).args[0] == 0


def test_what_binds_replaces_what_is_inside_binders(algebra):
    t, a, b, c = algebra.var(0, 10, "t"), *(algebra.var(i, 4, "r") for i in (1, 2, 3))
    key = algebra.call("key", (t,))
    count = algebra.any(b, algebra.eq(algebra.call("id", (t, b)), algebra.one))

    def two_deep(key):
        return algebra.sum(a, algebra.call("h", (a, algebra.any(c, algebra.call("g", (a, c, key))))))

    def three_deep(key):
        inner = algebra.any(c, algebra.call("g", (a, c, algebra.any(b, algebra.call("f", (a, b, c, key))))))
        return algebra.sum(a, algebra.call("h", (a, inner, key)))

    for nested in (two_deep, three_deep):
        assert algebra.substitute(nested(key), {key: count}) is nested(count)


def test_sum_that_falls_apart_inside_another(algebra):
    """Over quotients and remainders, as soon as a number takes the place of ``s``: one binder more."""
    a, n, s = algebra.var(0, 4, "r"), algebra.var(1, 20, "r"), algebra.var(2, 4, "r")

    def nested(s):
        position = algebra.linear(0, [(1, n), (1, s)])
        body = algebra.call("f", (algebra.div(position, 4), algebra.mod(position, 4), a))
        return algebra.sum(a, algebra.sum(n, body))

    assert algebra.substitute(nested(s), {s: algebra.zero}) is nested(algebra.zero)


def test_a_nest_of_sums_is_rebuilt_once(algebra, monkeypatch):
    """Sums of sums, as where tokens are mixed before a layer: the time for each level more does not double."""
    t, tokens = algebra.var(0, 5, "t"), algebra.var(1, 7, "t")
    nest = t
    for depth in range(16):
        row = algebra.var(10 + depth, 3, "r")
        nest = algebra.sum(row, algebra.call("sin", (algebra.mul(nest, algebra.call("cos", (row,))),)))
    closed, close = [], algebra._close
    monkeypatch.setattr(algebra, "_close", lambda *args: closed.append(args) or close(*args))
    moved = algebra.substitute(nest, {t: tokens})
    assert len(closed) == 16
    assert algebra.substitute(moved, {tokens: t}) is nest


def _tensor(kind, num_rows):
    return Value(kind, (), (num_rows,), torch.int64, fx.Graph().placeholder("x"))


KEYS = {"row": lambda a, n: n, "token": lambda a, n: a.div(n, 2), "turned": lambda a, n: a.mod(n, 5)}


@pytest.mark.parametrize("key", KEYS)
def test_rows_at_an_index_are_those_that_have_it(algebra, key):
    rows, n, t = _tensor("input", 10), algebra.var(1, 10, "r"), algebra.var(0, 10 if key == "row" else 5, "t")
    e = algebra.sum(n, algebra.mul(algebra.eq(KEYS[key](algebra, n), t), algebra.leaf(rows, (n,))))
    assert e.kind == ("leaf" if key == "row" else "sum")
    for number in map(algebra.const, range(t.args[1])):
        found = algebra.substitute(e, {t: number})
        if found.kind == "sum":
            k, body = algebra.open(found)
            found = algebra.add(*(algebra.substitute(body, {k: algebra.const(i)}) for i in range(k.args[1])))
        own = [i for i in map(algebra.const, range(10)) if KEYS[key](algebra, i) is number]
        assert found is algebra.add(*(algebra.leaf(rows, (i,)) for i in own))


@pytest.mark.parametrize(("key", "num_rows", "num_tokens"), [("row", 9, 10), ("token", 9, 5), ("token", 8, 5), ("turned", 10, 6)])
def test_rows_at_an_index_that_may_have_none_stay_compared(algebra, key, num_rows, num_tokens):
    rows, n, t = _tensor("input", num_rows), algebra.var(1, num_rows, "r"), algebra.var(0, num_tokens, "t")
    hit = algebra.eq(KEYS[key](algebra, n), t)
    assert algebra.only_terms(n, algebra.mul(hit, algebra.leaf(rows, (n,)))) is None


def test_rows_at_their_place_in_an_order_are_read_there(algebra):
    rows, order, n, t = _tensor("input", 10), _tensor("argsort", 10), algebra.var(1, 10, "r"), algebra.var(0, 5, "t")

    def of(order):
        return algebra.sum(n, algebra.mul(algebra.eq(algebra.div(algebra.leaf(order, (n,)), 2), t), algebra.leaf(rows, (n,))))

    k = algebra.var(3, 2, "r")
    assert of(order) is algebra.sum(k, algebra.leaf(rows, (algebra.inverse(order, algebra.linear(0, [(2, t), (1, k)])),)))
    assert any(e.kind == "eq" for e in of(_tensor("argsort", 20)).args[1].args)  # some rows of more


def test_counts_before_a_row_are_those_up_to_it_less_its_own(algebra):
    ids, v, t, e = _tensor("input", 10), algebra.var(2, 10, "r"), algebra.var(0, 10, "t"), algebra.var(1, 4, "r")
    hit, before = algebra.eq(algebra.leaf(ids, (v,)), e), algebra.linear(-1, [(1, t)])
    up_to_it, own = algebra.prefix(v, hit, t), algebra.eq(algebra.leaf(ids, (t,)), e)
    assert algebra.prefix(v, hit, before) is algebra.linear(0, [(1, up_to_it), (-1, own)])
    later = algebra.var(0, 11, "t")  # of the last row of eleven it is all ten
    assert algebra.prefix(v, hit, algebra.linear(-1, [(1, later)])).kind == "prefix"
    score = algebra.call("exp", (algebra.leaf(ids, (v,)),))
    assert algebra.prefix(v, score, before).kind == "prefix"


def test_counts_that_have_counted_their_row_are_one_or_more(algebra):
    ids, v, t = _tensor("input", 10), algebra.var(2, 10, "r"), algebra.var(0, 10, "t")
    own = algebra.eq(algebra.leaf(ids, (v,)), algebra.leaf(ids, (t,)))
    places = [algebra.linear(-1, [(1, algebra.prefix(v, own, at))]) for at in (t, algebra.linear(-1, [(1, algebra.div(t, 2))]))]
    assert [algebra.extent(place) for place in places] == [10, None]
    later = algebra.var(0, 20, "t")  # of rows behind the last one nothing is counted
    of_more = algebra.eq(algebra.leaf(ids, (v,)), algebra.leaf(ids, (later,)))
    assert algebra.extent(algebra.linear(-1, [(1, algebra.prefix(v, of_more, later))])) is None
