"""A training step of one expert layer under many activations, as a ratio to that under swiglu (of ungated ones: silu).

    python benchmarks/bench_activations.py --shapes fine wide coarse --json results.json

All run in turns in one process, after a second of load; times are medians of CUDA event times. Each is compared first with
swiglu's own numbers for what backward keeps. ``--warm i/n`` only compiles every n-th activation from the i-th on: several such
processes fill Triton's cache side by side.
"""

import json
from pathlib import Path

import torch

from bench_layer import SHAPES, Shape
from environment import command, command_line, describe
from measuring import interleaved_medians, load_device
from moeblaze_ops import moe
from moeblaze_ops.kernels.formulas.named import NAMED, is_gated, num_parameters

FORMULAS = {
    "situ_glu": "tanh(g * 0.16667) * sigmoid(g) * tanh(u * 0.083333) * 72.0",
    "quick_geglu": "g * sigmoid(1.702 * g) * u",
    "mish_glu": "mish(g) * u",
    "softplus_glu": "softplus(g) * u",
    "swiglu_other_limits": "silu(clamp(g, None, 5.0)) * clamp(u, -5.0, 5.0)",
    "relu2_glu": "square(relu(g)) * u",
    "tanh_glu": "tanh(g) * u",
    "bilinear": "g * u",
    "glu": "sigmoid(g) * u",
    "hard_swish_glu": "hardswish(g) * u",
    "swiglu_beta": "g * sigmoid(0.7 * g) * u",
    "xielu": "where(h > 0.0, h * h * 0.8 + h * 0.5, (expm1(clamp(h, None, -1e-06)) - h) * 0.8 + h * 0.5)",
    "mish": "mish(h)",
    "hard_swish": "hardswish(h)",
    "quick_gelu": "h * sigmoid(1.702 * h)",
    "leaky_relu": "leaky_relu(h)",
    "swiglu_learned": "g * sigmoid(p0 * g) * u",
    "xielu_learned": "where(h > 0.0, h * h * p0 + h * 0.5, (expm1(clamp(h, None, -1e-06)) - h) * p1 + h * 0.5)",
    "prelu": "prelu(h, p0)",
    "snake": "h + square(sin(h))",
}
"""Those with p0 and p1 have learned parameters, whose gradient is part of the step."""
ACTIVATIONS = {**{name: name for name in NAMED}, **FORMULAS}


def make_steps(shape: Shape, names: list[str]) -> dict:
    """A step, forward and backward, of each activation, on the same tokens and as far as it goes the same weights."""
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(shape.T, shape.D, **options).requires_grad_()
    weights, experts = torch.rand(shape.T, shape.E, device="cuda").topk(shape.K)
    weights = weights.softmax(-1).requires_grad_()
    up = (torch.randn(shape.E, 2 * shape.F, shape.D, **options) * shape.D**-0.5).requires_grad_()
    half = up.detach()[:, : shape.F].clone().requires_grad_()
    down = (torch.randn(shape.E, shape.D, shape.F, **options) * shape.F**-0.5).requires_grad_()
    dout = torch.randn_like(x)

    def make(activation: str):
        w_up = up if is_gated(activation) else half
        learned = [torch.tensor(0.8, device="cuda", requires_grad=True) for _ in range(num_parameters(activation))]
        options = {"activation": activation, "activation_parameters": learned} if learned else {"activation": activation}

        def forward():
            return moe(x, weights, experts, w_up, down, **options)

        return forward, lambda: torch.autograd.grad(forward(), (x, weights, w_up, down, *learned), dout)

    return {name: make(ACTIVATIONS[name]) for name in names}


def kept_mib(forward) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = forward()
    kept = (torch.cuda.memory_allocated() - before - out.numel() * out.element_size()) / 2**20
    del out
    return kept


def measure(name: str, names: list[str], rounds: int, round_ms: float) -> list[dict]:
    steps = make_steps(SHAPES[name], names)
    kept = {activation: kept_mib(forward) for activation, (forward, _) in steps.items()}
    load_device()
    times = interleaved_medians({activation: step for activation, (_, step) in steps.items()}, rounds, round_ms)
    rows = []
    for activation, ms in times.items():
        base = "swiglu" if is_gated(ACTIVATIONS[activation]) else "silu"
        row = {"shape": name, "activation": activation, "ms": ms, "ratio": ms / times[base], "kept_mib": kept[activation]}
        rows.append({**row, "kept_more_mib": kept[activation] - kept[base]})
        print(f"{name:7} {activation:19} {ms:8.3f} ms  {row['ratio']:.3f} of {base:7}, kept {kept[activation]:.0f} MiB")
    torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["fine", "wide", "coarse"], choices=SHAPES)
    parser.add_argument("--activations", nargs="+", default=list(ACTIVATIONS), choices=ACTIVATIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=120.0, help="time of each activation in each round")
    parser.add_argument("--warm", help="i/n: compile a part of the activations and stop")
    arguments = parser.parse_args()
    names = list(dict.fromkeys(["swiglu", "silu", *arguments.activations]))
    if arguments.warm:
        first, number = map(int, arguments.warm.split("/"))
        for shape in arguments.shapes:
            for _, step in make_steps(SHAPES[shape], names[first::number]).values():
                step()
        torch.cuda.synchronize()
        return
    rows = [row for shape in arguments.shapes for row in measure(shape, names, arguments.rounds, arguments.round_ms)]
    if arguments.json:
        result = {"environment": describe(), "command": command(arguments), "formulas": ACTIVATIONS, "rows": rows}
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
