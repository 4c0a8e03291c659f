"""One MoE layer over the GPUs of a host: tokens that move to sharded experts, against other ways and against no communication.

    torchrun --nproc-per-node 4 benchmarks/bench_many.py --ep 2 4 --tokens 8192 32768 --json results.json

Qwen3's layer (D 2048, F 768, E 128, K 8), router included, bf16. Sides, all in one run and on the same tokens:

    ours      ``shard_experts`` and ``torch.compile``: tokens move, h exactly as long as the rows that arrived
    nccl      the same through collectives, where ``ours`` moves tokens by copy engines
    alltoall  the same with an all-to-all: a token goes to the ranks of its experts alone (for fewer ``--choices`` than ranks)
    bound     the same as ours with room for all rows and a promised number of tokens: no host sync, and no question between hosts
    graphs    the same as bound, compiled with ``mode="reduce-overhead"``: a step is two CUDA graphs
    captured  the same as bound, of which a whole step is captured in one CUDA graph
    weights   the same layer with weights that move
    titan     torchtitan's flow, written plainly and compiled: argsort, 2 all-to-all, 3 ``grouped_mm``, scatter_add
    local     no communication: E / EP experts with the same number of routed rows
    local-graphs, local-captured    the same in CUDA graphs

Times are medians of CUDA events, after a barrier; TFLOP/s count the expert products of this GPU's tokens. kept: bytes allocated
after forward beyond what was allocated before it and beyond the output. peak: highest allocation over forward and backward beyond
what was allocated before; both 0 for graphs, whose memory is a pool. exposed: milliseconds beyond ``local``. ``--skew``: the
router prefers experts of the first rank, so that it gets as many times the rows of another one; times and memory are those of the
rank that takes or has most, and ``local`` is balanced. The file is written after every step. ``--trace`` writes what the GPU of
rank 0 did in two steps of each side: when each kernel and copy began, how long it took, and how long before it was launched.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from environment import command_line
from measuring import became, event_time, join_ranks, memory, relative_error
from moeblaze_ops import compile as switch
from moeblaze_ops import config
from moeblaze_ops.distributed import shard_experts

REFERENCE_TOLERANCE = 2e-2
"""Relative error between ways that round to bf16 in different places; both stand against the same fp32 sums."""


class Shared(nn.Module):
    """An expert of every token; its products are no part of the TFLOP/s."""

    def __init__(self, D: int, hidden: int, options: dict) -> None:
        super().__init__()
        self.w_up = nn.Parameter(torch.randn(2 * hidden, D, **options) * D**-0.5)
        self.w_down = nn.Parameter(torch.randn(D, hidden, **options) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.w_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_down)


class Layer(nn.Module):
    """A layer as libraries write it today: sort by expert, gather, ``grouped_mm``, weight, unsort, sum."""

    def __init__(self, D: int, hidden: int, E: int, K: int, device: str, dtype: torch.dtype, shared: int = 0) -> None:
        super().__init__()
        self.E, self.K = E, K
        options = {"device": device, "dtype": dtype}
        self.router = nn.Parameter(torch.randn(E, D, **options) * 0.02)
        self.w_up = nn.Parameter(torch.randn(E, 2 * hidden, D, **options) * D**-0.5)
        self.w_down = nn.Parameter(torch.randn(E, D, hidden, **options) * hidden**-0.5)
        self.register_buffer("popularity", torch.zeros(E, device=device, dtype=dtype))
        self.shared = Shared(D, shared, options) if shared else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, experts = torch.topk(F.linear(x, self.router) + self.popularity, self.K, dim=-1)
        return torch.softmax(logits, dim=-1, dtype=torch.float32), experts

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[0]
        weights, experts = self.route(x)
        flat = experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        offsets = torch.histc(flat.float(), bins=self.E, min=0, max=self.E - 1).cumsum(0, dtype=torch.int32)
        h = torch._grouped_mm(x[order // self.K], self.w_up.transpose(1, 2), offs=offsets)
        gate, up = h.chunk(2, dim=-1)
        y = torch._grouped_mm(F.silu(gate) * up, self.w_down.transpose(1, 2), offs=offsets)
        y = y * weights.reshape(-1)[order].unsqueeze(1).to(y.dtype)
        out = y[torch.argsort(order)].view(T, self.K, -1).sum(1)
        return out if self.shared is None else out + self.shared(x)


class TitanLayer(nn.Module):
    """The flow of torchtitan's all-to-all dispatcher around local experts: a row travels for each expert of a token."""

    def __init__(self, layer: Layer, mesh: DeviceMesh) -> None:
        super().__init__()
        self.K, self.E, self.group, ranks = layer.K, layer.E, mesh.get_group(), mesh.size()
        self.ranks, self.num_local = ranks, layer.E // ranks
        own = slice(mesh.get_local_rank() * self.num_local, (mesh.get_local_rank() + 1) * self.num_local)
        gate, up = layer.w_up.detach()[own].chunk(2, dim=1)
        self.router = nn.Parameter(layer.router.detach().clone())
        self.w1, self.w3 = nn.Parameter(gate.contiguous()), nn.Parameter(up.contiguous())
        self.w2 = nn.Parameter(layer.w_down.detach()[own].clone())
        self.register_buffer("popularity", layer.popularity.clone())
        self.shared = layer.shared

    def forward(self, x: Tensor) -> Tensor:
        logits, experts = torch.topk(F.linear(x, self.router) + self.popularity, self.K, dim=-1)
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32)
        flat = experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.histc(flat.float(), bins=self.E, min=0, max=self.E - 1).to(torch.int64)
        arrived = functional.wait_tensor(functional.all_to_all_single(counts, None, None, self.group))
        to = counts.view(self.ranks, self.num_local).sum(1).tolist()
        of = arrived.view(self.ranks, self.num_local).sum(1).tolist()
        for size in (*to, *of):
            torch._check(size >= 0)
        rows = functional.all_to_all_single_autograd(x[order // self.K], of, to, self.group)
        numbers = torch.arange(self.num_local, device=x.device).repeat(self.ranks)
        local = torch.repeat_interleave(numbers, arrived, output_size=rows.shape[0])
        by_expert = torch.argsort(local, stable=True)
        offsets = arrived.view(self.ranks, self.num_local).sum(0).cumsum(0).int()
        rows = rows[by_expert]
        a = F.silu(torch._grouped_mm(rows, self.w1.transpose(1, 2), offs=offsets))
        a = a * torch._grouped_mm(rows, self.w3.transpose(1, 2), offs=offsets)
        y = torch._grouped_mm(a, self.w2.transpose(1, 2), offs=offsets)
        y = torch.empty_like(y).index_copy(0, by_expert, y)
        y = functional.all_to_all_single_autograd(y, to, of, self.group)
        y = (y.float() * weights.reshape(-1)[order].unsqueeze(1)).to(x.dtype)
        token = (order // self.K).unsqueeze(1).expand(-1, x.shape[1])
        out = torch.zeros_like(x).scatter_add(0, token, y)
        return out if self.shared is None else out + self.shared(x)


class Bench:
    """Sides of one size on one mesh, and what was measured of them."""

    def __init__(self, arguments: argparse.Namespace, ep: int, T: int, skew: float, rows: list[dict]) -> None:
        self.arguments, self.ep, self.T, self.skew, self.rows = arguments, ep, T, skew, rows
        self.device = torch.device(arguments.device, int(os.environ["LOCAL_RANK"]) if arguments.device == "cuda" else None)
        self.dtype = torch.bfloat16
        world = dist.get_world_size()
        meshes = init_device_mesh(arguments.device, (world // ep, ep), mesh_dim_names=("data", "ep"))
        self.mesh = meshes["ep"]
        generator = torch.Generator(self.device).manual_seed(100 + dist.get_rank())
        options = {"device": self.device, "dtype": self.dtype, "generator": generator}
        self.x = (0.5 * torch.randn(T, arguments.width, **options)).requires_grad_()
        self.dout = torch.randn(T, arguments.width, **options)
        self.preference = 0.0
        if skew > 1:
            # The preference for experts of the first rank, halfway between one too weak and one too strong.
            low, high = 0.0, 32.0
            for _ in range(16):
                self.preference = (low + high) / 2
                low, high = (low, self.preference) if self.skew_of(self.layer()) > skew else (self.preference, high)

    def layer(self, experts: int | None = None) -> Layer:
        torch.manual_seed(7)
        a = self.arguments
        layer = Layer(a.width, a.hidden, experts or a.experts, a.choices, str(self.device), self.dtype, a.shared)
        if experts is None:
            layer.popularity[: a.experts // self.ep] = self.preference
        return layer

    @torch.no_grad()
    def skew_of(self, layer: Layer) -> float:
        """Rows of the first rank's experts over the mean of the other ranks."""
        chosen = layer.route(self.x)[1]
        first = (chosen < self.arguments.experts // self.ep).sum().double()
        dist.all_reduce(first)
        others = chosen.numel() * dist.get_world_size() - first
        return (first / (others / (self.ep - 1))).item()

    def side(self, name: str) -> tuple[nn.Module, Callable]:
        compiled = {"backend": "moeblaze", "dynamic": False} | ({"mode": "reduce-overhead"} if name.endswith("graphs") else {})
        is_bound = name in ("bound", "graphs", "captured")
        torch._dynamo.reset()
        config.arrived_rows = "bound" if is_bound else "exact"
        config.tokens_per_rank = self.T if is_bound else None
        config.transport = "nccl" if name == "nccl" else "auto"
        config.exchange = "all_to_all" if name == "alltoall" else "all_gather"
        config.experts_move = "weights" if name == "weights" else "tokens"
        if name.startswith("local"):
            model = self.layer(self.arguments.experts // self.ep)
            return model, torch.compile(model, **compiled)
        model = self.layer()
        if name == "titan":
            model = TitanLayer(model, self.mesh)
            torch._dynamo.config.capture_scalar_outputs = True
            return model, torch.compile(model, dynamic=False)
        shard_experts(model, self.mesh)
        return model, torch.compile(model, **compiled)

    def step(self, model: nn.Module, run: Callable) -> Tensor:
        model.zero_grad()
        self.x.grad = None
        out = run(self.x)
        out.backward(self.dout)
        return out.detach()

    def time(self, function: Callable) -> float:
        """Median milliseconds of one call."""
        dist.barrier()
        return statistics.median(event_time(function, self.arguments.repeats, self.arguments.device))

    def measure(self, name: str) -> dict[str, Tensor]:
        """Measure a side; returns the output and gradient of x to compare."""
        model, run = self.side(name)
        start = time.perf_counter()
        with switch.recording() as records:
            for _ in range(3):
                out = self.step(model, run).clone()
        results = {"output": out, "gradient of x": self.x.grad.clone(), "router": model.router.grad.clone()}
        compile_s = time.perf_counter() - start
        has_memory = self.arguments.device == "cuda" and not name.endswith("graphs")
        kept, peak = memory(run, self.x, self.dout) if has_memory else (0.0, 0.0)
        variants = self.arguments.free if name == "ours" else [0]
        as_run = captured if name.endswith("captured") else lambda function: function
        for free in variants:
            config.collective_multiprocessors = free or None
            self.step(model, run)
            both = self.time(as_run(lambda: self.step(model, run)))
            with torch.no_grad():
                run(self.x)
                forward = self.time(as_run(lambda: run(self.x)))
            self.record(name, free, both, forward, kept, peak, {"first_steps_s": round(compile_s, 1), "became": became(records)})
        config.collective_multiprocessors = None
        if self.arguments.trace:
            self.trace(name, as_run(lambda: self.step(model, run)))
        return results

    def trace(self, name: str, step: Callable) -> None:
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(2):
                step()
            torch.cuda.synchronize()
        if dist.get_rank() == 0:
            Path(self.arguments.trace).mkdir(parents=True, exist_ok=True)
            Path(self.arguments.trace, f"{name}_ep{self.ep}_{self.T}.txt").write_text("\n".join(timeline(profiler)) + "\n")

    def record(self, side: str, free: int, both: float, forward: float, kept: float, peak: float, rest: dict) -> None:
        a = self.arguments
        flops = 6 * self.T * a.choices * a.width * a.hidden
        numbers = torch.tensor([both, forward, kept, peak], device=self.device, dtype=torch.float64)
        everyone = [torch.zeros_like(numbers) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, numbers)
        both, forward, kept, peak = (max(values) for values in zip(*(each.tolist() for each in everyone), strict=True))
        row = {
            "ep": self.ep, "T": self.T, "K": a.choices, "skew": self.skew, "side": side, "free": free,
            "step_ms": round(both, 3), "forward_ms": round(forward, 3),
            "tflops": round(3 * flops / both / 1e9, 1), "forward_tflops": round(flops / forward / 1e9, 1),
            "kept_mib": round(kept), "peak_mib": round(peak), **rest,
        }  # fmt: skip
        local = [r["step_ms"] for r in self.rows if (r.get("ep"), r.get("T"), r.get("side")) == (self.ep, self.T, "local")]
        if local and side != "local":
            row |= {"exposed_ms": round(both - local[0], 3), "of_local": round(local[0] / both, 3)}
        self.add(row)

    def add(self, row: dict) -> None:
        self.rows.append(row)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            if self.arguments.json:
                write(self.arguments.json, self.rows)


def captured(function: Callable) -> Callable:
    """What replays a call of a function that it captured in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def timeline(profiler: torch.profiler.profile) -> list[str]:
    """What ran on the GPU, a line each: start and duration in us, stream, us since the launch, name."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = [event for event in json.loads(Path(file.name).read_text())["traceEvents"] if "dur" in event]
    launched = {e["args"].get("correlation"): e["ts"] for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    ran = sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda event: event["ts"])
    lines = [f"{'start':>10} {'us':>8} {'stream':>6} {'ahead':>8}  name"]
    for event in ran:
        ahead = event["ts"] - launched.get(event["args"].get("correlation"), event["ts"])
        start, stream = event["ts"] - ran[0]["ts"], event["args"]["stream"]
        lines.append(f"{start:10.1f} {event['dur']:8.1f} {stream:6} {ahead:8.1f}  {event['name'][:100]}")
    return lines


def write(path: str, rows: list[dict]) -> None:
    with open(f"{path}.part", "w") as file:
        json.dump(rows, file, indent=1)
    os.replace(f"{path}.part", path)


def compare(bench: Bench, name: str, results: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Record the relative difference of two sides."""
    errors = {}
    for key, value in reference.items():
        error = torch.tensor(relative_error(results[key], value), device=value.device)
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        errors[key] = round(error.item(), 5)
    bench.add({"ep": bench.ep, "T": bench.T, "skew": bench.skew, "compared": name, "errors": errors,
               "agree": max(errors.values()) < REFERENCE_TOLERANCE})  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ep", type=int, nargs="+", default=[2])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--sides", nargs="+", default=["local", "ours", "nccl", "bound", "titan", "weights"])
    parser.add_argument("--free", type=int, nargs="+", default=[0, 16, 32], help="multiprocessors left to collectives")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--choices", type=int, default=8)
    parser.add_argument("--skew", type=float, nargs="+", default=[1.0], help="rows of one rank over those of another")
    parser.add_argument("--shared", type=int, default=0, help="width of a shared expert, which every token goes through")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--trace", help="folder for timelines of a GPU")
    arguments = parser.parse_args()
    join_ranks(arguments.device)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    setting = {"device": device, "date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__}
    setting["nccl_max_ctas"] = os.environ.get("NCCL_MAX_CTAS")
    rows: list[dict] = [{"world": dist.get_world_size(), **setting}]
    for T, ep, skew in itertools.product(arguments.tokens, arguments.ep, arguments.skew):
        bench = Bench(arguments, ep, T, skew, rows)
        reference: tuple[str, dict[str, Tensor]] | None = None
        for name in arguments.sides:
            if skew != arguments.skew[0] and name.startswith("local"):
                continue
            try:
                results = bench.measure(name)
                if not name.startswith("local"):
                    if reference is not None:
                        compare(bench, f"{name} with {reference[0]}", results, reference[1])
                    reference = reference or (name, results)
            except Exception as error:
                traceback.print_exc()
                bench.add({"ep": ep, "T": T, "side": name, "error": f"{type(error).__name__}: {str(error)[:500]}"})
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
