"""Argument checks shared by the real and the fake implementation of every op.

Each check raises ``<op>: <argument> must <rule>, got <value>``: ``ValueError`` for values, shapes and devices,
``TypeError`` for types and dtypes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moeblaze_ops.arguments.validation_values import ID_DTYPES, check_activation_text, check_float_dtype
from moeblaze_ops.arguments.weight_storage import UpShape, up_shape
from moeblaze_ops.kernels.configs import ROW_BLOCK
from moeblaze_ops.kernels.eight_bits import row_width, without_memory
from moeblaze_ops.kernels.formulas.named import IDENTITY, is_gated, num_parameters

MAX_EXPERTS = 4096


def schedule_rows(num_slots: int, num_experts: int) -> int:
    """Rows B of ``blocks_B2``: an upper bound on the 128-row blocks of all experts, plus the count."""
    return num_slots // ROW_BLOCK + num_experts + 1


def require(condition: bool, op: str, argument: str, rule: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{op}: {argument} must {rule}, got {value}")


def require_dtype(condition: bool, op: str, argument: str, rule: str, value: object) -> None:
    if not condition:
        raise TypeError(f"{op}: {argument} must {rule}, got {value}")


def check_shape(op: str, name: str, tensor: Tensor, expected: list, meaning: str = "") -> None:
    """A tensor of these sizes, of which an error says the ``meaning``."""
    if list(tensor.shape) != expected:
        require(False, op, name, f"have shape {expected}{meaning}", f"shape {shape_of(tensor)}")


def check_dispatch(op: str, experts_TK: Tensor, num_experts: int) -> None:
    require(experts_TK.dim() == 2, op, "experts_TK", "have 2 dimensions [T, K]", f"shape {shape_of(experts_TK)}")
    require_dtype(experts_TK.dtype in ID_DTYPES, op, "experts_TK", "be int32 or int64", experts_TK.dtype)
    require(1 <= num_experts <= MAX_EXPERTS, op, "num_experts", f"be between 1 and {MAX_EXPERTS}", num_experts)
    top_k = experts_TK.shape[1]
    require(top_k >= 1, op, "experts_TK", "have 1 column or more", top_k)


def check_expert_up(
    op: str, x_TD: Tensor, w_up: list[Tensor], b_up: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str,
    u_NR: Tensor | None = None, lora_a_ERD: Tensor | None = None, lora_b_EGFR: Tensor | None = None,
    params_EP: Tensor | None = None,
) -> UpShape:  # fmt: skip
    shape = _check_projection(op, x_TD, w_up, b_up, activation)
    _check_parameters(op, activation, params_EP, shape.E, x_TD)
    check_routing(op, x_TD, shape.E, x_TD.shape[0], slots_N, offsets_E1, positions_TK, blocks_B2)
    check_routing_weights(op, weights_TK, x_TD, positions_TK)
    factors = {"lora_a_ERD": (lora_a_ERD, [shape.E, "R", shape.D]), "lora_b_EGFR": (lora_b_EGFR, [*shape[:3], "R"])}
    _check_low_rank(op, "u_NR", u_NR, slots_N.shape[0], factors, x_TD)
    return shape


def check_expert_up_h8(op: str, *args: Any) -> UpShape:
    """The arguments of ``expert_up``."""
    require(args[8] != IDENTITY, op, "activation", "have h for backward alone", f"{IDENTITY!r}, whose h is read in forward")
    return check_expert_up(op, *args)


def _check_low_rank(
    op: str, name: str, rows: Tensor | None, num_rows: int, factors: dict[str, tuple[Tensor | None, list]], like: Tensor
) -> None:
    """Rows [N, R] of a low-rank addition with its factors and their shapes, in which "R" stands for R; all of them or none."""
    for factor, (tensor, _) in factors.items():
        require((tensor is None) == (rows is None), op, factor, f"be given exactly when {name} is", shape_or_none(tensor))
    if rows is None:
        return
    fits = rows.dim() == 2 and rows.shape[0] == num_rows and rows.shape[1] >= 1
    require(fits, op, name, f"have shape [{num_rows}, R], one row per slot", f"shape {shape_of(rows)}")
    check_like(op, name, rows, like)
    for factor, (tensor, sizes) in factors.items():
        check_shape(op, factor, tensor, [rows.shape[1] if size == "R" else size for size in sizes])
        check_like(op, factor, tensor, like)


def check_expert_rows(op: str, rows_NGF: Tensor, w_EGFC: Tensor, offsets_E1: Tensor, blocks_B2: Tensor) -> None:
    check_float_dtype(op, "rows_NGF", rows_NGF)
    require(rows_NGF.dim() == 3, op, "rows_NGF", "have 3 dimensions [N, G, F]", f"shape {shape_of(rows_NGF)}")
    require(w_EGFC.dim() == 4, op, "w_EGFC", "have 4 dimensions [E, G, F, C]", f"shape {shape_of(w_EGFC)}")
    check_like(op, "w_EGFC", w_EGFC, rows_NGF)
    require(rows_NGF.shape[1] in (1, 2), op, "rows_NGF", "have G of 1 or 2 on axis 1", rows_NGF.shape[1])
    expected = list(rows_NGF.shape[1:])
    require(list(w_EGFC.shape[1:3]) == expected, op, "w_EGFC", f"have G, F = {expected} of rows_NGF", shape_of(w_EGFC))
    for name, tensor in (("offsets_E1", offsets_E1), ("blocks_B2", blocks_B2)):
        require_dtype(tensor.dtype == torch.int32, op, name, "be int32 (from dispatch)", tensor.dtype)
        check_device(op, name, tensor, rows_NGF)
    check_shape(op, "offsets_E1", offsets_E1, [w_EGFC.shape[0] + 1])
    fits = blocks_B2.dim() == 2 and blocks_B2.shape[1] == 2
    require(fits, op, "blocks_B2", "have shape [B, 2] (from dispatch)", shape_of(blocks_B2))


def _check_projection(op: str, x_TD: Tensor, w_up: list[Tensor], b_up: list[Tensor], activation: str) -> UpShape:
    check_float_dtype(op, "x_TD", x_TD)
    require(x_TD.dim() == 2, op, "x_TD", "have 2 dimensions [T, D]", f"shape {shape_of(x_TD)}")
    shape = check_up_weights(op, w_up, b_up, x_TD)
    require(x_TD.shape[1] == shape.D, op, "w_up", f"have last size D={x_TD.shape[1]} of x_TD", shape.D)
    check_activation(op, activation, shape.G)
    return shape


def check_up_weights(op: str, w_up: list[Tensor], b_up: list[Tensor], like: Tensor) -> UpShape:
    require(len(w_up) in (1, 2), op, "w_up", "hold one tensor, or gate and up", f"{len(w_up)} tensors")
    for w in w_up:
        require(w.dim() == 4, op, "w_up", "have 4 dimensions [E, G, F, D]", f"shape {shape_of(w)}")
        check_like(op, "w_up", w, like)
    require(w_up[0].shape[1] in (1, 2), op, "w_up", "have G of 1 or 2 on axis 1", w_up[0].shape[1])
    if len(w_up) == 2:
        for w in w_up:
            require(w.shape[1] == 1, op, "w_up", "have G = 1 when gate and up are two tensors", f"shape {shape_of(w)}")
        gate, up = w_up
        require(gate.shape == up.shape, op, "w_up", f"have equal shapes, gate {shape_of(gate)}", f"up {shape_of(up)}")
    shape = up_shape(w_up)
    require(len(b_up) in (0, len(w_up)), op, "b_up", f"hold as many tensors as w_up ({len(w_up)}) or none", len(b_up))
    for b, w in zip(b_up, w_up, strict=False):
        check_shape(op, "b_up", b, list(w.shape[:3]), " of w_up")
        check_like(op, "b_up", b, like)
    return shape


def check_expert_down(
    op: str, h_NGF: Tensor, a_NF: Tensor | None, w_down: list[Tensor], b_down: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str,
    v_NR: Tensor | None = None, lora_a_ERF: Tensor | None = None, lora_b_ERD: Tensor | None = None,
    params_EP: Tensor | None = None, h8_NGB: Tensor | None = None,
) -> None:  # fmt: skip
    check_float_dtype(op, "h_NGF", h_NGF)
    require(h_NGF.dim() == 3, op, "h_NGF", "have 3 dimensions [N, G, F]", f"shape {shape_of(h_NGF)}")
    N, G, F = h_NGF.shape
    check_activation(op, activation, G)
    require(activation != IDENTITY or G == 1, op, "h_NGF", "have G = 1 with activation 'identity'", f"shape {shape_of(h_NGF)}")
    if a_NF is not None:
        check_shape(op, "a_NF", a_NF, [N, F], " (rows and width of h_NGF)")
        check_like(op, "a_NF", a_NF, h_NGF)
    check_down_weights(op, w_down, b_down, h_NGF)
    require(w_down[0].shape[1] == F, op, "w_down", f"have size F={F} of h_NGF on axis 1", f"shape {shape_of(w_down[0])}")
    T = _num_tokens(op, positions_TK)
    check_routing(op, h_NGF, w_down[0].shape[0], T, slots_N, offsets_E1, positions_TK, blocks_B2)
    require(slots_N.shape[0] == N, op, "h_NGF", f"have {slots_N.shape[0]} rows, one per slot", N)
    check_routing_weights(op, weights_TK, h_NGF, positions_TK)
    E, _, D = w_down[0].shape
    _check_parameters(op, activation, params_EP, E, h_NGF)
    factors = {"lora_a_ERF": (lora_a_ERF, [E, "R", F]), "lora_b_ERD": (lora_b_ERD, [E, "R", D])}
    _check_low_rank(op, "v_NR", v_NR, N, factors, h_NGF)
    if h8_NGB is not None:
        _check_h8(op, "h8_NGB", h8_NGB, [N, G, row_width(F)], h_NGF)


def _check_h8(op: str, name: str, h8_NGB: Tensor, sizes: list, like: Tensor) -> None:
    require_dtype(h8_NGB.dtype == torch.int8, op, name, "be int8 (from expert_up_h8)", h8_NGB.dtype)
    check_shape(op, name, h8_NGB, sizes, " (from expert_up_h8)")
    require(h8_NGB.is_contiguous(), op, name, "be contiguous (from expert_up_h8)", f"strides {list(h8_NGB.stride())}")
    check_device(op, name, h8_NGB, like)


def check_down_weights(op: str, w_down: list[Tensor], b_down: list[Tensor], like: Tensor) -> None:
    require(len(w_down) == 1, op, "w_down", "hold one tensor", f"{len(w_down)} tensors")
    (w,) = w_down
    require(w.dim() == 3, op, "w_down", "have 3 dimensions [E, F, D]", f"shape {shape_of(w)}")
    check_like(op, "w_down", w, like)
    require(len(b_down) <= 1, op, "b_down", "hold one tensor or none", f"{len(b_down)} tensors")
    for b in b_down:
        check_shape(op, "b_down", b, [w.shape[0], w.shape[2]], " ([E, D] of w_down)")
        check_like(op, "b_down", b, like)


def check_expert_mlp(
    op: str, x_TD: Tensor, w_up: list[Tensor], b_up: list[Tensor], w_down: list[Tensor], b_down: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str, weight_on_input: bool,
) -> UpShape:  # fmt: skip
    shape = check_expert_up(op, x_TD, w_up, b_up, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation)
    _check_down_of_mlp(op, shape, x_TD, w_down, b_down, activation)
    return shape


def _check_down_of_mlp(
    op: str, shape: UpShape, x_TD: Tensor, w_down: list[Tensor], b_down: list[Tensor], activation: str
) -> None:
    require(activation != IDENTITY or shape.G == 1, op, "w_up", "have one half with activation 'identity'", f"G={shape.G}")
    check_down_weights(op, w_down, b_down, x_TD)
    expected, given = [shape.E, shape.F], shape_of(w_down[0])
    require(given[:2] == expected, op, "w_down", f"have leading shape {expected} (experts and width of w_up)", f"shape {given}")


def check_expert_mlp_chunked(
    op: str, x_TD: Tensor, w_up: list[Tensor], b_up: list[Tensor], w_down: list[Tensor], b_down: list[Tensor],
    weights_TK: Tensor | None, experts_TK: Tensor, num_experts: int, chunk_tokens: int, activation: str,
    weight_on_input: bool,
) -> UpShape:  # fmt: skip
    shape = _check_projection(op, x_TD, w_up, b_up, activation)
    _check_down_of_mlp(op, shape, x_TD, w_down, b_down, activation)
    require(num_experts == shape.E, op, "num_experts", f"be {shape.E}, the experts of w_up", num_experts)
    _check_parameters(op, activation, None, shape.E, x_TD)
    check_dispatch(op, experts_TK, num_experts)
    check_device(op, "experts_TK", experts_TK, x_TD)
    T, rows = x_TD.shape[0], experts_TK.shape[0]
    require(rows == T, op, "experts_TK", f"have {T} rows, one per token", rows)
    check_routing_weights(op, weights_TK, x_TD, experts_TK, "experts_TK")
    require(chunk_tokens >= 1, op, "chunk_tokens", "be at least 1", chunk_tokens)
    return shape


def check_expert_mlp_chunked_backward(op: str, dout_TD: Tensor, x_TD: Tensor, *rest: Any) -> UpShape:
    """``rest``: the arguments of ``expert_mlp_chunked`` after x."""
    shape = check_expert_mlp_chunked(op, x_TD, *rest)
    _check_dout(op, dout_TD, x_TD, rest[2])
    return shape


def check_expert_mlp_backward(op: str, dout_TD: Tensor, x_TD: Tensor, *rest: Any) -> UpShape:
    """``rest``: the arguments of ``expert_mlp`` after x."""
    shape = check_expert_mlp(op, x_TD, *rest)
    _check_dout(op, dout_TD, x_TD, rest[2])
    return shape


def _check_dout(op: str, dout_TD: Tensor, x_TD: Tensor, w_down: list[Tensor]) -> None:
    check_shape(op, "dout_TD", dout_TD, [x_TD.shape[0], w_down[0].shape[2]])
    check_like(op, "dout_TD", dout_TD, x_TD)


def check_routing(
    op: str, like: Tensor, num_experts: int, num_tokens: int | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
) -> None:  # fmt: skip
    """The four tensors of ``dispatch``: int32, on one device, and of sizes that agree; None: no other argument has all tokens."""
    routing = {"slots_N": slots_N, "offsets_E1": offsets_E1, "positions_TK": positions_TK, "blocks_B2": blocks_B2}
    for name, tensor in routing.items():
        require_dtype(tensor.dtype == torch.int32, op, name, "be int32 (from dispatch)", tensor.dtype)
        check_device(op, name, tensor, like)
    T, K = _num_tokens(op, positions_TK), positions_TK.shape[1]
    if num_tokens is not None:
        require(num_tokens == T, op, "positions_TK", f"have {num_tokens} rows, one per token", T)
    fits = slots_N.dim() == 1 and may_be(slots_N.shape[0] <= T * K)
    require(fits, op, "slots_N", f"have shape [{T * K}] (slots of positions_TK), or [used slots]", shape_of(slots_N))
    check_shape(op, "offsets_E1", offsets_E1, [num_experts + 1], " (experts of the weights, plus one)")
    check_shape(op, "blocks_B2", blocks_B2, [schedule_rows(T * K, num_experts), 2])


def may_be(condition: bool | torch.SymBool) -> bool:
    """A condition on sizes; True where only the data tell."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(condition)


def _num_tokens(op: str, positions_TK: Tensor) -> int:
    require(positions_TK.dim() == 2, op, "positions_TK", "have 2 dimensions [T, K]", f"shape {shape_of(positions_TK)}")
    return positions_TK.shape[0]


def check_needs(op: str, needs: Sequence[bool]) -> None:
    require(len(needs) == 5, op, "needs", "hold 5 flags, for x, w_up, b_up, w_down and b_down", len(needs))


def check_routing_weights(
    op: str, weights_TK: Tensor | None, like: Tensor, choices_TK: Tensor, name: str = "positions_TK"
) -> None:
    """``choices_TK``: what has an entry for every slot, and its ``name``."""
    if weights_TK is None:
        return
    check_shape(op, "weights_TK", weights_TK, shape_of(choices_TK), f" of {name}")
    check_float32_or_like(op, "weights_TK", weights_TK, like)


def check_float32_or_like(op: str, name: str, tensor: Tensor, like: Tensor) -> None:
    allowed = (torch.float32, like.dtype)
    require_dtype(tensor.dtype in allowed, op, name, f"be float32 or {like.dtype}", tensor.dtype)
    check_device(op, name, tensor, like)


def _check_parameters(op: str, activation: str, params_EP: Tensor | None, E: int, like: Tensor) -> None:
    """The parameters that a formula reads: given exactly where it reads some, in the dtype that it is computed in."""
    expected = [E, num_parameters(activation)]
    if params_EP is None:
        require(expected[1] == 0, op, "params_EP", f"have shape {expected}, as {activation!r} reads parameters", "None")
        return
    rule = f"have shape {expected} (those that {activation!r} reads)"
    require(expected[1] > 0 and list(params_EP.shape) == expected, op, "params_EP", rule, f"shape {shape_of(params_EP)}")
    dtype = torch.promote_types(like.dtype, torch.float32)
    require_dtype(params_EP.dtype == dtype, op, "params_EP", f"be {dtype}", params_EP.dtype)
    check_device(op, "params_EP", params_EP, like)


def check_activation(op: str, activation: str, G: int) -> None:
    if activation == IDENTITY:
        return
    check_activation_text(op, activation, f", {IDENTITY}")
    expected = 2 if is_gated(activation) else 1
    require(expected == G, op, "activation", f"be {'gated' if G == 2 else 'ungated'} for G={G} halves", repr(activation))


def check_expert_up_backward(
    op: str, dh_NGF: Tensor, x_TD: Tensor | None, w_up: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    dlogits_TE: Tensor | None = None, w_router_ED: Tensor | None = None, max_bytes: int | None = None,
    du_NR: Tensor | None = None, lora_a_ERD: Tensor | None = None,
) -> UpShape:  # fmt: skip
    shape = check_up_weights(op, w_up, [], dh_NGF)
    T = _num_tokens(op, positions_TK)
    check_routing(op, dh_NGF, shape.E, T, slots_N, offsets_E1, positions_TK, blocks_B2)
    check_shape(op, "dh_NGF", dh_NGF, [slots_N.shape[0], shape.G, shape.F])
    check_routing_weights(op, weights_TK, dh_NGF, positions_TK)
    require((x_TD is None) == (weights_TK is None), op, "x_TD", "be given exactly when weights_TK is", x_TD)
    if x_TD is not None:
        check_shape(op, "x_TD", x_TD, [T, shape.D])
        check_like(op, "x_TD", x_TD, dh_NGF)
    require((dlogits_TE is None) == (w_router_ED is None), op, "dlogits_TE", "be given exactly when w_router_ED is", dlogits_TE)
    if dlogits_TE is not None:
        fits = dlogits_TE.dim() == 2 and dlogits_TE.shape[0] == T
        require(fits, op, "dlogits_TE", f"have {T} rows", f"shape {shape_of(dlogits_TE)}")
        expected, given = [dlogits_TE.shape[1], shape.D], shape_of(w_router_ED)
        rule = f"have shape {expected}, or fewer rows that divide these"
        require(_divides(expected, given), op, "w_router_ED", rule, f"shape {given}")
        check_like(op, "dlogits_TE", dlogits_TE, dh_NGF)
        check_like(op, "w_router_ED", w_router_ED, dh_NGF)
    require(max_bytes is None or max_bytes >= 1, op, "max_bytes", "be at least 1", max_bytes)
    _check_low_rank(op, "du_NR", du_NR, slots_N.shape[0], {"lora_a_ERD": (lora_a_ERD, [shape.E, "R", shape.D])}, dh_NGF)
    return shape


def _divides(expected: list, given: list) -> bool:
    """True if a router's weight is as ``expected``, or has the rows of one of several gradients side by side."""
    if given == expected:
        return True
    numbers = [*expected[:1], *given[:1]]
    sizes_are_known = len(given) == 2 and all(isinstance(number, int) and number > 0 for number in numbers)
    return sizes_are_known and given[1] == expected[1] and expected[0] % given[0] == 0


def check_expert_down_backward(
    op: str, dout_TD: Tensor, h_NGF: Tensor, w_down: list[Tensor], b_down: list[Tensor], weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str,
    q_NR: Tensor | None = None, lora_a_ERF: Tensor | None = None,
    params_EP: Tensor | None = None,
) -> None:  # fmt: skip
    if h_NGF.dtype == torch.int8:
        check_down_weights(op, w_down, b_down, dout_TD)
        leading, F = h_NGF.shape[:2], w_down[0].shape[1]
        _check_h8(op, "h_NGF", h_NGF, [*leading, row_width(F)], dout_TD)
        h_NGF = without_memory(dout_TD, (*leading, F))
    given = (h_NGF, None, w_down, b_down, weights_TK, slots_N, offsets_E1, positions_TK, blocks_B2, activation)
    check_expert_down(op, *given, params_EP=params_EP)
    check_shape(op, "dout_TD", dout_TD, [positions_TK.shape[0], w_down[0].shape[2]])
    check_like(op, "dout_TD", dout_TD, h_NGF)
    E, F, _ = w_down[0].shape
    _check_low_rank(op, "q_NR", q_NR, slots_N.shape[0], {"lora_a_ERF": (lora_a_ERF, [E, "R", F])}, h_NGF)


def check_like(op: str, name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.dtype != like.dtype:
        require_dtype(False, op, name, f"have the activations' dtype {like.dtype}", tensor.dtype)
    check_device(op, name, tensor, like)


def check_device(op: str, name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        require(False, op, name, f"be on {like.device} like the activations", tensor.device)


def shape_of(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def shape_or_none(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"shape {shape_of(tensor)}"
