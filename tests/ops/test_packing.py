"""``pack_experts``: the parameters of experts moved side by side in memory, and nothing else about them changed."""

import copy

import pytest
import torch
from torch import nn

from moeblaze_ops import pack_experts
from moeblaze_ops.arguments import separate_experts
from tests.corpus.module_lists import D, H, ModuleListMoE, T, compiled, optimize, train


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def is_packed(parameters):
    return separate_experts.are_in_a_row(list(parameters))


def test_packing_moves_memory_and_nothing_else():
    model = ModuleListMoE()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, torch.randn(T, D))
    objects = [(id(p), p.grad) for p in model.parameters()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    moved = pack_experts(model)
    assert moved == 4 * sum(p.numel() for p in model.experts.parameters())
    assert [(id(p), p.grad) for p in model.parameters()] == objects
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {key for key, _ in objects}
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])
    assert is_packed(expert.up.weight for expert in model.experts)
    assert is_packed(expert.down.bias for expert in model.experts)
    assert pack_experts(model) == 0
    model.load_state_dict(values)
    assert pack_experts(model) == 0


@pytest.mark.parametrize("packed", [False, True])
def test_weights_are_never_copied_on_cpu(packed, monkeypatch):
    """Side by side or not: experts are read one by one."""

    def refuse(pieces):
        raise AssertionError("copied")

    monkeypatch.setattr(separate_experts, "_copied", refuse)
    model, x = ModuleListMoE(), torch.randn(T, D, requires_grad=True)
    assert (pack_experts(model) > 0) or not packed
    run, _ = compiled(model)
    train(run, x)


def test_ops_see_whether_weights_are_packed():
    """At every call: a conversion gives each parameter its own memory again."""
    model = ModuleListMoE()

    def joined_in_place(name):
        pieces = [getattr(expert, name).weight.detach().unsqueeze(0) for expert in model.experts]
        return separate_experts.joined(pieces).data_ptr() == pieces[0].data_ptr()

    assert [joined_in_place(name) for name in ("gate", "up", "down")] == [False] * 3
    pack_experts(model)
    assert [joined_in_place(name) for name in ("gate", "up", "down")] == [True] * 3
    model.double()
    assert [joined_in_place(name) for name in ("gate", "up", "down")] == [False] * 3


def test_optimizer_steps_on_packed_parameters():
    x = torch.randn(T, D, dtype=torch.float64)
    packed = ModuleListMoE().double()
    plain = copy.deepcopy(packed)
    pack_experts(packed)
    run, _ = compiled(packed)
    optimize(packed, run, x)
    optimize(plain, plain, x)
    torch.testing.assert_close(dict(packed.named_parameters()), dict(plain.named_parameters()))
    assert pack_experts(packed) == 0


def test_state_dict_of_a_packed_model_survives_saving(tmp_path):
    model = ModuleListMoE()
    pack_experts(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = ModuleListMoE()
    loaded.load_state_dict(torch.load(tmp_path / "model.pt"))
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())


def test_packing_leaves_other_lists_alone():
    tied = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(3))
    tied[2].weight = tied[0].weight
    several = nn.ModuleList([nn.Linear(D, D, bias=False), nn.Linear(D, H, bias=False)])
    strided = nn.ParameterList(nn.Parameter(torch.randn(D, 2 * H)[:, ::2]) for _ in range(3))
    alone = nn.ModuleList([nn.Linear(D, D)])
    assert pack_experts(nn.ModuleDict({"a": tied, "b": several, "c": strided, "d": alone})) == 0
    blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(D), "moe": ModuleListMoE()}) for _ in range(2))
    pack_experts(blocks)
    assert not is_packed(block["norm"].weight for block in blocks)
    assert is_packed(expert.gate.weight for expert in blocks[1]["moe"].experts)
