"""Iterators and generators that are older than work which is traced without its condition: none may be moved on in it.

    it = iter(self.experts)
    for e in range(E):
        rows = torch.where(ids == e)[0]
        if rows.numel() == 0:               # left out of what is traced, so that the work is done for all experts
            continue
        out[rows] += next(it)(x[rows])      # refused: `it` would be moved on for an expert without tokens, too
        for block in self.blocks[e]: ...    # accepted: this iterator is made in the work
"""

from collections.abc import Callable
from traceback import StackSummary
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InliningGeneratorInstructionTranslator
from torch._dynamo.variables.iter import IteratorVariable


class OldIterators:
    """What Dynamo's hooks (`tracing.branches.install`) tell of iterators while one attempt at a frame is traced.

    ``in_work`` says whether a stack is in work without its condition. ``decline`` gives the attempt up with a reason.
    """

    def __init__(self, in_work: Callable[[StackSummary], bool], decline: Callable[[str], None]) -> None:
        self._in_work, self._decline = in_work, decline
        self.reset()

    def reset(self) -> None:
        """Start again, as Dynamo does when it learns something on the way."""
        self._births: dict[int, tuple[Any, int]] = {}

    def born(self, thing: Any, in_work: int | None = None) -> None:
        if isinstance(thing, IteratorVariable | InliningGeneratorInstructionTranslator):
            self._births[id(thing)] = thing, self._is_in_work() if in_work is None else in_work

    def birth(self, thing: Any) -> int:
        """Whether it was made in such work."""
        return self._births.get(id(thing), (thing, False))[1]

    def moved(self, iterator: Any) -> None:
        if not self.birth(iterator) and self._is_in_work():
            self._decline("an iterator would be moved on for experts without tokens, too")

    def step(self, tx: Any, original: Callable[[Any], bool]) -> bool:
        if isinstance(tx, InliningGeneratorInstructionTranslator) and not self.birth(tx) and self._is_in_work():
            self._decline("a generator would be moved on for experts without tokens, too")
        return original(tx)

    def mutated(self, variable: Any) -> None:
        """Python objects that are changed are told by a hook of their own (`torch_internals.install_effect_hook`)."""

    def stored(self, effects: Any, item: Any, name: str) -> None:
        """As for `mutated`."""

    def effect(self) -> None:
        """As for `mutated`."""

    def _is_in_work(self) -> bool:
        return self._in_work(torch._guards.TracingContext.extract_stack())
