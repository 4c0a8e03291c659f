"""``pack_experts``: the parameters of experts moved side by side in memory, and nothing else about them changed."""

import copy

import pytest
import torch
from torch import nn

from moeblaze_ops import pack_experts
from moeblaze_ops.arguments import separate_experts
from tests.corpus.module_lists import Apart, D, H, ModuleListMoE, T, compiled, optimize, train


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
    moved = pack_experts(model, experts="experts")
    assert moved == 4 * sum(p.numel() for p in model.experts.parameters())
    assert [(id(p), p.grad) for p in model.parameters()] == objects
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {key for key, _ in objects}
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])
    assert is_packed(expert.up.weight for expert in model.experts)
    assert is_packed(expert.down.bias for expert in model.experts)
    assert pack_experts(model, experts="experts") == 0
    model.load_state_dict(values)
    assert pack_experts(model, experts="experts") == 0


@pytest.mark.parametrize("packed", [False, True])
def test_weights_are_never_copied_on_cpu(packed, monkeypatch):
    """Side by side or not: experts are read one by one."""

    def refuse(pieces):
        raise AssertionError("copied")

    monkeypatch.setattr(separate_experts, "_copied", refuse)
    model, x = ModuleListMoE(), torch.randn(T, D, requires_grad=True)
    assert (pack_experts(model, experts="experts") > 0) or not packed
    run, _ = compiled(model)
    train(run, x)


def test_ops_see_whether_weights_are_packed():
    """At every call: a conversion gives each parameter its own memory again."""
    model = ModuleListMoE()

    def joined_in_place(name):
        pieces = [getattr(expert, name).weight.detach().unsqueeze(0) for expert in model.experts]
        return separate_experts.joined(pieces).data_ptr() == pieces[0].data_ptr()

    assert [joined_in_place(name) for name in ("gate", "up", "down")] == [False] * 3
    pack_experts(model, experts="experts")
    assert [joined_in_place(name) for name in ("gate", "up", "down")] == [True] * 3
    model.double()
    assert [joined_in_place(name) for name in ("gate", "up", "down")] == [False] * 3


def test_optimizer_steps_on_packed_parameters():
    x = torch.randn(T, D, dtype=torch.float64)
    packed = ModuleListMoE().double()
    plain = copy.deepcopy(packed)
    pack_experts(packed, experts="experts")
    run, _ = compiled(packed)
    optimize(packed, run, x)
    optimize(plain, plain, x)
    torch.testing.assert_close(dict(packed.named_parameters()), dict(plain.named_parameters()))
    assert pack_experts(packed, experts="experts") == 0


def test_state_dict_of_a_packed_model_survives_saving(tmp_path):
    model = ModuleListMoE()
    pack_experts(model, experts="experts")
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
    assert pack_experts(nn.ModuleDict({"a": tied, "b": several, "c": strided, "d": alone}), experts="*") == 0


class Decoder(nn.Module):
    """Lists that a name or a structure could be taken for experts, and layers of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(D), "moe": ModuleListMoE()}) for _ in range(2))

    def forward(self, x):
        for layer in (*self.layers, *self.experts):
            x = layer(x).relu()
        for block in self.blocks:
            x = x + block["moe"](block["norm"](x))
        return x


def packed_in(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and _is_packed_list(module)]


def _is_packed_list(module):
    entries = [list(entry.parameters()) for entry in module]
    return all(map(is_packed, zip(*entries, strict=True)))


def test_experts_are_what_a_rewritten_layer_reads_one_by_one():
    model, x = Decoder(), torch.randn(T, D)
    expected, buffers = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    moved = pack_experts(model, x)
    assert packed_in(model) == ["blocks.0.moe.experts", "blocks.1.moe.experts"]
    assert moved == 4 * sum(p.numel() for block in model.blocks for p in block["moe"].experts.parameters())
    assert torch.equal(model(x), expected)
    torch.testing.assert_close(model.state_dict(), buffers, rtol=0, atol=0)
    assert pack_experts(model, x) == 0


def test_only_the_experts_of_rewritten_layers_are_packed():
    """A layer that is left alone reads no expert by an operator."""

    class Normed(ModuleListMoE):
        def forward(self, x):
            out = torch.zeros_like(x)
            for expert in self.experts:
                out = out + expert(x) * torch.sigmoid(self.router(x)[:, :1])
            return out

    assert pack_experts(Normed(), torch.randn(T, D)) == 0


def test_parameter_lists_and_transposed_weights_are_found():
    for storage, names in (
        ("linear", ["gate", "up", "down"]),
        ("transposed", ["gate", "up", "down"]),
        ("packed", ["up", "down"]),
    ):
        model = Apart(storage)
        assert pack_experts(model, torch.randn(T, D)) > 0
        assert all(is_packed(getattr(model, name)) for name in names)


def test_experts_by_name_or_by_predicate():
    model = Decoder()
    pack_experts(model, experts="blocks.1.*.experts")
    assert packed_in(model) == ["blocks.1.moe.experts"]
    pack_experts(model, experts=lambda name, module: len(module) == 4 and "0" in name)
    assert packed_in(model) == ["blocks.0.moe.experts", "blocks.1.moe.experts"]
    model = ModuleListMoE()
    assert pack_experts(model.experts, experts="") > 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pack_experts(ModuleListMoE()), ValueError, "experts must name lists of experts where no inputs are given"),
        (lambda: pack_experts(ModuleListMoE(), torch.zeros(T, D), experts="*"), ValueError, "experts must be None where inputs"),
        (lambda: pack_experts(ModuleListMoE(), experts="expert"), ValueError, "experts must select a ModuleList or"),
        (lambda: pack_experts(ModuleListMoE(), experts=3), TypeError, "experts must be a text or a function, got 3"),
        (lambda: pack_experts([nn.Linear(2, 2)], experts="*"), TypeError, "model must be an nn.Module, got a list"),
    ],
)
def test_bad_calls(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value).startswith(f"pack_experts: {message}")


def size_of(state_dict, tmp_path):
    torch.save(state_dict, tmp_path / "part.pt")
    return (tmp_path / "part.pt").stat().st_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_part_is_saved_as_a_part(tmp_path, dtype):
    plain = ModuleListMoE(num_experts=16).to(dtype)
    packed = copy.deepcopy(plain)
    pack_experts(packed, experts="experts")
    one = size_of(plain.experts[3].state_dict(), tmp_path)
    assert size_of(packed.experts[3].state_dict(), tmp_path) <= one + 256
    loaded = torch.load(tmp_path / "part.pt")
    assert all(torch.equal(value.float(), loaded[name].float()) for name, value in plain.experts[3].state_dict().items())
    assert size_of(packed.state_dict(), tmp_path) <= size_of(plain.state_dict(), tmp_path) + 4096


def test_a_state_dict_is_still_the_parameters(tmp_path):
    """In-place loaders write into its tensors; those that assign, or want the parameters, get what they ask for."""
    model, other = ModuleListMoE(), ModuleListMoE()
    pack_experts(model, experts="experts")
    for name, value in model.state_dict().items():
        value.copy_(other.state_dict()[name])
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert model.state_dict(keep_vars=True)["experts.0.up.weight"] is model.experts[0].up.weight
    model.experts[0].load_state_dict(other.experts[1].state_dict())
    assert torch.equal(model.experts[0].up.weight, other.experts[1].up.weight) and pack_experts(model, experts="experts") == 0
    kept = model.experts[2].state_dict()
    expected = {name: value.clone() for name, value in kept.items()}
    del model
    torch.testing.assert_close(kept, expected, rtol=0, atol=0)


def test_a_packed_module_is_copied_and_pickled(tmp_path):
    model = ModuleListMoE()
    pack_experts(model, experts="experts")
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
