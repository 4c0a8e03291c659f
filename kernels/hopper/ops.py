"""The Hopper kernels as custom ops that write into tensors they are given.

Inductor can inline a Triton kernel but not a Gluon one. A launcher that runs under a trace leaves calls of these ops
in the graph instead, on buffers that Inductor allocates and plans; eager launchers go past the dispatcher. Biases are
optional because AOTInductor hands over None for an empty list.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from moeblaze_ops.kernels.tracing import is_traceable

NAMESPACE = "moeblaze_hopper"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _register(schema: str, function: Callable[..., None]) -> Callable[..., None]:
    """Define the op that does what ``function`` does, and return what a launcher calls."""
    name = schema.split("(", 1)[0]

    def run(*args) -> None:
        _repeated(function)(*args)

    # Inductor must hand the kernels the strides that `select` has seen.
    _library.define(schema, tags=(torch.Tag.needs_exact_strides,))
    _library.impl(name, run, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args: None, lib=_library)
    op = getattr(torch.ops.moeblaze_hopper, name).default
    op.implementation = run  # what generated Python code calls

    def call(*args) -> None:
        (op if is_traceable() else run)(*args)

    return call


@cache
def _repeated(function: Callable[..., None]) -> Callable[..., None]:
    """Whoever has no GPU imports this file, and may have no Triton."""
    from moeblaze_ops.kernels.repeated import Repeated

    return Repeated(function)


def _expert_up(x_TD, w_up, b_up, slots_N, offsets_E1, blocks_B2, top_k, activation, h_NGF, a_NF, *optional) -> None:
    from moeblaze_ops.kernels.hopper.expert_up import hopper_expert_up

    written = (h_NGF, a_NF)
    hopper_expert_up(x_TD, w_up, b_up or [], slots_N, offsets_E1, blocks_B2, top_k, activation, *written, *optional)


def _down_rows(a_NF, w_down, b_down, offsets_E1, blocks_B2, y_ND, slots_N, weights_TK, v_NR, lora_b_ERD) -> None:
    from moeblaze_ops.kernels.hopper.row_gemm import hopper_down_rows

    hopper_down_rows(a_NF, w_down, b_down or [], offsets_E1, blocks_B2, y_ND, slots_N, weights_TK, v_NR, lora_b_ERD)


def _up_backward_rows(dh_NGF, w_up, offsets_E1, blocks_B2, dx_ND, slots_N, left_TC, right_CD, early, du_NR, lora_a_ERD) -> None:
    from moeblaze_ops.kernels.hopper.row_gemm import hopper_up_backward_rows

    added = (left_TC, right_CD, early, du_NR, lora_a_ERD)
    hopper_up_backward_rows(dh_NGF, w_up, offsets_E1, blocks_B2, dx_ND, slots_N, *added)


def _down_backward(
    dout_TD,
    h_NGF,
    w_down,
    weights_TK,
    slots_N,
    offsets_E1,
    blocks_B2,
    top_k,
    activation,
    dh_NGF,
    partials_CN,
    wa_NF,
    early,
    *optional,
) -> None:
    from moeblaze_ops.kernels.hopper.expert_down_backward import hopper_down_backward

    routing = (slots_N, offsets_E1, blocks_B2)
    written = (dh_NGF, partials_CN, wa_NF)
    hopper_down_backward(dout_TD, h_NGF, w_down, weights_TK, *routing, top_k, activation, *written, early, *optional)


def _weight_grad(
    gathered_TD: Tensor,
    grouped_NGF: Tensor,
    slots_N: Tensor,
    offsets_E1: Tensor,
    top_k: int,
    accumulate: bool,
    first: Tensor,
    second: Tensor | None,
    fresh_E: Tensor | None,
    order_E1: Tensor | None,
    early: bool,
) -> None:
    from moeblaze_ops.kernels.hopper.weight_grad import hopper_weight_grad

    gradients = [first] if second is None else [first, second]
    routing, marks = (slots_N, offsets_E1, top_k), (fresh_E, order_E1)
    hopper_weight_grad(gathered_TD, grouped_NGF, gradients, *routing, accumulate, *marks, early)


expert_up = _register(
    "expert_up(Tensor x_TD, Tensor[] w_up, Tensor[]? b_up, Tensor slots_N, Tensor offsets_E1, Tensor blocks_B2,"
    " int top_k, str activation, Tensor(a!) h_NGF, Tensor(b!) a_NF, Tensor? u_NR, Tensor? lora_b_EGFR,"
    " Tensor? params_EP, Tensor? begins_E) -> ()",
    _expert_up,
)
down_rows = _register(
    "down_rows(Tensor a_NF, Tensor[] w_down, Tensor[]? b_down, Tensor offsets_E1, Tensor blocks_B2, Tensor(a!) y_ND,"
    " Tensor? slots_N, Tensor? weights_TK, Tensor? v_NR, Tensor? lora_b_ERD) -> ()",
    _down_rows,
)
up_backward_rows = _register(
    "up_backward_rows(Tensor dh_NGF, Tensor[] w_up, Tensor offsets_E1, Tensor blocks_B2, Tensor(a!) dx_ND,"
    " Tensor? slots_N, Tensor? left_TC, Tensor? right_CD, bool early, Tensor? du_NR, Tensor? lora_a_ERD) -> ()",
    _up_backward_rows,
)
down_backward = _register(
    "down_backward(Tensor dout_TD, Tensor h_NGF, Tensor[] w_down, Tensor? weights_TK, Tensor slots_N, Tensor offsets_E1,"
    " Tensor blocks_B2, int top_k, str activation, Tensor(a!) dh_NGF, Tensor(b!) partials_CN, Tensor(c!) wa_NF,"
    " bool early, Tensor? q_NR, Tensor? lora_a_ERF, Tensor? params_EP, Tensor(d!)? shares_PCN) -> ()",
    _down_backward,
)
weight_grad = _register(
    "weight_grad(Tensor gathered_TD, Tensor grouped_NGF, Tensor slots_N, Tensor offsets_E1, int top_k,"
    " bool accumulate, Tensor(a!) first, Tensor(b!)? second, Tensor? fresh_E, Tensor? order_E1, bool early) -> ()",
    _weight_grad,
)
