"""Gradient accumulation over microbatches: weight gradients of their own that autograd adds, against ``accumulate_grad``.

    python benchmarks/bench_accumulate.py --json results.json

A step is ``--microbatches`` forwards and backwards of one compiled layer, and sums its weight gradients in ``.grad`` (bf16) or in
fp32 buffers, to which a hook adds each gradient where they are not added in place. Contenders run in turns in one process;
medians of CUDA event times. peak: highest allocation over a step beyond what was allocated before, which for ``.grad`` includes
the sums. error: of the sum of the gradients of the up weights, relative to that of fp32 buffers that a hook adds to.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

import moeblaze_ops
import moeblaze_ops.compile  # registers the backend where the package is not installed
from bench_layer import SHAPES, GroupedMoE, Shape
from environment import command_line, save
from measuring import event_time, peak, relative_error


@dataclass
class Measurement:
    """One contender; times in ms, memory in MiB."""

    shape: str
    tokens: int
    sums: str
    contender: str
    step_ms: float
    peak_mib: float
    error: float


class AccumulatingMoE(GroupedMoE):
    """The same layer in code of its own, which is compiled while its parameters accumulate."""

    def forward(self, x: Tensor) -> Tensor:
        return self.with_weights(x, self.w_up, self.w_down)


class Contender:
    """A compiled layer and how it sums the gradients of its expert weights."""

    def __init__(self, shape: Shape, sums: str, in_place: bool) -> None:
        torch.manual_seed(0)
        self.layer = (AccumulatingMoE if in_place else GroupedMoE)(shape)
        self.experts = [self.layer.w_up, self.layer.w_down]
        self.buffers = [torch.zeros_like(p, dtype=torch.float32) for p in self.experts] if sums == "fp32" else [None, None]
        for p, buffer in zip(self.experts, self.buffers, strict=True):
            if in_place:
                moeblaze_ops.accumulate_grad(p, buffer)
            elif buffer is not None:
                p.register_post_accumulate_grad_hook(_adds_to(buffer))
        self.run = torch.compile(self.layer, backend="moeblaze")

    def step(self, xs: list[Tensor], dout: Tensor) -> None:
        self.layer.zero_grad(set_to_none=True)
        for buffer in self.buffers:
            if buffer is not None:
                buffer.zero_()
        for x in xs:
            x.grad = None
            self.run(x).backward(dout)

    def sum_of_up(self) -> Tensor:
        return self.layer.w_up.grad if self.buffers[0] is None else self.buffers[0]


def _adds_to(buffer: Tensor) -> Callable[[nn.Parameter], None]:
    def add(parameter: nn.Parameter) -> None:
        buffer.add_(parameter.grad)
        parameter.grad = None

    return add


def measure(name: str, tokens: int, microbatches: int, rounds: int) -> list[Measurement]:
    shape = replace(SHAPES[name], T=tokens)
    torch.manual_seed(1)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    xs = [torch.randn(tokens, shape.D, requires_grad=True, **options) for _ in range(microbatches)]
    dout = torch.randn_like(xs[0])
    found: list[Measurement] = []
    exact = None
    for sums in ("fp32", "bf16"):
        sides = {}
        peaks = {}
        for side in ("added by autograd", "in place"):
            sides[side] = Contender(shape, sums, side == "in place")
            peaks[side] = peak_of(sides[side], xs, dout)
        times: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(rounds):
            for side in list(sides)[:: 1 if number % 2 else -1]:
                times[side] += times_of(sides[side], xs, dout)
        for side, contender in sides.items():
            contender.step(xs, dout)
            total = contender.sum_of_up().float()
            exact = total.clone() if exact is None else exact
            error = relative_error(total, exact)
            found.append(Measurement(name, tokens, sums, side, statistics.median(times[side]), peaks[side], error))
            print(found[-1], flush=True)
    return found


def peak_of(contender: Contender, xs: list[Tensor], dout: Tensor) -> float:
    for _ in range(2):
        contender.step(xs, dout)
    contender.layer.zero_grad(set_to_none=True)
    taken = peak(partial(contender.step, xs, dout))
    contender.layer.zero_grad(set_to_none=True)
    return taken


def times_of(contender: Contender, xs: list[Tensor], dout: Tensor, repeats: int = 4) -> list[float]:
    """Times of steps, but for the first; gradients are gone afterwards."""
    times = event_time(partial(contender.step, xs, dout), repeats)
    contender.layer.zero_grad(set_to_none=True)
    return times[1:]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["fine"], choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    rows = [row for name in args.shapes for row in measure(name, args.tokens, args.microbatches, args.rounds)]
    save(args, rows)


if __name__ == "__main__":
    main()
