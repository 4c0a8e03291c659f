import itertools

import pytest

from moeblaze_ops.kernels.configs import (
    ROW_BLOCK,
    Operands,
    bias_grad_splits,
    block_rows,
    choose_bias_grad,
    choose_combine,
    choose_dispatch,
    choose_expert_down_backward,
    choose_expert_rows,
    choose_expert_up,
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
