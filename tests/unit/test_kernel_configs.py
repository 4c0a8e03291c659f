import itertools
import math

import pytest

from moeblaze_ops.kernels.configs import (
    COLUMN_UNIT,
    MOST_RANKS_AT_ONCE,
    ROW_BLOCK,
    Operands,
    bias_grad_splits,
    block_rows,
    choose_bias_grad,
    choose_column_ranges,
    choose_combine,
    choose_dispatch,
    choose_expert_down_backward,
    choose_expert_rows,
    choose_expert_up,
    choose_low_rank_backward,
    choose_row_dot,
    choose_weight_grad,
    shared_memory_bytes,
)

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
OPERANDS = (Operands(2, True), Operands(4, True), Operands(4, False))
WIDTHS = (None, 1, 24, 768, 2880)


def is_power_of_two(number):
    return number & (number - 1) == 0


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("operands", OPERANDS)
def test_gemm_tiles_fit_the_schedule_and_the_device(operands, capability):
    for D, F, rows in itertools.product(WIDTHS, WIDTHS, (None, 1, 40, 5000)):
        for tile, num_weights in (
            (choose_expert_up(operands, D, F, True, rows, capability), 2),
            (choose_expert_up(operands, D, F, False, rows, capability), 1),
            (choose_expert_rows(operands, F, D, rows, capability), 1),
            (choose_expert_down_backward(operands, D, F, rows, capability), 1),
        ):
            assert ROW_BLOCK % tile.block_m == 0
            assert min(tile.block_m, tile.block_n, tile.block_k) >= 16
            assert is_power_of_two(tile.block_n) and is_power_of_two(tile.block_k)
            stage = (tile.block_m + num_weights * tile.block_n) * tile.block_k * operands.element_size
            assert tile.num_stages * stage <= shared_memory_bytes(capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("operands", OPERANDS)
def test_weight_grad_tiles_fit_the_device(operands, capability):
    for F, D in itertools.product(WIDTHS, WIDTHS):
        tile = choose_weight_grad(operands, F, D, capability)
        stage = (tile.block_m + tile.block_n) * tile.block_k * operands.element_size
        assert (tile.num_stages + 1) // 2 * stage <= shared_memory_bytes(capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("operands", OPERANDS)
def test_low_rank_backward_tiles_fit_the_device(operands, capability):
    for width, rank, gathered in itertools.product(WIDTHS, (8, 16, 24, MOST_RANKS_AT_ONCE), (False, True)):
        tile = choose_low_rank_backward(operands, width, rank, gathered, capability)
        assert tile.block_n >= rank and is_power_of_two(tile.block_m) and is_power_of_two(tile.block_k)
        stage = (tile.block_m + tile.block_n) * tile.block_k * operands.element_size
        assert tile.num_stages * stage <= shared_memory_bytes(capability)
    assert choose_low_rank_backward(operands, None, MOST_RANKS_AT_ONCE + 1, False, capability) is None


@pytest.mark.parametrize(("rows", "block"), [(None, 128), (0, 16), (16, 16), (17, 32), (33, 64), (64, 64), (65, 128)])
def test_few_rows_take_small_blocks(rows, block):
    assert block_rows(rows) == block


def test_narrow_problems_take_narrow_tiles():
    tile = choose_expert_up(Operands(2, True), 24, 40, True, None, (9, 0))
    assert (tile.block_n, tile.block_k) == (64, 32)


@pytest.mark.parametrize("width", WIDTHS)
def test_memory_bound_tiles_cover_narrow_rows_whole(width):
    for tile in (choose_combine(width), choose_row_dot(width), choose_bias_grad(width)):
        assert is_power_of_two(tile.rows) and is_power_of_two(tile.columns)
        assert width is None or tile.columns < 2 * max(width, 16)


@pytest.mark.parametrize("columns", [256, 768, 1280])
def test_sums_of_a_range_of_columns_waste_no_tile(columns):
    assert columns % choose_combine(columns).columns == 0


@pytest.mark.parametrize(
    ("num_rows", "D", "widths"),
    [
        (32768 * 8, 2048, [1024, 1024]),
        (24576 * 8, 1536, [768, 768]),
        (32768 * 8, 4096, [1024] * 4),
        (16384 * 2, 4096, [4096]),
        (2**18, 2880, [1024, 1024, 832]),
        (2**18, 1000, [1000]),
        (2**20, 768, [256] * 3),
        (2**24, 700, [256, 256, 188]),
        (0, 2**20, [2**20]),
    ],
    ids=str,
)
def test_column_ranges_of_512_mib(num_rows, D, widths):
    ranges = choose_column_ranges(num_rows, D, 2, 512 << 20)
    assert [len(columns) for columns in ranges] == widths


def test_column_ranges_cover_all_columns_in_as_few_parts_as_fit():
    for num_rows, D, units in itertools.product((1, 1000), (1, 255, 256, 257, 2880, 8192), range(1, 40)):
        limit = units * COLUMN_UNIT * num_rows * 4
        ranges = choose_column_ranges(num_rows, D, 4, limit)
        assert [column for columns in ranges for column in columns] == list(range(D))
        widths = [len(columns) for columns in ranges]
        assert max(widths) == widths[0] <= units * COLUMN_UNIT
        assert max(widths[:-1], default=0) - min(widths[:-1], default=0) <= COLUMN_UNIT
        assert all(width % COLUMN_UNIT == 0 for width in widths[:-1])
        num_units = math.ceil(D / COLUMN_UNIT)
        assert len(ranges) == 1 or math.ceil(num_units / (len(ranges) - 1)) > units


def test_columns_are_not_cut_without_a_limit_or_a_size():
    assert choose_column_ranges(2**30, 8192, 2, None) == choose_column_ranges(None, 8192, 2, 1) == [range(8192)]


def test_a_range_is_one_unit_at_least():
    assert {len(columns) for columns in choose_column_ranges(2**30, 8192, 2, 1)} == {COLUMN_UNIT}


@pytest.mark.parametrize("num_experts", [1, 2, 30, 31, 32, 127, 128, 1022])
def test_dispatch_bins_hold_experts_unused_slots_and_the_rest(num_experts):
    config = choose_dispatch(num_experts)
    assert num_experts + 2 <= config.bins <= 1024
    assert config.chunk % config.step == 0
    assert is_power_of_two(config.bins) and is_power_of_two(config.chunk)


def test_dispatch_of_many_experts_has_long_chunks():
    config = choose_dispatch(4096)
    assert (config.bins, config.chunk) == (1024, 8192)


@pytest.mark.parametrize(("num_experts", "blocks", "splits"), [(4, 4, 64), (128, 8, 1), (0, 1, 64), (8, None, 8)])
def test_bias_grad_splits_rows_of_few_experts(num_experts, blocks, splits):
    assert bias_grad_splits(num_experts, blocks) == splits
