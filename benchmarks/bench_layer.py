"""Whole MoE layers, router included: time and memory against the cuBLAS bound and against other ways to run them.

    python benchmarks/bench_layer.py --shapes fine finest mid --json results.json

All contenders of a shape run interleaved in one process after a second of load, each checked against eager in the
same run; medians of CUDA event times. "bound" is six ``torch.bmm`` at perfectly balanced load: no router, gather,
activation or sum. kept: bytes allocated after forward beyond what was allocated before it and beyond the output.
peak: highest allocation over forward and backward beyond what was allocated before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moeblaze_ops.compile  # registers the backend where the package is not installed
from environment import command_line, save
from measuring import interleaved_medians, load_device, memory, noting_failure, relative_error
from moeblaze_ops import config


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; ``activation`` is swiglu or silu."""

    T: int
    D: int
    F: int
    E: int
    K: int
    activation: str = "swiglu"


SHAPES = {
    "fine": Shape(32768, 2048, 768, 128, 8),
    "finest": Shape(24576, 1536, 256, 128, 8),
    "wide": Shape(32768, 4096, 1024, 128, 8),
    "mid": Shape(32768, 2048, 1024, 64, 8),
    "coarse": Shape(16384, 4096, 14336, 8, 2),
    "conf1": Shape(65536, 512, 2048, 4, 1),
    "conf2": Shape(65536, 1024, 4096, 8, 2),
    "conf3": Shape(65536, 1024, 4096, 16, 4),
    "conf4": Shape(32768, 2048, 8192, 16, 4),
    "conf4_silu": Shape(32768, 2048, 8192, 16, 4, "silu"),
    "conf5": Shape(32768, 512, 2048, 16, 4),
    "conf6": Shape(16384, 1024, 4096, 16, 4),
    "conf7": Shape(8192, 2048, 8192, 8, 4),
    "conf1_8k": Shape(8192, 512, 2048, 4, 1),
    "conf1_32k": Shape(32768, 512, 2048, 4, 1),
    "conf1_128k": Shape(131072, 512, 2048, 4, 1),
    "conf1_512k": Shape(524288, 512, 2048, 4, 1),
    "conf1_2m": Shape(2097152, 512, 2048, 4, 1),
}


class GroupedMoE(nn.Module):
    """A layer as libraries write it today: sort by expert, gather, ``grouped_mm``, weight, unsort, sum."""

    dropout = 0.0, 0.0  # probabilities: of an element of the activation, and of one of an expert's output

    def __init__(self, shape: Shape, skew: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        outputs = shape.F * (2 if shape.activation == "swiglu" else 1)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.router = nn.Parameter(torch.randn(shape.E, shape.D, **options) * 0.02)
        self.w_up = nn.Parameter(torch.randn(shape.E, outputs, shape.D, **options) * shape.D**-0.5)
        self.w_down = nn.Parameter(torch.randn(shape.E, shape.D, shape.F, **options) * shape.F**-0.5)
        self.register_buffer("popularity", skew * torch.randn(shape.E, device="cuda"))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, experts = torch.topk(F.linear(x, self.router) + self.popularity.to(x.dtype), self.shape.K, dim=-1)
        return torch.softmax(logits, dim=-1, dtype=torch.float32), experts

    def forward(self, x: Tensor) -> Tensor:
        return self.with_weights(x, self.w_up, self.w_down)

    def with_weights(self, x: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        T, K, E = x.shape[0], self.shape.K, self.shape.E
        weights, experts = self.route(x)
        flat = experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        offsets = torch.histc(flat.int(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        rows = x[order // K]
        h = torch._grouped_mm(rows, w_up.transpose(1, 2), offs=offsets)
        if self.shape.activation == "swiglu":
            gate, up = h.chunk(2, dim=-1)
            a = F.silu(gate) * up
        else:
            a = F.silu(h)
        between, behind = self.dropout
        if between:
            a = F.dropout(a, between)
        y = torch._grouped_mm(a, w_down.transpose(1, 2), offs=offsets)
        if behind:
            y = F.dropout(y, behind)
        y = y * weights.reshape(-1)[order].unsqueeze(1).to(y.dtype)
        inverse = torch.argsort(order)
        return y[inverse].view(T, K, -1).sum(1)


class OpsMoE(GroupedMoE):
    """The same layer through ``moeblaze_ops.moe``."""

    keep: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.route(x)
        return moeblaze_ops.moe(x, weights, experts, self.w_up, self.w_down, activation=self.shape.activation, keep=self.keep)


class InvariantMoE(GroupedMoE):
    """The same layer, of which compiled code is kept apart: graphs keep the settings that they were compiled with."""

    def forward(self, x: Tensor) -> Tensor:
        return self.with_weights(x, self.w_up, self.w_down)


class DroppedMoE(GroupedMoE):
    """The same layer with dropout inside of its experts, compiled apart: a function has a limit of graphs."""

    dropout = 0.1, 0.1

    def forward(self, x: Tensor) -> Tensor:
        return self.with_weights(x, self.w_up, self.w_down)


class DroppedActivationMoE(DroppedMoE):
    dropout = 0.1, 0.0


class DroppedOutputMoE(DroppedMoE):
    dropout = 0.0, 0.1


def bound(shape: Shape, backward: bool) -> Callable[[], None]:
    """The layer's GEMMs as balanced ``torch.bmm``: two forward, four backward."""
    E, M = shape.E, shape.T * shape.K // shape.E
    up = shape.F * (2 if shape.activation == "swiglu" else 1)
    randn = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x, a, dh = randn(E, M, shape.D), randn(E, M, shape.F), randn(E, M, up)
    w_up, w_down = randn(E, up, shape.D), randn(E, shape.D, shape.F)

    def run() -> None:
        torch.bmm(x, w_up.mT)
        torch.bmm(a, w_down.mT)
        if backward:
            torch.bmm(x, w_down)
            torch.bmm(dh, w_up)
            torch.bmm(dh.mT, x)
            torch.bmm(x.mT, a)

    return run


@dataclass
class Measurement:
    """One contender on one shape; times in ms, memory in MiB."""

    shape: str
    contender: str
    forward_ms: float | None = None
    step_ms: float | None = None
    kept_mib: float | None = None
    peak_mib: float | None = None
    error: float | None = None
    failure: str | None = None


def contenders(names: list[str]) -> dict[str, Callable[[Shape, float], nn.Module]]:
    def compiled(layer: type[GroupedMoE], **options) -> Callable[[Shape, float], nn.Module]:
        return lambda shape, skew: torch.compile(layer(shape, skew), **options)

    def graphed(shape: Shape, skew: float) -> nn.Module:
        layer = torch.compile(GroupedMoE(shape, skew), backend="moeblaze")
        x = torch.randn(shape.T, shape.D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return torch.cuda.make_graphed_callables(layer, (x,))

    def invariant(shape: Shape, skew: float) -> nn.Module:
        layer = torch.compile(InvariantMoE(shape, skew), backend="moeblaze")
        x = torch.randn(shape.T, shape.D, device="cuda", dtype=torch.bfloat16)
        config.batch_invariant = True
        if torch.is_grad_enabled():
            layer(x.requires_grad_()).backward(x.detach())
        with torch.no_grad():
            layer(x)
        config.batch_invariant = False
        return layer

    known = {
        "grouped_mm": GroupedMoE,
        "grouped_mm+compile": compiled(GroupedMoE),
        "moeblaze": compiled(GroupedMoE, backend="moeblaze"),
        "moeblaze-invariant": invariant,
        "grouped_mm-dropout+compile": compiled(DroppedMoE),
        "moeblaze-dropout": compiled(DroppedMoE, backend="moeblaze"),
        "moeblaze-dropout-activation": compiled(DroppedActivationMoE, backend="moeblaze"),
        "moeblaze-dropout-output": compiled(DroppedOutputMoE, backend="moeblaze"),
        "moeblaze-graphs": compiled(GroupedMoE, backend="moeblaze", mode="reduce-overhead"),
        "moeblaze-graphed": graphed,
        "moeblaze-ops": compiled(OpsMoE),
        "moeblaze-eager": OpsMoE,
    }
    return {name: known[name] for name in names}


def worst_error(layer: nn.Module, state: dict, x: Tensor, dout: Tensor, expected: list[Tensor]) -> float:
    """Largest error of output and gradients against eager."""
    layer.load_state_dict({_own_name(layer, name): value for name, value in state.items()})
    return max(map(relative_error, results(layer, x, dout), expected))


def _own_name(layer: nn.Module, name: str) -> str:
    return f"_orig_mod.{name}" if hasattr(layer, "_orig_mod") else name


def results(layer: nn.Module, x: Tensor, dout: Tensor) -> list[Tensor]:
    """Output and gradients of one step."""
    layer.zero_grad(set_to_none=True)
    x.grad = None
    out = layer(x)
    out.backward(dout)
    return [out.detach().clone(), x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]


def bench_shape(name: str, names: list[str], rounds: int, round_ms: float, skew: float) -> list[Measurement]:
    shape = SHAPES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.randn(shape.T, shape.D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dout = torch.randn(shape.T, shape.D, device="cuda", dtype=torch.bfloat16)
    eager = GroupedMoE(shape, skew)
    expected, state = None, eager.state_dict()
    try:
        expected = results(eager, x, dout)
    except torch.OutOfMemoryError:
        pass
    rows, layers = [], {}
    for contender, make in contenders(names).items():
        row = Measurement(name, contender)
        rows.append(row)
        with noting_failure(row):
            layer = make(shape, skew)
            error = worst_error(layer, state, x, dout, expected) if expected else None
            row.error = None if "dropout" in contender else error  # which draws other numbers than eager does
            row.kept_mib, row.peak_mib = memory(layer, x, dout)
            layers[contender] = layer
        torch.cuda.empty_cache()
    del expected, eager
    load_device()

    def step(layer: nn.Module) -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x).backward(dout)

    def forward(layer: nn.Module) -> None:
        with torch.no_grad():
            layer(x)

    steps = {contender: partial(step, layer) for contender, layer in layers.items()}
    forwards = {contender: partial(forward, layer) for contender, layer in layers.items()}
    step_ms = interleaved_medians({**steps, "bound": bound(shape, backward=True)}, rounds, round_ms)
    forward_ms = interleaved_medians({**forwards, "bound": bound(shape, backward=False)}, rounds, round_ms)
    rows.append(Measurement(name, "bound"))
    for row in rows:
        row.step_ms, row.forward_ms = step_ms.get(row.contender), forward_ms.get(row.contender)
    return rows


def print_table(rows: list[Measurement]) -> None:
    bounds = {row.shape: row for row in rows if row.contender == "bound"}
    print(
        f"{'shape':12} {'contender':20} {'fwd ms':>8} {'f+b ms':>8} {'fwd bound/x':>11} {'f+b bound/x':>11}"
        f" {'kept':>8} {'peak':>8} {'error':>8}"
    )
    for row in rows:
        if row.failure:
            print(f"{row.shape:12} {row.contender:20} {row.failure}")
            continue
        base = bounds[row.shape]
        print(
            f"{row.shape:12} {row.contender:20} {row.forward_ms:8.3f} {row.step_ms:8.3f}"
            f" {base.forward_ms / row.forward_ms:11.3f} {base.step_ms / row.step_ms:11.3f}"
            f" {row.kept_mib or 0:8.0f} {row.peak_mib or 0:8.0f} {row.error or 0:8.1e}"
        )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["fine", "finest", "wide", "mid", "coarse"], choices=SHAPES)
    parser.add_argument(
        "--contenders", nargs="+", default=["grouped_mm", "grouped_mm+compile", "moeblaze"], help="see contenders()"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=120.0, help="time of each contender in each round")
    parser.add_argument("--skew", type=float, default=0.0, help="standard deviation of the experts' popularity (logits)")
    parser.add_argument("--hopper", default="auto", choices=["auto", "off"], help="off: the portable kernels on Hopper too")
    parser.add_argument("--one-thread", action="store_true", help="backward on the thread that calls it, as forward is")
    arguments = parser.parse_args()
    config.hopper = arguments.hopper
    torch.autograd.set_multithreading_enabled(not arguments.one_thread)

    rows = []
    for shape in arguments.shapes:
        rows += bench_shape(shape, arguments.contenders, arguments.rounds, arguments.round_ms, arguments.skew)
        print_table([row for row in rows if row.shape == shape])
        torch.cuda.empty_cache()
        save(arguments, rows)


if __name__ == "__main__":
    main()
