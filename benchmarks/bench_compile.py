"""Compile time of a model with many layers, without and with rewriting, and the part of it that is ours.

    python benchmarks/bench_compile.py --json benchmarks/results/compile_cpu.json

Each compile is of forward and backward, by Inductor, without any cache, after a small one that loads the compiler. "ours" are the
seconds in the rewriter; they are part of "rewritten". By default Dynamo does not capture
loops that look for the tokens of each expert, so that only pieces are compiled: "captured" asks it to, as rewriting does. Loops
that skip experts without tokens ("guarded", "hits") it never captures whole.
"""

import argparse
import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from environment import command_line, device, save
from moeblaze_ops.compile import switch


class Experts(nn.Module):
    """A router and stacked experts; spellings of the combination are its subclasses."""

    def __init__(self, D: int, H: int, E: int, K: int) -> None:
        super().__init__()
        self.K = K
        self.router = nn.Linear(D, E, bias=False)
        self.gate_up = nn.Parameter(torch.randn(E, 2 * H, D) * D**-0.5)
        self.down = nn.Parameter(torch.randn(E, D, H) * H**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, experts = torch.topk(torch.softmax(self.router(rows), -1, dtype=torch.float32), self.K)
        return self.combine(rows, (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts).view(x.shape)

    def expert(self, e: int, rows: Tensor) -> Tensor:
        gate, up = F.linear(rows, self.gate_up[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[e])


class Loop(Experts):
    def combine(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.down.shape[0]):
            token, slot = torch.where(experts == e)
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
        return out


class Guarded(Experts):
    def combine(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.down.shape[0]):
            token, slot = torch.where(experts == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
        return out


class Hits(Experts):
    def combine(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(experts, self.down.shape[0]).permute(2, 1, 0)
        for e in (mask.sum((-1, -2)) > 0).nonzero():
            slot, token = torch.where(mask[e[0]])
            out.index_add_(0, token, self.expert(e[0], x[token]) * weights[token, slot, None])
        return out


class Dense(Experts):
    def combine(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.down.shape[0]):
            out = out + self.expert(e, x) * (weights * (experts == e)).sum(-1, keepdim=True)
        return out


class Grouped(Experts):
    def combine(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        ids = experts.reshape(-1)
        order = torch.argsort(ids, stable=True)
        num_experts = self.down.shape[0]
        counts = torch.histc(ids.float(), bins=num_experts, min=0, max=num_experts - 1)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        rows = x[order // self.K]
        gate, up = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offsets).chunk(2, dim=-1)
        rows = torch._grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offsets) * weights.reshape(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // self.K, rows)


class Block(nn.Module):
    """Attention and experts, both residual."""

    def __init__(self, experts: nn.Module, D: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(D) for _ in range(2))
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.experts(self.norms[1](x))


STYLES = {"loop": Loop, "guarded": Guarded, "hits": Hits, "grouped_mm": Grouped, "dense": Dense}
CONTENDERS = ("plain", "captured", "rewritten")


@dataclass
class Measurement:
    """The fastest compile of one style; ``graphs`` were compiled, and ``layers`` of them rewritten."""

    style: str
    contender: str
    seconds: float
    ours_seconds: float
    graphs: int
    layers: int


@contextlib.contextmanager
def timed(owner: object, name: str) -> Iterator[list[float]]:
    """Collects the seconds of each outermost call of ``owner.name``."""
    original, seconds, running = getattr(owner, name), [], []

    @functools.wraps(original)
    def run(*args, **kwargs):
        running.append(None)
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            running.pop()
            if not running:
                seconds.append(time.perf_counter() - start)

    with mock.patch.object(owner, name, run):
        yield seconds


def model_of(style: str, arguments: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    D = arguments.width
    blocks = (Block(STYLES[style](D, arguments.hidden, arguments.experts, arguments.top_k), D) for _ in range(arguments.layers))
    return nn.Sequential(*blocks).to(arguments.device, torch.bfloat16)


def measure(style: str, contender: str, arguments: argparse.Namespace) -> Measurement:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = model_of(style, arguments)
    x = torch.randn(2, arguments.tokens // 2, arguments.width, device=arguments.device, dtype=torch.bfloat16)
    captured = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=contender == "captured")
    rewriting = switch.enabled() if contender == "rewritten" else contextlib.nullcontext()
    run: Callable = torch.compile(model)
    with captured, rewriting, timed(switch, "rewrite") as rewrites:
        start = time.perf_counter()
        run(x.requires_grad_()).float().square().mean().backward()
        seconds = time.perf_counter() - start
    counters = torch._dynamo.utils.counters
    graphs, layers = counters["stats"]["unique_graphs"], counters["moeblaze"]["rewritten"]
    return Measurement(style, contender, seconds, sum(rewrites), graphs, layers)


def warm_up(device: str) -> None:
    """Load all that a first compile loads, ours included."""
    with switch.enabled():
        x = torch.randn(8, 8, device=device, requires_grad=True)
        torch.compile(lambda x: torch.nn.functional.silu(x @ x).sum())(x).backward()


def print_table(rows: list[Measurement]) -> None:
    print(f"{'style':12} {'contender':12} {'seconds':>9} {'ours':>7} {'share':>7} {'graphs':>7} {'layers':>7}")
    for row in rows:
        share = row.ours_seconds / row.seconds
        numbers = f"{row.seconds:9.1f} {row.ours_seconds:7.2f} {share:7.1%} {row.graphs:7} {row.layers:7}"
        print(f"{row.style:12} {row.contender:12} {numbers}")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--styles", nargs="+", default=list(STYLES), choices=STYLES)
    parser.add_argument("--contenders", nargs="+", default=["plain", "rewritten"], choices=CONTENDERS)
    parser.add_argument("--device", type=device, default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1, help="compiles of each, in turns; the fastest counts")
    arguments = parser.parse_args()

    warm_up(arguments.device)
    rows: list[Measurement] = []
    for style in arguments.styles:
        rounds = [[measure(style, contender, arguments) for contender in arguments.contenders] for _ in range(arguments.repeats)]
        rows += [min(compiles, key=lambda compile: compile.seconds) for compiles in zip(*rounds, strict=True)]
        print_table(rows[-len(arguments.contenders) :])
        save(arguments, rows)


if __name__ == "__main__":
    main()
