"""One expert layer on millions of tokens, forward and backward, in memory that does not grow with its activations.

    python benchmarks/bench_slide.py --json slide.json
    python benchmarks/bench_slide.py --tokens 3000 --width 48 --hidden 64 --reference 512 48 64 8 2 --limit-mib 1

The layer keeps its input alone (``keep="input"``) and goes through chunks of tokens. The result is checked in fp32: output
and x gradient of some tokens, computed on their own, and weight gradients of some hidden units of every expert, summed
over all tokens. Its FLOPs are 22 N D F: 6 forward, 4 for the up projection again, 12 for gradients. Their rate is compared
with that of a layer of 18 N D F, which keeps its pre-activation and is measured before. Peak memory counts everything,
x, output, both their gradients and the weights included. Fails if an error is above its tolerance.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import moeblaze_ops
from environment import command, command_line, describe, device
from moeblaze_ops import config
from moeblaze_ops.memory.token_chunks import token_ranges, tokens_per_chunk

GIB = 2**30
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}
"""Relative error in norm: a handful of roundings of intermediates."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer."""

    T: int
    D: int
    F: int
    E: int
    K: int

    def teraflops(self, factor: int) -> float:
        """``factor`` N D F, in 10^12."""
        return factor * self.T * self.K * self.D * self.F / 1e12


@dataclass
class Step:
    """Inputs, parameters and results of one forward and backward."""

    x: Tensor
    weights: Tensor
    experts: Tensor
    w_up: Tensor
    w_down: Tensor
    dout: Tensor
    out: Tensor | None = None

    def forward(self, keep: str) -> None:
        self.out = moeblaze_ops.moe(self.x, self.weights, self.experts, self.w_up, self.w_down, keep=keep)

    def backward(self) -> None:
        self.out.backward(self.dout)

    def clear(self) -> None:
        self.out = self.x.grad = self.weights.grad = self.w_up.grad = self.w_down.grad = None


@dataclass
class Measurement:
    """Times in seconds, rates in TFLOP/s, memory in GiB, errors relative in norm."""

    tokens_per_chunk: int
    chunks: int
    forward_s: float
    backward_s: float
    tflops: float
    reference_tflops: float
    ratio: float
    peak_gib: float | None
    reserved_gib: float | None
    errors: dict[str, float]


def make_weights(sizes: Sizes, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gate and up [E, 2F, D], and down [E, D, F]."""
    w_up = torch.randn(sizes.E, 2 * sizes.F, sizes.D, device=device, dtype=dtype).mul_(sizes.D**-0.5)
    w_down = torch.randn(sizes.E, sizes.D, sizes.F, device=device, dtype=dtype).mul_(sizes.F**-0.5)
    return w_up.requires_grad_(), w_down.requires_grad_()


def make_step(sizes: Sizes, w_up: Tensor, w_down: Tensor) -> Step:
    options = {"device": w_up.device, "dtype": w_up.dtype}
    x = torch.randn(sizes.T, sizes.D, **options).requires_grad_()
    dout = torch.randn(sizes.T, sizes.D, **options)
    logits, experts = torch.randn(sizes.T, sizes.E, device=w_up.device).topk(sizes.K)
    return Step(x, logits.softmax(1).requires_grad_(), experts, w_up, w_down, dout)


def elapsed(run: Callable[[], None]) -> float:
    """Seconds until the device has done ``run``."""
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reference_rate(sizes: Sizes, device: str, dtype: torch.dtype, rounds: int) -> float:
    """TFLOP/s of forward and backward of a layer that keeps its pre-activation: the median after a second of load."""
    step = make_step(sizes, *make_weights(sizes, device, dtype))

    def run() -> None:
        step.clear()
        step.forward("preactivation")
        step.backward()

    run()
    end = time.perf_counter() + (1 if device == "cuda" else 0)
    while elapsed(run) and time.perf_counter() < end:
        pass
    return sizes.teraflops(18) / statistics.median(elapsed(run) for _ in range(rounds))


def warm_up(sizes: Sizes, chunk_tokens: int, w_up: Tensor, w_down: Tensor) -> None:
    """Compiles kernels for the sizes of chunks that the layer will have, on two chunks and on the last one."""
    *_, last = token_ranges(sizes.T, chunk_tokens)
    for tokens in {min(sizes.T, 2 * chunk_tokens), last.stop - last.start}:
        step = make_step(Sizes(tokens, sizes.D, sizes.F, sizes.E, sizes.K), w_up, w_down)
        step.forward("input")
        step.backward()
        step.clear()


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def expert_rows(step: Step, tokens: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """Which of ``tokens`` the expert gets, and their routing weights."""
    rows, choice = (step.experts[tokens] == expert).nonzero(as_tuple=True)
    return rows, step.weights.detach()[tokens[rows], choice].float().unsqueeze(1)


def token_errors(step: Step, tokens: Tensor) -> dict[str, float]:
    """Errors of output and x gradient of some tokens, against those tokens alone in fp32, one expert after another."""
    x, dout = step.x.detach()[tokens].float(), step.dout[tokens].float()
    out, dx = torch.zeros_like(x), torch.zeros_like(x)
    for expert in range(step.w_up.shape[0]):
        rows, weights = expert_rows(step, tokens, expert)
        leaf = x[rows].requires_grad_()
        gate, up = (leaf @ step.w_up[expert].detach().float().T).chunk(2, dim=1)
        y = weights * ((F.silu(gate) * up) @ step.w_down[expert].detach().float().T)
        out.index_add_(0, rows, y.detach())
        dx.index_add_(0, rows, *torch.autograd.grad(y, leaf, dout[rows]))
    return {"out": relative(step.out.detach()[tokens], out), "dx": relative(step.x.grad[tokens], dx)}


def weight_errors(step: Step, units: Tensor, block: int = 32768) -> dict[str, float]:
    """Errors of the weight gradients of some hidden units of every expert, against sums over all tokens in fp32."""
    T, D = step.x.shape
    E, _, num_f = step.w_down.shape
    w_gate = step.w_up.detach()[:, units].float()  # [E, U, D], as the others
    w_up = step.w_up.detach()[:, num_f + units].float()
    w_down = step.w_down.detach()[:, :, units].mT.float()
    sums = [torch.zeros(E, len(units), D, device=step.x.device, dtype=torch.float64) for _ in range(3)]
    for start in range(0, T, block):
        tokens = torch.arange(start, min(T, start + block), device=step.x.device)
        for expert in range(E):
            rows, weights = expert_rows(step, tokens, expert)
            x, dout = step.x.detach()[tokens[rows]].float(), step.dout[tokens[rows]].float()
            gate, up = (x @ w[expert].T for w in (w_gate, w_up))
            da = weights * (dout @ w_down[expert].T)
            sigmoid = gate.sigmoid()
            silu = gate * sigmoid
            sums[0][expert] += (da * up * (sigmoid + silu * (1 - sigmoid))).T @ x
            sums[1][expert] += (da * silu).T @ x
            sums[2][expert] += (weights * silu * up).T @ dout
    dw_up, dw_down = step.w_up.grad, step.w_down.grad
    got = dw_up[:, units], dw_up[:, num_f + units], dw_down[:, :, units].mT
    return {name: relative(a, b) for name, a, b in zip(("dw_gate", "dw_up", "dw_down"), got, sums, strict=True)}


def measure(sizes: Sizes, reference: Sizes, device: str, dtype: torch.dtype, samples: int) -> Measurement:
    torch.manual_seed(0)
    rate = reference_rate(reference, device, dtype, rounds=10 if device == "cuda" else 2)
    if device == "cuda":
        torch.cuda.empty_cache()
    w_up, w_down = make_weights(sizes, device, dtype)
    chunk_tokens = tokens_per_chunk(sizes.D, sizes.F, sizes.K, dtype, True, w_up.device)
    warm_up(sizes, chunk_tokens, w_up, w_down)
    if device == "cuda":
        torch.cuda.empty_cache()
    step = make_step(sizes, w_up, w_down)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    forward_s, backward_s = elapsed(lambda: step.forward("input")), elapsed(step.backward)
    peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if device == "cuda" else (None, None)
    if device == "cuda":
        torch.cuda.empty_cache()
    tokens = torch.randperm(sizes.T, device=device)[:samples]
    units = torch.randperm(sizes.F, device=device)[:4]
    tflops = sizes.teraflops(22) / (forward_s + backward_s)
    return Measurement(
        chunk_tokens,
        len(list(token_ranges(sizes.T, chunk_tokens))),
        forward_s,
        backward_s,
        tflops,
        rate,
        tflops / rate,
        peak and peak / GIB,
        reserved and reserved / GIB,
        token_errors(step, tokens) | weight_errors(step, units),
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=int, default=2**21)
    parser.add_argument("--width", type=int, default=6144)
    parser.add_argument("--hidden", type=int, default=24576)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument(
        "--reference", type=int, nargs=5, default=[16384, 4096, 14336, 8, 2], help="T D F E K of the layer to compare with"
    )
    parser.add_argument("--limit-mib", type=int, help="config.max_layer_transient_bytes, in MiB")
    parser.add_argument("--samples", type=int, default=64, help="tokens to check")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    if arguments.limit_mib is not None:
        config.max_layer_transient_bytes = arguments.limit_mib << 20

    dtype = DTYPES[arguments.dtype]
    sizes = Sizes(arguments.tokens, arguments.width, arguments.hidden, arguments.experts, arguments.top_k)
    result = measure(sizes, Sizes(*arguments.reference), arguments.device, dtype, arguments.samples)
    print(f"{sizes} in {result.chunks} chunks of at most {result.tokens_per_chunk} tokens")
    print(
        f"forward {result.forward_s:.3f} s, backward {result.backward_s:.3f} s: {result.tflops:.1f} TFLOP/s,"
        f" {result.ratio:.3f} of the {result.reference_tflops:.1f} TFLOP/s of {Sizes(*arguments.reference)}"
    )
    if result.peak_gib is not None:
        print(f"peak {result.peak_gib:.2f} GiB allocated, {result.reserved_gib:.2f} GiB reserved")
    print("errors " + ", ".join(f"{name} {error:.1e}" for name, error in result.errors.items()))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({**describe(), "command": command(arguments), "measurement": asdict(result)}, file, indent=1)
    wrong = {name: error for name, error in result.errors.items() if not error <= TOLERANCES[dtype]}
    if wrong:
        sys.exit(f"errors above the tolerance {TOLERANCES[dtype]}: {wrong}")


if __name__ == "__main__":
    main()
