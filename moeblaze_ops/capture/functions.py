"""Functions whose loops over experts break the graph, as functions that Dynamo captures in one.

Many layers skip an expert that no token chose: ``if mask.any():``, ``if idx.numel() == 0: continue``, or a loop over the
experts that were hit. Such a branch depends on data, and Dynamo stops there. Where what is skipped does nothing for an
expert without tokens, the same function results without the branch:

- slices by counts on the host become gathers, without a number on the host (``capture.splits``);
- the syntax tree proves that the condition is false only where a mask is empty, that all it guards is set by, or adds
  to, rows that this mask selects, and that no other name is left changed (``guards``, ``hits``);
- whoever traces the new code makes sure that nothing called inside has an effect on anything but tensors, and that of
  the operations on tensors nothing remains in the graph that has one: all of it became part of a layer that is
  rewritten. Without that, the code is compiled as it was.

A parameter of an expert that no token chose gets a gradient of zeros then, where skipping leaves None.
"""

import ast
import opcode
import os
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from moeblaze_ops.capture.aliases import sharing
from moeblaze_ops.capture.appended_parts import joined_lists, without_appending
from moeblaze_ops.capture.conditions import counted_in, empty_when
from moeblaze_ops.capture.counts import count_below, may_count
from moeblaze_ops.capture.emptiness import MODULE, Reader
from moeblaze_ops.capture.guards import Effects, Unproven, differs_by_zero, loaded, prove_adds_zero, prove_no_effect, stored
from moeblaze_ops.capture.hits import HitLoop, hit_loop, loops_over_hits, over_all_experts, selects
from moeblaze_ops.capture.lists import IndexLists
from moeblaze_ops.capture.source import NoSource, compile_changed, same_frame, tree_of
from moeblaze_ops.capture.splits.body import ROWS
from moeblaze_ops.capture.splits.loops import Splits
from moeblaze_ops.capture.trees.build import import_row_groups, name_of
from moeblaze_ops.capture.zeros_branch import split_off_zeros

_HINTS = frozenset((
    "any", "all", "count_nonzero", "numel", "nelement", "shape", "size", "sum", "len", "nonzero", "bincount", "tolist", "numpy",
    "split", "unique",
))  # fmt: skip
_TORCH = os.path.dirname(torch.__file__) + os.sep
_FORBIDDEN_NAMES = frozenset(("locals", "vars", "exec", "eval", "globals"))


@dataclass(frozen=True)
class Region:
    """Lines of a function that now run for experts without tokens, too."""

    file: str
    function: str
    first: int
    last: int

    def holds(self, file: str, line: int, function: str) -> bool:
        return (file, function) == (self.file, self.function) and self.first <= line <= self.last


@dataclass(frozen=True)
class Captured:
    """A function without its data-dependent branches: new code, or None, and what was done or left, and why."""

    code: CodeType | None
    regions: tuple[Region, ...] = ()
    done: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class Captures:
    """The functions of one attempt to capture a frame; ``numbers``: with numbers of a tensor's elements in its graph."""

    def __init__(self, *, numbers: bool = False) -> None:
        self.numbers = numbers
        self._results: dict[int, tuple[CodeType, Captured]] = {}

    def __call__(self, code: CodeType, module_globals: dict[str, Any]) -> CodeType:
        """The code to trace for a function's code."""
        known = self._results.get(id(code))
        if known is None:
            known = self._results[id(code)] = code, captured(code, module_globals, numbers=self.numbers)
        return known[1].code or code

    @property
    def lists_numbers(self) -> bool:
        """Whether any function makes a list of a tensor's elements."""
        return any("tolist" in code.co_names for code, _ in self._results.values())

    @property
    def regions(self) -> list[Region]:
        return [region for _, result in self._results.values() for region in result.regions]

    @property
    def done(self) -> tuple[str, ...]:
        return tuple(line for _, result in self._results.values() for line in result.done)

    @property
    def left(self) -> tuple[str, ...]:
        return tuple(line for _, result in self._results.values() for line in result.left)


def captured(code: CodeType, module_globals: dict[str, Any], *, numbers: bool = False) -> Captured:
    """``code`` without the branches that are proven to be of no effect; ``module_globals`` are those of its function.

    ``numbers``: slices by numbers on the host stay, and there are as many counts as experts, see `counts`.
    """
    refused: dict[int, str] = {}
    while _may_hold_experts(code) or (numbers and may_count(code)):
        try:
            function = tree_of(code)
        except NoSource:
            break
        before = len(refused)
        rewriting = _Rewriting(code, module_globals, refused, numbers)
        rewriting.function(function)
        refused |= dict(rewriting.escaping(function))
        if len(refused) == before:
            return rewriting.result(function)
    return Captured(None)


def _may_hold_experts(code: CodeType) -> bool:
    """Whether it is worth to read the source: there is a loop, and something that asks a tensor for its size or elements."""
    comprehensions = (inner for inner in code.co_consts if isinstance(inner, CodeType) and inner.co_name.startswith("<"))
    codes = (code, *comprehensions)
    has_loop = any(opcode.opmap["FOR_ITER"] in c.co_code[::2] for c in codes)
    has_hint = any(_HINTS & {*c.co_names} or opcode.opmap["CONTAINS_OP"] in c.co_code[::2] for c in codes)
    return has_loop and has_hint and not code.co_filename.startswith(_TORCH)


@dataclass
class _Guarded:
    """A branch that was dropped: its line, what it guarded, and what that does to names."""

    line: int
    what: str
    nodes: list[ast.stmt]
    effects: Effects
    selects: set[str] = field(default_factory=set)  # names of what says which experts have tokens, where that was read


class _Rewriting:
    """One pass over one function; branches whose lines are in ``refused`` stay."""

    def __init__(self, code: CodeType, module_globals: dict[str, Any], refused: dict[int, str], numbers: bool):
        self.code, self.globals, self.refused, self.numbers = code, module_globals, refused, numbers
        self.guarded: list[_Guarded] = []
        self.splits: dict[int, ast.For] = {}
        self.lists: IndexLists | None = None
        self.nested: set[str] = set()  # names that functions inside read: whoever calls them may change what they hold

    def function(self, function: ast.FunctionDef) -> None:
        nodes = list(ast.walk(function))
        scoped = any(isinstance(n, ast.Global | ast.Nonlocal | ast.Yield | ast.YieldFrom | ast.ClassDef) for n in nodes)
        names = loaded(function) | stored(function)
        if scoped or _FORBIDDEN_NAMES & names or any(name.startswith("_moeblaze") for name in names):
            return
        self.lists = IndexLists(function)
        functions = (n for n in nodes if isinstance(n, ast.FunctionDef | ast.Lambda) and n is not function)
        self.nested = set().union(*map(loaded, functions))
        reader = self.reader(sharing(function))
        hit_loops = {loop.lineno for loop in loops_over_hits(function.body, reader.copy())}
        splits = Splits(function, reader.copy(), self.refused, hit_loops, self.code.co_cellvars + self.code.co_freevars)
        if not self.numbers and not splits.rewrite():
            return
        self.splits = splits.loops
        reader.joined = joined_lists(function, reader.resolve) - self.nested
        function.body = self.block(function.body, reader, in_loop=False)
        proven = {id(node) for guarded in self.guarded for node in guarded.nodes}
        for loop in self.splits.values():
            if id(loop) not in proven:
                splits.refuse(loop, "what is around it has to stay")
            if any(loop.lineno < line <= (loop.end_lineno or loop.lineno) for line in self.refused):
                splits.refuse(loop, "a branch in it has to stay")

    def reader(self, shared: Mapping[str, frozenset[str]] | None = None) -> Reader:
        local = frozenset(self.code.co_varnames + self.code.co_cellvars + self.code.co_freevars)
        return Reader(self.globals, local, shared)

    def escaping(self, function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
        """Branches to keep after all: names that are set behind them are read elsewhere."""
        for guarded in self.guarded:
            names = sorted(name for name in guarded.effects.temporary if self._is_read_elsewhere(name, function))
            if names:
                yield guarded.line, f"{', '.join(names)} is set behind it and read elsewhere"

    def _is_read_elsewhere(self, name: str, function: ast.FunctionDef) -> bool:
        setting = [guarded for guarded in self.guarded if name in guarded.effects.temporary]
        inside = {id(node) for guarded in setting for s in guarded.nodes for node in ast.walk(s)}
        reads = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
        return any(id(n) not in inside for n in reads) or any(name in guarded.effects.read_first for guarded in setting)

    def result(self, function: ast.FunctionDef) -> Captured:
        left = tuple(f"{self._place(line)}: {reason}" for line, reason in sorted(self.refused.items()))
        lists = sorted(set(self.lists.done)) if self.lists else []
        counted = sorted(set(count_below(function, self.reader().resolve))) if self.numbers else []
        if not self.guarded and not lists and not counted:
            return Captured(None, left=left)
        _without_dead_selections(function, set().union(*(guarded.selects for guarded in self.guarded)), self.reader())
        without_appending(function, {id(s): rows for guarded in self.guarded for s, rows in guarded.effects.parts})
        if MODULE in loaded(function):
            import_row_groups(function)
        try:
            code = compile_changed(function, self.code)
        except NoSource as error:
            return Captured(None, left=(*left, f"{self._place(self.code.co_firstlineno)}: no source to go by: {error}"))
        if not same_frame(code, self.code):
            return Captured(None, left=left)
        regions = tuple(
            Region(self.code.co_filename, self.code.co_name, s.lineno, s.end_lineno or s.lineno)
            for guarded in self.guarded
            for s in guarded.nodes
        )
        as_index = "captured without a list of tokens on the host: as an index, what it copies means the same"
        done = [f"{self._place(guarded.line)}: {guarded.what}" for guarded in self.guarded]
        done += [f"{self._place(line)}: {as_index}" for line in lists]
        done += [f"{self._place(line)}: captured with as many counts as experts: all ids are below that" for line in counted]
        return Captured(code, regions, tuple(done), left)

    def _place(self, line: int) -> str:
        return f"{self.code.co_name} ({self.code.co_filename}:{line})"

    # Statements.

    def block(self, statements: list[ast.stmt], reader: Reader, *, in_loop: bool) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for i, statement in enumerate(statements):
            match statement:
                case ast.If() if (found := empty_when(statement.test, reader, statements[i:])) is not None:
                    result += self.branch(statement, statements[i + 1 :], found, reader, in_loop)
                case ast.If(body=[kept]) if statement.lineno not in self.refused and differs_by_zero(statement, reader):
                    what = f"captured without the branch on {ast.unparse(statement.test)!r}: its sides differ by zero"
                    self.guarded.append(_Guarded(statement.lineno, what, [kept, *statement.orelse], Effects()))
                    reader.execute(kept)
                    result.append(kept)
                case ast.For():
                    result.append(self.loop(statement, reader))
                case ast.If():
                    for branch in (statement.body, statement.orelse):
                        branch[:] = self.block(branch, reader.copy(), in_loop=False)
                    reader.execute(statement)
                    result.append(statement)
                case ast.With(items=items) if all(item.optional_vars is None for item in items):
                    statement.body = self.block(statement.body, reader, in_loop=False)
                    result.append(statement)
                case _:
                    before = reader.copy()
                    reader.execute(statement)
                    result.append(self.lists.without(statement, before))
        return result

    def branch(
        self, branch: ast.If, following: list[ast.stmt], found: tuple[Hashable, bool], reader: Reader, in_loop: bool
    ) -> list[ast.stmt]:
        """What takes the place of a branch on whether a group is empty."""
        group, empty = found
        skips = empty and isinstance(branch.body[0], ast.Continue)
        turned = empty and bool(branch.orelse)
        kept, other = (branch.orelse, branch.body) if turned else (branch.body, branch.orelse)
        guarded = following if skips else kept
        try:
            if branch.lineno in self.refused:
                raise Unproven(branch, self.refused[branch.lineno])
            if counted_in(branch.test, reader) in self.nested:
                raise Unproven(branch, "a function inside may change what it looks at")
            if skips and branch.orelse:
                raise Unproven(branch, "there is an else branch")
            if empty and not turned and not (skips and in_loop):
                raise Unproven(branch, "it is no `continue` of the loop that it stands in")
            effects, proven = _without_tokens(guarded, other, group, reader, may_continue=skips)
        except Unproven as unproven:
            self.refused.setdefault(branch.lineno, f"{ast.unparse(branch.test)!r} stays: {unproven}")
            reader.execute(branch)
            return [branch]
        what = f"captured without the branch on {ast.unparse(branch.test)!r}: what it skips does nothing without tokens"
        counts = counted_in(branch.test, reader)
        self.guarded.append(_Guarded(branch.lineno, what, proven, effects, {counts} if counts else set()))
        return [] if skips else self.block(kept, reader, in_loop=False)

    def loop(self, loop: ast.For, reader: Reader) -> ast.For:
        names = stored(loop)
        if id(loop) in self.splits:
            self.over_groups(loop, reader, names)
        elif not self.over_hits(loop, reader, names):
            loop.body = self.block(loop.body, reader.in_every_round(loop, names), in_loop=True)
        reader.forget(names)
        reader.forget_masks()
        return loop

    def over_groups(self, loop: ast.For, reader: Reader, names: set[str]) -> None:
        """Prove that a loop over groups of rows does nothing for one without rows: not all of them had a round before."""
        inner = reader.inside(names)
        first = inner.copy()
        first.execute(loop.body[0])
        try:
            effects = prove_no_effect(loop.body, first.read(ast.Name(ROWS)).group, inner.copy(), may_continue=True)
        except Unproven as unproven:
            self.refused.setdefault(loop.lineno, f"the loop at line {loop.lineno} stays: {unproven}")
            return
        loop.body = self.block(loop.body, inner, in_loop=True)
        targets = stored(loop.target)
        effects.temporary |= targets
        effects.read_first -= targets
        what = "captured without numbers of tokens on the host: slices by them take the rows of one expert"
        self.guarded.append(_Guarded(loop.lineno, what, [loop], effects))

    def over_hits(self, loop: ast.For, reader: Reader, names: set[str]) -> bool:
        """Make a loop over hit experts one over all; False where it stays as it is."""
        hits = reader.read(loop.iter)
        inner = reader.inside(names)
        found = hit_loop(loop, hits, inner)
        if found is None:
            return False
        try:
            if loop.lineno in self.refused:
                return False
            if reader.resolve(ast.Name("range")) is not range or reader.resolve(ast.Name("len")) is not len:
                raise Unproven(loop, "range or len is another function here")
            if shared := loaded(loop.iter) & self.nested:
                raise Unproven(loop, f"a function inside may change {', '.join(sorted(shared))}")
            effects = _round_without_tokens(loop, found, inner)
            loop.body = self.block(loop.body, inner, in_loop=True)
            selecting = {name for name, value in reader.values.items() if selects(value)}
            over_all_experts(loop, found, reader)
        except Unproven as unproven:
            self.refused[loop.lineno] = f"the loop over {ast.unparse(loop.iter)!r} stays: {unproven}"
            return False
        effects.temporary.add(loop.target.id)
        effects.read_first.discard(loop.target.id)
        what = "captured as a loop over all experts, not the hit ones: it does nothing for one without tokens"
        self.guarded.append(_Guarded(loop.lineno, what, [loop], effects, selecting))
        return True


def _without_tokens(
    guarded: list[ast.stmt], other: list[ast.stmt], group: Hashable, reader: Reader, *, may_continue: bool
) -> tuple[Effects, list[ast.stmt]]:
    """What the first of two branches does to names where a group is empty, and statements that do nothing else then.

    Raises:
        Unproven: it may do more than the other.
    """
    if (zeros := split_off_zeros(guarded, other, reader)) is not None:
        made, rest = zeros
        inner = reader.copy()
        inner.execute(made)
        return prove_no_effect(rest, group, inner, may_continue=False), rest
    effects = prove_no_effect(guarded, group, reader.copy(), may_continue=may_continue)
    effects.temporary |= prove_adds_zero(other, guarded, reader)
    return effects, [*guarded, *other]


def _round_without_tokens(loop: ast.For, found: HitLoop, reader: Reader) -> Effects:
    """What a round does to names for an expert that was not hit.

    Raises:
        Unproven: it may do more.
    """
    failed: list[Unproven] = []
    for container, group in found.groups:
        trial = reader.copy()
        try:
            effects = prove_no_effect(loop.body, group, trial, may_continue=True)
        except Unproven as unproven:
            failed.append(unproven)
            continue
        for name in {container, found.container}:
            if trial.read(name_of(name)) != reader.read(name_of(name)):
                raise Unproven(loop, f"{name} may be written to")
        return effects
    raise failed[0]


def _without_dead_selections(function: ast.FunctionDef, selections: set[str], reader: Reader) -> None:
    """Remove what says which experts have tokens, where nothing else reads it any more: it depends on data."""
    dead = set(selections)

    def is_dead(s: ast.AST) -> bool:
        match s:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                return name in dead and reader.only_makes(value)
        return False

    while True:
        inside = {id(node) for s in ast.walk(function) if is_dead(s) for node in ast.walk(s)}
        names = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
        read = dead & {node.id for node in names if id(node) not in inside}
        if not read:
            break
        dead -= read
    for node in ast.walk(function):
        for field_name in ("body", "orelse"):
            if isinstance(block := getattr(node, field_name, None), list):
                block[:] = [ast.copy_location(ast.Pass(), s) if is_dead(s) else s for s in block]
