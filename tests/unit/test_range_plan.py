"""Where ranges of rows end and where they keep dh and the activation, once the routing is known."""

import itertools
import random

import pytest
import torch

import moeblaze_ops
from moeblaze_ops.memory import row_ranges
from moeblaze_ops.memory.range_plan import Planner, padded
from moeblaze_ops.memory.row_ranges import RangeSizes, range_sizes, routing_bytes
from moeblaze_ops.ops.recomputed import expert_mlp_ranged
from moeblaze_ops.ops.recomputed.ranged_backward import cpu_device
from tests.corpus.layers import ROUTINGS, STORAGES, make_layer
from tests.tools.op_harness import step

ops = torch.ops.moeblaze


def gradients(D, F, E, stored_as="packed", dtype=torch.bfloat16):
    """Weight gradients without memory."""

    def empty(*shape):
        return torch.empty(shape, dtype=dtype, device="meta")

    if stored_as == "split":
        return [empty(E, 1, F, D), empty(E, 1, F, D), empty(E, D, F).transpose(1, 2)]
    if stored_as == "transposed":
        return [empty(E, D, 2 * F).transpose(1, 2).unflatten(1, (2, F)), empty(E, F, D)]
    return [empty(E, 2, F, D), empty(E, D, F).transpose(1, 2)]


def offsets_of(counts):
    return [0, *itertools.accumulate(counts)]


def plans_from(planner, start):
    plans = []
    while start < planner.end:
        plans.append(planner.take(start))
        start = plans[-1].rows.stop
    return plans


def interval(view, flats):
    """Which gradient a view lies in, and its first element there."""
    number = next(i for i, flat in enumerate(flats) if view.untyped_storage()._cdata == flat.untyped_storage()._cdata)
    return number, view.storage_offset()


@pytest.mark.parametrize("stored_as", ["packed", "split", "transposed"])
@pytest.mark.parametrize("seed", range(12))
def test_what_is_written_in_a_range_is_none_of_its_memory(stored_as, seed):
    numbers = random.Random(seed)
    D, F, E = numbers.choice([(256, 128, 8), (384, 512, 5), (128, 256, 40)])
    counts = [numbers.choice([0, 0, 1, 100, 300, 5 * D]) if seed % 3 else 2 * D for _ in range(E)]
    offsets = offsets_of(counts)
    sizes = range_sizes(D, F, E, torch.bfloat16, True)
    limit = 300 * (sizes.dh + sizes.wa)
    start = numbers.randrange(0, max(1, offsets[-1] // 2))
    planner = Planner(offsets, gradients(D, F, E, stored_as), sizes, limit, max(offsets[-1], start + 1))
    plans = plans_from(planner, start)
    assert [row for plan in plans for row in plan.rows] == list(range(start, planner.end))
    for plan in plans:
        num_rows = len(padded(plan.rows))
        first_unwritten = E if plan.rows.stop == planner.end else next((e for e in range(E) if offsets[e] >= plan.rows.stop), E)
        taken = []
        own = 0
        for view, row_bytes in ((plan.dh, sizes.dh), (plan.wa, sizes.activation)):
            if view is None:
                own += num_rows * row_bytes
                continue
            number, begin = interval(view, planner.flat)
            end = begin + num_rows * row_bytes // 2
            assert begin % 8 == 0
            assert begin >= planner.flat[number].numel() // E * first_unwritten
            assert end <= planner.flat[number].numel()
            assert all(number != other or end <= low or high <= begin for other, low, high in taken)
            taken.append((number, begin, end))
        assert own + num_rows * sizes.partials <= limit
        column_bytes = plan.column_bytes(sizes, limit)
        assert num_rows * sizes.wide_columns <= column_bytes <= limit


def test_ranges_end_where_experts_do_unless_much_sooner():
    D, F, E = 256, 512, 4
    sizes = range_sizes(D, F, E, torch.bfloat16, True)
    limit = 512 * (sizes.dh + sizes.wa)

    def stops(counts):
        offsets = offsets_of(counts)
        return [plan.rows.stop for plan in plans_from(Planner(offsets, [], sizes, limit, offsets[-1]), 0)]

    assert stops([300, 300, 300, 300]) == [300, 600, 900, 1200]
    assert stops([100, 700, 300, 100]) == [512, 800, 1200]
    assert stops([250, 500, 400, 100]) == [250, 750, 1250]
    assert stops([0, 0, 512, 0]) == [512]


def test_experts_as_large_as_their_gradients_take_few_ranges():
    """The coarse layer with 240 MiB: nine more ranges of a fixed number of rows, at most six where the gradients lend memory."""
    T, D, F, E, K = 16384, 4096, 14336, 8, 2
    sizes, limit = range_sizes(D, F, E, torch.bfloat16, True), (240 << 20) - routing_bytes(T * K, E)
    first, *others = row_ranges.row_ranges(T * K, E, sizes, 240 << 20)
    assert len(others) == 9
    numbers = random.Random(0)
    for _ in range(20):
        counts = [0] * E
        for _ in range(T * K):
            counts[numbers.randrange(E)] += 1
        offsets = offsets_of(counts)
        plans = plans_from(Planner(offsets, gradients(D, F, E), sizes, limit, offsets[-1]), first.stop)
        assert len(plans) <= 6
        assert sum(plan.rows.stop not in offsets for plan in plans) <= 3


def planned(monkeypatch, first, rows_of_limit):
    """Lets the first range have some rows and the memory of its own be that of some rows; what is planned is recorded."""
    monkeypatch.setattr(row_ranges, "ROW_BLOCK", 1)
    monkeypatch.setattr(RangeSizes, "largest", lambda sizes, limit: (first, 1))
    take, plans = Planner.take, []

    def recorded(planner, start):
        planner.limit = rows_of_limit * (planner.sizes.dh + planner.sizes.wa)
        plans.append(take(planner, start))
        return plans[-1]

    monkeypatch.setattr(Planner, "take", recorded)
    return plans


def arguments(layer, weight_on="output"):
    parameters = (layer.x_TD, layer.w_up, layer.b_up, layer.w_down, layer.b_down, layer.weights_TK)
    return *parameters, *layer.routing, layer.activation, weight_on == "input", 1 << 40


def assert_equals_oracle(layer, weight_on="output"):
    dout = torch.randn_like(layer.x_TD)
    got = step(ops.expert_mlp_ranged(*arguments(layer, weight_on)), layer, dout)
    for ours, oracle in zip(got, step(layer.oracle(weight_on), layer, dout), strict=True):
        torch.testing.assert_close(ours, oracle)


@pytest.mark.parametrize("case", [case for case in ROUTINGS if case != "ragged_tail"])
@pytest.mark.parametrize("weight_on", ["output", "input"])
@pytest.mark.parametrize("rows", [(3, 1), (7, 11), (1, 4)], ids=str)
def test_planned_ranges_match_reference(case, weight_on, rows, monkeypatch):
    torch.manual_seed(0)
    planned(monkeypatch, *rows)
    assert_equals_oracle(make_layer(case, bias=True), weight_on)


@pytest.mark.parametrize("stored_as", STORAGES)
def test_planned_ranges_match_reference_for_every_storage(stored_as, monkeypatch):
    torch.manual_seed(1)
    plans = planned(monkeypatch, 100, 20)
    assert_equals_oracle(make_layer(stored_as=stored_as, bias=True))
    assert len(plans) > 1
    assert any(plan.dh is not None for plan in plans) and any(plan.wa is not None for plan in plans)
    assert plans[-1].dh is None and plans[-1].wa is None


@pytest.mark.parametrize("frozen", [("w_up",), ("w_down", "b_down"), ("x_TD",), ("x_TD", "w_up", "b_up")], ids=str)
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_planned_ranges_with_what_is_frozen(frozen, weight_on, monkeypatch):
    torch.manual_seed(4)
    plans = planned(monkeypatch, 9, 5)
    layer = make_layer("unused_slots", bias=True)
    for name in frozen:
        value = getattr(layer, name)
        setattr(layer, name, value.detach() if name == "x_TD" else [weight.detach() for weight in value])
    candidates = (layer.x_TD, *layer.w_up, *layer.b_up, *layer.w_down, *layer.b_down, layer.weights_TK)
    leaves = [leaf for leaf in candidates if leaf.requires_grad]
    dout = torch.randn_like(layer.x_TD)
    torch.testing.assert_close(
        torch.autograd.grad(ops.expert_mlp_ranged(*arguments(layer, weight_on)), leaves, dout),
        torch.autograd.grad(layer.oracle(weight_on), leaves, dout),
    )
    assert len(plans) > 1


def test_nothing_of_the_user_is_written_over(monkeypatch):
    """Gradients that are added to hold what was there before: no range keeps anything in them."""
    torch.manual_seed(2)
    plans = planned(monkeypatch, 8, 6)
    module = moeblaze_ops.MoE(8, 12, 4, 2, keep="input", dtype=torch.float64)
    x = torch.randn(60, 8, dtype=torch.float64)
    expected = torch.autograd.grad(module(x).square().sum(), [module.w_up, module.w_down])
    for parameter in (module.w_up, module.w_down):
        parameter.grad = torch.ones_like(parameter)
        moeblaze_ops.accumulate_grad(parameter)
    monkeypatch.setattr("moeblaze_ops.functional.choose_parts", lambda *args: ("ranges", 1 << 40))
    module(x).square().sum().backward()
    assert len(plans) > 2 and all(plan.dh is None and plan.wa is None for plan in plans)
    for parameter, gradient in zip((module.w_up, module.w_down), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 1 + gradient)


def test_the_routing_is_read_while_the_first_range_is_under_way(monkeypatch):
    torch.manual_seed(3)
    planned(monkeypatch, 5, 3)
    happened = []
    device = cpu_device()

    def read(tensor):
        happened.append("asked")
        return lambda: (happened.append("read"), tensor.tolist())[1]

    def backward(*args):
        happened.append("range")
        return device.expert_mlp_backward(*args)

    noted = device._replace(read=read, expert_mlp_backward=backward)
    monkeypatch.setattr(expert_mlp_ranged, "cpu_device", lambda: noted)
    assert_equals_oracle(make_layer())
    assert happened[:3] == ["asked", "range", "read"] and set(happened[3:]) == {"range"}


def test_a_single_range_reads_nothing(monkeypatch):
    device = cpu_device()._replace(read=None)
    monkeypatch.setattr(expert_mlp_ranged, "cpu_device", lambda: device)
    assert_equals_oracle(make_layer())
