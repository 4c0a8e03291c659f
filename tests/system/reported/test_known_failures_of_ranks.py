"""What others have reported to break in MoE layers whose experts are shared by ranks, one case for each thread."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import moeblaze_ops
from moeblaze_ops import compile as switch
from moeblaze_ops import config
from moeblaze_ops.distributed import clip_grad_norm_
from tests.system.reported.test_known_failures import THREADS, D, E, K, Masked, Stacked, T, reported
from tests.tools import sharded_layers
from tests.tools.programs import ROOT
from tests.tools.ranks import assert_passed, run_checks
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in


class Balanced(Stacked):
    """Returns a load-balancing loss beside the output."""

    def forward(self, x):
        probabilities = self.router(x).softmax(dim=-1)
        chosen = probabilities.topk(K, dim=-1).indices
        load = F.one_hot(chosen, E).sum(dim=1).to(x.dtype).mean(dim=0)
        return super().forward(x), E * (load * probabilities.mean(dim=0)).sum()


def losses_of(run, x):
    """A step's losses of one rank, and x with its gradient."""
    x = x.clone().requires_grad_()
    out, balance = run(x)
    (out.square().sum() + balance).backward()
    return x


def check_over_ranks() -> None:
    """Two steps in memory that holds NaN until it is written; the gradients of the second."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    inputs = [torch.randn(T, D, generator=torch.Generator().manual_seed(rank)) for rank in range(dist.get_world_size())]
    torch.manual_seed(0)
    model = Balanced()
    one = copy.deepcopy(model)
    wanted = [losses_of(one, x).grad for x in inputs][dist.get_rank()]
    moeblaze_ops.shard_experts(model, sharded_layers.axis())
    config.experts_move = "tokens"
    with rewriting_backend() as backend, switch.recording() as records:
        run = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(2):
            model.zero_grad()
            got = losses_of(run, inputs[dist.get_rank()]).grad
    (layer,) = rewritten_in(records)
    assert "experts_over_ranks" in layer.became
    gradients = sharded_layers.reduced({name: p.grad for name, p in model.named_parameters()}, ("router.weight",))
    gradients = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in gradients.items()}
    sharded_layers.assert_close({"x": got, **gradients}, {"x": wanted, **{name: p.grad for name, p in one.named_parameters()}})


calls: list[None] = []


@torch.library.custom_op("known_failures::drawn", mutates_args=())
def drawn(probabilities: torch.Tensor) -> torch.Tensor:
    """Scores by which others are chosen each time, as where several experts are equally likely."""
    calls.append(None)
    return torch.rand(probabilities.shape, generator=torch.Generator().manual_seed(len(calls)))


drawn.register_fake(torch.empty_like)


class Tied(Stacked):
    def route(self, x):
        probabilities = self.router(x).softmax(dim=-1)
        chosen = drawn(probabilities.detach()).topk(K, dim=-1).indices
        return probabilities.gather(1, chosen), chosen


def check_ties() -> None:
    """The repeated router of a checkpointed layer chooses others: gradients are those of what was computed, on all ranks."""
    x = torch.randn(T - dist.get_rank(), D)
    model = Tied()
    moeblaze_ops.shard_experts(model, sharded_layers.axis())
    config.experts_move, config.exchange = "tokens", "all_to_all"

    def backend(gm, example_inputs):
        switch.rewrite(gm)
        return lookup_backend("aot_eager")(gm, example_inputs)

    results = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        calls.clear()
        with switch.rewriting(backend), switch.recording() as records:
            results.append(sharded_layers.train(model, torch.compile(run, backend=backend, fullgraph=True), x))
        (layer,) = rewritten_in(records)
        assert "experts_over_ranks" in layer.became
    config.exchange = "auto"
    sharded_layers.assert_close(*results)


def check_idle_rank() -> None:
    """No token of any rank chose an expert of the last one: it has gradients all the same, and so has its router."""
    model = Stacked()
    with torch.no_grad():
        model.router.weight[E // 2 :] = -10.0
    one, x = copy.deepcopy(model), torch.randn(T, D).abs()
    moeblaze_ops.shard_experts(model, sharded_layers.axis())
    config.experts_move = "tokens"
    with rewriting_backend() as backend:
        got = sharded_layers.train(model, torch.compile(model, backend=backend, fullgraph=True), x)
    assert got["w_up"][E // 2 :].eq(0).all() and got["w_down"][E // 2 :].eq(0).all()
    wanted = sharded_layers.in_one_process(one, [x, x])[0]
    sharded_layers.assert_close(sharded_layers.reduced(got, ("router.weight",)), wanted)


def check_optimizer_made_before() -> None:
    """It holds what the model does not use any more: no expert would be trained, also where it has gradients of before."""
    x = torch.randn(T, D)
    for has_gradients in (False, True):
        model = nn.ModuleList([Stacked(), Masked()])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if has_gradients:
            sum(layer(x).sum() for layer in model).backward()
            optimizer.zero_grad(set_to_none=False)
        moeblaze_ops.shard_experts(model, sharded_layers.axis())
        sum(layer(x).sum() for layer in model).backward()
        with pytest.raises(RuntimeError, match=r"got one that holds what it replaced: 0\.w_up, 0\.w_down, 1\.up\.0"):
            optimizer.step()
    experts = [p for p in model.parameters() if hasattr(p, "to_local")]
    before = [p.full_tensor().clone() for p in experts]
    torch.optim.SGD(experts, lr=0.1).step()
    assert all(not torch.equal(p.full_tensor(), old) for p, old in zip(experts, before, strict=True))


def gradients_of_both(model: nn.Module, one: nn.Module, x: torch.Tensor) -> None:
    """Those of a sharded model for ``x`` on each rank, and of one process for what all ranks have."""
    model(x).square().sum().backward()
    dist.all_reduce(model.router.weight.grad)
    for _ in range(dist.get_world_size()):
        one(x).square().sum().backward()


def check_norm() -> None:
    """Each expert counts once in the norm, on all ranks, where those of one rank have all the tokens."""
    model, x = Stacked(), torch.randn(T, D).abs()
    with torch.no_grad():
        model.router.weight[E // 2 :] = -10.0
    one = copy.deepcopy(model)
    moeblaze_ops.shard_experts(model, sharded_layers.axis())
    gradients_of_both(model, one, x)
    norm, wanted = clip_grad_norm_(model.parameters(), 0.1), nn.utils.clip_grad_norm_(one.parameters(), 0.1)
    torch.testing.assert_close(norm, wanted)
    for p, same in zip(model.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad, same.grad)


def check_momentum() -> None:
    """One process goes on with the momentum of all ranks' experts, and ranks with that of one process."""
    x, whole = torch.randn(T, D), state_dicts.StateDictOptions(full_state_dict=True)

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": [p]} for p in model.parameters()], lr=0.1)

    model = Stacked()
    one = copy.deepcopy(model)
    moeblaze_ops.shard_experts(model, sharded_layers.axis())
    optimizers = adam(model), adam(one)
    for _ in range(2):
        gradients_of_both(model, one, x)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        states = [state_dicts.get_state_dict(*each, options=whole) for each in zip((model, one), optimizers, strict=True)]
        torch.testing.assert_close(*((of_model, of_optimizer["state"]) for of_model, of_optimizer in states))
        optimizers = adam(model), adam(one)
        for i, each in enumerate(zip((model, one), optimizers, strict=True)):
            of_model, of_optimizer = states[1 - i]
            state_dicts.set_state_dict(*each, model_state_dict=of_model, optim_state_dict=of_optimizer, options=whole)


OVER_RANKS = {
    "gradients": check_over_ranks,
    "ties": check_ties,
    "idle rank": check_idle_rank,
    "optimizer made before": check_optimizer_made_before,
    "norm": check_norm,
    "momentum": check_momentum,
}


@pytest.fixture(scope="module")
def over_ranks(tmp_path_factory) -> dict[str, list[str]]:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs torch.distributed with gloo")
    return run_checks(OVER_RANKS, 2, tmp_path_factory.mktemp("ranks"))


@reported("transformers#48205", "transformers#48687", "transformers#48689", "pytorch#160285", "Automodel#1260", "Automodel#1408")
def test_transformers_48205_48687_48689_pytorch_160285_automodel_1260_1408_gradients_over_ranks(over_ranks):
    assert_passed(over_ranks["gradients"])


@reported("Automodel#3140")
def test_automodel_3140_ties_under_checkpointing_over_ranks(over_ranks):
    assert_passed(over_ranks["ties"])


@reported("Automodel#2995")
def test_automodel_2995_a_rank_whose_experts_nobody_chose(over_ranks):
    assert_passed(over_ranks["idle rank"])


@reported("DeepSpeed#8354", "DeepSpeed#8377")
def test_deepspeed_8354_8377_an_optimizer_made_before_experts_are_sharded(over_ranks):
    assert_passed(over_ranks["optimizer made before"])


@reported("DeepSpeed#8475", "Automodel#3816", "Megatron-LM#5916")
def test_deepspeed_8475_automodel_3816_megatron_lm_5916_the_norm_of_all_experts(over_ranks):
    assert_passed(over_ranks["norm"])


@reported("DeepSpeed#8147")
def test_deepspeed_8147_momentum_of_experts_on_another_number_of_ranks(over_ranks):
    assert_passed(over_ranks["momentum"])


def test_the_page_lists_these_threads():
    page = ROOT / "docs" / "elsewhere.md"
    if not page.is_file():
        pytest.skip("runs in a checkout only")
    tested = page.read_text().split("## Not covered")[0]
    assert set(re.findall(r"\[([\w-]+#\d+)\]", tested)) == THREADS
