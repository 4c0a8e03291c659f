"""Training steps of a Qwen3 MoE model under FSDP2 on the GPUs of a host, beside one GPU, sharded experts and plain compile.

    torchrun --nproc-per-node 2 benchmarks/bench_fsdp.py --tokens 32768 --sides plain one ours grouped --json results.json
    torchrun --nproc-per-node 2 benchmarks/bench_fsdp.py --tiny --device cpu    # a check of this script

Needs transformers. The model is as wide as Qwen3-30B-A3B, with four layers, 8192 words (the head's share of four of 48 layers)
and random weights in bf16; sequences of 4096 tokens, sdpa. Blocks are compiled one by one and sharded by ``fully_shard``, which
sums gradients in fp32. All sides run transformers' ``grouped_mm`` experts on the same tokens, and all GPUs at once:

    plain     backend="moeblaze", no FSDP2: each GPU trains a model of its own
    one       the same with FSDP2 over one GPU
    ours      backend="moeblaze", FSDP2 over all GPUs
    epN       the same with experts over N GPUs by ``shard_experts``
    grouped   plain ``torch.compile``, FSDP2 over all GPUs

Times are CUDA events of a step, of the slowest GPU: gradients is forward and backward, step is that and AdamW (bf16 states,
sharded as the parameters are). Tokens a second are those of one GPU in forward and backward, without the optimizer, whose work
FSDP2 divides. peak: all that was allocated at the highest, in MiB. losses: the mean over GPUs before the first step of AdamW and
after three. A side may be named twice, to see drift. ``--free``: ours where persistent kernels leave so many multiprocessors to
FSDP2's collectives, which take NCCL_MAX_CTAS at most. The file is written after every side.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import bench_hf as hf
from environment import command_line, device, save
from measuring import MIB, became, counted, event_time, join_ranks, noting_failure
from moeblaze_ops import compile as switch
from moeblaze_ops.distributed import expert_placement, shard_experts
from moeblaze_ops.kernels.multiprocessors import leaving_free

REAL, TINY = hf.REAL["qwen3_moe"], hf.TINY["qwen3_moe"]
WARM_S = 1.0


@dataclass
class Measurement:
    """One side at one number of tokens a GPU."""

    side: str
    tokens: int
    free: int = 0
    gradients_ms: float | None = None
    gradients_min_ms: float | None = None
    step_ms: float | None = None
    step_min_ms: float | None = None
    tokens_per_s: int | None = None
    peak_mib: int | None = None
    first_steps_s: float | None = None
    losses: list[float] = field(default_factory=list)
    became: list[str] = field(default_factory=list)
    failure: str | None = None


def make_model(arguments: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": arguments.layers, "vocab_size": arguments.vocabulary}
    sizes |= {"max_position_embeddings": arguments.length, **(TINY if arguments.tiny else REAL)}
    return hf.make_model("qwen3_moe", sizes, arguments.device, attn_implementation="sdpa", experts_implementation="grouped_mm")


def experts_of(model: nn.Module) -> list[nn.Parameter]:
    """What ``shard_experts`` has sharded, before ``fully_shard`` makes DTensors of the others."""
    return [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]


def shard(model: nn.Module, side: str, device: str) -> list[nn.Parameter]:
    """FSDP2 around each block and around the model; returns the experts that are sharded by themselves."""
    world = dist.get_world_size()
    settings: dict = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    if not side.startswith("ep"):
        shape = (world, 1) if side == "one" else (1, world)
        settings["mesh"] = init_device_mesh(device, shape, mesh_dim_names=("replica", "shard"))["shard"]
        for layer in model.model.layers:
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
        return []
    ep = int(side.removeprefix("ep"))
    meshes = init_device_mesh(device, (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
    everyone = meshes._flatten("dp")
    shard_experts(model, meshes["ep"])
    experts = experts_of(model)
    for module in (*model.model.layers, model):
        own = {"ignored_params": set(experts_of(module))}
        if ep < world:
            own = {"shard_placement_fn": expert_placement(module, meshes["efsdp"], everyone)}
        fully_shard(module, mesh=everyone, **settings, **own)
    for module in (*model.model.layers, model):
        # Gradients of experts are sums over the GPUs already: so are all, and each GPU divides its loss.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return experts


class Side:
    """A model that trains one way."""

    def __init__(self, name: str, tokens: int, arguments: argparse.Namespace) -> None:
        torch._dynamo.reset()
        self.name, self.arguments = name, arguments
        self.model = make_model(arguments)
        for layer in self.model.model.layers:
            layer.compile(backend="inductor" if name == "grouped" else "moeblaze", fullgraph=True)
        experts = [] if name == "plain" else shard(self.model, name, arguments.device)
        self.parts = dist.get_world_size() if name.startswith("ep") else 1
        apart = {id(parameter) for parameter in experts}
        others = [parameter for parameter in self.model.parameters() if id(parameter) not in apart]
        groups = [{"params": parameters} for parameters in (others, experts) if parameters]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        generator = torch.Generator(arguments.device).manual_seed(100 + dist.get_rank())
        shape = (max(1, tokens // arguments.length), min(tokens, arguments.length))
        self.ids = torch.randint(3, arguments.vocabulary, shape, device=arguments.device, generator=generator)

    def gradients(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        (loss / self.parts).backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.gradients()
        self.optimizer.step()
        return loss

    def times(self, function: Callable) -> tuple[float, float]:
        """Milliseconds of one call: the median and the least."""
        dist.barrier()
        samples = event_time(function, self.arguments.repeats, self.arguments.device)
        return statistics.median(samples), min(samples)

    def warm(self) -> None:
        """As many steps on every GPU: those that one of them needs for a second of load."""
        start = time.perf_counter()
        self.step()
        if self.arguments.device == "cuda":
            torch.cuda.synchronize()
        (steps,) = largest([WARM_S / max(time.perf_counter() - start, 1e-3)], self.arguments.device)
        for _ in range(int(steps) + 1 if self.arguments.device == "cuda" else 0):
            self.step()


def largest(numbers: list[float], device: str) -> list[float]:
    """Of each number, the largest that a GPU has."""
    everyone = torch.tensor(numbers, device=device, dtype=torch.float64)
    dist.all_reduce(everyone, op=dist.ReduceOp.MAX)
    return everyone.tolist()


def measure(row: Measurement, arguments: argparse.Namespace) -> list[Measurement]:
    """The row filled in: once, or for each number of multiprocessors that are left free."""
    start = time.perf_counter()
    side = Side(row.side, row.tokens, arguments)
    with switch.recording() as records:
        losses = torch.stack([side.step() for _ in range(4)])
    dist.all_reduce(losses)
    row.losses = [round(loss, 5) for loss in (losses / dist.get_world_size()).tolist()[::3]]
    row.first_steps_s = round(time.perf_counter() - start, 1)
    row.became = became(records)
    return [times(replace(row, free=free), side) for free in (arguments.free if row.side == "ours" else [0])]


def times(row: Measurement, side: Side) -> Measurement:
    on_gpu = side.arguments.device == "cuda"
    with leaving_free(row.free):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        side.warm()
        peak = torch.cuda.max_memory_allocated() / MIB if on_gpu else 0.0
        numbers = [*side.times(side.gradients), *side.times(side.step), peak]
    numbers = largest(numbers, side.arguments.device)
    row.gradients_ms, row.gradients_min_ms, row.step_ms, row.step_min_ms = (round(number, 2) for number in numbers[:4])
    row.tokens_per_s, row.peak_mib = round(1e3 * row.tokens / row.gradients_ms), round(numbers[4])
    return row


def print_row(row: Measurement, rows: list[Measurement]) -> None:
    if row.failure:
        print(f"{row.tokens:6} {row.side:8} {row.failure}", flush=True)
        return
    one = next((r for r in rows if (r.side, r.tokens) == ("one", row.tokens) and r.gradients_ms), None)
    of_one = f"{one.gradients_ms / row.gradients_ms:6.3f} {one.step_ms / row.step_ms:6.3f}" if one else f"{'-':>6} {'-':>6}"
    print(
        f"{row.tokens:6} {row.side:8} free {row.free:2} gradients {row.gradients_ms:8.2f} (min {row.gradients_min_ms:8.2f})"
        f" step {row.step_ms:8.2f} (min {row.step_min_ms:8.2f}) tokens/s {row.tokens_per_s:8} of one {of_one}"
        f" peak {row.peak_mib:6} losses {row.losses}  {counted(row.became)}",
        flush=True,
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768], help="of each GPU")
    parser.add_argument("--sides", nargs="+", default=["plain", "one", "ours", "grouped"])
    parser.add_argument("--free", type=int, nargs="+", default=[0], help="multiprocessors left to collectives")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--length", type=int, default=4096, help="tokens of each sequence")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", type=device, default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a narrow model, to check this script")
    arguments = parser.parse_args()

    join_ranks(arguments.device)
    rows: list[Measurement] = []
    ctas = os.environ.get("NCCL_MAX_CTAS")
    for tokens in arguments.tokens:
        for name in arguments.sides:
            row = Measurement(name, tokens)
            new = [row]
            with noting_failure(row):
                new = measure(row, arguments)
            rows += new
            gc.collect()  # sharded models have cycles
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                for each in new:
                    print_row(each, rows)
                save(arguments, rows, gpus=dist.get_world_size(), transformers=transformers.__version__, nccl_max_ctas=ctas)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
