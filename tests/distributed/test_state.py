"""The state of sharded experts goes torch's own ways: full, sharded and broadcast state dicts, checkpoints, pickles, copies."""

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


class TwoLists(nn.Module):
    """A list of up and one of down projections, with biases and an odd width."""

    def __init__(self, D: int = zoo.D, width: int = 6, num_experts: int = 4) -> None:
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
    "one list": functools.partial(zoo.ModuleListMoE, zoo.loop_mixtral, zoo.GluMLP),
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
    assert list(state) == list(wanted)
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


def on_two_axes(name: str, seed: int = 0, replicas: bool = False, rows: bool = True) -> nn.Module:
    """Experts on one axis and ``fully_shard`` on another, with replicas of all that or without."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from moeblaze_ops.distributed import expert_placement

    names = ("replicate", "efsdp", "ep")
    meshes = init_device_mesh("cpu", (2, 1, 2) if replicas else (1, 2, 2), mesh_dim_names=names)
    everyone = meshes["efsdp", "ep"]._flatten("shard")
    of_experts, of_others = meshes["efsdp"], everyone
    if replicas:
        of_experts, of_others = meshes["replicate", "efsdp"], meshes["replicate", "shard"]
    model = sharded(name, seed, meshes["ep"])
    if rows:
        fully_shard(model, mesh=of_others, shard_placement_fn=expert_placement(model, of_experts, of_others))
    else:  # the stack itself on both axes
        fully_shard(model, mesh=of_experts)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One on the mean over all ranks, which have the same tokens."""
    model(torch.randn(24, zoo.D, generator=torch.Generator().manual_seed(7))).square().mean().backward()
    for p in model.parameters():
        if hasattr(p, "placements"):
            p.grad /= p.device_mesh.size()
    optimizer.step()
    optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    sharded = [p for p in model.parameters() if hasattr(p, "placements")]
    others = [p for p in model.parameters() if not hasattr(p, "placements")]
    return torch.optim.AdamW([{"params": sharded}, {"params": others}], lr=0.05)


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict, dict]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return get_state_dict(model, optimizer, options=options(full_state_dict=True))


def assert_same(got, wanted) -> None:
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same(got[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert_same(dict(enumerate(got)), dict(enumerate(wanted)))
    else:
        assert torch.equal(got, wanted) if isinstance(wanted, torch.Tensor) else got == wanted


def check_save(name: str, folder: str) -> None:
    """A checkpoint of four ranks, and what its model becomes with another step."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = sharded(name)
    optimizer = adam(model)
    step(model, optimizer)
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(parts, checkpoint_id=f"{folder}/{name}")
    saved = copy.deepcopy(full_state(model, optimizer))
    step(model, optimizer)
    if dist.get_rank() == 0:
        torch.save((saved, full_state(model, optimizer)), f"{folder}/{name}.pt")
    else:
        full_state(model, optimizer)


def check_resume(name: str, folder: str) -> None:
    """It goes on from there on another number of ranks, from the checkpoint or from the full state of rank 0."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as torchs

    saved, wanted = torch.load(f"{folder}/{name}.pt")
    for way in ("checkpoint", "broadcast"):
        model = sharded(name, seed=1)
        optimizer = adam(model)
        if way == "checkpoint":
            parts = dict(zip(("model", "optimizer"), torchs.get_state_dict(model, optimizer), strict=True))
            dcp.load(parts, checkpoint_id=f"{folder}/{name}")
            torchs.set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
        else:
            mine = copy.deepcopy(saved) if dist.get_rank() == 0 else ({}, {})
            how = options(full_state_dict=True, broadcast_from_rank0=True)
            torchs.set_model_state_dict(model, mine[0], options=how)
            torchs.set_optimizer_state_dict(model, optimizer, mine[1], options=how)
        for got, one in zip(full_state(model, optimizer), saved, strict=True):
            assert_same(one, got)
        step(model, optimizer)
        got, _ = full_state(model, optimizer)
        for key, value in wanted[0].items():
            torch.testing.assert_close(got[key], value, atol=1e-9, rtol=0)


def check_checkpoint_of_one_process(folder: str) -> None:
    """A model that was never sharded loads what four ranks saved, under its own names."""
    import torch.distributed.checkpoint as dcp

    for name in MODELS:
        state = {"model": whole(name, seed=1).state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        assert_same(state["model"], torch.load(f"{folder}/{name}.pt")[0][0])


def check_pickled(name: str) -> None:
    """A sharded model is pickled, saved and copied with its class."""
    model, x = sharded(name), torch.randn(5, zoo.D)
    out = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False), copy.deepcopy(model)):
        assert type(twin.mlp) is type(model.mlp)
        assert torch.equal(twin(x), out)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert torch.equal(twin(x), x) and torch.equal(model(x), out)
        twin.load_state_dict(model.state_dict())
        assert torch.equal(twin(x), out)


def check_average(name: str) -> None:
    """An average of a sharded model follows it, and is saved as a model is."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.optim.swa_utils import AveragedModel

    model, one = sharded(name), whole(name)
    averages = [AveragedModel(each, avg_fn=lambda a, b, n: 0.5 * a + 0.5 * b) for each in (model, one)]
    for _ in range(2):
        for each, average in zip((model, one), averages, strict=True):
            with torch.no_grad():
                for p in each.parameters():
                    p.mul_(2)
            average.update_parameters(each)
    full = get_model_state_dict(averages[0].module, options=options(full_state_dict=True))
    assert_same(full, averages[1].module.state_dict())


def check_partial_states(way: str) -> None:
    """Experts that a state dict lacks stay as they are and are said to be missing; the others are loaded."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    before, given = (whole("one list", seed).state_dict() for seed in (0, 1))
    absent = [key for key in given if ".1.w2" in key or ".3.w" in key]
    wanted = {key: (before if key in absent else given)[key] for key in given}
    for key in absent:
        del given[key]
    model = sharded("one list")
    if way == "own method":
        missing = model.load_state_dict(given, strict=False).missing_keys
        numbers = {f".{e}." for e in range(zoo.E // 2 * dist.get_rank(), zoo.E // 2 * (dist.get_rank() + 1))}
        assert sorted(missing) == sorted(key for key in absent if any(number in key for number in numbers))
    else:
        how = {"full_state_dict": True, "strict": False, "broadcast_from_rank0": way == "broadcast"}
        mine = given if way == "everywhere" or dist.get_rank() == 0 else {}
        assert sorted(set_model_state_dict(model, mine, options=options(**how)).missing_keys) == sorted(absent)
    assert_state(model, wanted)


def check_packed_before() -> None:
    """Experts that ``pack_experts`` has put side by side are sharded and saved as others are."""
    from moeblaze_ops import pack_experts
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    model = whole("one list")
    assert pack_experts(model, experts="mlp.experts")
    shard_experts(model, harness.axis())
    assert_state(model, whole("one list").state_dict())


CHECKS = {
    **{f"full, {name}": functools.partial(check_full, name) for name in MODELS},
    **{f"loads, {name}": functools.partial(check_loads, name) for name in MODELS},
    **{f"whole tensors, {name}": functools.partial(check_whole_tensors, name) for name in MODELS},
    **{f"meta, {name}": functools.partial(check_load_of_meta, name) for name in MODELS},
    "wrong states": check_wrong_states,
    "packed before": check_packed_before,
    **{f"partial, {way}": functools.partial(check_partial_states, way) for way in ("own method", "everywhere", "broadcast")},
    **{f"pickled, {name}": functools.partial(check_pickled, name) for name in MODELS},
    **{f"average, {name}": functools.partial(check_average, name) for name in MODELS},
}
TWO_AXES = {
    f"{how}, {kind}, {name}": functools.partial(check, name, functools.partial(on_two_axes, **layout))
    for how, layout in {"two axes": {}, "replicas": {"replicas": True}, "stack twice": {"rows": False}}.items()
    for kind, check in {"full": check_full, "loads": check_loads}.items()
    for name in (MODELS if how == "two axes" else ["two lists"])
}
RANKS = {4: "save", 2: "resume", 1: "resume"}
CHECKPOINTS = {"save": check_save, "resume": check_resume}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[int, dict[str, list[str]]]:
    saved = str(tmp_path_factory.mktemp("saved"))
    results = {}
    for ranks, what in RANKS.items():
        checks = {name: functools.partial(CHECKPOINTS[what], name, saved) for name in MODELS}
        checks |= {2: CHECKS, 4: TWO_AXES, 1: {"never sharded": functools.partial(check_checkpoint_of_one_process, saved)}}[ranks]
        results[ranks] = run_checks(checks, ranks, tmp_path_factory.mktemp("ranks"))
    return results


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(outcomes, name):
    assert_passed(outcomes[2][name])


@NEEDS_A_MESH_FOR_EACH_PARAMETER
@pytest.mark.parametrize("name", TWO_AXES)
def test_on_two_axes(outcomes, name):
    assert_passed(outcomes[4][name])


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in RANKS for name in MODELS] + [(1, "never sharded")])
def test_checkpoints(outcomes, ranks, name):
    """Saved on four ranks, with the state of an optimizer; loaded on two and on one."""
    assert_passed(outcomes[ranks][name])
