"""What is said of running counts is true of all that they count: rows are told apart by them, ids by their slots."""

from itertools import combinations, product
from math import prod

import pytest
import torch

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.graph.functional_view import Value
from moeblaze_ops.lowering.index_notation.expr import factors_of, subexpressions
from moeblaze_ops.lowering.index_notation.indicators import most_counted
from moeblaze_ops.lowering.index_notation.number_ranges import never_negative
from moeblaze_ops.lowering.statement.rules import LayerForm
from tests.corpus.element_values import Run

T, K, E = 4, 2, 3


class Numbers(Run):
    """Leaves that hold random numbers."""

    def __init__(self, seed: int = 0):
        self.algebra = Evaluator().algebra
        self.random, self.tensors = torch.Generator().manual_seed(seed), {}

    def leaf(self, of: str, *indices):
        """``m``: marks, ``n``: places, some of which are none, ``x``: numbers, ``ids``: of rows, ``top``: some that differ."""
        shapes = {"m": (T,), "more": (T,), "n": (T,), "x": (T,), "ids": (T,), "top": (E, E), "few": (K,), "any": (T, K)}
        shapes |= {"others": (E, E), "rows": (E * E,), "order": (T,), "back": (T,), "true": (T, K), "also": (T, K)}
        if of not in self.tensors:
            dtype = torch.bool if of in ("m", "more", "true", "also") else torch.float64 if of == "x" else torch.int64
            value = Value("argsort" if of in ("order", "back") else "computed", (of,), shapes[of], dtype, None)
            value.choices_along = {"top": 1, "others": 1, "few": 0}.get(of)
            value.bound = {"ids": E, "top": E, "few": T, "any": T, "rows": E * E}.get(of)
            self.tensors[of] = value
        return self.algebra.leaf(self.tensors[of], indices)

    def draw(self):
        def draw(low, high, *shape):
            return torch.randint(low, high, shape, generator=self.random)

        self.held = {
            "m": draw(0, 2, T), "more": draw(0, 2, T), "n": draw(-2, T, T), "ids": draw(0, E, T),
            "x": draw(-1, 2, T).double() * (1.0 - 2 * draw(0, 2, T)), "any": draw(0, T, T, K), "rows": draw(0, E * E, E * E),
            "top": torch.rand(E, E, generator=self.random).argsort(1), "few": torch.randperm(T, generator=self.random)[:K],
            "others": torch.rand(E, E, generator=self.random).argsort(1), "order": torch.randperm(T, generator=self.random),
            "back": torch.randperm(T, generator=self.random),
            **{of: (torch.rand(T * K, generator=self.random).argsort() < E).view(T, K) for of in ("true", "also")},
        }  # fmt: skip

    def _held_by(self, value):
        return self.held[value.args[0]]


@pytest.fixture
def numbers():
    return Numbers()


def _counts(numbers, row):
    """Running counts up to a row, or to a place that it has."""
    algebra, leaf = numbers.algebra, numbers.leaf
    other = algebra.var(9, T, "r")
    same = algebra.eq(leaf("ids", other), leaf("ids", row))
    of = {
        "of ids": same, "of marks": leaf("m", other), "of both": algebra.mul(same, leaf("m", other)),
        "of signs": algebra.call("ge", (leaf("n", other), _sign(numbers, row))),
        "of more": leaf("more", other), "of an id": algebra.eq(leaf("ids", other), algebra.zero), "of numbers": leaf("x", other),
    }  # fmt: skip
    counts = {name: algebra.prefix(other, body, row) for name, body in of.items()}
    return counts | {"to places": algebra.prefix(other, leaf("m", other), leaf("n", row))}


def _sign(numbers, row, of="x"):
    """0 or -2: another one for 0.0 than for -0.0, which is equal."""
    algebra = numbers.algebra
    return algebra.linear(-1, [(1, algebra.call("clamp", (algebra.call("reciprocal", (numbers.leaf(of, row),)),), -1, 1))])


def _beside(numbers, row):
    algebra, leaf = numbers.algebra, numbers.leaf
    return (
        (), (leaf("m", row),), (leaf("more", row),), (leaf("x", row),),
        (leaf("m", row), leaf("more", row), algebra.eq(_counts(numbers, row)["of marks"], algebra.one)),
        (algebra.eq(leaf("ids", row), algebra.zero),), (leaf("m", leaf("n", row)),),
        (algebra.call("ge", (leaf("n", row), _sign(numbers, row))),),
    )  # fmt: skip


def test_rows_of_equal_counts(numbers):
    algebra, (u, t) = numbers.algebra, (numbers.algebra.var(level, T, "r") for level in (0, 1))
    same, near = (algebra.eq(numbers.leaf(of, u), numbers.leaf(of, t)) for of in ("ids", "x"))
    fewer = 0
    pairs = product(_counts(numbers, u).values(), _counts(numbers, t).values())
    for (first, second), of_u, of_t, key in product(pairs, _beside(numbers, u), _beside(numbers, t), ((), (same,), (near,))):
        factors = [algebra.eq(first, second), *of_u, *key]
        whole = algebra.sum(u, algebra.mul(*factors, *of_t))
        beside = algebra.beside(algebra.sum(u, algebra.mul(*factors)), of_t)
        if any(True for _ in subexpressions(beside, lambda e: e.kind == "prefix")):
            continue  # nothing was told of them
        fewer += 1
        for _ in range(4 if near not in key else 40):
            numbers.draw()
            for row in range(T):
                known = _times(numbers, of_t, {t: row})
                total = sum(_times(numbers, factors, {u: i, t: row}) for i in range(T))
                assert numbers.number(whole, {t: row}) == total * known
                assert known != 1 or numbers.number(beside, {t: row}) == total
    assert fewer >= 89


def test_counts_of_a_sign_that_integers_do_not_have(numbers):
    """Of -0.0, which equals the integer 0, other rows are counted."""
    algebra, (u, t) = numbers.algebra, (numbers.algebra.var(level, T, "r") for level in (0, 1))

    def is_above(row, *of):
        return algebra.call("ge", (numbers.leaf("n", row), _sign(numbers, *of)))

    other = algebra.var(9, T, "r")
    first, second = (algebra.prefix(other, is_above(other, *of), of[0]) for of in ((u, "ids"), (t, "x")))
    hits = algebra.eq(first, second), algebra.eq(numbers.leaf("ids", u), numbers.leaf("x", t))
    factors = *hits, is_above(u, u, "ids"), is_above(t, t, "x")
    whole = algebra.sum(u, algebra.mul(*factors))
    for row in [*range(T)] * 20:
        numbers.draw()
        assert numbers.number(whole, {t: row}) == sum(_times(numbers, factors, {u: i, t: row}) for i in range(T))


def test_counts_behind_a_whole_count(numbers):
    """No running count reaches what stands behind all of the same: first and second slots are never at one place."""
    algebra, leaf = numbers.algebra, numbers.leaf
    u, t, other = (algebra.var(level, T, "r") for level in (0, 1, 9))
    zeros = 0
    for less, key, of_u in product((0, 1), (True, False), _beside(numbers, u)):
        same = {row: algebra.eq(leaf("n", other), leaf("ids", row)) for row in (u, t)}
        second = algebra.prefix(other, algebra.eq(leaf("ids", other), leaf("ids", u)), u)
        behind = algebra.linear(-less, [(1, second), (1, algebra.sum(other, same[u]))])
        factors = [algebra.eq(behind, algebra.prefix(other, same[t], t)), *of_u]
        factors += [algebra.eq(leaf("ids", u), leaf("ids", t))] * key
        whole = algebra.sum(u, algebra.mul(*factors))
        zeros += whole is algebra.zero
        assert less == 0 and key or whole is not algebra.zero
        for _ in range(20):
            numbers.draw()
            numbers.held["n"] = numbers.held["n"].clamp(min=0)
            for row in range(T):
                assert numbers.number(whole, {t: row}) == sum(_times(numbers, factors, {u: i, t: row}) for i in range(T))
    assert zeros == len(_beside(numbers, u))


def test_one_of_two_numbers(numbers):
    """What a mask tells of a number is told of it alone: elsewhere it is the other one."""
    algebra, leaf = numbers.algebra, numbers.leaf
    t, place = algebra.var(0, T, "r"), algebra.var(1, 2 * T + 1, "t")
    met = 0
    for count, marks in product(_counts(numbers, t).values(), _beside(numbers, t)):
        before = algebra.linear(-1, [(1, count)])
        masks = algebra.mul(*marks, algebra.call("lt", (before, algebra.const(2)))), algebra.mul(*marks)
        for mask, ids in product(masks, (leaf("ids", t), leaf("n", t))):
            if mask is algebra.one or mask is leaf("x", t) or leaf("x", t) in marks:
                continue
            kept = algebra.linear(0, [(2, ids), (1, algebra.mul(mask, before))])
            e = algebra.call("where", (mask, kept, algebra.const(2 * T)))
            hit = algebra.eq(e, place)
            met += algebra.fits(e, 2 * T + 1)
            assert e.kind != "call" or not algebra.fits(e, 2 * T)
            for _ in range(3):
                numbers.draw()
                for at in product(range(T), range(2 * T + 1)):
                    at = dict(zip((t, place), at, strict=True))
                    value = numbers.number(kept if numbers.number(mask, at) else algebra.const(2 * T), at)
                    assert numbers.number(e, at) == value and numbers.number(hit, at) == (value == at[place])
                    assert not algebra.fits(e, 2 * T + 1) or 0 <= value <= 2 * T
    assert met > 3


def test_sums_of_running_counts(numbers):
    """They are added up, and nothing is told of their rows."""
    algebra, row = numbers.algebra, numbers.algebra.var(0, T, "r")
    for count, marks in product(_counts(numbers, row).values(), _beside(numbers, row)):
        whole = algebra.sum(row, algebra.mul(count, *marks))
        for _ in range(4):
            numbers.draw()
            assert numbers.number(whole, {}) == sum(_times(numbers, (count, *marks), {row: at}) for at in range(T))


def _hits(numbers):
    """Marks of a row, those of a key and of a place among them, and these three."""
    algebra = numbers.algebra
    row, key, place = algebra.var(0, T, "r"), algebra.var(1, E, "t"), algebra.var(2, T + 1, "t")
    ids, n, m = (numbers.leaf(of, row) for of in ("ids", "n", "m"))
    counts = [algebra.linear(less, [(1, count)]) for count in _counts(numbers, row).values() for less in (0, -1)]
    hits = [algebra.eq(ids, key), m, algebra.eq(ids, n), algebra.eq(n, place), *(algebra.eq(count, place) for count in counts)]
    return hits, row, key, place


def test_rows_where_others_are(numbers):
    """How many rows meet another one is how many are at its place, whatever else is true of that."""
    algebra, (hits, row, key, place) = numbers.algebra, _hits(numbers)
    hits.append(algebra.eq(numbers.leaf("x", row), place))
    sets = [algebra.mul(*some) for size in (1, 2, 3) for some in combinations(hits, size)]
    pairs = [(sets[i], sets[j]) for i, j in torch.randint(len(sets), (100, 2), generator=numbers.random)]
    count, every = _counts(numbers, row)["of marks"], algebra.sum(row, numbers.leaf("m", row))
    ends = [algebra.linear(-1, [(1, e) for e in counts]) for counts in ((count,), (count, every))]
    behind = [algebra.mul(algebra.eq(end, place), numbers.leaf("m", row)) for end in ends]
    for own, others in (*product(behind, repeat=2), *pairs):
        other = algebra.fresh((row, own, others), T)
        met = algebra.met(row, factors_of(own), factors_of(others))
        if own in behind and others in behind:
            assert met is (algebra.one if own is others else algebra.zero)
        for _ in range(3):
            numbers.draw()
            for at in product(range(E), range(T + 1), range(T)):
                at = dict(zip((key, place, other), at, strict=True))
                if numbers.number(others, {**at, row: at[other]}) == 1:
                    assert numbers.number(met, at) == sum(numbers.number(own, {**at, row: i}) for i in range(T))


def test_rows_that_are_apart():
    numbers = Numbers()
    algebra, (hits, row, key, place) = numbers.algebra, _hits(numbers)
    apart = 0
    for some in (some for size in (1, 2, 3) for some in combinations(hits, size)):
        if not algebra.tells((), row, factors_of(algebra.mul(*some))):
            continue
        apart += 1
        for _ in range(4):
            numbers.draw()
            for at in product(range(E), range(T + 1)):
                at = dict(zip((key, place), at, strict=True))
                assert sum(_times(numbers, some, {**at, row: i}) for i in range(T)) <= 1
    assert apart >= 68


def test_numbers_that_tell_a_row(numbers):
    """No other row has the same, whatever the other variables are."""
    algebra, leaf = numbers.algebra, numbers.leaf
    row, n = algebra.var(0, E, "r"), algebra.var(1, E, "r")
    true, also = (algebra.true_place(leaf(of, n, n).args[0], row) for of in ("true", "also"))
    times = algebra.linear(0, [(K, row), (1, leaf("ids", row))])
    numbers_of = [
        row, algebra.div(row, K), algebra.mod(row, K), algebra.div(times, E), algebra.mod(times, E), algebra.mod(times, K),
        *true, *also, algebra.div(true[0], K), algebra.mod(true[0], K), leaf("ids", row), leaf("x", row), leaf("top", n, row),
        leaf("top", row, n), leaf("top", n, algebra.div(leaf("top", n, row), K)), leaf("top", n, algebra.mod(row, K)),
        leaf("top", leaf("ids", row), row), leaf("any", true[0], true[1]), leaf("few", true[1]),
    ]  # fmt: skip
    numbers_of += [algebra.linear(-1, [(E, first), (1, leaf("top", n, row))]) for first in (leaf("n", row), leaf("ids", row))]
    numbers_of += [algebra.linear(0, [(1, leaf("ids", row)), (1, leaf("top", n, row))])]
    told = 0
    for some in (some for size in (1, 2, 3) for some in combinations(numbers_of, size)):
        if algebra.tells(some, row):
            told += 1
            for _ in range(4):
                numbers.draw()
                for at in range(E):
                    assert len({tuple(numbers.number(e, {row: i, n: at}) for e in some) for i in range(E)}) == E
    assert told >= 606
    assert not algebra.tells([leaf("top", row, n)], row) and algebra.tells(true, row) and not algebra.tells(true[:1], row)


def test_two_numbers_of_a_slot_that_are_one():
    """They may be so in several slots, each of which has another."""
    evaluator, numbers = Evaluator(), Numbers()
    algebra = numbers.algebra = evaluator.algebra
    slot = algebra.var(1, E, "r")
    ids = numbers.leaf("top", algebra.zero, slot)
    for other in (slot, numbers.leaf("others", algebra.zero, slot)):
        hit = algebra.eq(ids, other)
        assert not algebra.tells((), slot, [hit])
        assert LayerForm(evaluator).of(algebra.any(slot, hit)) is not algebra.sum(slot, hit)
    hit = algebra.eq(ids, algebra.var(0, E, "r"))
    assert LayerForm(evaluator).of(algebra.any(slot, hit)) is algebra.sum(slot, hit)


def test_rows_of_equal_places_and_digits(numbers):
    algebra, leaf = numbers.algebra, numbers.leaf
    u, t = (algebra.var(level, E, "r") for level in (0, 1))

    def two_of(row):
        times = algebra.linear(0, [(K, row), (1, leaf("ids", row))])
        digits = [(algebra.div(e, size), algebra.mod(e, size)) for e in (row, times) for size in (K, E)]
        return *(algebra.true_place(leaf(of, row, row).args[0], row) for of in ("true", "also")), *digits

    for (a, b), (c, d) in product(two_of(u), two_of(t)):
        factors = algebra.eq(a, c), algebra.eq(b, d)
        whole = algebra.sum(u, algebra.mul(*factors))
        for _ in range(4):
            numbers.draw()
            for row in range(E):
                assert numbers.number(whole, {t: row}) == sum(_times(numbers, factors, {u: i, t: row}) for i in range(E))


def test_numbers_that_fit(numbers):
    algebra, row = numbers.algebra, numbers.algebra.var(0, T, "r")
    of_rows = [*_counts(numbers, row).values(), numbers.leaf("n", row), numbers.leaf("ids", row)]
    ends = [algebra.linear(less, [(times, e)]) for e in of_rows for less, times in ((0, 1), (-1, 1), (-1, 2), (2, -1))]
    fit = 0
    for e in ends:
        told = [algebra.call(name, (e, algebra.const(2))) for name in ("lt", "le", "ge")]
        for size, marks in product((2, 3, T), ((), *_beside(numbers, row), *((mark,) for mark in told), told)):
            if not algebra.fits(e, size, marks):
                continue
            fit += 1
            for _ in range(4):
                numbers.draw()
                rows = [{row: at} for at in range(T)]
                values = [numbers.number(e, at) for at in rows if _times(numbers, marks, at)]
                assert all(0 <= value < size for value in values)
    assert fit >= 146


def test_rows_in_the_place_of_another(numbers):
    """Ids that differ in slots do so in the one that a row is, and ids that may not differ are still asked for."""
    algebra, token, slot, row = numbers.algebra, *(numbers.algebra.var(level, K, "r") for level in range(3))
    for of, known in (("top", True), ("any", False)):
        once = algebra.distinct(numbers.leaf(of, token, row), row)
        assert (algebra.sum(row, algebra.mul(algebra.eq(row, slot), once)) is algebra.one) == known


def _times(numbers, factors, at):
    return prod(numbers.number(factor, at) for factor in factors)


def test_slots_of_equal_ids(numbers):
    algebra, rows = numbers.algebra, [numbers.algebra.var(level, E, "r") for level in range(3)]
    pairs = [tuple(pair) for pair in product(rows, repeat=2)]
    for _ in range(3):
        numbers.draw()
        for first, second, of in product(pairs, pairs, ("top", "others")):
            e = algebra.eq(numbers.leaf("top", *first), numbers.leaf(of, *second))
            for places in product(range(E), repeat=3):
                at = dict(zip(rows, places, strict=True))
                values = [numbers.number(numbers.leaf(*indices), at) for indices in (("top", *first), (of, *second))]
                assert numbers.number(e, at) == (values[0] == values[1])
    slots = algebra.eq(numbers.leaf("top", rows[0], rows[1]), numbers.leaf("top", rows[0], rows[2]))
    assert slots is algebra.eq(rows[1], rows[2])


def test_positions_from_the_end(numbers):
    """-1 is the last one: other numbers, and the same position."""
    algebra, order = numbers.algebra, numbers.leaf("order", numbers.algebra.zero).args[0]
    at = {"few": lambda place: numbers.leaf("few", place), "order": lambda place: algebra.inverse(order, place)}
    for of, size in (("few", K), ("order", T)):
        first, second = (algebra.var(level, size, "r") for level in (0, 1))
        before = algebra.linear(-1, [(1, second)])
        e = algebra.eq(at[of](first), at[of](before))
        numbers.draw()
        for i, j in product(range(size), repeat=2):
            assert numbers.number(e, {first: i, second: j}) == (i == (j - 1) % size)


def test_equal_positions(numbers):
    algebra, leaf = numbers.algebra, numbers.leaf
    a, b, c, d = rows = [algebra.var(level, K if level < 2 else T, "r") for level in range(4)]
    order, back = (leaf(of, c).args[0] for of in ("order", "back"))
    atoms = a, b, c, d, leaf("n", c), leaf("ids", d), algebra.inverse(order, c), algebra.inverse(back, d)
    terms = [(0, 0, c), (1, 0, c), (-1, 4, c), (0, 2, c), (-2, 2, d), (0, -4, d), (4, 3, d), (0, 2 * T, d)]
    positions = [algebra.linear(constant, [(times, of), (1, atom)]) for (constant, times, of), atom in product(terms, atoms)]
    equal = [algebra.eq(*pair) for pair in product(positions, repeat=2)]
    for _ in range(2):
        numbers.draw()
        for at in (dict(zip(rows, places, strict=True)) for places in product(range(K), range(K), range(T), range(T))):
            values = [numbers.number(position, at) for position in positions]
            assert [numbers.number(e, at) for e in equal] == [x == y for x, y in product(values, repeat=2)]
    first, second = (algebra.linear(0, [(K, algebra.inverse(order, row)), (1, slot)]) for row, slot in ((c, a), (d, b)))
    assert algebra.eq(first, second) is algebra.mul(algebra.eq(a, b), algebra.eq(c, d))


def test_most_that_is_counted(numbers):
    algebra, leaf = numbers.algebra, numbers.leaf
    row, n = algebra.var(0, E * E, "r"), algebra.var(1, K, "r")
    div, mod = algebra.div(row, E), algebra.mod(row, E)
    other = leaf("rows", row)
    places = (div, mod), (mod, div), (mod, mod), (div, div), (algebra.div(row, 2), mod), (algebra.zero, mod)
    places = *places, (algebra.div(other, E), algebra.mod(other, E))
    others = algebra.one, mod, leaf("top", div, algebra.zero)
    marks = [algebra.eq(leaf("top", *at), other) for at, other in product(places, others) if algebra.fits(at[0], E)]
    tokens = algebra.var(0, T, "r")
    named = [algebra.any(n, algebra.eq(tokens, leaf("few", n))), algebra.any(n, algebra.eq(tokens, leaf("any", tokens, n)))]
    least = []
    for over, mark in [*((row, mark) for mark in marks), *((tokens, mark) for mark in named)]:
        count = algebra.prefix(over, mark, algebra.const(over.args[1] - 1))
        least.append(most_counted(count))
        for _ in range(20):
            numbers.draw()
            assert numbers.number(count, {}) <= most_counted(count)
    assert least.count(E) >= 2 and least[-2:] == [K, T]


def test_where_a_count_is_at_least_one(numbers):
    algebra, row = numbers.algebra, numbers.algebra.var(0, T, "r")
    found = 0
    pairs = [*product(_counts(numbers, row).values(), _beside(numbers, row))]
    places = [algebra.mul(*marks, algebra.linear(-1, [(1, count)])) for count, marks in pairs]
    for place in (*places, *(algebra.linear(-1, [(1, algebra.mul(count, *marks))]) for count, marks in pairs)):
        found += never_negative(place)
        for _ in range(10 * never_negative(place)):
            numbers.draw()
            assert all(numbers.number(place, {row: at}) >= 0 for at in range(T))
    assert found > 5
    mask = algebra.mul(numbers.leaf("m", row), numbers.leaf("x", row))  # where numbers are not zero they may be negative
    assert not never_negative(algebra.call("where", (mask, numbers.leaf("x", row), algebra.one)))
