"""Sizes, storages and routings for tests of the Hopper kernels, and how their results are compared."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 1e-5}
"""Relative error in norm: one rounding of the result, one of an intermediate; for fp32 the order of its sums."""


@dataclass(frozen=True)
class Problem:
    """Sizes, storage and routing of one test. ``load`` names how ids are drawn."""

    num_tokens: int = 500
    num_d: int = 256
    num_f: int = 256
    num_experts: int = 6
    top_k: int = 3
    parts: int = 2
    f_inner: bool = False
    interleaved: bool = False
    split: bool = False
    bias: bool = False
    weighted: bool = True
    load: str = "random"
    dtype: torch.dtype = torch.bfloat16
    activation: str = "swiglu"


BASE = Problem()
PROBLEMS = {
    "base": BASE,
    "fp16": replace(BASE, dtype=torch.float16),
    "one_token": replace(BASE, num_tokens=1),
    "empty_expert": replace(BASE, load="empty"),
    "all_to_one_expert": replace(BASE, load="one"),
    "unused_slots": replace(BASE, load="unused"),
    "all_unused": replace(BASE, load="none"),
    "ragged_widths": replace(BASE, num_d=328, num_f=200),
    "narrow": replace(BASE, num_d=64, num_f=72),
    "long_rows": replace(BASE, num_d=1536, num_f=640, num_tokens=3000),
    "groups_of_row_blocks": replace(BASE, num_f=1304, num_d=328),
    "f_inner": replace(BASE, f_inner=True),
    "f_inner_groups_of_row_blocks": replace(BASE, f_inner=True, num_d=2312, num_f=200),
    "f_inner_ragged": replace(BASE, f_inner=True, num_d=328, num_f=200),
    "interleaved": replace(BASE, interleaved=True),
    "split": replace(BASE, split=True),
    "split_f_inner": replace(BASE, split=True, f_inner=True),
    "bias": replace(BASE, bias=True),
    "bias_ragged_split": replace(BASE, bias=True, split=True, num_d=328, num_f=200),
    "unweighted": replace(BASE, weighted=False),
    "ungated_bias": replace(BASE, parts=1, activation="gelu", bias=True, num_f=200),
} | {
    activation: replace(BASE, activation=activation, parts=parts)
    for parts, activations in {
        2: ("geglu", "geglu_tanh", "reglu", "swiglu_clamped", "swiglu_limited"),
        1: ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity"),
    }.items()
    for activation in activations
}


def draw_experts(problem: Problem) -> Tensor:
    """Shape [T, K], int64."""
    T, K, E = problem.num_tokens, problem.top_k, problem.num_experts
    experts_TK = torch.randn(T, E, device="cuda").topk(K, dim=-1).indices
    if problem.load == "empty":
        experts_TK = experts_TK.masked_fill(experts_TK == 2, 3)
    elif problem.load == "one":
        experts_TK = torch.full_like(experts_TK, 4)
    elif problem.load == "unused":
        experts_TK = experts_TK.masked_fill(torch.rand(T, K, device="cuda") < 0.4, -1)
    elif problem.load == "none":
        experts_TK = torch.full_like(experts_TK, -1)
    return experts_TK


@dataclass(frozen=True)
class Routing:
    slots_N: Tensor
    offsets_E1: Tensor
    blocks_B2: Tensor
    rows: list[slice]
    tokens: list[Tensor]


def route(problem: Problem) -> Routing:
    """The structures of ``dispatch``, by plain loops."""
    experts_N = draw_experts(problem).flatten().tolist()
    by_expert = [[s for s, e in enumerate(experts_N) if e == expert] for expert in range(problem.num_experts)]
    slots = [slot for members in by_expert for slot in members]
    offsets, entries, rows = [0], [], []
    for expert, members in enumerate(by_expert):
        rows.append(slice(offsets[-1], offsets[-1] + len(members)))
        entries += [(expert, first) for first in range(rows[-1].start, rows[-1].stop, 128)]
        offsets.append(rows[-1].stop)
    num_slots = len(experts_N)
    slots += [-1] * (num_slots - len(slots))
    entries = [(len(entries), 0), *entries]
    entries += [(-1, 0)] * (num_slots // 128 + problem.num_experts + 1 - len(entries))

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    tokens = [ints(members).long() // problem.top_k for members in by_expert]
    return Routing(ints(slots), ints(offsets), ints(entries), rows, tokens)


def random(problem: Problem, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(problem.dtype)


def grouped(problem: Problem, routing: Routing, *widths: int) -> Tensor:
    """Rows in expert order, NaN where there are none."""
    values = random(problem, problem.num_tokens * problem.top_k, *widths)
    values[routing.rows[-1].stop :] = float("nan")
    return values


def nan_like(problem: Problem, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.full(shape, float("nan"), device="cuda", dtype=dtype or problem.dtype)


def up_weights(problem: Problem, fill=random) -> list[Tensor]:
    E, G, num_f, num_d = problem.num_experts, problem.parts, problem.num_f, problem.num_d
    shape = (E, 1 if problem.split else G, num_f, num_d)
    order = (0, 1, 2, 3)
    if problem.f_inner:
        order = (0, 3, 1, 2)
    elif problem.interleaved:
        order = (0, 2, 1, 3)
    inverse = [order.index(axis) for axis in range(4)]

    def make() -> Tensor:
        return fill(problem, *(shape[axis] for axis in order)).permute(inverse)

    return [make() for _ in range(G if problem.split else 1)]


def up_biases(problem: Problem) -> list[Tensor]:
    if not problem.bias:
        return []
    parts = [1] * problem.parts if problem.split else [problem.parts]
    return [random(problem, problem.num_experts, part, problem.num_f) for part in parts]


def down_weight(problem: Problem, fill=random) -> Tensor:
    E, num_f, num_d = problem.num_experts, problem.num_f, problem.num_d
    return fill(problem, E, num_d, num_f).transpose(1, 2) if problem.f_inner else fill(problem, E, num_f, num_d)


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors, dim=1).float()


def assert_close(values: Tensor, reference: Tensor) -> None:
    assert not values.isnan().any()
    scale = reference.float().norm().clamp_min(1e-6)
    assert (values.float() - reference.float()).norm() / scale < TOLERANCE[values.dtype]


def run_twice(run, outputs: list[Tensor]) -> None:
    """Runs on NaN outputs, twice, and asserts that both runs agree bit for bit."""
    run()
    first = [output.clone() for output in outputs]
    run()
    for output, before in zip(outputs, first, strict=True):
        assert torch.equal(output.nan_to_num(7.0), before.nan_to_num(7.0))
