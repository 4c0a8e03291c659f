"""Plain oracles of the ops: a few differentiable lines of PyTorch each, right in fp64, never fast.

They take the tensors of ``dispatch`` and the ops' logical weights (see ``weight_storage``), so that an op and its oracle
are called alike. Gradients come from autograd.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isnan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moeblaze_ops.arguments.activations import activation_of
from moeblaze_ops.arguments.weight_storage import up_halves
from moeblaze_ops.kernels.configs import SIGMOID_EPS
from moeblaze_ops.kernels.formulas.named import CLAMP_ALPHA, CLAMP_LIMIT, IDENTITY, NAMED, SILU_LIMIT


def activate(h_NGF: Tensor, activation: str) -> Tensor:
    """a = act(h) in the dtype of h, from torch's own functions. Shape [N, F]."""
    if activation == IDENTITY:
        return h_NGF[:, 0]
    if activation not in NAMED:
        return activation_of(activation).value(*h_NGF.unbind(1))
    if h_NGF.shape[1] == 1:
        return _UNGATED[activation](h_NGF[:, 0])
    g, u = h_NGF.unbind(1)
    if activation == "swiglu_clamped":
        g, u = g.clamp(max=CLAMP_LIMIT), u.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        return (u + 1) * (g * torch.sigmoid(CLAMP_ALPHA * g))
    if activation == "swiglu_limited":
        return F.silu(g.clamp(max=SILU_LIMIT)) * u.clamp(-SILU_LIMIT, SILU_LIMIT)
    return _GATES[activation](g) * u


_UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda h: F.relu(h) ** 2,
}
_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda g: F.gelu(g, approximate="tanh"),
    "reglu": F.relu,
}


def dispatch(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The index tensors of ``moeblaze::dispatch``, by counting in Python."""
    ids = experts_TK.reshape(-1).tolist()
    rows = [[slot for slot, expert in enumerate(ids) if expert == e] for e in range(num_experts)]
    slots = [slot for expert_slots in rows for slot in expert_slots]
    offsets = [0]
    blocks = []
    for e, expert_slots in enumerate(rows):
        blocks += [(e, offsets[-1] + first) for first in range(0, len(expert_slots), 128)]
        offsets.append(offsets[-1] + len(expert_slots))
    positions = [-1] * len(ids)
    for row, slot in enumerate(slots):
        positions[slot] = row
    unused = len(ids) // 128 + num_experts - len(blocks)
    schedule = [(len(blocks), 0), *blocks, *[(-1, 0)] * unused]
    options: dict[str, Any] = {"dtype": torch.int32, "device": experts_TK.device}
    return (
        torch.tensor(slots + [-1] * (len(ids) - len(slots)), **options),
        torch.tensor(offsets, **options),
        torch.tensor(positions, **options).view(experts_TK.shape),
        torch.tensor(schedule, **options).view(-1, 2),
    )


def expert_up(
    x_TD: Tensor,
    w_up: list[Tensor],
    b_up: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    positions_TK: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """h and a of the used rows, [M, G, F] and [M, F]."""
    h_rows = []
    for e, slots in enumerate(_expert_slots(slots_N, offsets_E1)):
        x_rows = x_TD[slots // positions_TK.shape[1]]
        scale = 1 if weights_TK is None else weights_TK.reshape(-1)[slots].unsqueeze(1)
        halves = [(x_rows @ half[e].t()) * scale for half in up_halves(w_up)]
        biased = [h + b[e] for h, b in zip(halves, up_halves(b_up), strict=True)] if b_up else halves
        h_rows.append(torch.stack(biased, dim=1))
    h_NGF = torch.cat(h_rows)
    return h_NGF, activate(h_NGF, activation)


def expert_down(
    h_NGF: Tensor,
    w_down: list[Tensor],
    b_down: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor,
    offsets_E1: Tensor,
    positions_TK: Tensor,
    activation: str,
) -> Tensor:
    """out_TD from the pre-activation of the used rows."""
    (w_EFD,) = w_down
    T, K = positions_TK.shape
    out_TD = h_NGF.new_zeros(T, w_EFD.shape[2])
    start = 0
    for e, slots in enumerate(_expert_slots(slots_N, offsets_E1)):
        y_rows = activate(h_NGF[start : start + len(slots)], activation) @ w_EFD[e]
        start += len(slots)
        if b_down:
            y_rows = y_rows + b_down[0][e]
        if weights_TK is not None:
            y_rows = y_rows * weights_TK.reshape(-1)[slots].unsqueeze(1)
        out_TD = out_TD.index_add(0, slots // K, y_rows)
    return out_TD


def moe(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w_up: list[Tensor],
    w_down: list[Tensor],
    b_up: Sequence[Tensor] = (),
    b_down: Sequence[Tensor] = (),
    activation: str = "swiglu",
    weight_on: str = "output",
) -> Tensor:
    """A whole expert layer: the composition of the three oracles above."""
    slots_N, offsets_E1, positions_TK, _ = dispatch(experts_TK, w_down[0].shape[0])
    on_input, on_output = (weights_TK, None) if weight_on == "input" else (None, weights_TK)
    h, _ = expert_up(x_TD, w_up, list(b_up), on_input, slots_N, offsets_E1, positions_TK, activation)
    return expert_down(h, w_down, list(b_down), on_output, slots_N, offsets_E1, positions_TK, activation)


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor]:
    """weights_TK and experts_TK of ``moeblaze::route``, chosen by sorting in Python."""
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    E = logits_TE.shape[1]
    scores_TE = {
        "softmax": lambda: logits_TE.softmax(1),
        "softmax_topk": lambda: logits_TE,
        "sigmoid": logits_TE.sigmoid,
    }[scoring]()
    # The logits have the order of their softmax or sigmoid without the ties of its rounding; sums of two have another.
    by_logit = scoring == "softmax" or top_groups == num_groups
    choice_TE = logits_TE if by_logit and bias_E is None else scores_TE
    choice_TE = choice_TE if bias_E is None else choice_TE + bias_E
    groups = torch.arange(E).view(num_groups, -1).tolist()
    num_summed = 2 if scoring == "sigmoid" else 1
    best = [_best_experts(row, groups, top_k, top_groups, num_summed) for row in choice_TE.detach()]
    experts_TK = torch.tensor(best, dtype=torch.int64, device=logits_TE.device).view(-1, top_k)
    weights_TK = scores_TE.gather(1, experts_TK)
    if scoring == "softmax_topk":
        weights_TK = weights_TK.softmax(1)
    elif renormalize:
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + (SIGMOID_EPS if scoring == "sigmoid" else 0))
    return weights_TK * scale, experts_TK.to(torch.int32)


def _best_experts(row: Tensor, groups: list[list[int]], top_k: int, top_groups: int, num_summed: int) -> list[int]:
    values = row.tolist()

    def ranked(ids: list[int], score) -> list[int]:
        return sorted(ids, key=lambda i: (0, 0, i) if isnan(score(i)) else (1, -score(i), i))

    def group_score(g: int) -> float:
        largest = ranked(groups[g], values.__getitem__)[:num_summed]
        return float(row[largest].sum())

    kept = ranked(list(range(len(groups))), group_score)[:top_groups]
    return ranked([e for g in kept for e in groups[g]], values.__getitem__)[:top_k]


def _expert_slots(slots_N: Tensor, offsets_E1: Tensor) -> list[Tensor]:
    offsets = offsets_E1.tolist()
    return [slots_N[start:end].long() for start, end in pairwise(offsets)]
