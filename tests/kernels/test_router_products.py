"""Offline compiles of the router's products, and their numbers on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="compiles Triton kernels")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

from moeblaze_ops.kernels.configs import shared_memory_bytes
from moeblaze_ops.kernels.routing.router_products import launch_router_logits, launch_router_weight_grad
from moeblaze_ops.ops.router_products import router_logits, router_weight_grad
from tests.tools.offline import compile_launch, recorded_launches

# Each target with one dtype, and the others with much shared memory and with little.
LAYERS = [*((torch.bfloat16, 512, capability) for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)))]
LAYERS += [(*layer, capability) for layer in ((torch.float16, 4096), (torch.float32, 120)) for capability in ((8, 0), (12, 0))]


@pytest.mark.parametrize(("dtype", "D", "capability"), LAYERS, ids=str)
def test_kernels_compile_without_spills(dtype, D, capability):
    with recorded_launches(capability) as recorded:
        x, few, w, many = (torch.empty(rows, D, dtype=dtype, device="cuda") for rows in (32768, 64, 4, 256))
        launch_router_weight_grad(launch_router_logits(x, w), x)
        launch_router_logits(x, many), launch_router_logits(few, many, True), launch_router_logits(few, w)
    assert len(recorded) == 5
    for launch in recorded:
        resources = compile_launch(launch, capability)
        assert resources.spill_bytes == 0, launch.name
        assert resources.shared_bytes <= shared_memory_bytes(capability), launch.name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(65536, 512, 4), (32768, 4096, 12), (777, 200, 7), (1, 64, 1), (0, 64, 3)], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_products_on_a_gpu(sizes, dtype, strided):
    torch.manual_seed(0)
    T, D, E = sizes
    operands = [torch.randn(shape, device="cuda").to(dtype) for shape in ((T, D), (E, D), (T, E))]
    x, w, dlogits = [operand.T.contiguous().T if strided else operand for operand in operands]
    cases = [
        (lambda: router_logits(x, w), x.double() @ w.double().T, D),
        (lambda: router_weight_grad(dlogits, x), dlogits.double().T @ x.double(), T),
    ]
    for run, truth, contracted in cases:
        got = run()
        assert got.dtype == dtype and torch.equal(got, run())
        # One rounding to the dtype, and sums in fp32: as many roundings as terms, of sums as large as the root of their number.
        torch.testing.assert_close(got.double(), truth, rtol=torch.finfo(dtype).eps, atol=2**-22 * contracted)
