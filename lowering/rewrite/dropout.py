"""Dropout inside of experts: torch's own between and behind the operators, on the rows of all slots.

Numbers are drawn for the elements of ``[N, F]`` and ``[T, K, D]``, so that they are others than those of the code as written.
"""

import torch
from torch import fx

from moeblaze_ops.arguments.activations import activate
from moeblaze_ops.kernels.formulas.named import IDENTITY, NAMED
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.match.reasons import Reason, prove
from moeblaze_ops.lowering.rewrite.inserter import Inserter
from moeblaze_ops.lowering.torch_internals.graphs import repeat_in_backward


def dropped_activation(insert: Inserter, match: MoEMatch, h_NGF: fx.Node) -> fx.Node:
    """The activation of the rows, dropped: ``[N, 1, F]``, of which the rest of the layer is a linear function."""
    prove(match.activation in (*NAMED, IDENTITY), Reason.ACTIVATION, "dropout behind an activation without a name")
    a_NF = insert.call(activate, h_NGF, match.activation)
    dropped_NF = insert.call(torch.nn.functional.dropout, a_NF, match.dropout[0], True)
    dropped_N1F = insert.call("unsqueeze", dropped_NF, 1)
    for node in (a_NF, dropped_NF, dropped_N1F):
        repeat_in_backward(node)
    return dropped_N1F


def sum_of_dropped(insert: Inserter, match: MoEMatch, rows_ND: fx.Node) -> fx.Node:
    """The weighted outputs of experts, a row for each slot, dropped and summed over each token's slots."""
    dropped_ND = insert.call(torch.nn.functional.dropout, rows_ND, match.dropout[1], True)
    repeat_in_backward(dropped_ND)
    return insert.call("sum", insert.call("reshape", dropped_ND, (-1, match.K, match.out_width)), 1)
