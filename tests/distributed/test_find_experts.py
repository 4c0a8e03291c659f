"""Which parameters ``shard_experts`` takes for those of experts, and its near misses."""

import pytest
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.distributed.test_state import TwoLists


def found(model: nn.Module, selection=None) -> dict[str, tuple[str, ...]]:
    from moeblaze_ops.distributed.find_experts import find_experts

    return {group.owner: group.names for group in find_experts(model, selection)[0]}


class Decoder(nn.Module):
    """As many layers as experts: a list of attentions, one of layers with a router each, and one of norms."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(zoo.D, zoo.D, bias=False) for _ in range(zoo.E))
        self.mlp = nn.ModuleList(zoo.ModuleListMoE(zoo.loop_mixtral, zoo.GluMLP) for _ in range(zoo.E))
        self.norm = nn.ModuleList(nn.LayerNorm(zoo.D) for _ in range(zoo.E))

    def forward(self, x):
        for attention, mlp, norm in zip(self.attention, self.mlp, self.norm, strict=True):
            x = x + mlp(norm(x + attention(x)))
        return x


class Heads(nn.Module):
    """Lists of projections of heads, without a router."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.ModuleList(nn.Linear(zoo.D, 8) for _ in range(4))
        self.key = nn.ModuleList(nn.Linear(zoo.D, 8) for _ in range(4))

    def forward(self, x):
        return sum((q(x) * k(x)).sum() for q, k in zip(self.query, self.key, strict=True))


LISTS = {"up": ("weight", "bias"), "down": ("weight",)}


def test_lists_beside_each_other():
    assert found(TwoLists()) == LISTS
    inside = nn.Sequential(nn.Linear(zoo.D, zoo.D), TwoLists())
    assert found(inside) == {f"1.{path}": names for path, names in LISTS.items()}


def test_lists_of_layers_are_left():
    assert list(found(Decoder())) == [f"mlp.{number}.experts" for number in range(zoo.E)]
    assert found(Heads()) == {}


@pytest.mark.parametrize("selection", [
    ["up", "down"],
    [f"{path}.{e}" for path in LISTS for e in range(4)],
    [f"{path}.{e}.{name}" for path, names in LISTS.items() for e in range(4) for name in names],
    lambda name, parameter: not name.startswith("router"),
])  # fmt: skip
def test_lists_by_name(selection):
    assert found(TwoLists(), selection) == LISTS


def test_the_layer_has_experts_and_router():
    """What is around it may break a graph on one rank alone, and runs other layers."""
    from moeblaze_ops.distributed.find_experts import find_experts

    model = nn.Sequential(zoo.stacked("stacked_loop"), zoo.ModuleListMoE(zoo.loop_mixtral, zoo.GluMLP), nn.Sequential(TwoLists()))
    assert [group.layer for group in find_experts(model, None)[0]] == ["0", "1", "2.0", "2.0"]


def test_unknown_names():
    with pytest.raises(ValueError, match="parameters must be names of the model's parameters or modules, got 'u'"):
        found(TwoLists(), ["u", "down"])
