"""The state of sharded experts goes through torch's own ways: full, sharded and broadcast state dicts, checkpoints, pickles, copies."""

import copy
import functools
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.corpus.zoo import catalogue as zoo
from tests.distributed.test_fsdp_experts import NEEDS_A_MESH_FOR_EACH_PARAMETER
from tests.tools.ranks import assert_passed, run_checks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)


class TwoLists(nn.Module):
    """A list of up and one of down projections, with biases and an odd width."""

    def __init__(self, D: int = zoo.D, width: int = 5, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(D, num_experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(D, width) for _ in range(num_experts))
        self.down = nn.ModuleList(nn.Linear(width, D, bias=False) for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            token, k = torch.where(chosen == e)
            if len(token) == 0:
                continue
            rows = self.down[e](F.silu(self.up[e](x[token])))
            out.index_add_(0, token, rows * weights[token, k, None])
        return out


MODELS = {
    "stacked": functools.partial(zoo.stacked, "stacked_loop"),
    "packed": functools.partial(zoo.stacked, "gpt_oss_loop"),
    "one list": functools.partial(zoo.ModuleListMoE, zoo.loop_mixtral),
    "two lists": TwoLists,
}


class Block(nn.Module):
    """A layer below the root, and behind a buffer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.mlp = MODELS[name]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.mlp(x)


def whole(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Block(name)


def sharded(name: str, seed: int = 0, mesh=None) -> nn.Module:
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    model = whole(name, seed)
    assert shard_experts(model, mesh or harness.axis()).taken
    return model


def assert_state(model: nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    """The model has these whole values under these names, as the state dict of every rank says."""
    state = model.state_dict()
    assert list(state) == list(wanted) or sorted(state) == sorted(wanted), state.keys() ^ wanted.keys()
    for name, value in state.items():
        assert value.shape == wanted[name].shape, name
        got = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(got, wanted[name]), name


def options(**settings):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(**settings)


def check_full(name: str, make=sharded) -> None:
    """The full state dict is that of one process: on rank 0 with ``cpu_offload``, on every rank without."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model, wanted = make(name), whole(name).state_dict()
    assert_state(model, wanted)
    for offload in (False, True):
        full = get_model_state_dict(model, options=options(full_state_dict=True, cpu_offload=offload))
        assert sorted(full) == (sorted(wanted) if not offload or dist.get_rank() == 0 else [])
        for key, value in full.items():
            assert type(value) is torch.Tensor and torch.equal(value, wanted[key]), key


def check_loads(name: str, make=sharded) -> None:
    """A full state dict loads where rank 0 alone has it, where all ranks have it, and by the module's own method."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    wanted = whole(name, seed=1).state_dict()
    model = make(name)
    parameters = list(model.parameters())
    mine = dict(wanted) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, mine, options=options(full_state_dict=True, broadcast_from_rank0=True))
    assert_state(model, wanted)
    model = make(name)
    set_model_state_dict(model, dict(wanted), options=options(full_state_dict=True))
    assert_state(model, wanted)
    saved = model.state_dict()
    model = make(name)
    set_model_state_dict(model, get_model_state_dict(make(name, 1), options=options(cpu_offload=True)))
    assert_state(model, wanted)
    model = make(name)
    model(torch.randn(3, zoo.D)).sum()  # fully_shard leaves whole parameters behind a forward
    model.load_state_dict(saved)
    assert_state(model, wanted)


def check_whole_tensors(name: str) -> None:
    """``load_state_dict`` takes a checkpoint of one process."""
    wanted = whole(name, seed=1).state_dict()
    for assign in (False, True):
        model = sharded(name)
        assert model.load_state_dict(wanted, assign=assign).missing_keys == []
        assert_state(model, wanted)


def check_load_of_meta(name: str) -> None:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    wanted = whole(name, seed=1).state_dict()
    with torch.device("meta"):
        model = sharded(name)
    assert all(value.is_meta for value in model.state_dict().values())
    mine = dict(wanted) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, mine, options=options(full_state_dict=True, broadcast_from_rank0=True))
    assert_state(model, wanted)
    with torch.device("meta"):
        model = sharded(name)
    model.load_state_dict(wanted, assign=True)
    assert all(type(p) is nn.Parameter or hasattr(p, "placements") for p in model.parameters())


def raised(function) -> str:
    with pytest.raises(RuntimeError) as error:
        function()
    return str(error.value)


def check_wrong_states() -> None:
    """What a state dict lacks has the names of its experts."""
    model = sharded("one list")
    state = whole("one list").state_dict()
    for number in range(zoo.E):
        del state[f"mlp.experts.{number}.w1.weight"]
    text = raised(lambda: model.load_state_dict(state))
    first = dist.get_rank() * zoo.E // dist.get_world_size()
    assert f'"mlp.experts.{first}.w1.weight"' in text and "w1_weight" not in text, text
    assert f"mlp.experts.{first}.w1.weight" in model.load_state_dict(state, strict=False).missing_keys
    state = whole("one list").state_dict()
    state = {key: value[:-1] if "w1" in key else value for key, value in state.items()}
    assert "size mismatch for mlp.experts.0.w1.weight: must be" in raised(lambda: model.load_state_dict(state))
    assert_state(sharded("one list"), whole("one list").state_dict())


CHECKS = {
    **{f"full, {name}": functools.partial(check_full, name) for name in MODELS},
    **{f"loads, {name}": functools.partial(check_loads, name) for name in MODELS},
    **{f"whole tensors, {name}": functools.partial(check_whole_tensors, name) for name in MODELS},
    **{f"meta, {name}": functools.partial(check_load_of_meta, name) for name in MODELS},
    "wrong states": check_wrong_states,
}


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> dict[str, list[str]]:
    return run_checks(CHECKS, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(of_two, name):
    assert_passed(of_two[name])
