"""Token rounding: every expert gets a whole number of tiles, so that no product is computed for rows that are not there.

After SonicMoE (arXiv 2512.14080): an expert drops the tokens that weigh least, or takes the next best ones, of those that had it
behind their own K. It changes what the model computes, as capacity does, and so it is asked for by name.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import moeblaze_ops.ops.dispatch  # noqa: F401
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
    num_slots = experts.shape[-1]
    top_k = num_slots - spare
    weights_TS, ids_TS = weights.detach().reshape(-1, num_slots), experts.reshape(-1, num_slots)
    slots_TS = torch.arange(ids_TS.numel(), device=ids_TS.device).view(ids_TS.shape)
    parts = (slice(0, top_k), slice(top_k, num_slots))
    order_N = torch.cat([slots_TS[:, part].reshape(-1)[_by_weight(weights_TS[:, part])] for part in parts])
    ids_N = ids_TS.reshape(-1)[order_N]

    # Stable: the rows of an expert are first those that chose it, then those that have it to spare, the largest weights first.
    places_N, offsets_E1, positions_N1, _ = torch.ops.moeblaze.dispatch(ids_N.unsqueeze(1), num_experts)
    is_chosen_N = (places_N >= 0) & (places_N < ids_TS.shape[0] * top_k)
    before_N1 = F.pad(is_chosen_N.cumsum(0), (1, 0))
    kept_E = _rounded(before_N1[offsets_E1].diff(), offsets_E1.diff().long(), tile, mode)
    expert_N, position_N = ids_N.long().clamp(0, num_experts - 1), positions_N1.squeeze(1)
    is_kept_N = (position_N >= 0) & (position_N - offsets_E1[expert_N] < kept_E[expert_N])

    kept = torch.empty_like(is_kept_N).scatter(0, order_N, is_kept_N).view(experts.shape)
    return torch.where(kept, weights, 0), torch.where(kept, experts, -1)


def _by_weight(weights_TS: Tensor) -> Tensor:
    return weights_TS.reshape(-1).argsort(descending=True, stable=True)


def _rounded(chosen_E: Tensor, available_E: Tensor, tile: int, mode: str) -> Tensor:
    rest_E = chosen_E % tile
    down_E = chosen_E - rest_E
    if mode == "down":
        return down_E
    up_E = torch.where(rest_E > 0, down_E + tile, down_E)
    goes_up_E = up_E <= available_E
    if mode == "nearest":
        goes_up_E &= 2 * rest_E >= tile
    return torch.where(goes_up_E, up_E, down_E)


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
