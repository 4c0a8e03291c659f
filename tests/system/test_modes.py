"""Rewriting with what else people combine torch.compile with: modes, contexts, dynamic shapes, ways to compile a model."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import moeblaze_ops
from moeblaze_ops import compile as switch
from tests.corpus.zoo import catalogue as zoo
from tests.tools.compiling import graphs_compiled_anew
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

COMBINES = (zoo.masked_sum, zoo.loop_mixtral)
T = 24


pytestmark = pytest.mark.usefixtures("scratch")


class Block(nn.Module):
    def __init__(self, combine):
        super().__init__()
        self.norm = nn.LayerNorm(zoo.D)
        self.moe = zoo.ModuleListMoE(combine, zoo.GluMLP)

    def forward(self, x):
        return x + self.moe(self.norm(x))


def network(*combines) -> nn.Sequential:
    return nn.Sequential(*map(Block, combines or COMBINES))


def train(run, parameters: list, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = run(x)
    return [out.detach(), *torch.autograd.grad(out.float().square().mean(), [x, *parameters])]


def check_training(run, model: nn.Module, num_tokens: int = T, **close) -> None:
    x, parameters = torch.randn(num_tokens, zoo.D), list(model.parameters())
    torch.testing.assert_close(train(run, parameters, x), train(model.forward, parameters, x), **close)


@pytest.mark.parametrize("backend, mode", [("inductor", "reduce-overhead"), ("moeblaze", "max-autotune-no-cudagraphs")])
def test_modes_of_inductor(backend, mode):
    model = network(zoo.loop_mixtral)
    if backend == "inductor":
        switch.enable()
    with switch.recording() as records, graphs_compiled_anew():
        check_training(torch.compile(model, backend=backend, mode=mode, fullgraph=True), model)
    assert len(rewritten_in(records)) == 1


CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "fp16": lambda: torch.autocast("cpu", torch.float16),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_around_a_call(name):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    # The loop adds its rows in place, which autocast leaves to fail in eager mode.
    model = network(zoo.masked_sum, zoo.masked_stack) if dtype != torch.float32 else network()
    x = torch.randn(T, zoo.D)
    with rewriting_backend() as backend, switch.recording() as records, CONTEXTS[name]():
        got, expected = torch.compile(model, backend=backend, fullgraph=True)(x), model(x)
    assert [layer.dtype for layer in rewritten_in(records)] == [dtype] * 2
    # Products round to the dtype of autocast, in both, at different places.
    close = {"atol": 8 * torch.finfo(dtype).eps, "rtol": 8 * torch.finfo(dtype).eps} if dtype != torch.float32 else {}
    torch.testing.assert_close(got, expected, **close)


@pytest.mark.parametrize("dynamic", [None, True, "marked"], ids=str)
def test_numbers_of_tokens(dynamic):
    """One graph, and a second one where Dynamo has to learn first that the number changes."""
    model = network()
    with rewriting_backend() as backend, switch.recording() as records:
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=None if dynamic == "marked" else dynamic)
        for num_tokens in (T, 9, 31, 17):
            x = torch.randn(num_tokens, zoo.D)
            if dynamic == "marked":
                torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), model(x))
    assert counters["stats"]["unique_graphs"] == (2 if dynamic is None else 1)
    # With dynamic=True Dynamo compiles the graph again once it knows that no number in it is symbolic.
    assert len(rewritten_in(records)) in (2, 4) and not any(record.report.declined for record in records)


def in_place(model: nn.Module, backend) -> nn.Module:
    model.compile(backend=backend, fullgraph=True)
    return model


def by_region(model: nn.Module, backend) -> nn.Module:
    for block in model:
        block.compile(backend=backend, fullgraph=True)
    return model


def checkpointed_regions(model: nn.Module, backend):
    blocks = by_region(model, backend)
    return lambda x: checkpoint(blocks[1], checkpoint(blocks[0], x, use_reentrant=False), use_reentrant=False)


def regions_of_checkpoints(model: nn.Module, backend):
    def run(x):
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    return torch.compile(run, backend=backend, fullgraph=True)


def apart_from_the_router(model: nn.Module, backend) -> nn.Module:
    for block in model:
        block.moe.router.forward = torch.compiler.disable(block.moe.router.forward)
    return torch.compile(model, backend=backend)


@pytest.mark.parametrize(
    "compiled",
    [in_place, by_region, checkpointed_regions, regions_of_checkpoints, apart_from_the_router],
    ids=lambda function: function.__name__,
)
def test_ways_to_compile(compiled):
    model = network()
    twin = copy.deepcopy(model)
    x = torch.randn(T, zoo.D)
    with rewriting_backend() as backend, switch.recording() as records:
        got = train(compiled(model, backend), list(model.parameters()), x)
    assert len(rewritten_in(records)) == 2
    torch.testing.assert_close(got, train(twin, list(twin.parameters()), x))


def test_equal_regions_share_a_graph():
    model = network(*[zoo.loop_mixtral] * 4)
    with rewriting_backend() as backend, switch.recording() as records:
        by_region(model, backend)(torch.randn(T, zoo.D, requires_grad=True))
    assert counters["stats"]["unique_graphs"] == 1 and len(rewritten_in(records)) == 1


def test_compiled_autograd():
    model, x = network(), torch.randn(T, zoo.D)

    def step():
        model.zero_grad()
        model(x).square().mean().backward()

    step()
    expected = [p.grad for p in model.parameters()]
    with rewriting_backend() as backend, switch.recording() as records, torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend=backend)()
    assert counters["compiled_autograd"]["captures"] == 1
    assert len(rewritten_in(records)) == 2
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_state_dict_loaded_after_compiling(packed):
    model, other = network(), network()
    if packed:
        moeblaze_ops.pack_experts(model, torch.randn(T, zoo.D))
    x = torch.randn(T, zoo.D)
    with rewriting_backend() as backend, switch.recording() as records:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        compiled(x)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(compiled(x), other(x))
    assert counters["stats"]["unique_graphs"] == 1 and len(rewritten_in(records)) == 2


def wrapped(model: nn.Module, backend) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.parametrize("compiled", [in_place, wrapped], ids=lambda function: function.__name__)
def test_copy_of_a_compiled_model(compiled):
    """The copy has weights of its own; one that was compiled in place is to be compiled again."""
    model, x = network(), torch.randn(T, zoo.D)
    with rewriting_backend() as backend, switch.recording() as records:
        run = compiled(model, backend)
        expected = run(x)
        twin = copy.deepcopy(run)
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(2)
        plain = network()
        plain.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in twin.state_dict().items()})
        torch.testing.assert_close(compiled(twin, backend)(x) if compiled is in_place else twin(x), plain(x))
        torch.testing.assert_close(run(x), expected)
    assert len(rewritten_in(records)) >= 2
