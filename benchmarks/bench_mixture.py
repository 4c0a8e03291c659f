"""A mixture in which every expert takes every token: time and memory of forward and backward, on a GPU.

    python benchmarks/bench_mixture.py --json mixture.json

loop: ``out = out + share[:, e, None] * expert(x)``; einsum: the outputs of all experts stacked. Each is compiled by Inductor
alone and with rewriting, all in turns in one process. kept and peak: bytes after forward, and at most, beyond those before.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import moeblaze_ops.compile  # noqa: F401  names the backend
from bench_layer import Shape
from environment import command_line, save
from measuring import interleaved_medians, load_device, memory

SHAPES = {
    "fine": Shape(T=16384, D=2048, F=768, E=8, K=8),
    "small": Shape(T=32768, D=1024, F=512, E=8, K=8),
    "wide": Shape(T=8192, D=4096, F=2048, E=4, K=4),
}


@dataclass
class Measurement:
    """One contender on one shape: time in ms, memory in MiB."""

    shape: str
    contender: str
    ms: float
    kept_mib: float
    peak_mib: float


class Expert(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.D, shape.F, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.F, shape.D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    def __init__(self, shape: Shape, spelling: str) -> None:
        super().__init__()
        self.router, self.spelling = nn.Linear(shape.D, shape.E, bias=False), spelling
        self.experts = nn.ModuleList(Expert(shape) for _ in range(shape.E))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).float().softmax(-1).to(x.dtype)
        if self.spelling == "einsum":
            return torch.einsum("te,ted->td", shares, torch.stack([expert(x) for expert in self.experts], 1))
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + shares[:, e, None] * expert(x)
        return out


def measure(name: str, arguments: argparse.Namespace) -> list[Measurement]:
    shape = SHAPES[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(shape.T, shape.D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)
    runs, kept = {}, {}
    for spelling in ("loop", "einsum"):
        mixture = Mixture(shape, spelling).to("cuda", torch.bfloat16)
        for contender, backend in ((spelling, "inductor"), (f"{spelling}, rewritten", "moeblaze")):
            run = torch.compile(mixture, backend=backend)
            runs[contender] = lambda run=run: run(x).backward(dout)
            for _ in range(2):
                kept[contender] = memory(run, x, dout)
    load_device()
    times = interleaved_medians(runs, arguments.rounds, arguments.round_ms)
    return [Measurement(name, contender, ms, *kept[contender]) for contender, ms in times.items()]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--round-ms", type=float, default=150.0, help="time of each contender in each round")
    arguments = parser.parse_args()
    found: list[Measurement] = []
    for name in arguments.shapes:
        found += measure(name, arguments)
        for row in found[-4:]:
            bytes_of = f"kept {row.kept_mib:6.0f}, peak {row.peak_mib:6.0f} MiB"
            print(f"{name:6} {row.contender:18} {row.ms:7.2f} ms, {bytes_of}", flush=True)
    save(arguments, found)


if __name__ == "__main__":
    main()
