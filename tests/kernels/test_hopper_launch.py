"""Launches of Hopper kernels find the compiled kernel again, and never the wrong one."""

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("moeblaze_ops.kernels.hopper.gluon_api", exc_type=ImportError)

from moeblaze_ops.kernels.hopper import launch as hopper_launch
from moeblaze_ops.kernels.hopper.gluon_api import TensorDescriptor
from moeblaze_ops.kernels.launch import COMPILE_OPTIONS

DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Plan:
    tile: int


class Kernel:
    """Stands for a ``JITFunction``: a call compiles and runs, and what it returns only runs."""

    def __init__(self):
        self.compiled = []
        self.ran = []

    def __getitem__(self, grid):
        def compile_and_run(*args, **options):
            self.compiled.append((grid, args, options))
            return Compiled(self)

        return compile_and_run


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.ran.append((grid, args))


def launch(kernel, *args, programs=132, device=DEVICE, **options):
    hopper_launch.launch_compiled(kernel, programs, device, args, **options)


def test_a_second_launch_runs_what_the_first_one_compiled():
    kernel = Kernel()
    first, second = torch.empty(64), torch.empty(128)
    launch(kernel, first, 48, Plan(128), (first, None), num_warps=4)
    launch(kernel, second, 64, Plan(128), (second, None), programs=78, num_warps=4)
    assert kernel.compiled == [((132,), (first, 48, Plan(128), (first, None)), {"num_warps": 4, **COMPILE_OPTIONS})]
    assert kernel.ran == [((78, 1, 1), (second, 64, Plan(128), (second, None)))]


ALIGNED = torch.empty(64)
TWINS = {
    "alignment": ((ALIGNED,), (ALIGNED[1:],)),
    "alignment in a tuple": (((ALIGNED, ALIGNED),), ((ALIGNED, ALIGNED[1:]),)),
    "dtype": ((ALIGNED,), (ALIGNED.to(torch.bfloat16),)),
    "an integer of 1": ((3,), (1,)),
    "a multiple of 16": ((3,), (48,)),
    "a wide integer": ((48,), (2**31,)),
    "no tensor": ((ALIGNED,), (None,)),
    "no biases": (((ALIGNED,),), ((),)),
    "plan": ((Plan(128),), (Plan(256),)),
}


@pytest.mark.parametrize("first, second", TWINS.values(), ids=TWINS)
def test_what_is_compiled_for_tells_launches_apart(first, second):
    kernel = Kernel()
    launch(kernel, *first)
    launch(kernel, *second)
    assert len(kernel.compiled) == 2


def test_options_and_devices_tell_launches_apart():
    kernel = Kernel()
    launch(kernel, 3, maxnreg=96)
    launch(kernel, 3, maxnreg=168)
    launch(kernel, 3, maxnreg=168, device=torch.device("cuda", 1))
    assert len(kernel.compiled) == 3


def test_descriptors_are_as_triton_makes_them():
    rows = torch.empty(64, 2, 96, dtype=torch.bfloat16).transpose(0, 1)
    for tensor in (rows, torch.empty_like(rows)):
        made = hopper_launch.describe(tensor, 1, 16, 32)
        assert made == TensorDescriptor.from_tensor(tensor, [1, 16, 32], made.layout)
        assert made.base is tensor


def test_descriptors_keep_no_tensor_alive():
    assert all(
        not isinstance(value, torch.Tensor)
        for value in hopper_launch._description(torch.Size((64, 32)), (32, 1), (16, 32), torch.bfloat16).values()
    )


def test_what_tma_cannot_describe_is_refused():
    with pytest.raises(AssertionError, match="16-byte aligned"):
        hopper_launch.describe(torch.empty(64, 33, dtype=torch.bfloat16)[:, :32], 16, 32)
