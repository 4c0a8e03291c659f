"""How far bf16 layers are from fp32: output and each gradient, relative to their norms.

    python benchmarks/bench_accuracy.py --shapes fine wide --json accuracy.json

Of the layers of ``bench_layer.py``, which all get the same logits in fp32, so that they choose the same experts. The reference
computes the layer in fp32, expert by expert, without TF32. ``moeblaze`` is the layer written with ``grouped_mm``, rewritten.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moeblaze_ops.compile  # noqa: F401  registers the backend where the package is not installed
from bench_layer import SHAPES, GroupedMoE, OpsMoE, Shape
from environment import command_line, save
from measuring import noting_failure


class Routed(GroupedMoE):
    """A layer whose logits are given."""

    def forward(self, x: Tensor, logits_TE: Tensor) -> Tensor:
        self.logits_TE = logits_TE
        return super().forward(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, experts = torch.topk(self.logits_TE, self.shape.K, dim=-1)
        return torch.softmax(logits, dim=-1), experts


class RoutedOps(Routed, OpsMoE):
    """The same through ``moeblaze_ops.moe``."""


class RoutedEightBits(RoutedOps):
    """The same with h in 8 bits."""

    keep = "h8"


CONTENDERS = {
    "grouped_mm": lambda layer: layer(Routed),
    "grouped_mm+compile": lambda layer: torch.compile(layer(Routed)),
    "moeblaze": lambda layer: torch.compile(layer(Routed), backend="moeblaze"),
    "moeblaze-eager": lambda layer: layer(RoutedOps),
    "moeblaze-eager-h8": lambda layer: layer(RoutedEightBits),
}
QUANTITIES = "out", "dx", "dlogits", "dw_up", "dw_down"
PIECE = 1 << 26


@dataclass
class Measurement:
    """Relative errors of one contender on one shape, in the Frobenius norm."""

    shape: str
    contender: str
    out: float | None = None
    dx: float | None = None
    dlogits: float | None = None
    dw_up: float | None = None
    dw_down: float | None = None
    failure: str | None = None


def reference(layer: Routed, x: Tensor, logits_TE: Tensor, dout: Tensor) -> list[Tensor]:
    """Output, and gradients of x, logits, up and down weights, in fp32."""
    shape, x, dout = layer.shape, x.detach().float(), dout.float()
    out, dx = torch.zeros_like(x), torch.zeros_like(x)
    layer.logits_TE = logits_TE
    weights_TK, experts_TK = layer.route(x)
    dweights_TK = torch.zeros_like(weights_TK)
    dw_up, dw_down = torch.empty_like(layer.w_up, dtype=torch.float32), torch.empty_like(layer.w_down, dtype=torch.float32)
    for e in range(shape.E):
        tokens, slots = torch.where(experts_TK == e)
        inputs = [x[tokens], weights_TK[tokens, slots], layer.w_up[e].float(), layer.w_down[e].float()]
        inputs = [value.detach().requires_grad_() for value in inputs]
        rows, weights, w_up, w_down = inputs
        gate, up = F.linear(rows, w_up).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w_down) * weights[:, None]
        gradients = torch.autograd.grad(y, inputs, dout[tokens])
        out.index_add_(0, tokens, y.detach())
        dx.index_add_(0, tokens, gradients[0])
        dweights_TK[tokens, slots] = gradients[1]
        dw_up[e], dw_down[e] = gradients[2:]
    (dlogits_TE,) = torch.autograd.grad(weights_TK, logits_TE, dweights_TK)
    return [out, dx, dlogits_TE, dw_up, dw_down]


def results(layer: nn.Module, x: Tensor, logits_TE: Tensor, dout: Tensor) -> list[Tensor]:
    own = getattr(layer, "_orig_mod", layer)
    out = layer(x, logits_TE)
    return [out.detach(), *torch.autograd.grad(out, (x, logits_TE, own.w_up, own.w_down), dout)]


def relative_error(got: Tensor, expected: Tensor) -> float:
    # In pieces: the differences of all weight gradients at once would take as much memory as these.
    pieces = zip(got.reshape(-1).split(PIECE), expected.reshape(-1).split(PIECE), strict=True)
    sums = [torch.stack([(g.float() - e).square().sum(), e.square().sum()]).double() for g, e in pieces]
    squares, norms = torch.stack(sums).sum(0).tolist()
    return (squares / norms) ** 0.5


def bench_shape(name: str, shape: Shape, names: list[str]) -> list[Measurement]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.randn(shape.T, shape.D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dout = torch.randn_like(x)
    given = Routed(shape)
    logits_TE = torch.randn(shape.T, shape.E, device=x.device, requires_grad=True)

    def layer(kind: type[Routed]) -> Routed:
        made = kind(shape)
        made.load_state_dict(given.state_dict())
        return made

    expected = reference(layer(Routed), x, logits_TE, dout)
    rows = []
    for contender in names:
        row = Measurement(name, contender)
        rows.append(row)
        with noting_failure(row):
            found = results(CONTENDERS[contender](layer), x, logits_TE, dout)
            for quantity, got, want in zip(QUANTITIES, found, expected, strict=True):
                setattr(row, quantity, relative_error(got, want))
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["fine", "finest", "wide", "mid", "coarse"], choices=SHAPES)
    parser.add_argument("--contenders", nargs="+", default=[*CONTENDERS], choices=CONTENDERS)
    arguments = parser.parse_args()
    rows: list[Measurement] = []
    print(f"{'shape':8} {'contender':20} " + " ".join(f"{quantity:>9}" for quantity in QUANTITIES))
    for name in arguments.shapes:
        own = bench_shape(name, SHAPES[name], arguments.contenders)
        for row in own:
            errors = " ".join(f"{getattr(row, quantity) or 0:9.6f}" for quantity in QUANTITIES)
            print(f"{row.shape:8} {row.contender:20} {row.failure or errors}", flush=True)
        rows += own
        torch.cuda.empty_cache()
        save(arguments, rows)


if __name__ == "__main__":
    main()
