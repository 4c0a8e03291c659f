"""What MoE layers keep for backward and take at their peak, measured on a GPU and beside the estimate.

    python benchmarks/bench_memory.py --shapes fine coarse conf3 --json memory.json
    python benchmarks/bench_memory.py --contenders preactivation+compile input+compile limited+compile --json limited.json
    python benchmarks/bench_memory.py --scaling --json scaling.json --plot scaling.png

kept: bytes allocated after forward beyond what was allocated before it and beyond the output. peak: highest allocation
over forward and backward beyond what was allocated before, and beyond the results: output, x gradient and weight gradients.
Times are taken in turns.
``offloaded`` layers run under torch's ``save_on_cpu``: what they keep goes to pinned memory of the host.
``limited`` is keep="input" with ``config.max_layer_transient_bytes`` set to ``--limit`` MiB; its memory may exceed the results
by 256 MiB, and its time that of ``preactivation`` by 25%. ``--scaling`` is conf1 over 8 thousand to 8 million tokens.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

import moeblaze_ops
from bench_layer import SHAPES, GroupedMoE, Shape
from environment import command_line, save
from measuring import MIB, interleaved_medians, load_device, memory, noting_failure
from moeblaze_ops import config
from moeblaze_ops.memory.estimate import memory_estimate

TURN_MS = 1000
"""Of one contender: long against the time in which a device at its power limit settles after another one."""

SCALING_TOKENS = [2**exponent for exponent in (13, 15, 17, 19, 21, 23)]
LABELS = {
    "grouped_mm": "grouped_mm, eager",
    "grouped_mm+compile": "grouped_mm + torch.compile",
    "preactivation": 'moeblaze, keep="preactivation"',
    "h8": 'moeblaze, keep="h8"',
    "input": 'moeblaze, keep="input"',
}


@dataclass
class Measurement:
    """One contender on one shape; memory in MiB, time in ms, estimates for our layers."""

    shape: str
    T: int
    contender: str
    kept_mib: float | None = None
    peak_mib: float | None = None
    estimated_kept_mib: float | None = None
    estimated_peak_mib: float | None = None
    peak_step: str | None = None
    beyond_results_mib: float | None = None
    limit_mib: int | None = None
    step_ms: float | None = None
    failure: str | None = None


def ours(keep: str) -> Callable[[Shape], nn.Module]:
    def make(shape: Shape) -> nn.Module:
        return moeblaze_ops.MoE(
            shape.D, shape.F, shape.E, shape.K, activation=shape.activation, keep=keep, device="cuda", dtype=torch.bfloat16
        )

    return make


class Offloaded(nn.Module):
    """A layer that keeps on the host."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return self.layer(x)


CONTENDERS: dict[str, Callable[[Shape], nn.Module]] = {
    "grouped_mm": GroupedMoE,
    "grouped_mm+compile": lambda shape: torch.compile(GroupedMoE(shape)),
    "preactivation": ours("preactivation"),
    "h8": ours("h8"),
    "input": ours("input"),
    "preactivation+compile": lambda shape: torch.compile(ours("preactivation")(shape)),
    "h8+compile": lambda shape: torch.compile(ours("h8")(shape)),
    "input+compile": lambda shape: torch.compile(ours("input")(shape)),
    "preactivation+compile+offloaded": lambda shape: Offloaded(torch.compile(ours("preactivation")(shape))),
    "h8+compile+offloaded": lambda shape: Offloaded(torch.compile(ours("h8")(shape))),
    "limited": ours("input"),
    "limited+compile": lambda shape: torch.compile(ours("input")(shape)),
}


def results_bytes(layer: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the output, the gradient of x, and those of the parameters."""
    return 2 * x.nbytes + sum(parameter.nbytes for parameter in layer.parameters())


def bench_shape(name: str, shape: Shape, contenders: list[str], limit_mib: int, rounds: int) -> list[Measurement]:
    """Memory of one contender after the other, then their times in turns."""
    torch._dynamo.reset()
    x = torch.randn(shape.T, shape.D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dout = torch.randn_like(x)
    rows = {contender: Measurement(name, shape.T, contender) for contender in contenders}
    steps = {}
    for row in rows.values():
        if keep_of(row.contender) == "limited":
            row.limit_mib = limit_mib
        estimate(row, shape)
        with noting_failure(row):
            steps[row.contender] = measured_step(row, shape, x, dout)
        torch.cuda.empty_cache()
    load_device()
    for contender, step_ms in interleaved_medians(steps, rounds, TURN_MS).items():
        rows[contender].step_ms = step_ms
    return list(rows.values())


def keep_of(contender: str) -> str:
    return contender.split("+compile")[0]


def estimate(row: Measurement, shape: Shape) -> None:
    keep = {"preactivation": "preactivation", "h8": "h8", "input": "input", "limited": "input"}.get(keep_of(row.contender))
    if keep is None or row.contender.endswith("+offloaded"):
        return
    options = {"gated": shape.activation == "swiglu", "router": True, "compiled": row.contender.endswith("+compile")}
    with limited_to(row.limit_mib):
        estimated = memory_estimate(shape.T, shape.D, shape.F, shape.E, shape.K, keep=keep, **options)
    row.estimated_kept_mib, row.estimated_peak_mib = estimated.kept / MIB, estimated.peak / MIB
    row.peak_step = estimated.peak_step


def measured_step(row: Measurement, shape: Shape, x: torch.Tensor, dout: torch.Tensor) -> Callable[[], None]:
    """Write the contender's memory into ``row`` and return what takes a step of it."""
    layer = CONTENDERS[row.contender](shape)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with limited_to(row.limit_mib):
            layer(x).backward(dout)

    step()
    with limited_to(row.limit_mib):
        row.kept_mib, row.peak_mib = memory(layer, x, dout)
    row.beyond_results_mib = row.peak_mib - results_bytes(layer, x) / MIB
    layer.zero_grad(set_to_none=True)
    x.grad = None
    return step


@contextlib.contextmanager
def limited_to(limit_mib: int | None) -> Iterator[None]:
    """With ``config.max_layer_transient_bytes`` at a limit, or as it is for None."""
    if limit_mib is None:
        yield
        return
    before, config.max_layer_transient_bytes = config.max_layer_transient_bytes, limit_mib * MIB
    try:
        yield
    finally:
        config.max_layer_transient_bytes = before


def print_table(rows: list[Measurement]) -> None:
    print(
        f"{'shape':12} {'T':>8} {'contender':31} {'kept':>9} {'estimate':>9} {'ratio':>6} {'peak':>9} {'estimate':>9}"
        f" {'ratio':>6} {'- results':>9} {'f+b ms':>9}  step at the estimated peak"
    )
    for row in rows:
        head = f"{row.shape:12} {row.T:8} {row.contender:31}"
        if row.failure:
            print(head, row.failure)
            continue
        print(
            f"{head} {_compared(row.kept_mib, row.estimated_kept_mib)} {_compared(row.peak_mib, row.estimated_peak_mib)}"
            f" {row.beyond_results_mib:9.1f} {row.step_ms:9.3f}  {row.peak_step or ''}"
        )


def _compared(measured: float, estimated: float | None) -> str:
    if estimated is None:
        return f"{measured:9.1f} {'':9} {'':6}"
    return f"{measured:9.1f} {estimated:9.1f} {measured / estimated:6.3f}"


def plot(rows: list[Measurement], path: str) -> None:
    """Bytes kept and peak against tokens, one line for each contender of ``LABELS``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharex=True, sharey=True)
    for axis, field, title in zip(axes, ("kept_mib", "peak_mib"), ("kept for backward", "peak of a step"), strict=True):
        for contender, label in LABELS.items():
            points = [(row.T, getattr(row, field)) for row in rows if row.contender == contender and not row.failure]
            if points:
                axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axis.set(title=title, xlabel="tokens", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("MiB")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", nargs="*", default=["fine", "finest", "wide", "mid", "coarse"], choices=SHAPES)
    parser.add_argument("--scaling", action="store_true", help="conf1 over the token counts instead of the shapes")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--limit", type=int, default=240, help="MiB beside the results that `limited` may allocate")
    parser.add_argument("--rounds", type=int, default=3, help="turns of timing")
    parser.add_argument("--plot", help="draw bytes against tokens to this file")
    arguments = parser.parse_args()

    if arguments.scaling:
        shapes = [("conf1", replace(SHAPES["conf1"], T=tokens)) for tokens in SCALING_TOKENS]
    else:
        shapes = [(name, SHAPES[name]) for name in arguments.shapes]
    rows = []
    for name, shape in shapes:
        measured = bench_shape(name, shape, arguments.contenders, arguments.limit, arguments.rounds)
        print_table(measured)
        rows += measured
        save(arguments, rows)
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
