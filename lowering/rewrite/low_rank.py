"""What the operators take of low-rank additions to a layer's weights: factors in their layout, and the rows that A gives."""

import torch
import torch.nn.functional as F
from torch import fx

import moeblaze_ops.ops.low_rank.expert_rows  # noqa: F401
from moeblaze_ops.kernels.formulas.named import IDENTITY
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.match.operands.low_rank import Factors
from moeblaze_ops.lowering.rewrite.inserter import Inserter
from moeblaze_ops.ops.low_rank.factors import RANK_UNIT

_ops = torch.ops.moeblaze


def describe_ranks(match: MoEMatch) -> tuple[str, str]:
    """The ranks of the additions to up and to down, of all adapters that are active, "" where there is none."""
    totals = [[sum(own.rank for own in group) for group in groups] for groups in (match.low_rank_up, (match.low_rank_down,))]
    ranks = [sorted(set(filter(None, own))) for own in totals]
    up, down = ("rank " + " and ".join(map(str, own)) if own else "" for own in ranks)
    return up, down


def low_rank_of_up(insert: Inserter, match: MoEMatch, x_TD: fx.Node, routing: list[fx.Node]) -> tuple[fx.Node, ...]:
    """u_NR, lora_a_ERD and lora_b_EGFR of ``expert_up``, or nothing."""
    if not any(match.low_rank_up):
        return ()
    a_ERD, b_EGFR = _of_halves(insert, match.low_rank_up, match.dtype)
    a_ERD, b_EGFR = _padded(insert, a_ERD, b_EGFR)
    weight = insert.call("unsqueeze", insert.call("detach", a_ERD), 1)
    rows = insert.call(_ops.expert_up.default, insert.call("detach", x_TD), [weight], [], None, *routing, IDENTITY)
    return insert.call("squeeze", insert.items(rows, 1)[0], 1), a_ERD, b_EGFR


def low_rank_of_down(insert: Inserter, match: MoEMatch, a_rows: fx.Node, routing: list[fx.Node]) -> tuple[fx.Node, ...]:
    """v_NR, lora_a_ERF and lora_b_ERD of ``expert_down``, or nothing; ``a_rows`` is [N, F], or [N, 1, F]."""
    if not match.low_rank_down:
        return ()
    a_ERF, b_EDR = _factors(insert, match.low_rank_down, match.dtype)
    a_ERF, b_EDR = _padded(insert, a_ERF, b_EDR)
    b_ERD = insert.call("transpose", b_EDR, 1, 2)
    rows = insert.call("detach", a_rows)
    rows = rows if fake_of(rows).dim() == 3 else insert.call("unsqueeze", rows, 1)
    weight = insert.call("unsqueeze", insert.call("transpose", insert.call("detach", a_ERF), 1, 2), 1)
    return insert.call(_ops.expert_rows.default, rows, weight, routing[1], routing[3]), a_ERF, b_ERD


def _of_halves(insert: Inserter, halves: tuple[tuple[Factors, ...], ...], dtype: torch.dtype) -> tuple[fx.Node, fx.Node]:
    """One A and one B for all halves of up: ranks that they do not share stand beside each other, with zeros where they do not
    meet."""
    first = next(filter(None, halves))
    if all(_shared(half) == _shared(first) for half in halves):
        pairs = [_factors(insert, half, dtype) for half in halves]
        return pairs[0][0], insert.call(torch.stack, [b for _, b in pairs], 1)
    given = [_factors(insert, half, dtype) if half else None for half in halves]
    ranks = [fake_of(pair[0]).shape[1] if pair else 0 for pair in given]
    none_EFR = next(pair[1] for pair in given if pair)
    parts = []
    for i, pair in enumerate(given):
        before, behind = sum(ranks[:i]), sum(ranks[i + 1 :])
        if pair is None:
            parts.append(insert.call(torch.zeros_like, none_EFR))
        else:
            parts.append(insert.call(F.pad, pair[1], (before, behind)) if before + behind else pair[1])
    return _joined(insert, [pair[0] for pair in given if pair], 1), insert.call(torch.stack, parts, 1)


def _shared(half: tuple[Factors, ...]) -> list[tuple]:
    """What halves have in common where one A serves both of them."""
    return [(own.a, own.scale, own.scale_E) for own in half]


def _factors(insert: Inserter, adapters: tuple[Factors, ...], dtype: torch.dtype) -> tuple[fx.Node, fx.Node]:
    """A [E, R, inputs] and B [E, outputs, R] with the scale in it, in ``dtype``; the ranks of several adapters in a row."""
    pairs = [_pair(insert, own, dtype) for own in adapters]
    return _joined(insert, [a for a, _ in pairs], 1), _joined(insert, [b for _, b in pairs], 2)


def _pair(insert: Inserter, factors: Factors, dtype: torch.dtype) -> tuple[fx.Node, fx.Node]:
    a, b = insert.whole(factors.a), insert.whole(factors.b)
    if factors.scale_E is not None:
        b = insert.call(torch.mul, b, insert.call("reshape", insert.whole(factors.scale_E), (-1, 1, 1)))
    return insert.in_dtype(a, dtype), insert.in_dtype(insert.times(b, factors.scale), dtype)


def _joined(insert: Inserter, nodes: list[fx.Node], axis: int) -> fx.Node:
    return nodes[0] if len(nodes) == 1 else insert.call(torch.cat, nodes, axis)


def _padded(insert: Inserter, a_ERI: fx.Node, b: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Both factors as ``padded`` of ``ops.low_rank.factors`` gives them; b's last axis are its ranks."""
    missing = -fake_of(a_ERI).shape[1] % RANK_UNIT
    if missing:
        a_ERI, b = insert.call(F.pad, a_ERI, (0, 0, 0, missing)), insert.call(F.pad, b, (0, missing))
    if not fake_of(a_ERI).is_contiguous():
        a_ERI = insert.call("contiguous", a_ERI)
    if not fake_of(b).movedim(-1, 1).is_contiguous():
        columns_inner = insert.call("contiguous", insert.call("movedim", b, -1, 1))
        b = insert.call("movedim", columns_inner, 1, -1)
    return a_ERI, b
