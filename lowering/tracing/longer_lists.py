"""Lists that have parts without rows more than the program's, because a branch on data was traced as if it were taken.

    outputs = []
    for e in range(E):
        if counts[e] > 0:
            outputs.append(experts[e](rows[e]))
    y = torch.cat(outputs)          the same
    for y in outputs: ...           a round for each part, which is a branch on the data that the part is there by
    if len(outputs): ...            always, if the parts have a row in all; else a branch on the data that they are there by
    y / len(outputs)                refused
"""

from typing import Any

import torch
from torch._dynamo.variables import BuiltinVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import BaseUserFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import CellVariable, NullVariable

from moeblaze_ops.lowering.obligations.known_sizes import have_rows
from moeblaze_ops.lowering.tracing.hit_loops import Condition, Declined, HitIterator, Taken, refuse_written


class LongerLists:
    """The lists of one attempt that are longer than the program's, each with the line of a branch that appends to it."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[VariableTracker, str]] = {}
        self._conditions: dict[int, dict[int, list[Condition]]] = {}  # of each list, by which data a part is there

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, tx: Any, found: VariableTracker, start: int, line: str, condition: Condition) -> list[Any] | None:
        """Take a list for longer by its parts from ``start`` on, which are there by ``condition``; None where that would be seen.

        Returns the parts that may be concatenated, so that they must have no rows: tuples are gone over alone.
        """
        items = [item.realize() if isinstance(item, LazyVariableTracker) else item for item in found.items]
        tensors = [part for part in items if type(part) is TensorVariable]
        if len({part.dtype for part in tensors}) > 1 or _is_held(tx, found):
            return None
        if len(tensors) != len(items) and (tensors or not all(type(part) is TupleVariable for part in items)):
            return None
        self._lines[id(found)] = found, line
        for place in range(start, len(items)):
            self._conditions.setdefault(id(found), {}).setdefault(place, []).append(condition)
        return [part.as_proxy() for part in tensors[start:]]

    def iterator_over(self, variable: VariableTracker) -> HitIterator | None:
        """What goes over all parts of a longer list, each of them asked for; None for any other list."""
        if id(variable) not in self._lines:
            return None
        items, conditions = list(variable.items), self._conditions[id(variable)]

        def asks(tx: Any, place: int) -> list[Condition]:
            if len(variable.items) != len(items):
                raise Declined("a list grows while a loop goes over it")
            asked = conditions.get(place, []) if place < len(items) else []
            refuse_written(flag for flag, _ in asked)
            return asked

        return HitIterator(items, asks)

    def resolve(self, tx: Any, instruction: Any) -> None:
        """Where an instruction asks whether a list has parts at all, put its length in its place."""
        name = instruction.opname
        asks = name in ("TO_BOOL", "UNARY_NOT") or (name.startswith("POP_JUMP") and name.endswith(("_TRUE", "_FALSE")))
        if asks and tx.stack and id(tx.stack[-1]) in self._lines:
            tx.stack[-1] = self._length(tx.stack[-1])

    def _length(self, found: VariableTracker) -> Taken:
        """How many parts a list has: those that are always there, and more."""
        added = self._conditions[id(found)]
        parts = [part.as_proxy().node for part in found.items if type(part) is TensorVariable]
        is_sure = len(parts) == len(found.items) and have_rows(parts)
        return Taken(len(found.items) - len(added), None if is_sure else tuple(map(tuple, added.values())))

    def refuse(self, tx: Any, instruction: Any, taken: list[VariableTracker]) -> None:
        """Refuse an instruction that saw, in what it has taken, how long a list is."""
        seen = next((self._lines[id(variable)] for variable in taken if id(variable) in self._lines), None)
        if seen is None or moves(tx, instruction):
            return
        called = next((variable for variable in taken[:2] if not isinstance(variable, NullVariable)), None)
        is_call = instruction.opname.startswith("CALL")
        if is_call and isinstance(called, BuiltinVariable) and called.fn is len:
            tx.stack[-1] = self._length(seen[0])
        elif not is_call or not (_concatenates(called) or isinstance(called, BaseUserFunctionVariable)):
            raise Declined(f"the length of a list is seen, which {seen[1]} appends to")


def moves(tx: Any, instruction: Any) -> bool:
    """True if an instruction only hands on what it takes, or appends to it."""
    name = instruction.opname
    if name in ("LOAD_METHOD", "LOAD_ATTR"):
        return instruction.argval == "append"
    return name.startswith(("STORE_FAST", "STORE_DEREF", "POP_TOP", "SWAP", "COPY")) or (
        name == "RETURN_VALUE" and tx.parent is not None
    )


def _concatenates(variable: VariableTracker | None) -> bool:
    function = vars(variable).get("value") if variable is not None else None
    return any(function is known for known in (torch.cat, torch.concat, torch.concatenate, torch.vstack))


def _is_held(tx: Any, found: VariableTracker) -> bool:
    """True if a list is in another object, which may be asked without an instruction that takes the list itself."""
    stored = tx.output.side_effects.store_attr_mutations.items()
    held = [value for item, values in stored if not isinstance(item, CellVariable) for value in values.values()]
    while tx is not None:
        for value in tx.symbolic_locals.values():
            items = vars(value).get("items")
            held += items.values() if isinstance(items, dict) else items if isinstance(items, list) else ()
        tx = tx.parent
    return any(value is found for value in held)
