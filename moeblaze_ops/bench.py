"""``python -m moeblaze_ops.bench``: a layer's time, memory and error on this device, under torch.compile and rewritten.

python -m moeblaze_ops.bench 32768 2048 768 128 8                       # T D F E K, SwiGLU
python -m moeblaze_ops.bench 32768 2048 768 128 8 --model my.py:Layer   # Layer(2048, 768, 128, 8), called with x [T, D]
python -m moeblaze_ops.bench 4096 512 --model my.py:make                # make(), called with x [4096, 512]
python -m moeblaze_ops.bench 4096 512 --model my.py:make --batch 8      # make(), called with x [8, 512, 512]

--picture layer.svg draws the time and the memory beside the table.
"""

import argparse
import runpy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

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


STYLE = """
  text { font: 14px Helvetica, Arial, sans-serif; fill: #1f2933 }
  .title { font-weight: bold } .small { font-size: 12px; fill: #616e7c } .end { text-anchor: end }
  rect { fill: #9aa5b1 } .ours { fill: #d9480f }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb } .small { fill: #9aa5b1 } rect { fill: #616e7c } .ours { fill: #f76707 }
  }
"""


def bars(left: int, width: int, title: str, unit: str, values: Mapping[str, float | None]) -> list[str]:
    """One bar a way, as long as its value; a line of text where nothing was measured."""
    scale = width / max(filter(None, values.values()), default=1)
    lines = [f'<text x="{left}" y="22" class="title">{title}</text>']
    for number, (name, value) in enumerate(values.items()):
        top, ours = 38 + 30 * number, ' class="ours"' if name == "moeblaze" else ""
        if value is None:
            lines.append(f'<text x="{left}" y="{top + 16}" class="small">not recorded</text>')
            continue
        lines.append(f'<rect x="{left}" y="{top}" width="{scale * value:.0f}" height="22" rx="2"{ours}/>')
        text = f"{value:,.{0 if value >= 100 else 1}f} {unit}"
        lines.append(f'<text x="{left + scale * value + 8:.0f}" y="{top + 16}">{text}</text>')
    return lines


def picture(times: Mapping[str, float], memory: str, sizes: Mapping[str, float | None], below: Sequence[str]) -> str:
    """An SVG of the milliseconds of a step of each way, and of MiB under the title ``memory``, with lines of text below."""
    foot = 60 + 30 * len(times)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 {foot + 18 * len(below) - 8}" role="img" '
            'aria-label="One layer: a step and its memory">',
            f"<style>{STYLE}</style>",
            *(f'<text x="190" y="{54 + 30 * i}" class="end">{name}</text>' for i, name in enumerate(times)),
            *bars(202, 250, "forward + backward", "ms", times),
            *bars(570, 240, memory, "MiB", sizes),
            *(f'<text x="20" y="{foot + 18 * i}" class="small">{line}</text>' for i, line in enumerate(below)),
            "</svg>",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    from moeblaze_ops.compile import moeblaze_backend

    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("sizes", nargs="+", type=int, metavar="SIZE", help="T D F E K; T D for a model that takes no sizes")
    parser.add_argument("--model", default=f"{__file__}:Layer", help="FILE:NAME of what makes the layer")
    parser.add_argument("--batch", type=int, metavar="B", help="call the layer with x [B, T / B, D]; default: x [T, D]")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16, on a CPU float32")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measured steps, each way")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="where to draw the time and the memory of both ways")
    given = parser.parse_args(arguments)
    if len(given.sizes) not in (2, 5) or min(given.sizes) < 1:
        parser.error(f"argument SIZE: must be T D F E K or T D, each at least 1, got {' '.join(map(str, given.sizes))}")
    if given.batch is not None and (given.batch < 1 or given.sizes[0] % given.batch):
        parser.error(f"argument --batch: must divide T = {given.sizes[0]}, got {given.batch}")
    (T, D), sizes = given.sizes[:2], given.sizes[1:] if len(given.sizes) == 5 else []
    file, _, name = given.model.rpartition(":")
    if not Path(file).is_file() or name not in runpy.run_path(file):
        parser.error(f"argument --model: must be FILE:NAME of a file and a name in it, got {given.model}")
    torch.manual_seed(0)
    # Each way has code of its own: where plain torch.compile gives a function up, it does so for all that share its code.
    plain, ours = (runpy.run_path(file)[name](*sizes) for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    dtype = getattr(torch, given.dtype or ("float32" if given.device == "cpu" else "bfloat16"))
    shape = (T, D) if given.batch is None else (given.batch, T // given.batch, D)
    x = torch.randn(shape, device=given.device, dtype=dtype, requires_grad=True)
    ways = [Way(plain.to(x), torch.compile(plain), x), Way(ours.to(x), torch.compile(ours, backend=moeblaze_backend), x)]
    verification = verify(ours, x)
    for turn in range(1000):
        for way in ways:
            way.step(timed=turn >= 3)
        if turn > 5 and min(sum(way.seconds) for way in ways) > given.seconds:
            break
    device = torch.cuda.get_device_name(x.device) if x.is_cuda else f"CPU, {torch.get_num_threads()} threads"
    print(verification.explanation)
    run = f"{device}; {dtype}; torch {torch.__version__}"
    print(f"{run}; error of the output{f' against {verification.reference}' if verification.reference else ''}")
    if verification.no_reference:
        print(f"no error is shown, for want of a precise run: {verification.no_reference}")
    print(f"{'':8}{'step':>12}{'faster':>9}{'kept':>12}{'peak':>12}{'error':>10}")
    output, first = verification.comparisons[0], statistics.median(ways[0].seconds)
    times: dict[str, float] = {}
    memory: dict[str, float] = {}
    for label, way, error in zip(("compile", "moeblaze"), ways, (output.as_written, output.rewritten), strict=True):
        step, kept, peak = statistics.median(way.seconds), way.kept_bytes(), None
        if x.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            way.step(timed=False)
            peak = torch.cuda.max_memory_allocated() - before
        accuracy, most = "-" if error is None else f"{error:.1e}", "-" if peak is None else size_text(peak)
        print(f"{label:8}{step * 1e3:9.2f} ms{first / step:8.2f}x{size_text(kept):>12}{most:>12}{accuracy:>10}")
        if not kept:
            print(f"{'':8}kept 0.0 KiB: no more than its input and parameters, which are not counted, as under checkpointing")
        times[label], memory[label] = step * 1e3, (peak or kept) / 2**20
    if given.picture:
        title = "peak memory of a step" if x.is_cuda else "kept for backward"
        layer = f"{Path(file).name}:{name} {' '.join(map(str, given.sizes))}"
        given.picture.write_text(picture(times, title, memory, [f"{layer}; {run}"]) + "\n")


if __name__ == "__main__":
    main()
