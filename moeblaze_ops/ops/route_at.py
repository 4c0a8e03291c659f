"""``moeblaze::route_at``: the weights that a router gives to experts that are chosen already."""

from torch import Tensor

from moeblaze_ops import config
from moeblaze_ops.arguments.validation import require, require_dtype
from moeblaze_ops.arguments.validation_calls import MAX_TOP_K
from moeblaze_ops.arguments.validation_router import check_like_logits, check_logits, check_scoring
from moeblaze_ops.arguments.validation_values import ID_DTYPES
from moeblaze_ops.cpu.row_pieces import in_pieces
from moeblaze_ops.cpu.rows import sum_dtype
from moeblaze_ops.ops.autodiff import carrying, parted
from moeblaze_ops.ops.direct import call
from moeblaze_ops.ops.register import register_op
from moeblaze_ops.ops.route import route_backward, weights_of


def _check(op: str, logits_TE: Tensor, experts_TK: Tensor, scoring: str, renormalize: bool, scale: float) -> None:
    check_logits(op, logits_TE)
    check_scoring(op, scoring, scale)
    shape, T = list(experts_TK.shape), logits_TE.shape[0]
    fits = len(shape) == 2 and shape[0] == T and 1 <= shape[1] <= MAX_TOP_K
    require(fits, op, "experts_TK", f"have shape [{T}, K] (tokens of logits_TE) with K at most {MAX_TOP_K}", f"shape {shape}")
    require_dtype(experts_TK.dtype in ID_DTYPES, op, "experts_TK", "be int32 or int64", experts_TK.dtype)
    check_like_logits(op, "experts_TK", experts_TK, logits_TE)


def _fake(logits_TE, experts_TK, scoring, renormalize, scale) -> Tensor:
    return logits_TE.new_empty(experts_TK.shape, dtype=sum_dtype(logits_TE))


def _cpu(logits_TE, experts_TK, scoring, renormalize, scale) -> Tensor:
    def weigh(logits: Tensor, experts: Tensor) -> Tensor:
        return weights_of(logits.to(sum_dtype(logits)), experts.long(), scoring, renormalize, scale).contiguous()

    if not config.batch_invariant:
        return weigh(logits_TE, experts_TK)
    weights_TK = _fake(logits_TE, experts_TK, scoring, renormalize, scale)
    in_pieces(lambda weights, *given: weights.copy_(weigh(*given)), [weights_TK], [logits_TE, experts_TK])
    return weights_TK


def _setup_context(ctx, inputs, output) -> None:
    logits_TE, experts_TK, *options = inputs
    ctx.options = options
    ctx.save_for_backward(logits_TE, output, experts_TK)


def _gradient(ctx, dweights_TK):
    if not ctx.needs_input_grad[0]:
        return None, None, None, None, None
    logits_TE, weights_TK, experts_TK = ctx.saved_tensors
    dlogits_TE = call(route_backward, dweights_TK, logits_TE, weights_TK, experts_TK.contiguous(), *ctx.options)
    return dlogits_TE, None, None, None, None


def _forward_mode(logits_TE, experts_TK, *options) -> Tensor:
    (primal_TE, experts_TK), (dlogits_TE, _) = parted((logits_TE, experts_TK))
    weights_TK = route_at(primal_TE, experts_TK, *options)
    if dlogits_TE is None:
        return weights_TK
    (_, (dweights_TK,)) = parted([weights_of(logits_TE.to(sum_dtype(primal_TE)), experts_TK.long(), *options)])
    return carrying(weights_TK, dweights_TK)


route_at = register_op(
    "route_at",
    "(Tensor logits_TE, Tensor experts_TK, str scoring, bool renormalize, float scale) -> Tensor",
    fake=_fake,
    cpu=_cpu,
    kernel="routing.route:launch_route_at",
    check=_check,
    backward=_gradient,
    setup_context=_setup_context,
    forward_mode=_forward_mode,
)
"""The weights of given experts, as ``route`` gives them to those that it chooses.

Args:
    logits_TE: router logits. Shape [T, E], bf16, fp16, fp32, or fp64 on CPU, any strides, T may be 0.
    experts_TK: ids in [0, E), which a token may have several times. Shape [T, K], int32 or int64, any strides, K at most 32.
        An id outside raises on a CPU. On CUDA it is not looked for, and its weight is 0.
    scoring, renormalize, scale: as for ``route``.

Returns:
    weights_TK: fp32 (fp64 for fp64), contiguous, differentiable in the logits: backward is ``route_backward``.

Raises:
    ValueError, TypeError: an argument breaks one of the rules above. Computes in fp32; two runs agree bit for bit.
"""
