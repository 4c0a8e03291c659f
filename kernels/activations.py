"""Activations inside kernels: ``a = act(h)`` and its gradient, in fp32, from a program that is known at compile time.

A program is a text that ``kernels.formulas.program`` makes of a name or a formula. Triton runs through its steps while it
compiles, so that nothing of them is left but the arithmetic. Comparisons are written so that NaN stays NaN, and constants
stand to the right of tensors where they can, which the interpreter needs.
"""

import triton
import triton.language as tl

from moeblaze_ops.kernels.formulas.draws import draw
from moeblaze_ops.kernels.formulas.program import IDENTITY_PROGRAM

IDENTITY = tl.constexpr(IDENTITY_PROGRAM)


@triton.constexpr_function
def num_steps(program):
    return len([step for step in program.split("|")[0].split(";") if step])


@triton.constexpr_function
def reads_place(program):
    return "draw " in program


@triton.constexpr_function
def function_of(program, step):
    return program.split("|")[0].split(";")[step].split(" ")[0]


@triton.constexpr_function
def is_constant(program, step, operand):
    """True if an operand of a step is a constant; those that a step does not have are its first one."""
    operands = program.split("|")[0].split(";")[step].split(" ")[1:]
    return not operands[operand if operand < len(operands) else 0].isdigit()


@triton.constexpr_function
def operand_of(program, step, operand):
    """The number of a value, or a constant."""
    operands = program.split("|")[0].split(";")[step].split(" ")[1:]
    text = operands[operand if operand < len(operands) else 0]
    return int(text) if text.isdigit() else float(text)


@triton.constexpr_function
def is_constant_result(program, result):
    return not program.split("|")[1].split(" ")[result].isdigit()


@triton.constexpr_function
def result_of(program, result):
    text = program.split("|")[1].split(" ")[result]
    return int(text) if text.isdigit() else float(text)


@triton.jit
def _sigmoid(x):
    """``1 / (1 + exp(-x))``, zero below 2 ** -64, in five instructions, two of the special unit; a quotient takes eight.

    Its last step is no product: LLVM would fuse that with a sum behind it in some rows of a tile and in others not.
    """
    one_more = tl.exp2(x * -1.4426950408889634) + 1.0
    return tl.rsqrt(one_more * one_more)


@triton.jit
def _log1p(x):
    one_more = x + 1.0
    added = one_more - 1.0
    return tl.where(added == 0.0, x, tl.log(one_more) * tl.where(added == x, 1.0, x / added))


@triton.jit
def _expm1(x):
    # The series, where the difference would have few digits.
    series = x * (1 / 5040) + 1 / 720
    series = series * x + 1 / 120
    series = series * x + 1 / 24
    series = series * x + 1 / 6
    series = series * x + 0.5
    return tl.where(tl.abs(x) < 0.3, series * x * x + x, tl.exp(x) - 1.0)


@triton.jit
def _tanh(x):
    less = _expm1(tl.abs(x) * -2.0)
    magnitude = -less / (less + 2.0)
    return tl.where(x < 0.0, -magnitude, magnitude)


@triton.jit
def _softplus(x):
    return tl.where(x <= 0.0, 0.0, x) + _log1p(tl.exp(-tl.abs(x)))


@triton.jit
def _maximum(x, y):
    """NaN if either is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _apply(FUNCTION: tl.constexpr, x, y, z):
    """A function of up to three operands, of which one at least is a tensor."""
    if FUNCTION == "mul":
        return x * y
    elif FUNCTION == "add":
        return x + y
    elif FUNCTION == "sub":
        return x - y
    elif FUNCTION == "sigmoid":
        return _sigmoid(x)
    elif FUNCTION == "where":
        return tl.where(x, y, z)
    elif FUNCTION == "maximum":
        return _maximum(x, y)
    elif FUNCTION == "minimum":
        return _minimum(x, y)
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
        return tl.exp(x)
    elif FUNCTION == "erf":
        return tl.math.erf(x)
    elif FUNCTION == "half_erf":
        return tl.math.erf(x) * 0.5 + 0.5
    elif FUNCTION == "tanh":
        return _tanh(x)
    elif FUNCTION == "tanh_softplus":
        return _tanh(_softplus(x))
    elif FUNCTION == "softplus":
        return _softplus(x)
    elif FUNCTION == "abs":
        return tl.abs(x)
    elif FUNCTION == "log":
        return tl.log(x)
    elif FUNCTION == "log1p":
        return _log1p(x)
    elif FUNCTION == "expm1":
        return _expm1(x)
    elif FUNCTION == "sqrt":
        return tl.sqrt(x)
    elif FUNCTION == "rsqrt":
        return tl.rsqrt(x)
    elif FUNCTION == "sin":
        return tl.sin(x)
    elif FUNCTION == "draw":
        return draw(x, y, z)
    else:
        tl.static_assert(FUNCTION == "cos")
        return tl.cos(x)


@triton.jit
def _operand(values, PROGRAM: tl.constexpr, STEP: tl.constexpr, OPERAND: tl.constexpr):
    if is_constant(PROGRAM, STEP, OPERAND):
        return operand_of(PROGRAM, STEP, OPERAND)
    else:
        return values[operand_of(PROGRAM, STEP, OPERAND)]


@triton.jit
def _result(values, PROGRAM: tl.constexpr, RESULT: tl.constexpr):
    if is_constant_result(PROGRAM, RESULT):
        return tl.full(values[0].shape, result_of(PROGRAM, RESULT), tl.float32)
    else:
        return values[result_of(PROGRAM, RESULT)]


@triton.jit
def _run(values, PROGRAM: tl.constexpr):
    """The values of all steps, behind those given."""
    for step in tl.static_range(num_steps(PROGRAM)):
        x = _operand(values, PROGRAM, step, 0)
        y = _operand(values, PROGRAM, step, 1)
        z = _operand(values, PROGRAM, step, 2)
        values = values + (_apply(function_of(PROGRAM, step), x, y, z),)
    return values


@triton.jit
def _given(gate, up, da, parameters, place, PROGRAM: tl.constexpr):
    """What a program begins with; a parameter is a number, of which each element gets a copy."""
    values = (gate, up, da)
    for i in tl.static_range(len(parameters)):
        values = values + (tl.broadcast_to(parameters[i], gate.shape),)  # type: ignore[assignment]
    if reads_place(PROGRAM):
        values = values + place
    return values


@triton.jit
def activate(gate, up, parameters, place, PROGRAM: tl.constexpr):
    """``a`` from the fp32 pre-activations; ``up`` is ignored when the expert is ungated.

    ``parameters``: fp32 numbers. ``place``: the numbers of rows and of columns, [rows, 1] and [1, columns].
    """
    return _result(_run(_given(gate, up, gate, parameters, place, PROGRAM), PROGRAM), PROGRAM, 0)


@triton.jit
def activate_backward(gate, up, da, parameters, place, PROGRAM: tl.constexpr):
    """``(a, dgate, dup, dparameters)`` from the fp32 pre-activations and the gradient of ``a``; ``dup`` is unused when ungated.

    ``dparameters`` has the element's part of the gradient of each parameter.
    """
    values = _run(_given(gate, up, da, parameters, place, PROGRAM), PROGRAM)
    dparameters = ()
    for i in tl.static_range(len(parameters)):
        dparameters = dparameters + (_result(values, PROGRAM, 3 + i),)  # type: ignore[assignment]
    return _result(values, PROGRAM, 0), _result(values, PROGRAM, 1), _result(values, PROGRAM, 2), dparameters
