"""``shard_experts``: any spelling computes on several ranks what it computes in one process, eager and compiled."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.ranks import assert_passed, run_checks

LISTED = ("loop_mixtral", "masked_sum", "dense_modules")
STACKED = ("stacked_loop", "dense_einsum", "dense_bmm", "sorted_transformers", "gpt_oss_loop")


def layer(name: str) -> nn.Module:
    torch.manual_seed(0)
    return zoo.stacked(name) if name in STACKED else zoo.ModuleListMoE(getattr(zoo, name), zoo.GluMLP)


def sharded(name: str, **options) -> nn.Module:
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    model = layer(name)
    shard_experts(model, harness.axis(), **options)
    return model


def check_layer(name: str, backend: str | None) -> None:
    from tests.tools import sharded_layers as harness

    inputs = [harness.tokens_of(rank, zoo.D) for rank in range(dist.get_world_size())]
    wanted = harness.in_one_process(layer(name), inputs)[dist.get_rank()]
    if name in LISTED:
        wanted = harness.joined_entries(wanted, "experts", zoo.E)
    model = sharded(name)
    run = model if backend is None else torch.compile(model, backend=backend)
    results = []
    for _ in range(2):
        got = harness.train(model, run, inputs[dist.get_rank()])
        results.append(harness.reduced(got, ("router.gate.weight",)))
    harness.assert_close(results[0], wanted)
    for key, value in results[0].items():
        assert torch.equal(value, results[1][key]), key


def check_meta_device() -> None:
    """Shards are made without ever holding the whole, and initialised in place."""
    for name in ("loop_mixtral", "stacked_loop"):
        from moeblaze_ops.distributed import shard_experts
        from tests.tools import sharded_layers as harness

        with torch.device("meta"):
            model = layer(name)
        shard_experts(model, harness.axis())
        model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.25)
        out = model(harness.tokens_of(0, zoo.D))
        assert out.isfinite().all()
        values = {p.full_tensor().unique().item() for key, p in model.named_parameters() if hasattr(p, "full_tensor")}
        assert values == ({0.25} if name == "loop_mixtral" else {0.5})


def check_report() -> None:
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    model = nn.Sequential(layer("stacked_loop"), nn.ModuleList([zoo.GluMLP(), zoo.GluMLP()]), layer("loop_mixtral"))
    report = shard_experts(model, harness.axis())
    assert [t.name for t in report.taken] == [
        "0.w1", "0.w3", "0.w2", "2.experts.w1_weight", "2.experts.w3_weight", "2.experts.w2_weight",
    ]  # fmt: skip
    assert "routed by 0.router.gate.weight" in report.taken[0].why
    assert [left.name for left in report.left] == ["1"]
    assert "no router" in str(report)


def check_named_parameters() -> None:
    model = sharded("stacked_loop", parameters=["w1", "w2"])
    assert sorted(name for name, p in model.named_parameters() if hasattr(p, "placements")) == ["w1", "w2"]
    model = sharded("loop_mixtral", parameters=lambda name, p: name.startswith("experts."))
    assert sum(hasattr(p, "placements") for p in model.parameters()) == 3


def raised_everywhere(function, message: str) -> None:
    error = None
    try:
        function()
    except ValueError as raised:
        error = str(raised)
    assert error is not None and message in error, error
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, error)
    assert everyone == [error] * len(everyone)


def check_errors() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    mesh = harness.axis()
    rank = dist.get_rank()
    odd = zoo.ModuleListMoE(zoo.loop_mixtral, zoo.GluMLP, E=7)
    raised_everywhere(lambda: shard_experts(odd, mesh), "mesh must divide the experts of experts.w1.weight, got 7")
    model = layer("stacked_loop")
    model.w1 = nn.Parameter(distribute_tensor(model.w1.detach(), mesh, [Replicate()]))
    raised_everywhere(lambda: shard_experts(model, mesh), "must be a plain tensor (shard experts before fully_shard)")
    other = zoo.stacked("stacked_loop", E=8 if rank else 4)
    differ = f"got w1 [4, {zoo.D}, {zoo.FF}] torch.float64 on rank 0 and w1 [8, {zoo.D}, {zoo.FF}] torch.float64 on rank 1"
    raised_everywhere(lambda: shard_experts(other, mesh), f"model must have the same parameters on every rank, {differ}")
    other = layer("stacked_loop")
    other.w2.requires_grad_(rank > 0)
    raised_everywhere(lambda: shard_experts(other, mesh), "torch.float64 frozen on rank 0 and w2")
    for name in ("stacked_loop", "loop_mixtral"):
        tied = nn.ModuleList([layer(name), layer(name)])
        first, second = tied if name == "stacked_loop" else (one.experts[3].w1 for one in tied)
        key = "w1" if name == "stacked_loop" else "weight"
        setattr(second, key, getattr(first, key))
        raised_everywhere(lambda tied=tied: shard_experts(tied, mesh), "must belong to one module")
        shard_experts(nn.ModuleList([layer(name)] * 2), mesh)
    partly = layer("loop_mixtral")
    partly.experts[2].requires_grad_(False)
    raised_everywhere(lambda: shard_experts(partly, mesh), "must be frozen for all experts or for none, got it frozen for [2]")
    broken = zoo.ModuleListMoE(zoo.loop_mixtral, zoo.GluMLP, E=7 if rank else 4)
    raised_everywhere(lambda: shard_experts(broken, mesh), "got 7")
    twice = sharded("stacked_loop")
    raised_everywhere(lambda: shard_experts(twice, mesh, ["w1"]), "must not be sharded twice")
    raised_everywhere(lambda: shard_experts(layer("stacked_loop"), mesh, ["w9"]), "got 'w9'")
    with pytest.raises(KeyError if rank == 1 else ValueError, match="w1" if rank == 1 else r"KeyError\('w1'\) on rank 1"):
        shard_experts(layer("stacked_loop"), mesh, lambda name, p: {}[name] if rank == 1 else True)
    for wrong in (mesh.get_group(), None, "ep"):
        with pytest.raises(TypeError, match="mesh must be a DeviceMesh of one axis"):
            shard_experts(layer("stacked_loop"), wrong)
    if rank:
        with pytest.raises(ValueError, match=f"mesh must have this rank, got .* on rank {rank}"):
            shard_experts(layer("stacked_loop"), DeviceMesh("cpu", [0], _init_backend=False))


def groups_of(model: nn.Module) -> list[dict]:
    """Parameters of an optimizer: it takes no plain tensors beside DTensors in one group."""
    groups = [], []
    for p in model.parameters():
        groups[hasattr(p, "placements")].append(p)
    return [{"params": group} for group in groups if group]


def check_training() -> None:
    """Clipping, AdamW and accumulation give what they give in one process."""
    from moeblaze_ops.distributed import clip_grad_norm_
    from tests.tools import sharded_layers as harness

    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = [[harness.tokens_of(10 * step + r, zoo.D) for r in range(world)] for step in range(2)]
    for name, options in (("loop_mixtral", {"foreach": True}), ("stacked_loop", {"fused": True})):
        one, model = layer(name), sharded(name)
        steps = [torch.optim.AdamW(groups_of(m), lr=0.1, weight_decay=0.1, **options) for m in (one, model)]
        for _ in range(2):
            for micro in inputs:
                for x in micro:
                    one(x).square().sum().backward()
                model(micro[rank]).square().sum().backward()
            for p in model.router.parameters():
                dist.all_reduce(p.grad)
            with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            wanted_norm, norm = nn.utils.clip_grad_norm_(one.parameters(), 0.5), clip_grad_norm_(model.parameters(), 0.5)
            torch.testing.assert_close(norm, wanted_norm, atol=1e-10, rtol=0)
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
        wanted = dict(one.named_parameters())
        if name == "loop_mixtral":
            wanted = harness.joined_entries({key: p.detach() for key, p in wanted.items()}, "experts", zoo.E)
        got = {key: p.full_tensor() if hasattr(p, "full_tensor") else p for key, p in model.named_parameters()}
        harness.assert_close({key: p.detach() for key, p in got.items()}, {key: p.detach() for key, p in wanted.items()})


def check_checkpointing() -> None:
    """A layer, and a function of it alone, run again in backward."""
    from torch.utils.checkpoint import checkpoint

    from tests.tools import sharded_layers as harness

    x = harness.tokens_of(dist.get_rank(), zoo.D)
    model = sharded("stacked_loop")
    wanted = harness.train(model, model, x)
    got = harness.train(model, lambda x: checkpoint(model, x, use_reentrant=False), x)
    harness.assert_close(got, wanted)
    inner = model.experts

    def experts(self, *args):
        return checkpoint(functools.partial(inner, self), *args, use_reentrant=False)

    model.experts = experts
    harness.assert_close(harness.train(model, model, x), wanted)


def check_uneven_tokens() -> None:
    """The ranks have different numbers of tokens, and one has none."""
    from tests.tools import sharded_layers as harness

    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = [harness.tokens_of(r, zoo.D, count=0 if r == 1 else 8 + 5 * r) for r in range(world)]
    for name in ("dense_einsum", "stacked_loop", "loop_mixtral"):
        model = layer(name)
        wanted = harness.in_one_process(model, inputs)[rank]
        if name in LISTED:
            wanted = harness.joined_entries(wanted, "experts", zoo.E)
        got = harness.train(sharded_model := sharded(name), sharded_model, inputs[rank])
        got = {key: value for key, value in got.items() if "router" not in key}
        harness.assert_close(got, {key: value for key, value in wanted.items() if "router" not in key})


class Skipping(nn.Module):
    """A loop over experts that skips those without tokens, and all of them without any; it may read how many there are."""

    def __init__(self, leaves_early: bool, counts: bool = False) -> None:
        super().__init__()
        whole = layer("stacked_loop")
        self.router, self.w1, self.w2, self.w3 = whole.router, whole.w1, whole.w2, whole.w3
        self.leaves_early, self.counts = leaves_early, counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.leaves_early and x.numel() == 0:
            return x * 1
        weights, ids = self.router(x)
        out = torch.zeros_like(x)
        for e in range(len(self.w1) if self.counts else zoo.E):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            h = nn.functional.silu(x[token] @ self.w1[e]) * (x[token] @ self.w3[e])
            out = out.index_add(0, token, (h @ self.w2[e]) * weights[token, slot, None])
        return x + out


def check_skipped_experts() -> None:
    """A rank that skips all experts gathers and reduces what the others do, and its result may be written to.

    So it does in backward where the layer is checkpointed, though its forward saves nothing.
    """
    from torch.utils.checkpoint import checkpoint

    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = [harness.tokens_of(r, zoo.D, count=0 if r == 1 else 3) for r in range(world)]
    for settings, replayed, frozen in (
        *(((leaves_early, counts), False, False) for leaves_early, counts in ((False, False), (False, True), (True, False))),
        *(((leaves_early, False), True, frozen) for leaves_early in (False, True) for frozen in (False, True)),
    ):
        one, model = Skipping(*settings), Skipping(*settings)
        for p in (p for each in (one, model) if frozen for name, p in each.named_parameters() if "router" not in name):
            p.requires_grad_(False)
        wanted = harness.in_one_process(one, inputs)[rank]
        shard_experts(model, harness.axis())
        run = functools.partial(checkpoint, model, use_reentrant=False) if replayed else model
        got = harness.train(model, lambda x, run=run: run(x).add_(0), inputs[rank])
        harness.assert_close(*({k: v for k, v in results.items() if "router" not in k} for results in (got, wanted)))


def cumulative(self, x, weights, ids):
    """Each expert for the tokens of all before it as well: no layer that the rewriter knows."""
    return sum(expert(x) * (weights * (ids <= e)).sum(-1, keepdim=True) for e, expert in enumerate(self.experts))


def unknown_layer() -> nn.Module:
    torch.manual_seed(0)
    return zoo.ModuleListMoE(cumulative, zoo.GluMLP)


def check_gathers() -> None:
    """Each parameter of a layer travels once in forward, and its gradient once in backward: eager, and in one graph."""
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness
    from tests.tools.rewrite_harness import rewriting_backend

    inputs = [harness.tokens_of(rank, zoo.D) for rank in range(dist.get_world_size())]
    for make in (functools.partial(layer, "loop_mixtral"), functools.partial(layer, "stacked_loop"), unknown_layer):
        wanted = harness.in_one_process(make(), inputs)[dist.get_rank()]
        wanted = harness.joined_entries(wanted, "experts", zoo.E) if "w1" not in wanted else wanted
        model = make()
        shard_experts(model, harness.axis())
        with rewriting_backend() as backend:
            compiled = torch.compile(model, backend=backend, fullgraph=True)
            for run in (model, compiled) if make is unknown_layer else (model,):
                x = inputs[dist.get_rank()].clone().requires_grad_()
                run(x).sum().backward()  # compiles
                out, forward = harness.collectives(lambda run=run, x=x: run(x))
                _, backward = harness.collectives(out.square().sum().backward)
                assert (forward, backward) == ({"gather": 3}, {"reduce_scatter": 3}), (forward, backward)
                got = harness.train(model, run, inputs[dist.get_rank()])
                harness.assert_close(*({k: v for k, v in r.items() if "router" not in k} for r in (got, wanted)))


EVERYWHERE = {
    **{f"{name} eager": functools.partial(check_layer, name, None) for name in (*LISTED, *STACKED)},
    "loop_mixtral compiled": functools.partial(check_layer, "loop_mixtral", "aot_eager"),
    "stacked_loop compiled": functools.partial(check_layer, "stacked_loop", "aot_eager"),
    "meta device": check_meta_device,
    "report": check_report,
    "named parameters": check_named_parameters,
    "errors": check_errors,
    "training": check_training,
    "checkpointing": check_checkpointing,
    "uneven tokens": check_uneven_tokens,
    "skipped experts": check_skipped_experts,
    "gathers": check_gathers,
}
CHECKS = {
    4: [*(name for name in EVERYWHERE if "eager" in name), "errors", "training"],
    2: list(EVERYWHERE),
}
SELECTED = [(ranks, name) for ranks, names in CHECKS.items() for name in names]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[int, dict[str, list[str]]]:
    return {
        ranks: run_checks({name: EVERYWHERE[name] for name in names}, ranks, tmp_path_factory.mktemp("ranks"))
        for ranks, names in CHECKS.items()
    }


@pytest.mark.parametrize(("ranks", "name"), SELECTED)
def test_on_ranks(outcomes, ranks, name):
    assert_passed(outcomes[ranks][name])
