"""What a program may not ask of tensors and numbers that only the data tell: each question gives the attempt up.

    if rows.numel() > 0:
        out = out + part                        the graph has one tensor afterwards, the program either of two
    out is start, {out: 1}                      refused: which of them it is, only the data tell
    out.requires_grad                           refused: so it is whether a gradient flows through it
    out.shape, out.dtype                        the same either way, or the branch is not proven

    flag.item() is True, flag.item() == 1       refused: Dynamo takes numbers that it has no values of for different ones
    2 in used, (0, 2) in enumerate(used)        so they are of an input, ``used = [0, 2]``, whose numbers are not fixed
    used.index(2), any(e == 2 for e in used)    compare one by one, and are read well
    str(counts[0])                              refused: there is no text of a number that only the data tell

An instruction asks what a function of Python does: ``out is start`` is `operator.is_`, and ``out.grad`` is `getattr`.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables import BaseListVariable, ConstantVariable, SymNodeVariable, TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.iter import IteratorVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.graph.fake_values import storage_of
from moeblaze_ops.lowering.graph.functional_view import written_nodes
from moeblaze_ops.lowering.obligations.markers import LEAF, branch_begins, branch_ends
from moeblaze_ops.lowering.tracing.hit_loops import Declined, Numbers, Taken
from moeblaze_ops.lowering.tracing.same_state import realized

_OF_HISTORY = frozenset((
    "requires_grad", "is_leaf", "grad_fn", "grad", "retains_grad", "output_nr", "_version", "_base", "_is_view", "is_set_to",
    "storage_offset", "data_ptr", "untyped_storage", "storage",
))  # fmt: skip
"""What a tensor has by how it was made, and not by what it holds."""

_ASKED_OF_ALL = _OF_HISTORY | {"__contains__"}
"""Attributes that may not be asked of other tensors either than those that branches made, and of numbers."""

_INSTRUCTIONS: dict[str, Any] = {
    "COMPARE_OP": operator.eq, "IS_OP": operator.is_, "CONTAINS_OP": operator.contains, "GET_ITER": iter,
    "LOAD_ATTR": getattr, "LOAD_METHOD": getattr, "STORE_ATTR": setattr,
}  # fmt: skip


def asked_by(tx: Any, instruction: Any) -> tuple[Any, list[VariableTracker]] | None:
    """The function of Python that an instruction is, and what it takes from the stack; None for one that asks nothing."""
    function = _INSTRUCTIONS.get(instruction.opname)
    if function is None:
        return None
    if function in (getattr, setattr):
        return function, [realized(tx.stack[-1]), ConstantVariable.create(instruction.argval)]
    args = [realized(variable) for variable in tx.stack[-1 if function is iter else -2 :]]
    return function, args[::-1] if function is operator.contains else args


class Questions:
    """The questions of one attempt at a frame; ``traces``: whether it follows branches on data."""

    def __init__(self, *, traces: bool) -> None:
        self._traces = traces
        self._merged: set[fx.Node] = set()

    def add(self, variables: Iterable[VariableTracker]) -> None:
        """Take tensors for what the work of a branch made, where the program has other objects without it."""
        self._merged.update(variable.as_proxy().node for variable in variables if isinstance(variable, TensorVariable))

    def ask(self, tx: Any, instruction: Any) -> None:
        """Give the attempt up where an instruction asks what only the data tell."""
        is_attribute = _INSTRUCTIONS.get(instruction.opname) in (getattr, setattr)
        if is_attribute and not self._merged and instruction.argval not in _ASKED_OF_ALL:
            return
        if (asked := asked_by(tx, instruction)) is not None:
            self.refuse(*asked)

    def refuse(self, function: Any, args: list[VariableTracker]) -> None:
        """Give the attempt up where a function of Python asks what only the data tell."""
        rule = _RULES.get(id(function))
        if rule is not None and args and (why := rule(self, function, list(map(realized, args)))) is not None:
            raise Declined(why)

    def _identity(self, function: Any, args: list[VariableTracker]) -> str | None:
        nodes = {arg.as_proxy().node for arg in args if isinstance(arg, TensorVariable)}
        if len(nodes) == len(args) and not nodes.isdisjoint(self._merged):
            return "a program asks which tensor one is, which depends on whether a branch was taken"
        others = [arg for arg in args if not isinstance(arg, SymNodeVariable)]
        with_none = bool(others) and isinstance(others[0], ConstantVariable) and others[0].value is None
        of_numbers = function in (operator.is_, operator.is_not) and len(others) < len(args) and not with_none
        return "what only the data tell is compared by `is`; ask `if flag:`" if of_numbers else None

    def _comparison(self, function: Any, args: list[VariableTracker]) -> str | None:
        if any(isinstance(arg, Numbers) and not isinstance(arg, Taken) for arg in args):
            return "numbers that only the data tell are compared"
        flags = [arg for arg in args if _of_data(arg) and isinstance(arg.sym_num, torch.SymBool)]
        return "a flag that only the data tell is compared as a number; ask `if flag:`" if flags else None

    def _search(self, function: Any, args: list[VariableTracker]) -> str | None:
        searched, *numbers = args
        is_known = all(number.is_python_constant() for number in numbers)
        return "a number that is not known is looked for" if is_known and _holds_numbers(searched) else None

    def _attribute(self, function: Any, args: list[VariableTracker]) -> str | None:
        x, name = args[0], args[1].value if len(args) > 1 and isinstance(args[1], ConstantVariable) else None
        if name == "__contains__":
            return self._search(function, [x])
        if not isinstance(name, str) or not isinstance(x, TensorVariable):
            return None
        is_own = not hasattr(torch.Tensor, name) and x.as_proxy().node in self._merged
        is_of_history = name in _OF_HISTORY and function is not setattr and _depends_on_work(x)
        if name in _OF_HISTORY and LEAF in x.as_proxy().node.meta:
            return f"`{name}` is asked of a tensor that is made with requires_grad=True"
        return f"`{name}` is asked of a tensor, which depends on whether a branch was taken" if is_own or is_of_history else None

    def _text(self, function: Any, args: list[VariableTracker]) -> str | None:
        """Refuse a text of a number that only the data tell; while branches are traced, of any tensor."""
        known = not any(map(holds_numbers_of_data, args)) and (not self._traces or all(a.is_python_constant() for a in args))
        return None if known else f"{function.__name__} asks what only the data tell"


_Rule = Callable[[Questions, Any, list[VariableTracker]], str | None]
_RULES: dict[int, _Rule] = {
    id(function): rule
    for functions, rule in (
        ((operator.is_, operator.is_not, id, hash), Questions._identity),
        ((operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge), Questions._comparison),
        ((operator.contains,), Questions._search),
        ((getattr, hasattr, setattr), Questions._attribute),
        ((str, repr, ascii, format, str.format), Questions._text),
    )
    for function in functions
}


def _of_data(variable: VariableTracker) -> bool:
    return isinstance(variable, SymNodeVariable) and bool(free_unbacked_symbols(variable.sym_num))


def _holds_numbers(variable: VariableTracker) -> bool:
    variable = realized(variable)
    if isinstance(variable, BaseListVariable | IteratorVariable):
        parts = getattr(variable, "items", None) or vars(variable).values()
        return any(isinstance(part, VariableTracker) and _holds_numbers(part) for part in parts)
    return isinstance(variable, SymNodeVariable)


def holds_numbers_of_data(variable: VariableTracker) -> bool:
    """True if a value is a number that only the data tell, or a list or a tuple with one: Dynamo knows no text of it."""
    if isinstance(variable, BaseListVariable):
        return any(map(holds_numbers_of_data, variable.items))
    return _of_data(variable)


def _depends_on_work(variable: TensorVariable) -> bool:
    proxy = variable.as_proxy()
    around = getattr(proxy.tracer, "parent", None)
    while around is not None:  # the body of an operator: what it is given is not looked up
        if _done(around.graph):
            return True
        around = around.parent
    done = _done(proxy.node.graph)
    return bool(done) and proxy.node in _made_by(proxy.node.graph, done)


def _done(graph: fx.Graph) -> set[fx.Node]:
    """Where the branches of a graph begin that have ended."""
    return {node for node in graph.nodes if node.target is branch_begins and node.users}


def _made_by(graph: fx.Graph, branches: set[fx.Node]) -> set[fx.Node]:
    """The tensors that branches make or write to, on either side, and what is made of them."""
    starts = {begin if begin.args[2] is None else begin.args[2] for begin in branches}
    made: set[fx.Node] = set()
    memory: set[int] = set()
    depth = 0
    for node in graph.nodes:
        depth += (node in starts) - (node.target is branch_ends)
        if depth or any(read in made or storage_of(read) in memory for read in node.all_input_nodes):
            made.add(node)
            memory.update(place for place in map(storage_of, written_nodes(node)) if place is not None)
    return made | {node for node in graph.nodes if storage_of(node) in memory}
