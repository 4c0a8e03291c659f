"""What a dtype holds of a number is what a tensor of it holds."""

import random

import pytest
import torch

from moeblaze_ops.lowering.graph.stored_numbers import holds_all, rounds_between, stored_number

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_floating_point(dtype):
    rng = random.Random(0)
    numbers = [0.0, 0.1, -1.5, 65504.0, 1e5, torch.inf, *(rng.choice((1, -1)) * 10 ** rng.uniform(-50, 45) for _ in range(500))]
    expected = torch.tensor(numbers, dtype=torch.float64).to(dtype).tolist()
    assert [stored_number(number, dtype) for number in numbers] == expected


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers(dtype):
    rng = random.Random(0)
    numbers = [0, 127, 128, 255, 256, -1, *(rng.randint(-(2**40), 2**40) for _ in range(500))]
    assert [stored_number(number, dtype) for number in numbers] == torch.tensor(numbers).to(dtype).tolist()
    assert [stored_number(number, dtype) for number in (1.5, 2.0, 0.9)] == [1, 2, 0]


def test_truth_values():
    assert [stored_number(number, torch.bool) for number in (0, 0.0, 0.5, -3, torch.inf)] == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("number", [torch.inf, 300.5])
def test_what_is_not_defined(number):
    assert stored_number(number, torch.uint8) is None


@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        (torch.float32, [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int16, torch.bool]),
        (torch.bfloat16, [torch.float8_e5m2, torch.int8, torch.uint8, torch.bool]),
        (torch.float16, [torch.float8_e5m2, torch.float8_e4m3fn, torch.int8, torch.bool]),
        (torch.int32, [torch.int16, torch.uint8, torch.bool]),
        (torch.bool, []),
    ],
)
def test_dtypes_that_hold_all_numbers_of_another(dtype, held):
    wider = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.complex64]
    assert all(holds_all(dtype, source) for source in (dtype, *held))
    assert not any(holds_all(dtype, source) for source in wider if source not in (dtype, *held))


def test_casts_that_round_on_the_way():
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    assert all(rounds_between(dtypes) for dtypes in [(fp32, bf16, fp32), (bf16, fp16, bf16), (fp32, torch.float8_e4m3fn, bf16)])
    assert not any(
        rounds_between(dtypes) for dtypes in [(fp32, bf16), (fp32, bf16, bf16), (bf16, fp32, fp16), (torch.int8, bf16, fp32)]
    )
