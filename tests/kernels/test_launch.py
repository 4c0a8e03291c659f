"""Launches of kernels that were compiled before do not look for them again. No device: kernels that list what reaches them."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from moeblaze_ops.kernels import launch as launches
from moeblaze_ops.kernels.launch import launch

PARAMETERS = [SimpleNamespace(name=name, is_constexpr=name == "BLOCK") for name in ("x_ptr", "D", "stride", "BLOCK")]


class Kernel(launches.JITFunction):
    def __init__(self, *parameters):
        self.params, self.compiled, self.launched = list(parameters), 0, []

    def __getitem__(self, grid):
        def compile_and_run(*args, **keywords):
            self.compiled += 1
            return {(*grid, 1, 1): lambda *args: self.launched.append(args)}

        return compile_and_run


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launches, "is_traceable", lambda: False)
    monkeypatch.setattr(launches, "_compiled_kernels", {})


X = torch.randn(8, 4)


def test_a_compiled_kernel_gets_all_its_arguments():
    kernel = Kernel(*PARAMETERS)
    for _ in range(3):
        launch(kernel, 5, X, 64, 1, BLOCK=16, num_warps=4)
    launch(kernel, 5, X + 1, 128, 1, BLOCK=16, num_warps=4)
    assert kernel.compiled == 1
    assert [args[1:] for args in kernel.launched] == [(64, 1, 16), (64, 1, 16), (128, 1, 16)]
    assert kernel.launched[0][0] is X


OTHERS = {
    "alignment": ((X.view(-1)[1:], 64, 1), {}),
    "dtype": ((X.double(), 64, 1), {}),
    "no tensor": ((None, 64, 1), {}),
    "a number that 16 does not divide": ((X, 63, 1), {}),
    "a number that is 1": ((X, 1, 1), {}),
    "a number of more than 32 bits": ((X, 1 << 40, 1), {}),
    "a compile-time number": ((X, 64, 1), {"BLOCK": 32}),
    "an option": ((X, 64, 1), {"num_warps": 8}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_triton_compiles_for_is_compiled(name):
    kernel = Kernel(*PARAMETERS)
    launch(kernel, 5, X, 64, 1, BLOCK=16, num_warps=4)
    args, keywords = OTHERS[name]
    launch(kernel, 5, *args, **{"BLOCK": 16, "num_warps": 4} | keywords)
    assert kernel.compiled == 2 and not kernel.launched


def test_compile_time_arguments_by_position_are_left_to_triton():
    kernel = Kernel(*PARAMETERS)
    for _ in range(3):
        launch(kernel, 5, X, 64, 1, 16, num_warps=4)
    assert kernel.compiled == 3


def test_defaults_are_left_to_triton():
    kernel = Kernel(*PARAMETERS, SimpleNamespace(name="FLAG", is_constexpr=True))
    for _ in range(3):
        launch(kernel, 5, X, 64, 1, BLOCK=16, num_warps=4)
    assert kernel.compiled == 3
