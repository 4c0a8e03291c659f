"""Losses that keep a router balanced and its logits small, from counts and one pass over the logits of each layer."""

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from moeblaze_ops import config
from moeblaze_ops.arguments.validation_calls import MAX_TOP_K
from moeblaze_ops.arguments.validation_values import ID_DTYPES, check_float_dtype, check_number, check_tensor, refuse, refuse_type
from moeblaze_ops.ops.route import chosen_experts
from moeblaze_ops.ops.router_sums import expert_counts, router_sums


def load_balancing_loss(
    logits: Tensor | Sequence[Tensor],
    top_k: int,
    *,
    ids: Tensor | Sequence[Tensor] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The loss of Switch Transformer and GShard: ``E * sum_e f[e] * P[e]``, which is K where the load is even.

    ``f[e]`` are the choices of expert e per token, ``P[e]`` the mean of its probability, ``softmax(logits)``; both over the
    tokens of all layers. Equals transformers' ``load_balancing_loss_func``, without its ``[T, K, E]`` tensor: per layer nothing
    is larger than the logits.

    Args:
        logits: router logits of one layer or of several. Shape [..., E] each, bf16, fp16, fp32, or fp64 on CPU.
        top_k: K, 1 to E.
        ids: what was chosen, of each layer. Shape [..., K], int32 or int64, below E; negative ones are not counted. Others raise,
            and are not counted in compiled code and, unless ``config.check_expert_ids`` is set, on CUDA. None: the ``top_k``
            largest logits.
        mask: tokens that count: True or other than zero. Shape [...], that of the logits without E, the same for all layers.

    Returns:
        A scalar, fp32 (fp64 for fp64), differentiable in the logits. NaN without tokens.

    Raises:
        ValueError, TypeError: an argument breaks one of these rules.
    """
    layers = list(_layers("load_balancing_loss", logits))
    E = layers[0].shape[-1]
    check_number("load_balancing_loss", "top_k", top_k, 1, E, ", the experts")
    chosen = _chosen(layers, top_k, ids)
    kept_T = _kept("load_balancing_loss", layers, mask)
    counted = chosen if kept_T is None else [torch.where(kept_T.unsqueeze(1), ids_TK, -1) for ids_TK in chosen]
    counts_E = reduce(torch.add, [expert_counts(ids_TK, E) for ids_TK in counted])
    sums_E = reduce(torch.add, [router_sums(logits_TE, kept_T)[0] for logits_TE in layers])
    return E * (counts_E.to(sums_E.dtype) @ sums_E) / _num_tokens(layers, kept_T) ** 2


def router_z_loss(logits: Tensor | Sequence[Tensor], *, mask: Tensor | None = None) -> Tensor:
    """The mean of ``logsumexp(logits)**2`` over the tokens of all layers, which keeps logits small.

    Equals transformers' ``router_z_loss_func`` of Switch Transformers. Arguments, result and errors are those of
    ``load_balancing_loss``.
    """
    layers = list(_layers("router_z_loss", logits))
    kept_T = _kept("router_z_loss", layers, mask)
    total = reduce(torch.add, [router_sums(logits_TE, kept_T)[1] for logits_TE in layers])
    return total / _num_tokens(layers, kept_T)


def _num_tokens(layers: list[Tensor], kept_T: Tensor | None) -> Tensor | int:
    return len(layers) * (layers[0].shape[0] if kept_T is None else kept_T.sum())


def _layers(op: str, logits: Tensor | Sequence[Tensor]) -> Iterator[Tensor]:
    """The logits of each layer as [T, E]."""
    given = [logits] if isinstance(logits, Tensor) else logits
    if not isinstance(given, list | tuple) or not given:
        refuse_type(op, "logits", "be a tensor, or a list of those of each layer", repr(logits))
    for layer in given:
        check_tensor(op, "logits", layer)
        check_float_dtype(op, "logits", layer)
        if layer.dim() < 1 or layer.shape[-1] == 0 or layer.shape != given[0].shape:
            refuse(op, "logits", "have one shape [..., E]", [list(tensor.shape) for tensor in given])
        yield layer.reshape(-1, layer.shape[-1])


def _chosen(layers: list[Tensor], top_k: int, ids: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    if ids is None:
        return [_largest(logits_TE.detach(), top_k) for logits_TE in layers]
    given = [ids] if isinstance(ids, Tensor) else list(ids)
    if len(given) != len(layers):
        refuse("load_balancing_loss", "ids", f"be those of {len(layers)} layers", len(given))
    for layer in given:
        check_tensor("load_balancing_loss", "ids", layer)
        if layer.dtype not in ID_DTYPES:
            refuse_type("load_balancing_loss", "ids", "be int32 or int64", layer.dtype)
        if layer.dim() < 1 or layer.shape[-1] != top_k or layer.numel() != layers[0].shape[0] * top_k:
            refuse("load_balancing_loss", "ids", f"have shape [..., {top_k}], a row for each token", list(layer.shape))
        _check_below(layer, layers[0].shape[-1])
    return [layer.reshape(-1, top_k) for layer in given]


def _check_below(ids: Tensor, num_experts: int) -> None:
    looks = not torch.compiler.is_compiling() and (ids.device.type == "cpu" or config.check_expert_ids)
    if looks and ids.numel() and (largest := int(ids.max())) >= num_experts:
        refuse("load_balancing_loss", "ids", f"be below {num_experts}, the experts", largest)


def _largest(logits_TE: Tensor, top_k: int) -> Tensor:
    """The ids of the largest logits; on a GPU from the kernel of ``route``, which there agrees with ``topk`` on equal ones."""
    fused = logits_TE.is_cuda and top_k <= MAX_TOP_K
    return chosen_experts(logits_TE, top_k) if fused else logits_TE.topk(top_k, dim=-1).indices


def _kept(op: str, layers: list[Tensor], mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    check_tensor(op, "mask", mask)
    if mask.numel() != layers[0].shape[0]:
        refuse(op, "mask", f"have an element for each of {layers[0].shape[0]} tokens", f"shape {list(mask.shape)}")
    return mask.reshape(-1) != 0
