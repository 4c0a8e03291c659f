"""Expert layers of small models on a CPU: a training step under ``torch.compile``, without and with rewriting.

    python benchmarks/bench_cpu.py --json benchmarks/results/cpu.json

Each layer is written in four ways, router included: every expert on every token, a loop over the experts that were hit, a loop
that skips experts without tokens, and stacked weights with ``grouped_mm``. Both compiled layers of a shape and a spelling take
turns in one process, forward and backward. A step counts by the CPU time of the process, with one thread unless ``--threads``
says more: on a machine that others use too, it is steadier than the time on the clock. "ratio" is the median of plain steps
over that of rewritten ones; "best" is the same of the fastest ones. The error is that of output and gradients, relative in
norm, beside the plain step. Fails if a layer was not rewritten, or if its error is above 1e-5 (fp32) or 3e-2 (bf16).
"""

import argparse
import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moeblaze_ops.compile  # noqa: F401  registers the backend where the package is not installed
from environment import command_line, save
from measuring import relative_error

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-2}


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer."""

    T: int
    D: int
    F: int
    E: int
    K: int

    def __str__(self) -> str:
        return f"{self.T}, {self.D}, {self.F}, {self.E}, {self.K}"


SHAPES = {
    "tiny": Shape(64, 64, 128, 4, 2),
    "short": Shape(128, 128, 512, 8, 2),
    "small": Shape(512, 64, 256, 8, 2),
    "switch": Shape(512, 128, 512, 8, 1),
    "char": Shape(1024, 64, 128, 16, 2),
    "nano": Shape(1024, 128, 512, 8, 2),
    "wide": Shape(1024, 256, 1024, 8, 2),
    "fine": Shape(2048, 128, 256, 32, 4),
    "demo": Shape(2048, 128, 768, 8, 2),
}


class Expert(nn.Module):
    def __init__(self, D: int, H: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((D, H), (D, H), (H, D)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Routed(nn.Module):
    """A router; spellings of the experts are its subclasses."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.K = shape.K
        self.router = nn.Linear(shape.D, shape.E, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = torch.topk(torch.softmax(self.router(x), -1, dtype=torch.float32), self.K)
        if self.K > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.combine(x, weights.to(x.dtype), experts)


class Listed(Routed):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.experts = nn.ModuleList(Expert(shape.D, shape.F) for _ in range(shape.E))


class Dense(Listed):
    def combine(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (experts == e)).sum(-1, keepdim=True)
        return out


class Hit(Listed):
    def combine(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(experts, num_classes=len(self.experts)).permute(2, 1, 0)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero().flatten().tolist():
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


class Guarded(Listed):
    def combine(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(experts == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Grouped(Routed):
    """Products of all experts at once: ``grouped_mm`` where it compiles on a CPU, else ``bmm`` of all tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.gate_up = nn.Parameter(torch.randn(shape.E, shape.D, 2 * shape.F) * shape.D**-0.5)
        self.down = nn.Parameter(torch.randn(shape.E, shape.F, shape.D) * shape.F**-0.5)

    def combine(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        num_experts = self.down.shape[0]
        if x.dtype != torch.bfloat16:
            gate, up = torch.bmm(x.expand(num_experts, *x.shape), self.gate_up).chunk(2, dim=-1)
            shares = torch.zeros(x.shape[0], num_experts, dtype=x.dtype).scatter(1, experts, weights)
            return (torch.bmm(F.silu(gate) * up, self.down) * shares.t().unsqueeze(-1)).sum(0)
        ids = experts.reshape(-1)
        order = torch.argsort(ids, stable=True)
        counts = torch.histc(ids.float(), bins=num_experts, min=0, max=num_experts - 1)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        gate, up = torch._grouped_mm(x[order // self.K], self.gate_up, offsets).chunk(2, dim=-1)
        rows = torch._grouped_mm(F.silu(gate) * up, self.down, offsets) * weights.reshape(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // self.K, rows)


SPELLINGS: dict[str, Callable[[Shape], nn.Module]] = {"dense": Dense, "hit": Hit, "guarded": Guarded, "grouped": Grouped}


@dataclass
class Measurement:
    """A step of one spelling on one shape, in ms of CPU time: the median of all turns, and the fastest one."""

    spelling: str
    shape: str
    plain_ms: float
    rewritten_ms: float
    ratio: float
    fastest_plain_ms: float
    fastest_rewritten_ms: float
    fastest_ratio: float
    error: float


def step_of(layer: nn.Module, x: Tensor, dout: Tensor) -> Callable[[], list[Tensor]]:
    """Forward and backward; returns the output and all gradients."""
    leaves = [x, *layer.parameters()]

    def step() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        out = layer(x)
        out.backward(dout)
        return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    return step


def measure(spelling: str, shape: Shape, arguments: argparse.Namespace) -> Measurement:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    dtype = DTYPES[arguments.dtype]
    layer = SPELLINGS[spelling](shape).to(dtype)
    x, dout = torch.randn(2, shape.T, shape.D, dtype=dtype).unbind()
    x = x.clone().requires_grad_()
    plain = step_of(torch.compile(copy.deepcopy(layer)), x, dout)
    expected = [tensor.detach().clone() for tensor in plain()]
    rewritten = step_of(torch.compile(layer, backend="moeblaze"), x, dout)
    error = max(map(relative_error, rewritten(), expected))
    if torch._dynamo.utils.counters["moeblaze"]["rewritten"] != 1:
        sys.exit(f"{spelling} {shape} was not rewritten")
    if error > TOLERANCES[arguments.dtype]:
        sys.exit(f"{spelling} {shape} has an error of {error:.1e}")
    times = in_turns([plain, rewritten], arguments.seconds)
    medians, fastest = [statistics.median(steps) for steps in times], [min(steps) for steps in times]
    return Measurement(spelling, str(shape), *medians, medians[0] / medians[1], *fastest, fastest[0] / fastest[1], error)


def in_turns(steps: list[Callable[[], object]], seconds: float, turn_ms: float = 60.0) -> list[list[float]]:
    """CPU time of each step in ms, taken in short turns for so many seconds of CPU time altogether."""
    times: list[list[float]] = [[] for _ in steps]
    for step in steps:
        step()
    once = max(time_of(step) for step in steps)
    repeats = max(2, int(turn_ms / once))
    end = time.process_time() + seconds
    while time.process_time() < end:
        for step, measured in zip(steps, times, strict=True):
            step()  # Dynamo looks for the frame of the other layer first
            measured += [time_of(step) for _ in range(repeats)]
    return times


def time_of(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return 1e3 * (time.process_time() - start)


def print_header() -> None:
    print(f"{'spelling':9} {'T, D, F, E, K':22} {'plain ms':>9} {'ours ms':>9} {'ratio':>6} {'best':>6} {'error':>8}")


def print_row(row: Measurement) -> None:
    numbers = f"{row.plain_ms:9.2f} {row.rewritten_ms:9.2f} {row.ratio:6.2f} {row.fastest_ratio:6.2f} {row.error:8.1e}"
    print(f"{row.spelling:9} {row.shape:22} {numbers}", flush=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--spellings", nargs="+", default=list(SPELLINGS), choices=SPELLINGS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--dtype", default="fp32", choices=DTYPES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU time for the turns of each spelling and shape")
    arguments = parser.parse_args()
    arguments.huge_pages = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    torch.set_num_threads(arguments.threads)

    rows: list[Measurement] = []
    print_header()
    for spelling in arguments.spellings:
        for shape in arguments.shapes:
            rows.append(measure(spelling, SHAPES[shape], arguments))
            print_row(rows[-1])
            save(arguments, rows)
        ratios = [row.ratio for row in rows if row.spelling == spelling]
        print(f"{spelling}: ratio {statistics.geometric_mean(ratios):.2f} on average, {min(ratios):.2f} at least")


if __name__ == "__main__":
    main()
