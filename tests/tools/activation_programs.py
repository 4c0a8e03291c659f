"""Programs of activations without a GPU: kernels' functions in Triton's interpreter, and programs of short forms in numpy."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from moeblaze_ops.kernels.activations import activate, activate_backward
from moeblaze_ops.kernels.formulas.named import is_gated, num_parameters
from moeblaze_ops.kernels.formulas.program import gradient_program, value_program
from moeblaze_ops.kernels.tiles import load_parameters

SMALLEST_NORMAL = np.float32(2.0**-126)


class Hardware:
    """The steps of a program of short forms, in fp32, or without any error in fp64.

    Each instruction of the hardware is taken to err by as much as it is documented to, up or down at random, unless its result is
    a number of fp32; products and sums round to fp32 one by one, as they do where a GPU does not fuse them.
    """

    def __init__(self, dtype: type):
        self.random = np.random.default_rng(0)
        self.is_exact = dtype == np.float64

    def _off(self, exact, relative=2.0**-22, absolute=0.0):
        if self.is_exact:
            return exact
        sign = self.random.choice(np.array([-1.0, 1.0]), exact.shape)
        sign = np.where(exact == exact.astype(np.float32), 0.0, sign)
        return self._flushed((exact * (1 + sign * relative) + sign * absolute).astype(np.float32))

    def _flushed(self, x):
        return x if self.is_exact else np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)

    def step(self, function, x, y=None, z=None):
        exact = self._flushed(x).astype(np.float64) if x.dtype == np.float32 else x
        match function:
            case "exp2":
                return self._off(np.exp2(exact))
            case "rcp":
                return self._off(1 / exact)
            case "log2":
                logarithm = np.log2(exact)
                return np.where((exact > 0.5) & (exact < 2), self._off(logarithm, 0, 2.0**-22), self._off(logarithm))
            case "sin_of_turn":
                return self._off(np.sin(exact), 0, 2.0**-20.5)
            case "cos_of_turn":
                return self._off(np.cos(exact), 0, 2.0**-20.5)
            case "nearest":
                return np.rint(x)
            case "div":
                return self._off(x.astype(np.float64) / y)
            case "erf":
                return torch.erf(torch.from_numpy(x.astype(np.float64))).numpy().astype(x.dtype)
            case "rsqrt":
                return self._off(1 / np.sqrt(exact))
            case "where":
                return np.where(x, y, z)
            case _:
                return _EXACT[function](x, *(other for other in (y,) if other is not None))


_EXACT = {
    "mul": np.multiply, "add": np.add, "sub": np.subtract, "neg": np.negative, "abs": np.abs, "maximum": np.maximum,
    "minimum": np.minimum, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or, "not": np.logical_not, "sqrt": np.sqrt, "log": np.log,
    "log1p": np.log1p,
}  # fmt: skip


def run_short(program: str, values: list, dtype: type = np.float32) -> list:
    """What ``program`` gives for g or h, u, the gradient of a, and parameters."""
    hardware = Hardware(dtype)
    values = [np.asarray(value, dtype=dtype) for value in values]

    def operand(text):
        return values[int(text)] if text.isdigit() else np.broadcast_to(dtype(float(text)), values[0].shape)

    steps, _, results = program.partition("|")
    with np.errstate(all="ignore"):
        for step in filter(None, steps.split(";")):
            function, *operands = step.split(" ")
            values.append(hardware.step(function, *map(operand, operands)))
    return [torch.from_numpy(np.array(operand(result), dtype=dtype)) for result in results.split(" ")]


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
    tl.store(a_ptr + places, activate(gate, up, parameters, (places, places), VALUE))
    a, dgate, dup, dparameters = activate_backward(gate, up, da, parameters, (places, places), GRADIENT)
    for i in tl.static_range(NUM_PARAMETERS):
        tl.store(dparams_ptr + i * BLOCK + places, dparameters[i])
    tl.store(a_ptr + BLOCK + places, a)
    tl.store(dh_ptr + places, dgate)
    if GATED:
        tl.store(dh_ptr + BLOCK + places, dup)


def run_in_interpreter(activation: str, h_GN: Tensor, da_N: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """The value twice, and the gradients of the halves and of the parameters, in fp32; N is a power of two."""
    count, num_numbers = num_parameters(activation), len(da_N)
    a_2N, dh_GN, dparams_PN = torch.empty(2, num_numbers), torch.empty(h_GN.shape), torch.empty(count, num_numbers)
    options = {"VALUE": value_program(activation), "GRADIENT": gradient_program(activation), "GATED": is_gated(activation)}
    given = h_GN.contiguous(), da_N.contiguous(), parameters.contiguous()
    _activate_kernel[(1,)](*given, a_2N, dh_GN, dparams_PN, **options, NUM_PARAMETERS=count, BLOCK=num_numbers)
    return a_2N, torch.cat([dh_GN, dparams_PN])
