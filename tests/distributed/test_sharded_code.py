"""The order of the code that Inductor generates for layers whose tokens move. One process plays a rank of two."""

import functools
import re
from collections import Counter
from unittest import mock

import pytest
import torch
import torch._inductor.memory
import torch.distributed as dist
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd import autograd_cache
from torch.utils.checkpoint import checkpoint

from moeblaze_ops import compile as _switch
from moeblaze_ops.lowering.torch_internals import inductor
from moeblaze_ops.ops.sharded.collectives import local_shard, most_tokens, start_gather_of_tokens
from moeblaze_ops.ops.sharded.experts_over_ranks import experts_over_ranks
from tests.corpus.zoo import catalogue as zoo
from tests.tools import fakecuda
from tests.tools.slow_copies import rank_of

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")

T, D, F, E, K, RANKS = 64, 64, 128, 4, 2, 2


@pytest.fixture
def group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@torch._dynamo.allow_in_graph
def begins(x):
    """Stands where tokens leave."""
    return x.new_empty(RANKS * T, D)


@torch._dynamo.allow_in_graph
def ends(x, gathered, weights, ids, w_up, w_down):
    """Stands where the layer was."""
    return x.clone()


@torch._dynamo.allow_in_graph
def both(x, y, ids, *weights):
    """Stands where two layers are."""
    return x.sum() + y.sum()


def as_many_come(arriving_R2, leaving_R2, group):
    """As many rows arrive as leave, with all slots, whatever they hold: this group moves nothing."""
    arriving_R2[:, 0] = leaving_R2[:, 0]
    arriving_R2[:, 1] = leaving_R2[:, 0] * K


def layer(x, w_router, w_up, w_down):
    gathered = begins(x)
    weights, ids = torch.topk(torch.softmax(x @ w_router, -1), K, dim=-1)
    return ends(x, gathered, weights, ids, w_up, w_down)


def generated(
    group: str,
    copies: bool,
    exact: bool = False,
    dtype: torch.dtype = torch.float32,
    all_to_all: bool = False,
) -> list[str]:
    """Forward and backward of a layer whose tokens move, in a graph as the rewriter leaves it."""

    def start(x):
        rows = most_tokens(x, None, group, "a layer") if exact else T
        if all_to_all:
            return x
        return start_gather_of_tokens(x, rows, RANKS, group, copies)

    def experts(x, gathered, weights, ids, w_up, w_down):
        settings = ("swiglu", False, list(range(RANKS)), group, copies, exact, "preactivation")
        given = None if all_to_all else gathered
        return experts_over_ranks(x, given, weights, ids, [w_up], [], [w_down], [], *settings)

    def rewritten(graph, inputs):
        for node in graph.graph.nodes:
            node.target = {begins: start, ends: experts}.get(node.target, node.target)
        graph.recompile()
        return shadow(graph, inputs)

    shapes = ((T, D), (D, E), (E // RANKS, 2, F, D), (E // RANKS, F, D))
    inputs = [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]
    sources: list[str] = []
    shadow = fakecuda.shadow_backend(sources)
    torch._dynamo.reset()
    with rank_of(RANKS), mock.patch.object(dist, "all_to_all_single", as_many_come):
        torch.compile(layer, backend=rewritten)(*inputs).sum().backward()
    return sources


def order(code: str) -> list[str]:
    """What is started, waited for and launched; waits with what they wait for."""
    body = code[code.index("def call(") :]
    names: dict[str, str] = {}
    found = []
    for line in body.splitlines():
        part = re.search(r"(\w+) = (\w+)\[\d+\]$", line.strip())
        if part and part[2] in names:
            names[part[1]] = names[part[2]]
        starts = "all_gather_into_tensor|reduce_scatter_tensor|gather_rows|sum_parts|all_to_all_single"
        started = re.search(rf"(\w+) = torch\.ops\.\w+\.({starts})\b", line)
        waited = re.search(r"(?:wait_tensor|arrived)\.default\((\w+)\)", line)
        launched = re.search(r"(_expert_\w+_kernel|_combine_kernel)_\d+\.run", line)
        by_rank = re.search(r"(\w+) = torch\.ops\.moeblaze\.(expert_\w+_by_rank)\.default\((\w+)", line)
        if started:
            names[started[1]] = f"{started[2]} {len(names)}"
            found.append(f"start {names[started[1]]}")
        elif waited:
            found.append(f"wait {names[waited[1]]}")
        elif by_rank:
            found.append(" ".join([by_rank[2], *re.findall("gather_rows.*", names.get(by_rank[3], ""))]))
            names[by_rank[1]] = f"sum of {by_rank[2]}"
        elif launched:
            found.append(launched[1])
    return found


def test_collectives_run_beside_products(group):
    _, backward = generated(group, copies=False)
    assert order(backward) == [
        "start all_gather_into_tensor 0",
        "start all_gather_into_tensor 1",
        "wait all_gather_into_tensor 0",
        "_expert_down_backward_kernel",
        "_expert_up_backward_kernel",
        "_combine_kernel",
        "start reduce_scatter_tensor 2",
        "start reduce_scatter_tensor 3",
        "wait all_gather_into_tensor 1",
        "_expert_weight_grad_kernel",
        "_expert_weight_grad_kernel",
        "wait reduce_scatter_tensor 2",
        "wait reduce_scatter_tensor 3",
    ]


@pytest.mark.parametrize("exact", [False, True])
def test_copies_take_the_place_of_collectives(group, exact):
    forward, backward = generated(group, copies=True, exact=exact)
    assert order(forward) == [
        "start gather_rows 0",
        "start gather_rows 2",
        "wait gather_rows 2",
        "wait gather_rows 2",
        "wait gather_rows 0",
        "_expert_up_kernel",
        "_expert_down_kernel",
        "_combine_kernel",
        "start sum_parts 5",
        "wait sum_parts 5",
    ]
    assert order(backward) == [
        "start gather_rows 0",
        "wait gather_rows 0",
        "_expert_down_backward_kernel",
        "_expert_up_backward_kernel",
        "_combine_kernel",
        "start sum_parts 3",
        "wait gather_rows 0",
        "_expert_weight_grad_kernel",
        "_expert_weight_grad_kernel",
        "wait sum_parts 3",
        "wait sum_parts 3",
    ]
    # A copy of rows that a compiler makes to have them in another layout.
    assert "as_strided" not in forward + backward


@pytest.mark.parametrize("exact", [False, True])
def test_what_takes_longer_than_to_launch_it_goes_by_rank(group, exact, monkeypatch):
    from moeblaze_ops.ops.sharded import by_rank, peer_copies

    monkeypatch.setattr(by_rank, "LEAST_BYTES_OF_HOST", 1)
    monkeypatch.setattr(peer_copies, "LEAST_BYTES", 1)
    forward, backward = generated(group, copies=True, exact=exact)
    assert order(forward) == [
        "start gather_rows 0",
        "start gather_rows 2",
        "wait gather_rows 2",
        "wait gather_rows 2",
        "expert_mlp_by_rank gather_rows 0",
        "wait sum of expert_mlp_by_rank",
    ]
    assert order(backward) == [
        "start gather_rows 0",
        "expert_down_backward_by_rank gather_rows 0",
        "expert_up_backward_by_rank",
        "wait gather_rows 0",
        "_expert_weight_grad_kernel",
        "_expert_weight_grad_kernel",
        "wait sum of expert_up_backward_by_rank",
        "wait sum of expert_up_backward_by_rank",
    ]


@pytest.mark.parametrize("copies", [False, True])
def test_the_routers_product_is_added_in_place(group, copies):
    _, backward = generated(group, copies, exact=True, dtype=torch.bfloat16)
    assert backward.count("aten.addmm_.default(") == 1 and "extern_kernels.addmm" not in backward


def test_all_to_all_runs_beside_products(group):
    forward, backward = generated(group, copies=False, exact=True, all_to_all=True)
    assert backward.index("moeblaze.meet.default(") < backward.index("all_to_all_single.default(")
    assert order(forward) == [
        "start all_to_all_single 0",
        "wait all_to_all_single 0",
        "start all_to_all_single 1",
        "wait all_to_all_single 1",
        "_expert_up_kernel",
        "_expert_down_kernel",
        "_combine_kernel",
        "start all_to_all_single 2",
        "wait all_to_all_single 2",
        "_combine_kernel",
    ]
    assert order(backward) == [
        "start all_to_all_single 0",
        "start all_to_all_single 1",
        "wait all_to_all_single 0",
        "_expert_down_backward_kernel",
        "_expert_up_backward_kernel",
        "_combine_kernel",
        "start all_to_all_single 2",
        "start all_to_all_single 3",
        "wait all_to_all_single 1",
        "_expert_weight_grad_kernel",
        "_expert_weight_grad_kernel",
        "wait all_to_all_single 2",
        "_combine_kernel",
        "wait all_to_all_single 3",
        "_combine_kernel",
    ]
    assert forward.count("row_numbers.default(") == 1 and "row_numbers" not in backward and "used_slots" not in forward


def last_first(nodes, *_):
    """An order that Inductor may choose: what stands last in the graph runs as soon as it can."""
    made_by = {name: node for node in nodes for name in node.get_buffer_names()}
    needs = {node: {made_by[d.name] for d in node.unmet_dependencies if d.name in made_by} - {node} for node in nodes}
    rest, order = list(nodes), []
    while rest:
        order.append(next(node for node in reversed(rest) if needs[node].issubset(order)))
        rest.remove(order[-1])
    return order


@pytest.mark.parametrize("lite", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_ranks_talk_in_the_order_of_the_program(group, copies, lite):
    """Inductor chooses an order by the memory that it takes with a rank's own sizes; ``lite`` calls operators as they are."""

    def two(x, y, ids, *weights):
        settings = ("swiglu", False, list(range(RANKS)), group, copies, False, "preactivation")
        given = start_gather_of_tokens(x, T, RANKS, group, copies), None
        pairs = zip((x, y), given, (weights[:2], weights[2:]), strict=True)
        return sum(experts_over_ranks(t, g, None, ids, [up], [], [down], [], *settings).sum() for t, g, (up, down) in pairs)

    def rewritten(graph, inputs):
        for node in graph.graph.nodes:
            node.target = two if node.target is both else node.target
        graph.recompile()
        return shadow(graph, inputs)

    shapes = (T, D), (T, D), *[(E // RANKS, 2, F, D), (E // RANKS, F, D)] * 2
    x, y, *weights = (torch.randn(*shape, requires_grad=True) for shape in shapes)
    sources: list[str] = []
    shadow = fakecuda.shadow_backend(sources)
    torch._dynamo.reset()
    with (
        rank_of(RANKS),
        mock.patch.object(dist, "all_to_all_single", as_many_come),
        mock.patch.object(torch._inductor.memory, "reorder_for_peak_memory", last_first),
        torch._inductor.config.patch(fallback_by_default=lite),
    ):
        torch.compile(lambda *tensors: both(*tensors), backend=rewritten)(
            x, y, torch.zeros(T, K, dtype=torch.int64), *weights
        ).backward()
    gathers, sums = ("gather_rows", "sum_parts") if copies else ("all_gather_into_tensor", "reduce_scatter_tensor")
    starts = rf"\w = torch\.ops\.\w+\.({gathers}|{sums}|row_numbers|all_to_all_single)\b"
    forward, backward = (re.findall(starts, code) for code in sources)
    sent = "all_to_all_single"
    assert forward == [gathers, gathers, sums, "row_numbers", sent, sent, sent]
    of_gradients = [sent, sent, sent, *[gathers] * (1 if copies else 2), sums]
    assert backward == ([] if lite else of_gradients)  # which are one op for each layer there


@pytest.mark.parametrize("rows, programs", [(0, (0, 0)), (5, (1, 1)), (16 * 65536, (32768, 2))])
def test_a_kernel_over_two_axes_is_launched_for_no_rows(rows, programs):
    from torch._inductor.runtime.triton_heuristics import Grid2DWithYZOverflow

    def as_in_torch_2_11(self, meta):
        self.prefix += [f"y_grid_raw_ = -(ynumel // -{meta['YBLOCK']})", "y_grid_div_ = -(y_grid_raw_ // -65535)"]
        self.y_grid, self.z_grid = self.ceildiv("y_grid_raw_", "y_grid_div_"), "y_grid_div_"

    with mock.patch.object(Grid2DWithYZOverflow, "generate", as_in_torch_2_11):
        inductor.launch_nothing_for_no_rows()
        grid = Grid2DWithYZOverflow({})
        grid.generate({"YBLOCK": 16})
    values = {"ynumel": rows}
    exec("; ".join(grid.prefix), values)
    assert (eval(grid.y_grid, values), eval(grid.z_grid, values)) == programs


class Repeated(nn.Module):
    """Checkpointed layers before and behind another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(zoo.stacked("dense_einsum") for _ in range(3))

    def forward(self, x, y):
        x = checkpoint(self.layers[0], x, use_reentrant=False)
        x = x + self.layers[1](x)
        x = x + checkpoint(self.layers[2], x, use_reentrant=False)
        return x, y + checkpoint(self.layers[2], y, use_reentrant=False)


TALK = ("_c10d_functional", "row_numbers", "moeblaze.met.", "most_tokens", "experts_over_ranks")


def talk_of(model: nn.Module, partition, *inputs: torch.Tensor, dynamic: bool | None = None) -> list[list[str]]:
    """What ranks tell each other in the graphs of forward and backward that AOTAutograd hands to a backend."""
    graphs: list[list[str]] = []

    def compiler(gm, example_inputs):
        graphs.append([str(node.target) for node in gm.graph.nodes if any(word in str(node.target) for word in TALK)])
        return make_boxed_func(gm.forward)

    compile_both = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)

    def backend(gm, example_inputs):
        _switch.rewrite(gm)
        return compile_both(gm, example_inputs)

    torch._dynamo.reset()
    with _switch.rewriting(backend):
        sum(out.sum() for out in torch.compile(model, backend=backend, dynamic=dynamic)(*inputs)).backward()
    return graphs


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("partition", [min_cut_rematerialization_partition, default_partition])
def test_what_backward_repeats_does_not_follow_from_sizes(partition, known, group):
    """Nor with a backend that is not Inductor: every rank exchanges the same then.

    Weights of a layer that is not ``known`` move, and what it gave is there when backward comes to the layer behind it.
    """
    from moeblaze_ops.distributed import shard_experts
    from tests.distributed.rank_programs import Cumulative
    from tests.tools import sharded_layers as harness

    model = Repeated()
    if not known:
        model.layers[0] = Cumulative()
    shard_experts(model, harness.axis())
    of_some, of_none = (
        talk_of(model, partition, *(torch.randn(count, zoo.D, requires_grad=True) for count in counts), dynamic=True)[1]
        for counts in ((2, 5), (0, 5))
    )
    assert of_some == of_none and "moeblaze.experts_over_ranks_backward.default" in of_some
    assert known or "_c10d_functional.all_gather_into_tensor.default" in of_some, "weights are kept"


class Times(nn.Module):
    """A layer that is called so often with the same tokens."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.layer, self.calls = zoo.stacked("dense_einsum"), calls

    def forward(self, x):
        return [(i + 1) * self.layer(x) for i in range(self.calls)]


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hooked"])
@pytest.mark.parametrize(
    "setting",
    [{"tokens_per_rank": 8}, {"exchange": "all_gather"}, {"exchange": "all_to_all"}, {"experts_move": "weights"}],
    ids=lambda setting: "{}={}".format(*next(iter(setting.items()))),
)
def test_equal_calls_talk_as_often_as_they_are(setting, hooked, group, monkeypatch):
    """A compiler computes equal nodes once; a rank whose graph ends between them does not, nor one where they are not equal."""
    from moeblaze_ops import config
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    for name, value in setting.items():
        monkeypatch.setattr(config, name, value)
    counted = []
    with mock.patch.object(dist, "all_to_all_single", as_many_come):
        for calls in (1, 2):
            model = Times(calls)
            if hooked:  # as accelerate does
                model.layer.forward = functools.partial(type(model.layer).forward, model.layer)
            shard_experts(model, harness.axis())
            graphs = talk_of(model, min_cut_rematerialization_partition, torch.randn(8, zoo.D, requires_grad=True))
            counted.append([Counter(talk) for talk in graphs])
    once, twice = counted
    assert all(once) and twice == [of_graph + of_graph for of_graph in once]


def test_one_process_plays_a_rank(group):
    from moeblaze_ops.distributed import shard_experts
    from tests.tools import sharded_layers as harness

    model = zoo.stacked("stacked_loop")
    shard_experts(model, harness.axis())
    assert model(torch.randn(3, zoo.D)).shape == (3, zoo.D)


def test_cache_of_autograd_takes_graphs_with_our_functions():
    graph = fx.Graph()
    x = graph.placeholder("x")
    for function in (start_gather_of_tokens, local_shard, experts_over_ranks):
        autograd_cache.check_node_safe(graph.call_function(function, (x,)))
    with pytest.raises(autograd_cache.BypassAOTAutogradCache):
        autograd_cache.check_node_safe(graph.call_function(mock.patch, (x,)))
