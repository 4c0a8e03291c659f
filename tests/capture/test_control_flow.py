"""Ways and names of blocks: of Python 3.10, where instructions begin them, as of the running version, which has a table.

Which side of a branch does the work, and where both meet, is a guess: the graph proves what comes of it, or is not taken.
What is trusted is which names are read afterwards (`live_at`): of the programs below four go wrong without.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.bytecode_transformation import cleaned_instructions

from moeblaze_ops import compile as moeblaze_compile
from moeblaze_ops.lowering.tracing import branches as traced
from moeblaze_ops.lowering.tracing.control_flow import EXIT, ControlFlow
from tests.capture.test_capture import check, kept, make_layer
from tests.corpus.loops import branches, guarded, zeros
from tests.tools.rewrite_harness import rewriting_backend


@dataclass(eq=False)
class Instruction:
    opname: str
    argval: Any = None
    target: "Instruction | None" = None
    exn_tab_entry: None = None


def in_a_loop(setup: str, *handler: Instruction) -> ControlFlow:
    """``for e in hits: <block>: token = ...``, whose handler goes on to ``use(token)`` as the block does, in Python 3.10."""
    end, use = Instruction("RETURN_VALUE"), Instruction("LOAD_FAST", "token")
    head = Instruction("FOR_ITER", target=end)
    instructions = [
        head, Instruction("STORE_FAST", "e"), Instruction(setup, target=handler[0]), Instruction("LOAD_FAST", "e"),
        Instruction("STORE_FAST", "token"), Instruction("POP_BLOCK"), Instruction("JUMP_FORWARD", target=use), *handler,
        use, Instruction("JUMP_ABSOLUTE", target=head), end,
    ]  # fmt: skip
    return ControlFlow(instructions, {instruction: at for at, instruction in enumerate(instructions)})


def test_what_a_with_sets_is_not_read_before():
    flow = in_a_loop("SETUP_WITH", Instruction("WITH_EXCEPT_START"), Instruction("POP_EXCEPT"))
    assert flow.live_at(0) == frozenset()
    assert flow.successors(2) == [3]


def test_what_a_handler_reads_is_read_after_each_instruction_of_its_block():
    flow = in_a_loop("SETUP_FINALLY", Instruction("POP_TOP"), Instruction("LOAD_FAST", "kept"))
    assert {"token", "kept"} <= flow.live_at(3)
    assert flow.successors(2) == [3]


def test_a_handler_that_does_nothing_is_the_last_instruction():
    """``try: return x`` and ``finally: pass``."""
    handler = Instruction("RERAISE")
    setup = Instruction("SETUP_FINALLY", target=handler)
    instructions = [setup, Instruction("LOAD_FAST", "x"), Instruction("RETURN_VALUE"), handler]
    flow = ControlFlow(instructions, {instruction: at for at, instruction in enumerate(instructions)})
    assert flow.live_at(0) == {"x"}


def with_a_with(hits, mode, use):
    for e in hits:
        with mode():
            token = use(e)
        use(token)


def with_a_handler(hits, kept, use):
    for e in hits:
        try:
            token = use(e)
        except ValueError:
            token = kept
        use(token)


@pytest.mark.parametrize("function, read", [(with_a_with, set()), (with_a_handler, {"kept"})])
def test_names_of_this_version(function, read):
    instructions = cleaned_instructions(function.__code__)
    flow = ControlFlow(instructions, {instruction: at for at, instruction in enumerate(instructions)})
    head = next(at for at, instruction in enumerate(instructions) if instruction.opname == "FOR_ITER")
    assert flow.live_at(head) - {"hits", "mode", "use"} == read


PROGRAMS = (*branches.BRANCHES, *branches.NEAR_MISSES, *guarded.NEAR_MISSES, *zeros.NEAR_MISSES, guarded.if_any)

sides = ControlFlow.sides


def _exchanged(self, at, when_true, **told):
    found = sides(self, at, when_true, **told)
    return found and (found[1], found[0], found[2])


def _as_they_stand(self, at, when_true, **told):
    found = sides(self, at, when_true, **told)
    return found and (at + 1, self.index_of[self.instructions[at].target], found[2])


GUESSES = {
    "sides_exchanged": ("sides", _exchanged), "sides_as_they_stand": ("sides", _as_they_stand),
    "always_idle": ("_is_idle", lambda self, at, join: True), "never_idle": ("_is_idle", lambda self, at, join: False),
    "joins_at_the_end": ("join", lambda self, at: EXIT), "joins_at_once": ("join", lambda self, at: at + 1),
}  # fmt: skip


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("name", GUESSES)
def test_no_guess_is_wrong(name, monkeypatch):
    """Each program meets one of the wrong guesses, and those that add zeros that nothing is done otherwise."""
    function, guess = GUESSES[name]
    monkeypatch.setattr(ControlFlow, function, guess)
    for program in (*PROGRAMS[list(GUESSES).index(name) :: len(GUESSES)], *(zeros.NEAR_MISSES if name == "always_idle" else ())):
        torch._dynamo.reset()
        torch.manual_seed(15)  # with which each program has some expert with tokens in each step
        layer = make_layer(program)
        with rewriting_backend() as backend:
            check(layer, torch.compile(layer, backend=backend))


# Loops that only the data end: an attempt would follow their work for ever.


def _round(cost, columns):
    """One of Sinkhorn's, which Megatron's router goes on with until nothing moves."""
    rows = 1 / (columns * cost).mean(1)
    return 1 / (rows[:, None] * cost).mean(0)


def while_an_error_is_large(cost, columns):
    error = 1e9
    while error > 1e-4:
        before, columns = columns, _round(cost, columns)
        error = (before - columns).abs().mean()
    return columns


def while_something_moves(cost, columns):
    before = columns + 1
    while (columns - before).abs().max() > 1e-4:
        before, columns = columns, _round(cost, columns)
    return columns


def while_not_all_are_done(cost, columns):
    done = torch.zeros_like(columns, dtype=torch.bool)
    while not done.all():
        before, columns = columns, _round(cost, columns)
        done = (before - columns).abs() < 1e-4
    return columns


def until_it_returns(cost, columns):
    while True:
        before, columns = columns, _round(cost, columns)
        if (before - columns).abs().max() < 1e-4:
            return columns


def while_rows_are_left(cost, columns):
    left = torch.where(columns > 0)[0]
    while len(left):
        columns = _round(cost, columns)
        left = left[1:]
    return columns


def for_some_rounds(cost, columns):
    for _ in range(100):
        before, columns = columns, _round(cost, columns)
        if (before - columns).abs().max() < 1e-4:
            break
    return columns


def while_rounds_are_counted(cost, columns):
    error, rounds = torch.tensor(1e9), 0
    while error > 1e-4:
        before, columns, rounds = columns, _round(cost, columns), rounds + 1
        error = (before - columns).abs().mean()
    return columns


def while_rounds_are_left(cost, columns):
    error, rounds = torch.tensor(1e9), 0
    while error > 1e-4 and rounds < 10**6:
        before, columns, rounds = columns, _round(cost, columns), rounds + 1
        error = (before - columns).abs().mean()
    return columns


def while_it_is_a_number(cost, columns):
    before = columns + 1
    while (columns - before).abs().max() > 1e-4:
        before, columns = columns, _round(cost, columns)
        if columns.isnan().any():
            break
    return columns


ENDLESS = {
    while_an_error_is_large: 2, while_something_moves: 2, while_not_all_are_done: 2, until_it_returns: 2, while_rows_are_left: 2,
    for_some_rounds: 2, while_rounds_are_counted: 2, while_it_is_a_number: 2, while_rounds_are_left: 9,
}  # fmt: skip
"""How many rounds of each are begun before an attempt gives it up, where 8 are followed."""


class Balanced(nn.Module):
    """A layer behind such a loop."""

    def __init__(self, balanced):
        super().__init__()
        self.balanced, self.layer = balanced, make_layer(branches.set_in_both_branches)
        self.router = self.layer.router

    def forward(self, x):
        with torch.no_grad():
            columns = self.balanced(x.abs() + 0.1, x.new_ones(x.shape[1]))
        return self.layer(x * columns)


@pytest.mark.usefixtures("scratch", "fp64")
@pytest.mark.parametrize("balanced", ENDLESS, ids=lambda f: f.__name__)
def test_a_loop_that_only_the_data_end_is_given_up(balanced, monkeypatch):
    """It is compiled as it is written, and what is lost is said."""

    begun = []

    def counted(self, tx, at, *args):
        if balanced.__name__ in tx.f_code.co_name:
            begun.append((tx, at))
            assert begun.count((tx, at)) <= ENDLESS[balanced]
        return begin(self, tx, at, *args)

    begin = traced.Branches._begin
    monkeypatch.setattr(traced.Branches, "_begin", counted)
    monkeypatch.setattr(traced, "MOST", 8)
    layer = Balanced(balanced)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        check(layer, torch.compile(layer, backend=backend))
    left = [why for record in records if isinstance(record, moeblaze_compile.CaptureRecord) for why in record.left]
    assert any(why.startswith(balanced.__name__) for why in left)
    assert sum(len(graph.report.rewritten) for graph in kept(records, moeblaze_compile.GraphRecord)) == 1
