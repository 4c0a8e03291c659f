"""Backward of ``expert_mlp_ranged`` by the portable kernels, and what of them works on a part of the rows."""

import pytest
import torch
from torch.utils._pytree import tree_map

from moeblaze_ops.cpu import dispatch as cpu_routing
from moeblaze_ops.kernels.experts.weight_grad import launch_expert_weight_grad, launch_expert_weight_grad_add
from moeblaze_ops.kernels.routing.range_routing import launch_range_routing
from moeblaze_ops.kernels.rows.add_rows import add_rows
from moeblaze_ops.memory.row_ranges import RangeSizes
from moeblaze_ops.ops.recomputed import expert_mlp_ranged
from tests.corpus.layers import ROUTINGS
from tests.tools.kernel_helpers import assert_near, layer_for, oracle, poison_unused


@pytest.mark.parametrize(
    ("case", "dtype", "weight_on"),
    [
        *((case, torch.float32, ("output", "input")[number % 2]) for number, case in enumerate(ROUTINGS)),
        *(("unused_slots", torch.bfloat16, weight_on) for weight_on in ("output", "input")),
    ],
    ids=str,
)
def test_gradients_in_ranges_match_oracle(case, dtype, weight_on, monkeypatch):
    layer = layer_for(case, bias=True, dtype=dtype)
    monkeypatch.setattr(RangeSizes, "largest", lambda sizes, limit: (384, 128) if case == "ragged_tail" else (16, 7))
    monkeypatch.setattr("moeblaze_ops.memory.row_ranges.ROW_BLOCK", 128 if case == "ragged_tail" else 1)
    dout_TD = torch.randn_like(layer.x_TD)
    parameters = (layer.w_up, layer.b_up, layer.w_down, layer.b_down)
    rest = (layer.weights_TK, *layer.routing, layer.activation, weight_on == "input", 1 << 40, [True] * 5)
    given = (dout_TD, layer.x_TD, *parameters, *rest)
    got = tree_map(lambda gradient: gradient.to(dtype), expert_mlp_ranged.backward_launcher()(*given))
    expected = oracle("expert_mlp_ranged_backward", *given)
    # A third product than in other tests, and sums of x and the weights that are rounded more than once.
    assert_near(got, expected, roundings=32.0 if dtype == torch.float32 else 12.0)


@pytest.mark.parametrize("sizes", [[0, 0, 0], [0, 256, 0, 128, 0], [1, 0, 300, 128, 129], [1] * 40])
@pytest.mark.parametrize(("first", "size"), [(256, 128), (1, 300)])
def test_routing_of_ranges(sizes, first, size):
    """With unused slots behind the last expert's rows, and experts without rows everywhere."""
    offsets_E1 = torch.tensor([0, *sizes]).cumsum(0).int()
    num_rows = sum(sizes) + 400
    starts = [0, *range(first, num_rows, size)]
    ranges = [range(start, end) for start, end in zip(starts, [*starts[1:], num_rows], strict=True)]
    expected = [cpu_routing.range_routing(offsets_E1, rows, rows is ranges[-1]) for rows in ranges]
    fresh_RE = torch.stack([fresh_E for _, _, fresh_E, _ in expected])
    assert (fresh_RE.sum(0) == 1).all()
    for rows, routing in zip(ranges, expected, strict=True):
        got = launch_range_routing(offsets_E1, rows, rows is ranges[-1])
        for one, other in zip(got, routing, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype
            assert one.is_contiguous() and one.storage_offset() % 4 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_fresh_experts_are_written_and_others_added_to(dtype, weighted):
    """What is fresh holds NaN before, also where it has no rows; what is not and has no rows keeps NaN."""
    layer = layer_for("empty_expert", dtype=dtype)
    slots, offsets = layer.routing[:2]
    assert (offsets.diff() == 0).tolist() == [False] * 4 + [True]
    for fresh in ([1, 0, 1, 0, 1], [1, 1, 0, 0, 0]):
        fresh_E = torch.tensor(fresh, dtype=torch.int32)
        for like, groups in ((layer.w_up, 2), (layer.w_down, 1)):
            grouped = torch.randn(slots.shape[0], groups, 36).to(dtype)
            poison_unused(layer.routing, grouped)
            rest = (layer.weights_TK if weighted else None, slots, offsets, 2)
            before = torch.randn(like[0].shape).to(dtype)
            written = launch_expert_weight_grad(layer.x_TD, grouped, like, *rest)[0]
            sums = torch.empty_like(like[0]).copy_(before)
            sums[fresh_E.bool()] = float("nan")
            sums[4] = float("nan")
            launch_expert_weight_grad_add(layer.x_TD, grouped, [sums], *rest, fresh_E)
            exact = oracle("expert_weight_grad", layer.x_TD, grouped, like, *rest)[0]
            for e in range(5):
                if fresh[e]:
                    assert torch.equal(sums[e], written[e])
                elif e == 4:
                    assert sums[e].isnan().all()
                else:
                    assert_near(sums[e], before[e].double() + exact[e], roundings=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [5, 12])
def test_rows_are_added_to_tokens_that_have_some(dtype, num_tokens):
    """By token where there are fewer tokens than rows, and by row where there are more."""
    rows_ND, out_TD = torch.randn(7, 40).to(dtype), torch.randn(num_tokens, 40).to(dtype)
    positions_TK = torch.full((num_tokens, 2), -1, dtype=torch.int32)
    positions_TK[:5] = torch.tensor([[0, 3], [-1, 5], [-1, -1], [2, -1], [4, 1]])
    slots_N = torch.tensor([0, 9, 6, 1, 8, 3, -1], dtype=torch.int32)
    rows_ND[6] = out_TD[2] = float("nan")
    expected = out_TD.double()
    for t, row in ((0, 0), (0, 3), (1, 5), (3, 2), (4, 4), (4, 1)):
        expected[t] += rows_ND[row].double()
    # As the rows from 100 on; what stands before and behind them adds nothing.
    positions_TK = torch.where(positions_TK < 0, positions_TK, positions_TK + 100)
    positions_TK[2] = torch.tensor([99, 107])
    add_rows(rows_ND, None, positions_TK, out_TD, slots_N, 100)
    assert out_TD[2].isnan().all()
    others = [t for t in range(num_tokens) if t != 2]
    assert_near(out_TD[others], expected[others])
