"""Random activations written in torch's functions: their formula must have their value, and its derivative their gradient.

    python tests/corpus/fuzz/activations.py --seeds 0:10000

Each is traced to a formula, printed and read again; value and gradient are compared with autograd through the function itself
in fp64, and in fp32 and bf16 up to the rounding of their results. Numbers are continuous, so that none meets a kink but by a
constant of its own.
"""

import argparse
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moeblaze_ops.arguments.activations import activate, activation_gradient
from moeblaze_ops.arguments.traced_activations import trace_activation

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sigmoid, torch.tanh, torch.relu, torch.erf, torch.abs, torch.neg, torch.sin, torch.cos, torch.square, F.silu, F.gelu,
    F.softplus, F.mish, F.elu, F.selu, F.celu, F.hardswish, F.hardsigmoid, F.leaky_relu, F.logsigmoid, F.softsign, F.relu6,
    F.hardtanh,
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


def random_function(rng: random.Random, gated: bool, depth: int) -> Callable[..., Tensor]:
    """A function of one or two tensors, of at most ``depth`` functions inside each other."""
    if depth == 0 or rng.random() < 0.1:
        place = rng.randrange(2 if gated else 1)
        return lambda *halves: halves[place]
    kind = rng.random()
    inner = random_function(rng, gated, depth - 1)
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
    other, join = random_function(rng, gated, depth - 1), rng.choice(BINARY)
    return lambda *halves: join(inner(*halves), other(*halves))


def check(seed: int) -> str | None:
    """Its formula where it is right, None where the function is constant or too long; an AssertionError where it is wrong."""
    rng = random.Random(seed)
    gated = rng.random() < 0.6
    drawn = random_function(rng, gated, rng.randint(1, 4))
    function = (lambda g, u: drawn(g, u)) if gated else (lambda h: drawn(h))
    try:
        text = trace_activation(function)
    except ValueError as error:
        accepted = "characters", "steps", "instead of g and u", "shape of its arguments"
        assert any(part in str(error) for part in accepted), f"seed {seed}: {error}"
        return None
    if ("h" in _symbols(text)) == gated:
        return None  # a gated one of no half: what is left of it is a constant
    generator = torch.Generator().manual_seed(seed)
    h_NGF = 3 * torch.randn(64, 2 if gated else 1, 8, generator=generator, dtype=torch.float64)
    da_NF = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        h, da = h_NGF.to(dtype), da_NF.to(dtype)
        exact = h.double().requires_grad_()
        value = function(*exact.unbind(1))
        (slope,) = torch.autograd.grad(value, exact, da.double())
        _compare(f"seed {seed}, value of {text} in {dtype}", activate(h, text), value.detach(), tolerance)
        _compare(f"seed {seed}, gradient of {text} in {dtype}", activation_gradient(da, h, text), slope, tolerance)
    return text


def _symbols(text: str) -> set[str]:
    from moeblaze_ops.kernels.formulas.expression import symbols_of
    from moeblaze_ops.kernels.formulas.named import formula_of

    return symbols_of(formula_of(text))


def _compare(what: str, got: Tensor, expected: Tensor, tolerance: float) -> None:
    """Up to a part of each number and of a typical one; of what autograd makes NaN behind a branch not taken nothing is known."""
    known = expected.isfinite()
    scale = expected[known].abs().mean() if known.any() else torch.tensor(0.0)
    error = (got.double() - expected)[known].abs()
    wrong = error > tolerance * (expected[known].abs() + 10 * scale + 1e-3)
    # In low precision a number beside a kink or a steep slope may lie on the other side of it.
    allowed = 0 if tolerance < 1e-6 else len(wrong) // 100 + 1
    assert int(wrong.sum()) <= allowed, f"{what}: off by {float(error.max()):.3g} at {int(wrong.sum())} of {len(wrong)} places"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:1000", help="first:end")
    first, end = map(int, parser.parse_args().seeds.split(":"))
    texts, wrong = set(), 0
    for seed in range(first, end):
        try:
            texts.add(check(seed))
        except AssertionError as error:
            wrong += 1
            print(error, flush=True)
    print(f"{end - first} seeds, {len(texts - {None})} different formulas, {wrong} wrong")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
