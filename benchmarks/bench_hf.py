"""Training steps of Hugging Face MoE models under ``torch.compile``, with and without rewriting.

    python benchmarks/bench_hf.py --models qwen3_moe mixtral --json results.json
    python benchmarks/bench_hf.py --tiny --device cpu    # a check of this script

Needs transformers. Models have the width of the real ones, few layers, a small vocabulary and random weights in bf16; a
step is forward and backward on random tokens, without an optimizer. The contenders of a model share its weights, run
interleaved in one process after a second of load, and are each checked against eager in the same run; medians of CUDA
event times. moe kept: bytes that one MoE block, compiled alone, keeps for backward beyond its output. kept, peak: bytes
of a whole step, after forward and at the highest, beyond what was allocated before it. Errors are relative to the norm
of eager's tensor, the largest over all parameters; rounding that changes a token's experts is part of them.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import transformers
from torch import Tensor, nn

from environment import command_line, device, save
from measuring import became, counted, interleaved_medians, load_device, memory, noting_failure, relative_error
from moeblaze_ops import compile as switch

REAL = {
    "qwen3_moe": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_experts": 128,
        "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
    "mixtral": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
TINY = {
    "qwen3_moe": dict(
        REAL["qwen3_moe"], hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
        num_attention_heads=4, head_dim=16,
    ),
    "mixtral": dict(REAL["mixtral"], hidden_size=64, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2),
}  # fmt: skip
CONTENDERS: dict[str, Callable[[nn.Module], Callable]] = {
    "eager": lambda module: module,
    "compile": partial(torch.compile, fullgraph=True),
    "compile+moeblaze": partial(torch.compile, fullgraph=True, backend="moeblaze"),
}


@dataclass
class Measurement:
    """One contender on one model; times in ms, memory in MiB."""

    model: str
    contender: str
    step_ms: float | None = None
    moe_kept_mib: float | None = None
    kept_mib: float | None = None
    peak_mib: float | None = None
    output_error: float | None = None
    gradient_error: float | None = None
    became: list[str] = field(default_factory=list)
    failure: str | None = None


class Loss(nn.Module):
    """The next-token loss of a model on its own input."""

    def __init__(self, run: nn.Module) -> None:
        super().__init__()
        self.run = run

    def forward(self, ids: Tensor) -> Tensor:
        return self.run(input_ids=ids, labels=ids, use_cache=False).loss


def make_model(name: str, sizes: dict, device: str, **options: str) -> nn.Module:
    """A model of transformers with random weights in bf16."""
    config = transformers.AutoConfig.for_model(name, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # experts are left empty, to be loaded
            nn.init.normal_(parameter, std=0.02)
    return model


def step(run: nn.Module, ids: Tensor) -> Tensor:
    """The logits of a training step, which leaves its gradients in the parameters."""
    run.zero_grad(set_to_none=True)
    output = run(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    return output.logits.detach()


def check(row: Measurement, model: nn.Module, run: nn.Module, ids: Tensor, logits: Tensor, gradients: list[Tensor]) -> None:
    """Fill in the errors of one step, and what its layers became."""
    with switch.recording() as records:
        row.output_error = relative_error(step(run, ids), logits)
    row.gradient_error = max(
        relative_error(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), gradients, strict=True)
    )
    row.became = became(records)


def measure_memory(row: Measurement, model: nn.Module, run: nn.Module, ids: Tensor) -> None:
    row.kept_mib, row.peak_mib = memory(Loss(run), ids, torch.ones((), device=ids.device, dtype=torch.float32))
    model.zero_grad(set_to_none=True)
    block = CONTENDERS[row.contender](model.model.layers[0].mlp)
    x = torch.randn(*ids.shape, model.config.hidden_size, device=ids.device, dtype=torch.bfloat16).requires_grad_()
    dout = torch.randn_like(x)
    block(x).backward(dout)  # compiles
    row.moe_kept_mib, _ = memory(block, x, dout)
    model.zero_grad(set_to_none=True)


def bench_model(name: str, arguments: argparse.Namespace) -> list[Measurement]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    sizes = (TINY if arguments.tiny else REAL)[name]
    sizes = {**sizes, "num_hidden_layers": arguments.layers, "vocab_size": arguments.vocabulary}
    model = make_model(name, sizes, arguments.device)
    ids = torch.randint(3, arguments.vocabulary, (arguments.batch, arguments.length), device=arguments.device)
    logits = step(model, ids)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    rows, runs = [], {}
    for contender in arguments.contenders:
        row = Measurement(name, contender)
        rows.append(row)
        with noting_failure(row):
            run = CONTENDERS[contender](model)
            check(row, model, run, ids, logits, gradients)
            if ids.is_cuda:
                measure_memory(row, model, run, ids)
            runs[contender] = partial(step, run, ids)
    del logits, gradients
    model.zero_grad(set_to_none=True)
    if ids.is_cuda:
        torch.cuda.empty_cache()
        load_device()
    step_ms = interleaved_medians(runs, arguments.rounds, arguments.round_ms, arguments.device)
    for row in rows:
        row.step_ms = step_ms.get(row.contender)
    return rows


def print_table(rows: list[Measurement]) -> None:
    print(
        f"{'model':12} {'contender':18} {'step ms':>9} {'moe kept':>9} {'kept':>9} {'peak':>9} {'output':>8} {'gradient':>8}"
        "  layers"
    )
    for row in rows:
        if row.failure:
            print(f"{row.model:12} {row.contender:18} {row.failure}")
            continue
        sizes = (f"{size:9.0f}" if size is not None else f"{'-':>9}" for size in (row.moe_kept_mib, row.kept_mib, row.peak_mib))
        print(
            f"{row.model:12} {row.contender:18} {row.step_ms:9.2f} {' '.join(sizes)} {row.output_error:8.1e}"
            f" {row.gradient_error:8.1e}  {counted(row.became)}"
        )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=list(REAL), choices=REAL)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048, help="tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=500.0, help="time of each contender in each round")
    parser.add_argument("--device", type=device, default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="narrow models, to check this script")
    arguments = parser.parse_args()

    rows = []
    for name in arguments.models:
        rows += bench_model(name, arguments)
        print_table([row for row in rows if row.model == name])
        save(arguments, rows, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
