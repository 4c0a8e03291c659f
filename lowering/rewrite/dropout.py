"""Dropout inside of experts: numbers are drawn of a seed for the elements of ``[N, F]`` and ``[T K, D]``, and never kept.

They are others than those of the code as written, as they are in any compiled code.
"""

import torch
from torch import fx

from moeblaze_ops.arguments.draws import SEEDS
from moeblaze_ops.kernels.formulas.dropped import dropped
from moeblaze_ops.kernels.formulas.expression import PARAMETER_SYMBOLS
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.match.reasons import Reason, prove
from moeblaze_ops.lowering.rewrite.inserter import Inserter


def dropped_activation(match: MoEMatch) -> str:
    """The formula of the activation, dropped: its last parameter is the seed."""
    P = len(match.parameters)
    prove(len(PARAMETER_SYMBOLS) > P, Reason.ACTIVATION, f"dropout behind an activation of {P} parameters")
    return dropped(match.activation, match.dropout[0], P)


def insert_seed(insert: Inserter, match: MoEMatch, device: torch.device) -> fx.Node:
    """A number for a call of the layer, of torch's own generator. Shape [1], the dtype of an activation's parameters."""
    drawn = insert.call(torch.rand, 1, dtype=torch.float32, device=device)
    seed = insert.call("floor", insert.call(torch.mul, drawn, SEEDS))
    return insert.call("to", seed, torch.promote_types(match.dtype, torch.float32))


def sum_of_dropped(insert: Inserter, match: MoEMatch, rows_ND: fx.Node) -> fx.Node:
    """The weighted outputs of experts, a row for each slot, dropped and summed over each token's slots."""
    seed = insert_seed(insert, match, fake_of(rows_ND).device)
    return insert.call(torch.ops.moeblaze.sum_dropped.default, rows_ND, seed, match.K, match.dropout[1])
