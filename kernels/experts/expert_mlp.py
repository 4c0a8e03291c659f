"""Both projections of every routed slot, without a pre-activation that outlives them.

Forward stores the activation ``a`` and never ``h``; backward computes ``h`` once more and writes its gradient over it:

    forward     a = act(s * x[t] @ w_up^T + b_up)       out[t] = sum_k v[t, k] * (a[positions[t, k]] @ w_down + b_down)
    backward    h = s * x[t] @ w_up^T + b_up            dh, dweights, wa as ``expert_down_backward`` has them

with the routing weight as ``s`` or as ``v`` and 1 for the other. The kernels are those of ``expert_up``, ``expert_down``
and ``expert_down_backward``.
"""

from typing import Any

from torch import Tensor

from moeblaze_ops.kernels.experts.expert_down import launch_expert_down
from moeblaze_ops.kernels.experts.expert_down_backward import launch_expert_down_backward
from moeblaze_ops.kernels.experts.expert_up import launch_expert_up
from moeblaze_ops.kernels.tracing import is_traceable

_IDENTITY = "identity"


def launch_expert_mlp(
    x_TD: Tensor, w_up: list[Tensor], b_up: list[Tensor], w_down: list[Tensor], b_down: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str, weight_on_input: bool, max_bytes: int | None = None,
) -> Tensor:  # fmt: skip
    """``expert_mlp`` on CUDA; ``max_bytes`` of the rows that are summed, as for ``row_chunks``."""
    routing = (slots_N, offsets_E1, positions_TK, blocks_B2)
    on_input, on_output = _sides(weights_TK, weight_on_input)
    h_NGF, a_NF = launch_expert_up(x_TD, w_up, b_up, on_input, *routing, activation, store_h=activation == _IDENTITY)
    return launch_expert_down(h_NGF, a_NF, w_down, b_down, on_output, *routing, activation, max_bytes=max_bytes)


def launch_expert_mlp_backward(
    dout_TD: Tensor, x_TD: Tensor, w_up: list[Tensor], b_up: list[Tensor], w_down: list[Tensor], b_down: list[Tensor],
    weights_TK: Tensor | None,
    slots_N: Tensor, offsets_E1: Tensor, positions_TK: Tensor, blocks_B2: Tensor,
    activation: str, weight_on_input: bool, dweights_TK: Tensor | None = None, first_row: int = 0,
    dh_NGF: Tensor | None = None, wa_NF: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``expert_mlp_backward`` on CUDA.

    Args:
        dweights_TK, first_row: for a range of rows, as for ``launch_expert_down_backward``.
        dh_NGF, wa_NF: written in place of new tensors, contiguous.
        Others: those of the op.
    """
    routing = (slots_N, offsets_E1, positions_TK, blocks_B2)
    on_input, on_output = _sides(weights_TK, weight_on_input)
    # The epilogue of the next kernel activates h: only h is wanted here.
    h_NGF, _ = launch_expert_up(x_TD, w_up, b_up, on_input, *routing, _IDENTITY, h_NGF=dh_NGF)
    # In a graph that is traced other kernels may come between these two.
    early = not is_traceable()
    into: dict[str, Any] = {"overwrite_h": True, "dweights_TK": dweights_TK, "first_row": first_row}
    into |= {"wa_NF": wa_NF, "early": early}
    return launch_expert_down_backward(dout_TD, h_NGF, w_down, b_down, on_output, *routing, activation, **into)


def _sides(weights_TK, weight_on_input):
    """The routing weights on the experts' input, and on their output."""
    return (weights_TK, None) if weight_on_input else (None, weights_TK)
