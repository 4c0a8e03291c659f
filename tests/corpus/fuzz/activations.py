"""Random activations written in torch's functions: their formula must have their value, and its derivative their gradient.

    python tests/corpus/fuzz/activations.py --seeds 0:10000
    TRITON_INTERPRET=1 python tests/corpus/fuzz/activations.py --seeds 0:10000 --learned --kernels

``--learned`` draws those that read one to four learned parameters and counts no others. ``--kernels`` compares what kernels run,
too: their functions in Triton's interpreter, and the programs of short forms with the errors that Hopper's instructions have.

Each is traced to a formula, printed and read again; value and gradient, that of learned parameters too, are compared with
autograd through the function itself in fp64, and in fp32 and bf16 up to the rounding of their results. Numbers are continuous,
so that none meets a kink but by a constant of its own. With each a near miss is drawn, the function with something in it that
mixes rows or features, is random, or reads a tensor of its own: it must be refused.
"""

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[3])]

from moeblaze_ops.arguments.activations import activate, activation_gradient, parameter_gradient  # noqa: E402
from moeblaze_ops.arguments.traced_activations import trace_activation  # noqa: E402
from moeblaze_ops.kernels.formulas.named import num_parameters  # noqa: E402
from moeblaze_ops.kernels.formulas.program import gradient_program, value_program  # noqa: E402
from tests.tools.activation_programs import run_in_interpreter, run_short  # noqa: E402
from tests.tools.kernel_helpers import mend_interpreter  # noqa: E402

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sigmoid, torch.tanh, torch.relu, torch.erf, torch.abs, torch.neg, torch.sin, torch.cos, torch.square, F.silu, F.gelu,
    F.softplus, F.mish, F.elu, F.selu, F.celu, F.hardswish, F.hardsigmoid, F.leaky_relu, F.logsigmoid, F.softsign, F.relu6,
    F.hardtanh, F.hardshrink, F.softshrink, F.tanhshrink,
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: torch.exp(-x.abs()),
    lambda x: torch.exp(torch.clamp(x, max=2.0)),
    lambda x: torch.expm1(torch.clamp(x, max=1.0)),
    lambda x: torch.log1p(x.abs()),
    lambda x: torch.log(x * x + 0.5),
    lambda x: torch.sqrt(x * x + 0.1),
    lambda x: torch.rsqrt(x * x + 0.3),
    lambda x: torch.reciprocal(x.abs() + 0.7),
    lambda x: (x.abs() + 0.2) ** 1.5,
    lambda x: torch.tanh(x) ** 3,
    lambda x: 1 / (1 + torch.exp(-x)),
    lambda x: torch.log(1 + torch.exp(-x.abs())),
    lambda x: F.softplus(x, beta=2.0, threshold=3.0),
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.sub, torch.mul, torch.mul, torch.mul, torch.maximum, torch.minimum,
    lambda x, y: x / (y.abs() + 0.5),
    lambda x, y: torch.where(x > y, x, 0.3 * y),
    lambda x, y: torch.where((x > 0.1) & ~(y < -0.2), x * y, y),
    lambda x, y: torch.where((x <= -0.4) | (y >= 0.9), y, x - y),
]  # fmt: skip


NEAR_MISSES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.softmax(-1),
    lambda x: x.cumsum(0),
    lambda x: x.flip(-1),
    lambda x: x - x.mean(),
    lambda x: x * x.amax(-1, keepdim=True),
    lambda x: F.dropout(x, 0.5),
    lambda x: x * torch.rand_like(x),
    lambda x: x * _OF_ITS_OWN,
    lambda x: x.round(),
    lambda x: x @ _MATRIX,
    lambda x: torch.roll(x, 1, 0),
    lambda x: x.sort(-1).values,
]
_OF_ITS_OWN, _MATRIX = torch.tensor(1.5), torch.ones(3, 3)
"""A tensor that is no argument, and a matrix of the width with which functions are traced."""


def random_function(rng: random.Random, gated: bool, depth: int, num_parameters: int = 0) -> Callable[..., Tensor]:
    """A function of one or two tensors and some numbers, of at most ``depth`` functions inside each other."""
    if depth == 0 or rng.random() < 0.1:
        place = rng.randrange(2 if gated else 1)
        return lambda *given: given[place]
    kind = rng.random()
    inner = random_function(rng, gated, depth - 1, num_parameters)
    if num_parameters and rng.random() < 0.4:
        place, join = (2 if gated else 1) + rng.randrange(num_parameters), rng.choice(BINARY)
        return lambda *given: join(inner(*given), given[place])
    if kind < 0.45:
        function = rng.choice(UNARY)
        return lambda *halves: function(inner(*halves))
    if kind < 0.6:
        low, high = sorted(round(rng.uniform(-2, 2), 2) for _ in range(2))
        low, high = rng.choice([(low, high), (None, high), (low, None), (-abs(high), abs(high))])
        return lambda *halves: inner(*halves).clamp(low, high)
    if kind < 0.75:
        scale, shift = round(rng.uniform(-2, 2), 2), round(rng.uniform(-1, 1), 2)
        return lambda *halves: inner(*halves) * scale + shift
    other, join = random_function(rng, gated, depth - 1, num_parameters), rng.choice(BINARY)
    return lambda *halves: join(inner(*halves), other(*halves))


def check(seed: int, learned: bool = False, kernels: bool = False) -> str | None:
    """Its formula where it is right, None where the function is constant or too long; an AssertionError where it is wrong.

    None, too, where it is to be ``learned`` and reads no parameter. ``kernels``: what they run is compared as well.
    """
    rng = random.Random(seed)
    gated, count = rng.random() < 0.6, rng.choice((1, 1, 2, 3, 4) if learned else (0, 0, 1, 2))
    drawn = random_function(rng, gated, rng.randint(1, 4), count)
    function = _with_arguments((2 if gated else 1) + count, drawn)
    spoil = rng.choice(NEAR_MISSES)
    try:
        text = trace_activation(_with_arguments((2 if gated else 1) + count, lambda *given: spoil(drawn(*given))), count)
        raise AssertionError(f"seed {seed}: a near miss is taken for {text}")
    except ValueError:
        pass
    try:
        text = trace_activation(function, count)
    except ValueError as error:
        accepted = "characters", "steps", "instead of g and u", "shape of its arguments"
        assert any(part in str(error) for part in accepted), f"seed {seed}: {error}"
        return None
    if ("h" in _symbols(text)) == gated:
        return None  # a gated one of no half: what is left of it is a constant
    generator = torch.Generator().manual_seed(seed)
    h_NGF = 3 * torch.randn(64, 2 if gated else 1, 8, generator=generator, dtype=torch.float64)
    da_NF = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    parameters = [0.5 + torch.rand((), generator=generator, dtype=torch.float64) for _ in range(count)]
    used = num_parameters(text)
    if learned and not used:
        return None
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        h, da = h_NGF.to(dtype), da_NF.to(dtype)
        computed = torch.promote_types(dtype, torch.float32)
        own = [parameter.to(computed) for parameter in parameters]
        value, *slopes = _by_autograd(function, h.double(), [p.double() for p in own], da.double(), used)
        eager_value, *eager_slopes = _by_autograd(function, h.to(computed), own, da.to(computed), used)
        params_NP = torch.stack(own[:used]).expand(len(h), used) if used else None
        ours = [activate(h, text, params_NP), activation_gradient(da, h, text, params_NP)]
        if used:
            ours.append(parameter_gradient(da, h, text, params_NP))
        ways = {"": ours}
        if kernels and dtype != torch.float64:
            ways["of kernels "] = _by_kernels(da, h, text, own[:used])
        if kernels and dtype == torch.bfloat16:
            ways["in short forms "] = _in_short_forms(da, h, text, own[:used])
        expected, eager = (value, *slopes), (eager_value, *eager_slopes)
        for way, got in ways.items():
            for name, *compared in zip(("value", "gradient", "parameters"), got, expected, eager, strict=False):
                _compare(f"seed {seed}, {name} {way}of {text} in {dtype}", *compared, tolerance)
    return text


def _with_arguments(count: int, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` under a signature of ``count`` arguments."""
    return {
        1: lambda a: function(a),
        2: lambda a, b: function(a, b),
        3: lambda a, b, c: function(a, b, c),
        4: lambda a, b, c, d: function(a, b, c, d),
        5: lambda a, b, c, d, e: function(a, b, c, d, e),
        6: lambda a, b, c, d, e, f: function(a, b, c, d, e, f),
    }[count]


def _by_autograd(
    function: Callable[..., Tensor], h_NGF: Tensor, parameters: list[Tensor], da_NF: Tensor, used: int
) -> tuple[Tensor, ...]:
    """The value, the gradient of h, and of the parameters of each row, [N, P], where some are used."""
    h_NGF = h_NGF.clone().requires_grad_()
    of_rows = [parameter.expand(len(h_NGF), 1).clone().requires_grad_() for parameter in parameters]
    value = function(*h_NGF.unbind(1), *of_rows)
    slope, *shares = torch.autograd.grad(value, (h_NGF, *of_rows), da_NF, allow_unused=True)
    slope = torch.zeros_like(h_NGF) if slope is None else slope
    if not used:
        return value.detach(), slope
    shares = [torch.zeros(len(h_NGF), 1, dtype=h_NGF.dtype) if share is None else share for share in shares[:used]]
    return value.detach(), slope, torch.cat(shares, dim=1)


def _by_kernels(da_NF: Tensor, h_NGF: Tensor, text: str, parameters: list[Tensor]) -> list[Tensor]:
    """The value, the gradient of h and those of the parameters of each row by the functions of the portable kernels."""
    h_GM = h_NGF.transpose(0, 1).flatten(1).float()
    params_P = torch.stack([*parameters, torch.tensor(0.0)]).float()
    a_2M, slopes = run_in_interpreter(text, h_GM, da_NF.flatten().float(), params_P)
    assert torch.equal(a_2M[0].nan_to_num(), a_2M[1].nan_to_num()), f"{text} has two values"
    return _like_rows(h_NGF, a_2M[0], slopes)


def _in_short_forms(da_NF: Tensor, h_NGF: Tensor, text: str, parameters: list[Tensor]) -> list[Tensor]:
    """The same by the programs of the Hopper kernels."""
    gated = h_NGF.shape[1] == 2
    halves = [half.flatten().float() for half in h_NGF.unbind(1)]
    given = [halves[0], halves[-1], da_NF.flatten().float(), *(p.float().expand(len(halves[0])) for p in parameters)]
    (value,) = run_short(value_program(text, is_short=True), given)
    _, of_gate, of_up, *shares = run_short(gradient_program(text, is_short=True), given)
    return _like_rows(h_NGF, value, torch.stack([of_gate, *([of_up] if gated else []), *shares]))


def _like_rows(h_NGF: Tensor, value_M: Tensor, slopes: Tensor) -> list[Tensor]:
    """Numbers of a block as the ops have them; halves are rounded, sums over a row are not."""
    N, G, F = h_NGF.shape
    dh_NGF = slopes[:G].view(G, N, F).transpose(0, 1)
    return [value_M.view(N, F).to(h_NGF.dtype), dh_NGF.to(h_NGF.dtype), slopes[G:].view(-1, N, F).sum(2).t()]


def _symbols(text: str) -> set[str]:
    from moeblaze_ops.kernels.formulas.expression import symbols_of
    from moeblaze_ops.kernels.formulas.named import formula_of

    return symbols_of(formula_of(text))


def _compare(what: str, got: Tensor, expected: Tensor, eager: Tensor, tolerance: float) -> None:
    """Up to a part of each number and of a typical one, and to what eager code is off by: it may compare equal numbers, too.

    Of what autograd makes NaN behind a branch not taken nothing is known.
    """
    known = expected.isfinite() & eager.isfinite()
    scale = expected[known].abs().mean() if known.any() else torch.tensor(0.0)
    error, eager_error = ((values.double() - expected)[known].abs() for values in (got, eager))
    wrong = error > tolerance * (expected[known].abs() + 10 * scale + 1e-3) + 2 * eager_error
    # In low precision a number beside a kink or a steep slope may lie on the other side of it.
    allowed = 0 if tolerance < 1e-6 else len(wrong) // 100 + 1
    assert int(wrong.sum()) <= allowed, f"{what}: off by {float(error.max()):.3g} at {int(wrong.sum())} of {len(wrong)} places"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:1000", help="first:end")
    parser.add_argument("--learned", action="store_true", help="those that read learned parameters")
    parser.add_argument("--kernels", action="store_true", help="what kernels run as well; needs TRITON_INTERPRET=1")
    arguments = parser.parse_args()
    if arguments.kernels:
        mend_interpreter()
    first, end = map(int, arguments.seeds.split(":"))
    texts, wrong = set(), 0
    for seed in range(first, end):
        try:
            texts.add(check(seed, arguments.learned, arguments.kernels))
        except AssertionError as error:
            wrong += 1
            print(error, flush=True)
    num_learned = sum(num_parameters(text) > 0 for text in texts - {None})
    print(f"{end - first} seeds, {len(texts - {None})} different formulas, {num_learned} of learned parameters, {wrong} wrong")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
