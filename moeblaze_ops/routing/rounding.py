"""Token rounding: every expert gets a whole number of tiles, so that no product is computed for rows that are not there.

After SonicMoE (arXiv 2512.14080): an expert drops the tokens that weigh least, or takes the next best ones, of those that had it
behind their own K. It changes what the model computes, as capacity does, and so it is asked for by name.
"""

import torch
from torch import Tensor

from moeblaze_ops.arguments.validation import MAX_EXPERTS
from moeblaze_ops.arguments.validation_values import (
    ID_DTYPES,
    check_choice,
    check_float_dtype,
    check_number,
    check_tensor,
    not_scriptable,
    refuse,
    refuse_type,
)

MODES = ("nearest", "up", "down")


@not_scriptable
def round_routing(
    weights: Tensor, experts: Tensor, num_experts: int, *, spare: int = 0, tile: int = 128, mode: str = "nearest"
) -> tuple[Tensor, Tensor]:
    """The routing in which the number of tokens of each expert is a multiple of ``tile``.

    The first K of a token's slots are its choice, the last ``spare`` are experts that it would take as well. An expert keeps its
    tokens with the largest weights, those that chose it before those that have it to spare: with K = 8 and two experts to spare,
    ``round_routing(*route(logits, 10), E, spare=2)``.

    Args:
        weights: routing weights, which are also what a token is worth to an expert. Shape [..., K + spare], bf16, fp16, fp32, or
            fp64 on CPU.
        experts: expert ids, no one twice in a token. Shape [..., K + spare], int32 or int64; an id outside [0, num_experts) marks
            an unused slot.
        num_experts: E, 1 to 4096.
        spare: slots that are not yet chosen, 0 to the last axis less 1. With 0, counts are only rounded down.
        tile: rows of a tile of the products; 128 for the kernels of this package.
        mode: ``"nearest"``: the nearest multiple, the larger one of two; ``"up"``; ``"down"``. An expert that too few tokens have
            to spare is rounded down.

    Returns:
        weights: shape and dtype as given, 0 where a slot is unused. Differentiable where it is not.
        experts: shape and dtype as given, -1 where a slot is unused. Nothing is moved and no shape depends on the data; backward
            and kernels skip unused slots, but tensors with a row for each slot have rows for the spare ones, too.

    Raises:
        ValueError, TypeError: an argument breaks one of these rules. Between equal weights the lower token wins; two runs agree.
        Weights that were normalised over K or over K + spare are not normalised anew.
    """
    _check(weights, experts, num_experts, spare, tile, mode)
    slots = experts.shape[-1]
    ids_N, weights_N = experts.reshape(-1).long(), weights.detach().reshape(-1)
    device = ids_N.device
    used_N = (ids_N >= 0) & (ids_N < num_experts)
    ids_N = torch.where(used_N, ids_N, num_experts)
    is_spare_N = (torch.arange(slots, device=device) >= slots - spare).expand(experts.shape).reshape(-1)

    by_weight_N = weights_N.argsort(descending=True, stable=True)
    groups_N = (2 * ids_N + is_spare_N).short()  # of two bytes, which take a quarter of the passes
    order_N = by_weight_N[groups_N[by_weight_N].argsort(stable=True)]
    counts_E1 = _counts(ids_N, used_N, num_experts)
    chosen_E1 = _counts(ids_N, used_N & ~is_spare_N, num_experts)
    rows_N = torch.arange(order_N.numel(), device=device) - (counts_E1.cumsum(0) - counts_E1)[ids_N[order_N]]
    rank_N = torch.empty_like(rows_N).scatter(0, order_N, rows_N)

    kept_N = (rank_N < _rounded(chosen_E1, counts_E1, tile, mode)[ids_N]).view(experts.shape)
    return torch.where(kept_N, weights, 0), torch.where(kept_N, experts, -1)


def _counts(ids_N: Tensor, counted_N: Tensor, num_experts: int) -> Tensor:
    """How many counted slots each expert has, and none for unused ones, which have the number behind the last."""
    return torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_N.device).index_add(0, ids_N, counted_N.long())


def _rounded(chosen_E1: Tensor, available_E1: Tensor, tile: int, mode: str) -> Tensor:
    rest_E1 = chosen_E1 % tile
    down_E1 = chosen_E1 - rest_E1
    if mode == "down":
        return down_E1
    up_E1 = torch.where(rest_E1 > 0, down_E1 + tile, down_E1)
    goes_up_E1 = up_E1 <= available_E1
    if mode == "nearest":
        goes_up_E1 &= 2 * rest_E1 >= tile
    return torch.where(goes_up_E1, up_E1, down_E1)


def _check(weights: Tensor, experts: Tensor, num_experts: int, spare: int, tile: int, mode: str) -> None:
    op = "round_routing"
    check_tensor(op, "weights", weights)
    check_float_dtype(op, "weights", weights)
    check_tensor(op, "experts", experts)
    if experts.dtype not in ID_DTYPES:
        refuse_type(op, "experts", "be int32 or int64", experts.dtype)
    if weights.dim() < 1 or weights.shape[-1] == 0:
        refuse(op, "weights", "have shape [..., K + spare]", f"shape {list(weights.shape)}")
    if experts.shape != weights.shape:
        refuse(op, "experts", f"have shape {list(weights.shape)} (that of weights)", f"shape {list(experts.shape)}")
    if experts.device != weights.device:
        refuse(op, "experts", f"be on {weights.device} (as weights)", experts.device)
    check_number(op, "num_experts", num_experts, 1, MAX_EXPERTS)
    check_number(op, "spare", spare, 0, weights.shape[-1] - 1, ", the slots less one")
    check_number(op, "tile", tile, 1)
    check_choice(op, "mode", mode, MODES)
