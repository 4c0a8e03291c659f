"""Graphs of random layers with random changes, node by node, through the rewrite.

The rewrite sees graphs, so a change to a graph shows what no grammar of sources thinks of. The property: what is rewritten does
what the changed graph does, in outputs and their strides, gradients (and which of them are None), and writes to inputs.

    python tests/corpus/fuzz/graphs.py --seeds 0:10000
    python tests/corpus/fuzz/graphs.py --seeds 0: --seconds 3600 --jobs 16

A difference is printed at once, and the summary comes even if the run is stopped.
``GROUP`` seeds in a row change the graph of one layer; ``--show SEED`` prints a seed's graph before and after the rewrite.
"""

import argparse
import functools
import random
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, fx

sys.path[:0] = [str(Path(__file__).resolve().parents[3])]

from moeblaze_ops import config  # noqa: E402
from moeblaze_ops.lowering.rewrite.rewrite import rewrite_graph  # noqa: E402
from tests.corpus.fuzz.grammar import draw  # noqa: E402
from tests.corpus.fuzz.graph_changes import Changer, clone, propagate  # noqa: E402
from tests.corpus.fuzz.modes import GathersByInt64, TopkOfTies, as_on_a_gpu, unwritten_memory_is_nan  # noqa: E402
from tests.corpus.fuzz.processes import results_of, until_stopped  # noqa: E402
from tests.corpus.fuzz.run import Case  # noqa: E402

GROUP = 25
NOISE = 1e-5  # of the largest number of a tensor, in fp64: the scores of some layers are in fp32

Result = tuple[list, list, list]
"""Outputs, gradients and inputs of a run."""


@functools.lru_cache(maxsize=4)
def captured(group: int) -> tuple[fx.GraphModule, list, int] | None:
    """The graph of a random layer in fp64, its inputs and number of experts; None where Dynamo gives no single graph."""
    layer = draw(random.Random(group))
    layer.dtype = "float64"
    module, x = Case(group, layer).build()
    graphs: list = []

    def keep(gm: fx.GraphModule, inputs: list):
        graphs.append((gm, inputs, layer.E))
        return gm.forward

    torch._dynamo.reset()
    try:
        torch.compile(module, backend=keep, fullgraph=True, dynamic=False)(x.requires_grad_())
    except Exception:
        return None
    return graphs[0] if len(graphs) == 1 else None


def check(seed: int, show: bool = False) -> tuple[str, str]:
    """What became of a seed ("wrong: " and how, where the rewritten graph does something else), and what was changed."""
    drawn = captured(seed // GROUP)
    if drawn is None:
        return "no graph", ""
    original, inputs, experts = drawn
    gm, rng, changes = clone(original), random.Random(seed), []
    try:
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
            changes.append(Changer(gm.graph, rng, experts).change())
            propagate(gm)
        expected = _run(gm, inputs)
    except Exception:
        return "no program", ""
    said, changed = "; ".join(changes), clone(gm)
    if show:
        print(said, gm.code, sep="\n")
    with mock.patch.object(config, "strict", True), as_on_a_gpu():
        try:
            report = rewrite_graph(gm)
        except Exception as error:
            return f"wrong: the rewrite raises {error!r}", said
    if show:
        print(gm.code, *((c.reason, c.detail) for c in report.candidates), sep="\n")
    gm.recompile()
    try:
        difference = _difference(_run(gm, inputs), expected)
        if difference:
            with GathersByInt64():
                difference = _difference(_run(gm, inputs), _run(changed, inputs))
    except Exception as error:
        difference = f"it raises {error!r}"
    if difference and _ties(changed, inputs):
        return "tied scores", said
    return f"wrong: {difference}" if difference else "rewritten" if report.rewritten else "left alone", said


def _ties(gm: fx.GraphModule, inputs: list) -> bool:
    """True if a topk chooses among equal scores, as it likes."""
    with TopkOfTies() as mode:
        _run(gm, inputs)
    return mode.found


def _run(gm: fx.GraphModule, inputs: list) -> Result:
    """What reads memory that nobody wrote to gives NaN, and is left out of the comparison."""
    torch.manual_seed(0)
    leaves = [i.detach().clone().requires_grad_(i.requires_grad) if isinstance(i, Tensor) else i for i in inputs]
    given = [i.clone() if isinstance(i, Tensor) and i.requires_grad else i for i in leaves]  # a leaf cannot be written to
    with unwritten_memory_is_nan():
        outs = list(gm(*given))
    outputs = [o for o in outs if isinstance(o, Tensor) and o.requires_grad]
    wanted = [i for i in leaves if isinstance(i, Tensor) and i.requires_grad]
    of = [torch.arange(1, o.numel() + 1, dtype=o.dtype).cos().view(o.shape) for o in outputs]
    gradients = torch.autograd.grad(outputs, wanted, of, allow_unused=True) if outputs else []
    need = [o.requires_grad for o in outs if isinstance(o, Tensor)]
    return [*outs, *need], list(gradients), [t.detach() for t in given if isinstance(t, Tensor)]


def _difference(actual: Result, expected: Result) -> str:
    """The first difference; numbers that are not finite are nobody's business."""
    if not all(t.isfinite().all() for part in expected for t in part if isinstance(t, Tensor) and t.dtype.is_floating_point):
        return ""
    for kind, got, wanted in zip(("output", "gradient", "input"), actual, expected, strict=True):
        for number, (a, b) in enumerate(zip(got, wanted, strict=True)):
            if not isinstance(a, Tensor) or not isinstance(b, Tensor):
                if a is not b and a != b:
                    return f"{kind} {number} is {a} for {b}"
                continue
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                return f"{kind} {number}: {a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}"
            if kind == "output" and b.numel() and a.stride() != b.stride():
                return f"{kind} {number}: strides {a.stride()} for {b.stride()}"
            off, largest = (float(t.detach().abs().max()) if t.numel() else 0.0 for t in (a.double() - b.double(), b.double()))
            if not off <= NOISE * max(1.0, largest):
                return f"{kind} {number}: off by {off:.3g}, largest {largest:.3g}"
    return ""


def _became(seed: int) -> tuple[int, str]:
    """A seed and what became of it; a failure is printed at once."""
    became, changes = check(seed)
    if became.startswith("wrong"):
        print(f"seed {seed}: {became}\n  {changes}", flush=True)
    return seed, became


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END, FIRST: or one seed (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds (default: %(default)s)")
    parser.add_argument("--show", type=int, help="print the graphs of this seed and stop")
    options = parser.parse_args()
    if options.show is not None:
        print(*check(options.show, show=True), sep="\n")
        return 0
    counts, wrong = Counter[str](), []
    with until_stopped():
        for seed, became in results_of(_became, options.seeds, options.jobs, options.seconds, block=GROUP):
            counts[became.partition(":")[0]] += 1
            wrong += [seed] if became.startswith("wrong") else []
    print(f"{sum(counts.values())} seeds: {dict(counts)}; wrong: {sorted(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
