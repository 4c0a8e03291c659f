"""Four blocks of Qwen3-30B-A3B's width with low-rank adapters on their experts, forward and backward of 8192 tokens, on a GPU.

    python benchmarks/bench_lora_model.py --json lora_model.json

A block is plain PyTorch in the shapes of the model: RMS norm, attention (32 heads, 4 of keys and values, of 128), RMS norm, 128
experts of width 768 of which a token takes 8. There is no embedding and no head. Blocks are compiled one by one. All but the
adapters is frozen.

peft+grouped_mm: the weights of both projections are ``baddbmm(W, B, A, alpha=s)`` with the factors as PEFT stores them, as in
``bench_lora.py``; experts as transformers has them for ``grouped_mm``. rewritten: the same blocks, compiled with rewriting.
packed+grouped_mm and packed: W is stored in 4 bits, a byte for two weights and a bf16 scale for 64, and is unpacked in forward
(QLoRA); as it is and compiled with rewriting. In turns, in one process.

weights: what the model stores, gradients of the adapters included. kept and peak: bytes allocated after forward, and at most,
beyond that. dequantised: the experts' weights of one block in bf16.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moeblaze_ops.compile  # noqa: F401  (registers the backend where the package is not installed)
from bench_layer import Shape
from bench_lora import PeftMoE
from environment import command, command_line, describe
from measuring import MIB, interleaved_medians, load_device, noting_failure

SHAPE = Shape(T=8192, D=2048, F=768, E=128, K=8)
HEADS, KV_HEADS, HEAD_DIM, LAYERS, BATCH, BLOCK = 32, 4, 128, 4, 2, 64


@dataclass
class Measurement:
    """One contender: time of a step in ms, memory in MiB."""

    contender: str
    rank: int
    ms: float | None = None
    tokens_per_s: float | None = None
    weights_mib: float | None = None
    kept_mib: float | None = None
    peak_mib: float | None = None
    dequantised_mib: float | None = None
    loss: float | None = None
    failure: str | None = None


class Packed(nn.Module):
    """Weights of 4 bits, two in a byte, and a scale for BLOCK of them."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.register_buffer("levels", torch.linspace(-1, 1, 16, device=w.device, dtype=w.dtype))
        blocks = w.unflatten(-1, (-1, BLOCK))
        scales = blocks.abs().amax(-1)
        codes = ((blocks / scales.unsqueeze(-1) + 1) * 7.5).round().to(torch.uint8).flatten(-2)
        self.register_buffer("codes", (codes[..., ::2] << 4) | codes[..., 1::2])
        self.register_buffer("scales", scales)

    def forward(self) -> Tensor:
        levels = self.levels[torch.stack((self.codes >> 4, self.codes & 15), -1).flatten(-2).long()]
        return (levels.unflatten(-1, (-1, BLOCK)) * self.scales.unsqueeze(-1)).flatten(-2)


class PackedMoE(PeftMoE):
    """``PeftMoE`` on weights of 4 bits."""

    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__(shape, rank)
        self.packed_up, self.packed_down = Packed(self.base_up.detach()), Packed(self.base_down.detach())
        del self.base_up, self.base_down

    def forward(self, x: Tensor) -> Tensor:
        up_a, up_b = self.factors(self.up_a, self.up_b)
        down_a, down_b = self.factors(self.down_a, self.down_b)
        w_up = torch.baddbmm(self.packed_up(), up_b, up_a, alpha=self.scale)
        return self.with_weights(x, w_up, torch.baddbmm(self.packed_down(), down_b, down_a, alpha=self.scale))


class Block(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        options = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        self.q = nn.Linear(SHAPE.D, HEADS * HEAD_DIM, **options)
        self.kv = nn.Linear(SHAPE.D, 2 * KV_HEADS * HEAD_DIM, **options)
        self.o = nn.Linear(HEADS * HEAD_DIM, SHAPE.D, **options)
        self.norms = nn.ModuleList(nn.RMSNorm(SHAPE.D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.requires_grad_(False)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.moe(self.norms[1](x).flatten(0, 1)).view(x.shape)

    def attention(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, KV_HEADS, HEAD_DIM)).unbind(2)
        y = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


CONTENDERS: dict[str, tuple[type[PeftMoE], str]] = {
    "peft+grouped_mm": (PeftMoE, "inductor"),
    "rewritten": (PeftMoE, "moeblaze"),
    "packed+grouped_mm": (PackedMoE, "inductor"),
    "packed": (PackedMoE, "moeblaze"),
}


def model_of(kind: type[PeftMoE], backend: str, rank: int) -> tuple[list[Callable], list[nn.Parameter]]:
    """The blocks, compiled, and the parameters that learn."""
    torch.manual_seed(0)
    blocks = [Block(kind(SHAPE, rank)) for _ in range(LAYERS)]
    learned = []
    for name, parameter in (pair for block in blocks for pair in block.named_parameters()):
        parameter.requires_grad_(name.endswith(("_a", "_b")))
        learned += [parameter] if parameter.requires_grad else []
    torch._dynamo.reset()
    return [torch.compile(block, backend=backend, fullgraph=True) for block in blocks], learned


def measured(name: str, rank: int, x: Tensor) -> tuple[Measurement, Callable[[], Tensor] | None]:
    kind, backend = CONTENDERS[name]
    row = Measurement(name, rank)
    before = torch.cuda.memory_allocated()
    with noting_failure(row):
        blocks, learned = model_of(kind, backend, rank)

        def loss() -> Tensor:
            y = x
            for block in blocks:
                y = block(y)
            return y.float().square().mean()

        def step() -> Tensor:
            for parameter in learned:
                parameter.grad = None
            value = loss()
            value.backward()
            return value.detach()

        row.loss = float(step())
        x.grad = None
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        row.weights_mib = (start - before) / MIB
        for parameter in learned:
            parameter.grad = None
        gradients = (start - torch.cuda.memory_allocated()) / MIB
        torch.cuda.reset_peak_memory_stats()
        value = loss()
        row.kept_mib = (torch.cuda.memory_allocated() - start) / MIB + gradients
        value.backward()
        torch.cuda.synchronize()
        row.peak_mib = (torch.cuda.max_memory_allocated() - start) / MIB
        row.dequantised_mib = SHAPE.E * 3 * SHAPE.F * SHAPE.D * 2 / MIB
        return row, step
    return row, None


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-ms", type=float, default=600)
    arguments = parser.parse_args()
    x = torch.randn(BATCH, SHAPE.T // BATCH, SHAPE.D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rows, runs = [], {}
    for name in arguments.contenders:
        row, step = measured(name, arguments.rank, x)
        rows.append(row)
        if step is not None:
            runs[name] = step
        print(row, flush=True)
    load_device()
    for name, ms in interleaved_medians(runs, arguments.rounds, arguments.round_ms).items():
        row = next(row for row in rows if row.contender == name)
        row.ms, row.tokens_per_s = ms, SHAPE.T / ms * 1000
    for row in rows:
        print(row, flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({**describe(), **command(arguments), "rows": [asdict(row) for row in rows]}, file, indent=1)


if __name__ == "__main__":
    main()
