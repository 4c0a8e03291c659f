"""``fully_shard`` around sharded experts: on all ranks for the rest of a model, and on another mesh axis for the experts."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.ranks import assert_passed, run_checks


class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(zoo.D)
        self.moe = zoo.stacked(name) if name in zoo.BY_NAME else zoo.ModuleListMoE(getattr(zoo, name), zoo.GluMLP)

    def forward(self, x):
        return x + self.moe(self.norm(x))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block("stacked_loop"), Block("loop_mixtral"))


def experts_of(model: nn.Module) -> set[nn.Parameter]:
    return {p for p in model.parameters() if hasattr(p, "placements")}


def check_clipping(model: nn.Module, gradients: list[torch.Tensor]) -> None:
    """torch's own function takes no gradients of several meshes; ours has the norm of one process on every rank."""
    from moeblaze_ops.distributed import clip_grad_norm_

    with pytest.raises(RuntimeError, match="must have the same mesh"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.5), nn.utils.get_total_norm(gradients))
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1.0).item(), 0.5, atol=1e-5, rtol=0)


def check_model(ep: int, compiled: bool, wrap: str = "") -> None:
    """Two microbatches, of which one reduces gradients. ``wrap``: blocks are checkpointed ``before`` sharding, or ``after``."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from moeblaze_ops import compile as switch
    from moeblaze_ops import config
    from moeblaze_ops.distributed import expert_placement, shard_experts
    from tests.tools import sharded_layers as harness
    from tests.tools.rewrite_harness import rewriting_backend

    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = [harness.tokens_of(r, zoo.D) for r in range(world)]
    wanted = harness.joined_entries(harness.in_one_process(network(), inputs)[rank], "1.moe.experts", zoo.E)
    wanted = {name: value if name in ("output", "gradient of x") else 2 * value for name, value in wanted.items()}
    meshes = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
    everyone = meshes._flatten("dp")
    model = network()
    names = list(model.state_dict())
    for when in ("before", "after"):
        if when == wrap:
            model = nn.Sequential(*map(checkpoint_wrapper, model))
        if when == "before":
            shard_experts(model, meshes["ep"])
    assert list(model.state_dict()) == names
    for block in model:
        if ep == world:
            fully_shard(block, mesh=everyone, ignored_params=experts_of(block))
        else:
            fully_shard(block, mesh=everyone, shard_placement_fn=expert_placement(block, meshes["efsdp"], everyone))
    fully_shard(model, mesh=everyone, ignored_params=experts_of(model) if ep == world else None)
    for module in (*model, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    config.experts_move = "tokens"
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    try:
        with rewriting_backend() as backend, switch.recording() as records:
            if compiled:
                for block in model:
                    block.compile(backend=backend, fullgraph=True)
            model.set_requires_gradient_sync(False)
            harness.train(model, model, inputs[rank])
            model.set_requires_gradient_sync(True)
            model.zero_grad = lambda: None
            got = harness.train(model, model, inputs[rank])
    finally:
        config.experts_move = "auto"
        torch._dynamo.config.capture_dynamic_output_shape_ops = False
    harness.assert_close({name.replace("_checkpoint_wrapped_module.", ""): value for name, value in got.items()}, wanted)
    assert list(model.state_dict()) == names
    if not compiled and not wrap:
        check_clipping(model, [value for name, value in wanted.items() if name not in ("output", "gradient of x")])
    became = [c.became for r in records if isinstance(r, switch.GraphRecord) and r.dropped is None for c in r.report.rewritten]
    assert sum("experts_over_ranks" in text for text in became) == (2 if compiled else 0), records


NEEDS_A_MESH_FOR_EACH_PARAMETER = pytest.mark.skipif(
    torch.__version__.startswith(("2.11", "2.12")), reason="fully_shard takes one mesh for all parameters"
)
CHECKS = {
    "all ranks, eager": functools.partial(check_model, 2, False),
    "all ranks, compiled": functools.partial(check_model, 2, True),
}
TWO_AXES = {
    "two axes, eager": functools.partial(check_model, 2, False),
    "two axes, compiled": functools.partial(check_model, 2, True),
    "two axes, checkpointed, eager": functools.partial(check_model, 2, False, "after"),
    "two axes, checkpointed, compiled": functools.partial(check_model, 2, True, "before"),
}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> dict[str, list[str]]:
    return run_checks(CHECKS, 2, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory) -> dict[str, list[str]]:
    return run_checks(TWO_AXES, 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_rest_of_the_model_on_all_ranks(of_two, name):
    assert_passed(of_two[name])


@NEEDS_A_MESH_FOR_EACH_PARAMETER
@pytest.mark.parametrize("name", TWO_AXES)
def test_experts_on_two_axes(of_four, name):
    assert_passed(of_four[name])
