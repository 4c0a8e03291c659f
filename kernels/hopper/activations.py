"""Activations of the Hopper epilogues: the programs of ``kernels/activations.py`` on shorter functions.

Two epilogue warps keep up with the tensor cores only if each element costs them few instructions. The sigmoid here
takes four (``ex2`` and ``rcp`` in their approximate forms, 2 ulp each, denormals flushed), against a dozen for the
portable one. The others are good to 3e-5 of their value, as results are rounded to 16 bits; sine and cosine to 1e-6, of up to
100,000.
"""

from moeblaze_ops.kernels.activations import (
    function_of,
    is_constant,
    is_constant_result,
    num_steps,
    operand_of,
    result_of,
)
from moeblaze_ops.kernels.hopper.gluon_api import PropagateNan, gl, gluon

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

EXP_ASM = gl.constexpr(
    """{
    .reg .f32 t;
    mul.ftz.f32 t, $1, 0f3FB8AA3B;
    ex2.approx.ftz.f32 $0, t;
    }"""
)
"""``2 ** (x log2 e)``."""

RECIPROCAL_ASM = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")

TANH_ASM = gl.constexpr(
    """{
    .reg .f32 t;
    mul.ftz.f32 t, $1, 0f4038AA3B;
    ex2.approx.ftz.f32 t, t;
    add.ftz.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 t, t;
    fma.rn.ftz.f32 $0, t, 0fC0000000, 0f3F800000;
    }"""
)
"""``1 - 2 / (1 + 2 ** (2 x log2 e))``."""

TANH_SOFTPLUS_ASM = gl.constexpr(
    """{
    .reg .f32 t, n;
    min.NaN.f32 t, $1, 0f41A00000;
    mul.ftz.f32 t, t, 0f3FB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.ftz.f32 n, t, 0f40000000;
    mul.ftz.f32 n, n, t;
    add.ftz.f32 t, n, 0f40000000;
    rcp.approx.ftz.f32 t, t;
    mul.ftz.f32 $0, n, t;
    }"""
)
"""``n / (n + 2)`` with ``n = e (e + 2)`` and ``e = exp(x)``, which is 1 from 20 on."""

PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def _short(ASM: gl.constexpr, x):
    return gl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _log1p(x):
    series = x * (1.0 - x * (0.5 - x * (1 / 3 - x * 0.25)))
    return gl.where(gl.abs(x) < 0.03, series, gl.log(x + 1.0))


@gluon.jit
def _expm1(x):
    return gl.where(gl.abs(x) < 0.012, x * (x * 0.5) + x, _short(EXP_ASM, x) - 1.0)


@gluon.jit
def _half_erf(x, e):
    """``(1 + erf(x)) / 2``, good to 2e-5 of the smaller one of it and its difference to 1, down to x of -6.

    ``erfc(|x|)`` is ``e = exp(-x^2)``, which a derivative needs anyway, times a polynomial in ``1 / (1 + 0.52 |x|)``.
    """
    t = _short(RECIPROCAL_ASM, gl.abs(x) * 0.52 + 1.0)
    series = 0.1309548 + t * (0.44595106 + t * -0.18759854)
    tail = t * (0.29127404 + t * (0.31940293 + t * series)) * (e * 0.5)
    return gl.where(x < 0.0, tail, 1.0 - tail)


@gluon.jit
def _nearest(x):
    """The whole number next to x: in fp32 a number of 3 * 2 ** 22 has no digits behind the point."""
    return (x + 12582912.0) - 12582912.0


@gluon.jit
def _sine_around(x, half_turns, n):
    """``sin(x - half_turns * pi)``, the other way round for an odd n, to 1e-6; a difference of less than 1.6, or no digits."""
    x = (x - half_turns * 3.140625) - half_turns * 9.67653589793e-4
    x = gl.minimum(gl.maximum(x, -1.6, propagate_nan=PROPAGATE_NAN), 1.6, propagate_nan=PROPAGATE_NAN)
    z = x * x
    sine = x * (0.999999061 + z * (-0.166655539 + z * (8.31189762e-3 + z * -1.84880738e-4)))
    odd = n - 2.0 * _nearest(n * 0.5)
    return sine - sine * (odd * odd * 2.0)


@gluon.jit
def _sin(x):
    n = _nearest(x * 0.3183098861837907)
    return _sine_around(x, n, n)


@gluon.jit
def _cos(x):
    n = _nearest(x * 0.3183098861837907 - 0.5)
    return -_sine_around(x, n + 0.5, n)


@gluon.jit
def _tanh(x):
    return gl.where(gl.abs(x) < 0.008, x, _short(TANH_ASM, x))


@gluon.jit
def _softplus(x):
    """``max(x, 0) + log(1 + e)`` with ``e = exp(-|x|)``, and the logarithm over e as a polynomial, to 1e-5 of it."""
    e = _short(EXP_ASM, -gl.abs(x))
    series = 0.325206659 + e * (-0.210048631 + e * (0.101222217 + e * -0.0238691248))
    series = 0.999991598 + e * (-0.499361362 + e * series)
    return gl.maximum(x, 0.0, propagate_nan=PROPAGATE_NAN) + e * series


@gluon.jit
def _apply(FUNCTION: gl.constexpr, x, y, z):
    """A function of up to three operands, of which one at least is a tensor."""
    if FUNCTION == "mul":
        return x * y
    elif FUNCTION == "add":
        return x + y
    elif FUNCTION == "sub":
        return x - y
    elif FUNCTION == "sigmoid":
        return _short(SIGMOID_ASM, x)
    elif FUNCTION == "where":
        return gl.where(x, y, z)
    elif FUNCTION == "maximum":
        return gl.maximum(x, y, propagate_nan=PROPAGATE_NAN)
    elif FUNCTION == "minimum":
        return gl.minimum(x, y, propagate_nan=PROPAGATE_NAN)
    elif FUNCTION == "neg":
        return -x
    elif FUNCTION == "gt":
        return x > y
    elif FUNCTION == "lt":
        return x < y
    elif FUNCTION == "ge":
        return x >= y
    elif FUNCTION == "le":
        return x <= y
    elif FUNCTION == "eq":
        return x == y
    elif FUNCTION == "ne":
        return x != y
    elif FUNCTION == "and":
        return x & y
    elif FUNCTION == "or":
        return x | y
    elif FUNCTION == "not":
        return ~x
    elif FUNCTION == "div":
        return x / y
    elif FUNCTION == "exp":
        return _short(EXP_ASM, x)
    elif FUNCTION == "erf":
        return gl.erf(x)
    elif FUNCTION == "half_erf":
        return _half_erf(x, y)
    elif FUNCTION == "tanh":
        return _tanh(x)
    elif FUNCTION == "tanh_softplus":
        return _short(TANH_SOFTPLUS_ASM, x)
    elif FUNCTION == "softplus":
        return _softplus(x)
    elif FUNCTION == "abs":
        return gl.abs(x)
    elif FUNCTION == "log":
        return gl.log(x)
    elif FUNCTION == "log1p":
        return _log1p(x)
    elif FUNCTION == "expm1":
        return _expm1(x)
    elif FUNCTION == "sqrt":
        return gl.sqrt(x)
    elif FUNCTION == "rsqrt":
        return gl.rsqrt(x)
    elif FUNCTION == "sin":
        return _sin(x)
    else:
        gl.static_assert(FUNCTION == "cos")
        return _cos(x)


@gluon.jit
def _operand(values, PROGRAM: gl.constexpr, STEP: gl.constexpr, OPERAND: gl.constexpr):
    if is_constant(PROGRAM, STEP, OPERAND):
        return operand_of(PROGRAM, STEP, OPERAND)
    else:
        return values[operand_of(PROGRAM, STEP, OPERAND)]


@gluon.jit
def _result(values, PROGRAM: gl.constexpr, RESULT: gl.constexpr):
    if is_constant_result(PROGRAM, RESULT):
        return gl.full(values[0].shape, result_of(PROGRAM, RESULT), gl.float32, values[0].type.layout)
    else:
        return values[result_of(PROGRAM, RESULT)]


@gluon.jit
def _run(values, PROGRAM: gl.constexpr):
    """The values of all steps, behind those given."""
    for step in gl.static_range(num_steps(PROGRAM)):
        x = _operand(values, PROGRAM, step, 0)
        y = _operand(values, PROGRAM, step, 1)
        z = _operand(values, PROGRAM, step, 2)
        values = values + (_apply(function_of(PROGRAM, step), x, y, z),)
    return values


@gluon.jit
def load_parameters(params_ptr, expert, NUM_PARAMETERS: gl.constexpr):
    """What the activation of an expert reads as p0, p1 and so on."""
    parameters = ()
    for i in gl.static_range(NUM_PARAMETERS):
        parameters = parameters + (gl.load(params_ptr + expert * NUM_PARAMETERS + i),)
    return parameters


@gluon.jit
def _with_parameters(gate, up, da, parameters):
    """What a program begins with; a parameter is a number, of which each element gets a copy."""
    values = (gate, up, da)
    for i in gl.static_range(len(parameters)):
        values = values + (gl.full(gate.shape, parameters[i], gl.float32, gate.type.layout),)
    return values


@gluon.jit
def activate(gate, up, parameters, PROGRAM: gl.constexpr):
    """``a`` from the fp32 pre-activations; ``up`` is ignored when the expert is ungated. ``parameters``: fp32 numbers."""
    return _result(_run(_with_parameters(gate, up, gate, parameters), PROGRAM), PROGRAM, 0)


@gluon.jit
def activate_backward(gate, up, da, parameters, PROGRAM: gl.constexpr):
    """``(a, dgate, dup, dparameters)`` from the fp32 pre-activations and the gradient of ``a``; ``dup`` is unused when ungated.

    ``dparameters`` has the element's part of the gradient of each parameter.
    """
    values = _run(_with_parameters(gate, up, da, parameters), PROGRAM)
    dparameters = ()
    for i in gl.static_range(len(parameters)):
        dparameters = dparameters + (_result(values, PROGRAM, 3 + i),)
    return _result(values, PROGRAM, 0), _result(values, PROGRAM, 1), _result(values, PROGRAM, 2), dparameters
