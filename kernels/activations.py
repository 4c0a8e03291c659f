"""Activations inside kernels: ``a = act(h)`` and its derivative, in fp32, chosen by a compile-time integer.

A gated activation is ``a = f(g) * u`` and an ungated one ``a = f(g)``, with the same ``f``: whether there is an
``u`` is known from the shape of ``h`` (``GATED``), so one integer names both. They must agree with the eager
formulas of ``moeblaze_ops.arguments.activations``. Comparisons are written so that NaN stays NaN, and constants stand to the
right of tensors, which the interpreter needs.
"""

import triton
import triton.language as tl

IDENTITY = tl.constexpr(0)
SILU = tl.constexpr(1)
GELU = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)
RELU = tl.constexpr(4)
RELU2 = tl.constexpr(5)
SWIGLU_CLAMPED = tl.constexpr(6)
SWIGLU_LIMITED = tl.constexpr(7)

ACTIVATION_IDS = {
    "identity": IDENTITY.value,
    "swiglu": SILU.value,
    "geglu": GELU.value,
    "geglu_tanh": GELU_TANH.value,
    "reglu": RELU.value,
    "swiglu_clamped": SWIGLU_CLAMPED.value,
    "swiglu_limited": SWIGLU_LIMITED.value,
    "silu": SILU.value,
    "gelu": GELU.value,
    "gelu_tanh": GELU_TANH.value,
    "relu": RELU.value,
    "relu2": RELU2.value,
}
"""The integer that kernels know each activation by."""

SQRT_HALF = tl.constexpr(0.7071067811865476)
RSQRT_TWO_PI = tl.constexpr(0.3989422804014327)
GELU_SLOPE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)
GELU_CUBIC = tl.constexpr(0.044715)
CLAMP_LIMIT = tl.constexpr(7.0)
CLAMP_SLOPE = tl.constexpr(1.702)
SILU_LIMIT = tl.constexpr(10.0)


@triton.jit
def _nonlinearity(x, ACTIVATION: tl.constexpr):
    """``f(x)``."""
    if ACTIVATION == SILU or ACTIVATION == SWIGLU_LIMITED:  # noqa: SIM109
        return x * tl.sigmoid(x)
    elif ACTIVATION == GELU:
        return 0.5 * x * (1.0 + tl.math.erf(x * SQRT_HALF))
    elif ACTIVATION == GELU_TANH:
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z).
        return x * tl.sigmoid(x * GELU_SLOPE * (x * x * GELU_CUBIC + 1.0))
    elif ACTIVATION == RELU:
        return tl.where(x <= 0.0, 0.0, x)
    elif ACTIVATION == RELU2:
        positive = tl.where(x <= 0.0, 0.0, x)
        return positive * positive
    elif ACTIVATION == SWIGLU_CLAMPED:
        return x * tl.sigmoid(x * CLAMP_SLOPE)
    else:
        return x


@triton.jit
def _derivative(x, ACTIVATION: tl.constexpr):
    """``f'(x)``."""
    if ACTIVATION == SILU or ACTIVATION == SWIGLU_LIMITED:  # noqa: SIM109
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == GELU:
        density = tl.exp(-0.5 * x * x) * RSQRT_TWO_PI
        return 0.5 * (1.0 + tl.math.erf(x * SQRT_HALF)) + x * density
    elif ACTIVATION == GELU_TANH:
        cubic = x * x * GELU_CUBIC
        s = tl.sigmoid(x * GELU_SLOPE * (cubic + 1.0))
        return s + x * GELU_SLOPE * (3.0 * cubic + 1.0) * s * (1.0 - s)
    elif ACTIVATION == RELU:
        return tl.where(x <= 0.0, 0.0, 1.0)
    elif ACTIVATION == RELU2:
        return tl.where(x <= 0.0, 0.0, 2.0 * x)
    elif ACTIVATION == SWIGLU_CLAMPED:
        s = tl.sigmoid(x * CLAMP_SLOPE)
        return s * (1.0 + x * CLAMP_SLOPE * (1.0 - s))
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _clamped(gate, up, LIMIT: tl.constexpr):
    """The gate bounded from above, and ``up`` from both sides."""
    return tl.where(gate > LIMIT, LIMIT, gate), tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """``a`` from the fp32 pre-activations; ``up`` is ignored when the expert is ungated."""
    if not GATED:
        return _nonlinearity(gate, ACTIVATION)
    elif ACTIVATION == SWIGLU_CLAMPED:
        gate, up = _clamped(gate, up, CLAMP_LIMIT)
        return _nonlinearity(gate, ACTIVATION) * (up + 1.0)
    elif ACTIVATION == SWIGLU_LIMITED:
        gate, up = _clamped(gate, up, SILU_LIMIT)
        return _nonlinearity(gate, ACTIVATION) * up
    else:
        return _nonlinearity(gate, ACTIVATION) * up


@triton.jit
def activate_backward(gate, up, da, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """``(a, dgate, dup)`` from the fp32 pre-activations and the gradient of ``a``; ``dup`` is unused when ungated."""
    if not GATED:
        return _nonlinearity(gate, ACTIVATION), da * _derivative(gate, ACTIVATION), da
    elif ACTIVATION == SWIGLU_CLAMPED:
        bounded_gate, bounded_up = _clamped(gate, up, CLAMP_LIMIT)
        value = _nonlinearity(bounded_gate, ACTIVATION)
        dgate = da * (bounded_up + 1.0) * _derivative(bounded_gate, ACTIVATION)
        dup = da * value
        outside = (up > CLAMP_LIMIT) | (up < -CLAMP_LIMIT)
        return value * (bounded_up + 1.0), tl.where(gate > CLAMP_LIMIT, 0.0, dgate), tl.where(outside, 0.0, dup)
    elif ACTIVATION == SWIGLU_LIMITED:
        bounded_gate, bounded_up = _clamped(gate, up, SILU_LIMIT)
        value = _nonlinearity(bounded_gate, ACTIVATION)
        dgate = da * bounded_up * _derivative(bounded_gate, ACTIVATION)
        outside = (up > SILU_LIMIT) | (up < -SILU_LIMIT)
        return value * bounded_up, tl.where(gate > SILU_LIMIT, 0.0, dgate), tl.where(outside, 0.0, da * value)
    else:
        value = _nonlinearity(gate, ACTIVATION)
        return value * up, da * up * _derivative(gate, ACTIVATION), da * value
