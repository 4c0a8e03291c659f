"""Activations of the Hopper epilogues: the formulas of ``kernels/activations.py`` on a shorter sigmoid.

Two epilogue warps keep up with the tensor cores only if each element costs them few instructions. The sigmoid here
takes four (``ex2`` and ``rcp`` in their approximate forms, 2 ulp each, denormals flushed), against a dozen for the
portable one, and the value and the slope of an activation share it. Comparisons are written so that NaN stays NaN.
"""

from moeblaze_ops.kernels.activations import (
    CLAMP_LIMIT,
    CLAMP_SLOPE,
    GELU,
    GELU_CUBIC,
    GELU_SLOPE,
    GELU_TANH,
    IDENTITY,
    RELU,
    RELU2,
    RSQRT_TWO_PI,
    SILU,
    SILU_LIMIT,
    SQRT_HALF,
    SWIGLU_CLAMPED,
    SWIGLU_LIMITED,
)
from moeblaze_ops.kernels.hopper.gluon_api import gl, gluon

SIGMOID_ASM = gl.constexpr(
    """{
    .reg .f32 t;
    mul.ftz.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.ftz.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
    }"""
)
"""``1 / (1 + 2 ** (-x log2 e))``."""


@gluon.jit
def sigmoid(x):
    return gl.inline_asm_elementwise(SIGMOID_ASM, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _value_and_slope(x, ACTIVATION: gl.constexpr):
    """``(f(x), f'(x))``; what the caller does not use costs nothing."""
    if ACTIVATION == SILU or ACTIVATION == SWIGLU_LIMITED:  # noqa: SIM109
        s = sigmoid(x)
        value = x * s
        slope = s + value * (1.0 - s)
    elif ACTIVATION == GELU:
        cdf = 0.5 + 0.5 * gl.erf(x * SQRT_HALF)
        value = x * cdf
        slope = cdf + x * (RSQRT_TWO_PI * gl.exp(-0.5 * x * x))
    elif ACTIVATION == GELU_TANH:
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z).
        s = sigmoid(GELU_SLOPE * x * (1.0 + GELU_CUBIC * x * x))
        value = x * s
        slope = s + value * (1.0 - s) * (GELU_SLOPE * (1.0 + 3.0 * GELU_CUBIC * x * x))
    elif ACTIVATION == RELU:
        value = gl.where(x <= 0.0, 0.0, x)
        slope = gl.where(x <= 0.0, 0.0, 1.0)
    elif ACTIVATION == RELU2:
        positive = gl.where(x <= 0.0, 0.0, x)
        value = positive * positive
        slope = 2.0 * positive
    elif ACTIVATION == SWIGLU_CLAMPED:
        s = sigmoid(CLAMP_SLOPE * x)
        value = x * s
        slope = s + CLAMP_SLOPE * value * (1.0 - s)
    else:
        gl.static_assert(ACTIVATION == IDENTITY)
        value = x
        slope = gl.where(x == x, 1.0, 1.0)
    return value, slope


@gluon.jit
def _clamped(gate, up, LIMIT: gl.constexpr):
    """The gate bounded from above, and ``up`` from both sides."""
    return gl.where(gate > LIMIT, LIMIT, gate), gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))


@gluon.jit
def activate(gate, up, ACTIVATION: gl.constexpr, GATED: gl.constexpr):
    """``a`` from the fp32 pre-activations; ``up`` is ignored when the expert is ungated."""
    if ACTIVATION == SWIGLU_CLAMPED:
        gate, up = _clamped(gate, up, CLAMP_LIMIT)
        up = 1.0 + up
    elif ACTIVATION == SWIGLU_LIMITED:
        gate, up = _clamped(gate, up, SILU_LIMIT)
    value, _ = _value_and_slope(gate, ACTIVATION)
    if GATED:
        return value * up
    else:
        return value


@gluon.jit
def activate_backward(gate, up, da, ACTIVATION: gl.constexpr, GATED: gl.constexpr):
    """``(a, dgate, dup)`` from the fp32 pre-activations and the gradient of ``a``; ``dup`` is unused when ungated."""
    if ACTIVATION == SWIGLU_CLAMPED:
        bounded_gate, bounded_up = _clamped(gate, up, CLAMP_LIMIT)
        value, slope = _value_and_slope(bounded_gate, ACTIVATION)
        slope = gl.where(gate > CLAMP_LIMIT, 0.0, slope)
        dup = gl.where(gl.abs(up) > CLAMP_LIMIT, 0.0, da * value)
        factor = 1.0 + bounded_up
        return value * factor, da * factor * slope, dup
    elif ACTIVATION == SWIGLU_LIMITED:
        bounded_gate, bounded_up = _clamped(gate, up, SILU_LIMIT)
        value, slope = _value_and_slope(bounded_gate, ACTIVATION)
        slope = gl.where(gate > SILU_LIMIT, 0.0, slope)
        dup = gl.where(gl.abs(up) > SILU_LIMIT, 0.0, da * value)
        return value * bounded_up, da * bounded_up * slope, dup
    elif GATED:
        value, slope = _value_and_slope(gate, ACTIVATION)
        return value * up, da * up * slope, da * value
    else:
        value, slope = _value_and_slope(gate, ACTIVATION)
        return value, da * slope, da
