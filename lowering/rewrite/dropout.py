"""Dropout inside of experts: numbers are drawn from a seed for the elements of ``[N, F]`` and ``[T, K, D]``, and never kept.

They are others than those of the code as written, as they are in any compiled code.
"""

import torch
from torch import fx

from moeblaze_ops.arguments.draws import SEEDS, dropped_rows, factor_of_kept
from moeblaze_ops.kernels.formulas.expression import PARAMETER_SYMBOLS, PLACE_SYMBOLS, ZERO, apply, number, symbol
from moeblaze_ops.kernels.formulas.named import formula_of
from moeblaze_ops.kernels.formulas.text import to_text
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.match.reasons import Reason, prove
from moeblaze_ops.lowering.rewrite.inserter import Inserter
from moeblaze_ops.lowering.torch_internals.graphs import repeat_in_backward


def dropped_activation(match: MoEMatch) -> str:
    """The formula of the activation, dropped: its last parameter is the seed."""
    P, p = len(match.parameters), match.dropout[0]
    prove(len(PARAMETER_SYMBOLS) > P, Reason.ACTIVATION, "dropout behind an activation of four parameters")
    drawn = apply("draw", *map(symbol, (PARAMETER_SYMBOLS[P], *PLACE_SYMBOLS)))
    factor = apply("where", apply("ge", drawn, number(p)), number(factor_of_kept(p)), ZERO)
    return to_text(apply("mul", formula_of(match.activation), factor))


def insert_seed(insert: Inserter, match: MoEMatch, device: torch.device) -> fx.Node:
    """A number for a call of the layer, of torch's own generator. Shape [1], the dtype of an activation's parameters."""
    drawn = insert.call(torch.rand, 1, dtype=torch.float32, device=device)
    seed = insert.call("floor", insert.call(torch.mul, drawn, SEEDS))
    return insert.call("to", seed, torch.promote_types(match.dtype, torch.float32))


def sum_of_dropped(insert: Inserter, match: MoEMatch, rows_ND: fx.Node) -> fx.Node:
    """The weighted outputs of experts, a row for each slot, dropped and summed over each token's slots."""
    dropped_ND = insert.call(dropped_rows, rows_ND, insert_seed(insert, match, fake_of(rows_ND).device), match.dropout[1])
    repeat_in_backward(dropped_ND)
    return insert.call("sum", insert.call("reshape", dropped_ND, (-1, match.K, match.out_width)), 1)
