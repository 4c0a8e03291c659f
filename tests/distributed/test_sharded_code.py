"""The order of the code that Inductor generates for layers whose tokens move. One process plays a rank of two."""

import re

import pytest
import torch
import torch.distributed as dist

from moeblaze_ops.ops.sharded.collectives import start_gather_of_tokens
from moeblaze_ops.ops.sharded.experts_over_ranks import experts_over_ranks
from tests.tools import fakecuda
from tests.tools.slow_copies import rank_of

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled"),
]

T, D, F, E, K, RANKS = 64, 64, 128, 4, 2, 2


@pytest.fixture
def group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def generated(group: str, copies: bool) -> list[str]:
    """Forward and backward."""
    torch._dynamo.allow_in_graph(experts_over_ranks)
    torch._dynamo.allow_in_graph(start_gather_of_tokens)

    def layer(x, w_router, w_up, w_down):
        gathered = start_gather_of_tokens(x, T, RANKS, group, copies)
        weights, ids = torch.topk(torch.softmax(x @ w_router, -1), K, dim=-1)
        settings = ("swiglu", False, RANKS, group, copies, False, True)
        return experts_over_ranks(x, gathered, weights, ids, [w_up], [], [w_down], [], *settings)

    shapes = ((T, D), (D, E), (E // RANKS, 2, F, D), (E // RANKS, F, D))
    inputs = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    sources: list[str] = []
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=fakecuda.shadow_backend(sources))
    with rank_of(RANKS):
        compiled(*inputs).sum().backward()
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
        starts = "all_gather_into_tensor|reduce_scatter_tensor|gather_rows|sum_parts"
        started = re.search(rf"(\w+) = torch\.ops\.\w+\.({starts})\b", line)
        waited = re.search(r"(?:wait_tensor|arrived)\.default\((\w+)\)", line)
        launched = re.search(r"(_expert_\w+_kernel|_combine_kernel)_\d+\.run", line)
        if started:
            names[started[1]] = f"{started[2]} {len(names)}"
            found.append(f"start {names[started[1]]}")
        elif waited:
            found.append(f"wait {names[waited[1]]}")
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


def test_copies_take_the_place_of_collectives(group):
    (forward,) = generated(group, copies=True)
    started = [line for line in order(forward) if line.startswith("start")]
    assert started == ["start gather_rows 0", "start all_gather_into_tensor 2", "start sum_parts 3"], order(forward)
