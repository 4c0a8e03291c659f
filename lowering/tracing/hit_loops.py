"""Loops over the experts that have tokens, traced as loops over all experts.

    hit = ids.unique().tolist()                 the numbers of some of E experts: how many, only the data tell
    for e in hit:                               E rounds, each of which is a branch on data: `is_hit(hit, e)`
        rows = torch.where(ids == e)[0]
        out[rows] += experts[e](x[rows])

A round is left in the graph as any other branch (`tracing.branches`), and proven as one: without the expert among the hits, at
the time that they were taken, it does nothing.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, ListIteratorVariable, TensorVariable
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moeblaze_ops.lowering.forms.masks import hit_mask
from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.functional_view import GraphView
from moeblaze_ops.lowering.obligations.markers import is_hit


class Hits(VariableTracker):
    """A list or a set of the numbers of the experts that have tokens; ``tensor`` holds them, in rising order."""

    def __init__(self, tensor: TensorVariable, *, is_set: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tensor, self.is_set = tensor, is_set

    def contains(self, tx: Any, number: VariableTracker) -> TensorVariable | None:
        """Whether a number is among them, as a tensor."""
        known = isinstance(number, ConstantVariable) and type(number.value) is int
        return self._is_hit(tx, number.value) if known else None

    def _is_hit(self, tx: Any, expert: int) -> TensorVariable:
        proxy = tx.output.create_proxy("call_function", is_hit, (self.tensor.as_proxy(), expert), {})
        return wrap_fx_proxy(tx, proxy)


class HitIterator(ListIteratorVariable):
    """An iterator over all experts where the program goes over those that have tokens."""

    def __init__(self, hits: Hits, items: list[VariableTracker], **kwargs: Any) -> None:
        super().__init__(items, mutation_type=ValueMutationNew(), **kwargs)
        self.hits = hits

    def condition(self, tx: Any) -> TensorVariable | None:
        """Whether the program does the next round; None where there is none."""
        return self.hits._is_hit(tx, self.index) if self.index < len(self.items) else None


def _hits_in(variable: TensorVariable) -> Hits | None:
    """The numbers of experts that a tensor of a length that only the data tell holds; None where it is not known to."""
    fake = variable.as_proxy().node.meta["example_value"]
    integers = not fake.dtype.is_floating_point and fake.dtype != torch.bool
    if fake.dim() != 1 or not integers or not free_unbacked_symbols(fake.shape[0]):
        return None
    hits = Hits(variable)
    return None if _count(hits) is None else hits


def iterator_over(variable: VariableTracker) -> HitIterator | None:
    """What goes over all experts, where ``variable`` is a list of the numbers of some; None where it is not known to be.

    It accepts ``for e in ids.unique().tolist()`` and refuses ``for e in ids.unique()``: a tensor is not its number, neither in a
    set (``e in {2}``) nor in a text (``f"expert_{e}"``).
    """
    if not isinstance(variable, Hits) or variable.is_set:  # a set has an order of its own
        return None
    count = _count(variable)
    return None if count is None else HitIterator(variable, [ConstantVariable.create(e) for e in range(count)])


def _count(hits: Hits) -> int | None:
    """How many experts there are, of which ``hits`` has some."""
    node = hits.tensor.as_proxy().node
    view = GraphView(node.graph, TABLE, numbers_only=True)
    mask = hit_mask(view.value_at(node, len(view.position)))
    return mask.shape[0] if mask is not None and isinstance(mask.shape[0], int) else None


def handled(tx: Any, function: Any, args: list[VariableTracker]) -> VariableTracker | None:
    """What a function of Python gives for numbers of experts, where it is other than Dynamo's."""
    if function in (list, tuple, sorted, set, frozenset) and len(args) == 1 and isinstance(args[0], Hits):
        return Hits(args[0].tensor, is_set=function in (set, frozenset) or (args[0].is_set and function is not sorted))
    if function is operator.contains and isinstance(args[0], Hits):
        return args[0].contains(tx, args[1])
    if function is operator.index and type(args[0]) is TensorVariable:
        return args[0].call_method(tx, "item", [], {})
    return None


def watch_calls(is_on: Callable[[], bool]) -> None:
    """Let the functions that make lists of numbers, and ask them, do what `handled` says while ``is_on``."""
    call_builtin, call_method = BuiltinVariable.call_function, TensorVariable.call_method

    def with_hits(self, tx, args, kwargs):
        found = handled(tx, self.fn, args) if is_on() and args and not kwargs else None
        return call_builtin(self, tx, args, kwargs) if found is None else found

    def as_list(self, tx, name, args, kwargs):
        found = _hits_in(self) if is_on() and name == "tolist" and type(self) is TensorVariable else None
        return call_method(self, tx, name, args, kwargs) if found is None else found

    BuiltinVariable.call_function, TensorVariable.call_method = with_hits, as_list
