"""Train the model of moe_lm.py with its experts spread over all ranks: no line of communication in the model.

    torchrun --nproc-per-node 2 examples/train_multi_gpu.py

GPUs are used where there are enough of them; otherwise processes on the CPU train a small model. The loss is the mean over
all ranks, each of which draws batches of its own.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import moeblaze_ops
from moe_lm import MoELanguageModel
from moeblaze_ops.distributed import clip_grad_norm_, shard_experts
from train_moe_lm import PRESETS, draw_batches, read_corpus
from train_options import positive

WARMUP_STEPS = 3


def prepare(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the experts over the mesh, and everything else as ``fully_shard`` does; compile block by block."""
    print_once(shard_experts(model, mesh))
    experts = {parameter for parameter in model.parameters() if hasattr(parameter, "placements")}
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        if module is not model:
            module.compile()
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=experts)
        # Gradients of experts are sums over the ranks; so are the others then, and the loss is divided instead.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def train(model: nn.Module, batches: list, device: str) -> None:
    # The optimizer takes parameters of several meshes, but not in one group.
    by_mesh: dict[object, list] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": group} for group in by_mesh.values()], lr=1e-3)
    ranks, start, tokens, kept = dist.get_world_size(), 0.0, 0, 0

    def train_on(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        loss = model(inputs, targets) / ranks
        kept = torch.cuda.memory_allocated() - before if device == "cuda" else 0
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for step, (inputs, targets) in enumerate(batches):
        if step == WARMUP_STEPS:
            synchronize(device)
            start, tokens = time.perf_counter(), 0
        loss = train_on(inputs, targets)
        tokens += inputs.numel()
        if step % 10 == 0 or step == len(batches) - 1:
            mean = loss.clone()
            dist.all_reduce(mean)
            print_once(f"step {step}: loss {mean.item():.3f}")
    synchronize(device)
    per_second = ranks * tokens / (time.perf_counter() - start)
    print_once(f"{per_second:,.0f} tokens/s on {ranks} ranks")
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
        print_once(f"rank 0: {kept / 2**20:,.0f} MiB kept for backward, peak {peak / 2**20:,.0f} MiB")
        exposed, whole = exposed_communication(lambda: train_on(*batches[-1]))
        print_once(f"exposed communication: {exposed:.1f} of {whole:.1f} ms, in which rank 0's GPU computes nothing else")


def exposed_communication(step: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of a step in which this GPU only communicates or waits for another one, and in which it does anything."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    time_of_stream: Counter[int] = Counter()
    for event, (begin, end) in zip(events, spans, strict=True):
        time_of_stream[event.device_resource_id] += end - begin
    ((computing, _),) = time_of_stream.most_common(1)
    # What is moved has streams of its own; barriers have not.
    computes = [event.device_resource_id == computing and "barrier" not in event.name for event in events]
    whole = covered(spans)
    return (whole - covered(span for span, own in zip(spans, computes, strict=True) if own)) / 1e3, whole / 1e3


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def print_once(text: object) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, help="default: gpu with a GPU for each rank, else tiny")
    parser.add_argument("--steps", type=positive(int), help="training steps whose time is taken")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=timedelta(minutes=5))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = "cuda" if gpus >= ranks else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    preset = PRESETS[arguments.preset or ("gpu" if device == "cuda" else "tiny")]
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("ep",))

    torch.manual_seed(0)
    model = MoELanguageModel(preset.shape).to(device, preset.dtype)
    corpus = read_corpus()
    moeblaze_ops.enable()
    model = prepare(model, mesh["ep"])
    own = corpus[rank * len(corpus) // ranks : (rank + 1) * len(corpus) // ranks]
    train(model, draw_batches(own, preset, (arguments.steps or preset.steps) + WARMUP_STEPS, device), device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
