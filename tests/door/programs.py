"""What people do with a model, in a process of its own: ``python -m tests.door.programs NAME [ARGUMENT]`` prints results as JSON.

PyTorch's caches are on, as they are at a user's.
"""

import contextlib
import copy
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.utils import checkpoint as checkpointing

import moeblaze_ops
from moeblaze_ops.compile import records
from moeblaze_ops.explanation import Candidate
from moeblaze_ops.lowering.torch_internals.room import call_with_room
from tests.corpus.loops import guarded
from tests.corpus.zoo import catalogue as zoo
from tests.tools.compiling import compile_quickly

LAYERS, STEPS = 2, 12
ops = torch.ops.moeblaze


class Block(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(zoo.D), make()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


def as_it_is(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


class Net(nn.Module):
    """Blocks behind one another, each called through ``around(block, x)``."""

    def __init__(self, make: Callable[[], nn.Module], around: Callable = as_it_is) -> None:
        super().__init__()
        self.blocks, self.around = nn.ModuleList(Block(make) for _ in range(LAYERS)), around

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.around(block, x)
        return x


def of_experts(combine: Callable) -> Callable[[], nn.Module]:
    return functools.partial(zoo.ModuleListMoE, combine, zoo.GluMLP)


SPELLINGS: dict[str, Callable[[], nn.Module]] = {
    "any": of_experts(guarded.if_any),
    "continue": of_experts(guarded.numel_continue),
    "no rows": of_experts(guarded.shape_continue),
    "hits": of_experts(guarded.hit_rows),
    "masks": of_experts(zoo.masked_sum),
    "where": of_experts(zoo.loop_mixtral),
    "counts": of_experts(zoo.loop_deepseek),
    "joined": of_experts(zoo.joined_index_add),
    "einsum": functools.partial(zoo.stacked, "dense_einsum"),
    "grouped": functools.partial(zoo.stacked, "sorted_transformers"),
    "gathered": functools.partial(zoo.stacked, "gathered_bmm"),
    "biases": functools.partial(zoo.stacked, "gpt_oss_loop"),
}


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> checkpointing.CheckpointPolicy:
    kept = op is torch.ops.aten.mm.default
    return checkpointing.CheckpointPolicy.MUST_SAVE if kept else checkpointing.CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(block: nn.Module, x: Tensor, **options: Any) -> Tensor:
    return checkpointing.checkpoint(block, x, **options)


AROUND = {
    "non-reentrant": functools.partial(_checkpointed, use_reentrant=False),
    "reentrant": functools.partial(_checkpointed, use_reentrant=True),
    "selective": functools.partial(
        _checkpointed,
        use_reentrant=False,
        context_fn=functools.partial(checkpointing.create_selective_checkpoint_contexts, _policy),
    ),
}


def whole(model: nn.Module) -> Callable:
    return torch.compile(model)


def in_place(model: nn.Module) -> Callable:
    model.compile()
    return model


def by_block(model: nn.Module) -> Callable:
    for block in model.blocks:
        block.compile()
    return model


def wrapped_blocks(model: nn.Module) -> Callable:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return torch.compile(model)


def replicated(model: nn.Module) -> Callable:
    return torch.compile(nn.parallel.DistributedDataParallel(model))


def fully_sharded(model: nn.Module) -> Callable:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        block.compile()
        fully_shard(block)
    return fully_shard(model)


def fully_sharded_whole(model: nn.Module) -> Callable:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return torch.compile(fully_shard(model))


@dataclass(frozen=True)
class Way:
    """How a model is compiled and trained."""

    wrap: Callable[[nn.Module], Callable]
    around: Callable = as_it_is
    lengths: tuple[int, ...] = (24,)  # of the steps, in turns
    microbatches: int = 1
    precision: Callable[[], Any] = contextlib.nullcontext


WAYS = {
    "whole": Way(whole),
    "in place": Way(in_place),
    "by block": Way(by_block),
    "non-reentrant": Way(whole, AROUND["non-reentrant"]),
    "reentrant": Way(whole, AROUND["reentrant"]),
    "selective": Way(whole, AROUND["selective"]),
    "wrapped blocks": Way(wrapped_blocks),
    "ddp": Way(replicated),
    "fsdp2": Way(fully_sharded),
    "fsdp2 whole": Way(fully_sharded_whole),
    "autocast": Way(whole, precision=functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)),
    "accumulation": Way(whole, microbatches=4),
    "lengths": Way(whole, lengths=(24, 17, 40, 9, 33, 12, 50, 7)),
}


@contextlib.contextmanager
def calls_of(op: Any) -> Iterator[list]:
    """A list that grows with each call of an operator, of compiled code or of what traces it."""
    called: list = []
    real = op._op

    def counted(*args: Any, **kwargs: Any) -> Any:
        called.append(op)
        return real(*args, **kwargs)

    with mock.patch.object(op, "_op", counted):
        yield called


def train(model: nn.Module, run: Callable, way: Way) -> list[float]:
    """The losses of a few steps."""
    generator, losses = torch.Generator().manual_seed(0), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for _ in range(way.microbatches):
            x = torch.randn(way.lengths[step % len(way.lengths)], zoo.D, generator=generator).requires_grad_()
            with way.precision():
                loss = run(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def named(layer: Candidate) -> str:
    """The name of a layer in the model, whatever is around that, and why it was left, if it was."""
    return layer.where.partition(" ")[0].removeprefix("module.") + (layer.reason or "")


@functools.cache
def explained(spelling: str, around: Callable) -> list[str]:
    """What is said of a model before it is compiled."""
    return [named(layer) for layer in moeblaze_ops.explain(Net(SPELLINGS[spelling], around), torch.randn(24, zoo.D)).candidates]


def outcome(spelling: str, name: str) -> dict[str, Any]:
    """What is said of a model, what runs, how far its losses are from those of eager mode, and how often it was compiled."""
    way = WAYS[name]
    said = explained(spelling, way.around)
    torch._dynamo.reset()
    counters.clear()
    records._recent.clear()
    torch.manual_seed(0)
    eager = Net(SPELLINGS[spelling], way.around)
    model = copy.deepcopy(eager)
    run = way.wrap(model)
    x = torch.randn(way.lengths[0], zoo.D).requires_grad_()
    with way.precision():
        run(x)  # compiles
        with calls_of(ops.dispatch.default) as dispatched:
            run(x)
    losses = train(model, run, way)
    expected = train(eager, eager, way)
    reported = moeblaze_ops.report()
    return {
        "explained": said,
        "reported": [named(layer) for layer in reported.candidates],
        "ran": len(dispatched),
        "error": max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)),
        "graphs": counters["stats"]["unique_graphs"],
        "misses": counters["aot_autograd"]["autograd_cache_miss"],
    }


def matrix(*cells: str) -> dict[str, Any]:
    """The outcomes of ``spelling, way`` cells."""
    return {cell: outcome(*cell.split(", ")) for cell in cells}


def knobs(much: str, *order: str) -> dict[str, Any]:
    """How often which operator runs with ``config.keep`` and as many bytes free: ``much``, or little."""
    from moeblaze_ops.memory import estimate

    settings = {"preactivation": None, "input": None, "much": int(much), "little": 1000}
    found = {}
    for name in order:
        torch._dynamo.reset()
        counters.clear()
        estimate.forget_choices()
        torch.manual_seed(0)
        moeblaze_ops.config.keep = "auto" if settings[name] else name
        model, x = SPELLINGS["einsum"](), torch.randn(24, zoo.D, requires_grad=True)
        with mock.patch.object(estimate, "free_bytes", lambda device, free=settings[name]: free):
            run = torch.compile(model)
            run(x)
        with calls_of(ops.expert_up.default) as kept, calls_of(ops.expert_mlp.default) as not_kept:
            out = run(x)
        out.sum().backward()
        found[name] = len(kept), len(not_kept), counters["aot_autograd"]["autograd_cache_hit"]
    return found


def verified() -> dict[str, Any]:
    """How many graphs are compared with what they were in their first run."""
    from moeblaze_ops import comparison

    moeblaze_ops.config.verify = "first"
    torch.manual_seed(0)
    compared = []
    real = comparison._compare_graph
    with mock.patch.object(comparison, "_compare_graph", lambda *args: compared.append(real(*args)) or compared[-1]):
        run = torch.compile(SPELLINGS["any"]())
        for _ in range(2):
            run(torch.randn(24, zoo.D)).sum().backward()
    agrees = all(result.agrees for results, _ in compared for result in results)
    return {"compared": len(compared), "agrees": agrees, "hits": counters["aot_autograd"]["autograd_cache_hit"]}


def ours(seed: str) -> dict[str, Any]:
    """``MoE`` with an adapter, and routing that is replayed: the ids of another seed are no constants of the code."""
    torch.manual_seed(0)
    layer = moeblaze_ops.MoE(D=zoo.D, F=zoo.FF, E=zoo.E, K=zoo.K)
    layer.add_adapter("a", rank=4)
    x = torch.randn(24, zoo.D, requires_grad=True)
    ids = torch.rand(24, zoo.E, generator=torch.Generator().manual_seed(int(seed))).topk(zoo.K).indices
    trained = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
    errors = []
    for replayed in (False, True):
        torch._dynamo.reset()
        with moeblaze_ops.replay_routing(layer, {"": ids}) if replayed else contextlib.nullcontext():
            results = []
            for run in (layer, torch.compile(layer)):
                out = run(x)
                results.append([out, *torch.autograd.grad(out.square().sum(), trained, allow_unused=True)])
        written, got = results
        errors += [(a - b).abs().max().item() for a, b in zip(written, got, strict=True) if a is not None]
    return {"error": max(errors), "hits": counters["aot_autograd"]["autograd_cache_hit"]}


def mega_cache(file: str) -> dict[str, Any]:
    """A model whose code another machine compiled: it comes in one file, for caches that are empty."""
    if Path(file).exists():
        torch.compiler.load_cache_artifacts(Path(file).read_bytes())
    torch.manual_seed(0)
    model, x = SPELLINGS["masks"](), torch.randn(24, zoo.D, requires_grad=True)
    run = torch.compile(model)
    run(x)
    with calls_of(ops.dispatch.default) as dispatched:
        out = run(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    if not Path(file).exists():
        artifacts, _ = torch.compiler.save_cache_artifacts()
        Path(file).write_bytes(artifacts)
    found = {what: counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss")}
    return {"ran": len(dispatched), "error": (gradient - expected).abs().max().item(), **found}


def main(name: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    compile_quickly()
    # The C++ of the other operators would take most of the time, and shows nothing of the layers.
    inductor_config.fallback_by_default = True
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        moeblaze_ops.enable()
        found = call_with_room(functools.partial(globals()[name], *arguments))
        dist.destroy_process_group()
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
