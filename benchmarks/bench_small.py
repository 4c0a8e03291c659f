"""Few tokens without gradients, as in decoding: time on the device, and of calls from the host, beside the bytes of the weights.

    python benchmarks/bench_small.py --tokens 1 64 1024 --json small.json

Of the layers of ``bench_layer.py``, router included. device: a CUDA graph of eight calls on eight batches, per call, so that what
the second-level cache holds of one batch's experts is gone when it is its turn again. call: the same calls without a graph, where
the host launches them. bytes: the weights of the experts that a batch chooses, on average. limit: 1.25 times what reading these
takes at 4.3 TB/s, and 15 us. error: of the first batch, relative to ``grouped_mm`` in eager mode.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import moeblaze_ops.compile  # noqa: F401  registers the backend where the package is not installed
from bench_layer import SHAPES, GroupedMoE, contenders
from environment import command_line, save
from measuring import MIB, event_time, graph_of, load_device, noting_failure, relative_error

BATCHES = 8
BYTES_PER_SECOND = 4.3e12
LAUNCHES_MS = 0.015
SLACK = 1.25


@dataclass
class Measurement:
    """One contender on one number of tokens; times of a call in ms."""

    shape: str
    tokens: int
    contender: str
    weights_mib: float
    limit_ms: float
    device_ms: float | None = None
    call_ms: float | None = None
    error: float | None = None
    failure: str | None = None


def touched_bytes(layer: GroupedMoE, batches: list[Tensor]) -> float:
    """Of the weights of the experts that a batch chooses, on average."""
    expert_bytes = sum(weight[0].numel() * weight.element_size() for weight in (layer.w_up, layer.w_down))
    return statistics.mean(layer.route(x)[1].unique().numel() for x in batches) * expert_bytes


def bench_tokens(name: str, tokens: int, names: list[str], rounds: int) -> list[Measurement]:
    shape = replace(SHAPES[name], T=tokens)
    torch.manual_seed(0)
    torch._dynamo.reset()
    batches = [torch.randn(tokens, shape.D, device="cuda", dtype=torch.bfloat16) for _ in range(BATCHES)]
    eager = GroupedMoE(shape)
    expected, size = eager(batches[0]), touched_bytes(eager, batches)
    limit_ms = SLACK * size / BYTES_PER_SECOND * 1e3 + LAUNCHES_MS
    rows: list[Measurement] = []
    runs: dict[str, tuple[Callable[[], None], torch.cuda.CUDAGraph]] = {}
    for contender, make in contenders(names).items():
        rows.append(Measurement(name, tokens, contender, size / MIB, limit_ms))
        with noting_failure(rows[-1]):
            layer = make(shape, 0.0)
            own: nn.Module = getattr(layer, "_orig_mod", layer)
            own.load_state_dict(eager.state_dict())

            def run(layer: nn.Module = layer) -> None:
                for x in batches:
                    layer(x)

            rows[-1].error = relative_error(layer(batches[0]), expected)
            runs[contender] = run, graph_of(run)
    times: dict[str, tuple[list[float], list[float]]] = {contender: ([], []) for contender in runs}
    for _ in range(rounds):
        for contender, (run, graph) in runs.items():
            times[contender][0].extend(event_time(graph.replay, 10))
            times[contender][1].extend(event_time(run, 10))
    for row in rows:
        if row.contender in times:
            row.device_ms, row.call_ms = (statistics.median(samples) / BATCHES for samples in times[row.contender])
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shape", default="fine", choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 256, 1024, 2048])
    parser.add_argument(
        "--contenders", nargs="+", default=["grouped_mm+compile", "moeblaze", "moeblaze-eager"], help="see bench_layer.py"
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    load_device()
    rows: list[Measurement] = []
    print(f"{'tokens':>6} {'contender':20} {'weights':>9} {'limit us':>9} {'device us':>9} {'call us':>9} {'error':>8}")
    with torch.no_grad():
        for tokens in arguments.tokens:
            own = bench_tokens(arguments.shape, tokens, arguments.contenders, arguments.rounds)
            for row in own:
                values = f"{1e3 * (row.device_ms or 0):9.1f} {1e3 * (row.call_ms or 0):9.1f} {row.error or 0:8.1e}"
                head = f"{tokens:6} {row.contender:20} {row.weights_mib:5.0f} MiB {1e3 * row.limit_ms:9.1f}"
                print(head, row.failure or values, flush=True)
            rows += own
            save(arguments, rows)


if __name__ == "__main__":
    main()
