"""What copies between windows give, however late they come. Ranks are threads of one process, and memory is a CPU's."""

import pytest
import torch

D, K, STEPS = 8, 2, 3


def tokens(rank: int, step: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, D, generator=generator).bfloat16()


def routing(rank: int, step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 9, (rows, K), dtype=torch.int32, generator=generator), torch.rand(rows, K, generator=generator)


@pytest.mark.parametrize("own", [[4, 4], [4, 1], [0, 3], [2, 0, 4]])
def test_gathered_rows(own):
    from moeblaze_ops.ops.sharded.collectives import arrived, gather_rows
    from tests.tools.slow_copies import run_ranks

    ranks, rows = len(own), max(own)

    def run(rank):
        found = []
        for step in range(STEPS):
            both = [tokens(rank, 2 * step, own[rank]), tokens(rank, 2 * step + 1, own[rank])]
            started = gather_rows(both, rows, ranks, "", False)
            for tensor in both:
                tensor.fill_(7)  # it has read them
            of_routing = gather_rows([*routing(rank, step, own[rank])], rows, ranks, "", True)
            assert [tuple(each.shape) for each in started] == 2 * [(ranks * rows, D, 0)]
            found.append([arrived(each) for each in (*of_routing, *started)])
        return found

    for found in run_ranks(ranks, run):
        for step, (ids, weights, *both) in enumerate(found):
            for rank, count in enumerate(own):
                part = slice(rank * rows, rank * rows + count)
                behind = slice(rank * rows + count, (rank + 1) * rows)
                of_rank = routing(rank, step, count)
                assert torch.equal(ids[part], of_rank[0]) and (ids[behind] == -1).all()
                assert torch.equal(weights[part], of_rank[1]) and (weights[behind] == 0).all()
                for number, gathered in enumerate(both):
                    assert torch.equal(gathered[part], tokens(rank, 2 * step + number, count))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_summed_parts(ranks):
    from moeblaze_ops.ops.sharded.collectives import arrived, sum_parts
    from tests.tools.slow_copies import run_ranks

    rows = 3

    def run(rank):
        found = []
        for step in range(STEPS):
            whole = [tokens(rank, step, ranks * rows), routing(rank, step, ranks * rows)[1]]
            started = sum_parts(whole, ranks, "")
            for tensor in whole:
                tensor.fill_(7)
            found.append([arrived(each) for each in started])
        return found

    for rank, found in enumerate(run_ranks(ranks, run)):
        part = slice(rank * rows, (rank + 1) * rows)
        for step, (sums, of_weights) in enumerate(found):
            wide = sum(tokens(r, step, ranks * rows)[part].float() for r in range(ranks))
            torch.testing.assert_close(sums, wide.bfloat16(), rtol=1e-2, atol=0)
            everyone = sum(routing(r, step, ranks * rows)[1][part] for r in range(ranks))
            torch.testing.assert_close(of_weights, everyone)


@pytest.mark.parametrize("start", ["gather", "sum"])
def test_no_two_ranks_fetch_from_one_at_once(start, monkeypatch):
    """Where all fetch at the pace of one link, the first, second and third fetch of each rank are from different ranks."""
    from moeblaze_ops.ops.sharded import peer_copies
    from moeblaze_ops.ops.sharded.collectives import arrived, gather_rows, sum_parts
    from tests.tools.slow_copies import run_ranks

    ranks, fetched, fetch = 4, {}, peer_copies._Window.fetch

    def noted(window, copies):
        fetched.setdefault(window.rank, []).extend(peer for _, peer, _, _ in copies)
        return fetch(window, copies)

    monkeypatch.setattr(peer_copies._Window, "fetch", noted)

    def run(rank):
        x = tokens(rank, 0, 4 * ranks)
        arrived(*(gather_rows([x], 4 * ranks, ranks, "", False) if start == "gather" else sum_parts([x], ranks, "")))

    run_ranks(ranks, run)
    assert len(fetched) == ranks
    for at_once in zip(*fetched.values(), strict=True):
        assert sorted(at_once) == list(range(ranks))


def test_the_first_tensor_is_there_before_the_second():
    from moeblaze_ops.ops.sharded.collectives import arrived, gather_rows
    from tests.tools.slow_copies import run_ranks

    def run(rank):
        first, second = gather_rows([tokens(rank, 0, 2), tokens(rank, 1, 2)], 2, 2, "", False)
        rows = arrived(first).clone()
        late = second.transfer._rows.clone()
        return rows, late, arrived(second)

    for rank, (rows, late, second) in enumerate(run_ranks(2, run)):
        other = slice(2 * (1 - rank), 2 * (2 - rank))
        assert torch.equal(rows[other], tokens(1 - rank, 0, 2))
        assert torch.equal(second[other], tokens(1 - rank, 1, 2)) and not torch.equal(late[other], second[other])


@pytest.mark.parametrize("ranks, together", [(3, [[0], [1], [2]]), (4, [[0], [1], [2, 3]])])
def test_rows_are_taken_as_they_arrive(ranks, together):
    from moeblaze_ops.ops.sharded.collectives import gather_rows
    from moeblaze_ops.ops.sharded.peer_copies import arriving
    from tests.tools.slow_copies import run_ranks

    def run(rank):
        (started,) = gather_rows([tokens(rank, 0, 2)], 2, ranks, "", False)
        gathered, arrivals = arriving(started)
        gathered.zero_()
        return [(list(each), [peer for peer in range(ranks) if gathered[2 * peer].any()]) for each in arrivals], gathered

    results = run_ranks(ranks, run)
    assert [each for each, _ in results[0][0]] == together
    for rank, (seen, gathered) in enumerate(results):
        taken = []
        for peers, are_there in seen:
            taken += peers
            assert sorted(taken) == are_there
        assert seen[0][0] == [rank] and sorted(taken) == list(range(ranks))
        assert torch.equal(gathered, torch.cat([tokens(r, 0, 2) for r in range(ranks)]))


def test_columns_leave_while_the_next_ones_are_computed():
    """What is written for a rank is shown to it before other columns are asked for, and what others wrote is not waited for."""
    from moeblaze_ops.ops.sharded import peer_copies
    from moeblaze_ops.ops.sharded.collectives import arrived
    from tests.tools.slow_copies import run_ranks

    ranks, rows = 4, 2

    def run(rank):
        whole = tokens(rank, 0, ranks * rows)
        sums = peer_copies.SumByColumns(whole, (rows, D), [routing(rank, 0, ranks)[1]], "")
        asked, fetching = [], sums._window._stream
        for first, widths in ((0, [4, 1]), (5, [3])):
            inner, write = 0, sums.columns(first, sum(widths))
            for width in widths:
                for token, out in write(inner, width):
                    out.copy_(whole[token : token + len(out), first + inner : first + inner + width])
                    asked.append((token // rows, len(fetching.pending), fetching.done))
                inner += width
        return asked, [arrived(each) for each in sums.started]

    for rank, (asked, (sums, of_weights)) in enumerate(run_ranks(ranks, run)):
        others = [first for first in (0, rank + 1) if first != (rank if first == 0 else ranks)]
        fetched = ranks - 1
        # A copy from each other rank for columns that left, and those of the weights at last; none of them has been waited for.
        expected = [(first, 0, 0) for first in others] + [(rank, 0, 0)]
        expected += [(first, 0, 0) for first in others] + [(rank, fetched, 0)]
        expected += [(first, fetched, 0) for first in others] + [(rank, 3 * fetched, 0)]
        assert asked == expected
        part = slice(rank * rows, (rank + 1) * rows)
        wide = sum(tokens(r, 0, ranks * rows)[part].float() for r in range(ranks))
        torch.testing.assert_close(sums, wide.bfloat16(), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(of_weights, sum(routing(r, 0, ranks)[1][rank : rank + 1] for r in range(ranks)))


@pytest.mark.parametrize("ranks", range(1, 10))
def test_ranks_arrive_together(ranks):
    from moeblaze_ops.ops.sharded.peer_copies import arriving_together, order_of_fetches

    orders = [order_of_fetches(rank, ranks) for rank in range(ranks)]
    for at_once in zip(*orders, strict=True):
        assert sorted(at_once) == list(range(ranks))
    for rank, order in enumerate(orders):
        together = arriving_together(rank, ranks)
        assert list(together[0]) == [rank] == order[:1]
        for peers in together:
            assert sorted(order[: len(peers)]) == list(peers)
            order = order[len(peers) :]
        assert not order


def test_what_arrived_is_taken_once():
    from moeblaze_ops.ops.sharded.collectives import arrived, gather_rows
    from tests.tools.slow_copies import rank_of

    with rank_of(2):
        (started,) = gather_rows([tokens(0, 0, 2)], 2, 2, "", False)
        arrived(started)
        with pytest.raises(RuntimeError, match="must be taken once"):
            arrived(started)


def test_no_event_is_waited_for_across_a_capture():
    from moeblaze_ops.ops.sharded.collectives import arrived, gather_rows, sum_parts
    from tests.tools.slow_copies import captures, run_ranks

    def run(rank):
        found = []
        for step, captures.number in enumerate((0, 5, 5, 0, 6)):
            started = [*gather_rows([tokens(rank, step, 2)], 2, 2, "", False), *sum_parts([tokens(rank, step, 4)], 2, "")]
            found.append([arrived(each).clone() for each in started])
        return found

    for rank, found in enumerate(run_ranks(2, run)):
        for step, (gathered, sums) in enumerate(found):
            assert torch.equal(gathered, torch.cat([tokens(each, step, 2) for each in range(2)]))
            part = slice(2 * rank, 2 * rank + 2)
            assert torch.equal(sums, tokens(rank, step, 4)[part] + tokens(1 - rank, step, 4)[part])


def test_memory_of_a_cuda_graph_stays():
    from moeblaze_ops.ops.sharded import peer_copies
    from moeblaze_ops.ops.sharded.collectives import arrived, gather_rows
    from tests.tools.slow_copies import captures, rank_of

    with rank_of(2):
        kept = []
        for rows, captures.number in ((2, 0), (2, 1), (500, 0), (500, 0), (2, 2)):
            arrived(gather_rows([tokens(0, 0, rows)], rows, 2, "", False)[0])
            kept.append(list(peer_copies._window("", "tokens")._captured))
        captures.number = 0
    first, second = kept[-1]
    assert kept == [[], [first], [first], [first], [first, second]] and first is not second


def test_more_rows_than_a_rank_may_have():
    from moeblaze_ops.ops.sharded.collectives import gather_rows

    with pytest.raises(ValueError, match=r"tokens must be at most config.tokens_per_rank=2 on every rank, got 3"):
        gather_rows([tokens(0, 0, 3)], 2, 2, "", False)
