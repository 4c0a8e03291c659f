"""Train the model of moe_lm.py four ways from one seed, and compare: eager, torch.compile of both spellings, and moeblaze.

    python examples/train_moe_lm.py

The text is Python's own standard library. A GPU is used when there is one, at a size worth it and in bfloat16; a CPU
trains a small model in float32. A table is printed at the end; the plot and the numbers go to `outputs/`. Each way of
training stops after its share of `--minutes`, five steps at least; no way begins after all of them, and Ctrl-C keeps the ways
that are finished.
"""

import argparse
import contextlib
import gc
import os
import shutil
import signal
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from train_options import WAYS, make_parser

if __name__ == "__main__":
    parser = make_parser(__doc__.splitlines()[0])
    arguments = parser.parse_args()  # a wrong option is said before torch is imported

# Read when torch is imported. A buffer of all rows, which glibc gives back to the system at the end of a step, is then met again
# by one page fault for 2 MiB instead of one for 4 KiB; ways of training whose buffers are of one expert do not mind.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

import moeblaze_ops
from moe_lm import ModelShape, MoELanguageModel
from train_report import Result, format_table, save_numbers, save_plot

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

SEED = 0
WARMUP_STEPS = 3
"""Steps at the start that are not timed: compilation, and the first allocations."""
LOAD_COUNTS = 20
"""Steps of the eager way at which the experts' loads are counted, spread evenly."""


@dataclass(frozen=True)
class Preset:
    shape: ModelShape
    batch: int
    steps: int
    learning_rate: float
    dtype: torch.dtype


PRESETS = {
    "cpu": Preset(
        shape=ModelShape(num_layers=2, dim=128, num_heads=4, context=128, expert_hidden=768),
        batch=16,
        steps=100,
        learning_rate=3e-3,
        dtype=torch.float32,
    ),
    "gpu": Preset(
        shape=ModelShape(num_layers=4, dim=1024, num_heads=16, context=512, expert_hidden=2048),
        batch=32,
        steps=200,
        learning_rate=3e-4,
        dtype=torch.bfloat16,
    ),
    "tiny": Preset(
        shape=ModelShape(num_layers=1, dim=32, num_heads=2, context=32, expert_hidden=192),
        batch=8,
        steps=5,
        learning_rate=3e-3,
        dtype=torch.float32,
    ),
}


def read_corpus() -> torch.Tensor:
    """Returns the sources of the standard library's top-level modules as one uint8 tensor."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)


def draw_batches(corpus: torch.Tensor, preset: Preset, steps: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns `steps` pairs (tokens_BL, targets_BL): random windows of the corpus, the same ones on every call."""
    generator = torch.Generator().manual_seed(SEED)
    length = preset.shape.context
    batches = []
    for _ in range(steps):
        starts = torch.randint(len(corpus) - length - 1, (preset.batch,), generator=generator)
        windows = torch.stack([corpus[start : start + length + 1] for start in starts.tolist()]).long().to(device)
        batches.append((windows[:, :-1].contiguous(), windows[:, 1:].contiguous()))
    return batches


def bytes_kept_for_backward(loss_function: Callable[[], torch.Tensor], parameters: Iterator[torch.Tensor]) -> int:
    """Returns the bytes that autograd holds between forward and backward, parameters not counted.

    The hooks see what eager operators save and what a compiled graph saves alike; each storage counts once, and whole.
    """
    parameter_storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept = {}

    @torch.compiler.disable  # where a graph breaks, autograd calls it between the parts
    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_function()  # holds the graph, and so the storages, until they are counted
    total = sum(kept.values())
    del loss
    return total


def progress(name: str, batches: list) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], Callable[[float], None]]]:
    """Yields each batch with a function that shows its loss: on a progress bar, or on plain lines without tqdm."""
    if tqdm is None:
        for step, batch in enumerate(batches, start=1):
            yield batch, lambda loss, step=step: step % 10 or print(f"{name}: step {step}/{len(batches)}, loss {loss:.3f}")
        return
    with tqdm(batches, desc=f"{name:<12}", unit="step") as bar:
        for batch in bar:
            yield batch, lambda loss: bar.set_postfix_str(f"loss {loss:.3f}")


def count_loads(model: MoELanguageModel, *batch: torch.Tensor) -> dict[str, list[float]]:
    """Returns the share of the tokens' slots that each expert has, by layer."""
    with moeblaze_ops.routing_stats(model) as stats, torch.no_grad():
        model(*batch)
    return {name: stats[name].load_E.tolist() for name in stats}


def train(way: str, preset: Preset, batches: list, device: str, deadline: float) -> Result:
    """Returns the losses, times and memory of training one fresh model on `batches`, one step each.

    From `deadline` on (in seconds of `time.perf_counter`) no step is begun, once two have been timed.
    """
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    model = MoELanguageModel(preset.shape, every_token=way == "every").to(device, preset.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=preset.learning_rate, betas=(0.9, 0.95), fused=True)
    loss_function = model if way == "eager" else torch.compile(model)
    losses, seconds, loads = [], [], {}
    with moeblaze_ops.enabled() if way == "moeblaze" else contextlib.nullcontext():
        for (tokens_BL, targets_BL), show in progress(WAYS[way], batches):
            if device == "cuda" and len(losses) == WARMUP_STEPS:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            loss = loss_function(tokens_BL, targets_BL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # waits for the device
            seconds.append(time.perf_counter() - start)
            show(losses[-1])
            if way == "eager" and len(losses) % -(-len(batches) // LOAD_COUNTS) == 0:
                loads[len(losses)] = count_loads(model, tokens_BL, targets_BL)
            if start >= deadline and len(losses) >= WARMUP_STEPS + 2:
                break
        peak_bytes = torch.cuda.max_memory_allocated() if device == "cuda" else None
        kept_bytes = bytes_kept_for_backward(lambda: loss_function(tokens_BL, targets_BL), model.parameters())
    if way == "moeblaze":
        explanation = moeblaze_ops.explain(model, tokens_BL, targets_BL)
        print(explanation)
        rewritten = f"{sum(candidate.became is not None for candidate in explanation.candidates)} MoE layers"
    else:
        rewritten = "-"
    return Result(
        way=way,
        label=WAYS[way],
        losses=losses,
        step_seconds=statistics.median(seconds[WARMUP_STEPS:] or seconds),
        first_step_seconds=seconds[0],
        kept_bytes=kept_bytes,
        peak_bytes=peak_bytes,
        rewritten=rewritten,
        loads=loads,
    )


def describe(preset: Preset, device: str) -> str:
    """Returns one line about the model, the batch and the machine."""
    shape = preset.shape
    parts = [
        f"{shape.num_layers} layers of width {shape.dim}",
        f"{shape.num_experts} experts of {shape.expert_hidden}, top-{shape.top_k}",
        f"{preset.batch} x {shape.context} bytes a step",
        str(preset.dtype).removeprefix("torch."),
        torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        f"torch {torch.__version__}",
    ]
    return "; ".join(parts)


def check_compiler(device: str, ways: list[str]) -> None:
    """Exits with a message if torch.compile would need a C++ compiler that is not there."""
    compiler = os.environ.get("CXX", "g++")
    if device == "cpu" and ways != ["eager"] and shutil.which(compiler) is None:
        sys.exit(f"torch.compile needs a C++ compiler on a CPU, and {compiler} was not found: install g++, or set CXX")


def main(arguments: argparse.Namespace) -> None:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    preset = PRESETS[arguments.preset or ("gpu" if device == "cuda" else "cpu")]
    steps = arguments.steps or preset.steps
    check_compiler(device, arguments.ways)
    if tqdm is None:
        print("tqdm is not installed: progress is printed every ten steps instead of shown as a bar.")

    title = describe(preset, device)
    print(title)
    limit = f"{arguments.minutes:g} minutes, or {WARMUP_STEPS + 2} steps of a way that has begun, of which the first compiles"
    print(f"{len(arguments.ways)} x {steps} steps; stops after {limit}")
    if "every" in arguments.ways:
        print(f'"{WAYS["every"]}" runs all experts on all tokens; the others run each expert on the tokens that chose it.')
    batches = draw_batches(read_corpus(), preset, steps, device)
    results, interrupted = [], None
    start = time.perf_counter()
    try:
        for number, way in enumerate(arguments.ways, start=1):
            if results and time.perf_counter() > start + 60 * arguments.minutes:
                print(f"The time is over: left out {', '.join(WAYS[way] for way in arguments.ways[number - 1 :])}.")
                break
            deadline = start + 60 * arguments.minutes * number / len(arguments.ways)
            results.append(train(way, preset, batches, device, deadline))
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    except KeyboardInterrupt:
        interrupted = f"interrupted during {WAYS[way]}: {'no way is' if not results else 'what follows is what was'} finished"
    if interrupted:
        print(f"\n{interrupted}")
    if results:
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # what took minutes is written whole, in seconds
        try:
            report(results, title, arguments.out)
        finally:
            signal.signal(signal.SIGINT, on_interrupt)
    sys.exit(130 if interrupted else 0)


def report(results: list[Result], title: str, folder: Path) -> None:
    """Prints the table, and writes the numbers and the plot to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    print()
    print(format_table(results))
    print()
    print(f"numbers: {save_numbers(results, title, folder)}")
    print(f"plot: {save_plot(results, title, folder)}")


if __name__ == "__main__":
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no GPU here, take --device cpu")
    main(arguments)
