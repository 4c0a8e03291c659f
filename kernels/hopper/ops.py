"""The Hopper kernels as custom ops that write into tensors they are given.

Inductor can inline a Triton kernel but not a Gluon one. A launcher that runs under a trace leaves calls of these ops
in the graph instead, on buffers that Inductor allocates and plans; eager launchers go past the dispatcher. Biases are
optional because AOTInductor hands over None for an empty list.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch

from moeblaze_ops.kernels.tracing import is_traceable

NAMESPACE = "moeblaze_hopper"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _register(schema: str, launcher: str) -> Callable[..., None]:
    """Define the op that does what a launcher, ``module:function`` of this folder, does, and return what other launchers call."""
    name = schema.split("(", 1)[0]

    def run(*args) -> None:
        _repeated(launcher)(*args)

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
def _repeated(launcher: str) -> Callable[..., None]:
    """Whoever has no GPU imports this file, and may have no Triton."""
    from moeblaze_ops.kernels.repeated import Repeated

    module, _, name = launcher.partition(":")
    return Repeated(getattr(import_module(f"moeblaze_ops.kernels.hopper.{module}"), name))


expert_up = _register(
    "expert_up(Tensor x_TD, Tensor[] w_up, Tensor[]? b_up, Tensor slots_N, Tensor offsets_E1, Tensor blocks_B2,"
    " int top_k, str activation, Tensor(a!) h_NGF, Tensor(b!) a_NF, Tensor? u_NR, Tensor? lora_b_EGFR,"
    " Tensor? params_EP, Tensor? begins_E) -> ()",
    "expert_up:hopper_expert_up",
)
down_rows = _register(
    "down_rows(Tensor a_NF, Tensor[] w_down, Tensor[]? b_down, Tensor offsets_E1, Tensor blocks_B2, Tensor(a!) y_ND,"
    " Tensor? slots_N, Tensor? weights_TK, Tensor? v_NR, Tensor? lora_b_ERD) -> ()",
    "row_gemm:hopper_down_rows",
)
up_backward_rows = _register(
    "up_backward_rows(Tensor dh_NGF, Tensor[] w_up, Tensor offsets_E1, Tensor blocks_B2, Tensor(a!) dx_ND,"
    " Tensor? slots_N, Tensor? left_TC, Tensor? right_CD, bool early, Tensor? du_NR, Tensor? lora_a_ERD) -> ()",
    "row_gemm:hopper_up_backward_rows",
)
down_backward = _register(
    "down_backward(Tensor dout_TD, Tensor h_NGF, Tensor[] w_down, Tensor? weights_TK, Tensor slots_N, Tensor offsets_E1,"
    " Tensor blocks_B2, int top_k, str activation, Tensor(a!) dh_NGF, Tensor(b!) partials_CN, Tensor(c!) wa_NF,"
    " bool early, Tensor? q_NR, Tensor? lora_a_ERF, Tensor? params_EP, Tensor(d!)? shares_PCN) -> ()",
    "expert_down_backward:hopper_down_backward",
)
weight_grad = _register(
    "weight_grad(Tensor gathered_TD, Tensor grouped_NGF, Tensor slots_N, Tensor offsets_E1, int top_k,"
    " bool accumulate, Tensor(a!) first, Tensor(b!)? second, Tensor? fresh_E, Tensor? order_E1, bool early) -> ()",
    "weight_grad:weight_grad_of_parts",
)
