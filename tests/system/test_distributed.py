"""FSDP2, DistributedDataParallel and DTensor parameters: two processes on the CPU, with rewriting and mostly without Inductor."""

import copy
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moeblaze_ops import compile as switch
from moeblaze_ops.ops import weight_grad
from tests.corpus.zoo import catalogue as zoo
from tests.tools.ranks import start_ranks
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

PROCESSES = 2
BUCKET_BYTES = 1 << 10
"""Less than one projection of one expert has."""


class Block(nn.Module):
    def __init__(self, combine):
        super().__init__()
        self.norm = nn.LayerNorm(zoo.D)
        self.moe = zoo.ModuleListMoE(combine, zoo.GluMLP)

    def forward(self, x):
        return x + self.moe(self.norm(x))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(zoo.masked_sum), Block(zoo.loop_mixtral))


def sharded(model: nn.Sequential, backend, whole: bool) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model:
        if not whole:
            block.compile(backend=backend, fullgraph=True)
        fully_shard(block)
    fully_shard(model)
    return torch.compile(model, backend=backend) if whole else model


def replicated(model: nn.Sequential, backend) -> nn.Module:
    return torch.compile(nn.parallel.DistributedDataParallel(model), backend=backend)


WRAPPERS = {
    "fsdp2 by block": lambda model, backend: sharded(model, backend, whole=False),
    "fsdp2 as a whole": lambda model, backend: sharded(model, backend, whole=True),
    "ddp": replicated,
    "ddp cut inside layers": replicated,
}


def train(wrap, backend, x) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    model = network()
    wrapped = wrap(model, backend)  # its hooks live as long as it does
    out = wrapped(x)
    out.square().mean().backward()
    gradients = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in model.named_parameters()}
    return {"output": out.detach(), **gradients}


def expected(x) -> dict[str, torch.Tensor]:
    """Of the model as it is, with gradients averaged over the processes."""
    model = network()
    out = model(x)
    out.square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return {"output": out.detach(), **{name: p.grad / PROCESSES for name, p in model.named_parameters()}}


def check_wrapper(name: str, x: torch.Tensor) -> None:
    from torch._dynamo.utils import counters

    cap = BUCKET_BYTES if "cut" in name else torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
    wanted = expected(x)
    with mock.patch.object(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", cap):
        counters.clear()
        train(WRAPPERS[name], "aot_eager", x)
        breaks = sum(counters["graph_break"].values())
        counters.clear()
        with rewriting_backend() as backend, switch.recording() as records:
            got = train(WRAPPERS[name], backend, x)
    assert len(rewritten_in(records)) == len(network()), records
    assert sum(counters["graph_break"].values()) <= breaks, counters["graph_break"]
    torch.testing.assert_close(got, wanted)


def check_dtensor(x: torch.Tensor) -> None:
    """A layer of DTensor parameters is no layer of ours: it compiles as it did, and the ops name what they lack."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

    import moeblaze_ops

    mesh = init_device_mesh("cpu", (PROCESSES,))
    model = zoo.ModuleListMoE(zoo.masked_sum, zoo.GluMLP)
    wanted = model(x)
    distribute_module(model, mesh)
    x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    if compiles(model, x):  # torch 2.11 does not
        with rewriting_backend() as backend, switch.recording() as records:
            got = torch.compile(model, backend=backend)(x)
        assert not rewritten_in(records)
        torch.testing.assert_close(got.full_tensor(), wanted)

    layer = moeblaze_ops.MoE(D=zoo.D, F=zoo.FF, E=zoo.E, K=zoo.K)
    wanted = layer(x.to_local())
    for name in ("w_up", "w_down"):
        parameter = nn.Parameter(distribute_tensor(getattr(layer, name).detach(), mesh, [Shard(0)]))
        setattr(layer, name, parameter)
    with pytest.raises(NotImplementedError, match="moe: w_up must be a tensor of this process"):
        layer(x.to_local())
    for name in ("w_up", "w_down"):
        setattr(layer, name, nn.Parameter(getattr(layer, name).full_tensor()))
    torch.testing.assert_close(layer(x.to_local()), wanted)


def check_microbatches(compiled: bool, x: torch.Tensor) -> None:
    """What is added to ``.grad`` in place, without the reduction and in the last microbatch with it, is what is reduced."""
    import moeblaze_ops

    def gradients_of(layer: nn.Module, compiled: bool) -> list[torch.Tensor]:
        replica = nn.parallel.DistributedDataParallel(layer)
        run = torch.compile(replica, backend="moeblaze") if compiled else replica
        for last, scale in ((False, 1.0), (False, 2.0), (True, 3.0)):
            with nullcontext() if last else replica.no_sync():
                run(scale * x.double()).square().sum().backward()
        return [p.grad for p in layer.parameters()]

    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = moeblaze_ops.MoE(D=zoo.D, F=zoo.FF, E=zoo.E, K=zoo.K).double()
    wanted = gradients_of(copy.deepcopy(layer), False)
    for p in (layer.w_up, layer.w_down):
        moeblaze_ops.accumulate_grad(p)
    with mock.patch.object(weight_grad, "call", wraps=weight_grad.call) as calls:
        torch.testing.assert_close(gradients_of(layer, compiled), wanted)
    assert [call.args[0] for call in calls.mock_calls].count(weight_grad.expert_weight_grad_add) == 4


def compiles(model: nn.Module, x: torch.Tensor) -> bool:
    """True if torch compiles the model without us."""
    torch._dynamo.reset()
    try:
        torch.compile(model, backend="aot_eager")(x)
    except torch._dynamo.exc.BackendCompilerFailed:
        return False
    finally:
        torch._dynamo.reset()
    return True


CHECKS = {
    "dtensor": check_dtensor,
    "microbatches, eager": partial(check_microbatches, False),
    "microbatches, compiled": partial(check_microbatches, True),
}


def work(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
    outcomes = {}
    checks = {name: lambda x, name=name: check_wrapper(name, x) for name in WRAPPERS}
    for name, check in {**checks, **CHECKS}.items():
        x = torch.randn(24, zoo.D, generator=torch.Generator().manual_seed(rank))
        try:
            check(copy.deepcopy(x))
            outcomes[name] = "passed"
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
    torch.save(outcomes, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict[str, str]]:
    """What became of each check, by process; one start of the processes serves all."""
    folder = tmp_path_factory.mktemp("distributed")
    start_ranks(work, (str(folder),), PROCESSES)
    return [torch.load(folder / str(rank)) for rank in range(PROCESSES)]


@pytest.mark.parametrize("name", [*WRAPPERS, *CHECKS])
def test_distributed(outcomes, name):
    assert [of_rank[name] for of_rank in outcomes] == ["passed"] * PROCESSES
