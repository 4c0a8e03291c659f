"""The functions that kernels have for an activation, in Triton's interpreter: one block of numbers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.activations import activate, activate_backward
from moeblaze_ops.kernels.formulas.named import is_gated, num_parameters
from moeblaze_ops.kernels.formulas.program import gradient_program, value_program
from moeblaze_ops.kernels.tiles import load_parameters


@triton.jit
def _activate_kernel(
    h_ptr,
    da_ptr,
    params_ptr,
    a_ptr,
    dh_ptr,
    dparams_ptr,
    VALUE: tl.constexpr,
    GRADIENT: tl.constexpr,
    GATED: tl.constexpr,
    NUM_PARAMETERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Value, and with the gradient's program the value once more beside the gradients, of one block."""
    places = tl.arange(0, BLOCK)
    gate = tl.load(h_ptr + places)
    up = gate
    if GATED:
        up = tl.load(h_ptr + BLOCK + places)
    da = tl.load(da_ptr + places)
    parameters = load_parameters(params_ptr, tl.program_id(0), NUM_PARAMETERS)
    tl.store(a_ptr + places, activate(gate, up, parameters, VALUE))
    a, dgate, dup, dparameters = activate_backward(gate, up, da, parameters, GRADIENT)
    for i in tl.static_range(NUM_PARAMETERS):
        tl.store(dparams_ptr + i * BLOCK + places, dparameters[i])
    tl.store(a_ptr + BLOCK + places, a)
    tl.store(dh_ptr + places, dgate)
    if GATED:
        tl.store(dh_ptr + BLOCK + places, dup)


def run(activation: str, h_GN: Tensor, da_N: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """The value twice, and the gradients of the halves and of the parameters, in fp32; N is a power of two."""
    count, num_numbers = num_parameters(activation), len(da_N)
    a_2N, dh_GN, dparams_PN = torch.empty(2, num_numbers), torch.empty(h_GN.shape), torch.empty(count, num_numbers)
    options = {"VALUE": value_program(activation), "GRADIENT": gradient_program(activation), "GATED": is_gated(activation)}
    given = h_GN.contiguous(), da_N.contiguous(), parameters.contiguous()
    _activate_kernel[(1,)](*given, a_2N, dh_GN, dparams_PN, **options, NUM_PARAMETERS=count, BLOCK=num_numbers)
    return a_2N, torch.cat([dh_GN, dparams_PN])
