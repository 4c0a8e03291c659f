"""Branches on data, decided where Dynamo traces them: the side with the work is traced, and its condition stays in the graph.

    for e, expert in enumerate(experts):
        rows = torch.where(ids == e)[0]
        if rows.numel() == 0:               # branch_begins(condition, works_if=False)
            continue
        out[rows] += expert(x[rows])
                                            # branch_ends at the head of the loop, which both ways reach

Nothing is read but Dynamo's own instructions and records, so that helpers, lambdas, aliases and iterators are what they are
when they run. The graph proves later that tensors are the same without the work (`obligations.branches`). Here is decided what
no tensor shows: at the join, the names that are read later, the stack, attributes and cells must be the same Python objects
either way, or tensors, which become pairs of ``branch_ends``; a list, an iterator or a generator that is older than the branch
must not have been moved. What is not so gives the attempt up (`Declined`), and the frame is compiled as it is written.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import sympy
import torch
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import (
    BaseListVariable,
    ConstantVariable,
    ConstDictVariable,
    SymNodeVariable,
    TensorVariable,
)
from torch._dynamo.variables.base import (
    AttributeMutationNew,
    ValueMutationExisting,
    ValueMutationNew,
    VariableTracker,
)
from torch._dynamo.variables.functions import LocalGeneratorObjectVariable
from torch._dynamo.variables.iter import IteratorVariable
from torch._dynamo.variables.lists import ListVariable
from torch._dynamo.variables.misc import CellVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.obligations.markers import branch_begins, branch_ends, branch_forks, some_taken
from moeblaze_ops.lowering.torch_internals.callers import CallPath, path_of_tracer
from moeblaze_ops.lowering.tracing.control_flow import EXIT, ControlFlow, returns
from moeblaze_ops.lowering.tracing.done_for_real import DoneForReal, refuse_what_is_done_for_real
from moeblaze_ops.lowering.tracing.hit_loops import (
    Condition,
    Declined,
    HitIterator,
    Numbers,
    as_key,
    handled,
    known_number,
    taken_at,
    total_of,
)
from moeblaze_ops.lowering.tracing.host_numbers import compared, settled_condition
from moeblaze_ops.lowering.tracing.longer_lists import LongerLists, moves
from moeblaze_ops.lowering.tracing.questions import Questions, asked_by, holds_numbers_of_data
from moeblaze_ops.lowering.tracing.same_state import attributes, is_same, is_unread, known_of_sizes, realized, says_more, world

Variable = VariableTracker

MOST = 512
"""Rounds of one ``while`` on data that are followed: as many as layers have experts."""


@dataclass
class _Branch:
    """A branch whose work is being traced in the frame of ``tx``."""

    tx: Any
    join: int  # an index of its instructions, or EXIT
    age: int
    line: str
    at: int = EXIT  # its jump, if it has one, and what names are there
    given: dict[str, Variable] = field(default_factory=dict)
    begin: Any = None
    names: dict[str, Variable] = field(default_factory=dict)  # as they are at the join without the work
    stack: list[Variable] = field(default_factory=list)
    result: Variable | None = None  # what the frame returns without the work, if it joins at its end
    attributes: dict[Variable, dict[str, Variable]] = field(default_factory=dict)  # as they were where it began
    world: tuple = ()
    known: tuple = ()  # what is known of sizes
    lists: dict[Variable, list[Variable]] = field(default_factory=dict)  # older ones that are appended to, as they were
    skipped: dict[Variable, list[Variable]] = field(default_factory=dict)  # and as they are at the join without the work

    @property
    def condition(self) -> Condition:
        return self.begin.node.args[:2]


class Branches:
    """The branches on data that one attempt at a frame traces.

    ``differs``: whether anything was, or may have been, traced in another way than without branches and numbers. Then only
    does it help to trace the frame so. It stays when Dynamo starts again, which may leave out what made the difference.

    ``takes_sizes``: whether sizes that only the data tell were asked for, which Dynamo alone has not.

    ``traces``: whether branches and numbers are traced at all; if not, what Dynamo would misread of sizes gives the attempt up.
    """

    def __init__(self, *, traces: bool = True) -> None:
        self.traces = traces
        self.left: str | None = None
        self.causes: list[CallPath] = []  # where what is left was met, if the frames inside meet it as well
        self.differs = self.takes_sizes = False
        self.reset()

    def reset(self) -> None:
        """Start again, as Dynamo does when it learns something on the way."""
        self._output: Any = None
        self.open: list[_Branch] = []
        self.age = 0
        self.done: dict[str, None] = {}
        self.longer = LongerLists()
        self.questions = Questions(traces=self.traces)
        self._flows: dict[Any, ControlFlow] = {}
        self._births: dict[int, tuple[Any, int]] = {}

    def decline(self, branch: _Branch, what: str) -> NoReturn:
        inner = branch.tx.output.current_tx
        at = "" if inner is branch.tx else f", at {_place(inner, inner.current_instruction)}"
        self._leave(f"{branch.line}: {what} where the condition is false, too{at}", branch.tx)
        raise Declined(self.left)

    def _leave(self, why: str, tx: Any, *, with_frames_inside: bool = True) -> None:
        if self.left is None:
            self.left, self.causes = why, [path_of_tracer(tx)] if with_frames_inside else []

    def instead(self, give: Callable[..., Any], *args: Any) -> Any:
        """What ``give`` gives in the place of what Dynamo would, or None; that, or an error, is a difference."""
        if not self.traces:
            return None
        try:
            found = give(*args)
        except Exception:
            self.differs = True
            raise
        self.differs |= found is not None
        return found

    # What is older than a branch.

    def made(self, variable: Variable, *, mutation_type: Any = None, **_: Any) -> None:
        """Dynamo makes a variable; objects that may be changed share a kind of mutation with their copies."""
        if issubclass(type(variable), IteratorVariable | LocalGeneratorObjectVariable):
            self._births[id(variable)] = variable, self.age
        if mutation_type is not None:
            self._births.setdefault(id(mutation_type), (mutation_type, self.age))

    def birth(self, thing: Any) -> int:
        """How many branches had begun when it was made; none where that is not known."""
        return self._births.get(id(thing), (thing, -1))[1]

    def is_older(self, variable: Variable, branch: _Branch) -> bool:
        kind = variable.mutation_type
        if kind is None and variable.source is None and isinstance(variable, IteratorVariable):
            return self.birth(variable) < branch.age
        return not isinstance(kind, ValueMutationNew | AttributeMutationNew) or self.birth(kind) < branch.age

    # What Dynamo does while a branch is open.

    def moved(self, iterator: Variable) -> None:
        if self.open and self.is_older(iterator, self.open[-1]):
            self.decline(self.open[-1], "an iterator would be moved on")

    def taken(self, variables: Iterable[Variable]) -> None:
        """An instruction, or a function of Python's, takes these: what it does with an iterator is not seen."""
        for variable in variables if self.open else ():
            if isinstance(variable, IteratorVariable):
                self.moved(variable)

    def mutated(self, variable: Variable) -> None:
        for branch in self.open:
            if self.is_older(variable, branch) and variable not in branch.lists:
                if type(variable) is not ListVariable or isinstance(variable.mutation_type, ValueMutationExisting):
                    self.decline(branch, f"{_kind(variable)} would be changed")
                branch.lists[variable] = list(variable.items)

    def takes_number(self) -> None:
        """A number of an element is asked for, which is allowed in no other attempt."""
        self.differs |= self.traces

    def takes_size(self) -> None:
        """The size of what selects by data is asked for, which is allowed in attempts."""
        self.takes_sizes = True

    # Steps.

    def step(self, tx: Any, original: Callable[[Any], bool]) -> bool:
        if tx.output is not self._output:
            self.reset()
            self._output = tx.output
        at = tx.instruction_pointer
        if at is None:
            return original(tx)
        instruction = tx.instructions[at]
        try:
            return self._step(tx, at, instruction, original)
        except Declined as declined:
            self.differs = True
            shares = isinstance(declined, DoneForReal) or not self.age  # where no branch is before it
            self._leave(f"{_place(tx, instruction)}: {declined}", tx, with_frames_inside=shares)
            raise

    def _step(self, tx: Any, at: int, instruction: Any, original: Callable[[Any], bool]) -> bool:
        if tx.debug_locals and tx is not (root := tx.output.root_tx):  # Dynamo makes calls of loggers of the frame itself alone
            root.debug_locals += tx.debug_locals
            tx.debug_locals.clear()
        refuse_what_is_done_for_real(tx.stack)
        if not self.traces:
            self._inspect(tx, instruction)
            return original(tx)
        while self.open and self.open[-1].tx is tx and self._joins(self.open[-1], at, instruction):
            self._end(self.open.pop(), instruction)
        if self.open:
            self._watch(tx, instruction)
        if instruction.opname == "FOR_ITER" and isinstance(tx.stack[-1], HitIterator):
            return self._round(tx, at, instruction, original)
        self._inspect(tx, instruction)
        if instruction.opname.startswith("POP_JUMP") and tx.stack and instruction.opname.endswith(("_TRUE", "_FALSE")):
            asked = realized(tx.stack[-1])
            condition = tx.stack[-1] = _known(tx, asked)
            self.differs |= condition is not asked
            if _depends_on_data(condition) and self._begin(tx, at, instruction, condition, original):
                return True
        return self._do(tx, at, instruction, original)

    def _inspect(self, tx: Any, instruction: Any) -> None:
        """Refuse an instruction that asks what only the data tell, and hand it what it may ask, on either side of a branch."""
        self.questions.ask(tx, instruction)
        if instruction.opname in _WRITES_TEXT:
            self._write_text(tx, instruction)
        if instruction.opname == "WITH_EXCEPT_START" and self.age:
            raise Declined("an error is raised in a block")
        self.longer.resolve(tx, instruction)

    def _do(self, tx: Any, at: int, instruction: Any, original: Callable[[Any], bool]) -> bool:
        """Do an instruction that is no branch on data."""
        if instruction.opname in ("GET_ITER", "CONTAINS_OP"):
            function, args = asked_by(tx, instruction)
            longer = self.longer.iterator_over(*args) if function is iter else None
            if (found := longer or self.instead(handled, tx, function, args)) is not None:
                tx.popn(len(args))
                tx.push(found.call_method(tx, "logical_not", [], {}) if function is not iter and instruction.argval else found)
                tx.instruction_pointer = at + 1
                return True
        if instruction.opname == "COMPARE_OP":
            sides = map(realized, tx.stack[-2:])
            if (found := self.instead(compared, tx, instruction.argval, *sides)) is not None:
                tx.popn(2)
                tx.push(found)
                tx.instruction_pointer = at + 1
                return True
        if instruction.opname == "STORE_SUBSCR" and isinstance(realized(tx.stack[-2]), TensorVariable):
            tx.stack[-1] = as_key(tx.stack[-1])
        if not self.age:
            return original(tx)
        before = list(tx.stack)
        goes_on = original(tx)
        kept = next((i for i, (one, other) in enumerate(zip(before, tx.stack, strict=False)) if one is not other), len(tx.stack))
        taken = [realized(variable) for variable in before[kept:] if not is_unread(variable)]
        if instruction.opname != "FOR_ITER" and not moves(tx, instruction):
            self.taken(taken)
        self.longer.refuse(tx, instruction, taken)
        return goes_on

    def _write_text(self, tx: Any, instruction: Any) -> None:
        """Let a text have the number of a tensor without axes, as Python's has; of other tensors Dynamo knows no text."""
        flags = instruction.arg if instruction.opname == "FORMAT_VALUE" else 0
        at = -2 if flags & 4 or instruction.opname == "FORMAT_WITH_SPEC" else -1
        written = realized(tx.stack[at])
        if holds_numbers_of_data(written):
            raise Declined("a number that only the data tell is written into a text")
        if not self.traces:
            return
        of_data = isinstance(written, TensorVariable | BaseListVariable | ConstDictVariable | Numbers)
        if of_data and not written.is_python_constant():
            is_converted = flags & 3 or instruction.opname == "CONVERT_VALUE"
            number = written if is_converted else as_key(written)
            if not isinstance(number, ConstantVariable):
                raise Declined("a tensor is written into a text")
            tx.stack[at] = number

    def _round(self, tx: Any, at: int, instruction: Any, original: Callable[[Any], bool]) -> bool:
        """The next round of a loop over all experts, done where the program goes over those that have tokens."""
        rounds = tx.stack[-1]
        conditions = rounds.conditions(tx)
        names, stack = dict(tx.symbolic_locals), list(tx.stack)
        goes_on = original(tx)
        rounds.is_asked = False
        for condition in conditions if goes_on else ():
            self.age += 1
            branch = _Branch(tx, at, self.age, _place(tx, instruction), names=names, stack=stack)
            self._open(branch, *condition)
        return True

    def _open(self, branch: _Branch, condition: Any, works_if: bool, fork: Any = None) -> None:
        """Begin the work of a branch."""
        tx = branch.tx
        condition = torch.fx.Proxy(condition, tx.output.current_tracer)
        branch.begin = tx.output.create_proxy("call_function", branch_begins, (condition, works_if, fork), {})
        branch.world, branch.known, branch.attributes = world(tx), known_of_sizes(tx), attributes(tx)
        self.open.append(branch)

    def _watch(self, tx: Any, instruction: Any) -> None:
        branch = self.open[-1]
        if "YIELD" in instruction.opname and tx is branch.tx:
            self.decline(branch, "a generator would yield")
        if tx is not branch.tx and self._is_of_older_generator(tx, branch):
            self.decline(branch, "a generator would be moved on")
        if tx is branch.tx and returns(instruction):
            self.decline(branch, "the function would return")

    def _is_of_older_generator(self, tx: Any, branch: _Branch) -> bool:
        if not isinstance(tx, symbolic_convert.InliningGeneratorInstructionTranslator):
            return False
        made = [(thing, age) for thing, age in self._births.values() if isinstance(thing, LocalGeneratorObjectVariable)]
        return next((age for generator, age in made if generator.inline_tracer is tx), branch.age) < branch.age  # or being made

    def _joins(self, branch: _Branch, at: int, instruction: Any) -> bool:
        return returns(instruction) if branch.join == EXIT else at == branch.join

    def _flow(self, tx: Any) -> ControlFlow:
        flow = self._flows.get(tx.f_code)
        if flow is None:
            flow = self._flows[tx.f_code] = ControlFlow(tx.instructions, tx.indexof)
        return flow

    def _begin(self, tx: Any, at: int, instruction: Any, condition: Variable, original: Callable[[Any], bool]) -> bool:
        flow = self._flow(tx)
        sides = flow.sides(at, lambda: _works_when_true(condition), is_told=condition.as_proxy().node.target is some_taken)
        if sides is None:
            return False
        skip, work, join = sides
        self.differs = True
        jump = tx.indexof[instruction.target]
        line = _place(tx, instruction)
        tx.stack.pop()
        rounds = [branch for branch in self.open if branch.tx is tx and branch.at == at]
        if rounds and (len(rounds) == MOST or flow.always_passes(work, at) or _goes_round(rounds[-1])):
            self._leave(f"{line}: only the data tell when the loop ends", tx)
            raise Declined(self.left)
        self.age += 1
        branch = _Branch(tx, join, self.age, line, at, dict(tx.symbolic_locals))
        fork = self._trace_skip(branch, skip, original)
        works_if = instruction.opname.endswith("_TRUE") == (work == jump)
        self._open(branch, condition.as_proxy().node, works_if, fork)
        tx.instruction_pointer = work
        return True

    def _trace_skip(self, branch: _Branch, skip: int, original: Callable[[Any], bool]) -> Any:
        """Trace the side without the work up to the join, keep what it leaves, and go back; the marker, if it does anything."""
        tx = branch.tx
        names, stack, blocks = dict(tx.symbolic_locals), list(tx.stack), list(tx.block_stack)
        fork = tx.output.create_proxy("call_function", branch_forks, (), {})
        branch.world, branch.attributes = world(tx), attributes(tx)
        self.open.append(branch)
        tx.instruction_pointer = skip
        while not self._joins(branch, at := tx.instruction_pointer, instruction := tx.instructions[at]):
            self._inspect(tx, instruction)
            if not self._do(tx, at, instruction, original) or tx.instruction_pointer is None:
                self.decline(branch, "the other side ends the function")
        if branch.join == EXIT:
            branch.result = tx.stack[-1] if instruction.opname == "RETURN_VALUE" else ConstantVariable.create(instruction.argval)
        if any(self._stored(branch)) or branch.world != world(tx):
            self.decline(branch, "the other side has an effect on Python, which would not be there")
        for found, before in branch.lists.items():
            branch.skipped[found], found.items[:] = list(found.items), before
        branch.lists.clear()
        self.open.pop()
        branch.names, branch.stack = dict(tx.symbolic_locals), list(tx.stack)
        tx.symbolic_locals.clear()
        tx.symbolic_locals.update(names)
        tx.stack[:], tx.block_stack[:] = stack, blocks
        if fork.node is next(iter(reversed(tx.output.graph.nodes))):
            tx.output.graph.erase_node(fork.node)
            return None
        return fork

    def _end(self, branch: _Branch, instruction: Any) -> None:
        """Compare what the two ways leave at their join."""
        tx = branch.tx
        pairs: list[tuple[Variable, Variable]] = []

        def compare(what: str, without: Variable | None, with_: Variable | None) -> None:
            if not is_same(without, with_, pairs):
                is_sum = isinstance(without, ConstantVariable) and isinstance(with_, TensorVariable)
                begin = " (begin with `torch.zeros_like(x)`, not with a number)" if is_sum else ""
                self.decline(branch, f"{what}{begin} would be another")

        if branch.world != world(tx):
            self.decline(branch, "hooks, random numbers, prints or modes of torch would be others")
        if says_more(tx, branch.known):
            self.decline(branch, "what the work says of sizes would not hold")
        if branch.join == EXIT:
            result = tx.stack[-1] if instruction.opname == "RETURN_VALUE" else ConstantVariable.create(instruction.argval)
            compare("what the function returns", branch.result, result)
        else:
            if len(tx.stack) != len(branch.stack):
                self.decline(branch, "the stack would be another")
            for without, with_ in zip(branch.stack, tx.stack, strict=True):
                compare("a value", without, with_)
            for name in sorted(self._flow(tx).live_at(branch.join)):
                without, with_ = branch.names.get(name), tx.symbolic_locals.get(name)
                if (taken := taken_at(without, with_, branch.condition)) is not None:
                    tx.symbolic_locals[name] = taken
                    continue
                if (total := total_of(without, with_)) is None:
                    compare(repr(name), without, with_)
                    continue
                is_number = isinstance(without, ConstantVariable)
                pairs.append((without, total.tensor.call_method(tx, "item", [], {}) if is_number else total))
                tx.symbolic_locals[name] = total
        for item, name, without, with_ in self._stored(branch):
            compare("a variable of a function around" if isinstance(item, CellVariable) else repr(name), without, with_)
        added = []
        for found in {**branch.lists, **branch.skipped}:
            if found not in branch.skipped:
                added += self._appended(branch, found)
                continue
            if len(branch.skipped[found]) != len(found.items):
                self.decline(branch, "a list would have another length")
            for one, other in zip(branch.skipped[found], found.items, strict=True):
                compare("what a list holds", one, other)
        self.questions.add(with_ for _, with_ in pairs)
        without, with_ = (tuple(side.as_proxy() for side in sides) for sides in (zip(*pairs, strict=True) if pairs else ((), ())))
        tx.output.create_proxy("call_function", branch_ends, (branch.begin, without, with_, tuple(added)), {})
        self.done[branch.line] = None

    def _stored(self, branch: _Branch) -> Iterator[tuple[Variable, str, Variable, Variable]]:
        """The attributes and cells of older objects that were written to since a branch began: as they were, and as they are."""
        for item, values in attributes(branch.tx).items():
            before = branch.attributes.get(item, {})
            for name, value in values.items():
                if before.get(name) is value or not self.is_older(item, branch):
                    continue
                known = before.get(name) or (item.pre_existing_contents if isinstance(item, CellVariable) else None)
                if known is None:
                    self.decline(branch, f"{name!r} of {_kind(item)} would be set")
                yield item, name, known, value

    def _appended(self, branch: _Branch, found: Variable) -> list[Any]:
        """The parts that a list has more of, which must have no rows without the work."""
        before = branch.lists[found]
        if len(found.items) < len(before) or any(one is not other for one, other in zip(before, found.items, strict=False)):
            self.decline(branch, "a list would be changed")
        if (parts := self.longer.add(branch.tx, found, len(before), branch.line, branch.condition)) is None:
            self.decline(branch, "a list would be longer")
        return parts


def _goes_round(branch: _Branch) -> bool:
    """True if work that came back to its own jump has changed nothing but tensors, so that only they may end it."""
    return not branch.lists and all(is_same(branch.given.get(name), now, []) for name, now in branch.tx.symbolic_locals.items())


_WRITES_TEXT = frozenset(("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE"))


def _known(tx: Any, variable: Variable) -> Variable:
    """A condition on elements of hits, as ``e == 2`` in an expert's round, or on sizes that are known, as the flag that it is."""
    if isinstance(variable, Numbers):
        return variable.length(tx)
    number = settled_condition(tx, variable) if isinstance(variable, SymNodeVariable) else known_number(variable)
    return variable if number is None else ConstantVariable.create(bool(number))


def _depends_on_data(variable: Variable) -> bool:
    if isinstance(variable, SymNodeVariable):
        return bool(free_unbacked_symbols(variable.sym_num))
    return type(variable) is TensorVariable


def _works_when_true(condition: Variable) -> bool:
    """A guess, where both sides do something: a wrong one is not proven."""
    if isinstance(condition, SymNodeVariable):
        return condition.sym_num.node.expr.subs(dict.fromkeys(free_unbacked_symbols(condition.sym_num), 0)) != sympy.true
    of_zero = operator.eq, operator.lt, operator.le, operator.not_, "eq", "lt", "le", torch.eq
    node = condition.as_proxy().node
    return node.args[1] if node.target is some_taken else node.target not in of_zero


def _kind(variable: Variable) -> str:
    try:
        return f"a {variable.python_type().__name__}"
    except Exception:
        return "a Python object"


def _place(tx: Any, instruction: Any) -> str:
    positions = instruction.positions
    line = positions.lineno if positions is not None and positions.lineno is not None else tx.lineno
    return f"{tx.f_code.co_name} ({tx.f_code.co_filename}:{line})"
