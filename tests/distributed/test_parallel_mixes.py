"""Sharded experts beside other kinds of parallelism: pipeline stages, and replicas of what is sharded."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.distributed.test_fsdp_experts import NEEDS_A_MESH_FOR_EACH_PARAMETER, network
from tests.distributed.test_shard_experts import layer
from tests.tools.ranks import assert_passed, run_checks

STAGES = ("stacked_loop", "dense_einsum")
MICROBATCHES = 2


def squares(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().sum()


def check_pipeline(compiled: bool) -> None:
    """Two stages of one layer each, whose experts are on two ranks; each rank of the axis has tokens of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    from moeblaze_ops import compile as switch
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness
    from tests.tools.rewrite_harness import rewriting_backend

    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    pp, ep = (meshes[name].get_local_rank() for name in ("pp", "ep"))
    inputs = [harness.tokens_of(rank, zoo.D) for rank in range(2)]
    targets = [harness.tokens_of(10 + rank, zoo.D) for rank in range(2)]
    whole = nn.Sequential(*map(layer, STAGES))
    for x, target in zip(inputs, targets, strict=True):
        squares(whole(x), target).backward()
    wanted_loss = squares(whole(inputs[ep]), targets[ep]).detach()

    model = layer(STAGES[pp])
    shard_experts(model, meshes["ep"])
    with rewriting_backend() as backend, switch.recording() as records:
        if compiled:
            model.compile(backend=backend, fullgraph=True)
        stage = PipelineStage(model, pp, 2, torch.device("cpu"), group=meshes["pp"].get_group())
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=squares, scale_grads=False)
        losses: list[torch.Tensor] = []
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            if pp == 0:
                schedule.step(inputs[ep])
            else:
                schedule.step(target=targets[ep], losses=losses)
    if pp == 1:
        torch.testing.assert_close(sum(losses).detach(), wanted_loss, atol=1e-9, rtol=0)
    became = [c.became for r in records if isinstance(r, switch.GraphRecord) and r.dropped is None for c in r.report.rewritten]
    assert any("experts_over_ranks" in text for text in became) is compiled, records
    wanted = {name: p.grad for name, p in whole[pp].named_parameters()}
    for name, p in model.named_parameters():
        got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.clone()
        if not hasattr(p.grad, "full_tensor"):
            dist.all_reduce(got, group=meshes["ep"].get_group())
        torch.testing.assert_close(got, wanted[name], atol=1e-9, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def check_replicas(compiled: bool) -> None:
    """HSDP: two replicas, each of which shards the experts on two ranks and everything else as well."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from moeblaze_ops import compile as switch
    from moeblaze_ops.distributed import expert_placement, shard_experts
    from tests.tools import sharded_layers as harness
    from tests.tools.rewrite_harness import rewriting_backend

    world, rank = dist.get_world_size(), dist.get_rank()
    inputs = [harness.tokens_of(r, zoo.D) for r in range(world)]
    wanted = harness.joined_entries(harness.in_one_process(network(), inputs)[rank], "1.moe.experts", zoo.E)
    meshes = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "efsdp", "ep"))
    meshes["efsdp", "ep"]._flatten("shard")
    of_experts, of_others = meshes["replicate", "efsdp"], meshes["replicate", "shard"]
    model = network()
    shard_experts(model, meshes["ep"])
    for block in model:
        fully_shard(block, mesh=of_others, shard_placement_fn=expert_placement(block, of_experts, of_others))
    fully_shard(model, mesh=of_others)
    for module in (*model, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    with rewriting_backend() as backend, switch.recording() as records:
        if compiled:
            for block in model:
                block.compile(backend=backend, fullgraph=True)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            got = harness.train(model, model, inputs[rank])
    harness.assert_close(got, wanted)
    became = [c.became for r in records if isinstance(r, switch.GraphRecord) and r.dropped is None for c in r.report.rewritten]
    assert sum("experts_over_ranks" in text for text in became) == (2 if compiled else 0), records


PIPELINE = {
    "pipeline, eager": functools.partial(check_pipeline, False),
    "pipeline, compiled": functools.partial(check_pipeline, True),
}
REPLICAS = {
    "replicas, eager": functools.partial(check_replicas, False),
    "replicas, compiled": functools.partial(check_replicas, True),
}
CHECKS = PIPELINE | REPLICAS


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, list[str]]:
    return run_checks(CHECKS, 4, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", PIPELINE)
def test_pipeline(outcomes, name):
    assert_passed(outcomes[name])


@NEEDS_A_MESH_FOR_EACH_PARAMETER
@pytest.mark.parametrize("name", REPLICAS)
def test_replicas(outcomes, name):
    assert_passed(outcomes[name])
