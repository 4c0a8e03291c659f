"""A layer on several ranks against the same layer in one process: output and gradients."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

TOKENS = 24
TOLERANCE = 1e-10
"""Of fp64 sums of a few hundred products in another order."""


def axis(name: str = "ep") -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def tokens_of(rank: int, D: int, count: int = TOKENS) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(100 + rank))


def train(model: nn.Module, run: Callable, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients of x and of every parameter, shards gathered."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    out.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}
    return {"output": out.detach(), "gradient of x": x.grad, **whole}


def in_one_process(model: nn.Module, inputs: list[Tensor]) -> list[dict[str, Tensor]]:
    """What each rank should have: its own output and gradient of x, and gradients of parameters summed over all inputs."""
    results = [train(model, model, x) for x in inputs]
    names = [name for name in results[0] if name not in ("output", "gradient of x")]
    names += [name for result in results for name in result if name not in (*names, "output", "gradient of x")]
    sums = {name: sum(result[name] for result in results if name in result) for name in names}
    return [{"output": r["output"], "gradient of x": r["gradient of x"], **sums} for r in results]


def joined_entries(results: dict[str, Tensor], path: str, count: int) -> dict[str, Tensor]:
    """Results with ``path.<e>.<name>`` of all entries stacked as ``path.<name with underscores>``."""
    joined = {name: value for name, value in results.items() if not name.startswith(f"{path}.")}
    entries = sorted({name.removeprefix(f"{path}.0.") for name in results if name.startswith(f"{path}.0.")})
    for name in entries:
        joined[f"{path}.{name.replace('.', '_')}"] = torch.stack([results[f"{path}.{e}.{name}"] for e in range(count)])
    return joined


def reduced(got: dict[str, Tensor], shared: tuple[str, ...]) -> dict[str, Tensor]:
    """Results with the gradients of parameters that every rank has summed over the ranks."""
    for name in shared:
        got[name] = got[name].clone()
        dist.all_reduce(got[name])
    return got


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], in_eight_bits: bool = False) -> None:
    """Gradients that h in 8 bits has gone into are near in norm."""
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    for name, value in wanted.items():
        if in_eight_bits and name != "output":
            assert (got[name] - value).norm() <= 0.02 * value.norm() + TOLERANCE, name
            continue
        torch.testing.assert_close(got[name], value, atol=TOLERANCE, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def collectives(function: Callable) -> tuple[object, dict[str, int]]:
    """What a call returns, and how many gathers and reduce-scatters it asked of process groups."""
    result, counts = counting(function, "c10d::")
    kinds: dict[str, int] = {}
    for name, count in counts.items():
        kind = "reduce_scatter" if "reduce_scatter" in name else "gather" if "allgather" in name else name
        kinds[kind] = kinds.get(kind, 0) + count
    return result, kinds


def counting(function: Callable, namespace: str) -> tuple[object, dict[str, int]]:
    """What a call returns, and how often it called each operator of a namespace."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = function()
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith(namespace)}
    return result, {key.removeprefix(namespace): count for key, count in counts.items()}
