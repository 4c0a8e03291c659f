"""``python -m moeblaze_ops.bench``: a layer's time, memory and error on this device, under torch.compile and rewritten.

python -m moeblaze_ops.bench 32768 2048 768 128 8                       # T D F E K, SwiGLU
python -m moeblaze_ops.bench 32768 2048 768 128 8 --model my.py:Layer   # Layer(2048, 768, 128, 8), called with x [T, D]
python -m moeblaze_ops.bench 4096 512 --model my.py:make                # make(), called with x [4096, 512]
"""

import argparse
import runpy
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moeblaze_ops.explanation import size_text
from moeblaze_ops.verify import verify


class Layer(nn.Module):
    """A layer as libraries write it: ``torch._grouped_mm`` over sorted tokens on a GPU, a loop over the experts on a CPU."""

    def __init__(self, D: int, hidden: int, E: int, K: int) -> None:
        super().__init__()
        self.K, self.router = K, nn.Linear(D, E, bias=False)
        self.w_up = nn.Parameter(torch.randn(E, D, 2 * hidden) * D**-0.5)
        self.w_down = nn.Parameter(torch.randn(E, hidden, D) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        logits, chosen = self.router(x).topk(self.K, dim=-1)
        weights, out, E = logits.softmax(dim=-1), torch.zeros_like(x), len(self.w_up)
        if x.is_cuda:
            order = chosen.flatten().argsort()
            token, offsets = order // self.K, F.one_hot(chosen.flatten(), E).sum(0).cumsum(0).int()
            gate, up = torch._grouped_mm(x[token], self.w_up, offs=offsets).chunk(2, dim=-1)
            rows = torch._grouped_mm(F.silu(gate) * up, self.w_down, offs=offsets)
            return out.index_add(0, token, rows * weights.flatten()[order, None])
        for e in range(E):
            token, k = torch.where(chosen == e)
            gate, up = (x[token] @ self.w_up[e]).chunk(2, dim=-1)
            out.index_add_(0, token, (F.silu(gate) * up) @ self.w_down[e] * weights[token, k, None])
        return out


class Way:
    """A module, what is called for it, and its training step."""

    def __init__(self, model: nn.Module, call: Callable, x: Tensor) -> None:
        self.model, self.call, self.x, self.dout = model, call, x, torch.randn_like(x)
        self.seconds: list[float] = []

    def step(self, *, timed: bool = True) -> None:
        wait = torch.cuda.synchronize if self.x.is_cuda else lambda: None
        wait()
        start = time.perf_counter()
        self.call(self.x).backward(self.dout)
        wait()
        if timed:
            self.seconds.append(time.perf_counter() - start)
        self.model.zero_grad()
        self.x.grad = None

    def kept_bytes(self) -> int:
        """Bytes that autograd holds between forward and backward, those of x, parameters and the output not counted."""
        kept: dict[int, int] = {}

        @torch.compiler.disable
        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = self.call(self.x)
        others = {tensor.untyped_storage().data_ptr() for tensor in (self.x, out, *self.model.parameters())}
        return sum(size for place, size in kept.items() if place not in others)


def main(arguments: Sequence[str] | None = None) -> None:
    from moeblaze_ops.compile import moeblaze_backend

    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("sizes", nargs="+", type=int, metavar="SIZE", help="T D F E K; T D for a model that takes no sizes")
    parser.add_argument("--model", default=f"{__file__}:Layer", help="FILE:NAME of what makes the layer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16, on a CPU float32")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measured steps, each way")
    given = parser.parse_args(arguments)
    if len(given.sizes) not in (2, 5) or min(given.sizes) < 1:
        parser.error(f"argument SIZE: must be T D F E K or T D, each at least 1, got {' '.join(map(str, given.sizes))}")
    (T, D), sizes = given.sizes[:2], given.sizes[1:] if len(given.sizes) == 5 else []
    file, _, name = given.model.rpartition(":")
    torch.manual_seed(0)
    # Each way has code of its own: where plain torch.compile gives a function up, it does so for all that share its code.
    plain, ours = (runpy.run_path(file)[name](*sizes) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    dtype = getattr(torch, given.dtype or ("float32" if given.device == "cpu" else "bfloat16"))
    x = torch.randn(T, D, device=given.device, dtype=dtype, requires_grad=True)
    ways = [Way(plain.to(x), torch.compile(plain), x), Way(ours.to(x), torch.compile(ours, backend=moeblaze_backend), x)]
    verification = verify(ours, x)
    for turn in range(1000):
        for way in ways:
            way.step(timed=turn >= 3)
        if turn > 5 and min(sum(way.seconds) for way in ways) > given.seconds:
            break
    device = torch.cuda.get_device_name(x.device) if x.is_cuda else f"CPU, {torch.get_num_threads()} threads"
    print(verification.explanation)
    print(f"{device}; {dtype}; torch {torch.__version__}; error of the output against {verification.reference}")
    print(f"{'':8}{'step':>12}{'faster':>9}{'kept':>12}{'peak':>12}{'error':>10}")
    output, first = verification.comparisons[0], statistics.median(ways[0].seconds)
    for label, way, error in zip(("compile", "moeblaze"), ways, (output.as_written, output.rewritten), strict=True):
        step, kept, peak = statistics.median(way.seconds), size_text(way.kept_bytes()), "-"
        if x.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            way.step(timed=False)
            peak = size_text(torch.cuda.max_memory_allocated() - before)
        accuracy = "-" if error is None else f"{error:.1e}"
        print(f"{label:8}{step * 1e3:9.2f} ms{first / step:8.2f}x{kept:>12}{peak:>12}{accuracy:>10}")


if __name__ == "__main__":
    main()
