"""Activations of the Hopper epilogues: programs of short forms, of which most steps are one instruction.

Two epilogue warps keep up with the tensor cores only if each element costs them few instructions. ``2 ** x``, ``1 / x``, the
logarithm, sine and cosine are those of the hardware (2 ulp, denormals flushed); ``formulas/short_forms.py`` makes a formula
of them and says how good it is.
"""

from moeblaze_ops.kernels.activations import (
    function_of,
    is_constant,
    is_constant_result,
    num_steps,
    operand_of,
    reads_place,
    result_of,
)
from moeblaze_ops.kernels.hopper.gluon_api import PropagateNan, gl, gluon

EXP2 = gl.constexpr("ex2.approx.ftz.f32 $0, $1;")
LOG2 = gl.constexpr("lg2.approx.ftz.f32 $0, $1;")
RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")
SINE = gl.constexpr("sin.approx.ftz.f32 $0, $1;")
COSINE = gl.constexpr("cos.approx.ftz.f32 $0, $1;")

PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def _short(ASM: gl.constexpr, x):
    return gl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _log1p(x):
    series = x * (1.0 - x * (0.5 - x * (1 / 3 - x * 0.25)))
    return gl.where(gl.abs(x) < 0.03, series, gl.log(x + 1.0))


@gluon.jit
def _nearest(x):
    """The whole number next to x: in fp32 a number of 3 * 2 ** 22 has no digits behind the point."""
    return (x + 12582912.0) - 12582912.0


@gluon.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@gluon.jit
def _draw(seed, row, column):
    """As ``kernels/formulas/draws.py`` has it; 23 bits as the digits of a number in [1, 2) take no conversion."""
    own = _mixed(row.to(gl.uint32) ^ _mixed(seed.to(gl.uint32)))
    bits = own + column.to(gl.uint32) * 0x9E3779B1
    bits = (bits ^ (bits >> 16)) * 0x21F0AAAD
    bits = (bits ^ (bits >> 15)) * ((own >> 1) | 1)
    return ((bits >> 9) | 0x3F800000).to(gl.float32, bitcast=True) - 1.0


@gluon.jit
def _apply(FUNCTION: gl.constexpr, x, y, z):
    """A function of up to three operands, of which one at least is a tensor."""
    if FUNCTION == "mul":
        return x * y
    elif FUNCTION == "add":
        return x + y
    elif FUNCTION == "sub":
        return x - y
    elif FUNCTION == "exp2":
        return _short(EXP2, x)
    elif FUNCTION == "rcp":
        return _short(RECIPROCAL, x)
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
    elif FUNCTION == "log2":
        return _short(LOG2, x)
    elif FUNCTION == "erf":
        return gl.erf(x)
    elif FUNCTION == "abs":
        return gl.abs(x)
    elif FUNCTION == "log":
        return gl.log(x)
    elif FUNCTION == "log1p":
        return _log1p(x)
    elif FUNCTION == "sqrt":
        return gl.sqrt(x)
    elif FUNCTION == "rsqrt":
        return gl.rsqrt(x)
    elif FUNCTION == "nearest":
        return _nearest(x)
    elif FUNCTION == "draw":
        return _draw(x, y, z)
    elif FUNCTION == "sin_of_turn":
        return _short(SINE, x)
    else:
        gl.static_assert(FUNCTION == "cos_of_turn")
        return _short(COSINE, x)


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
def _given(gate, up, da, parameters, place, PROGRAM: gl.constexpr):
    """What a program begins with; a parameter is a number, of which each element gets a copy."""
    values = (gate, up, da)
    for i in gl.static_range(len(parameters)):
        values = values + (gl.full(gate.shape, parameters[i], gl.float32, gate.type.layout),)
    if reads_place(PROGRAM):
        values = values + place
    return values


@gluon.jit
def activate(gate, up, parameters, place, PROGRAM: gl.constexpr):
    """``a`` from the fp32 pre-activations; ``up`` is ignored when the expert is ungated.

    ``parameters``: fp32 numbers. ``place``: the numbers of rows and of columns, [rows, 1] and [1, columns].
    """
    return _result(_run(_given(gate, up, gate, parameters, place, PROGRAM), PROGRAM), PROGRAM, 0)


@gluon.jit
def activate_backward(gate, up, da, parameters, place, PROGRAM: gl.constexpr):
    """``(a, dgate, dup, dparameters)`` from the fp32 pre-activations and the gradient of ``a``; ``dup`` is unused when ungated.

    ``dparameters`` has the element's part of the gradient of each parameter.
    """
    values = _run(_given(gate, up, da, parameters, place, PROGRAM), PROGRAM)
    dparameters = ()
    for i in gl.static_range(len(parameters)):
        dparameters = dparameters + (_result(values, PROGRAM, 3 + i),)
    return _result(values, PROGRAM, 0), _result(values, PROGRAM, 1), _result(values, PROGRAM, 2), dparameters
