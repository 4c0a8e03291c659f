"""Which assertions of a graph on numbers of the host hold whatever the data are: they may go with a layer, any other stays.

    rows[: counts[0]]                           Dynamo asserts that a slice has no more rows than there are
    torch.bincount(ids, minlength=E)            and that there are E counts, of ids of experts
    assert sum(counts) == ids.numel()           so does the program, of counts of all ids
    assert counts[0] <= capacity                stays: it fails where an expert has more

Nothing is believed that Dynamo learnt of a symbol, since it learns from assertions. A size is what its operator gives: a mask
selects from none to all of its elements. A number that a tensor holds is known where it is a count.
"""

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.evaluate.groups import sum_of_counts, written_out
from moeblaze_ops.lowering.graph.effects import ASSERTS
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import GraphView, Value, target_name
from moeblaze_ops.lowering.graph.selected_rows import before_rows
from moeblaze_ops.lowering.index_notation.expr import Expr, subexpressions
from moeblaze_ops.lowering.index_notation.indicators import is_count
from moeblaze_ops.lowering.index_notation.number_ranges import never_negative
from moeblaze_ops.lowering.obligations.ids_in_range import natural_number

Atom: TypeAlias = Expr | sympy.Symbol

_OF_NUMBERS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg, "eq": sympy.Eq, "ne": sympy.Ne,
    "lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge, "and_": sympy.And,
}  # fmt: skip
_SUMS = ("sym_sum", "sum")


def proven_assertions(view: GraphView) -> set[fx.Node]:
    """The assertions of a graph that hold whatever the data are; ``view`` is one of sizes as they were made."""
    assertions = [node for node in view.position if target_name(node) in ASSERTS]
    if not assertions:
        return set()
    known = _Known(view.of_numbers)
    return {node for node in assertions if all(map(known.holds, known.claims(node)))}


class _Known:
    """What is known of the numbers of a graph."""

    def __init__(self, view: GraphView) -> None:
        self.view, self.evaluator = view, Evaluator()
        self.read: dict[sympy.Symbol, fx.Node] = {}  # numbers that are elements of tensors
        self.masks: dict[Atom, Value | None] = {}  # sizes, as the number of true elements of masks where that is known
        self.lengths: dict[Atom, tuple[int, int | None]] = {}  # sizes that are never less, or more where that is known
        self.environment: Any = None
        for node in view.position:
            if isinstance(fake := fake_of(node), torch.SymInt):
                self.environment = fake.node.shape_env
            if target_name(node) in ("item", "wrapped_item") and isinstance(fake, torch.SymInt):
                self.read.setdefault(_made_as(fake), node)
            elif node.op != "output":
                self._find_masks(node)
            if target_name(node) == "bincount" and isinstance(fake, torch.Tensor):
                self.lengths[_made_as(fake.shape[0])] = self._numbers_counted(node)
        self.evaluator.learn_largest(view.numbers)
        largest = self.evaluator.algebra.largest.items()
        self.lengths |= {size: (0, None) for size, (*_, counts) in largest if never_negative(counts)}
        held = {size: self.evaluator.try_element(value) for size, value in view.numbers.items() if not value.shape}
        self.lengths |= {size: e.args[2] for size, e in held.items() if e is not None and _is_at_least(e)}
        self._counts: dict[sympy.Symbol, list[Expr] | None] = {}

    def _find_masks(self, node: fx.Node) -> None:
        """The sizes that a node makes, with what it selects by, and where in memory it starts."""
        values = tree_leaves(self.view.value(node))
        for fake, value in zip(tree_leaves(fake_of(node)), values, strict=False):
            if not isinstance(fake, torch.Tensor) or not isinstance(value, Value) or fake.layout is not torch.strided:
                continue
            for axis, size in enumerate((*fake.shape, fake.storage_offset())):
                symbol = _made_as(size)
                if isinstance(symbol, sympy.Symbol) and free_unbacked_symbols(symbol):
                    self.masks.setdefault(symbol, _selecting(value, axis) if axis < fake.dim() else None)

    def _numbers_counted(self, bincount: fx.Node) -> tuple[int, int | None]:
        """``torch.bincount(ids, minlength=E)`` gives E counts at least, and no more if ids are numbers of experts.

        Those that a graph is given are, as for a match.
        """
        given = bincount.args[2] if len(bincount.args) > 2 else bincount.kwargs.get("minlength", 0)
        fewest = given if isinstance(given, int) else 0
        ids = self.view.value_at(bincount.args[0], self.view.position[bincount]) if bincount.args else None
        element = natural_number(self.evaluator, ids)
        if element is None:
            return fewest, None
        most = self.evaluator.algebra.extent(element)
        if most is None:
            return fewest, fewest if element.kind == "leaf" else None
        return fewest, max(fewest, most) if isinstance(most, int) else None

    # What is said.

    def claims(self, assertion: fx.Node) -> Iterator[sympy.Basic | None]:
        """What an assertion says, as relations of symbols; None where that is not known."""
        name, says = target_name(assertion), assertion.kwargs
        first = next(iter(assertion.args), says.get("cond"))
        if name in ("_assert_scalar", "_check"):
            yield self._number(first)
        elif name in ("_check_is_size", "sym_constrain_range", "sym_constrain_range_for_size"):
            number = self._number(first)
            least = says.get("min", None if name == "sym_constrain_range" else 0)
            for relation, bound in ((sympy.Ge, least), (sympy.Le, says.get("max"))):
                if bound is not None:
                    yield None if number is None else relation(number, bound)
        else:
            yield None

    def _number(self, of: Any) -> sympy.Basic | None:
        """A number or a flag of the graph in terms of the symbols that its operators made, whatever they were replaced by."""
        if not isinstance(of, fx.Node):
            return sympy.sympify(of) if isinstance(of, int) else None
        name, fake = target_name(of), fake_of(of)
        operands = [fake_of(operand) for operand in of.all_input_nodes]
        if not operands or not all(isinstance(operand, (int, torch.SymInt, torch.SymBool)) for operand in operands):
            if name == "sym_size":
                fake = fake_of(of.args[0]).shape[of.args[1]]  # torch 2.11 gives what it learnt for the size itself
            return _made_as(fake) if isinstance(fake, torch.SymInt) else None  # of a tensor, or an input
        numbers = [self._number(arg) for arg in (of.args[0] if name in _SUMS else of.args)]
        if None in numbers or of.kwargs or not (name in _OF_NUMBERS or name in _SUMS):
            return None
        return sum(numbers, sympy.Integer(0)) if name in _SUMS else _OF_NUMBERS[name](*numbers)

    # Whether it is so.

    def holds(self, claim: sympy.Basic | None) -> bool:
        if isinstance(claim, sympy.And):
            return all(map(self.holds, claim.args))
        if not isinstance(claim, sympy.core.relational.Relational):
            return claim == sympy.true
        difference = claim.lhs - claim.rhs
        if isinstance(claim, sympy.Eq):
            equal = any(form == (0, {}) for form in self._forms(difference))
            return equal or (self._is_at_least(0, difference) and self._is_at_least(0, -difference))
        if isinstance(claim, sympy.Ne):
            return self._is_at_least(1, difference) or self._is_at_least(1, -difference)
        larger = difference if isinstance(claim, (sympy.Ge, sympy.Gt)) else -difference
        return self._is_at_least(int(isinstance(claim, (sympy.Gt, sympy.Lt))), larger)

    def _is_at_least(self, least: int, number: sympy.Expr) -> bool:
        return any(bool(self._least(*form) >= least) for form in self._forms(number))

    def _forms(self, number: sympy.Expr) -> Iterator[tuple[sympy.Expr, dict[Atom, int]]]:
        """A number as one that does not depend on data, and how often sizes are added to it, or counts.

        The last has the number of ids in place of counts of all numbers that they may be.
        """
        rest, sizes = _apart(number)
        yield rest, sizes
        rest, counted = self._in_counts(rest, sizes)
        yield rest, counted
        rest, left = self._added_up(rest, counted)
        yield self._in_counts(*_apart(rest, left))  # there are as many ids as a mask selects

    def _in_counts(self, rest: sympy.Expr, sizes: dict[Atom, int]) -> tuple[sympy.Expr, dict[Atom, int]]:
        """The same number with counts in place of the sizes that are sums of some."""
        counted = Counter[Atom]()
        for size, times in sizes.items():
            counts = self._count(size)
            for atom in [size] if counts is None else counts:
                if isinstance(atom, Expr) and atom.kind == "const":
                    rest += times * atom.args[0]
                else:
                    counted[atom] += times
        return rest, {atom: times for atom, times in counted.items() if times}

    def _added_up(self, rest: sympy.Expr, times: dict[Atom, int]) -> tuple[sympy.Expr, dict[Atom, int]]:
        algebra, left = self.evaluator.algebra, Counter(times)
        runs: dict[tuple, dict[int, Expr]] = {}
        for atom in times:
            if isinstance(atom, Expr) and (run := self.evaluator.numbered(atom)) is not None:
                runs.setdefault((run.var, run.counts), {})[run.number] = atom
        for (var, counts), found in runs.items():
            groups = var.args[1]
            total = sum_of_counts(algebra, var, counts, groups) if isinstance(groups, int) else None
            if total is not None and found.keys() <= set(range(groups)):
                each = min(times[found[e]] if e in found else 0 for e in range(groups))
                for e in range(groups) if each else ():
                    left[found.get(e) or algebra.substitute(counts, {var: algebra.const(e)})] -= each
                rest += each * total
        return sympy.expand(rest), {atom: n for atom, n in left.items() if n}

    def _least(self, rest: sympy.Expr, times: dict[Atom, int]) -> float | sympy.Expr:
        """The smallest that a sum of counts and sizes may be, as far as is known."""
        for atom, factor in times.items():
            bound = self._least_of(atom) if factor > 0 else self._most_of(atom)
            if bound is None:
                return -sympy.oo
            rest += factor * bound
        rest = sympy.expand(rest)
        return rest if rest.is_number or self.environment is None else self.environment.bound_sympy(rest).lower

    def _least_of(self, atom: Atom) -> int | None:
        """Nothing is known of an element of a tensor that is no count; sizes and offsets are not negative."""
        known = isinstance(atom, Expr) or atom in self.lengths or (atom in self.masks and atom not in self.read)
        return self.lengths.get(atom, (0, None))[0] if known else None

    def _most_of(self, atom: Atom) -> sympy.Expr | None:
        if isinstance(atom, Expr):
            return self._largest(atom)
        if atom in self.lengths:
            return self.lengths[atom][1]
        mask = self.masks.get(atom)
        return None if mask is None else sympy.prod(map(sympy.sympify, mask.shape))

    def _count(self, symbol: Atom) -> list[Expr] | None:
        """The counts that a number is the sum of, None where it is something else."""
        if not isinstance(symbol, sympy.Symbol):
            return None
        if symbol not in self._counts:
            terms = self._counted(symbol)
            terms = None if terms is None else list(map(self._added, terms))
            known = terms is not None and all(is_count(term) or _is_whole(term) for term in terms)
            self._counts[symbol] = terms if known else None
        return self._counts[symbol]

    def _counted(self, symbol: sympy.Symbol) -> list[Expr] | None:
        evaluator, view = self.evaluator, self.view
        if (read := self.read.get(symbol)) is not None:
            held = view.value_at(read.args[0], view.position[read])
            element = evaluator.try_element(held) if isinstance(held, Value) else None
            return None if element is None else self._summands(element)
        if (mask := self.masks.get(symbol)) is None:
            return None
        if mask.op == "between":
            count = evaluator.selected(mask)
        elif (count := evaluator.try_element(mask)) is not None:
            numbers = {side for hit in subexpressions(count, lambda e: e.kind == "eq") for side in hit.args}
            axes = [i for i in reversed(evaluator.variables(mask)) if i.kind == "var"]
            for axis in sorted(axes, key=numbers.__contains__):  # what is compared with ids comes last, for its summands
                count = evaluator.algebra.sum(axis, count)
            return self._summands(count)
        return None if count is None else [count]

    def _added(self, count: Expr) -> Expr:
        """A count of tokens as that of their slots, where no token chooses an expert twice.

            any_k [ids[t, k] = e]       sum_k [ids[t, k] = e], of ids of a topk
        """
        algebra = self.evaluator.algebra
        if count.kind not in ("sum", "any"):
            return count
        slot, body = algebra.open(count)
        if count.kind == "sum":
            return algebra.sum(slot, self._added(body))
        return algebra.sum(slot, body) if algebra.tells((), slot, [body]) else count

    def _largest(self, count: Expr) -> sympy.Expr:
        """As many as what a count is the sum over."""
        if count.kind in ("sum", "prefix"):
            var, body = (algebra := self.evaluator.algebra).open(count)
            return self._largest(body) * (1 if algebra.tells((), var, [body]) else sympy.sympify(var.args[1]))
        return sympy.prod(map(self._largest, count.args)) if count.kind == "mul" else sympy.Integer(1)

    def _summands(self, e: Expr) -> list[Expr]:
        """The terms of a sum of counts, those of one over all numbers one by one.

            counts.sum()        sum_e sum_n [ids[n] = e]
            chosen_ET.sum()     the same
        """
        if e.kind == "sum" and self.evaluator.numbered(e) is None:
            number, body = self.evaluator.algebra.open(e)
            compared = any(number in hit.args for hit in subexpressions(body, lambda inner: inner.kind == "eq"))
            if compared and isinstance(size := number.args[1], int):
                return [self.evaluator.algebra.substitute(body, {number: self.evaluator.algebra.const(i)}) for i in range(size)]
        return written_out(self.evaluator.algebra, e)


def _apart(number: sympy.Expr, others: dict[Atom, int] | None = None) -> tuple[sympy.Expr, dict[Atom, int]]:
    """A number as one that does not depend on data, and how often sizes are added to it, beside ``others``."""
    rest, sizes = sympy.expand(number), Counter[Atom](others)
    for symbol, factor in rest.as_coefficients_dict().items():
        if free_unbacked_symbols(symbol):
            sizes[symbol] += factor
            rest -= factor * symbol
    return rest, {size: times for size, times in sizes.items() if times}


def _selecting(value: Value, axis: int) -> Value | None:
    """The mask of whose true elements an axis has as many: of places, of what they select, or of places side by side."""
    made_of = [value] if value.op == "nonzero" else tree_leaves(value.args)
    if value.op == "index":
        made_of = value.args[1][axis : axis + 1]
    masks = {part.args[0] for part in made_of if isinstance(part, Value) and part.op == "nonzero"}
    if len(masks) != 1:
        return None
    (mask,) = masks
    return before[0] if (before := before_rows(mask)) is not None else mask


def _is_at_least(e: Expr) -> bool:
    """True if a number is another one, or one of Python's where that is more: ``max(number, C)``."""
    return e.kind == "call" and e.args[0] == "clamp" and type(e.args[2][0]) is int and e.args[2][1] is None


def _is_whole(e: Expr) -> bool:
    return e.kind == "const" and e.args[0] % 1 == 0


def _made_as(number: Any) -> sympy.Basic:
    """What Dynamo called a number when it was made, before anything was learnt of it."""
    return number.node._expr if isinstance(number, torch.SymInt) else sympy.sympify(number)
