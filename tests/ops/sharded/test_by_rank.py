"""Experts that take the tokens of one rank after the other, on windows whose copies come late. Ranks are threads, on a CPU."""

import functools

import pytest
import torch

D, F, E, K, STEPS = 6, 10, 8, 3, 2
CASES = {
    "two": [5, 5],
    "four": [4, 4, 4, 4],
    "uneven": [3, 6],
    "a_rank_without_tokens": [5, 0, 2, 5],
    "one": [4],
}


def whole_numbers(*shape, seed: int) -> torch.Tensor:
    """Their sums are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def inputs(step: int, rank: int, count: int, favourite: int | None):
    """x, ids, routing weights and the gradient of the output, of one rank."""
    seed = 1000 * step + 10 * rank
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(count)]) if count else torch.empty(0, K)
    ids = ids.to(torch.int32) if favourite is None else torch.full((count, K), favourite, dtype=torch.int32)
    x, weights, dout = (whole_numbers(count, width, seed=seed + i) for i, width in enumerate((D, K, D)))
    return x, ids, weights, dout


@pytest.fixture(params=["by rank", "waiting", "at once", "mixed"])
def way(request, monkeypatch):
    """How ranks take tokens: as they arrive, and sums leave by columns; all; both as other layers do; every second rank so."""
    from moeblaze_ops.ops.sharded import by_rank, peer_copies

    monkeypatch.setattr(by_rank, "LEAST_BYTES_OF_HOST", 1 << 40 if request.param == "at once" else 1)
    monkeypatch.setattr(by_rank, "LEAST_ROWS", 1 << 40 if request.param == "waiting" else 1)
    monkeypatch.setattr(peer_copies, "LEAST_BYTES", 1)
    monkeypatch.setattr(peer_copies, "LEAST_COLUMNS", 1)
    monkeypatch.setattr(peer_copies, "COLUMN_UNIT", 2)
    return request.param


@pytest.mark.parametrize(
    ("case", "favourite"), [*((case, None) for case in CASES), ("uneven", 0), ("uneven", E - 1), ("a_rank_without_tokens", E - 1)]
)
def test_experts_by_rank(case, favourite, way):
    from moeblaze_ops.ops.dispatch import dispatch
    from moeblaze_ops.ops.expert_down import expert_down, expert_down_backward
    from moeblaze_ops.ops.expert_up import expert_up, expert_up_backward
    from moeblaze_ops.ops.sharded import by_rank
    from moeblaze_ops.ops.sharded.collectives import arrived, gather_rows, sum_parts
    from tests.tools.slow_copies import run_ranks

    counts = CASES[case]
    ranks, rows = len(counts), max(counts)
    num_local = E // ranks
    of_rank = functools.partial(inputs, favourite=favourite)
    weights = [whole_numbers(E, *shape, seed=i) for i, shape in enumerate([(2, F, D), (2, F), (F, D), (D,)])]

    def padded(tensor, value):
        return torch.cat([tensor, tensor.new_full((rows - len(tensor), *tensor.shape[1:]), value)])

    def experts(rank, step):
        """Of one rank: its weights, the routing, and all tokens' routing weights."""
        everyone = [of_rank(step, r, count) for r, count in enumerate(counts)]
        ids = torch.cat([padded(each[1], -1) for each in everyone]) - rank * num_local
        routing = dispatch(torch.where((ids >= 0) & (ids < num_local), ids, -1), num_local)
        own = [[w[rank * num_local : (rank + 1) * num_local]] for w in weights]
        return everyone, own, torch.cat([padded(each[2], 0) for each in everyone]), routing

    def run(rank):
        found = []
        for step in range(STEPS):
            _, (w_up, b_up, w_down, b_down), all_weights, routing = experts(rank, step)
            x, _, _, dout = of_rank(step, rank, counts[rank])
            (started,) = gather_rows([x], rows, ranks, "", False)
            x.fill_(torch.nan)  # it has been read
            given = (w_up, b_up, w_down, b_down, all_weights, *routing, "swiglu", False)
            if is_plain := way == "mixed" and rank % 2:
                h, out = by_rank.experts_at_once("preactivation", arrived(started), *given)
                (sums,) = sum_parts([out], ranks, "", True)
            else:
                h, sums = by_rank.expert_mlp_by_rank(started, *given, True, ranks, "")
            out = arrived(sums)
            (started,) = gather_rows([x], rows, ranks, "", False)
            none, sums = by_rank.expert_mlp_by_rank(started, *given, False, ranks, "")
            assert none.shape == (0, 2, F) and arrived(sums).shape == out.shape
            (started,) = gather_rows([dout], rows, ranks, "", False)
            given = (h, w_down, b_down, all_weights, *routing, "swiglu", ranks)
            if is_plain:
                all_dout = arrived(started)
                dh, dweights, wa = expert_down_backward(all_dout, *given[:-1])
                dx, whole = expert_up_backward(dh, None, w_up, None, *routing)[0], dweights.clone()
                sums = sum_parts([dx, whole], ranks, "")
            else:
                all_dout, dh, dweights, wa = by_rank.expert_down_backward_by_rank(started, *given)
                whole = dweights.clone()
                sums = by_rank.expert_up_backward_by_rank(dh, w_up, *routing, [whole], ranks, "")
            whole.fill_(torch.nan)
            found.append([h, out, all_dout, dh, dweights, wa, *map(arrived, sums)])
        return found

    results = run_ranks(ranks, run)
    for step in range(STEPS):
        expected_out, expected_dx, expected_dweights = [torch.zeros(ranks * rows, width) for width in (D, D, K)]
        for rank in range(ranks):
            everyone, (w_up, b_up, w_down, b_down), all_weights, routing = experts(rank, step)
            x, dout = (torch.cat([padded(each[i], 0) for each in everyone]) for i in (0, 3))
            h, a = expert_up(x, w_up, b_up, None, *routing, "swiglu")
            expected_out += expert_down(h, a, w_down, b_down, all_weights, *routing, "swiglu")
            found = results[rank][step]
            used = int(routing[1][-1])
            assert torch.equal(found[0][:used], h[:used])
            dh, dweights, wa = expert_down_backward(dout, h, w_down, b_down, all_weights, *routing, "swiglu")
            expected_dx += expert_up_backward(dh, None, w_up, None, *routing)[0]
            expected_dweights += dweights
            for got, wanted, end in zip(found[3:6], (dh, dweights, wa), (used, None, used), strict=True):
                torch.testing.assert_close(got[:end], wanted[:end])
        for rank, count in enumerate(counts):
            own = slice(rank * rows, rank * rows + count)
            found = results[rank][step]
            for got, wanted in zip((found[1], *found[6:]), (expected_out, expected_dx, expected_dweights), strict=True):
                torch.testing.assert_close(got[:count], wanted[own], rtol=1e-4, atol=1e-4)
            for peer, each in enumerate(counts):
                part = slice(peer * rows, peer * rows + each)
                assert torch.equal(found[2][part], of_rank(step, peer, each)[3])
