"""A layer with frozen experts and low-rank adapters on them: time and memory of forward and backward, on a GPU.

    python benchmarks/bench_lora.py --json lora.json
    python benchmarks/bench_lora.py --shapes peft3577 fine --ranks 8 16 64

peft+grouped_mm: the weights of both projections are ``baddbmm(W, B, A, alpha=s)`` of stacked parameters, with A expert-slowest
and B expert-fastest as PEFT stores them, multiplied by ``grouped_mm``; compiled. (PEFT itself makes the sum once more, outside of
what is compiled, to check its shape.) rewritten: the same module, compiled with rewriting. op: ``moeblaze_ops.moe`` with factors,
compiled. frozen: the same without factors: what the layer costs at least. All in turns, in one process.

kept and peak: bytes allocated after forward, and at most, beyond what was allocated before.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

import moeblaze_ops
import moeblaze_ops.compile
from bench_layer import SHAPES, GroupedMoE, Shape
from environment import command, command_line, describe
from measuring import interleaved_medians, load_device, memory, noting_failure, relative_error

LORA_SHAPES = {"peft3577": Shape(T=4096, D=2048, F=768, E=128, K=8), "fine": SHAPES["fine"]}


@dataclass
class Measurement:
    """One contender on one shape: time in ms, memory in MiB, and the largest distance of a result from the first contender's."""

    shape: str
    rank: int
    contender: str
    ms: float | None = None
    kept_mib: float | None = None
    peak_mib: float | None = None
    error: float | None = None
    became: str = ""
    failure: str | None = None


class AdaptedMoE(GroupedMoE):
    """Frozen experts and router; A expert-slowest and B expert-fastest."""

    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__(shape)
        self.requires_grad_(False)
        self.rank, self.scale = rank, 2.0
        E, D, F = shape.E, shape.D, shape.F
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.base_up, self.base_down = self.w_up, self.w_down
        del self.w_up, self.w_down
        self.up_a = nn.Parameter(torch.randn(E * rank, D, **options) * D**-0.5)
        self.up_b = nn.Parameter(torch.randn(2 * F, rank * E, **options) * 0.1)
        self.down_a = nn.Parameter(torch.randn(E * rank, F, **options) * F**-0.5)
        self.down_b = nn.Parameter(torch.randn(D, rank * E, **options) * 0.1)

    def factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        E = self.shape.E
        return a.view(E, self.rank, -1), b.view(-1, self.rank, E).permute(2, 0, 1)


class PeftMoE(AdaptedMoE):
    def forward(self, x: Tensor) -> Tensor:
        up_a, up_b = self.factors(self.up_a, self.up_b)
        down_a, down_b = self.factors(self.down_a, self.down_b)
        w_up = torch.baddbmm(self.base_up, up_b, up_a, alpha=self.scale)
        return self.with_weights(x, w_up, torch.baddbmm(self.base_down, down_b, down_a, alpha=self.scale))


class OpMoE(AdaptedMoE):
    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        lora_up = (*self.factors(self.up_a, self.up_b), self.scale)
        lora = {"lora_up": lora_up, "lora_down": (*self.factors(self.down_a, self.down_b), self.scale)}
        return moeblaze_ops.moe(x, weights, experts, self.base_up, self.base_down, **lora)


class FrozenMoE(AdaptedMoE):
    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        return moeblaze_ops.moe(x, weights, experts, self.base_up, self.base_down)


CONTENDERS: dict[str, tuple[type[AdaptedMoE], str]] = {
    "peft+grouped_mm": (PeftMoE, "inductor"),
    "rewritten": (PeftMoE, "moeblaze"),
    "op": (OpMoE, "inductor"),
    "frozen": (FrozenMoE, "inductor"),
}


def results(layer: nn.Module, module: nn.Module, x: Tensor, dout: Tensor) -> list[Tensor]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    out = layer(x)
    return [out.detach(), *torch.autograd.grad(out, (x, *parameters), dout, allow_unused=True)]


def error(got: list[Tensor], expected: list[Tensor]) -> float:
    return max(relative_error(g, e) for g, e in zip(got, expected, strict=True) if g is not None)


def bench(name: str, rank: int, names: list[str], rounds: int, round_ms: float) -> list[Measurement]:
    shape, rows, runs = LORA_SHAPES[name], [], {}
    torch.manual_seed(0)
    state = PeftMoE(shape, rank).state_dict()
    x = torch.randn(shape.T, shape.D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)
    expected = None
    for contender in names:
        kind, backend = CONTENDERS[contender]
        row = Measurement(name, rank, contender)
        rows.append(row)
        with noting_failure(row):
            torch._dynamo.reset()
            module = kind(shape, rank)
            module.load_state_dict(state, assign=True)
            for parameter_name, parameter in module.named_parameters():
                parameter.requires_grad_(parameter_name.endswith(("_a", "_b")))
            layer = torch.compile(module, backend=backend, fullgraph=True)
            got = results(layer, module, x, dout)
            expected = got if expected is None else expected
            row.error = error(got, expected)
            row.kept_mib, row.peak_mib = memory(layer, x, dout)
            runs[contender] = step_of(layer, x, dout)
        torch.cuda.empty_cache()
    load_device()
    for contender, ms in interleaved_medians(runs, rounds, round_ms).items():
        next(row for row in rows if row.contender == contender).ms = ms
    return rows


def step_of(layer: nn.Module, x: Tensor, dout: Tensor) -> Callable[[], None]:
    def step() -> None:
        layer(x).backward(dout)
        layer.zero_grad(set_to_none=True)
        x.grad = None

    return step


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["peft3577"], choices=LORA_SHAPES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[16])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=200)
    arguments = parser.parse_args()
    rows: list[Measurement] = []
    for name in arguments.shapes:
        for rank in arguments.ranks:
            rows += bench(name, rank, arguments.contenders, arguments.rounds, arguments.round_ms)
            for row in rows[-len(arguments.contenders) :]:
                print(row, flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({**describe(), **command(arguments), "rows": [asdict(row) for row in rows]}, file, indent=1)


if __name__ == "__main__":
    main()
