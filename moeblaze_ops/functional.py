"""``moe``: a whole expert layer as one function over the ops."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from moeblaze_ops import config
from moeblaze_ops.arguments import weight_storage as storage
from moeblaze_ops.arguments.activations import stacked_parameters
from moeblaze_ops.arguments.geometry import once
from moeblaze_ops.arguments.made_weights import is_maker, with_made_weights
from moeblaze_ops.arguments.traced_activations import resolved_activation
from moeblaze_ops.arguments.validation_calls import check_activation_parameters, check_lora, check_moe
from moeblaze_ops.arguments.validation_values import not_scriptable
from moeblaze_ops.arguments.weight_storage import up_shape
from moeblaze_ops.kernels.formulas.named import is_gated
from moeblaze_ops.memory.estimate import LayerSizes, choose_keep
from moeblaze_ops.memory.row_ranges import choose_parts
from moeblaze_ops.ops.direct import call
from moeblaze_ops.ops.dispatch import dispatch
from moeblaze_ops.ops.expert_up import up_that_keeps
from moeblaze_ops.ops.low_rank.factors import Factors, beside, down_with_factors, joined, padded, up_operands
from moeblaze_ops.ops.recomputed.expert_mlp import expert_mlp
from moeblaze_ops.ops.recomputed.expert_mlp_chunked import expert_mlp_chunked
from moeblaze_ops.ops.recomputed.expert_mlp_ranged import expert_mlp_ranged
from moeblaze_ops.ops.recomputed.repeated_up import with_repeated_up

LoRA = tuple[Tensor, Tensor, float | Tensor]
"""A low-rank addition to a weight: A, B and the scale of their product."""

Weight = Tensor | Callable[[], Tensor]
"""A weight, or what gives it."""


@not_scriptable
def moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    w_up: Weight,
    w_down: Weight,
    *,
    w_gate: Weight | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    b_gate: Tensor | None = None,
    activation: str | Callable[..., Tensor] = "swiglu",
    interleaved: bool = False,
    transposed: bool = False,
    weight_on: str = "output",
    activation_parameters: Sequence[Tensor] = (),
    keep: str | None = None,
    lora_up: LoRA | Sequence[LoRA] | None = None,
    lora_down: LoRA | Sequence[LoRA] | None = None,
    lora_gate: LoRA | Sequence[LoRA] | None = None,
) -> Tensor:
    """Each token's experts applied to it, weighted and summed; no token is dropped and none is padded.

    ``out[t] = sum_k weights[t, k] * expert_{experts[t, k]}(x[t])`` with
    ``expert_e(x) = act(x @ w_gate[e]^T + b_gate[e], x @ w_up[e]^T + b_up[e]) @ w_down[e]^T + b_down[e]``.

    Args:
        x: tokens. Shape [..., D], bf16, fp16, fp32, or fp64 on CPU. May be empty.
        weights: routing weights. Shape [..., K], fp32 or the dtype of x.
        experts: expert ids. Shape [..., K], int32 or int64; -1 marks an unused slot. Other ids outside [0, E) raise on a CPU.
            On CUDA, where the host would have to wait for the device, and in chunks of tokens they count as unused slots
            unless ``config.check_expert_ids`` is set.
        w_up: up weights as ``nn.Linear`` stores them, [E, F, D]; with a gated activation and no ``w_gate``
            gate and up packed in one, [E, 2F, D].
        w_down: down weights, [E, D, F].
            Each of the weights may be a function without arguments that gives it, such as ``lambda: unpack(codes, scales)`` of
            quantised weights or a module: it is called in forward, and again in backward, where the weight is needed, and
            nothing of the weight is kept in between. It has to give the same every time. Gradients reach what it reads.
        w_gate: gate weights [E, F, D], if not packed into ``w_up``.
        b_up, b_gate, b_down: biases, [E, F] (packed [E, 2F]), [E, F] and [E, D].
        activation: a gated (``swiglu``, ``geglu``, ``geglu_tanh``, ``reglu``, ``swiglu_clamped``,
            ``swiglu_limited``) or an ungated one (``silu``, ``gelu``, ``gelu_tanh``, ``relu``, ``relu2``); a formula of ``g``
            and ``u``, or of ``h``, such as ``"g * sigmoid(1.702 * g) * (u + 1)"``; or a function of (gate, up), or of h,
            which is called once to see its formula. The kernels compute any of them in their epilogues, in fp32.
        activation_parameters: up to 4 tensors that the formula reads as ``p0``, ``p1`` and so on, or a function as its last
            arguments: of one element, or of shape [E], one for each expert; any floating-point dtype. Differentiable.
            ``activation=lambda g, u, beta: g * torch.sigmoid(beta * g) * u, activation_parameters=[beta]``.
        interleaved: packed gate and up alternate row by row instead of standing one after the other.
        transposed: the weights are stored the other way round: up [E, D, F] or [E, D, 2F], down [E, F, D].
        weight_on: ``"output"`` multiplies an expert's output (usual), ``"input"`` its input (Llama 4).
        keep: what backward finds in memory, besides x, the weights and the routing. ``"preactivation"``: what the
            activation is applied to, [T*K, F] or [T*K, 2F] numbers. ``"h8"``: the same in 8 bits, for a larger error of the
            gradients; the output is the same. ``"input"``: nothing more; backward repeats the
            up projection (and nothing else), and a layer that would allocate more than
            ``config.max_layer_transient_bytes`` goes through ranges of rows in backward, or through chunks of tokens:
            only x, the output and their gradients grow with T then. ``"auto"``: ``"preactivation"`` or ``"input"``, the first
            that fits the memory that is free, see ``memory.choose_keep``. None: ``config.keep``. Without gradients nothing is
            kept, and chunks are taken where they are with ``"input"``. A layer with low-rank additions or an activation's
            parameters is taken as a whole in any case; with ``"input"`` it keeps the r numbers of each addition and row besides.
        lora_up, lora_down: low-rank additions ``(A, B, scale)`` that make the weights ``W + scale * B @ A`` (LoRA).
            Whatever ``transposed`` says, A is [E, r, D] and B [E, F, r] for up (packed [E, 2F, r], in the order of
            ``w_up``), [E, r, F] and [E, D, r] for down; any rank r, any strides, the dtype of x or fp32. The scale is a
            number, or one for each expert [E]. They are r more columns of the products with W, in the same sum: nothing of
            the size of W is written, and weights that need no gradient get none. Several additions to one weight (adapters that
            are active together) are a list of such tuples, each with a rank and a scale of its own.
        lora_gate: the same for ``w_gate``.

    Returns:
        Shape and dtype of x. Sums in fp32 (fp64 for fp64); two runs agree bit for bit, and so do, on CPU, the output
        and, but for ``"h8"``, every gradient under the values of ``keep``, as long as the layer is taken as a whole. Chunks of
        tokens change the order of the sums that are weight gradients, in fp32 and rounded once. Ranges of rows round where they
        meet: gradients of x once for each range that a token's experts are in, and those of the experts that are cut.

    Raises:
        ValueError, TypeError: an argument breaks one of these rules; the message names it, the rule and the value.
    """
    made: dict[str, Any] = {"w_up": w_up, "w_down": w_down, "w_gate": w_gate}
    if any(is_maker(weight) for weight in made.values()):
        options: dict[str, Any] = {"activation": activation, "interleaved": interleaved, "transposed": transposed}
        options |= {"weight_on": weight_on, "b_up": b_up, "b_down": b_down, "b_gate": b_gate, "keep": keep}
        options |= {"lora_up": lora_up, "lora_down": lora_down, "lora_gate": lora_gate}
        options |= {"activation_parameters": activation_parameters}
        return with_made_weights(lambda **given: moe(x, weights, experts, **given, **options), "moe", made, x)
    w_up, w_down, w_gate = cast("Tensor", w_up), cast("Tensor", w_down), cast("Tensor | None", w_gate)
    keep = config.keep if keep is None else keep
    formula: str = resolved_activation("moe", activation, len(activation_parameters), getattr(x, "dtype", None))
    biases = {"b_up": b_up, "b_gate": b_gate, "b_down": b_down}
    given = {name: _adapters(lora) for name, lora in (("lora_up", lora_up), ("lora_gate", lora_gate), ("lora_down", lora_down))}
    stored = (w_up, w_down, w_gate, biases, given)
    once(_check, x, weights, experts, stored, formula, activation_parameters, interleaved, transposed, weight_on, keep)
    w_up_list, b_up_list = _up_storage(w_up, w_gate, b_up, b_gate, formula, interleaved, transposed)
    w_down_list = [storage.down(w_down, transposed=transposed)]
    b_down_list = [] if b_down is None else [b_down]

    # Autograd adds up gradients of x in place unless they are views: 2-d tokens stay what they are.
    x_TD = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    weights_TK = weights.reshape(-1, weights.shape[-1])
    experts_TK, num_experts = experts.reshape(-1, experts.shape[-1]), w_down.shape[0]
    parameters, settings = (w_up_list, b_up_list, w_down_list, b_down_list), (formula, weight_on == "input")
    has_lora = any(given.values())
    params_EP = stacked_parameters(activation_parameters, w_down.shape[0], x.dtype)
    learns = torch.is_grad_enabled()
    keep = _resolved(keep, x_TD, weights_TK, w_up_list) if learns else "input"
    if keep == "input" and not (has_lora or activation_parameters):
        return _in_parts(x_TD, parameters, weights_TK, experts_TK, num_experts, settings).view(x.shape)
    routing = call(dispatch, experts_TK, num_experts, True)
    on_input, on_output = (weights_TK, None) if weight_on == "input" else (None, weights_TK)
    up_factors = _up_factors(x, given["lora_gate"], given["lora_up"], w_gate is not None, formula, interleaved)
    down_factors = None
    if given["lora_down"]:
        a_ERF, b_EDR = padded(*joined(given["lora_down"], x.dtype))
        down_factors = a_ERF, b_EDR.transpose(1, 2)
    operands = up_operands(x_TD, w_up_list, b_up_list, on_input, routing, formula, up_factors, params_EP)

    def down(h_NGF: Tensor, a_NF: Tensor, h8_NGB: Tensor | None = None) -> Tensor:
        given = (w_down_list, b_down_list, on_output, routing, formula, down_factors, params_EP)
        return down_with_factors(h_NGF, a_NF, *given, h8_NGB)

    if learns and keep == "input":
        return with_repeated_up(operands, down).view(x.shape)
    return down(*call(up_that_keeps(keep, formula), *operands)).view(x.shape)


def _check(x: Tensor, weights: Tensor, experts: Tensor, stored: tuple, formula: str, *others: Any) -> None:
    """What ``moe`` is called with; ``stored`` are the weights, and by name the biases and the low-rank additions."""
    w_up, w_down, w_gate, biases, loras = stored
    activation_parameters, interleaved, transposed, *keywords = others
    check_moe(x, weights, experts, w_up, w_down, w_gate, biases, formula, interleaved, transposed, *keywords)
    check_lora(x, loras, w_up, w_gate, w_down, transposed)
    check_activation_parameters(activation_parameters, formula, x, w_down.shape[0])


def _adapters(lora: LoRA | Sequence[LoRA] | None) -> Sequence[LoRA]:
    """The low-rank additions to one weight, of which one may stand for a list of one."""
    if lora is None:
        return []
    several = isinstance(lora, tuple | list) and all(isinstance(own, tuple | list) for own in lora)
    return cast("Sequence[LoRA]", lora if several else [lora])


def _up_factors(
    x: Tensor, of_gate: Sequence[LoRA], of_up: Sequence[LoRA], apart: bool, activation: str, interleaved: bool
) -> Factors | None:
    """The low-rank addition to the up weights as the ops take it."""
    if not of_gate and not of_up:
        return None
    gate, up = (joined(adapters, x.dtype) if adapters else None for adapters in (of_gate, of_up))
    if apart:
        return padded(*beside(gate, up))
    a_ERD, b_EOR = up
    return padded(a_ERD, storage.packed_up(b_EOR, gated=is_gated(activation), interleaved=interleaved, transposed=False))


def _resolved(keep: str, x_TD: Tensor, weights_TK: Tensor, w_up: list[Tensor]) -> str:
    if keep != "auto":
        return keep
    E, G, F, D = up_shape(w_up)
    sizes = LayerSizes(D=D, F=F, E=E, K=weights_TK.shape[1], dtype=x_TD.dtype, gated=G == 2)
    return choose_keep(x_TD.shape[0], sizes, x_TD.device, compiled=torch.compiler.is_compiling())


def _in_parts(
    x_TD: Tensor,
    parameters: tuple[list[Tensor], ...],
    weights_TK: Tensor,
    experts_TK: Tensor,
    num_experts: int,
    settings: tuple[str, bool],
) -> Tensor:
    """The layer in one op that keeps x, which goes in parts where it would allocate more than the limit."""
    _, G, F, D = up_shape(parameters[0])
    T, K = x_TD.shape[0], weights_TK.shape[1]
    parts, size = choose_parts(T, D, F, num_experts, K, x_TD.dtype, G == 2, x_TD.device)
    if parts == "chunks":
        return call(expert_mlp_chunked, x_TD, *parameters, weights_TK, experts_TK, num_experts, size, *settings)
    routed = (x_TD, *parameters, weights_TK, *call(dispatch, experts_TK, num_experts, True), *settings)
    return call(expert_mlp, *routed) if parts == "whole" else call(expert_mlp_ranged, *routed, size)


def _up_storage(
    w_up: Tensor,
    w_gate: Tensor | None,
    b_up: Tensor | None,
    b_gate: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """The stored up weights and biases as the ops take them."""
    gated = is_gated(activation)
    if w_gate is None:
        packed = storage.packed_up(w_up, gated=gated, interleaved=interleaved, transposed=transposed)
        biases = [] if b_up is None else [storage.packed_up(b_up, gated=gated, interleaved=interleaved)]
        return [packed], biases
    split = [storage.packed_up(w, gated=False, interleaved=False, transposed=transposed) for w in (w_gate, w_up)]
    biases = [] if b_up is None else [storage.packed_up(b, gated=False, interleaved=False) for b in (b_gate, b_up)]
    return split, biases
