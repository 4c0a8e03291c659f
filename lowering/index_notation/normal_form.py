"""The constructors of canonical expressions: every way to spell a sum, a product or an index ends in the same object."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import permutations
from typing import Any

from moeblaze_ops.kernels.formulas.constants import add_up, is_moderate, multiply
from moeblaze_ops.lowering.graph.sizes import Size, exact_quotient, same_size
from moeblaze_ops.lowering.graph.stored_numbers import stored_number
from moeblaze_ops.lowering.index_notation.expr import (
    BINDERS,
    CHOSEN,
    DETACH,
    DROPOUT,
    MAX_OPERANDS,
    SCALED,
    Expr,
    TooLarge,
    factors_of,
    is_hidden,
    leaves_of,
    split_number,
    subexpressions,
)
from moeblaze_ops.lowering.index_notation.index_arithmetic import IndexArithmetic
from moeblaze_ops.lowering.index_notation.indicators import is_below, is_choice, is_count, is_indicator, is_order, slot_of
from moeblaze_ops.lowering.index_notation.intervals import Interval, interval_of, is_bound, is_integer, left_out
from moeblaze_ops.lowering.index_notation.number_ranges import Floors, is_whole, never_negative

_BOUND = -100  # levels of bound variables go down from here, those of opened ones up from _OPEN
_OPEN = 1000
_INSIDE = 2000  # and those of binders in whose bodies something that binds is put from here


class Algebra(IndexArithmetic):
    """Constructors of canonical expressions; one instance owns one pool of interned expressions."""

    def __init__(self, resolve_group: Callable[[Expr], Expr] = lambda group: group) -> None:
        super().__init__()
        self._opened: dict[Expr, tuple[Expr, Expr]] = {}
        self._resolve_group = resolve_group
        self.largest: dict[Size, tuple[Expr, Expr, Expr]] = {}  # sizes that are the largest of counts; any number, and its count

    # Arithmetic.

    def add(self, *terms: Expr) -> Expr:
        _limit(terms, "add")
        constant = sum(term.args[0] for term in terms if term.kind == "const")
        flat: list[Expr] = []
        for term in sorted((term for term in terms if term.kind != "const"), key=lambda term: term.uid):
            parts = [part for part in term.args if part.kind != "const"] if term.kind == "add" else [term]
            own = sum(part.args[0] for part in term.args if part.kind == "const") if term.kind == "add" else 0
            if add_up(constant, own) or all(map(is_whole, parts)):
                constant += own
                flat += parts
            else:
                flat.append(term)
        flat = self._joined(flat)
        if constant != 0:
            flat.append(self.const(constant))
        if not flat:
            return self.zero
        return flat[0] if len(flat) == 1 else self._intern("add", *sorted(flat, key=lambda t: t.uid))

    def _joined(self, terms: list[Expr]) -> list[Expr]:
        """Terms of which no two are products over parts of a range, one behind the other: that is one over the whole range.

            a[:, :n] @ w[:, :n].T + a[:, n:] @ w[:, n:].T
        """
        products = [t for t in terms if t.kind == "sum" and t.args[0].args[2] == "d" and isinstance(t.args[0].args[1], int)]
        read = {product: leaves_of(product) for product in products} if len(products) > 1 else {}
        for first, second in permutations(read, 2):
            if read[first] != read[second]:
                continue
            (var, body), (row, rest) = self.open(first), self.open(second)
            if self.substitute(body, {var: self.linear(var.args[1], [(1, row)])}) is rest:
                whole = self.fresh((body,), var.args[1] + row.args[1], "d")
                others = list((Counter(terms) - Counter((first, second))).elements())  # one of them may be added twice
                return self._joined([*others, self.sum(whole, self.substitute(body, {var: whole}))])
        return terms

    def mul(self, *factors: Expr) -> Expr:
        _limit(factors, "mul")
        constant = math.prod(factor.args[0] for factor in factors if factor.kind == "const")
        flat: list[Expr] = []
        others = sorted((factor for factor in factors if factor.kind != "const"), key=lambda factor: factor.uid)
        for factor in others:
            own, parts = split_number(factor)
            if own in (1, -1) or ((len(others) == 1 or is_moderate(own)) and (constant in (0, 1, -1) or multiply(constant, own))):
                constant *= own
            else:
                parts = (self.scaled(own, self.mul(*parts)),)
            for part in parts:
                if part not in flat or not is_indicator(part):
                    flat.append(part)
        if constant == 0:
            return self.zero
        if any(map(is_bound, flat)):
            flat = self._intersected(flat)
            if self.zero in flat:
                return self.zero
        chosen = [f for f in flat if f.kind == "call" and f.args[0] == CHOSEN]
        flat = [f for f in flat if not (f in chosen and Counter(factors_of(*f.args[1])) <= Counter(flat))]
        marks = {f for f in flat if is_order(f) and not is_bound(f)}
        # What is compared is as it is beside the marks: [p < C] [where(p < C, p, 0) = c] = [p < C] [p = c].
        there = [self._with(f, lambda e: self.beside(e, marks) if e.kind == "eq" else None) for f in flat] if marks else flat
        if there != flat:
            return self.mul(self.const(constant), *there)
        if constant != 1:
            flat.append(self.const(constant))
        if not flat:
            return self.one
        return flat[0] if len(flat) == 1 else self._intern("mul", *sorted(flat, key=lambda f: f.uid))

    def _with(self, e: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
        """``e`` with outermost parts as ``change`` gives them."""

        @cache
        def visit(e: Expr) -> Expr:
            return change(e) or self._rebuild(e, visit)

        return visit(e)

    def beside(self, e: Expr, marks: Collection[Expr]) -> Expr:
        """``e`` where all marks are 1: of p.clamp(max=C - 1), p % C, p * (p < C) and torch.where(p < C, p, 0) it is p."""
        told = dict.fromkeys(marks, self.one)
        e = self.substitute(e, told)
        known = {s: s.args[0] for s in subexpressions(e, lambda s: s.kind == "mod") if self.fits(s.args[0], s.args[1], marks)}
        for clamp in subexpressions(e, lambda s: s.kind == "call" and s.args[0] == "clamp"):
            (number,), (lower, upper) = clamp.args[1:]
            if is_whole(number) and (upper is None or any(is_below(mark, number, upper + 1) for mark in marks)):
                is_told = never_negative(number) or self.call("ge", (number, self.zero)) in marks
                is_above = lower is None or (lower <= 0 and is_told)
                known[clamp] = number if is_above else self.call("clamp", (number,), lower, None)
        e = self.substitute(e, known)
        e = self._with(e, lambda s: self._only_counted(*self.open(s), marks) if s.kind == "sum" else None)
        return self.substitute(e, told)

    def _intersected(self, factors: Iterable[Expr]) -> list[Expr]:
        """Factors of which no two say between which numbers one integer lies."""
        others: list[Expr] = []
        ends: dict[Expr, tuple[float, float]] = {}
        for factor in sorted(factors, key=lambda f: f.kind == "add"):
            hole = left_out(factor)
            if is_bound(factor):
                atom, first, end = interval_of(factor)
                low, high = ends.get(atom, self._range(atom))
                ends[atom] = max(low, first), min(high, end)
            elif hole is not None and hole[0] in ends:
                atom, number, _ = hole
                low, high = ends[atom]
                ends[atom] = low + (low == number), high - (high == number + 1)
                others += [] if number in (low, high - 1) else [factor]
            else:
                others.append(factor)
        marks = [mark for atom, own in ends.items() for mark in self._marks((atom, *own))]
        return others + [mark for mark in marks if mark not in others]

    def _range(self, atom: Expr) -> tuple[float, float]:
        extent = self.extent(atom)
        return (0, extent) if isinstance(extent, int) else (-math.inf, math.inf)

    def _marks(self, interval: Interval) -> tuple[Expr, ...]:
        """Factors that are 1 where an integer is in an interval: a comparison for each end that its range does not have."""
        atom, first, end = interval
        least, most = self._range(atom)
        first, end = max(first, least), min(end, most)
        if first >= end:
            return (self.zero,)
        if end == first + 1:
            return (self.eq(atom, self.const(first)),)
        ends = ("ge", first, first > least), ("lt", end, end < most)
        return tuple(self.call(name, (atom, self.const(number))) for name, number, is_told in ends if is_told)

    def between(self, interval: Interval) -> Expr:
        """1 where an integer is in an interval."""
        return self.mul(*self._marks(interval))

    def sum(self, var: Expr, body: Expr) -> Expr:
        """The sum over ``var``; factors free of ``var`` stand outside."""
        if var.kind == "const":
            return body
        body = self._without_permutation(var, body)
        if (only := self.only_terms(var, body, of_numbers=body.has_dot)) is not None:
            return self.sum(*only)
        if (counted := self._only_counted(var, body)) is not None:
            return counted
        if (split := self._over_both(self.sum, var, body)) is not None:
            return split
        factors = factors_of(body)
        outside = [f for f in factors if var not in f.free]
        inside = [f for f in factors if var in f.free]
        if not inside:
            extent = var.args[1]
            count = self.const(extent) if isinstance(extent, int) else self._intern("call", "size", (), (extent,))
            return self.mul(count, *outside)
        if is_count(body):  # [m] [m n < C] = [m] [n < C]
            inside = [self.substitute(f, {m: self.one for m in inside if m is not f and is_indicator(m)}) for f in inside]
        return self.mul(*outside, self._close("sum", var, self.mul(*inside)))

    def only_terms(self, var: Expr, body: Expr, *, of_numbers: bool = False) -> tuple[Expr, Expr] | None:
        """What is left of the sum over ``var`` of a product with ``var``, ``var // K`` or ``var % T`` equal to an index.

        Over what that is summed, as K slots of a token are, and of what; ``of_numbers``: of experts, that are numbered alone.
        """
        factors = factors_of(body)
        hits = [(hit, *sides) for hit in factors if hit.kind == "eq" for sides in (hit.args, hit.args[::-1])]
        for hit, own, index in sorted(hits, key=lambda sides: sides[1].kind in ("div", "mod")):
            whole, size = own.args if own.kind in ("div", "mod") else (own, 1)
            order = whole.args[0] if whole.kind == "leaf" and whole.args[0].is_permutation else None
            row = whole if order is None or not same_size(order.shape[0], var.args[1]) else whole.args[1][0]
            if row is not var or var in index.free or index.height or size == 0:
                continue
            count = exact_quotient(var.args[1], size)
            fits = count is not None and self.fits(index, size if own.kind == "mod" else count)
            if not fits or (of_numbers and index.kind != "const"):
                continue
            other = self.fresh((body,), count if own.kind == "mod" else size)
            place = self.linear(0, [(size, other), (1, index)] if own.kind == "mod" else [(size, index), (1, other)])
            place = place if order is None else self.inverse(order, place)
            told = [f for f in factors if f.kind == "distinct" and f.args[1] is var is slot_of(f.args[0])]
            return other, self.substitute(self.mul(*(f for f in factors if f is not hit and f not in told)), {var: place})
        return None

    def _only_counted(self, var: Expr, body: Expr, known: Collection[Expr] = ()) -> Expr | None:
        """What is left of the sum of a product that says of row ``var`` that it is another. The marks ``known`` are 1.

            count(var) == count(n), of the same, if each counts its own row         ids[t, var] == ids[t, n], if these differ
            place(var) == place(n), of a mask's true elements                       var // K == n // K, var % K == n % K

        Of counts that are never equal nothing is left.
        """
        factors = factors_of(body)
        marks = [*known, *factors]
        for f in (f for f in factors if f.kind == "eq" and var in f.free):
            (way, a, of_a), (other, b, of_b) = map(self._told_by, f.args)
            same = [self.eq(*pair) for pair in zip(of_a, of_b, strict=True)] if way == other else []
            if same and all(e in factors or self.extent(at) == 1 for e, at in zip(same, of_a, strict=True)):
                return self.sum(var, self.mul(self.eq(a, b), *(g for g in factors if g not in same)))
            counts = [*subexpressions(f, lambda e: e.kind == "prefix")]
            if not counts and None in map(slot_of, f.args):
                continue
            hits = [sides for g in marks if g.kind == "eq" and g is not f for sides in (g.args, g.args[::-1])]
            numbers = {own: n for own, n in hits if is_whole(own) and is_whole(n) and (var in own.free or n.kind == "const")}
            there = {e: self.substitute(self.substitute(e, numbers), numbers) for e in (*f.args, *counts)}
            counted = [there[e] for e in counts if e.own is not None and {*factors_of(e.own)} <= {self.one, *marks}]
            first, second = sides = [there[side] for side in f.args]
            least = dict.fromkeys(counted, 1)
            if var.args[1] != 0 and (self._is_above(first, second, least) or self._is_above(second, first, least)):
                return self.zero
            met = self.eq(first, second)
            if {*met.args} <= {*counted} and len({e.args[:2] for e in met.args}) == 1:
                met = self.eq(*(e.args[2] for e in met.args))
            elif counts:
                continue
            if {*met.args} != {*sides}:
                return self.sum(var, self.mul(met, *(g for g in factors if g is not f)))
        return None

    def _told_by(self, e: Expr) -> tuple[Any, Expr, list[Expr]]:
        """What is told by numbers of which ``e`` is one, and these: a row by its place in a mask, a number by its digits."""
        if e.kind == "div":
            return e.args[1], e.args[0], [e, self.mod(*e.args)]
        return (e.args[0], e.args[2], self.true_place(*e.args[::2])) if e.kind == "nonzero" else (None, e, [])

    def tells(self, numbers: Iterable[Expr], var: Expr, marks: Sequence[Expr] = ()) -> bool:
        """True if of all that ``var`` may be, of which the marks are 1, no two have the same numbers: one is compared with one.

            ids[t, k]                       tells k, if ids are indices of a top-k along their last axis
            ids.t()[k, t]                   does not tell t: these are the choices of several tokens
            rows[t, k] * n + c              tells k where it tells c, which is below n
            rows[t, k] + c                  does not: 1 + 2 is 2 + 1
        """
        return self.met(var, marks, marks, [number for number in numbers if var in number.free and is_whole(number)]) is self.one

    def met(self, var: Expr, marks: Sequence[Expr], others: Sequence[Expr], numbers: Sequence[Expr] = ()) -> Expr:
        """How many of the rows ``var`` with some marks are where one with ``others`` is, and have its numbers."""
        other = {var: self.fresh((var, *numbers, *marks, *others), var.args[1])}
        known = [self.substitute(mark, other) for mark in others]
        theirs = [sides for f in known if f.kind == "eq" for sides in (f.args, f.args[::-1])]
        same = [self.eq(number, self.substitute(number, other)) for number in numbers]
        for f in marks:
            own, at = f.args if f.kind == "eq" and var in f.args[0].free else f.args[::-1] if f.kind == "eq" else (f, None)
            keys = [key for key, index in theirs if index is at and is_whole(own)]
            alike = self.substitute(own, other)
            same.append(self.eq(own, alike if alike in keys else keys[0]) if keys else f)
        return self.beside(self.sum(var, self.mul(*same)), known)

    def _is_above(self, a: Expr, b: Expr, floors: Floors) -> bool:
        """True if an integer is larger than another one, of which no running count is larger than the whole count."""
        gap = self.linear(-1, [(1, a), (-1, b)])
        is_open = all(var.args[0] > _BOUND for var in gap.free)  # a sum that is made here may have the name of one around it
        terms = gap.args[1] if gap.kind == "linear" and is_open else ()
        wholes = [(n, self.sum(*self.open(e)) if n == -1 and e.kind == "prefix" else e) for n, e in terms if is_count(e)]
        return len(wholes) == len(terms) > 0 and never_negative(self.linear(gap.args[0], wholes), floors)

    def counted(self, e: Expr, key: Expr, number: Expr) -> Expr:
        """``e`` where ``key`` is a number: of rows at their keys and running counts, those of the number are the key's."""

        def own(e: Expr) -> Expr | None:
            var, body = self.open(e) if e.kind == "sum" else (e, e)
            at = {f: other for f in factors_of(body) if f.kind == "eq" for n, other in (f.args, f.args[::-1]) if n is number}
            counts = (True for f in factors_of(body) if f.kind == "eq" for _ in subexpressions(f, lambda e: e.kind == "prefix"))
            known = at and any(counts)
            return self.sum(var, self.mul(*(self.eq(key, at[f]) if f in at else f for f in factors_of(body)))) if known else None

        return self._with(e, own)

    def _over_both(self, over: Callable[[Expr, Expr], Expr], var: Expr, body: Expr) -> Expr | None:
        """The sum ``over`` n = a C + b of what depends on a = n // C and b = n % C alone, as one over a and one over b."""
        if var.args[2] != "r":
            return None
        parts = set(subexpressions(body, lambda e: e.kind in ("div", "mod") and e.args[0] is var, over=var))
        sizes = {part.args[1] for part in parts}
        if len(sizes) != 1 and not (sizes and all(isinstance(n, int) for n in sizes)):
            return None
        size = min(sizes)
        wholes = {n: exact_quotient(n, size) if size != 0 else None for n in (*sizes, var.args[1])}
        if None in wholes.values():
            return None
        outer = self.fresh((body,), wholes[var.args[1]])
        inner = self.fresh((body, outer), size)
        in_both = {"div": lambda n: self.div(outer, n), "mod": lambda n: self.linear(0, [(size, self.mod(outer, n)), (1, inner)])}
        replaced = self.substitute(body, {part: in_both[part.kind](wholes[part.args[1]]) for part in parts})
        return None if var in replaced.free else over(outer, over(inner, replaced))

    def any(self, var: Expr, body: Expr) -> Expr:
        if var not in body.free:
            return body
        if len(factors_of(body)) > 1 and (only := self.only_terms(var, body)) is not None:
            return self.any(*only)  # of one_hot(ids, E).any(-1) it stays that it asks for ids
        return self._over_both(self.any, var, body) or self._close("any", var, body)

    def prefix(self, var: Expr, body: Expr, upto: Expr) -> Expr:
        """The running sum over ``var``; what is counted before a row is what is counted up to it, less the row itself."""
        row = self.linear(1, [(1, upto)])
        if upto.kind == "linear" and upto.args[0] == -1 and is_whole(body) and self.fits(row, var.args[1]):
            return self.linear(0, [(1, self.prefix(var, body, row)), (-1, self.substitute(body, {var: row}))])
        count = self._close("prefix", var, body, upto)
        if self.fits(upto, var.args[1]) and is_count(body):
            count.own = self.substitute(body, {var: upto})
        return count

    def _close(self, kind: str, var: Expr, body: Expr, *rest: Expr) -> Expr:
        """Bind ``var``, renamed after the binders inside ``body`` so that equal functions get equal names."""
        bound = self.var(_BOUND - body.height, *var.args[1:])
        assert bound is var or bound not in body.free, "a bound variable escaped"
        # Rebuilding what has its names already would rebuild each sum inside, and those inside it, twice.
        renamed = body if bound is var else self.substitute(body, {var: bound})
        return self._intern(kind, bound, renamed, *rest)

    def open(self, e: Expr) -> tuple[Expr, Expr]:
        """The variable and body of a binder, under a name that no other binder around or inside it takes."""
        found = self._opened.get(e)
        if found is None:
            bound, body = e.args[:2]
            var = self.var(_OPEN + _BOUND - bound.args[0], *bound.args[1:])
            found = self._opened[e] = var, self.substitute(body, {bound: var})
        return found

    def _without_permutation(self, var: Expr, body: Expr) -> Expr:
        """Take the summed rows in the order before a permutation of them, where that removes it."""
        permutes = subexpressions(body, lambda e: e.kind == "leaf" and e.args[0].is_permutation and e.args[1] == (var,), over=var)
        if (permuted := next(permutes, None)) is None or not same_size(permuted.args[0].shape[0], var.args[1]):
            return body
        reordered = self.substitute(body, {var: self.inverse(permuted.args[0], var)})
        return body if any(True for _ in subexpressions(reordered, lambda e: e.kind == "inverse")) else reordered

    def eq(self, a: Expr, b: Expr) -> Expr:
        if a is b and _is_number(a):
            return self.one
        if a.kind == "const" and b.kind == "const":
            return self.one if a.args[0] == b.args[0] else self.zero
        slots = (slot_of(a), slot_of(b)) if a.args[0] is b.args[0] else (None, None)
        alone = None not in slots and [(i, j) for i, j in zip(a.args[1], b.args[1], strict=True) if i is not j] == [slots]
        if alone and all(self.fits(slot, a.args[0].shape[a.args[0].choices_along]) for slot in slots):  # -1 is the last one
            return self.eq(*slots)
        if a.kind == b.kind == "inverse" and a.args[0] is b.args[0] and all(self.fits(e.args[1], self.extent(e)) for e in (a, b)):
            return self.eq(a.args[1], b.args[1])
        for one, other in ((a, b), (b, a)):
            is_place = is_choice(one) and any(True for _ in subexpressions(one, lambda e: e.kind == "prefix"))
            if is_place and self.eq(one.args[1][2], other) is self.zero:
                return self.mul(one.args[1][0], self.beside(self.eq(one.args[1][1], other), factors_of(one.args[1][0])))
        if "linear" in (a.kind, b.kind) and (solved := self._solved(a, b) or self._digit_by_digit(a, b)) is not None:
            return solved
        for number, index in ((a, b), (b, a)):
            if number is self.zero and index.kind == "call" and index.args[0] in ("xor", "abs"):
                return self.eq(*index.args[1], *([number] if index.args[0] == "abs" else []))
            below = self.extent(index) if number.kind == "const" and isinstance(number.args[0], int | float) else None
            if isinstance(below, int) and not 0 <= number.args[0] < below:
                return self.zero  # ids of a topk over E scores are not E
        return self._intern("eq", *sorted((a, b), key=lambda e: e.uid))

    def _solved(self, a: Expr, b: Expr) -> Expr | None:
        """``a = b`` without what both sides have, if one integer or two are left: ``ids - 2 = 0`` is ``ids = 2``."""
        if not (is_whole(a) and is_whole(b)):
            return None
        difference = self.linear(0, [(1, a), (-1, b)])
        if difference.kind != "linear":
            return self.eq(difference, self.zero)
        constant, ((scale, atom), *others) = difference.args
        if type(scale) is not int or type(constant) is not int:
            return None
        if not others:
            return self.zero if constant % scale else self.eq(atom, self.const(-constant // scale))
        if constant == 0 and len(others) == 1 and others[0][0] == -scale:
            return self.eq(atom, others[0][1])
        return None

    def _digit_by_digit(self, a: Expr, b: Expr) -> Expr | None:
        """``a = b``, no constants: ``C e + c = C n + m`` is ``e = n`` and ``c = m``, if ``c`` and ``m`` are below C."""
        for size, _ in (term for e in (a, b) if e.kind == "linear" and "const" not in (a.kind, b.kind) for term in e.args[1]):
            split = self._split(a, size), self._split(b, size)
            if None not in split and (a, b) not in (digits := [*zip(*split, strict=True)]):
                return self.mul(*(self.eq(*pair) for pair in digits))
        if {a.kind, b.kind} == {"linear"} and a.args[0] == b.args[0] != 0:
            return self.eq(*(self.linear(0, e.args[1]) for e in (a, b)))
        return None

    def call(self, name: str, args: tuple[Expr, ...], *params: Any) -> Expr:
        if name == "where" and (args[0] in (self.zero, self.one) or is_indicator(args[0])):
            return self._choice(*args)
        is_of_row = (name == "div" and is_hidden(args[1])) or (name == DROPOUT and is_hidden(args[0]))
        factors = factors_of(args[0]) if is_of_row and args[0].kind != "const" else ()
        outside = [f for f in factors if not is_hidden(f) and (f.kind != "const" or is_moderate(f.args[0]))]
        if outside:  # what else scales a row is a factor of the result
            return self.mul(*outside, self.call(name, (self.mul(*(f for f in factors if f not in outside)), *args[1:]), *params))
        return self._intern("call", name, args, params)

    def _choice(self, mask: Expr, kept: Expr, other: Expr) -> Expr:
        """``kept`` where a mask is 1, else ``other``; each as the mask tells: a count that is below C is its own remainder."""
        marks = factors_of(mask)
        told = dict.fromkeys(marks, self.one)
        ends = [(number, end.args[0]) for number, end in (f.args[1] for f in marks if is_order(f)) if end.kind == "const"]
        for number in (self.linear(-1, [(1, e)]) for e in subexpressions(kept, lambda e: e.kind == "prefix")):
            ends.append((number, self.extent(number, dict.fromkeys(marks, 1))))
        for number, end in ends:
            count = next((e for _, e in number.args[1] if e.kind == "prefix"), None) if number.kind == "linear" else None
            if count is not None and not isinstance(end, float | None) and self.fits(number, end, marks):
                told.setdefault(count, self.linear(0, [(1, self.mod(number, end)), (1, count), (-1, number)]))
        kept, other = self.substitute(kept, told), self.substitute(other, {mask: self.zero})
        if mask is self.one or kept is other:
            return kept
        return other if mask is self.zero else self._intern("call", "where", (mask, kept, other), ())

    def scaled(self, number: float, e: Expr) -> Expr:
        """``number * e`` as one factor, out of which no sum takes the number."""
        return self.call(SCALED, (e,), number)

    def unscaled(self, e: Expr) -> Expr:
        """``e``, a product if it is one that was ``scaled``."""
        return self.mul(self.const(e.args[2][0]), *e.args[1]) if e.kind == "call" and e.args[0] == SCALED else e

    def detached(self, e: Expr) -> Expr:
        """``e`` without gradient: a product of factors without, a sum of terms without; what has none anyway stays as it is.

            (rows * score).detach() = rows.detach() * score.detach()
        """
        if is_integer(e) or is_count(e) or e.kind in ("const", "var", "distinct") or (e.kind == "call" and e.args[0] == DETACH):
            return e
        if e.kind in ("add", "mul", "sum") or (e.kind == "cast" and e.args[0].is_floating_point):
            return self._rebuild(e, self.detached)
        return self.call(DETACH, (e,))

    def cast(self, dtype: Any, e: Expr) -> Expr:
        """``e`` rounded: (kept * score).to(dtype) is kept * score.to(dtype), but what compares a score is part of it."""
        told = (f for f in factors_of(e) if is_indicator(f) and (f.kind != "call" or all(map(is_whole, f.args[1]))))
        marks = [*told] if dtype.is_floating_point else []
        e = self.mul(*(f for f in factors_of(e) if f not in marks)) if marks else e
        number = stored_number(e.args[0], dtype) if e.kind == "const" else None
        return self.mul(*marks, self._intern("cast", dtype, e) if number is None else self.const(number))

    def group(self, var: Expr, counts: Expr, row: Expr) -> Expr:
        return self._resolve_group(self._close("group", var, counts, row))

    # Substitution.

    def substitute(self, e: Expr, replace: Mapping[Expr, Expr]) -> Expr:
        """``e`` with expressions replaced.

        A binder is named after the binders inside it. A replacement that binds may change which name that is: while it is
        put in, the variable of a binder around it has a name that nothing else has.
        """
        memo: dict[Expr, Expr] = dict(replace)
        binds = any(new.height for new in replace.values())
        # Anything but a variable may stand inside of binders of its own variables.
        variables = frozenset(replace) if all(old.kind == "var" for old in replace) else None

        def visit(e: Expr) -> Expr:
            found = memo.get(e)
            if found is None and variables is not None and variables.isdisjoint(e.mentioned):
                return e
            if found is None:
                if e.kind in BINDERS and e.args[0] in replace:  # shadowed: leave the bound variable alone
                    outer = {key: value for key, value in replace.items() if key is not e.args[0]}
                    found = self.substitute(e, outer)
                elif e.kind in BINDERS and binds:
                    bound, body, *rest = e.args
                    used = (v.args[0] for own in (e, *replace, *replace.values()) for v in own.free)
                    var = self.var(max((_INSIDE, *used)) + 1, *bound.args[1:])
                    found = getattr(self, e.kind)(var, visit(self.substitute(body, {bound: var})), *map(visit, rest))
                else:
                    found = self._rebuild(e, visit)
                memo[e] = found
            return found

        return visit(e)

    def _rebuild(self, e: Expr, visit: Callable[[Expr], Expr]) -> Expr:
        """``e`` with its parts as ``visit`` gives them."""
        parts = _mapped(e.args, visit)
        if parts == e.args:
            return e
        if e.kind != "call":
            return getattr(self, e.kind)(*parts)
        name, operands, params = parts
        made = self.call(name, operands, *params)
        return self.mul(made) if is_bound(made) else made


def _mapped(args: tuple, visit: Callable[[Expr], Expr]) -> tuple:
    """Arguments with the expressions among them as ``visit`` gives them, in tuples as well."""
    return tuple(visit(arg) if isinstance(arg, Expr) else _mapped(arg, visit) if isinstance(arg, tuple) else arg for arg in args)


def _limit(operands: tuple[Expr, ...], kind: str) -> None:
    if sum(len(e.args) if e.kind == kind else 1 for e in operands) > MAX_OPERANDS:
        raise TooLarge


def _is_number(e: Expr) -> bool:
    """True if it equals itself: NaN does not."""
    return is_whole(e) or (e.kind == "const" and e.args[0] == e.args[0]) or (e.kind == "cast" and _is_number(e.args[1]))
