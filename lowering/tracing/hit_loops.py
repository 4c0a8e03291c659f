"""Loops over the experts that have tokens, traced as loops over all experts.

    hit = ids.unique()                          the numbers of some of E experts: how many, only the data tell
    for e in hit:                               E rounds, each of which is a branch on data: `is_hit(hit, e)`
        rows = torch.where(ids == e)[0]
        out[rows] += experts[e](x[rows])

A round is left in the graph as any other branch (`tracing.branches`), and proven as one: without the expert among the hits, at
the time that they were taken, it does nothing.
"""

import operator
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    ListIteratorVariable,
    SymNodeVariable,
    TensorVariable,
    TupleVariable,
)
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import is_written
from moeblaze_ops.lowering.obligations.known_elements import experts_among, known_element
from moeblaze_ops.lowering.obligations.markers import hit_number, is_hit, some_taken
from moeblaze_ops.lowering.tracing.same_state import realized

Condition = tuple[torch.fx.Node, bool]
"""A flag, or a comparison of numbers on the host, and whether the work is done where it is true."""


class Declined(RuntimeError):
    """A branch changes what the graph does not show, so that its work may not be done unasked."""


class Numbers(VariableTracker):
    """A list of as many numbers as only the data tell; ``tensor`` holds them. It selects rows, and has a length.

        x[token.tolist()]       x[token], as it was when the list was made
    """

    def __init__(self, tensor: VariableTracker, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tensor = tensor

    def length(self, tx: Any) -> VariableTracker:
        """How many numbers there are."""
        return self.tensor.call_method(tx, "size", [ConstantVariable.create(0)], {})


class Total(Numbers):
    """A running total at the join of a branch: a number of Python's without the work, or a tensor without axes that holds it.

        start = 0
        for e, count in enumerate(counts):
            if count == 0: continue
            end = start + count             a tensor, whatever `start` is
            parts.append(rows[start:end])   the same rows
            start = end
    """

    def as_proxy(self) -> Any:
        return self.tensor.as_proxy()

    def length(self, tx: Any) -> VariableTracker:
        return self.tensor


def total_of(without: VariableTracker | None, with_: VariableTracker | None) -> Total | None:
    """What a name holds at a join; None where it is a tensor either way, or a number."""
    held = with_.tensor if isinstance(with_, Total) else with_
    number = isinstance(without, Total) or (isinstance(without, ConstantVariable) and type(without.value) is int)
    if not number or type(held) is not TensorVariable:
        return None
    fake = fake_of(held.as_proxy().node)
    return Total(held) if fake.dim() == 0 and fake.dtype in _INDICES else None


class Taken(Numbers):
    """A number that is ``least`` where no branch was taken by which it is more, or a flag that is the other one there.

        used = 0
        for e in range(E):
            if len(rows[e]) == 0: continue
            used += 1
        if used == 0: ...               a branch on data: none of those was taken
        out / used                      refused

    ``ways``: the conditions of branches, each inside of the next, that were taken then; None where one is sure to be.
    """

    def __init__(self, least: int, ways: tuple[tuple[Condition, ...], ...] | None, more: int = 0, **kwargs: Any) -> None:
        super().__init__(None, **kwargs)
        self.least, self.ways, self.more = least, ways, more

    def truth(self, true: bool = True) -> VariableTracker | None:
        """Whether it is ``true``; None where that is not known."""
        if type(self.least) is int:
            return self.compared("ne" if true else "eq", 0)
        return self if true else Taken(not self.least, self.ways)

    def length(self, tx: Any) -> VariableTracker:
        """Whether it is true, as a tensor where the data tell."""
        flag = self.truth() or self._decline()
        if not isinstance(flag, Taken):
            return flag
        return ConstantVariable.create(not flag.least) if flag.ways is None else flag._tensor(tx)

    def _tensor(self, tx: Any) -> VariableTracker:
        refuse_written(flags := [flag for way in self.ways for flag, _ in way])
        if any(flag.graph is not tx.output.graph for flag in flags):
            raise Declined("it is asked in another graph whether a branch on data was taken")
        ways = tuple(tuple((torch.fx.Proxy(flag, tx.output.current_tracer), true) for flag, true in way) for way in self.ways)
        with tx.output.fake_mode:
            some = torch.zeros((), dtype=torch.bool)
        found = tx.output.create_proxy("call_function", some_taken, (ways, not self.least), {})
        return wrap_fx_proxy(tx, found, example_value=some)

    def compared(self, name: str, number: int) -> VariableTracker | None:
        """How it compares with a number; None where that depends on how often a branch was taken."""
        least = self.least + self.more
        known = {getattr(operator, name)(value, number) for value in (least + 1, max(least + 1, number), max(least, number) + 1)}
        if len(known) > 1:
            return None
        (otherwise,), is_least = known, getattr(operator, name)(least, number)
        return ConstantVariable.create(otherwise) if is_least is otherwise else Taken(is_least, self.ways)

    def _decline(self, *_: Any, **__: Any) -> NoReturn:
        raise Declined("a program asks how often a branch on data was taken; ask `if n == 0:`, or count in a tensor")

    def is_python_constant(self) -> bool:
        return False

    as_proxy = as_python_constant = python_type = call_method = var_getattr = reconstruct = _decline


def taken_at(without: VariableTracker | None, with_: VariableTracker | None, condition: Condition) -> Taken | None:
    """What a name holds at a join, where it is a number that is more with the work of a branch, or the other flag."""
    if without is with_ or not isinstance(without, Taken | ConstantVariable):
        return None
    least, before, more = (without.least, without.ways, without.more) if isinstance(without, Taken) else (without.value, (), 0)
    if type(least) not in (int, bool) or before is None or more:
        return None
    if isinstance(with_, Taken):
        same = with_.ways is not None and (type(with_.least), with_.least) == (type(least), least)
        same = same and with_.ways[: len(before)] == before
        added = ((condition,),) if with_.more else tuple((*way, condition) for way in (with_.ways or ())[len(before) :])
    else:
        value = with_.value if isinstance(with_, ConstantVariable) else None
        same = type(value) is type(least) and (value is not least if type(least) is bool else value > least)
        added = ((condition,),)
    return Taken(least, before + added) if same else None


class Hits(Numbers):
    """A list or a set of the numbers of those of ``experts`` that have tokens; ``tensor`` holds them, in their order."""

    def __init__(self, tensor: VariableTracker, experts: list[int], *, is_set: bool = False, **kwargs: Any) -> None:
        super().__init__(tensor, **kwargs)
        self.experts, self.is_set = experts, is_set

    def is_hit(self, tx: Any, expert: int) -> TensorVariable:
        proxy = tx.output.create_proxy("call_function", is_hit, (self.tensor.as_proxy(), expert), {})
        return wrap_fx_proxy(tx, proxy)


class Unknown(VariableTracker):
    """A number that only the data tell, of which nothing is asked.

        for i, e in enumerate(hit): ...             i, where nothing reads it
    """

    def _decline(self, *_: Any, **__: Any) -> NoReturn:
        raise Declined("a program asks how many experts with tokens come before one")

    as_proxy = as_python_constant = python_type = call_method = var_getattr = reconstruct = _decline


def refuse_written(flags: Iterable[torch.fx.Node]) -> None:
    """Give the attempt up where one of the flags that branches were taken by is another one by now."""
    if any(isinstance(fake_of(flag), torch.Tensor) and is_written({flag}) for flag in flags):
        raise Declined("a condition was written to since a branch was taken by it")


class HitIterator(ListIteratorVariable):
    """An iterator over all experts where the program goes over some of them; ``asks(tx, number)``: over the one of that round."""

    def __init__(self, items: list[VariableTracker], asks: Callable[[Any, int], list[Condition]], **kwargs: Any) -> None:
        super().__init__(items, mutation_type=ValueMutationNew(), **kwargs)
        self.asks, self.is_asked = asks, False

    def conditions(self, tx: Any) -> list[Condition]:
        """By what the program does the next round; nothing where there is none, or where it is sure to."""
        self.is_asked = True
        return self.asks(tx, self.index)

    def _require_asked(self) -> None:
        if not self.is_asked:
            raise Declined("what goes over numbers that only the data tell is moved on beside a loop")

    def next_variable(self, tx: Any) -> VariableTracker:  # of torch 2.11
        self._require_asked()
        return super().next_variable(tx)

    def tp_iternext_impl(self, tx: Any) -> VariableTracker:
        self._require_asked()
        return super().tp_iternext_impl(tx)

    def unpack_var_sequence(self, tx: Any) -> list[VariableTracker]:
        raise Declined("numbers that only the data tell are taken out of a loop")

    force_unpack_var_sequence = unpack_var_sequence


class Counts(Numbers):
    """An array of counts of ids, as many as the highest id says, or of their running sums.

        for e, end in enumerate(ids.bincount().cpu().numpy().cumsum(0)):        E rounds: is any id e or higher?
            start = ends[e - 1]                                                 there, as e is
    """

    def __init__(self, ids: VariableTracker, items: list[VariableTracker], **kwargs: Any) -> None:
        super().__init__(ids, **kwargs)
        self.items, self._begun = items, 0

    def length(self, tx: Any) -> VariableTracker:
        raise Declined("the highest id says how many counts there are; say `minlength`")

    def item(self, index: VariableTracker) -> VariableTracker:
        """One of them that is surely there: a loop over them has come to it."""
        known = isinstance(index, ConstantVariable) and type(index.value) is int and 0 <= index.value < self._begun
        return self.items[index.value] if known else self.length(None)

    def iterator(self, *, numbered: bool) -> HitIterator:
        items = self.items
        if numbered:
            items = [TupleVariable([ConstantVariable.create(e), item]) for e, item in enumerate(items)]

        def asks(tx: Any, number: int) -> list[Condition]:
            self._begun = number + 1 if number < len(self.items) else 0
            if not self._begun - 1 > 0:
                return []  # there is an id, or no round
            is_above = self.tensor.call_method(tx, "ge", [ConstantVariable.create(number)], {})
            return [(is_above.call_method(tx, "any", [], {}).as_proxy().node, True)]

        return HitIterator(items, asks)

    def call_method(self, tx: Any, name: str, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> Any:
        asked = [*args, *kwargs.values()]
        if name == "cumsum" and is_along_first(asked):
            return Counts(self.tensor, running_sums(tx, self.items))
        return self if name == "tolist" and not asked else super().call_method(tx, name, args, kwargs)


def running_sums(tx: Any, numbers: list[VariableTracker]) -> list[VariableTracker]:
    """What the cumulative sums of numbers are, each of them in the graph."""
    return list(accumulate(numbers, lambda total, number: BuiltinVariable(operator.add).call_function(tx, [total, number], {})))


def is_along_first(axes: list[VariableTracker]) -> bool:
    """True if what an operator is told of axes is the first one, or nothing."""
    return all(isinstance(axis, ConstantVariable) and axis.value in (0, None) for axis in axes)


def _hits_in(variable: VariableTracker) -> Hits | None:
    """The numbers of experts that a tensor of a length that only the data tell holds; None where it is not known to."""
    if type(variable) is not TensorVariable:
        return None
    fake = fake_of(variable.as_proxy().node)
    if not _in_a_row(fake, axes=2):
        return None
    experts = experts_among(variable.as_proxy().node)
    return None if experts is None else Hits(variable, experts)


def _in_a_row(fake: torch.Tensor, axes: int = 1) -> bool:
    """True if numbers are as many as only the data tell, in ``axes`` axes at most."""
    is_row = 1 <= fake.dim() <= axes and all(size == 1 for size in fake.shape[1:])
    return is_row and fake.dtype in _INDICES and bool(free_unbacked_symbols(fake.shape[0]))


_INDICES = (torch.int64, torch.int32)
"""What a tensor without axes selects one place by; one of bool or of bytes is a mask."""


def iterator_over(tx: Any, variable: VariableTracker, *, numbered: bool = False) -> HitIterator | None:
    """What goes over all experts, where ``variable`` holds the numbers of some; None where it is not known to.

    What a list of them gives are numbers. What a tensor gives are tensors, of which `known_number` knows the number.
    ``numbered``: each behind the number of those before it, as ``enumerate`` gives them.
    """
    if isinstance(variable, Counts):
        return variable.iterator(numbered=numbered)
    if isinstance(variable, HitIterator):
        return None if numbered else variable
    if isinstance(variable, Hits):
        return None if variable.is_set else _over(variable, _number, numbered)  # a set has an order of its own
    hits = _hits_in(variable)
    if hits is None:
        if type(variable) is Numbers or (type(variable) is TensorVariable and _in_a_row(fake_of(variable.as_proxy().node))):
            raise Declined("a loop goes over numbers that may be those of no experts")
        return None
    return _over(hits, _element, numbered)


def _over(hits: Hits, item: Callable[[Any, Hits, int], VariableTracker], numbered: bool) -> HitIterator:
    items: list[VariableTracker] = [Unknown() for _ in hits.experts]

    def asks(tx: Any, number: int) -> list[Condition]:
        if number >= len(items):
            return []
        made = item(tx, hits, hits.experts[number])  # in its round, so that little of the graph is behind it
        items[number] = TupleVariable([Unknown(), made]) if numbered else made
        return [(hits.is_hit(tx, hits.experts[number]).as_proxy().node, True)]

    return HitIterator(items, asks)


def _number(tx: Any, hits: Hits, expert: int) -> ConstantVariable:
    return ConstantVariable.create(expert)


def _element(tx: Any, hits: Hits, expert: int) -> TensorVariable:
    return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", hit_number, (hits.tensor.as_proxy(), expert), {}))


def known_number(variable: VariableTracker) -> float | None:
    """The only element of a tensor that is made of elements of hits alone, in the round of an expert, or of numbers alone."""
    return known_element(variable.as_proxy().node) if type(variable) is TensorVariable else None


# What Dynamo asks of them.


def contains(tx: Any, numbers: VariableTracker, number: VariableTracker) -> TensorVariable | None:
    """True if a number is among those of experts, or among the elements of any tensor, as a tensor; None if it is not known."""
    known = isinstance(number, ConstantVariable) and type(number.value) is int
    hits = numbers if isinstance(numbers, Hits) else _hits_in(numbers)
    if isinstance(numbers, Numbers) and not (known and isinstance(numbers, Hits)):
        raise Declined("a number that is not known is looked for")
    if hits is not None and known:
        return hits.is_hit(tx, number.value)
    if type(numbers) is not TensorVariable or not known:
        return None
    return numbers.call_method(tx, "eq", [number], {}).call_method(tx, "any", [], {})


def handled(tx: Any, function: Any, args: list[VariableTracker]) -> VariableTracker | None:
    """What a function of Python gives for numbers of experts, where it is other than Dynamo's."""
    if function in (list, tuple, sorted, set, frozenset) and len(args) == 1 and isinstance(args[0], Hits):
        if function is sorted and args[0].experts != sorted(args[0].experts):
            return None  # the tensor has another order
        is_set = function in (set, frozenset) or (args[0].is_set and function is not sorted)
        return Hits(args[0].tensor, args[0].experts, is_set=is_set)
    if isinstance(args[0], Counts) and function is operator.getitem:
        return args[0].item(args[1])
    if function is operator.add and isinstance(args[0], Total) and type(args[1]) is TensorVariable:
        return args[1].call_method(tx, "add", [args[0].tensor], {})
    if function is enumerate and isinstance(args[0], Numbers | TensorVariable):
        return iterator_over(tx, args[0], numbered=True) if len(args) == 1 else None
    if (taken := next((arg for arg in args if isinstance(arg, Taken)), None)) is not None:
        return _of_taken(function, args) or taken._decline()
    if function is len and isinstance(args[0], Numbers):
        return args[0].length(tx)
    if function in (set, frozenset) and args and any(isinstance(n, SymNodeVariable) for n in getattr(args[0], "items", ())):
        raise Declined("a set is made of numbers that only the data tell; ids.unique() gives those of experts")
    if function is iter and len(args) == 1:
        return iterator_over(tx, *args)
    if function is operator.contains:
        return contains(tx, *args)
    if function is operator.index and type(args[0]) is TensorVariable:
        return args[0].call_method(tx, "item", [], {})
    if function is int and len(args) == 1 and (number := known_number(args[0])) is not None:
        return ConstantVariable.create(int(number))
    return None


_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def _of_taken(function: Any, args: list[VariableTracker]) -> VariableTracker | None:
    """What a function of Python gives for a number that is more where branches were taken."""
    taken, *others = args if isinstance(args[0], Taken) else args[::-1]
    if function in (operator.not_, bool) and not others:
        return taken.truth(function is bool)
    number, name = getattr(others[0], "value", None) if len(others) == 1 else None, getattr(function, "__name__", "")
    if type(number) is not int or type(taken.least) is not int:
        return None
    if function in (operator.add, operator.iadd) and number >= 0:
        return Taken(taken.least, taken.ways, taken.more + number)
    return taken.compared(name if taken is args[0] else _MIRRORED[name], number) if name in _MIRRORED else None


def as_key(variable: VariableTracker) -> VariableTracker:
    """A subscript of a tensor or a list, with numbers for elements of hits without axes, which select the same."""
    if type(variable) is TupleVariable:
        items = [as_key(item) for item in variable.items]
        changed = any(one is not other for one, other in zip(items, variable.items, strict=True))
        return TupleVariable(items) if changed else variable
    variable = realized(variable)
    if type(variable) is Numbers:
        return variable.tensor
    if type(variable) is not TensorVariable:
        return variable
    fake = fake_of(variable.as_proxy().node)
    if fake.dim() > 0 or fake.dtype not in _INDICES:
        return variable
    number = known_number(variable)
    return variable if number is None else ConstantVariable.create(number)


_ASK_NUMBERS = ("item", "__index__", "__int__")


def refuse(function: Any, args: list[VariableTracker]) -> None:
    """Give the attempt up where a function of Python is called that is not known for numbers which only the data tell.

    To read an attribute, as Dynamo 2.11 does by ``getattr`` for each method, asks nothing.
    """
    asked = function is not getattr and any(isinstance(arg, Numbers) for arg in args)
    for counts in args if asked else ():
        if isinstance(counts, Counts):
            counts.length(None)
    if asked:
        raise Declined(f"{getattr(function, '__name__', 'a function')} asks what only the data tell")


def handled_method(tx: Any, x: VariableTracker, name: str, args: list[VariableTracker]) -> VariableTracker | None:
    """What a method of a tensor gives for numbers of experts, where it is other than Dynamo's."""
    if type(x) is not TensorVariable:
        return None
    fake = fake_of(x.as_proxy().node)
    if name == "tolist" and _in_a_row(fake):
        return _hits_in(x) or Numbers(x.call_method(tx, "clone", [], {}))
    asks = name in _ASK_NUMBERS or (name == "tolist" and fake.dim() == 0)
    number = known_number(x) if asks and not args else None
    if number is None:
        return None
    return ConstantVariable.create(number if name in ("item", "tolist") else int(number))
