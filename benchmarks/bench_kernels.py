"""Times every Hopper kernel against ``torch.bmm`` of the same GEMM at perfectly balanced load, on one GPU.

    python benchmarks/bench_kernels.py --shapes fine,wide --kernels up,dA --json results.json

The bound knows no routing, gather, activation or tail: a ratio of 1 says that all of those were free. Every
kernel is checked first, with its outputs full of NaN, against fp32 products of a few experts. A kernel and its bound run
in turns, after a second of load; times are medians of CUDA event times.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench_layer import SHAPES, Shape
from environment import command_line, save
from measuring import interleaved_medians, load_device, relative_error
from moeblaze_ops.kernels.configs import ROW_BLOCK
from moeblaze_ops.kernels.hopper.configs import num_partials
from moeblaze_ops.kernels.hopper.expert_down_backward import hopper_down_backward
from moeblaze_ops.kernels.hopper.expert_up import hopper_expert_up
from moeblaze_ops.kernels.hopper.row_gemm import hopper_down_rows, hopper_up_backward_rows
from moeblaze_ops.kernels.hopper.weight_grad import hopper_weight_grad

VARIANTS = {"d_inner": False, "f_inner": True}
"""Storage of every weight: [E, F, D], or [E, D, F] as a transposed view."""

ACTIVATION = "swiglu"
TOLERANCE = 1e-2
"""Relative error of bf16 results; a wrong row or a dropped step is far above."""


@dataclass(frozen=True)
class Routing:
    slots_N: Tensor
    offsets_E1: Tensor
    blocks_B2: Tensor
    tokens_N: Tensor


@dataclass(frozen=True)
class Case:
    """A kernel on one problem: what runs, what it writes, its error on expert e, and the GEMM that bounds it."""

    run: Callable[[], None]
    outputs: tuple[Tensor, ...]
    error: Callable[[int, slice], float]
    bound: Callable[[], Tensor]
    flops: int


def make_routing(num_tokens: int, num_experts: int, top_k: int, skew: float) -> Routing:
    """Random routing; ``skew`` is the spread of the experts' logits against a token's own."""
    logits = torch.randn(num_tokens, num_experts, device="cuda") + skew * torch.randn(num_experts, device="cuda")
    experts_N = logits.topk(top_k, dim=-1).indices.flatten()
    slots_N = torch.argsort(experts_N, stable=True).int()
    counts_E = torch.bincount(experts_N, minlength=num_experts)
    offsets_E1 = F.pad(counts_E.cumsum(0), (1, 0)).int()
    num_blocks_E = (counts_E + ROW_BLOCK - 1) // ROW_BLOCK
    expert_B = torch.repeat_interleave(torch.arange(num_experts, device="cuda"), num_blocks_E)
    first_block_E = num_blocks_E.cumsum(0) - num_blocks_E
    first_B = offsets_E1[expert_B] + (torch.arange(len(expert_B), device="cuda") - first_block_E[expert_B]) * ROW_BLOCK
    blocks_B2 = torch.full((len(slots_N) // ROW_BLOCK + num_experts + 1, 2), -1, dtype=torch.int32, device="cuda")
    blocks_B2[0, 0] = len(expert_B)
    blocks_B2[1 : 1 + len(expert_B)] = torch.stack([expert_B, first_B], 1).int()
    return Routing(slots_N, offsets_E1, blocks_B2, slots_N.long() // top_k)


def random(*shape: int, scale: float) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def random_weight(num_experts: int, parts: int, num_f: int, num_d: int, f_inner: bool) -> Tensor:
    """Shape [E, parts, F, D]; the storage is [E, D, parts, F] when ``f_inner``."""
    if f_inner:
        return random(num_experts, num_d, parts, num_f, scale=0.03).permute(0, 2, 3, 1)
    return random(num_experts, parts, num_f, num_d, scale=0.03)


def make_cases(shape: Shape, f_inner: bool, skew: float) -> tuple[dict[str, Case], Routing]:
    """The six GEMMs of a SwiGLU layer on one problem."""
    num_tokens, num_d, num_f, num_experts, top_k = shape.T, shape.D, shape.F, shape.E, shape.K
    num_rows = num_tokens * top_k
    torch.manual_seed(0)
    routing = make_routing(num_tokens, num_experts, top_k, skew)
    tokens = routing.tokens_N
    x_TD, dout_TD = random(num_tokens, num_d, scale=0.5), random(num_tokens, num_d, scale=0.5)
    h_NGF, dh_NGF = random(num_rows, 2, num_f, scale=0.5), random(num_rows, 2, num_f, scale=0.5)
    a_NF = random(num_rows, num_f, scale=0.5)
    weights_TK = torch.rand(num_tokens, top_k, device="cuda")
    weights_N1 = weights_TK.flatten()[routing.slots_N.long()][:, None]
    w_up = random_weight(num_experts, 2, num_f, num_d, f_inner)
    w_down = random_weight(num_experts, 1, num_f, num_d, f_inner)[:, 0]
    dw_up, dw_down = torch.empty_like(w_up), torch.empty_like(w_down)
    y_ND = torch.empty(num_rows, num_d, device="cuda", dtype=torch.bfloat16)
    h_out, a_out, dh_out, wa_out = map(torch.empty_like, (h_NGF, a_NF, h_NGF, a_NF))
    partials_CN = torch.empty(num_partials(num_f, num_d), num_rows, device="cuda")
    table = routing.offsets_E1, routing.blocks_B2

    def up_error(e: int, r: slice) -> float:
        h = torch.einsum("rd,gfd->rgf", x_TD[tokens[r]].float(), w_up[e].float())
        a = F.silu(h_out[r, 0].float()) * h_out[r, 1].float()
        return max(relative_error(h_out[r], h), relative_error(a_out[r], a))

    def da_error(e: int, r: slice) -> float:
        da = dout_TD[tokens[r]].float() @ w_down[e].float().T
        h = h_NGF[r].float().requires_grad_()
        a = F.silu(h[:, 0]) * h[:, 1]
        (dh,) = torch.autograd.grad(a, h, da * weights_N1[r])
        return max(
            relative_error(dh_out[r], dh),
            relative_error(wa_out[r], a.detach() * weights_N1[r]),
            relative_error(partials_CN[:, r].sum(0), (da * a.detach()).sum(1)),
        )

    rows_E = num_rows // num_experts
    balanced_D, balanced_F = (random(num_experts, rows_E, width, scale=0.5) for width in (num_d, num_f))
    balanced_GF = random(num_experts, rows_E, 2 * num_f, scale=0.5)
    up_matrix = random(num_experts, 2 * num_f, num_d, scale=0.03)
    down_matrix = random(num_experts, num_d, num_f, scale=0.03)
    flops = 2 * num_rows * num_d * num_f
    cases = {
        "up": Case(
            lambda: hopper_expert_up(x_TD, [w_up], [], routing.slots_N, *table, top_k, ACTIVATION, h_out, a_out),
            (h_out, a_out),
            up_error,
            lambda: torch.bmm(balanced_D, up_matrix.transpose(1, 2)),
            2 * flops,
        ),
        "down": Case(
            lambda: hopper_down_rows(a_NF, [w_down], [], *table, y_ND),
            (y_ND,),
            lambda e, r: relative_error(y_ND[r], a_NF[r].float() @ w_down[e].float()),
            lambda: torch.bmm(balanced_F, down_matrix.transpose(1, 2)),
            flops,
        ),
        "dA": Case(
            lambda: hopper_down_backward(
                dout_TD, h_NGF, [w_down], weights_TK, routing.slots_N, *table, top_k, ACTIVATION, dh_out, partials_CN, wa_out
            ),
            (dh_out, partials_CN, wa_out),
            da_error,
            lambda: torch.bmm(balanced_D, down_matrix),
            flops,
        ),
        "dX": Case(
            lambda: hopper_up_backward_rows(dh_NGF, [w_up], *table, y_ND),
            (y_ND,),
            lambda e, r: relative_error(y_ND[r], dh_NGF[r].float().flatten(1) @ w_up[e].float().flatten(0, 1)),
            lambda: torch.bmm(balanced_GF, up_matrix),
            2 * flops,
        ),
        "dW1": Case(
            lambda: hopper_weight_grad(x_TD, dh_NGF, [dw_up], routing.slots_N, routing.offsets_E1, top_k),
            (dw_up,),
            lambda e, r: relative_error(dw_up[e], torch.einsum("rgf,rd->gfd", dh_NGF[r].float(), x_TD[tokens[r]].float())),
            lambda: torch.bmm(balanced_GF.transpose(1, 2), balanced_D),
            2 * flops,
        ),
        "dW2": Case(
            lambda: hopper_weight_grad(dout_TD, a_NF.unsqueeze(1), [dw_down], routing.slots_N, routing.offsets_E1, top_k),
            (dw_down,),
            lambda e, r: relative_error(dw_down[e], a_NF[r].float().T @ dout_TD[tokens[r]].float()),
            lambda: torch.bmm(balanced_D.transpose(1, 2), balanced_F),
            flops,
        ),
    }
    return cases, routing


def worst_error(case: Case, routing: Routing) -> float:
    """Largest relative error over a few experts; infinite when an element was not written, or two runs differ."""
    results = []
    for _ in range(2):
        for output in case.outputs:
            output.fill_(float("nan"))
        case.run()
        results.append([output.clone() for output in case.outputs])
    if not all(torch.equal(first, second) for first, second in zip(*results, strict=True)):
        return float("inf")
    offsets = routing.offsets_E1.tolist()
    largest = max(range(len(offsets) - 1), key=lambda e: offsets[e + 1] - offsets[e])
    experts = {0, 1, largest, len(offsets) - 2}
    return max(case.error(e, slice(offsets[e], offsets[e + 1])) for e in experts)


@dataclass
class Measurement:
    shape: str
    variant: str
    kernel: str
    skew: float
    ms: float
    bmm_ms: float
    ratio: float
    tflops: float
    error: float


def bench_shape(name: str, variant: str, kernels: list[str], skew: float) -> list[Measurement]:
    cases, routing = make_cases(SHAPES[name], VARIANTS[variant], skew)
    load_device()
    rows = []
    for kernel in kernels:
        case = cases[kernel]
        error = worst_error(case, routing)
        times = interleaved_medians({"ours": case.run, "bmm": case.bound}, rounds=4, round_ms=50.0)
        ours, bound = times["ours"], times["bmm"]
        row = Measurement(name, variant, kernel, skew, ours, bound, bound / ours, case.flops / ours / 1e9, error)
        wrong = "" if error < TOLERANCE else "  WRONG"
        print(
            f"{name:7s} {variant:8s} {kernel:5s} {ours:8.3f} ms {row.tflops:6.1f} TFLOP/s"
            f"  bmm {bound:8.3f} ms  ratio {row.ratio:5.3f}  error {error:.1e}{wrong}",
            flush=True,
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", default="fine,wide,finest,mid,coarse")
    parser.add_argument("--kernels", default="up,down,dA,dX,dW1,dW2")
    parser.add_argument("--variants", default="d_inner", help=f"any of {','.join(VARIANTS)}")
    parser.add_argument("--skew", type=float, default=0.0, help="1 gives the busiest of 128 experts 10 to 13 times the mean")
    arguments = parser.parse_args()
    kernels = arguments.kernels.split(",")
    rows = []
    for shape in arguments.shapes.split(","):
        for variant in arguments.variants.split(","):
            rows += bench_shape(shape, variant, kernels, arguments.skew)
    save(arguments, rows)


if __name__ == "__main__":
    main()
