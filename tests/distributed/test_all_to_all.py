"""Tokens that go to the ranks of their experts alone: numbers of one process, on ranks with any number of tokens and rows."""

import functools
import itertools
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from tests.corpus.zoo import catalogue as zoo
from tests.distributed.test_shard_experts import LISTED
from tests.distributed.test_sharded_tokens import compiled, names_in
from tests.distributed.test_uneven_tokens import Checkpointed, without_router
from tests.tools.ranks import assert_passed, run_checks

E, D, F = 8, 6, 5
COUNTS = {2: [(5, 33), (0, 3), (0, 0)], 4: [(5, 33, 0, 1), (0, 0, 7, 0), (0, 0, 0, 0)]}


def routing_of(rank: int, count: int, K: int, chosen: str) -> Tensor:
    """Expert ids of a rank's tokens, of which some go nowhere in part or at all."""
    generator = torch.Generator().manual_seed(rank)
    first = E // dist.get_world_size()
    most = {"any": E, "of the first rank": first, "none": 1}[chosen]
    ids = torch.stack([torch.randperm(most, generator=generator)[:K] for _ in range(count)]) if most >= K and count else None
    ids = torch.randint(0, most, (count, K), generator=generator) if ids is None else ids
    unused = torch.rand(count, K, generator=generator) < (1 if chosen == "none" else 0.2)
    return ids.masked_fill(unused, -1)


def as_written(x: Tensor, weights: Tensor | None, ids: Tensor, w_up, b_up, w_down, b_down, on_input: bool) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        for k in range(ids.shape[1]):
            weight = (ids[:, k] == e).to(x.dtype)
            weight = weight if weights is None else weight * weights[:, k]
            h = (x * weight[:, None] if on_input else x) @ w_up[e, 0].t() + b_up[e, 0]
            y = nn.functional.silu(h) @ w_down[e] + b_down[e]
            out = out + (y * (ids[:, k] == e)[:, None] if on_input else y * weight[:, None])
    return out


def check_function(
    K: int, chosen: str = "any", weighted: bool = True, on_input: bool = False, exact: bool = True, keep: str = "preactivation"
) -> None:
    """The function itself, eager: output, gradients, and both once more. Of rows of width D it keeps x alone."""
    from moeblaze_ops.ops.sharded.experts_over_ranks import experts_over_ranks
    from moeblaze_ops.ops.sharded.hosts import hosts_of
    from tests.tools import sharded_layers as harness

    world, rank = dist.get_world_size(), dist.get_rank()
    here = slice(rank * E // world, (rank + 1) * E // world)
    group = dist.group.WORLD.group_name
    whole = [torch.randn(shape) for shape in ((E, 1, F, D), (E, 1, F), (E, F, D), (E, D))]
    for counts in COUNTS[world]:
        count = counts[rank]
        x, dout = (harness.tokens_of(rank + more, D, count) for more in (0, 10))
        weights = torch.rand(count, K, generator=torch.Generator().manual_seed(rank)) if weighted else None
        ids = routing_of(rank, count, K, chosen)

        def gradients(run, parameters, x=x, dout=dout, weights=weights):
            leaves = [each.clone().requires_grad_() for each in (x, *([] if weights is None else [weights]), *parameters)]
            own, parameters = (leaves[:1], leaves[1:]) if weights is None else (leaves[:2], leaves[2:])
            out = run(own[0], own[1] if len(own) == 2 else None, *parameters)
            names = ("x", *([] if weights is None else ["weights"]), "w_up", "b_up", "w_down", "b_down")
            found = torch.autograd.grad(out, [*own, *parameters], dout, allow_unused=True)
            return {"output": out.detach(), **dict(zip(names, found, strict=True))}

        def ours(x, weights, w_up, b_up, w_down, b_down, ids=ids):
            settings = ("silu", on_input, list(range(world)), group, False, exact, keep, hosts_of(group))
            return experts_over_ranks(x, None, weights, ids, [w_up], [b_up], [w_down], [b_down], *settings)

        wanted = gradients(lambda x, weights, *parameters, ids=ids: as_written(x, weights, ids, *parameters, on_input), whole)
        for name in ("w_up", "b_up", "w_down", "b_down"):
            dist.all_reduce(wanted[name])
            wanted[name] = wanted[name][here]
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda each, kept=kept: kept.append(each) or each, lambda each: each):
            first = gradients(ours, [each[here] for each in whole])
        assert [each.shape for each in kept if each.dim() == 2 and each.shape[1] == D] == [x.shape, whole[-1][here].shape]
        second = gradients(ours, [each[here] for each in whole])
        harness.assert_close(first, wanted, in_eight_bits=keep == "h8")
        assert all(torch.equal(value, second[name]) for name, value in first.items())


def check_route(K: int) -> None:
    """A token goes once to each rank with an expert of it, and each rank knows what comes."""
    from moeblaze_ops.ops.sharded.all_to_all import route_to_ranks

    world, rank = dist.get_world_size(), dist.get_rank()
    num_local = E // world
    for counts in COUNTS[world]:
        ids = [routing_of(r, count, K, "any") for r, count in enumerate(counts)]
        to = [[((of >= r * num_local) & (of < (r + 1) * num_local)) for r in range(world)] for of in ids]
        route = route_to_ranks(ids[rank], torch.empty(num_local, 1), dist.group.WORLD.group_name)
        assert route.tokens_S.tolist() == [
            token for r in range(world) for token in to[rank][r].any(1).nonzero().flatten().tolist()
        ]
        leaving = [int(to[rank][r].any(1).sum()) for r in range(world)]
        arriving = [int(to[r][rank].any(1).sum()) for r in range(world)]
        slots = sum(int(to[r][rank].sum()) for r in range(world))
        assert [len(number) for number in route.numbers] == [*leaving, *arriving, slots]


def layer(name: str, K: int) -> nn.Module:
    torch.manual_seed(0)
    if name in LISTED:
        return zoo.ModuleListMoE(getattr(zoo, name), zoo.GluMLP, K=K, normalise=False)
    return zoo.stacked(name, K=K, normalise=False)


def check_layer(name: str, K: int, steps=None, backend: str = "eager", first_only: bool = False) -> None:
    """Steps of one compiled layer that the rewriter knows, each twice, with the same bits."""
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    world, rank = dist.get_world_size(), dist.get_rank()
    model = layer(name, K)
    shard_experts(model, harness.axis())
    run, graphs, reports = compiled(model, backend)
    for number, counts in enumerate(steps or COUNTS[world][:2]):
        inputs = [harness.tokens_of(10 * number + r, zoo.D, count) for r, count in enumerate(counts)]
        if first_only:
            gate = model.router.gate.weight.detach()
            inputs = [x + 20 * (gate[0] - gate[1:].sum(0)) for x in inputs]
        wanted = harness.in_one_process(layer(name, K), inputs)[rank]
        wanted = harness.joined_entries(wanted, "experts", zoo.E) if name in LISTED else wanted
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            first, second = (without_router(harness.train(model, run, inputs[rank])) for _ in range(2))
        harness.assert_close(first, without_router(wanted))
        assert all(torch.equal(value, second[key]) for key, value in first.items())
    names = names_in(graphs)
    assert names.count("experts_over_ranks") == len(graphs) > 0, reports
    unwanted = ("redistribute", "start_gather_of_tokens", "most_tokens.default")
    assert not [called for called in names if called in unwanted], names


def check_one_axis() -> None:
    """Two groups of two ranks, each with all experts."""
    from torch.distributed.device_mesh import init_device_mesh

    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))["ep"]
    model, rank = layer("dense_einsum", 1), mesh.get_local_rank()
    shard_experts(model, mesh)
    run, graphs, _ = compiled(model)
    inputs = [harness.tokens_of(r, zoo.D, 3 + dist.get_rank() // 2 + r) for r in range(2)]
    got = harness.train(model, run, inputs[rank])
    harness.assert_close(*map(without_router, (got, harness.in_one_process(layer("dense_einsum", 1), inputs)[rank])))
    names = names_in(graphs)
    assert "experts_over_ranks" in names and "start_gather_of_tokens" not in names, names


def check_checkpointed(within_graph: bool, K: int = 1) -> None:
    """A layer that is run again in backward, by the compiled graph or from outside, on ranks without tokens as well."""
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    world, rank = dist.get_world_size(), dist.get_rank()
    model = layer("stacked_loop", K)
    shard_experts(model, harness.axis())
    run, graphs, reports = compiled(Checkpointed(model) if within_graph else model, "aot_eager")
    run = run if within_graph else Checkpointed(run)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for number, counts in enumerate(COUNTS[world][:2]):
            inputs = [harness.tokens_of(10 * number + r, zoo.D, count) for r, count in enumerate(counts)]
            wanted = harness.in_one_process(layer("stacked_loop", K), inputs)[rank]
            harness.assert_close(*map(without_router, (harness.train(model, run, inputs[rank]), wanted)))
    everywhere = [inner.graph for graph in graphs for inner in graph.owning_module.modules() if isinstance(inner, fx.GraphModule)]
    names = names_in(everywhere)
    assert names.count("experts_over_ranks") == len(graphs) > 1 and "start_gather_of_tokens" not in names, reports


def check_choice(every_knob: bool = True) -> None:
    """An all-to-all where there are more ranks than experts per token; the report says both, and a knob decides otherwise."""
    from moeblaze_ops import config
    from moeblaze_ops.distributed import shard_experts
    from moeblaze_ops.explanation import size_text
    from tests.tools import sharded_layers as harness

    world = dist.get_world_size()
    x = harness.tokens_of(dist.get_rank(), zoo.D, 4096)
    row = 5 * 4096 * zoo.D * 8
    # Of 4 experts on 4 ranks, K are on K ranks; of 4 on 2 ranks, one is on one, and two are on 1 + 2/3.
    reached = {(4, 1): 0.75, (4, 2): 1.5, (2, 1): 0.5, (2, 2): 0.833}
    automatic = {"exchange": "auto", "arrived_rows": "exact", "transport": "auto"}
    cases = [
        (1, {}, "all-to-all"),
        (2, {}, "all-to-all" if world > 2 else "all-gather"),
        (1, {"exchange": "all_gather"}, "all-gather"),
        (2, {"exchange": "all_to_all"}, "all-to-all"),
        (1, {"arrived_rows": "bound"}, "all-gather"),
        (1, {"transport": "copies"}, "all-gather"),
    ]
    try:
        for K, settings, taken in cases if every_knob else cases[:2]:
            for key, value in {**automatic, **settings}.items():
                setattr(config, key, value)
            model = layer("dense_einsum", K)
            shard_experts(model, harness.axis())
            run, _, reports = compiled(model)
            with torch.no_grad():
                run(x)
            shares = {"all-gather": world - 1, "all-to-all": reached[world, K]}
            sizes = {exchange: size_text(row * share) for exchange, share in shares.items()}
            other = "all-to-all" if taken == "all-gather" else "all-gather"
            (candidate,) = reports[0].candidates
            wanted = f"{sizes[taken]} of tokens move between {world} ranks, not"
            assert wanted in candidate.became, (candidate.became, settings)
            wanted = f"; {sizes[taken]} by {taken}, not {sizes[other]} by {other}"
            assert candidate.became.endswith(wanted), (candidate.became, wanted)
    finally:
        for key, value in automatic.items():
            setattr(config, key, value)


def check_calls() -> None:
    """What a step asks of the process group and of the host."""
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    model = layer("dense_einsum", 1)
    shard_experts(model, harness.axis())
    run, _, _ = compiled(model, "aot_eager")
    x = harness.tokens_of(dist.get_rank(), zoo.D).requires_grad_()
    run(x).sum().backward()  # compiles
    out, forward = harness.collectives(lambda: run(x))
    _, backward = harness.collectives(out.square().sum().backward)
    _, ours = harness.counting(lambda: run(x), "moeblaze::")
    assert (sum(forward.values()), sum(backward.values())) == (4, 4), (forward, backward)
    assert all("alltoall" in name for name in (*forward, *backward)), (forward, backward)
    assert ours["row_numbers"] == 1 and "used_slots" not in ours and "most_tokens" not in ours, ours


def test_share_reached():
    """As many other ranks as all choices of K experts reach on average."""
    from moeblaze_ops.lowering.rewrite.sharded import share_reached

    for ranks, experts, K in ((2, 4, 1), (2, 4, 2), (4, 8, 2), (4, 8, 3), (3, 6, 5)):
        chosen = list(itertools.combinations(range(experts), K))
        reached = sum(len({e // (experts // ranks) for e in each} - {0}) for each in chosen)
        assert share_reached(ranks, experts, K) == Fraction(reached, len(chosen) * (ranks - 1))


def test_sum_of_rows():
    """In the order of ranks and in fp32, rounded once; a token without rows gets zeros."""
    from moeblaze_ops.ops.sharded.all_to_all import sum_rows

    rows = torch.tensor([[2.0**-9], [1.0], [2.0**-9], [-1.0]], dtype=torch.bfloat16)
    positions = torch.tensor([[1, 0, 2], [-1, -1, -1], [-1, 3, 1]], dtype=torch.int32)
    assert sum_rows(rows, positions).tolist() == [[1.0], [0.0], [0.0]]
    assert sum_rows(rows.float(), positions).tolist() == [[1.0 + 2.0**-8], [0.0], [0.0]]
    big = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]])
    orders = torch.tensor([[0, 1, 2], [0, 2, 1]], dtype=torch.int32)
    assert sum_rows(big, orders).tolist() == [[0.0], [1.0]]
    assert sum_rows(big[:0], torch.full((3, 2), -1, dtype=torch.int32)).tolist() == [[0.0]] * 3


FUNCTION = {
    **{f"route, K {K}": functools.partial(check_route, K) for K in (1, 2)},
    **{f"function, K {K}": functools.partial(check_function, K) for K in (1, 2)},
    "function, all to the first rank": functools.partial(check_function, 1, "of the first rank"),
    "function, no expert": functools.partial(check_function, 2, "none"),
    "function, no weights": functools.partial(check_function, 2, weighted=False),
    "function, weights on input": functools.partial(check_function, 2, on_input=True),
    "function, room for all slots": functools.partial(check_function, 1, exact=False),
    "function, keeps eight bits": functools.partial(check_function, 2, keep="h8"),
    "function, keeps the input": functools.partial(check_function, 2, keep="input"),
}
WITHOUT_NONE = {2: [(5, 33)], 4: [(5, 33, 1, 8)]}
"""No rank without tokens, for which a spelling of grouped rows has no shape."""
OTHERS = {
    "stacked_loop, K 1": functools.partial(check_layer, "stacked_loop", 1, backend="aot_eager"),
    "all to the first rank": functools.partial(check_layer, "stacked_loop", 1, WITHOUT_NONE[2], first_only=True),
    "through Inductor": functools.partial(check_layer, "loop_mixtral", 1, [(0, 33)], backend="inductor"),
    "checkpointed from outside": functools.partial(check_checkpointed, within_graph=False),
    "checkpointed in the graph": functools.partial(check_checkpointed, within_graph=True),
    "choice": check_choice,
    "calls": check_calls,
}
OF_FOUR = {
    "dense_einsum, K 1": functools.partial(check_layer, "dense_einsum", 1, WITHOUT_NONE[4]),
    "stacked_loop, K 2": functools.partial(check_layer, "stacked_loop", 2, [(5, 0, 33, 1)], "aot_eager"),
    "sorted_transformers, K 2": functools.partial(check_layer, "sorted_transformers", 2, WITHOUT_NONE[4]),
    "one axis of two": check_one_axis,
    "choice": functools.partial(check_choice, every_knob=False),
}
CHECKS = {2: FUNCTION | OTHERS, 4: FUNCTION | OF_FOUR}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[int, dict[str, list[str]]]:
    return {ranks: run_checks(checks, ranks, tmp_path_factory.mktemp("ranks")) for ranks, checks in CHECKS.items()}


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, checks in CHECKS.items() for name in checks])
def test_on_ranks(outcomes, ranks, name):
    assert_passed(outcomes[ranks][name])
