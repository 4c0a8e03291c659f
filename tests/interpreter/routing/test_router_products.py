import pytest
import torch

from moeblaze_ops.kernels.routing.router_products import launch_router_logits, launch_router_weight_grad
from tests.tools.kernel_helpers import assert_near, oracle

SIZES = [(1, 16, 4), (70, 40, 3), (64, 256, 1), (150, 24, 16), (0, 16, 4)]


@pytest.mark.parametrize(
    ("sizes", "dtype", "strided"),
    [
        *((sizes, torch.float32, number % 2 == 1) for number, sizes in enumerate(SIZES)),
        *((SIZES[1], dtype, strided) for dtype in (torch.bfloat16, torch.float16) for strided in (False, True)),
    ],
    ids=str,
)
def test_products_match_oracle(sizes, dtype, strided):
    T, D, E = sizes
    operands = [torch.randn(shape).to(dtype) for shape in ((T, D), (E, D), (T, E))]
    x, w, dlogits = [operand.T.contiguous().T if strided else operand for operand in operands]
    logits, dw = launch_router_logits(x, w), launch_router_weight_grad(dlogits, x)
    assert logits.dtype == dw.dtype == dtype and logits.is_contiguous() and dw.is_contiguous()
    assert_near([logits, dw], [oracle("router_logits", x, w), oracle("router_weight_grad", dlogits, x)])


@pytest.mark.parametrize("wide", [False, True])
def test_logits_of_several_tiles_of_experts(wide):
    x, w = torch.randn(70, 40).bfloat16(), torch.randn(150, 40).bfloat16()
    logits = launch_router_logits(x, w, wide)
    assert logits.dtype == (torch.float32 if wide else torch.bfloat16)
    assert_near([logits], [oracle("router_logits", x, w)])
    assert all(torch.equal(launch_router_logits(x[i : i + 1], w, wide), logits[i : i + 1]) for i in (0, 69))


def test_a_token_reaches_its_own_logits_only():
    x, w = torch.randn(70, 16), torch.randn(4, 16)
    x[66] = float("nan")
    assert launch_router_logits(x, w).isnan().any(1).nonzero().tolist() == [[66]]
