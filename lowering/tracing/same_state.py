"""True if Python's own state is the same with the work of a branch and without it, and what is known of sizes.

    out = out + y               tensors may be others: they are handed over in pairs
    calls = calls + 1           refused: a number of Python is another one
"""

from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, SymNodeVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch.fx.experimental.symbolic_shapes import SymT, symbol_is_type

Variable = VariableTracker


def realized(variable: Variable) -> Variable:
    return variable.realize() if isinstance(variable, LazyVariableTracker) else variable


def is_unread(variable: Variable) -> bool:
    """True if Dynamo has not looked at a value yet: what is done with it so far depends on nothing of it."""
    return isinstance(variable, LazyVariableTracker) and not variable.is_realized()


def is_same(without: Variable | None, with_: Variable | None, pairs: list[tuple[Variable, Variable]]) -> bool:
    """True if two Python values are one and the same but for tensors and sizes in them, which are added to ``pairs``."""
    if without is None or with_ is None:
        return without is with_
    without, with_ = realized(without), realized(with_)
    if without is with_:
        return True
    if type(without) is not type(with_):
        pairs.append((without, with_))  # a number that became one that data tell, or the other way round
        return _is_number(without) and _is_number(with_)
    if isinstance(without, TensorVariable | SymNodeVariable):
        if without.python_type() is not with_.python_type():
            return False
        if without.as_proxy().node is not with_.as_proxy().node:
            pairs.append((without, with_))
        return True
    if isinstance(without, ConstantVariable):
        return type(without.value) is type(with_.value) and without.value == with_.value
    if type(without) is TupleVariable and len(without.items) == len(with_.items):
        return all(is_same(*both, pairs) for both in zip(without.items, with_.items, strict=True))
    return False


def _is_number(variable: Variable) -> bool:
    return isinstance(variable, SymNodeVariable) or (isinstance(variable, ConstantVariable) and type(variable.value) is int)


def world(tx: Any) -> tuple:
    """What Dynamo knows besides variables: hooks, numbers drawn by Python, prints, modes."""
    output = tx.output
    autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
    hooks = tuple(output.side_effects.tensor_hooks), len(output.side_effects.save_for_backward)
    counts = len(output.random_calls), len(output.root_tx.debug_locals), len(tx.block_stack)
    return hooks, counts, modes, torch.get_default_dtype()


def attributes(tx: Any) -> dict[Variable, dict[str, Variable]]:
    """What attributes, and cells, are by now, of all objects that were written to."""
    return {item: dict(values) for item, values in tx.output.side_effects.store_attr_mutations.items()}


_OF_DATA = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)


def known_of_sizes(tx: Any) -> tuple[dict, dict, dict]:
    """What is known of sizes: their ranges, what they are by others, and how much is to be asserted of them."""
    env = tx.output.shape_env
    asserted = env.deferred_runtime_asserts
    asserts = dict(zip(asserted, map(len, asserted.values()), strict=True))
    return dict(env.var_to_range), dict(env.replacements), asserts


def says_more(tx: Any, before: tuple[dict, dict, dict]) -> bool:
    """True if more is known by now of a size, or a number, that only the data tell and that was there before."""
    known = list(zip(before, known_of_sizes(tx), strict=True))
    if all(one.items() <= now.items() and before[0].keys().isdisjoint(now.keys() - one.keys()) for one, now in known):
        return False
    changed = (s for s in before[0] if any(one.get(s) is not now.get(s) and one.get(s) != now.get(s) for one, now in known))
    return any(symbol_is_type(symbol, _OF_DATA) for symbol in changed)
