"""Experts in an ``nn.ModuleList``: rewritten like stacked ones, with the parameters themselves kept for backward."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import moeblaze_ops
from moeblaze_ops import pack_experts
from moeblaze_ops.explain import Candidate
from tests.corpus.module_lists import Apart, D, E, Graphs, H, K, ModuleListMoE, T, compiled, optimize, stacked_twin, train
from tests.tools.rewrite_harness import check_against_eager, rewrite_of


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


SPELLINGS = [("linear", False), ("linear", True), ("transposed", False), ("transposed", True), ("packed", True)]
spellings = pytest.mark.parametrize(("storage", "bias"), SPELLINGS, ids=lambda value: str(value))


@pytest.mark.parametrize(("storage", "bias", "packed"), [
    *((*spelling, number % 2 == 1) for number, spelling in enumerate(SPELLINGS)), ("linear", False, True),
], ids=str)  # fmt: skip
def test_module_list_matches_eager(storage, bias, packed, fp64):
    layer = Apart(storage, bias)
    assert (pack_experts(layer, experts="*") > 0) or not packed
    backend = check_against_eager(layer, torch.randn(T, D))
    assert [candidate.became for candidate in backend.rewritten] == ["expert_up(swiglu) -> expert_down"]
    assert "stack" not in backend.operators()


@spellings
def test_kept_bytes_are_those_of_stacked_parameters_and_gradients_are_views_of_one_tensor(storage, bias):
    """What backward gives to AccumulateGrad is taken as it is: its layout is that of the parameter."""
    apart, x = Apart(storage, bias), torch.randn(T, D, requires_grad=True)
    kept = []
    for layer in (apart, stacked_twin(apart)):
        run, graphs = compiled(layer)
        train(run, x)
        kept.append(graphs.kept())
    assert kept[0] == kept[1]
    assert ((T * K, 2, H), "torch.float32") in kept[0]
    for parameters in (module for module in apart.children() if isinstance(module, nn.ParameterList)):
        given = [parameter.grad for parameter in parameters]
        assert len({grad.untyped_storage().data_ptr() for grad in given}) == 1
        assert [grad.stride() for grad in given] == [parameter.stride() for parameter in parameters]


@pytest.mark.parametrize("keep", ["preactivation", "input"])
def test_both_points_of_the_dial(keep, fp64, monkeypatch):
    monkeypatch.setattr(moeblaze_ops.config, "keep", keep)
    backend = check_against_eager(Apart(bias=True), torch.randn(T, D))
    assert ("expert_mlp" in backend.rewritten[0].became) == (keep == "input")


def test_training_steps(fp64):
    x = torch.randn(T, D)
    layer = Apart(bias=True)
    twin = copy.deepcopy(layer)
    run, _ = compiled(layer)
    optimize(layer, run, x)
    optimize(twin, twin, x)
    torch.testing.assert_close(dict(layer.named_parameters()), dict(twin.named_parameters()))


def backward_ops(graphs):
    return [node.target.__name__ for node in graphs.backward.nodes if node.op == "call_function"]


@pytest.mark.parametrize("packed", [False, True])
def test_frozen_experts(fp64, packed):
    layer, x = Apart(bias=True), torch.randn(T, D, requires_grad=True)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("router" in name)
    if packed:
        pack_experts(layer, experts="*")
    run, graphs = compiled(layer)
    train(run, x)
    assert not any("weight_grad" in op or "bias_grad" in op for op in backward_ops(graphs))
    check_against_eager(layer, torch.randn(T, D))


def test_partly_frozen_experts(fp64):
    layer = Apart(bias=True)
    frozen = {f"{name}.{e}" for name, e in (("gate", 0), ("up", 1), ("down", 3), ("down_bias", 2))}
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)
    check_against_eager(layer, torch.randn(T, D))
    assert {name for name, parameter in layer.named_parameters() if parameter.grad is None} == frozen


@pytest.mark.parametrize("names", [("gate", "up", "down"), ("down",)], ids="+".join)
def test_tied_experts(fp64, names):
    layer = Apart()
    for name in names:
        getattr(layer, name)[2] = getattr(layer, name)[0]
    assert check_against_eager(layer, torch.randn(T, D)).reasons == []


def test_all_experts_tied(fp64):
    layer = Apart()
    for name in ("gate", "up", "down"):
        for e in range(1, E):
            getattr(layer, name)[e] = getattr(layer, name)[0]
    assert check_against_eager(layer, torch.randn(T, D)).reasons == []


def test_experts_that_read_a_part_of_their_tensor(fp64):
    class Part(Apart):
        def weight(self, name, e):
            return super().weight(name, e)[: D if name == "down" else H]

    layer = Part()
    for name in ("gate", "up"):
        getattr(layer, name)[3] = nn.Parameter(torch.randn(2 * H, D))
    assert check_against_eager(layer, torch.randn(T, D)).reasons == []


@pytest.mark.parametrize("e", [0, 3])
def test_one_expert_is_stored_in_another_dtype(e, fp64):
    """What some of them are cast to all of them are."""

    class Cast(Apart):
        def weight(self, name, e):
            return super().weight(name, e).double()

    layer = Cast()
    for name in ("gate", "up", "down"):
        getattr(layer, name)[e] = nn.Parameter(getattr(layer, name)[e].detach().float())
    assert check_against_eager(layer, torch.randn(T, D), tolerance=1e-6).reasons == []


def test_autocast_keeps_one_cast_copy_like_stacked_parameters():
    apart, x = Apart(), torch.randn(T, D)
    kept = []
    for layer in (apart, stacked_twin(apart)):

        class Cast(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                with torch.autocast("cpu", torch.bfloat16):
                    return self.inner(x)

        torch._dynamo.reset()
        graphs = Graphs()
        train(torch.compile(Cast(layer), backend=graphs, fullgraph=True), x)
        kept.append([entry for entry in graphs.kept() if entry[0][0] == E])
    assert sorted(torch.Size(shape).numel() for shape, _ in kept[0]) == sorted(torch.Size(s).numel() for s, _ in kept[1])


def test_explain_says_what_is_copied():
    plain = Candidate("moe", "masked experts", "expert_up", None, 2048, 1024)
    assert str(plain) == "moe: masked experts -> expert_up\n    kept for backward: 2.0 KiB before, 1.0 KiB after"
    assert str(replace(plain, copied=3 << 20)) == f"{plain}\n    separate weights joined by a copy in each pass: 3.0 MiB"
    assert [candidate.copied for candidate in moeblaze_ops.explain(ModuleListMoE(), torch.randn(T, D)).candidates] == [0]


def test_rewrite_of_two_experts_is_not_taken_for_gate_and_up(fp64):
    """Two tensors of one expert each could be read as the gates and the ups of one expert."""
    model = ModuleListMoE(num_experts=2)
    assert check_against_eager(model, torch.randn(T, D)).reasons == []
    assert rewrite_of(model, torch.randn(T, D)).rewritten[0].E == 2
