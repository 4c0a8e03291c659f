"""Random programs of sharded layers on several ranks: each computes what one process would, whoever has how many tokens.

Layers with tokens of their own, one behind another or side by side, are eager or compiled, checkpointed or not, and the graph
breaks between them: on all ranks, or on one. From step to step ranks have other numbers of tokens, none included, and one of them
compiles anew. Torch compares each collective with those that the other ranks make, and raises where they differ. Without that,
ranks wait for each other until the time of their group is over, or compute other numbers.

    python tests/distributed/rank_programs.py --seeds 0:500 --ranks 2 --groups 8            # of processes, side by side
    python tests/distributed/rank_programs.py --seeds 0:500 --ranks 2 --not-compared        # and in the time that they take
    python tests/distributed/rank_programs.py --seeds 0:20 --ranks 2 --compiler inductor    # cold, and with what that left
    python tests/distributed/rank_programs.py --seeds 0:100 --ranks 4 --hosts 2        # of two ranks each
    python tests/distributed/rank_programs.py --seeds 0:9 --ranks 4 --rows 2 --compiler inductor   # experts over two, twice
    python tests/distributed/rank_programs.py --seeds 0:9 --ranks 2 --alike --compiler inductor    # as many tokens on all ranks
    python tests/distributed/rank_programs.py --seeds 0:100 --ranks 2 --registered     # every other layer is one of transformers
    python tests/distributed/rank_programs.py --seeds 0:100 --ranks 2 --cut            # the graph breaks right behind layers
    python tests/distributed/rank_programs.py --show 7

Each program that fails has a line with its seed and tracebacks on stderr; the last line counts how they do. Through Inductor
each runs twice, with caches on disk that ranks share: the last rank compiles later than the others with cold ones, the first
with warm ones, in other processes. Code of ranks that have as many tokens is the same, so that one takes what another has left.
A mesh with rows has the experts on its other axis in a third pass: names of groups are those of others, and each process makes
them anew between programs. Operators are called as they are there: to build them in C++ takes most of the time, and ``--build``
does so.
"""

import argparse
import contextlib
import copy
import faulthandler
import functools
import linecache
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import ProcessExitedException

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from moeblaze_ops import compile as switch  # noqa: E402
from moeblaze_ops import config  # noqa: E402
from tests.corpus.zoo import catalogue as zoo  # noqa: E402
from tests.tools.compiling import compile_quickly, keep_what_is_imported  # noqa: E402
from tests.tools.ranks import start_ranks  # noqa: E402

KINDS = ("dense_einsum", "gathered_einsum", "stacked_loop", "masked_sum", "skipping", "unknown")
COUNTS = (0, 1, 2, 5, 5, 8)
TOLERANCE = 1e-9
LATE_S = 3.0
_TOGETHER = 8
"""Programs that the same processes run, if none fails."""


class Outcome(NamedTuple):
    """What became of a program on a rank: ``right``, or what differs.

    ``moved``: layers of graphs that move their tokens. ``hits``: graphs that AOTAutograd's cache had.
    """

    became: str
    moved: int = 0
    hits: int = 0


FAILURES = {
    "ended by a signal": "terminated with signal",
    "waited": "Timed out waiting|got no word of .* for|terminated with exit code|did not end",
    "named at once": "every rank must run",
    "wrong": "^step ",
}
"""How programs fail: the first of which some rank speaks."""


def kind_of_failure(outcomes: Sequence[Outcome]) -> str:
    return next((kind for kind, words in FAILURES.items() if any(re.search(words, o.became) for o in outcomes)), "raised")


class Way(NamedTuple):
    """How ranks run programs.

    ``late`` begins each of them later; ``caches`` is a folder that they share. A rank waits ``patience_s`` for the others, and a
    program that takes twice as long ends its process. ``registered``: every other layer is an experts module of transformers.
    ``rows``: so many groups of ranks store all experts each. ``turned``: their ranks do not stand behind one another. ``alike``:
    all ranks have as many tokens as the first. ``cut``: graphs break between layers and what reads their results.
    """

    compiler: str | None = None
    compared: bool = True
    build: bool = False
    patience_s: int = 300
    late: int | None = None
    caches: str | None = None
    hosts: int = 1
    registered: bool = False
    rows: int = 1
    turned: bool = False
    alike: bool = False
    cut: bool = False


_DEFAULT = Way()


@dataclass(frozen=True)
class Step:
    """What a step does on each rank. ``tokens``: of both inputs, for each microbatch and rank."""

    tokens: list[list[tuple[int, int]]]
    compiles_anew: int | None
    with_gradients: bool


@dataclass(frozen=True)
class Program:
    """A network of layers, and what is done with it."""

    layers: list[str]
    experts: int
    top_k: int
    lines: list[str]
    frozen: list[int]
    compiler: str
    dynamic: bool | None
    settings: dict[str, object]
    steps: list[Step]

    @property
    def source(self) -> str:
        return "\n    ".join(["def forward(self, x, y):", *self.lines, "return x, y\n"])


def draw(seed: int, ranks: int, compiler: str | None = None, registered: bool = False) -> Program:
    r = random.Random(seed)
    layers = [r.choice(KINDS) for _ in range(r.choice([1, 1, 2, 2, 3, 4]))]
    top_k = r.choice([1, 2, 2])
    experts = ranks * (r.choice([1, 1, 2]) if ranks == 2 else 1)  # a loop over them is traced for each
    lines = []
    for number in range(len(layers)):
        lines += r.choices([[], ["graph_break()"], [f"if self.rank == {r.randrange(ranks)}: graph_break()"]], [4, 1, 1])[0]
        lines += [f"x = {r.choice(['x[: len(x) // 2]', 'torch.cat([x, y])', 'x.relu()'])}"] if r.random() < 0.2 else []
        names = r.choice([("x", "x"), ("x", "x"), ("y", "y"), ("x", "y")])
        call = (
            f"self.layers[{number}]({{}})"
            if r.random() < 0.8
            else f"checkpoint(self.layers[{number}], {{}}, use_reentrant=False)"
        )
        if r.random() < 0.2:
            lines.append(f"{names[0]} = {call.format(names[0])}")
        else:
            lines += [f"{name} = {name} + {call.format(name)}" for name in dict.fromkeys(names)]
    settings = {
        "exchange": r.choice(["auto", "auto", "all_gather", "all_to_all"]),
        "experts_move": r.choice(["auto", "auto", "auto", "weights"]),
        "tokens_per_rank": r.choice([None, None, None, 64]),
        "keep": r.choice(["preactivation", "input"]),
    }
    steps = [
        Step(
            [[(r.choice(COUNTS), r.choice(COUNTS)) for _ in range(ranks)] for _ in range(r.choice([1, 1, 2]))],
            r.choice([None, None, *range(ranks)]),
            r.random() < 0.9,
        )
        for _ in range(r.choice([1, 2, 3] if len(layers) < 3 else [1, 2]))
    ]
    frozen = [number for number in range(len(layers)) if r.random() < 0.15]
    drawn = r.choices(["graphs", "aot_eager", "none"], [8, 1, 1])[0]
    dynamic = r.choice([None, True])
    layers[::2] = ["registered"] * len(layers[::2]) if registered else layers[::2]
    return Program(layers, experts, top_k, lines, frozen, compiler or drawn, dynamic, settings, steps)


def _with_cuts(program: Program, seed: int, ranks: int) -> Program:
    """Graphs break, or the last rank's does, right behind layers: their results leave the graph and are added in the next."""
    r, lines = random.Random(seed), []
    for line in program.lines:
        name, call = line[0], line.partition(f"{line[0]} + ")[2]
        if not call:
            lines.append(line)
            continue
        cut = r.choices(["graph_break()", f"if self.rank == {ranks - 1}: graph_break()", "pass"], [3, 2, 1])[0]
        lines += [f"result = {call}", cut, f"{name} = {name} + result"]
    return replace(program, lines=lines)


def _with_tokens_alike(program: Program) -> Program:
    steps = [
        replace(step, tokens=[[counts[0]] * len(counts) for counts in step.tokens], compiles_anew=None) for step in program.steps
    ]
    return replace(program, steps=steps)


class Cumulative(nn.Module):
    """Each expert for the tokens of all before it as well: no layer that the rewriter knows."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        whole = zoo.stacked("dense_einsum", **sizes)
        self.router, self.w1, self.w2 = whole.router, whole.w1, whole.w2

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        rows = [(x @ self.w1[e]) @ self.w2[e] * (weights * (ids <= e)).sum(-1, keepdim=True) for e in range(len(self.w1))]
        return torch.stack(rows).sum(0)


class Skipping(nn.Module):
    """A loop that reads how many experts there are, and skips those without tokens."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        whole = zoo.stacked("stacked_loop", **sizes)
        self.router, self.w1, self.w2 = whole.router, whole.w1, whole.w2

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        out = torch.zeros_like(x)
        for e in range(len(self.w1)):
            token, slot = torch.where(ids == e)
            if len(token) == 0:
                continue
            rows = nn.functional.silu(x[token] @ self.w1[e]) @ self.w2[e]
            out = out.index_add(0, token, rows * weights[token, slot, None])
        return out


@functools.cache
def _registered_experts() -> type[nn.Module]:
    from transformers.integrations.moe import use_experts_implementation

    @use_experts_implementation(is_transposed=True, has_gate=False)
    class Experts(nn.Module):
        def __init__(self, config: SimpleNamespace, up_proj: nn.Parameter, down_proj: nn.Parameter) -> None:
            super().__init__()
            self.num_experts, self.act_fn = len(up_proj), nn.SiLU()
            self.up_proj, self.down_proj = up_proj, down_proj

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            of_experts = [self.act_fn(x @ self.up_proj[e]) @ self.down_proj[e] for e in range(self.num_experts)]
            return sum(rows * (weights * (ids == e)).sum(-1, keepdim=True) for e, rows in enumerate(of_experts))

    return Experts


class Registered(nn.Module):
    """Experts that transformers can spread: once ``spread``, they run by its ``ep_implementation="moeblaze"``."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        whole = zoo.stacked("stacked_loop", **sizes)
        config = SimpleNamespace(_experts_implementation="eager")
        self.router, self.experts = whole.router, _registered_experts()(config, whole.w1, whole.w2)

    def spread(self, mesh: DeviceMesh) -> None:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        plan = {"experts.up_proj": "grouped_gemm", "experts.down_proj": "grouped_gemm", "experts": "ep_dispatch_experts"}
        alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("others", "tp"))["tp"]
        apply_expert_parallelism(self, mesh, alone, plan, "moeblaze")

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        return self.experts(x, ids, weights)


def _layer(kind: str, program: Program) -> nn.Module:
    sizes = {"E": program.experts, "K": program.top_k, "normalise": program.top_k > 1}
    if kind == "masked_sum":
        return zoo.ModuleListMoE(zoo.masked_sum, zoo.GluMLP, **sizes)
    if kind == "registered":
        return Registered(**sizes)
    return Cumulative(**sizes) if kind == "unknown" else Skipping(**sizes) if kind == "skipping" else zoo.stacked(kind, **sizes)


def _network(program: Program, seed: int, rank: int) -> nn.Module:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(seed)
    names: dict = {"torch": torch, "checkpoint": checkpoint, "graph_break": torch._dynamo.graph_break}
    file = f"<seed {seed}>"
    linecache.cache[file] = len(program.source), None, program.source.splitlines(keepends=True), file
    exec(compile(program.source, file, "exec"), names)
    network = type("Network", (nn.Module,), {"forward": names["forward"]})()
    network.rank, network.layers = rank, nn.ModuleList(_layer(kind, program) for kind in program.layers)
    for number in program.frozen:
        for name, p in network.layers[number].named_parameters():
            p.requires_grad_("router" in name)
    return network


def _run(network: Callable, microbatches: list[tuple[Tensor, Tensor]], with_gradients: bool) -> list[Tensor]:
    """Outputs, and gradients of the inputs."""
    leaves = [tuple(tensor.clone().requires_grad_() for tensor in pair) for pair in microbatches]
    with contextlib.nullcontext() if with_gradients else torch.no_grad():
        outputs = [tensor for pair in leaves for tensor in network(*pair)]
    if with_gradients:
        sum(out.square().sum() for out in outputs).backward()
    inputs = [tensor for pair in leaves for tensor in pair]
    return [*(out.detach() for out in outputs), *(torch.zeros_like(t) if t.grad is None else t.grad for t in inputs)]


def _gradients(network: nn.Module) -> dict[str, Tensor]:
    """Of all parameters, zeros where there is none; of a list of experts, all entries together, as they are stored."""
    found: dict[str, list[Tensor]] = {}
    for name, p in network.named_parameters():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        head, listed, tail = name.partition(".experts.")
        entry, _, key = tail.partition(".")
        if listed and entry.isdecimal():
            name = f"{head}.experts.{key.replace('.', '_')}"
        found.setdefault(name, []).append(gradient)
    return {
        name: tensors[0] if "experts" not in name or len(tensors) == 1 else torch.stack(tensors)
        for name, tensors in found.items()
    }


def _differences(
    program: Program, one: nn.Module, network: nn.Module, run: Callable, number: int, step: Step, mesh: DeviceMesh
) -> str:
    """Take a step here and, for all ranks of the mesh, in this process alone; what differs."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    row = dist.get_process_group_ranks(mesh.get_group())[0]
    generator = torch.Generator().manual_seed(number + 100 * row)
    inputs = [
        [tuple(torch.randn(count, zoo.D, generator=generator) for count in counts) for counts in of_ranks]
        for of_ranks in (each[row % ranks :] + each[: row % ranks] for each in step.tokens)
    ]
    network.zero_grad()
    got = _run(run, [of_ranks[rank] for of_ranks in inputs], step.with_gradients)
    own, total, wanted = {}, {}, []
    for other in range(ranks):
        one.zero_grad()
        results = _run(one, [of_ranks[other] for of_ranks in inputs], step.with_gradients)
        gradients = {name: gradient.clone() for name, gradient in _gradients(one).items()}
        total = {name: total.get(name, 0) + gradient for name, gradient in gradients.items()}
        if other == rank:
            wanted, own = results, gradients
    pairs = list(zip([f"result {i}" for i in range(len(got))], got, wanted, strict=True))
    for name, gradient in _gradients(network).items():
        sharded = hasattr(gradient, "to_local")
        mine = gradient.to_local() if sharded else gradient
        pairs.append((name, mine, total[name].chunk(ranks)[rank] if sharded else own[name]))
    wrong = [f"{name} by {(a - b).abs().max():.2g}" for name, a, b in pairs if a.shape != b.shape or not _is_close(a, b)]
    return ", ".join(wrong)


def _is_close(got: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(got, wanted, atol=TOLERANCE * max(1.0, float(wanted.abs().max()) if wanted.numel() else 1.0), rtol=0)


@contextlib.contextmanager
def _compiled(program: Program, network: nn.Module) -> Iterator[Callable]:
    if program.compiler == "none":
        yield network
        return
    if program.compiler == "inductor":
        with switch.enabled():
            yield torch.compile(network, dynamic=program.dynamic)
        return

    def backend(gm: fx.GraphModule, example_inputs: list) -> Callable:
        switch.rewrite(gm)
        return gm.forward if program.compiler == "graphs" else lookup_backend("aot_eager")(gm, example_inputs)

    with switch.rewriting(backend):
        yield torch.compile(network, backend=backend, dynamic=program.dynamic)


def _axis(way: Way) -> DeviceMesh:
    """The ranks that share the experts of a row."""
    names, shape = ["rows", "ep"], [way.rows, dist.get_world_size() // way.rows]
    if way.turned:
        names.reverse(), shape.reverse()
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))["ep"]


def _sharded(one: nn.Module, program: Program, mesh: DeviceMesh) -> nn.Module:
    from moeblaze_ops.distributed import shard_experts

    network = copy.deepcopy(one)
    registered = {number: layer for number, layer in enumerate(network.layers) if isinstance(layer, Registered)}
    for number in registered:
        network.layers[number] = nn.Identity()
    shard_experts(network, mesh)
    for number, layer in registered.items():
        layer.spread(mesh)
        network.layers[number] = layer
    return network


def check(seed: int, way: Way = _DEFAULT) -> Outcome:
    mesh = _axis(way)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    program = draw(seed, ranks, way.compiler, way.registered)
    program = _with_tokens_alike(program) if way.alike else program
    program = _with_cuts(program, seed, ranks) if way.cut else program
    one, moved = _network(program, seed, rank), 0
    before = config.snapshot()
    for key, value in program.settings.items():
        setattr(config, key, value)
    network = _sharded(one, program, mesh)
    torch._dynamo.reset()
    counters.clear()
    try:
        with switch.recording() as records, _compiled(program, network) as run:
            for number, step in enumerate(program.steps):
                if step.compiles_anew == rank:
                    torch._dynamo.reset()
                if wrong := _differences(program, one, network, run, number, step, mesh):
                    return Outcome(f"step {number}: {wrong}")
        kept = [record.report for record in records if isinstance(record, switch.GraphRecord) and record.dropped is None]
        moved = sum("experts_over_ranks" in str(c.became) for report in kept for c in report.candidates)
    finally:
        for key, value in before.items():
            setattr(config, key, value)
    return Outcome("right", moved, counters["aot_autograd"]["autograd_cache_hit"])


def _work(rank: int, ranks: int, seeds: Sequence[int], way: Way, folder: str) -> None:
    faulthandler.enable()
    if way.caches is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = way.caches
    if way.compared and torch.__version__ >= (2, 13):  # of gloo, 2.11 compares no collective that a graph holds
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    compile_quickly()
    keep_what_is_imported()
    config.quiet = True
    torch._inductor.config.fallback_by_default = not way.build
    timeout = timedelta(seconds=way.patience_s)

    def begin(world: int) -> None:
        store = dist.FileStore(f"{folder}/store{world}", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)

    begin(0)
    if way.hosts > 1:
        from moeblaze_ops.ops.sharded import hosts

        hosts._this_host = lambda: rank // (ranks // way.hosts)
    for world, seed in enumerate(seeds):
        if way.turned and world:
            dist.destroy_process_group()
            begin(world)
        if rank == way.late:
            time.sleep(LATE_S)
        faulthandler.dump_traceback_later(2 * way.patience_s, exit=True)
        try:
            outcome = check(seed, way)
        except Exception:
            outcome = Outcome(f"raised\n{traceback.format_exc()}")
        torch.save(tuple(outcome), f"{folder}/{seed}.{rank}")
        if outcome.became.startswith("raised"):
            return  # the group cannot be used any more
        try:
            dist.barrier()
        except RuntimeError:
            return
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def run_programs(seeds: Sequence[int], ranks: int, way: Way = _DEFAULT) -> dict[int, list[Outcome]]:
    """What became of each program on each rank. Processes serve many programs, and are started anew behind one that failed."""
    results: dict[int, list[Outcome]] = {}
    while len(results) < len(seeds):
        rest, end = seeds[len(results) :], "did not end"
        with tempfile.TemporaryDirectory() as folder:
            try:
                start_ranks(_work, (ranks, rest, way, folder), ranks)
            except ProcessExitedException as error:
                end = f"ended: {error}"
            for seed in rest:
                files = [Path(folder, f"{seed}.{rank}") for rank in range(ranks)]
                outcomes = [Outcome(*torch.load(file)) if file.exists() else Outcome(end) for file in files]
                results[seed] = outcomes
                if any(outcome.became == end or outcome.became.startswith("raised") for outcome in outcomes):
                    break
    return results


def _run_passes(seeds: Sequence[int], ranks: int, way: Way) -> dict[str, dict[int, list[Outcome]]]:
    """Run programs through Inductor with empty caches and with those that this leaves, through others once."""
    if way.compiler != "inductor":
        return {"": run_programs(seeds, ranks, way)}
    with tempfile.TemporaryDirectory() as caches:
        passes = {"cold": way._replace(late=ranks - 1), "warm": way._replace(late=0)}
        if way.rows > 1:
            passes["turned"] = way._replace(turned=True)
        return {name: run_programs(seeds, ranks, of_pass._replace(caches=caches)) for name, of_pass in passes.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:100")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--patience", type=int, default=300)
    parser.add_argument("--compiler", choices=["inductor", "graphs", "aot_eager", "none"])
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--not-compared", action="store_true")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--registered", action="store_true")
    parser.add_argument("--alike", action="store_true")
    parser.add_argument("--cut", action="store_true")
    parser.add_argument("--show", type=int)
    arguments = parser.parse_args()
    if arguments.show is not None:
        ranks = arguments.ranks // arguments.rows
        program = draw(arguments.show, ranks, arguments.compiler, arguments.registered)
        program = _with_cuts(program, arguments.show, ranks) if arguments.cut else program
        print(program, program.source, sep="\n\n")
        return
    seeds = range(*map(int, arguments.seeds.split(":")))
    way = Way(arguments.compiler, not arguments.not_compared, arguments.build, arguments.patience)
    way = way._replace(hosts=arguments.hosts, registered=arguments.registered, rows=arguments.rows)
    way = way._replace(alike=arguments.alike, cut=arguments.cut)
    totals, kinds, bad, started = Counter(), Counter(), 0, time.monotonic()
    with ThreadPoolExecutor(arguments.groups) as pool:
        parts = [seeds[first : first + _TOGETHER] for first in range(0, len(seeds), _TOGETHER)]
        for future in as_completed(pool.submit(_run_passes, part, arguments.ranks, way) for part in parts):
            for name, (seed, outcomes) in ((name, item) for name, each in future.result().items() for item in each.items()):
                totals += Counter(programs=1, moved=outcomes[0].moved, hits=sum(o.hits for o in outcomes))
                if any(outcome.became != "right" for outcome in outcomes):
                    bad += 1
                    kind = kind_of_failure(outcomes)
                    kinds[kind] += 1
                    ends = "; ".join(f"rank {rank}: {o.became.splitlines()[-1]}" for rank, o in enumerate(outcomes))
                    print(" ".join(f"seed {seed} on {arguments.ranks} ranks {name} {kind}: {ends}".split()), flush=True)
                    print(*(o.became for o in outcomes), sep="\n", file=sys.stderr, flush=True)
            programs, moved, hits = (totals[name] for name in ("programs", "moved", "hits"))
            counts = f"{programs} programs, {bad} bad, {moved} layers moved their tokens, {hits} hits"
            print(f"{counts}, {time.monotonic() - started:.0f} s", flush=True)
    print(*(f"{count} {kind}" for kind, count in kinds.most_common()), sep=", ")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
