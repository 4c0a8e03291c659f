"""What routing costs: the layer of ``bench_layer`` beside the same layer routed, balanced or replayed otherwise.

    python benchmarks/bench_routing.py --json results.json

All contenders of a question run interleaved in one process, with the same numbers in their weights; medians of CUDA event times
of forward and backward. The first contender of each question is what the others are compared with. All are compiled with our
backend, but for ``bmm``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moeblaze_ops.compile  # registers the backend where the package is not installed
from bench_layer import SHAPES, GroupedMoE, Shape
from environment import command_line, save
from measuring import interleaved_medians, load_device, noting_failure, peak


class Fp32Router(GroupedMoE):
    """Logits in fp32, from tokens and a router in bf16."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, experts = torch.topk(F.linear(x.float(), self.router.float()) + self.popularity, self.shape.K, dim=-1)
        return torch.softmax(logits, dim=-1), experts


class Balanced(GroupedMoE):
    """The losses of Switch Transformer beside the layer, as a second result."""

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, self.router) + self.popularity.to(x.dtype)
        scores, experts = torch.topk(logits, self.shape.K, dim=-1)
        self.losses = 1e-3 * self.losses_of(logits, experts)
        return torch.softmax(scores, dim=-1, dtype=torch.float32), experts

    def losses_of(self, logits: Tensor, experts: Tensor) -> Tensor:
        balance = moeblaze_ops.load_balancing_loss(logits, self.shape.K, ids=experts)
        return balance + moeblaze_ops.router_z_loss(logits)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.losses


class BalancedAsWritten(Balanced):
    """The same losses as models write them."""

    def losses_of(self, logits: Tensor, experts: Tensor) -> Tensor:
        fraction = F.one_hot(experts, self.shape.E).float().mean(0)
        balance = self.shape.E * (fraction * logits.float().softmax(-1).mean(0)).sum()
        return balance + logits.float().logsumexp(-1).square().mean()


class Threshold(nn.Module):
    """A loop over experts, each on the tokens whose logit is above a number, which gives as many rows as K experts a token."""

    def __init__(self, shape: Shape, skew: float) -> None:
        super().__init__()
        self.layer = GroupedMoE(shape, skew)
        self.shape = shape
        self.register_buffer("least", torch.zeros((), device="cuda"))

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.router).float()

    @torch.no_grad()
    def prepare(self, x: Tensor) -> None:
        logits = self.logits(x).flatten()
        self.least.copy_(logits.topk(x.shape[0] * self.shape.K).values[-1])

    def gates(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
        return torch.where(logits >= self.least, logits.sigmoid(), 0)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gates(x)
        out = torch.zeros_like(x)
        for e in range(self.shape.E):
            (token,) = torch.where(gates[:, e] > 0)
            gate, up = F.linear(x[token], self.layer.w_up[e]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.layer.w_down[e]) * gates[token, e, None].to(x.dtype)
            out = out.index_add(0, token, y)
        return out


class ExpertChoice(Threshold):
    """Each expert takes the T * K / E tokens that weigh most."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.logits(x).softmax(-1)
        weights, tokens = scores.t().topk(x.shape[0] * self.shape.K // self.shape.E, dim=-1)
        out = torch.zeros_like(x)
        for e in range(self.shape.E):
            gate, up = F.linear(x[tokens[e]], self.layer.w_up[e]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.layer.w_down[e]) * weights[e, :, None].to(x.dtype)
            out = out.index_add(0, tokens[e], y)
        return out


class Rounded(nn.Module):
    """Experts with whole tiles of tokens: two more slots than K, of which most stay unused."""

    def __init__(self, shape: Shape, skew: float) -> None:
        super().__init__()
        self.layer = GroupedMoE(shape, skew)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        spare = 2
        weights, experts = moeblaze_ops.route(F.linear(x, self.layer.router), self.shape.K + spare, scoring="softmax_topk")
        weights, experts = moeblaze_ops.round_routing(weights, experts, self.shape.E, spare=spare)
        return moeblaze_ops.moe(x, weights, experts, self.layer.w_up, self.layer.w_down, activation=self.shape.activation)


class AllExperts(nn.Module):
    """Every token to every expert, K = E, as one ``bmm`` over the experts."""

    def __init__(self, shape: Shape, skew: float) -> None:
        super().__init__()
        self.layer = GroupedMoE(shape, skew)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.linear(x, self.layer.router).softmax(-1, dtype=torch.float32).to(x.dtype)
        gate, up = torch.matmul(x, self.layer.w_up.mT).chunk(2, dim=-1)
        y = torch.bmm(F.silu(gate) * up, self.layer.w_down.mT)
        return (y * weights.t().unsqueeze(-1)).sum(0)


def replaying(make: Callable[[Shape, float], nn.Module]) -> Callable[[Shape, float], nn.Module]:
    """The layer at ids that it chose once."""

    def build(shape: Shape, skew: float) -> nn.Module:
        model = nn.Sequential(make(shape, skew))

        class Replayed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.compiled = torch.compile(model, backend="moeblaze")

            @torch.no_grad()
            def prepare(self, x: Tensor) -> None:
                with moeblaze_ops.record_routing(model) as self.record:
                    model(x)

            def forward(self, x: Tensor) -> Tensor:
                with moeblaze_ops.replay_routing(model, self.record):
                    return self.compiled(x)

        return Replayed()

    return build


def ours(layer: type[nn.Module]) -> Callable[[Shape, float], nn.Module]:
    return lambda shape, skew: torch.compile(layer(shape, skew), backend="moeblaze")


def plain(layer: type[nn.Module]) -> Callable[[Shape, float], nn.Module]:
    return lambda shape, skew: torch.compile(layer(shape, skew), backend="inductor")


FINE = SHAPES["fine"]
SPARSE = {
    "sparse_64": Shape(16384, 4096, 1024, 64, 8),
    "sparse_128": Shape(16384, 4096, 1024, 128, 8),
    "sparse_256": Shape(16384, 4096, 1024, 256, 8),
}
QUESTIONS: dict[str, tuple[Shape, dict[str, Callable[[Shape, float], nn.Module]]]] = {
    **{name: (shape, {"top-k": ours(GroupedMoE), "rounded": ours(Rounded)}) for name, shape in SPARSE.items()},
    "fine": (
        FINE,
        {
            "top-k": ours(GroupedMoE),
            "fp32 router": ours(Fp32Router),
            "losses": ours(Balanced),
            "losses as written": ours(BalancedAsWritten),
            "replayed": replaying(GroupedMoE),
        },
    ),
    "shaped": (
        replace(FINE, E=32, K=4),
        {"top-k": ours(GroupedMoE), "threshold": ours(Threshold), "expert choice": ours(ExpertChoice)},
    ),
    "all": (
        Shape(8192, 2048, 768, 8, 8),
        {"bmm": plain(AllExperts), "top-k of all": ours(GroupedMoE), "rewritten": ours(AllExperts)},
    ),
}


@dataclass
class Measurement:
    """One contender; ``ratio`` is its step over that of the first contender, memory in MiB."""

    question: str
    contender: str
    step_ms: float | None = None
    ratio: float | None = None
    peak_mib: float | None = None
    failure: str | None = None


def kernels_of(step: Callable[[], None]) -> str:
    """A table of the kernels of one step, and of what the host waited for."""
    with torch.profiler.profile() as profile:
        step()
        torch.cuda.synchronize()
    return profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=90)


def measure(question: str, rounds: int, round_ms: float, profiles: str | None = None) -> list[Measurement]:
    shape, contenders = QUESTIONS[question]
    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.randn(shape.T, shape.D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dout = torch.randn(shape.T, shape.D, device="cuda", dtype=torch.bfloat16)

    def step(layer: nn.Module) -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        out = layer(x)
        if isinstance(out, tuple):
            torch.autograd.backward(out, (dout, None))
        else:
            out.backward(dout)

    rows, steps = [], {}
    for name, make in contenders.items():
        row = Measurement(question, name)
        rows.append(row)
        with noting_failure(row):
            torch.manual_seed(1)
            layer = make(shape, 0.0)
            if hasattr(layer, "prepare"):
                layer.prepare(x)
            run = partial(step, layer)
            run()
            row.peak_mib = peak(run)
            if profiles:
                with open(f"{profiles}/{question}_{name.replace(' ', '_')}.txt", "w") as file:
                    file.write(kernels_of(run))
            steps[name] = run
    load_device()
    times = interleaved_medians(steps, rounds, round_ms)
    first = times.get(rows[0].contender)
    for row in rows:
        row.step_ms = times.get(row.contender)
        row.ratio = row.step_ms / first if row.step_ms and first else None
        print(row, flush=True)
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--questions", nargs="+", default=list(QUESTIONS), choices=QUESTIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=300.0, help="time of each contender in each round")
    parser.add_argument("--profiles", help="write the kernels of a step of each contender into this folder")
    arguments = parser.parse_args()
    rows: list[Measurement] = []
    for question in arguments.questions:
        rows += measure(question, arguments.rounds, arguments.round_ms, arguments.profiles)
        torch.cuda.empty_cache()
        save(arguments, rows)


if __name__ == "__main__":
    main()
