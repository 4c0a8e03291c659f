"""Near misses of the layers in `split`: sorted and split alike, and another function."""

import torch

from tests.corpus.loops.split import (  # noqa: F401
    padded_ends,
    padded_on_demand,
    run_expert,
    slots_with_weights,
    sorted_by_expert,
    sparse_dispatcher,
    stored_starts,
    used_slots,
)
from tests.corpus.zoo.changed import all_changed


def in_turn(self, x, weights, ids):
    """A layer, as are the two below."""
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, out, start = x[token], torch.zeros_like(x), 0
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()):
        end = start + count
        if count == 0:
            continue
        out.index_add_(0, token[start:end], self.experts[e](rows[start:end]) * scale[start:end])
        start = end
    return out


def joined(self, x, weights, ids):
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, outputs, start = x[token], [], 0
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()):
        if count == 0:
            continue
        outputs.append(self.experts[e](rows[start : start + count]))
        start += count
    return torch.zeros_like(x).index_add(0, token, torch.cat(outputs) * scale)


def split(self, x, weights, ids):
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    counts = ids.flatten().bincount(minlength=len(self.experts)).tolist()
    outputs = []
    for e, part in enumerate(x[token].split(counts)):
        outputs.append(self.experts[e](part))
    return torch.zeros_like(x).index_add(0, token, torch.cat(outputs) * scale)


def centred(y):
    return y - y.mean(0, keepdim=True)


_SORTED = "order, token, scale = sorted_by_expert(self, x, weights, ids)"
_COUNTS = "ids.flatten().bincount(minlength=len(self.experts)).tolist()"
_RESULT = "torch.cat(outputs) * scale)"
_CHANGES = {
    "starts_one_later": (stored_starts, ("counts[:-1].cumsum(0)", "counts[1:].cumsum(0)")),
    "starts_behind_two": (stored_starts, ("starts[1:] = counts[:-1]", "starts[2:] = counts[:-2]")),
    "reads_a_count": (in_turn, ("scale[start:end])", "scale[start:end] * count)")),
    "one_row_too_many": (in_turn, ("end = start + count", "end = start + count + 1"), ("start = end", "start = end - 1")),
    "never_moves_on": (in_turn, ("        start = end\n", "")),
    "skips_before_moving_on": (  # expert 1 is left out, and those behind it get its rows
        in_turn, ("        end = start + count\n", ""), ("count == 0", "e == 1"),
        ("        out.index", "        end = start + count\n        out.index"),
    ),
    "skips_small_groups": (in_turn, ("        if count == 0:\n            continue\n", "        if count > 1:\n    ")),
    "counts_of_other_ids": (in_turn, ("ids.flatten().bincount", "(ids.flatten() // 2 * 2).bincount")),
    "starts_at_one": (in_turn, ("torch.zeros_like(x), 0", "torch.zeros_like(x), 1")),
    "last_start": (in_turn, ("tolist())", "tolist()[:3])"), ("return out", "return out * start")),
    "one_expert_less": (in_turn, (")).tolist()", "))[:-1].tolist()")),  # a layer of the others, where the graph has its numbers
    "more_experts_than_counts_at_least": (  # there are as many numbers as the largest id says
        in_turn, ("len(self.experts))", "len(self.experts) - 1)"), ("self.experts[e](", "run_expert(self, e, "),
    ),
    "sorted_on_the_same_line": (
        in_turn, ("    rows, out", f"    sizes = {_COUNTS}; sizes.sort()\n    rows, out"), (f"({_COUNTS})", "(sizes)"),
    ),
    "counts_results": (joined, (_RESULT, f"{_RESULT} * len(outputs)")),
    "mean_of_each_group": (joined, ("append(self.experts[e]", "append(centred(self.experts[e]"), ("count]))", "count])))")),
    "writes_to_a_slice": (  # a slice is a view: what it holds afterwards is read
        joined, ("    rows, out", "    seen = torch.zeros_like(scale)\n    rows, out"), (_RESULT, f"{_RESULT} + seen.sum()"),
        ("        outputs.append", "        part = seen[start : start + count]\n        part += e\n        outputs.append"),
    ),
    "not_sorted": (
        split, (_SORTED, "token, scale = torch.arange(len(x)).repeat_interleave(ids.shape[1]), weights.flatten()[:, None]"),
    ),
    "joined_in_reverse": (split, ("cat(outputs)", "cat(outputs[::-1])")),
    "reads_the_counts_later": (split, (_RESULT, f"{_RESULT} * max(counts)")),
    "changes_the_counts": (  # the list is that of before: a layer only where the graph has its numbers
        split, (".tolist()", ""),
        ("    outputs = []", "    counts, tensor = counts.tolist(), counts\n    tensor.add_(1)\n    outputs = []"),
    ),
    "order_of_tokens": (sparse_dispatcher, ("order[:, 1]", "order[:, 0]")),
    "tokens_are_experts": (sparse_dispatcher, ("order[:, 1], 0]", "order[:, 1], 1]")),
    "falling_order": (sparse_dispatcher, ("sort(0)", "sort(0, descending=True)")),
    "order_of_the_order": (sparse_dispatcher, ("order[:, 1], 0]", "order[:, 1].argsort(), 0]")),
    "groups_of_rows": (sparse_dispatcher, (".sum(0).tolist", ".flip(1).sum(0).tolist")),
    "gates_as_they_stood": (sparse_dispatcher, ("experts[:, 1:]", "chosen[:, 1:]")),
    "padded_behind": (padded_ends, ("(1, 0))", "(0, 1))")),  # the rows of the first expert are left out
    "padded_by_one": (padded_ends, ("(1, 0))", "(1, 0), value=1)")),
    "zeros_if_the_first_has_no_rows": (
        padded_on_demand, ("part.shape[0] == 0", "sizes[0] == 0"), ("new_empty(0, x.shape[1])", "new_zeros(part.shape)"),
    ),
    "doubled_if_the_first_has_rows": (padded_on_demand, ("shape[0] > sum(sizes)", "shape[0] > sum(sizes[1:])")),
    "pads_what_is_left": (padded_on_demand, (".tolist()", ".tolist()[:-1]")),
    "gates_of_the_first": (sparse_dispatcher, ("gates[token]", "gates[chosen[:, 0]]")),
}  # fmt: skip
_BY_ORDER = "slots, _, chosen", "slots, order, chosen"
_CHANGES |= {
    "rows_of_used_slots": (slots_with_weights, _BY_ORDER, ("x[slots //", "x[order //")),
    "scores_of_used_slots": (slots_with_weights, _BY_ORDER, ("flatten()[slots,", "flatten()[order,")),
}
TWINS = all_changed(_CHANGES)
IN_NUMBERS = {name: TWINS.pop(name) for name in ("one_expert_less", "changes_the_counts")}
"""Layers, where the graph has their numbers."""


def _counts_in_a_tensor(change):
    """Groups by counts that are elements of a tensor, with ``change(start, last, count)`` where each begins and ends."""

    def combine(self, x, weights, ids):
        order, token, scale = sorted_by_expert(self, x, weights, ids)
        rows, out, start, last, seen = x[token], torch.zeros_like(x), 0, 0, 0
        for e, count in enumerate(torch.bincount(ids.flatten(), minlength=len(self.experts))):
            if count == 0:
                continue
            (first, end), before = change(start, last, count), last
            out.index_add_(0, token[first:end], self.experts[e](rows[first:end]) * scale[first:end])
            last, start = start, start + count
            seen = seen + (before if change is written_under_two_names else 0)
        return out * (1 + start if change is read_at_the_end else 1 + seen)

    combine.__name__ = change.__name__
    return combine


def one_row_behind(start, last, count):
    return start, start + count + 1


def from_the_last_start(start, last, count):
    return last, start + count


def asked_what_it_is(start, last, count):
    return (start, start + count) if isinstance(start, int) else (start, start + count - 1)


def read_at_the_end(start, last, count):
    return start, start + count


def written_under_two_names(start, last, count):
    end = start + count
    start += 0
    return start, end


def scores_not_sorted(self, x, weights, ids):
    """The scores on what the experts take are those of other tokens."""
    order, token, _ = sorted_by_expert(self, x, weights, ids)
    rows, outputs = x[token] * weights.reshape(-1, 1), []
    for e, part in enumerate(rows.split(ids.flatten().bincount(minlength=len(self.experts)).tolist())):
        outputs.append(self.experts[e](part))
    return torch.zeros_like(x).index_add(0, token, torch.cat(outputs))


def by_map(rows_of, counts_of):
    """Rows that a map selects, in an order and in groups that are functions of it."""

    def combine(self, x, weights, ids):
        chosen = torch.zeros(x.shape[0], len(self.experts), dtype=torch.bool).scatter(1, ids, True)
        token, probs = rows_of(chosen, torch.zeros_like(chosen, dtype=weights.dtype).scatter(1, ids, weights))
        parts = x.index_select(0, token).split(counts_of(chosen).tolist())
        y = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)]) * probs.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, token, y)

    combine.__name__ = f"{rows_of.__name__}_{counts_of.__name__}"
    return combine


def rows_by_token(chosen, probs):
    return torch.arange(chosen.shape[0]).unsqueeze(1).expand(chosen.shape).masked_select(chosen), probs.masked_select(chosen)


def rows_by_expert(chosen, probs):
    token = torch.arange(chosen.shape[0]).expand(chosen.shape[::-1]).masked_select(chosen.T)
    return token, probs.T.masked_select(chosen.T)


def in_its_groups(chosen):
    return chosen.sum(0)


def in_the_next_groups(chosen):
    return chosen.sum(0).roll(1)


def negative_sizes(self, x, weights, ids):
    """Numbers that are no counts: groups may overlap."""
    sizes = (3 - 2 * ids[: len(self.experts), 0]).tolist()
    y, start = torch.zeros_like(x), 0
    for e, size in enumerate(sizes):
        end = start + size
        y[start:end] = self.experts[e](x[start:end])
        start = end
    return y * weights[:, :1]


def fewer_rows_are_joined(self, x, weights, ids):
    """Those of the last expert are missing, and how many there are is part of the result."""
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    counts = (ids.flatten()[:, None] == torch.arange(len(self.experts) - 1)).sum(0).tolist()
    rows, outputs, start = x[token], [], 0
    for e, count in enumerate(counts):
        end = start + count
        if count == 0:
            continue
        outputs.append(self.experts[e](rows[start:end]) * scale[start:end])
        start = end
    y = torch.cat(outputs)
    return torch.zeros_like(x).index_add(0, token[: len(y)], y) / len(y)


def divides_by_padding(self, x, weights, ids):
    def experts(rows, counts):
        sizes = counts.tolist()
        padding = rows.shape[0] - sum(sizes)
        parts = torch.split(rows[: sum(sizes)], sizes)
        out = torch.cat([self.experts[e](part) for e, part in enumerate(parts)])
        return torch.vstack((out, out.new_zeros((padding, out.shape[-1])))) / (1 + padding)

    _, token, scale = sorted_by_expert(self, x, weights, ids)
    counts = torch.bincount(ids.flatten(), minlength=len(self.experts))[:-1]
    return torch.zeros_like(x).index_add(0, token, experts(x[token], counts) * scale)


def rows_to_another_sum(self, x, weights, ids):
    """As many rows of the front as there are of the last experts."""
    _, token, scale = sorted_by_expert(self, x, weights, ids)
    sizes = torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()
    others = sizes[::-1]
    parts = torch.split(x[token][: sum(others)], sizes)
    y = torch.cat([self.experts[e](part) for e, part in enumerate(parts)])
    return torch.zeros_like(x).index_add(0, token, y * scale) + len(parts[0])


def _by_highest_id(change):
    """A loop over counts of which there are as many as the highest id says, and ``change(ends, ids)`` of its result."""

    def combine(self, x, weights, ids):
        flat, out, start = ids.flatten().clone(), torch.zeros_like(x), 0
        counts = flat.bincount()
        change.before(flat)
        idxs = ids.flatten().argsort()
        ends = counts.cpu().numpy().cumsum(0)
        for e, end in enumerate(ends):
            if start == end:
                continue
            token = idxs[start:end] // ids.shape[1]
            y = self.experts[e](x[token]) * weights.view(-1, 1)[idxs[start:end]]
            out.scatter_add_(0, token.view(-1, 1).repeat(1, x.shape[-1]), y)
            start = end
        return out * change.after(ends, flat)

    combine.__name__ = change.__name__
    return combine


class how_many_counts:
    def before(flat):
        pass

    def after(ends, flat):
        return len(ends)


class count_of_the_highest(how_many_counts):
    def after(ends, flat):
        return float(ends[-1] - ends[-2])


class counts_of_no_experts(how_many_counts):
    """Counted ids change behind the count."""

    def before(flat):
        flat.fill_(1)

    def after(ends, flat):
        return flat.sum()


def moves_on_beside_a_loop(self, x, weights, ids):
    """Of counts of which there are as many as the highest id says, the second may not be there."""
    counts = enumerate(ids.flatten().bincount().tolist())
    first, second = next(counts), next(counts, (0, 0))
    return self.experts[0](x) * (first[1] + 2 * second[1])


NEAR_MISSES = (
    *TWINS.values(),
    moves_on_beside_a_loop, divides_by_padding, rows_to_another_sum, scores_not_sorted, negative_sizes, fewer_rows_are_joined,
    by_map(rows_by_token, in_its_groups), by_map(rows_by_expert, in_the_next_groups),
    *map(_counts_in_a_tensor, (one_row_behind, from_the_last_start, asked_what_it_is, read_at_the_end, written_under_two_names)),
    *map(_by_highest_id, (how_many_counts, count_of_the_highest)),
)  # fmt: skip
BY_HIGHEST_ID = (_by_highest_id(counts_of_no_experts),)
"""Right whatever becomes of it: the counts are those of before."""
