"""Counts, ids and weights in dtypes that do not hold every number: what is rounded or wraps around is no layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops.lowering.graph.fake_values import fake_of
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager, rewrite_of


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def sorted_by(offsets_of) -> nn.Module:
    """Rows sorted by expert, in groups that end where ``offsets_of(flat_ids)`` says."""

    def combine(self, x, weights, ids):
        flat = ids.view(-1)
        order = flat.argsort(stable=True)
        rows, offs, mm = x[order // self.K], offsets_of(flat).to(torch.int32), torch.ops.moe_zoo.grouped_mm_fallback
        y = mm(F.silu(mm(rows, self.w1, offs)) * mm(rows, self.w3, offs), self.w2, offs)
        return torch.zeros_like(x).index_add(0, order // self.K, y * weights.reshape(-1)[order, None])

    return zoo.StackedMoE(combine, "split")


COUNTS = {
    "counts": lambda flat, dtype: F.one_hot(flat, zoo.E).sum(0).to(dtype).cumsum(0),
    "sums of masks": lambda flat, dtype: F.one_hot(flat, zoo.E).to(dtype).sum(0, dtype=dtype).cumsum(0, dtype=torch.int64),
    "running sums": lambda flat, dtype: F.one_hot(flat, zoo.E).sum(0).cumsum(0, dtype=dtype),
    "ends": lambda flat, dtype: (flat[:, None] == torch.arange(zoo.E)).sum(0).cumsum(0).to(dtype),
}


@pytest.mark.parametrize(("name", "dtype"), [
    ("counts", torch.bfloat16), ("sums of masks", torch.uint8), ("running sums", torch.uint8), ("running sums", torch.float16),
    ("ends", torch.int8),
])  # fmt: skip
def test_counts_that_may_be_too_large(name, dtype):
    layer = sorted_by(lambda flat: COUNTS[name](flat, dtype))
    backend = rewrite_of(layer, torch.randn(1200, zoo.D))
    assert backend.reasons == ["SAME_PERMUTATION"] and not backend.rewritten


@pytest.mark.parametrize(("name", "dtype", "num_tokens"), [
    ("counts", torch.bfloat16, 16), ("sums of masks", torch.int16, 500), ("running sums", torch.float32, 300),
    ("ends", torch.bfloat16, 16),
])  # fmt: skip
def test_counts_that_the_dtype_holds(name, dtype, num_tokens):
    layer = sorted_by(lambda flat: COUNTS[name](flat, dtype))
    assert len(check_against_eager(layer, torch.randn(num_tokens, zoo.D), tolerance=1e-5).rewritten) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_rounded_on_the_way(dtype):
    def rounded(self, x, weights, ids):
        shares = ((weights * (ids == e)).sum(-1, keepdim=True).to(dtype) for e in range(zoo.E))
        return sum(expert(x) * share for expert, share in zip(self.experts, shares, strict=True))

    backend = check_against_eager(zoo.ModuleListMoE(rounded), torch.randn(10, zoo.D), tolerance=1e-5)
    assert backend.reasons == ["DTYPE_PATH"] and not backend.rewritten


NUMBERS = {
    "beside marks": lambda hit, dtype: hit.to(dtype) * 0.3,
    "beside marks that are cast once more": lambda hit, dtype: (hit.to(dtype) * 0.3).float(),
    "of marks that are cast": lambda hit, dtype: (hit * 0.3).to(dtype).double(),
    "one after the other": lambda hit, dtype: hit.to(dtype) * 0.3 * 0.7,
    "written to marks": lambda hit, dtype: hit.to(dtype).div_(3),
    "without marks": lambda hit, dtype: hit * (torch.ones(1, dtype=dtype) * 0.3),
    "of places": lambda hit, dtype: hit * torch.arange(300, dtype=dtype)[257] / 256,
    "that are summed": lambda hit, dtype: hit * torch.full((3,), 0.1, dtype=dtype).sum(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_those_that_a_dtype_holds(name, dtype):
    """In a layer of fp64: 0.3 of bf16 is 0.30078125."""

    def scaled(self, x, weights, ids):
        shares = ((weights * NUMBERS[name](ids == e, dtype)).sum(-1, keepdim=True) for e in range(zoo.E))
        return sum(expert(x) * share for expert, share in zip(self.experts, shares, strict=True))

    layer = zoo.ModuleListMoE(scaled).double()
    assert check_against_eager(layer, torch.randn(10, zoo.D, dtype=torch.float64), tolerance=1e-12).rewritten


@pytest.mark.parametrize("number, is_held", [(254, True), (256, False)])
@pytest.mark.parametrize("dtype, scale", [(torch.bfloat16, 1), (torch.float16, 2**3), (torch.float32, 2**16)], ids=str)
def test_marks_that_a_dtype_holds_beside_a_number(dtype, scale, number, is_held):
    """A mark plus 256 is 256 in bf16."""

    def marked(self, x, weights, ids):
        hits = (((ids == e).to(dtype) + number * scale) - number * scale for e in range(zoo.E))
        return sum(expert(x) * (weights * hit).sum(-1, keepdim=True) for expert, hit in zip(self.experts, hits, strict=True))

    layer = zoo.ModuleListMoE(marked).double()
    assert bool(check_against_eager(layer, torch.randn(10, zoo.D, dtype=torch.float64)).rewritten) == is_held


CASTS = {
    "of weighted rows": (lambda w: w, lambda rows, dtype: rows.to(dtype), torch.float32),
    "of all weights": (lambda w: w.bfloat16(), lambda rows, dtype: rows, torch.bfloat16),
}


@pytest.mark.parametrize("name", CASTS)
def test_weights_are_used_as_they_are_held(name):
    """A cast of rows on their way is nobody's rounding; weights that a tensor holds rounded are rounded."""
    weights_of, rows_of, expected = CASTS[name]

    def combine(self, x, weights, ids):
        flat, weights = ids.view(-1), weights_of(weights.float())
        order = flat.argsort(stable=True)
        offs = F.one_hot(flat, zoo.E).sum(0).cumsum(0).to(torch.int32)
        rows, mm = x[order // self.K], torch.ops.moe_zoo.grouped_mm_fallback
        y = mm(F.silu(mm(rows, self.w1, offs)) * mm(rows, self.w3, offs), self.w2, offs)
        scaled = y * rows_of(weights.reshape(-1)[order, None], y.dtype)
        return torch.zeros_like(x).index_add(0, order // self.K, scaled)

    layer = zoo.StackedMoE(combine, "split").bfloat16()
    backend = rewrite_of(layer, torch.randn(12, zoo.D, dtype=torch.bfloat16))
    (graph,) = backend.modules
    (down,) = (node for node in graph.graph.nodes if "expert_down" in str(node.target))
    assert fake_of(down.args[4]).dtype == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_rounded_where_experts_wrote_them(dtype):
    def rounded(self, x, weights, ids):
        flat, rows = ids.view(-1), x.repeat_interleave(ids.shape[-1], 0)
        y = torch.empty_like(rows)
        for e, expert in enumerate(self.experts):
            hits = torch.where(flat == e)[0]
            y.index_copy_(0, hits, expert(rows[hits]))
        y = y.to(dtype).to(x.dtype)
        return (y * weights.reshape(-1, 1)).view(*ids.shape, zoo.D).sum(1)

    (found,) = check_against_eager(zoo.ModuleListMoE(rounded), torch.randn(10, zoo.D), tolerance=1e-5).rewritten
    assert found.K == 1, "the rows, as a layer with a token for each slot"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_another_dtype(dtype):
    """What the graph holds rounded, or holds in more digits than the layer, is taken from there."""

    def cast_before(self, x, weights, ids):
        return zoo.MASKED[0](self, x, weights.to(dtype), ids).to(x.dtype)

    layer = zoo.ModuleListMoE(cast_before)
    assert len(check_against_eager(layer, torch.randn(10, zoo.D), tolerance=1e-5).rewritten) == 1


def test_ids_that_wrap_around():
    """Two ids of one expression, of which one was computed in eight bits."""

    def wrapped(self, x, weights, ids):
        wide = ids.to(torch.uint8).to(torch.int64) + 254
        return zoo.MASKED[0](self, x, weights, (ids.to(torch.uint8) + 254).to(torch.int64)) + wide.sum(-1, keepdim=True)

    check_against_eager(zoo.ModuleListMoE(wrapped), torch.randn(10, zoo.D), tolerance=1e-5)


# Ids before and after arithmetic that is the same for whole numbers, and is not where a dtype ends.
ROUND_TRIPS = {
    "in 64 bits": lambda ids: ids * 2**30 * 4 // 2**30 // 4,
    "past 64 bits": lambda ids: ids * 2**62 * 4 // 2**62 // 4,
    "in 32 bits": lambda ids: ids.int() * 2**10 * 4 // 2**10 // 4,
    "past 32 bits": lambda ids: ids.int() * 2**30 * 4 // 2**30 // 4,
    "cast to 32 bits": lambda ids: (ids * 2**31).int() // 2**31,
    "past the whole numbers of fp32": lambda ids: (ids + 2**25).float().long() - 2**25,
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_ids_that_wrap_around_are_others(name):
    there_and_back = ROUND_TRIPS[name]

    def combine(self, x, weights, ids):
        ids, as_they_are = there_and_back(ids), ids * 1
        x = x + as_they_are.sum(-1, keepdim=True)
        shares = ((weights.square() * (ids == e)).sum(-1, keepdim=True) for e in range(zoo.E))
        return sum(expert(x) * share for expert, share in zip(self.experts, shares, strict=True))

    backend = check_against_eager(zoo.ModuleListMoE(combine), torch.randn(16, zoo.D), tolerance=1e-5)
    assert len(backend.rewritten) == 1


@pytest.mark.parametrize("dtype", [None, torch.int64])
def test_running_sums_of_rounded_numbers(dtype):
    """What is summed as an integer is one before it is summed."""

    def combine(self, x, weights, ids):
        numbers = weights.detach()
        kept = weights * (numbers.cumsum(-1, dtype=dtype) < 0.6)
        x = x + (weights * (numbers.cumsum(-1) < 0.6)).sum(-1, keepdim=True)
        shares = ((kept * (ids == e)).sum(-1, keepdim=True) for e in range(zoo.E))
        return sum(expert(x) * share for expert, share in zip(self.experts, shares, strict=True))

    backend = check_against_eager(zoo.ModuleListMoE(combine), torch.randn(16, zoo.D), tolerance=1e-5)
    assert len(backend.rewritten) == 1


def score_of(ids, e, weights):
    return (weights * (ids == e)).sum(-1)


FLAGS = {
    "logical_not": lambda ids, e, weights: score_of(ids, e, weights).logical_not().logical_not(),
    "logical_and": lambda ids, e, weights: torch.logical_and(score_of(ids, e, weights), weights[:, 0] > 0.25),
    "logical_and of counts": lambda ids, e, weights: torch.logical_and((ids == e).sum(-1), torch.tensor(True)),
    "logical_and of slots": lambda ids, e, weights: torch.logical_and(weights, ids == e).sum(-1),
    "sum": lambda ids, e, weights: (ids == e).sum(-1, dtype=torch.bool) * weights[:, 0],
    "scatter_add": lambda ids, e, weights: flags_of(ids).scatter_add(1, ids, torch.ones_like(ids, dtype=torch.bool))[:, e],
    "index_add": lambda ids, e, weights: flags_of(ids).T.index_add(0, ids[0], torch.ones(2, len(ids), dtype=torch.bool))[e],
    "max": lambda ids, e, weights: torch.max(ids[:, 0] == e, ids[:, 1] == e) * weights[:, 0],
}


def flags_of(ids):
    return torch.zeros(len(ids), zoo.E, dtype=torch.bool)


class OfFlags(nn.Module):
    """Experts beside a number of each token, of ids that may repeat."""

    def __init__(self, number):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(zoo.D, zoo.FF), nn.SiLU(), nn.Linear(zoo.FF, zoo.D)) for _ in range(zoo.E)
        )
        self.number = number

    def forward(self, x, weights, ids):
        numbers = (self.number(ids, e, weights).unsqueeze(-1).to(x.dtype) for e in range(zoo.E))
        return sum(expert(x) * number for expert, number in zip(self.experts, numbers, strict=True))


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_zero_or_one(name):
    """A flag is 1 whatever number it is made of, and of however many; the larger of two is of two."""
    ids = torch.tensor([[1, 1], [0, 2], [3, 1]])
    check_against_eager(OfFlags(FLAGS[name]), torch.randn(len(ids), zoo.D), torch.rand(ids.shape), ids, tolerance=1e-5)


def test_flags_of_flags():
    layer = OfFlags(lambda ids, e, weights: torch.logical_and(ids == e, torch.tensor(True)).logical_not().logical_not().sum(-1))
    ids = torch.tensor([[1, 1], [0, 2], [3, 1]])
    assert len(check_against_eager(layer, torch.randn(3, zoo.D), torch.rand(3, 2), ids, tolerance=1e-5).rewritten) == 1


@pytest.mark.parametrize(("num_tokens", "number"), [(1200, 0), (16, 1)])
def test_counts_that_are_added_up_in_half_precision(num_tokens, number):
    """1200 ones in bf16 are 256."""

    def offsets(flat):
        ones = torch.ones_like(flat).bfloat16()
        return torch.zeros(zoo.E).bfloat16().index_add(0, flat, ones).long().cumsum(0)

    layer = sorted_by(offsets)
    assert len(rewrite_of(layer, torch.randn(num_tokens, zoo.D)).rewritten) == number


def test_a_bound_that_is_a_tensor():
    class Clamped(OfFlags):
        def forward(self, x, weights, ids):
            numbers = (score_of(ids, e, weights).unsqueeze(-1) for e in range(zoo.E))
            bound = torch.tensor(0.25)
            parts = zip(self.experts, numbers, strict=True)
            return sum(expert[2](F.silu(expert[0](x).clamp_max(bound))) * number for expert, number in parts)

    ids = torch.tensor([[1, 1], [0, 2], [3, 1]])
    check_against_eager(Clamped(None), torch.randn(3, zoo.D), torch.rand(3, 2), ids, tolerance=1e-5)


@pytest.mark.parametrize("of", ["tokens", "weights"])
def test_rows_that_are_rounded_to_eight_bits(of):
    """Each row that a loop takes is rounded, and no tensor of all tokens is."""

    def rounded(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(zoo.E):
            token, k = torch.where(ids == e)
            rows, share = x[token], weights[token, k, None]
            if of == "tokens":
                rows = rows.to(torch.float8_e4m3fn).to(x.dtype)
            else:
                share = share.to(torch.float8_e4m3fn).to(x.dtype)
            out.index_add_(0, token, self.experts[e](rows) * share)
        return out

    backend = check_against_eager(zoo.ModuleListMoE(rounded), torch.randn(10, zoo.D), tolerance=1e-5)
    assert not backend.rewritten


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ids_that_are_no_integers(dtype):
    def combine(self, x, weights, ids):
        ids = ids.to(dtype)
        return sum(expert(x) * (weights * (ids == e)).sum(-1, keepdim=True) for e, expert in enumerate(self.experts))

    (declined,) = check_against_eager(zoo.ModuleListMoE(combine), torch.randn(10, zoo.D), tolerance=1e-5).candidates
    assert declined.reason == "OPERANDS" and declined.detail == f"expert ids are {dtype}, and no integers"
