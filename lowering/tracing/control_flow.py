"""Where the two ways of a branch meet again, and which of them does the work, by the instructions of a function."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

EXIT = -1
"""The join of two ways that both return."""

_NOTHING = frozenset(("NOP", "RESUME", "CACHE", "EXTENDED_ARG", "PRECALL", "POP_TOP", "COPY", "SWAP"))
_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP")
_SETUPS = ("SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH")
"""What begins a block in Python 3.10, with its handler as the target; later versions have a table of blocks."""

_NAMES = ("LOAD_FAST", "LOAD_CONST", "LOAD_DEREF", "LOAD_CLOSURE", "STORE_FAST", "LOAD_GLOBAL", "LOAD_SMALL_INT")


def returns(instruction: Any) -> bool:
    return instruction.opname in ("RETURN_VALUE", "RETURN_CONST")


def _raises(instruction: Any) -> bool:
    return instruction.opname in ("RAISE_VARARGS", "RERAISE")


def _is_trivial(instruction: Any) -> bool:
    """True if an instruction only goes elsewhere, or moves what is there already."""
    name = instruction.opname
    return name in _NOTHING or name in _JUMPS or returns(instruction) or name.startswith(_NAMES)


class ControlFlow:
    """The instructions of one function; raising an error is no way on."""

    def __init__(self, instructions: Sequence[Any], index_of: Mapping[Any, int]):
        self.instructions, self.index_of = instructions, index_of

    def successors(self, at: int) -> list[int]:
        instruction = self.instructions[at]
        if returns(instruction):
            return [EXIT]
        if _raises(instruction):
            return []
        is_way = instruction.target is not None and instruction.opname not in _SETUPS
        target = [self.index_of[instruction.target]] if is_way else []
        if instruction.opname in _JUMPS:
            return target
        return [at + 1, *target] if at + 1 < len(self.instructions) else target

    @cached_property
    def _post_dominators(self) -> list[int]:
        """For each instruction, as bits, those that every way from it to the end passes; bit 0 is the end."""
        count = len(self.instructions)
        everything = (1 << (count + 1)) - 1
        found = [everything] * count
        changed = True
        while changed:
            changed = False
            for at in reversed(range(count)):
                passed = everything
                for after in self.successors(at):
                    passed &= 1 if after == EXIT else found[after]
                passed |= 1 << (at + 1)
                if passed != found[at]:
                    found[at], changed = passed, True
        return found

    def join(self, at: int) -> int:
        """Where all ways from an instruction meet first."""
        passed = self._post_dominators[at] & ~(1 << (at + 1))
        below = [i for i in range(len(self.instructions)) if passed >> (i + 1) & 1]
        # The nearest is the one that the others come behind: it has the most of them.
        return max(below, key=lambda i: self._post_dominators[i].bit_count(), default=EXIT)

    def always_passes(self, start: int, at: int) -> bool:
        """True if no way from ``start`` on goes round an instruction."""
        return bool(self._post_dominators[start] >> (at + 1) & 1)

    def sides(self, at: int, when_true: Callable[[], bool], *, is_told: bool) -> tuple[int, int, int] | None:
        """Where the side without and the side with the work start, and where they join; None where neither leads to the other.

        ``when_true``: whether the work is done where the condition is true, if both sides do something, or none, or it is told.
        """
        instruction = self.instructions[at]
        if self.instructions[at + 1].opname == "LOAD_ASSERTION_ERROR":
            return None
        join = self.join(at)
        starts = at + 1, self.index_of[instruction.target]
        idle = [self._is_idle(start, join) for start in starts]
        if join == EXIT and not any(idle) and not is_told:
            return None
        if is_told or idle[0] is idle[1]:
            idle = [instruction.opname.endswith("_TRUE") is when_true(), None]
        return (*starts, join) if idle[0] else (*starts[::-1], join)

    def _is_idle(self, at: int, join: int) -> bool:
        """True if the way from an instruction to the join does no work."""
        seen: set[int] = set()
        while at != join and at not in seen:
            seen.add(at)
            if not _is_trivial(self.instructions[at]):
                return False
            after = self.successors(at)
            if len(after) != 1:
                return False
            (at,) = after
        return at == join

    def live_at(self, at: int) -> frozenset[str]:
        """The local names that may be read from an instruction on, before they are set again."""
        return self._live[at]

    @cached_property
    def _live(self) -> list[frozenset[str]]:
        count = len(self.instructions)
        reads, writes = zip(*map(_names, self.instructions), strict=True)
        found: list[frozenset[str]] = [frozenset()] * count
        changed = True
        while changed:
            changed = False
            for at in reversed(range(count)):
                after = frozenset().union(*(found[i] for i in self.successors(at) if i != EXIT))
                live = (reads[at] | (after - writes[at])).union(*(found[handler] for handler in self._handlers[at]))
                if live != found[at]:
                    found[at], changed = live, True
        return found

    @cached_property
    def _handlers(self) -> list[list[int]]:
        """Where an error in each instruction may lead, but for the end of a ``with``."""
        found: list[list[int]] = [[] for _ in self.instructions]
        for at, instruction in enumerate(self.instructions):
            if instruction.exn_tab_entry is not None:
                found[at].append(self.index_of[instruction.exn_tab_entry.target])
            elif instruction.opname in _SETUPS:
                handler = self.index_of[instruction.target]
                for inside in found[at + 1 : handler]:
                    inside.append(handler)
        return [[handler for handler in handlers if not self._ends_with(handler)] for handlers in found]

    def _ends_with(self, handler: int) -> bool:
        """True if an error in a block is only told to its ``with``; one that this drops while tracing gives the attempt up."""
        names = [instruction.opname for instruction in self.instructions[handler : handler + 2]]
        return names[0] == "WITH_EXCEPT_START" or names == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]


def _names(instruction: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The local names that an instruction reads, and those that it sets."""
    name, value = instruction.opname, instruction.argval
    if not name.startswith(("LOAD_FAST", "STORE_FAST", "DELETE_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "DELETE_DEREF")):
        return frozenset(), frozenset()
    values = value if isinstance(value, tuple) else (value,)
    if name == "STORE_FAST_LOAD_FAST":
        return frozenset(values[1:]) - {values[0]}, frozenset(values[:1])
    return (frozenset(), frozenset(values)) if name.startswith("STORE") else (frozenset(values), frozenset())
