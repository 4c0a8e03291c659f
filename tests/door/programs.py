"""What people do with a model, in a process of its own: ``python -m tests.door.programs NAME [ARGUMENT]`` prints results as JSON.

PyTorch's caches are on, as they are at a user's.
"""

import contextlib
import copy
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils import checkpoint as checkpointing

import moeblaze_ops
from moeblaze_ops import compile as switch
from moeblaze_ops.ops.register import ON_CPU
from tests.corpus.loops import guarded
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import rewritten_in

LAYERS, STEPS = 2, 2
ops = torch.ops.moeblaze


class Block(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(zoo.D), make()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Net(nn.Module):
    """Blocks behind one another, each called through ``around(block, x)``."""

    def __init__(self, make: Callable[[], nn.Module], around: Callable = lambda block, x: block(x)) -> None:
        super().__init__()
        self.blocks, self.around = nn.ModuleList(Block(make) for _ in range(LAYERS)), around

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.around(block, x)
        return x


def of_experts(combine: Callable) -> Callable[[], nn.Module]:
    return functools.partial(zoo.ModuleListMoE, combine)


SPELLINGS = {
    "any": of_experts(guarded.if_any),
    "continue": of_experts(guarded.numel_continue),
    "no rows": of_experts(guarded.shape_continue),
    "hits": of_experts(guarded.hit_rows),
    "masks": of_experts(zoo.masked_sum),
    "einsum": functools.partial(zoo.StackedMoE, zoo.dense_einsum),
    "grouped": functools.partial(zoo.StackedMoE, zoo.sorted_transformers, "packed_linear"),
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


WAYS: dict[str, tuple[Callable[[nn.Module], Callable], str | None]] = {
    "whole": (whole, None),
    "in place": (in_place, None),
    "by block": (by_block, None),
    "non-reentrant": (whole, "non-reentrant"),
    "reentrant": (whole, "reentrant"),
    "selective": (whole, "selective"),
    "wrapped blocks": (wrapped_blocks, None),
    "ddp": (replicated, None),
    "fsdp2": (fully_sharded, None),
    "fsdp2 whole": (fully_sharded_whole, None),
}


@contextlib.contextmanager
def calls_of(op: Any) -> Iterator[list]:
    """A list that grows with each call of an operator by code that is generated for a CPU."""
    called: list = []
    real = ON_CPU[op].implementation

    def counted(*args: Any, **kwargs: Any) -> Any:
        called.append(op)
        return real(*args, **kwargs)

    with mock.patch.object(ON_CPU[op], "implementation", counted):
        yield called


def train(model: nn.Module, run: Callable, lengths: list[int], **context: Any) -> list[float]:
    """The losses of a few steps, each of two microbatches of so many tokens."""
    generator, losses = torch.Generator().manual_seed(0), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for length in lengths:
        for _ in range(2):
            x = torch.randn(length, zoo.D, generator=generator).requires_grad_()
            with torch.autocast("cpu", **context) if context else contextlib.nullcontext():
                loss = run(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def outcome(spelling: str, way: str, lengths: list[int] | None = None, **context: Any) -> dict[str, Any]:
    """What is said of a model, what runs, and how far its losses are from those of eager mode."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    wrap, around = WAYS[way]
    eager = Net(SPELLINGS[spelling], *([AROUND[around]] if around else []))
    model, lengths = copy.deepcopy(eager), lengths or [24] * STEPS
    explained = moeblaze_ops.explain(eager, torch.randn(24, zoo.D))
    run = wrap(model)
    with switch.recording() as records, calls_of(ops.dispatch.default) as dispatched:
        x = torch.randn(lengths[0], zoo.D).requires_grad_()
        with torch.autocast("cpu", **context) if context else contextlib.nullcontext():
            run(x).sum()
        ran = len(dispatched)
        losses = train(model, run, lengths, **context)
    expected = train(eager, eager, lengths, **context)
    reports = [record.report for record in records if isinstance(record, switch.GraphRecord) and record.dropped is None]
    return {
        "explained": sum(candidate.became is not None for candidate in explained.candidates),
        "reported": len(rewritten_in(records)) > 0 and not any(report.declined for report in reports),
        "ran": ran,
        "error": max(abs(a - b) / b for a, b in zip(losses, expected, strict=True)),
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
        "misses": counters["aot_autograd"]["autograd_cache_miss"],
        "graphs": counters["stats"]["unique_graphs"],
    }


def ways() -> dict[str, Any]:
    """Each way to run a model with one spelling, and the other spellings with activation checkpointing."""
    pairs = [("any", way) for way in WAYS]
    pairs += [(spelling, "non-reentrant") for spelling in list(SPELLINGS)[1:]]
    found = {f"{spelling}, {way}": outcome(spelling, way) for spelling, way in pairs}
    found["any, autocast"] = outcome("any", "whole", dtype=torch.bfloat16)
    found["any, lengths"] = outcome("any", "whole", [24, 17, 40, 9])
    return found


def knobs(much: str, *order: str) -> dict[str, Any]:
    """In how many layers which operator runs with ``config.keep`` and as many bytes free: ``much``, or little."""
    from moeblaze_ops.memory import estimate

    settings = {"preactivation": None, "input": None, "much": int(much), "little": 1000}
    found = {}
    for name in order:
        torch._dynamo.reset()
        counters.clear()
        estimate.forget_choices()
        torch.manual_seed(0)
        moeblaze_ops.config.keep = "auto" if settings[name] else name
        model, x = Net(SPELLINGS["masks"]), torch.randn(24, zoo.D, requires_grad=True)
        with (
            mock.patch.object(estimate, "free_bytes", lambda device, free=settings[name]: free),
            calls_of(ops.expert_up.default) as kept,
            calls_of(ops.expert_mlp.default) as not_kept,
        ):
            out = torch.compile(model)(x)
            ran = len(kept), len(not_kept)
            out.sum().backward()
        found[name] = *ran, counters["aot_autograd"]["autograd_cache_hit"]
    return found


def verified() -> dict[str, Any]:
    """How many graphs are compared with what they were in their first run."""
    from moeblaze_ops import comparison

    moeblaze_ops.config.verify = "first"
    torch.manual_seed(0)
    compared = []
    real = comparison._compare_graph
    with mock.patch.object(comparison, "_compare_graph", lambda *args: compared.append(real(*args)) or compared[-1]):
        run = torch.compile(Net(SPELLINGS["any"]))
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
    found = outcome("any", "whole")
    if not Path(file).exists():
        artifacts, _ = torch.compiler.save_cache_artifacts()
        Path(file).write_bytes(artifacts)
    return {"any, whole": found}


def main(name: str, *arguments: str) -> None:
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        moeblaze_ops.enable()
        found = globals()[name](*arguments)
        dist.destroy_process_group()
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
