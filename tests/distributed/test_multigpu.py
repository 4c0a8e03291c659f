"""Sharded experts on GPUs through NCCL: numbers against one GPU, memory, skew, and what raises. ``pytest -m multigpu``.

One start of the processes for each number of GPUs serves all tests that were asked for; ``-s`` shows each as it ends.
"""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.tools.ranks import assert_passed, run_checks

pytestmark = pytest.mark.multigpu

T, D, F, E, K = 1024, 256, 128, 16, 4
TOLERANCE = 2e-2
"""Relative, in the norm: bf16 rounds to 4e-3, and ways differ in where they round."""


class Layer(nn.Module):
    """Softmax, top-k and a loop over stacked experts."""

    def __init__(self) -> None:
        super().__init__()
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.router = nn.Parameter(torch.randn(E, D, **options) * 0.1)
        self.gate_up = nn.Parameter(torch.randn(E, 2 * F, D, **options) * D**-0.5)
        self.down = nn.Parameter(torch.randn(E, D, F, **options) * F**-0.5)
        self.register_buffer("popularity", torch.zeros(E, **options))

    def forward(self, x: Tensor) -> Tensor:
        logits = nn.functional.linear(x, self.router) + self.popularity
        weights, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            gate, up = nn.functional.linear(x[token], self.gate_up[e]).chunk(2, dim=-1)
            y = nn.functional.linear(nn.functional.silu(gate) * up, self.down[e])
            out = out.index_add(0, token, (y * weights[token, slot, None]).to(x.dtype))
        return out


def layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


def tokens(rank: int, count: int = T) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(100 + rank)
    return torch.randn(count, D, device="cuda", dtype=torch.bfloat16, generator=generator)


def train(model: nn.Module, run, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    out.float().square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in gradients.items()}
    return {"output": out.detach(), "gradient of x": x.grad, **whole}


def wanted(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    results = [train(model, model, x) for x in inputs]
    own = results[dist.get_rank()]
    sums = {name: sum(r[name].float() for r in results) for name in ("gate_up", "down")}
    return {"output": own["output"], "gradient of x": own["gradient of x"], "router": own["router"], **sums}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        error = (got[name].float() - value.float()).norm() / value.float().norm().clamp(min=1e-30)
        assert error < TOLERANCE, f"{name}: relative error {error.item():.4f}"


def sharded(model: nn.Module | None = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    from moeblaze_ops.distributed import shard_experts

    model = model or layer()
    shard_experts(model, init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    return model


def compiled(model: nn.Module):
    import moeblaze_ops

    torch._dynamo.reset()
    moeblaze_ops.enable()
    return torch.compile(model)


def check_numbers(popularity: float = 0.0, popular: int = 1, **settings) -> None:
    from moeblaze_ops import compile as switch
    from moeblaze_ops import config

    defaults = {"experts_move": "tokens", "arrived_rows": "exact", "keep": "preactivation", "transport": "nccl"}
    defaults["exchange"] = "all_gather"
    for name, value in {**defaults, **settings}.items():
        setattr(config, name, value)
    inputs = [tokens(rank) for rank in range(dist.get_world_size())]
    one, model = layer(), layer()
    for each in (one, model):
        # Logits of popular experts stay as they are: compiled code does not round a sum before it takes the softmax of it.
        each.popularity[popular:] = -popularity
    expected = wanted(one, inputs)
    run = compiled(sharded(model))
    with switch.recording() as records:
        results = [train(model, run, inputs[dist.get_rank()]) for _ in range(3)]
    became = [c.became for r in records if isinstance(r, switch.GraphRecord) and r.dropped is None for c in r.report.rewritten]
    assert any("experts_over_ranks" in text for text in became) == (settings.get("experts_move") != "weights"), records
    assert_close(results[0], expected)
    for name, value in results[0].items():
        assert all(torch.equal(value, result[name]) for result in results[1:]), f"{name} differs between runs"


def check_eager() -> None:
    inputs = [tokens(rank) for rank in range(dist.get_world_size())]
    expected = wanted(layer(), inputs)
    model = sharded()
    assert_close(train(model, model, inputs[dist.get_rank()]), expected)


def check_batch_invariant() -> None:
    """What a token gets beside those of this rank alone has the bits that it gets on one GPU beside those of all ranks."""
    from moeblaze_ops import config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "batch_invariant", True)
        rank = dist.get_rank()
        counts = [64 + 200 * other for other in range(dist.get_world_size())]
        inputs = [tokens(other, count) for other, count in enumerate(counts)]
        alone, model = layer(), layer()
        expected = train(alone, compiled(alone), torch.cat(inputs))
        found = train(model, compiled(sharded(model)), inputs[rank])
        first = sum(counts[:rank])
        for name in ("output", "gradient of x"):
            assert torch.equal(found[name], expected[name][first : first + counts[rank]]), name


def check_two_hosts() -> None:
    """Tokens cross once to each of two hosts, for which halves of four ranks are taken."""
    from moeblaze_ops.ops.sharded import hosts

    if (ranks := dist.get_world_size()) == 4:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hosts, "_this_host", lambda: dist.get_rank() // (ranks // 2))
            check_numbers(exchange="auto")


def check_uneven_tokens(transport: str = "nccl", exchange: str = "all_gather") -> None:
    """Tokens or weights move for any number of tokens on a rank, none included."""
    from moeblaze_ops import config

    config.arrived_rows, config.transport, config.exchange = "exact", transport, exchange
    rank = dist.get_rank()
    inputs = [tokens(r, count=0 if r == 1 else 64 * (r + 1)) for r in range(dist.get_world_size())]
    expected = wanted(layer(), inputs)
    for moves in ("tokens", "weights"):
        config.experts_move = moves
        model = sharded()
        got = train(model, compiled(model), inputs[rank])
        assert_close({**got, "router": expected["router"]}, expected)


def check_steps_by_copies() -> None:
    """Copy engines give what collectives give, in every one of many steps that follow each other without a pause."""
    from moeblaze_ops import config

    config.experts_move, config.arrived_rows, config.keep, config.exchange = "tokens", "exact", "preactivation", "all_gather"
    inputs = [tokens(10 * step + dist.get_rank(), count=4096 if step % 3 else 8192) for step in range(12)]
    results = {}
    for transport in ("nccl", "copies"):
        config.transport = transport
        model = sharded()
        run = compiled(model)
        results[transport] = [train(model, run, x) for x in inputs]
    for by_collectives, by_copies in zip(*results.values(), strict=True):
        assert_close(by_copies, by_collectives)
        # Two ranks add two numbers either way.
        same = dist.get_world_size() > 2 or all(torch.equal(by_copies[name], value) for name, value in by_collectives.items())
        assert same


def check_cuda_graphs() -> None:
    """Graphs of forward and backward, and of a whole step, give the same bits, also after the window of the ranks has grown."""
    from moeblaze_ops import config

    config.experts_move, config.arrived_rows, config.keep, config.exchange = "tokens", "bound", "preactivation", "all_gather"
    config.transport, config.tokens_per_rank = "copies", T
    model, x = sharded(), tokens(dist.get_rank()).requires_grad_()

    def step(run) -> list[Tensor]:
        model.zero_grad()
        x.grad = None
        out = run(x)
        out.float().square().sum().backward()
        return [out.detach(), x.grad, *(getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters())]

    run = compiled(model)
    expected = [each.clone() for each in (step(run), step(run))[1]]
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        results = step(run)
    torch._dynamo.reset()
    in_two = torch.compile(model, mode="reduce-overhead")
    for _ in range(4):
        assert all(map(torch.equal, step(in_two), expected))
    for count in (T, 8 * T):
        config.tokens_per_rank = count
        compiled(model)(tokens(dist.get_rank(), count))
        for each in results:
            each.fill_(float("nan"))
        captured.replay()
        assert all(map(torch.equal, results, expected))
    config.tokens_per_rank = None


def check_memory(transport: str = "nccl") -> None:
    """Kept: x, h of the rows that arrived, and indices."""
    from moeblaze_ops import config

    config.experts_move, config.arrived_rows, config.keep, config.exchange = "tokens", "exact", "preactivation", "all_gather"
    config.transport = transport
    model = sharded()
    run = compiled(model)
    x = tokens(dist.get_rank(), count=8192).requires_grad_()
    for _ in range(2):
        run(x).float().sum().backward()
    model.zero_grad()
    x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = run(x)
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    with torch.no_grad():
        everyone = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, x.detach())
        logits = nn.functional.linear(torch.cat(everyone), model.router)
        ids = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), K, dim=-1).indices
        first = dist.get_rank() * E // dist.get_world_size()
        arrived = int(((ids >= first) & (ids < first + E // dist.get_world_size())).sum())
    h = arrived * 2 * F * 2
    slots = ids.numel()
    routing = 4 * (3 * slots + slots // 128) + 4 * T * E * 4 + 8 * x.shape[0] * E + 16 * x.shape[0] * K
    assert kept <= 1.05 * (h + routing) + (1 << 20), (kept, h, routing)


def check_bits_rank_by_rank() -> None:
    """Rows that go through the experts rank by rank get the bits of all at once."""
    from moeblaze_ops import config
    from moeblaze_ops.ops.sharded import by_rank
    from moeblaze_ops.ops.sharded.exchange import choose_exchange, moe_over_ranks

    config.exchange, config.transport, config.tokens_per_rank = "all_gather", "copies", None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Of the second size x is more than the cache holds, and blocks of rows come in another order.
    for (count, width, hidden), arrived_rows, keep, is_uneven in itertools.product(
        [(T, D, F), (16384, 2048, 768)], ("exact", "bound"), ("preactivation", "input"), (False, True)
    ):
        config.arrived_rows, config.keep = arrived_rows, keep
        generator = torch.Generator("cuda").manual_seed(rank)
        options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        count = count // ranks * rank if is_uneven else count
        x, dout = (torch.randn(count, width, **options) for _ in range(2))
        weights, ids = torch.rand(count, E, device="cuda", generator=generator).topk(K)
        up = torch.randn(E // ranks, 2, hidden, width, **options) * width**-0.5
        down = torch.randn(E // ranks, hidden, width, **options) * hidden**-0.5
        leaves = [tensor.requires_grad_() for tensor in (x, weights, up, down)]
        exchange = choose_exchange(dist.group.WORLD.group_name, K, on_gpu=True)
        results = []
        for least in (1, 1 << 40, 1, 1):
            by_rank.LEAST_BYTES_OF_HOST = by_rank.LEAST_ROWS = least
            out = moe_over_ranks(x, weights, ids, [up], [], [down], [], "swiglu", *exchange)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
            with torch.no_grad():
                results[-1].append(moe_over_ranks(x, weights, ids, [up], [], [down], [], "swiglu", *exchange))
        for name, first, *others in zip(("out", "x", "weights", "up", "down", "inference"), *results, strict=True):
            assert all(torch.equal(first, other) for other in others), f"{name}: {count}, {arrived_rows}, {keep}"


def rank_by_rank(check: Callable[..., None], **settings) -> None:
    """A check where rows of every number go through the experts rank by rank."""
    from moeblaze_ops.ops.sharded import by_rank, peer_copies

    least = by_rank.LEAST_BYTES_OF_HOST, by_rank.LEAST_ROWS, peer_copies.LEAST_BYTES
    by_rank.LEAST_BYTES_OF_HOST = by_rank.LEAST_ROWS = peer_copies.LEAST_BYTES = 1
    try:
        check(**settings)
    finally:
        by_rank.LEAST_BYTES_OF_HOST, by_rank.LEAST_ROWS, peer_copies.LEAST_BYTES = least


CHECKS = {
    "bits, rank by rank": functools.partial(rank_by_rank, check_bits_rank_by_rank),
    "rank by rank": functools.partial(rank_by_rank, check_numbers, transport="copies"),
    "uneven tokens, rank by rank": functools.partial(rank_by_rank, check_uneven_tokens, transport="copies"),
    "most tokens to one rank, rank by rank": functools.partial(rank_by_rank, check_numbers, popularity=8.0, transport="copies"),
    "many steps, rank by rank": functools.partial(rank_by_rank, check_steps_by_copies),
    "CUDA graphs, rank by rank": functools.partial(rank_by_rank, check_cuda_graphs),
    "tokens move": check_numbers,
    "room for all rows": functools.partial(check_numbers, arrived_rows="bound"),
    "keeps the input": functools.partial(check_numbers, keep="input"),
    "most tokens to one rank": functools.partial(check_numbers, popularity=8.0),
    "weights move": functools.partial(check_numbers, experts_move="weights"),
    "eager": check_eager,
    "memory": check_memory,
    "uneven tokens": check_uneven_tokens,
    "tokens move by copies": functools.partial(check_numbers, transport="copies"),
    "room for all rows, by copies": functools.partial(check_numbers, arrived_rows="bound", transport="copies"),
    "keeps the input, by copies": functools.partial(check_numbers, keep="input", transport="copies"),
    "most tokens to one rank, by copies": functools.partial(check_numbers, popularity=8.0, transport="copies"),
    "memory, by copies": functools.partial(check_memory, transport="copies"),
    "uneven tokens, by copies": functools.partial(check_uneven_tokens, transport="copies"),
    "many steps by copies": check_steps_by_copies,
    "CUDA graphs, by copies": check_cuda_graphs,
    "tokens move by all-to-all": functools.partial(check_numbers, exchange="all_to_all"),
    "keeps the input, by all-to-all": functools.partial(check_numbers, keep="input", exchange="all_to_all"),
    "all tokens to one rank, by all-to-all": functools.partial(check_numbers, 16.0, E // 4, exchange="all_to_all"),
    "uneven tokens, by all-to-all": functools.partial(check_uneven_tokens, exchange="all_to_all"),
    "batch invariant": check_batch_invariant,
    "two hosts": check_two_hosts,
}


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request, tmp_path_factory) -> dict[str, list[str]]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} CUDA devices")
    asked = {item.callspec.params["name"] for item in request.session.items if item.function is test_on_gpus}
    checks = {name: check for name, check in CHECKS.items() if name in asked}
    return run_checks(checks, request.param, tmp_path_factory.mktemp("ranks"), "cuda")


@pytest.mark.parametrize("name", CHECKS)
def test_on_gpus(outcomes, name):
    assert_passed(outcomes[name])
