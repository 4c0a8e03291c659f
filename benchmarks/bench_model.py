"""Training steps of Qwen3-30B-A3B with its experts over the GPUs of a host, beside transformers' own expert parallelism.

    torchrun --nproc-per-node 8 benchmarks/bench_model.py --batch 2 --json results.json
    torchrun --nproc-per-node 4 benchmarks/bench_model.py --layers 8 16 --json results.json
    torchrun --nproc-per-node 2 benchmarks/bench_model.py --layers 4 --vocabulary 8192 --forward-backward --json results.json
    torchrun --nproc-per-node 2 benchmarks/bench_model.py --layers 2 --vocabulary 8192 --length 512 --check --json results.json
    torchrun --nproc-per-node 2 benchmarks/bench_model.py --tiny --device cpu    # a check of this script

Needs transformers 5.24. The model's own configuration with random weights in bf16, the same ones for all sides; sequences of 4096
random tokens, other ones on each GPU; sdpa; a learning rate of 0. Sides:

    shard_experts        experts over all GPUs by ``shard_experts``, the rest under ``fully_shard`` (gradients summed in fp32)
    moeblaze             ``DistributedConfig(ep_size=N, fsdp_size=N, ep_implementation="moeblaze")``
    all_to_all, auto     the same with an implementation of transformers, which runs ``grouped_mm``
    all_reduce, NAME@tp  ``DistributedConfig(ep_size=N, tp_size=N)``: all GPUs share the sequences of all

SIDE+compile compiles each layer, with ``backend="moeblaze"`` but for transformers' own, and SIDE+graphs with
``mode="reduce-overhead"`` as well; the first side always is compiled, and so is the loss. One GPU trains a model of its own with
any of them. A step is forward, backward and AdamW (fused, its states in bf16), or without AdamW (``--forward-backward``): the
mean of ``--steps`` after ``--warm``, of the slowest GPU. TFLOP/s count products as Megatron-LM does: 23.0 GFLOP a token for 48
layers and the whole vocabulary. weights: MiB of parameters; kept: allocated by forward; peak: all that was allocated at the
highest; each of the GPU that has most, and without what a CUDA graph allocates. With two numbers of layers a row is derived
for 48 from the times of both, and says so. ``--check`` compares gradients in fp32 with those of one GPU: relative to the norm,
the worst parameter. The file is written after every side.
"""

import argparse
import gc
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.distributed import DistributedConfig

import moeblaze_ops
from bench_fsdp import REAL, TINY, largest, shard
from environment import command_line, device, save
from measuring import MIB, became, counted, event_time, join_ranks, noting_failure
from moeblaze_ops import compile as switch

WHOLE = {"num_hidden_layers": 48, "vocab_size": 151936}


@dataclass
class Measurement:
    """One side with so many layers. ``derived_from``: the numbers of layers that were measured, where this one was not."""

    side: str
    layers: int
    batch: int
    checkpointed: int
    derived_from: list[int] = field(default_factory=list)
    step_ms: float | None = None
    steps_ms: list[float] = field(default_factory=list)
    tokens_per_s: int | None = None
    tflops: float | None = None
    weights_mib: int | None = None
    kept_mib: int | None = None
    peak_mib: int | None = None
    first_steps_s: float | None = None
    losses: list[float] = field(default_factory=list)
    gradient_error: float | None = None
    became: list[str] = field(default_factory=list)
    failure: str | None = None


def configuration(arguments: argparse.Namespace, layers: int) -> transformers.PretrainedConfig:
    sizes = TINY if arguments.tiny else REAL
    return transformers.AutoConfig.for_model(
        "qwen3_moe", **sizes, num_hidden_layers=layers, vocab_size=arguments.vocabulary, router_aux_loss_coef=0.0,
        max_position_embeddings=40960, rope_theta=1e6, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def gflop_a_token(arguments: argparse.Namespace, layers: int) -> float:
    """Products of forward and backward, attention over half of the pairs."""
    config = configuration(arguments, layers)
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    D, F, K, E = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok, config.num_experts
    attention = 0 if arguments.without_attention else D * (2 * heads + 2 * kv) + heads * arguments.length
    return 6 * (layers * (attention + 3 * K * D * F + D * E) + D * config.vocab_size) / 1e9


class WithoutAttention(nn.Module):
    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        return hidden_states, None


def layout_of(side: str) -> tuple[str, str]:
    """The implementation, and the axis of ``DistributedConfig`` beside that of experts."""
    implementation, _, axis = side.partition("+")[0].partition("@")
    return implementation, axis or ("tp" if implementation == "all_reduce" else "fsdp")


def make_model(side: str, layers: int, arguments: argparse.Namespace) -> nn.Module:
    """A model whose parameters are stored as the side says; all sides have the same weights."""
    config = configuration(arguments, layers)
    world, (implementation, axis) = dist.get_world_size(), layout_of(side)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32 if arguments.check else torch.bfloat16,
            attn_implementation="sdpa",
            experts_implementation="eager" if side == "one" else "grouped_mm",
        )
        if arguments.without_attention:
            for layer in model.model.layers:
                layer.self_attn = WithoutAttention()
    if side != "one" and world > 1:
        if implementation == "shard_experts":
            shard(model, f"ep{world}", arguments.device)
        else:
            model = shard_by_transformers(model, implementation, axis)
    model.to_empty(device=arguments.device)
    with torch.device(arguments.device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    fill(model)
    if arguments.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for i, layer in enumerate(model.model.layers):
            layer.gradient_checkpointing = (i + 1) * arguments.checkpointed // layers > i * arguments.checkpointed // layers
    if "+" in side or implementation == "shard_experts":
        ours = implementation in ("shard_experts", "moeblaze")
        graphs = {"mode": "reduce-overhead"} if side.endswith("+graphs") else {}
        for layer in model.model.layers:
            layer.compile(backend="moeblaze" if ours else "inductor", **graphs)
    model.loss_function = torch.compile(model.loss_function, backend="inductor")
    return model.train()


def shard_by_transformers(model: nn.Module, implementation: str, axis: str) -> nn.Module:
    """What ``from_pretrained`` does with a model before it loads weights."""
    world = dist.get_world_size()
    layout = DistributedConfig(ep_size=world, ep_implementation=implementation, **{f"{axis}_size": world})
    layout, _, meshes = type(model).prepare_distribute_model(layout)
    return type(model).maybe_distribute_model(model, layout, meshes)


def local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def own_part(parameter: Tensor, whole: Tensor) -> Tensor:
    """What this rank stores of a parameter."""
    if not isinstance(parameter, DTensor):
        return whole
    sizes, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Parameters in one order, whatever stores them."""
    return [parameter for _, parameter in sorted(model.named_parameters())]


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in parameters_of(model)]


@torch.no_grad()
def fill(model: nn.Module) -> None:
    for i, parameter in enumerate(parameters_of(model)):
        mine = local(parameter)
        whole = torch.ones(parameter.shape, device=mine.device, dtype=mine.dtype)
        if parameter.dim() > 1:
            whole.normal_(std=0.02, generator=torch.Generator(mine.device).manual_seed(i))
        mine.copy_(own_part(parameter, whole))


class Side:
    """A model that trains one way."""

    def __init__(self, name: str, layers: int, arguments: argparse.Namespace) -> None:
        torch._dynamo.reset()
        self.arguments = arguments
        self.model = make_model(name, layers, arguments)
        self.weights = allocated(arguments)
        world, rank = dist.get_world_size(), dist.get_rank()
        ids = [tokens_of(each, arguments) for each in range(world)]
        self.ids = torch.cat(ids) if layout_of(name)[1] == "tp" and world > 1 else ids[rank]
        # Gradients of experts are sums over the GPUs; transformers makes means of all.
        self.parts = world if name == "shard_experts" else 1
        by_mesh: dict[object, list[nn.Parameter]] = {}
        for parameter in self.model.parameters():
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        # Random weights route evenly, and with a rate of 0 they stay so.
        groups = [{"params": parameters} for parameters in by_mesh.values()]
        self.optimizer = None if arguments.forward_backward else torch.optim.AdamW(groups, lr=0.0, fused=True)
        self.kept = 0

    def gradients(self) -> Tensor:
        self.model.zero_grad()
        before = allocated(self.arguments)
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        self.kept = allocated(self.arguments) - before
        (loss / self.parts).backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.gradients()
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    def times(self) -> list[float]:
        """Milliseconds of each step."""
        dist.barrier()
        return event_time(self.step, self.arguments.steps, self.arguments.device)


def tokens_of(rank: int, arguments: argparse.Namespace) -> Tensor:
    generator = torch.Generator(arguments.device).manual_seed(100 + rank)
    shape = (arguments.batch, arguments.length)
    return torch.randint(3, arguments.vocabulary, shape, device=arguments.device, generator=generator)


def allocated(arguments: argparse.Namespace) -> float:
    return torch.cuda.memory_allocated() / MIB if arguments.device == "cuda" else 0.0


def measure(row: Measurement, arguments: argparse.Namespace) -> Measurement:
    start = time.perf_counter()
    side = Side(row.side, row.layers, arguments)
    with switch.recording() as records:
        losses = torch.stack([side.step() for _ in range(arguments.warm)])
    dist.all_reduce(losses)
    row.losses = [round(loss, 5) for loss in (losses / dist.get_world_size()).tolist()]
    row.first_steps_s = round(time.perf_counter() - start, 1)
    row.became = became(records)
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = side.times()
    peak = torch.cuda.max_memory_allocated() / MIB if arguments.device == "cuda" else 0.0
    mean, *memory = largest([sum(times) / len(times), side.weights, side.kept, peak], arguments.device)
    row.steps_ms = [round(each, 2) for each in times]
    row.weights_mib, row.kept_mib, row.peak_mib = map(round, memory)
    if arguments.trace:
        trace(side, row)
    return timed(row, mean, arguments)


def timed(row: Measurement, step_ms: float, arguments: argparse.Namespace) -> Measurement:
    """The row with the time of a step, and what follows from it."""
    tokens = row.batch * arguments.length
    row.step_ms, row.tokens_per_s = round(step_ms, 2), round(1e3 * tokens / step_ms)
    row.tflops = round(tokens * gflop_a_token(arguments, row.layers) / step_ms, 1)
    return row


def derived(rows: list[Measurement], arguments: argparse.Namespace) -> list[Measurement]:
    """The side of the last row with the layers of the whole model, from the last two numbers of layers of it."""
    last = rows[-1]
    known = [row for row in rows if row.side == last.side and row.step_ms and not row.derived_from]
    if last.failure or len(known) < 2 or arguments.tiny:
        return []
    fewer, more = sorted(known[-2:], key=lambda row: row.layers)
    layer_ms = (more.step_ms - fewer.step_ms) / (more.layers - fewer.layers)
    whole = WHOLE["num_hidden_layers"]
    row = Measurement(last.side, whole, last.batch, last.checkpointed, [fewer.layers, more.layers])
    return [timed(row, more.step_ms + (whole - more.layers) * layer_ms, arguments)]


def trace(side: Side, row: Measurement) -> None:
    """Write where the GPU of rank 0 spends a step."""
    dist.barrier()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if side.arguments.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        side.step()
        if side.arguments.device == "cuda":
            torch.cuda.synchronize()
    if dist.get_rank() == 0:
        Path(side.arguments.trace).mkdir(parents=True, exist_ok=True)
        by = "self_device_time_total" if side.arguments.device == "cuda" else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=by, row_limit=60, max_name_column_width=90)
        Path(side.arguments.trace, f"{row.side}_{row.layers}.txt").write_text(table)


def check(row: Measurement, arguments: argparse.Namespace) -> Measurement:
    """Gradients of the side, against the mean over the tokens of all GPUs of a model that is whole."""
    side = Side(row.side, row.layers, arguments)
    row.losses = [round(side.gradients().item(), 6)]
    whole = make_model("one", row.layers, arguments)
    for rank in range(dist.get_world_size()):
        ids = tokens_of(rank, arguments)
        (whole(input_ids=ids, labels=ids, use_cache=False).loss / dist.get_world_size()).backward()
    errors = []
    for mine, wanted in zip(gradients_of(side.model), gradients_of(whole), strict=True):
        difference = (local(mine) - own_part(mine, wanted)).square().sum()
        if isinstance(mine, DTensor):
            dist.all_reduce(difference)
        errors.append((difference.sqrt() / wanted.norm().clamp(min=1e-30)).item())
    row.gradient_error = largest([max(errors)], arguments.device)[0]
    return row


def print_row(row: Measurement) -> None:
    head = f"{row.side:20} {row.layers:3} layers, {row.checkpointed} checkpointed, {row.batch} sequences"
    if row.failure:
        print(f"{head}: {row.failure}", flush=True)
    elif row.gradient_error is not None:
        print(f"{head}: loss {row.losses} gradient error {row.gradient_error:.2e}", flush=True)
    else:
        of = f"derived from {row.derived_from}" if row.derived_from else f"kept {row.kept_mib} peak {row.peak_mib}"
        print(
            f"{head}: step {row.step_ms:9.2f} ms tokens/s {row.tokens_per_s:6} TFLOP/s {row.tflops:6} {of}"
            f" weights {row.weights_mib} losses {row.losses[::4]} first steps {row.first_steps_s} s  {counted(row.became)}",
            flush=True,
        )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--sides", nargs="+", default=["shard_experts", "moeblaze+compile", "all_to_all+compile"])
    parser.add_argument("--layers", type=int, nargs="+", default=[WHOLE["num_hidden_layers"]])
    parser.add_argument("--vocabulary", type=int, default=WHOLE["vocab_size"])
    parser.add_argument("--length", type=int, default=4096, help="tokens of each sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences of each GPU")
    parser.add_argument("--checkpointed", type=int, default=0, help="layers whose forward runs again in backward")
    parser.add_argument("--forward-backward", action="store_true", help="no optimizer")
    parser.add_argument("--without-attention", action="store_true", help="layers of norms and experts")
    parser.add_argument("--arrived-rows", default="exact", choices=["exact", "bound"], help="what ours makes room for")
    parser.add_argument("--check", action="store_true", help="compare gradients in fp32 with those of one GPU")
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", type=device, default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a narrow model, to check this script")
    parser.add_argument("--trace", help="folder for where the time of a step goes")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.vocabulary, arguments.length = 64, min(arguments.length, 32)
        arguments.layers = [min(12, layers) for layers in arguments.layers]
    arguments.forward_backward |= arguments.check
    moeblaze_ops.config.arrived_rows = arguments.arrived_rows
    join_ranks(arguments.device)
    rows: list[Measurement] = []
    for name in arguments.sides:
        for layers in arguments.layers:
            rows.append(Measurement(name, layers, arguments.batch, arguments.checkpointed))
            with noting_failure(rows[-1]):
                (check if arguments.check else measure)(rows[-1], arguments)
            gc.collect()  # sharded models have cycles
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
            rows += derived(rows, arguments)
            if dist.get_rank() == 0:
                for each in rows[-2:] if rows[-1].derived_from else rows[-1:]:
                    print_row(each)
                save(arguments, rows, gpus=dist.get_world_size(), transformers=transformers.__version__)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
