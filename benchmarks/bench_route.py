"""The router, logits to weights and expert ids, against torch's softmax and topk: time on the device alone.

    python benchmarks/bench_route.py --shapes qwen deepseek_v3 --json results.json

Every contender is captured in a CUDA graph of ``--launches`` calls and replayed, so that neither Python nor launches count;
times are medians over replays, taken in turns. Each contender's choices and weights are checked first. "copy" is the time
to copy the logits, the least that reading them and writing as much can take.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from environment import command_line, save
from measuring import event_time, graph_of, load_device
from moeblaze_ops.ops.route import route, route_backward


@dataclass(frozen=True)
class Shape:
    """A router: T tokens, E experts, K choices, and the options of ``route``."""

    T: int
    E: int
    K: int
    scoring: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    dtype: str = "float32"


SHAPES = {
    "qwen": Shape(32768, 128, 8),
    "qwen_bf16": Shape(32768, 128, 8, dtype="bfloat16"),
    "olmoe": Shape(32768, 64, 8, renormalize=False),
    "mixtral": Shape(32768, 8, 2),
    "gpt_oss": Shape(32768, 128, 4, "softmax_topk", False, dtype="bfloat16"),
    "deepseek_v3": Shape(32768, 256, 8, "sigmoid", True, 2.5, 8, 4),
    "qwen3_next": Shape(32768, 512, 10),
    "largest": Shape(8192, 4096, 32),
    "decode": Shape(64, 128, 8),
}


@dataclass
class Measurement:
    """One contender on one shape; microseconds."""

    shape: str
    contender: str
    forward_us: float | None = None
    backward_us: float | None = None


def torch_route(logits_TE: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """The same choice in plain PyTorch; ties in another order."""
    logits_TE = logits_TE.float()
    if shape.scoring == "softmax_topk":
        logits_TK, experts_TK = logits_TE.topk(shape.K)
        return logits_TK.softmax(1) * shape.scale, experts_TK
    scores_TE = logits_TE.sigmoid() if shape.scoring == "sigmoid" else logits_TE.softmax(1)
    choice_TE = scores_TE
    if shape.top_groups < shape.num_groups:
        grouped = scores_TE.unflatten(1, (shape.num_groups, -1))
        group_scores = grouped.topk(2, 2).values.sum(2) if shape.scoring == "sigmoid" else grouped.amax(2)
        outside = torch.ones_like(group_scores, dtype=torch.bool)
        outside.scatter_(1, group_scores.topk(shape.top_groups).indices, False)
        choice_TE = grouped.masked_fill(outside.unsqueeze(2), -torch.inf).flatten(1)
    experts_TK = choice_TE.topk(shape.K).indices
    weights_TK = scores_TE.gather(1, experts_TK)
    if shape.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + (1e-20 if shape.scoring == "sigmoid" else 0))
    return weights_TK * shape.scale, experts_TK


def medians(runs: dict[str, Callable[[], object]], launches: int, replays: int) -> dict[str, float]:
    """Median microseconds of one call of each run."""
    graphs = {name: graph_of(run, launches) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(replays):
        for name, graph in graphs.items():
            (ms,) = event_time(graph.replay, 1)
            samples[name].append(ms * 1e3 / launches)
    return {name: statistics.median(times) for name, times in samples.items()}


def bench_shape(name: str, launches: int, replays: int) -> list[Measurement]:
    shape = SHAPES[name]
    torch.manual_seed(0)
    logits = torch.randn(shape.T, shape.E, device="cuda", dtype=getattr(torch, shape.dtype))
    options = {
        "scoring": shape.scoring,
        "renormalize": shape.renormalize,
        "scale": shape.scale,
        "num_groups": shape.num_groups,
        "top_groups": shape.top_groups,
    }
    weights, experts = route(logits, shape.K, **options)
    expected, _ = torch_route(logits, shape)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
    dweights = torch.randn_like(weights)
    compiled = torch.compile(torch_route)
    detached = logits
    forwards = {
        "moeblaze": lambda: route(detached, shape.K, **options),
        "torch": lambda: torch_route(detached, shape),
        "torch+compile": lambda: compiled(detached, shape),
        "copy": lambda: detached.clone(),
    }
    saved = (detached, weights.detach(), experts)
    del weights, expected

    def step_of(run: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[], object]:
        def step() -> None:
            # A leaf of its own: backward runs on the stream that the leaf was first used on.
            leaf = detached.detach().requires_grad_()
            torch.autograd.grad(run(leaf)[0], leaf, dweights)

        return step

    backwards = {"moeblaze": lambda: route_backward(dweights, *saved, shape.scoring, shape.renormalize, shape.scale)}
    steps = {
        "moeblaze": step_of(lambda leaf: route(leaf, shape.K, **options)),
        "torch": step_of(lambda leaf: torch_route(leaf, shape)),
    }
    with torch.no_grad():
        forward_us = medians(forwards, launches, replays)
    backward_us = medians(backwards, launches, replays)
    step_us = medians(steps, launches, replays)
    backward_us["torch"] = step_us["torch"] - forward_us["torch"]
    return [Measurement(name, contender, forward_us[contender], backward_us.get(contender)) for contender in forwards]


def print_table(rows: list[Measurement]) -> None:
    print(f"{'shape':14} {'contender':16} {'forward us':>11} {'backward us':>12}")
    for row in rows:
        backward = "" if row.backward_us is None else f"{row.backward_us:.1f}"
        print(f"{row.shape:14} {row.contender:16} {row.forward_us:11.1f} {backward:>12}")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--launches", type=int, default=20, help="calls in a graph")
    parser.add_argument("--replays", type=int, default=50)
    arguments = parser.parse_args()

    load_device()
    rows = []
    for shape in arguments.shapes:
        rows += bench_shape(shape, arguments.launches, arguments.replays)
        print_table([row for row in rows if row.shape == shape])
        save(arguments, rows)


if __name__ == "__main__":
    main()
