"""What training loops do with sharded layers: adapters, replayed choices, and ranks that do not do the same, which are named."""

import functools
import tempfile
from collections.abc import Callable, Container
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

from moeblaze_ops import compile as switch
from tests.corpus.zoo import catalogue as zoo
from tests.distributed.test_shard_experts import layer
from tests.tools.ranks import assert_passed, run_checks
from tests.tools.rewrite_harness import rewriting_backend


class Adapted(nn.Module):
    """Frozen experts with an adapter each."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        whole = layer("dense_einsum").requires_grad_(False)
        self.router, self.w1, self.w2 = whole.router, whole.w1, whole.w2
        for name in ("w1", "w2"):
            E, rows, columns = getattr(self, name).shape
            setattr(self, f"{name}_a", nn.Parameter(torch.randn(E, rows, rank)))
            setattr(self, f"{name}_b", nn.Parameter(torch.randn(E, rank, columns)))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        out = torch.zeros_like(x)
        for e in range(zoo.E):
            up = self.w1[e] + 0.5 * self.w1_a[e] @ self.w1_b[e]
            down = self.w2[e] + 0.5 * self.w2_a[e] @ self.w2_b[e]
            out = out + nn.functional.silu(x @ up) @ down * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


def check_adapters() -> None:
    """Gradients of adapters are those of one process, eager and compiled."""
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    rank = dist.get_rank()
    inputs = [harness.tokens_of(r, zoo.D, count=4 + 3 * r) for r in range(2)]
    torch.manual_seed(0)
    model = Adapted()
    wanted = harness.in_one_process(model, inputs)[rank]
    assert len(shard_experts(model, harness.axis()).taken) == 6
    with rewriting_backend() as backend, switch.recording() as records:
        for run in (model, torch.compile(model, backend=backend, fullgraph=True)):
            harness.assert_close(harness.train(model, run, inputs[rank]), wanted)
    (became,) = [c.became for r in records if isinstance(r, switch.GraphRecord) and r.dropped is None for c in r.report.rewritten]
    assert "experts_over_ranks" not in became, became


def check_replay(compiled: bool) -> None:
    """Two microbatches in flight, each with the choices that were recorded for it, checkpointed; ranks have other tokens."""
    from moeblaze_ops import record_routing, replay_routing
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    rank, name = dist.get_rank(), "stacked_loop"
    inputs = [[harness.tokens_of(10 * r + micro, zoo.D, count=3 + r + micro) for micro in range(2)] for r in range(2)]
    one, other = layer(name), layer(name)
    with torch.no_grad():
        other.router.gate.weight.neg_()
    records = [[], []]
    for of_rank, batches in zip(records, inputs, strict=True):
        for x in batches:
            with record_routing(other) as record, torch.no_grad():
                other(x)
            of_rank.append(record)

    def step(model: nn.Module, run: Callable, r: int) -> list[Tensor]:
        outputs = []
        for x, record in zip(inputs[r], records[r], strict=True):
            with replay_routing(model, record):
                outputs.append(checkpoint(run, x, use_reentrant=False))
        sum(out.square().sum() for out in outputs).backward()
        return [out.detach() for out in outputs]

    wanted = [step(one, one, r) for r in range(2)][rank]
    model = layer(name)
    shard_experts(model, harness.axis())
    with rewriting_backend() as backend, switch.recording() as seen:
        got = step(model, torch.compile(model, backend=backend) if compiled else model, rank)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=harness.TOLERANCE, rtol=0)
    gradients = {key: p.grad for key, p in model.named_parameters()}
    gradients = {key: g.full_tensor() if hasattr(g, "full_tensor") else g for key, g in gradients.items()}
    gradients = harness.reduced(gradients, ("router.gate.weight",))
    harness.assert_close(gradients, {key: p.grad for key, p in one.named_parameters()})
    became = [c.became for r in seen if isinstance(r, switch.GraphRecord) and r.dropped is None for c in r.report.rewritten]
    assert any("experts_over_ranks" in text for text in became) is compiled, seen


class Twice(nn.Module):
    """A layer that is called twice in a graph, between which those of some ranks break."""

    def __init__(self, breaks_on: Container[int]) -> None:
        super().__init__()
        self.layer, self.breaks_on = layer("stacked_loop"), breaks_on

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layer(x)
        if dist.get_rank() in self.breaks_on:
            torch._dynamo.graph_break()
        return first, self.layer(y)


def check_broken_between() -> None:
    """Weights that move and change without a word, as those of a teacher do: a call has those of all ranks in this step."""
    from moeblaze_ops import config
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    one, model = Twice(()), Twice((1,))
    shard_experts(model, harness.axis())
    stored = dict(model.named_parameters())
    pair = [harness.tokens_of(10 * number + dist.get_rank(), zoo.D) for number in range(2)]
    config.experts_move = "weights"
    try:
        with rewriting_backend() as backend, torch.no_grad():
            run = torch.compile(model, backend=backend)
            for _ in range(3):
                torch.testing.assert_close(run(*pair), one(*pair), atol=harness.TOLERANCE, rtol=0)
                for name, p in one.named_parameters():
                    for each in (p, getattr(stored[name], "_local_tensor", stored[name])):
                        each.mul_(1.25)
    finally:
        config.experts_move = "auto"


def raised_in(function: Callable) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def in_a_world_of_its_own(timeout_s: int, check: Callable) -> None:
    """Run a check with a process group that is lost with it, and waits for so long."""
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dist.barrier()

    def begin(timeout_s: int) -> None:
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder[0]}/{timeout_s}", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))
        dist.barrier()  # or one rank leaves while another connects

    try:
        begin(timeout_s)
        check()
    finally:
        begin(60)


def check_skipped(compiled: bool, exchange: str = "auto") -> None:
    """Rank 1 goes past the first of two equal layers: no rank takes one for the other, or waits."""
    from moeblaze_ops import config
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    first, second = pair = nn.ModuleList([layer("stacked_loop"), layer("stacked_loop")])
    shard_experts(pair, harness.axis())
    x = harness.tokens_of(dist.get_rank(), zoo.D)

    def run(x: Tensor) -> Tensor:
        return second(x) if dist.get_rank() == 1 else second(first(x))

    config.exchange = exchange
    with rewriting_backend() as backend:
        error = raised_in(lambda: (torch.compile(run, backend=backend) if compiled else run)(x).sum().backward())
    config.exchange = "auto"
    here, there = (1, 0) if dist.get_rank() else (0, 1)
    what = f"{here}, {'4 experts' if compiled else 'weights'}"
    assert f"got another one on rank {there} than here: {what}" in error, error


def check_other_gradients(compiled: bool, exchange: str = "auto") -> None:
    """Ranks go back through other calls of a layer with as many tokens: none takes gradients of one for those of the other."""
    from moeblaze_ops import config
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    def backend(gm: fx.GraphModule, example_inputs: list) -> Callable:
        switch.rewrite(gm)
        return lookup_backend("aot_eager")(gm, example_inputs)

    model, rank = Twice(breaks_on=(0, 1)), dist.get_rank()
    shard_experts(model, harness.axis())
    pair = [harness.tokens_of(10 * number + rank, zoo.D) for number in range(2)]
    config.exchange = exchange
    with switch.rewriting(backend):
        results = (torch.compile(model, backend=backend) if compiled else model)(*pair)
    config.exchange = "auto"
    error = raised_in(results[rank].sum().backward)
    what = f"layer, gradients of {'tokens' if compiled else 'weights that move together'} behind question {rank + 1}"
    assert f"got another one on rank {1 - rank} than here: {what}" in error, error


def check_frozen() -> None:
    """Rank 1 freezes a weight behind ``shard_experts``: no rank takes gradients of one weight for those of another."""
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    rank, model = dist.get_rank(), layer("stacked_loop")
    shard_experts(model, harness.axis())
    model.w1.requires_grad_(rank == 0)
    error = raised_in(model(harness.tokens_of(rank, zoo.D)).sum().backward)
    what = f"gradients of weights that move together behind question 1, {3 - rank} of them"
    assert f"got another one on rank {1 - rank} than here: {what}" in error, error


def check_uncompiled() -> None:
    """Rank 1 runs as written, and its weights move where tokens of rank 0 do: both say so at once."""
    from moeblaze_ops import config
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    model = layer("stacked_loop")
    shard_experts(model, harness.axis())
    x = harness.tokens_of(dist.get_rank(), zoo.D)
    config.exchange = "all_to_all"
    with rewriting_backend() as backend:
        error = raised_in(lambda: (model if dist.get_rank() else torch.compile(model, backend=backend))(x))
    config.exchange = "auto"
    assert "every rank must run the same layers in the same order" in error, error


def check_other_ways(exchange: str, through: str) -> None:
    """Weights of rank 1 move where tokens of rank 0 do, both compiled: both say so at once."""
    from moeblaze_ops import config, enabled
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    model = layer("stacked_loop")
    shard_experts(model, harness.axis())
    x = harness.tokens_of(dist.get_rank(), zoo.D)
    config.exchange, config.experts_move = exchange, ("tokens", "weights")[dist.get_rank()]
    with rewriting_backend() as backend, enabled():
        error = raised_in(lambda: torch.compile(model, backend=backend if through == "graphs" else through)(x))
    config.exchange = config.experts_move = "auto"
    assert f"got another one on rank {1 - dist.get_rank()} than here" in error, error


def check_fewer_steps() -> None:
    """Rank 1 has one batch less and joins: rank 0 says whom it waits for, within the time of the group."""
    from torch.distributed.algorithms.join import Join
    from torch.nn.parallel import DistributedDataParallel

    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    model = nn.Sequential(layer("stacked_loop"))
    names = [taken.name for taken in shard_experts(model, harness.axis()).taken]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DistributedDataParallel(model)
    rank = dist.get_rank()

    def loop() -> None:
        with Join([wrapped]):
            for number in range(2 - rank):
                wrapped(harness.tokens_of(10 * number + rank, zoo.D)).sum().backward()

    error = raised_in(loop)
    assert error != "nothing" and (rank == 1 or "every rank must run the layer, got no word of rank 1" in error), error


def check_other_meshes() -> None:
    """Rank 1 shards on an axis of its own: rank 0 says what all ranks have to do."""
    from torch.distributed.device_mesh import DeviceMesh

    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    alone = [dist.new_group([rank]) for rank in range(2)]
    mesh = DeviceMesh.from_group(alone[1], "cpu", mesh_dim_names=("ep",)) if dist.get_rank() else harness.axis()
    error = raised_in(lambda: shard_experts(layer("stacked_loop"), mesh))
    wanted = "RuntimeError: shard_experts: mesh must be the same on all of its ranks [0, 1], which all call shard_experts, got"
    assert error == "nothing" if dist.get_rank() else error.startswith(wanted), error


ALIKE = {
    "adapters": check_adapters,
    "replay, eager": functools.partial(check_replay, False),
    "replay, compiled": functools.partial(check_replay, True),
    "a graph broken between two calls": check_broken_between,
}
NOT_ALIKE = {
    "a layer skipped, eager": (3, functools.partial(check_skipped, False)),
    "a layer skipped, compiled": (15, functools.partial(check_skipped, True)),  # in which both compile
    "a layer skipped, all-to-all": (15, functools.partial(check_skipped, True, "all_to_all")),
    "other gradients, eager": (3, functools.partial(check_other_gradients, False)),
    "other gradients, all-gather": (15, functools.partial(check_other_gradients, True, "all_gather")),
    "other gradients, all-to-all": (15, functools.partial(check_other_gradients, True, "all_to_all")),
    "a weight frozen": (3, check_frozen),
    "one rank uncompiled, all-to-all": (15, check_uncompiled),
    "weights against tokens": (30, functools.partial(check_other_ways, "all_gather", "graphs")),
    "weights against tokens, all-to-all": (30, functools.partial(check_other_ways, "all_to_all", "graphs")),
    "weights against tokens, Inductor": (45, functools.partial(check_other_ways, "all_gather", "inductor")),
    "fewer steps": (3, check_fewer_steps),
    "other meshes": (3, check_other_meshes),
}
CHECKS = ALIKE | {name: functools.partial(in_a_world_of_its_own, *how) for name, how in NOT_ALIKE.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[str]]:
    return run_checks(CHECKS, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_on_ranks(outcomes, name):
    assert_passed(outcomes[name])
