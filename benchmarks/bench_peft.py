"""PEFT's own adapters on the experts of a Qwen3 block: eager, ``torch.compile``, and compiled with rewriting, on a GPU.

    python benchmarks/bench_peft.py --json results.json
    python benchmarks/bench_peft.py --tiny --device cpu    # a check of this script

Needs transformers and PEFT. One MoE block of Qwen3-30B-A3B (128 experts, frozen, bf16) with ``LoraConfig(target_parameters=...)``
on both projections; a step is forward and backward of the block, without an optimizer. The contenders share weights and run in
turns in one process after a second of load; medians of CUDA events. kept, peak: MiB beyond what was allocated before, after
forward and at the highest. error: the largest distance of output and gradients from the first contender's, relative to the norm.
graphs: compiled until ``--steps`` steps were run.
"""

import argparse
from dataclasses import dataclass

import peft
import torch
import transformers
from torch import Tensor, nn

from bench_fsdp import REAL, TINY
from bench_lora import error, results, step_of
from environment import command_line, device, save
from measuring import became, interleaved_medians, load_device, memory, noting_failure
from moeblaze_ops import compile as switch

CONTENDERS = {"peft": None, "peft+compile": "inductor", "peft+moeblaze": "moeblaze"}


@dataclass
class Measurement:
    """One contender; its time in ms, memory in MiB."""

    contender: str
    step_ms: float | None = None
    kept_mib: float | None = None
    peak_mib: float | None = None
    error: float | None = None
    graphs: int | None = None
    became: str = ""
    failure: str | None = None


class Output(nn.Module):
    """A block of the model, of which transformers' older versions give the router's logits, too."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x)
        return out[0] if isinstance(out, tuple) else out


def adapted_block(arguments: argparse.Namespace, dtype: torch.dtype) -> Output:
    """The block with its adapters; all calls give the same weights."""
    torch.manual_seed(0)
    sizes = (TINY if arguments.tiny else REAL) | {"vocab_size": 64, "max_position_embeddings": 128, "num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model("qwen3_moe", **sizes)
    with torch.device(arguments.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="grouped_mm")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules=[], target_parameters=targets)
    model = peft.get_peft_model(model, lora).to(arguments.device, dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return Output(next(module for module in model.modules() if type(module).__name__ == "Qwen3MoeSparseMoeBlock")).train()


def bench(arguments: argparse.Namespace) -> list[Measurement]:
    rows, runs, expected = [], {}, None
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    shape = (1, 32, TINY["hidden_size"]) if arguments.tiny else (1, arguments.tokens, REAL["hidden_size"])
    x = torch.randn(shape, device=arguments.device, dtype=dtype, requires_grad=True)
    dout = torch.randn_like(x)
    for contender, backend in CONTENDERS.items():
        row = Measurement(contender)
        rows.append(row)
        with noting_failure(row):
            torch._dynamo.reset()
            layer = adapted_block(arguments, dtype)
            if backend:
                layer.block.compile(backend=backend)
            with switch.recording() as records:
                got = results(layer, layer, x, dout)
                expected = got if expected is None else expected
                row.error = error(got, expected)
                step = step_of(layer, x, dout)
                for _ in range(arguments.steps):
                    step()
            graphs = [record for record in records if isinstance(record, switch.GraphRecord) and record.dropped is None]
            row.graphs = len(graphs) if backend == "moeblaze" else torch._dynamo.utils.counters["stats"]["unique_graphs"]
            row.became = "; ".join(became(records))
            if arguments.device == "cuda":
                row.kept_mib, row.peak_mib = memory(layer, x, dout)
                torch.cuda.empty_cache()
            runs[contender] = step
        print(row, flush=True)
    if arguments.device == "cuda":
        load_device()
        for contender, ms in interleaved_medians(runs, arguments.rounds, arguments.round_ms).items():
            next(row for row in rows if row.contender == contender).step_ms = ms
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200, help="steps after which graphs are counted")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--round-ms", type=float, default=150)
    parser.add_argument("--device", type=device, default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a block of 64 wide, in fp32")
    arguments = parser.parse_args()
    rows = bench(arguments)
    for row in rows:
        measured = f"{row.step_ms:8.3f} ms  kept {row.kept_mib:7.0f}  peak {row.peak_mib:7.0f} MiB" if row.step_ms else ""
        print(f"{row.contender:14} {measured}  graphs {row.graphs}  error {row.error}  {row.became}{row.failure or ''}")
    save(arguments, rows, transformers=transformers.__version__, peft=peft.__version__)


if __name__ == "__main__":
    main()
