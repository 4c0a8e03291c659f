"""True if the work of a branch on data does nothing where its condition says that it is not to be done.

`tracing.branches` traces the work and leaves the condition. It is dropped where the elements of all that the work writes, and
of all that is another tensor afterwards, are what they were before, once everything that the condition says is zero is zero:

    if (ids == e).any():                    proven: without a token, no row is added
        out[rows] += expert(x[rows])
    if (ids == e).any():                    refused: one is added to all rows
        out += 1
"""

import copy
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.evaluate.depth import accumulators
from moeblaze_ops.lowering.evaluate.evaluator import Evaluator, Unroll
from moeblaze_ops.lowering.forms.splits import first_rows
from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.effects import has_effect
from moeblaze_ops.lowering.graph.fake_values import fake_of, has_storage, needs_gradient, storage_of
from moeblaze_ops.lowering.graph.functional_view import (
    GraphView,
    NotCanonical,
    Value,
    graphs_of,
    inplace_name,
    target_name,
    written_nodes,
)
from moeblaze_ops.lowering.graph.sizes import Size, size_of
from moeblaze_ops.lowering.index_notation.expr import Expr, Indices
from moeblaze_ops.lowering.obligations.check import line_of, name_of, tells_of_data
from moeblaze_ops.lowering.obligations.checked_ids import assert_in_range, checked_ids
from moeblaze_ops.lowering.obligations.known_sizes import cut_of, known_sizes
from moeblaze_ops.lowering.obligations.markers import branch_begins, branch_ends, branch_forks, hit_number, some_taken
from moeblaze_ops.lowering.obligations.zero import Zeros, all_zero, summed, zero_where
from moeblaze_ops.lowering.undoable_edits import Edits


@dataclass
class Discharged:
    """What came of the branches of a graph: why one is not proven, and which node shows it, or what runs unasked now."""

    reason: str | None = None
    at: fx.Node | None = None
    work: dict[fx.Node, fx.Node] = field(default_factory=dict)  # each node with the marker of its branch


def discharge(gm: fx.GraphModule) -> Discharged:
    """Prove all branches of a graph and drop what is left of them; the graph is as it was where one is not proven."""
    graphs = graphs_of(gm)
    result, views = Discharged(), dict[fx.Graph, GraphView]()
    for graph in graphs:
        begins = [node for node in graph.nodes if node.target is branch_begins]
        if not begins:
            continue
        view = views[graph] = GraphView(graph, TABLE)
        off = any(map(view.is_gradient_off, graph.nodes))
        known, numbers = _Known(view), _Known(view.of_numbers) if off else None
        if (write := _write_to_hits(view)) is not None:
            why = f"{name_of(write)} writes to the numbers of experts that a loop goes over"
            return Discharged(f"{_line(write)}: {why}", write)
        for begin in begins:
            reason = _unproven(known, numbers, begin)
            if reason is not None:
                return Discharged(f"{_line(begin)}: {reason}", begin)
            (end,) = begin.users
            for node in _from(begin, end):
                if node.target is not branch_begins:
                    result.work.setdefault(node, begin)
    for graph in graphs:
        _erase(graph, _assert_ids(views[graph], result.work) if graph in views else {})
    result.work = {node: begin for node, begin in result.work.items() if not node._erased}
    return result


def may_share_memory(gm: fx.GraphModule) -> bool:
    """True if two of the tensors that a graph returns, or is given, share memory where the work of branches is not done.

        out = start
        if len(rows) > 0: out = out + y
        return out, start                           and not     return out + x, start
    """

    def shares(graph: fx.Graph) -> bool:
        same: dict[int | None, set[int | None]] = {}  # whose memory a tensor's may be in the program
        for end in graph.find_nodes(op="call_function", target=branch_ends):
            for pair in zip(*end.args[1:3], strict=True):
                before, after = (storage_of(operand) if isinstance(operand, fx.Node) else None for operand in pair)
                same.setdefault(after, {after}).update(same.get(before, {before}))
        returned = graph.output_node().all_input_nodes
        held = {storage_of(node) for node in (*returned, *graph.find_nodes(op="placeholder"))} - {None}
        memory = [same.get(own, {own}) - {None} for own in held]
        return sum(map(len, memory)) > len(set().union(*memory))

    return any(map(shares, graphs_of(gm)))


def _from(node: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    """A node and those behind it, up to the one before ``end``."""
    while node is not end:
        yield node
        node = node.next


def _write_to_hits(view: GraphView) -> fx.Node | None:
    """What writes to a tensor of hits after a loop over it has begun: elements are views of it.

        for e in hit: e += 1                    found: it adds one to an element of ``hit``
    """
    begun: dict[fx.Node, int] = {}
    for node, at in view.position.items():
        if node.target is hit_number:
            begun[node] = at
            begun.setdefault(node.args[0], at)
    first = {alias: at for node, at in begun.items() for alias in view.aliases(node)}
    return next((write for write, target in view.all_writes() if view.position[write] > first.get(target, math.inf)), None)


def always_taken(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of ``gm`` that does the work of each branch: what the program computes, where the branches can be discharged."""
    taken = copy.deepcopy(gm)
    for graph in graphs_of(taken):
        _erase(graph)
    return taken


def _assert_ids(view: GraphView, work: Collection[fx.Node]) -> dict[fx.Node, tuple[fx.Node, Edits]]:
    """Assertions of what operators check of ids, each with its operator and its edits: conditions may be all that reads it."""
    apart = {*work, *_without_work(view.graph)}
    checked = checked_ids(view, [node for node in view.position if node not in apart])
    added = [(Edits(checks.node.graph), checks) for checks in checked]
    return {assert_in_range(edits, checks): (checks.node, edits) for edits, checks in added}


def _without_work(graph: fx.Graph) -> set[fx.Node]:
    """What stands on the sides without work."""
    begins = [node for node in graph.nodes if node.target is branch_begins and node.args[2] is not None]
    return {node for begin in begins for node in _from(begin.args[2], begin)}


def _erase(graph: fx.Graph, assertions: dict[fx.Node, tuple[fx.Node, Edits]] | None = None) -> None:
    """Drop the markers, what stands on the sides without work, and what only the conditions read.

    Of ``assertions`` those stay whose operators go.
    """
    markers = (branch_forks, branch_begins, branch_ends)
    other = _without_work(graph)
    assertions = assertions or {}
    read: set[fx.Node] = set()
    for node in [node for node in reversed(graph.nodes) if node.target in markers]:
        read.update(other for other in node.all_input_nodes if other.target not in markers)
        if node not in other:
            graph.erase_node(node)
    for node in graph.nodes:  # elements of hits, and what is made of them alone
        if node.target is hit_number or (node.all_input_nodes and read.issuperset(node.all_input_nodes)):
            read.add(node)
    for node in reversed(list(graph.nodes)):
        if node._erased:
            continue
        is_call = node.op in ("call_function", "call_method")
        for_nothing = is_call and not has_effect(node) and (node in read or target_name(node) == "cpu")
        unread = node in other or tells_of_data(node) or for_nothing
        if unread and not node.users and node not in assertions:
            read.update(node.all_input_nodes)
            graph.erase_node(node)
    for operator, added in assertions.values():
        if not operator._erased and not written_nodes(operator):  # a write that nobody reads goes later
            added.undo()
    graph.owning_module.recompile()


class _Known:
    """What all branches of a graph are proven by."""

    def __init__(self, view: GraphView) -> None:
        self.view, self.evaluator, self.writes = view, Evaluator(), view.all_writes()
        self.written_at = [view.position[write] for write, _ in self.writes]
        self.masks: dict[Size, dict[Value, None]] = {}  # of whose true elements there are so many
        for value in view._pool.values():
            if value.op == "nonzero":
                self.masks.setdefault(value.shape[0], {})[value.args[0]] = None

    @cached_property
    def sizes(self) -> dict[sympy.Symbol, sympy.Expr]:
        return known_sizes(self.view)


def _unproven(known: _Known, numbers: _Known | None, begin: fx.Node) -> str | None:
    """Why the work that begins here may do something where it is not asked for.

    Of how many rows there are, ``numbers`` says more where gradients are switched off, as these make no difference to it. Where
    they are for all of the work, it says what tensors hold that have no gradient, and what is written.
    """
    ends = [node for node in begin.users if node.target is branch_ends]
    if len(ends) != 1:
        return "its two ways do not join in one graph"
    (end,) = ends
    _, _, fork = begin.args
    proof = _Proof(known, begin, end, fork)
    says_of_rows = proof.assume()
    differs = _difference(proof, known, numbers, begin, end) if says_of_rows or proof.most else ""
    if differs is None or says_of_rows or differs == _NUMBER:
        return differs
    return "the condition does not say whether there are rows, as `if len(rows) > 0:` and `if mask.any():` do"


_NUMBER = "a number of Python's is another where the condition is false: count in a tensor, `n += (mask.sum() - C).clamp(min=0)`"


def _difference(proof: "_Proof", known: _Known, numbers: _Known | None, begin: fx.Node, end: fx.Node) -> str | None:
    """Say what may be another where the work is not done, by what the condition says; None if nothing."""
    written, fork = proof, begin.args[2]
    if numbers is not None and (beside := _Proof(numbers, begin, end, fork)).assume():
        proof.zeros.beside = beside.zeros
        written = beside if all(map(known.view.is_gradient_off, _from(fork or begin, end))) else proof
    for before, after in zip(*end.args[1:3], strict=True):
        graded = any(isinstance(operand, fx.Node) and needs_gradient(operand) for operand in (before, after))
        if not (proof if graded else written).same_operand(before, after):
            is_number = isinstance(after, fx.Node) and isinstance(fake_of(after), torch.SymInt)
            return _NUMBER if is_number else f"{name_of(after)} may be another where the condition is false"
    for part in end.args[3]:
        if not proof.is_empty(part):
            return f"{name_of(part)}, which is appended to a list, may have rows where the condition is false"
    if fork is not None and (reason := written.changed_buffer(proof.fork, proof.first) or proof.other_effect()) is not None:
        return reason
    return written.changed_buffer(proof.first, proof.last)


class _Proof:
    """The proof of one branch; ``fork``, ``first`` and ``last`` are the positions of its markers."""

    def __init__(self, known: _Known, begin: fx.Node, end: fx.Node, fork: fx.Node | None):
        view = self.view = known.view
        self.begin, self.end, self.writes, self.written_at = begin, end, known.writes, known.written_at
        self.first, self.last = view.position[begin], view.position[end]
        self.fork = self.first if fork is None else view.position[fork]
        self.evaluator, self.masks, self.known = known.evaluator, known.masks, known
        self.zeros = Zeros(self.evaluator.algebra, self._elements)
        self.most: dict[Size, int] = {}  # what sizes are not above

    # What the condition says.

    def assume(self) -> bool:
        """Learn what is zero without the work, if anything is, and which sizes are bounded."""
        return self._assume(*self.begin.args[:2])

    def _assume(self, condition: Any, works_if: Any) -> bool:
        if condition.target is some_taken:  # where one was, nothing is known of any of them
            ways, truth = condition.args
            for only, *others in ways if truth is works_if else ():
                if not others:
                    self._assume(*only)
            return True
        fake, known = fake_of(condition), False
        if isinstance(fake, torch.Tensor):
            element = self._element(self.view.value_at(condition, self.fork))
            zeros = [] if element is None else zero_where(self.evaluator.algebra, element, not works_if)
            known = element is not None and element.kind == "const"  # as that an expert is chosen which no id can be
        else:
            zeros = self._zero_numbers(fake.node.expr, not works_if)
            self.most |= self._bounded(fake.node.expr, not works_if)
        for zero in zeros:
            is_size = not isinstance(zero, Expr)
            elements = map(self._element, self.masks.get(zero, ())) if is_size else [zero]
            for element in filter(None, elements):
                self.zeros.add(element)
                known = True
            if is_size and known:
                self.zeros.add_size(zero)
        return known

    def _bounded(self, condition: sympy.Basic, truth: bool) -> dict[Size, int]:
        """The largest number that the size of what a mask selects may have, where a comparison of it is ``truth``."""
        if not isinstance(condition, (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)):
            return {}
        known = condition if truth else sympy.Not(condition)
        least = known.gts - known.lts - int(isinstance(known, (sympy.Lt, sympy.Gt)))
        bounds = {size: least + size for size in least.free_symbols if size in self.masks}
        return {size: int(bound) for size, bound in bounds.items() if bound.is_Integer}

    def _zero_numbers(self, condition: sympy.Basic, truth: bool) -> list[Expr | Size]:
        """Counts, and sizes of what masks select, that are zero where a comparison of their sum with a number is ``truth``.

            ends[e] == ends[e - 1]          of running sums: what is added in between is
        """
        if not isinstance(condition, sympy.core.relational.Relational):
            condition = sympy.Ne(condition, 0)
        constant, terms = self._terms(condition.lhs - condition.rhs)
        sizes = {s: times for s, times in constant.as_coefficients_dict().items() if s in self.masks}
        constant -= sum(times * size for size, times in sizes.items())
        found = all_zero(condition.func, constant, {**terms, **sizes}, truth) if constant.is_Integer else []
        return [part for zero in found for part in dict.fromkeys((zero, cut_of(zero)[0]))]

    def _terms(self, size: Size) -> tuple[sympy.Expr, Counter]:
        """A size as a constant, and how often each count is added to it."""
        constant, terms = sympy.Integer(0), Counter[Expr]()
        for symbol, times in sympy.expand(sympy.sympify(size)).as_coefficients_dict().items():
            element = self._element(self.view.numbers[symbol]) if symbol in self.view.numbers else None
            if element is None or not times.is_Integer:
                constant += times * symbol
                continue
            number, added = summed(self.evaluator.algebra, element)
            constant += times * number
            for term, number in added.items():
                terms[term] += int(times) * number
        return constant, Counter({term: times for term, times in terms.items() if times})

    def _elements(self, size: Size) -> Iterator[Expr]:
        """Any elements of the masks of whose true elements there are ``size``."""
        for mask in self.masks.get(size, ()):
            element = self.evaluator.in_group(mask) if mask.op == "between" else self._element(mask)
            if element is not None:
                yield element

    # What is to be the same.

    def same_operand(self, before: fx.Node | int, after: fx.Node | int) -> bool:
        if not all(isinstance(n, fx.Node) and isinstance(fake_of(n), torch.Tensor) for n in (before, after)):
            return self._same_number(_number(before), _number(after))
        one, other = self.view.value_at(before, self.first), self.view.value_at(after, self.last)
        are_first, layout = self._are_first_rows(one, other), self._layout(before)
        if self._is_shared(before, after) or not (are_first or layout == self._layout(after)):
            return False
        return are_first or 0 in layout[2] or self._same(one, other)

    def _layout(self, node: fx.Node) -> tuple:
        """How a tensor lies: of no rows, as ``x.new_empty(0, D)`` does, where the condition says that there are none."""
        fake = fake_of(node)
        return fake.dtype, fake.device, *(tuple(self._size(size_of(n)) for n in sizes) for sizes in (fake.shape, fake.stride()))

    def _are_first_rows(self, rows: Value, first: Value) -> bool:
        """True if ``first`` has the first ones of as many rows as there are no more of than it may have: ``rows[:C]``."""
        whole, part = (value.shape[0] if value.shape else 0 for value in (rows, first))
        _, stop = cut_of(part)
        with suppress(NotCanonical):
            bounded = stop is not None and self.most.get(whole, stop + 1) <= stop
            return bounded and first_rows(self.view, rows, stop, part) is first
        return False

    def _same_number(self, before: Size | None, after: Size | None) -> bool:
        if before is None or after is None:
            return False
        constant, terms = self._terms(self._size(before) - self._size(after))
        return constant == 0 and all(self.zeros.without(e) is self.evaluator.algebra.zero for e in terms)

    def _is_shared(self, before: fx.Node, after: fx.Node) -> bool:
        """True if it is seen that one tensor became two: one of them is written later, and the other read."""
        one, other = self.view.aliases(before), self.view.aliases(after)
        if before in other:
            return False
        writes = [(node, target) for node, target in self.writes if self.view.position[node] > self.last]
        for written, rest in ((one, other), (other, one)):
            at = [self.view.position[node] for node, target in writes if target in written]
            read = [self.view.position[user] for node in rest for user in node.users]
            if at and any(position > min(at) for position in read):
                return True
            if at and any(node.op in ("placeholder", "get_attr") for node in rest):
                return True
        return False

    def is_empty(self, part: fx.Node) -> bool:
        """True if a tensor has no rows."""
        fake = fake_of(part)
        return isinstance(fake, torch.Tensor) and fake.dim() > 0 and self._size(size_of(fake.shape[0])) == 0

    def _size(self, size: Size) -> Size:
        """A size without the work; zero also where it is by the sizes that it is known as."""

        def without_work(e: sympy.Expr) -> sympy.Expr:
            return e.subs({symbol: 0 for symbol in e.free_symbols if self.zeros.is_zero_size(symbol)})

        own = without_work(sympy.sympify(size))
        is_known = bool(free_unbacked_symbols(own)) and without_work(sympy.sympify(size).xreplace(self.known.sizes)) == 0
        return sympy.Integer(0) if is_known else own

    def other_effect(self) -> str | None:
        """What the side without the work does beside writing to tensors: it will not run."""
        for node in _from(self.begin.args[2].next, self.begin):
            if has_effect(node) and node not in self.view.writes:
                return f"{name_of(node)} at {_line(node)} would not run"
        return None

    def changed_buffer(self, first: int, last: int) -> str | None:
        """What is written to between two positions and is read later, and may not be what it was."""
        for write, target in self.writes[bisect_right(self.written_at, first) : bisect_left(self.written_at, last)]:
            if self._writes_nothing(write):
                continue
            if not has_storage(target):
                return f"it is not known what {name_of(write)} writes to"
            for alias in self.view.aliases(target):
                older = self.view.position[alias] < first
                outlives = alias.op in ("placeholder", "get_attr") or any(self.view.position[u] > last for u in alias.users)
                if older and outlives and not self._same(self.view.value_at(alias, first), self.view.value_at(alias, last)):
                    return f"{name_of(write)} at {_line(write)} may change a tensor where the condition is false"
        return None

    def _writes_nothing(self, write: fx.Node) -> bool:
        """True if a write leaves everything as it is.

            out[0] += 0 * loss      ->  both of its writes do: the sum, and storing it where it was
        """
        if inplace_name(write) == "add" and len(write.args) == 2 and isinstance(write.args[1], fx.Node):
            value = self.view.value_at(write.args[1], self.view.position[write])
            return isinstance(value, Value) and self._element(value) is self.evaluator.algebra.zero
        if inplace_name(write) != "setitem" or not isinstance(write.args[2], fx.Node):
            return False
        read = write.args[2]
        while inplace_name(read) is not None and isinstance(read.args[0], fx.Node):
            read = read.args[0]
        alias = read in self.view.aliases(write.args[0])
        return alias and target_name(read) == "getitem" and read.args == write.args[:2]

    def _without_empty_writes(self, value: Value, end: Value) -> Value:
        """What a value is made of by writing no rows, however often, and through whatever view; ``end`` if it is that."""
        while value is not end:
            inner = value.args[0] if value.op == "reshape" else value
            if inner.op == "put" and any(t is not None and 0 in map(self._size, t.shape) for t in inner.args[1]):
                base = inner.args[0]
                if inner is not value:
                    if base.op != "reshape" or base.args[0].shape != value.shape:
                        return value
                    base = base.args[0]
                value = base
            else:
                break
        return value

    def _same(self, before: Value, after: Value) -> bool:
        if before is after:
            return True
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            return False
        after = self._without_empty_writes(after, before)
        before = self._without_empty_writes(before, after)
        while before.op == after.op == "reshape" and before.args[0].shape == after.args[0].shape:
            before, after = before.args[0], after.args[0]
        if before is after:
            return True
        algebra = self.evaluator.algebra
        indices = self.evaluator.variables(before)
        made_beside = self.view.position.get(before.node, -1) > self.fork
        for base in (accumulators(before) if made_beside else [before]) if before.dtype.is_floating_point else ():
            if base.op != "full":  # of zeros, each is the same as any others: the work may read some
                self.evaluator._memo[base, indices, 0] = algebra.leaf(base, indices)  # its inside is of no interest
        return self._same_at(before, after, indices)

    def _same_at(self, before: Value, after: Value, indices: Indices) -> bool:
        """True if two values have the same elements, taken one by one along an axis where each is a formula of its own.

            counts[e] = mask.sum()          of a mask that is false
        """
        try:
            one, other = (self.evaluator.element(value, indices) for value in (before, after))
        except Unroll as unroll:
            numbers = range(n) if isinstance(n := unroll.var.args[1], int) and unroll.var in indices else ()
            each = (tuple(self.evaluator.algebra.const(i) if at is unroll.var else at for at in indices) for i in numbers)
            return len(numbers) > 0 and all(self._same_at(before, after, at) for at in each)
        return self.zeros.without(one) is self.zeros.without(other)

    def _element(self, value: Value) -> Expr | None:
        """What any element of a mask is, or the only one of a number."""
        e = self.evaluator.try_element(value)
        for variable in reversed([i for i in self.evaluator.variables(value) if i.kind == "var"]) if e is not None else ():
            e = self.evaluator.algebra.any(variable, e)
        return e


def _number(operand: fx.Node | int) -> Size | None:
    fake = fake_of(operand) if isinstance(operand, fx.Node) else operand
    return size_of(fake) if isinstance(fake, int | torch.SymInt) else None


def _line(node: fx.Node) -> str:
    function, line = line_of(node)
    return f"{function} ({line})" if function else line
