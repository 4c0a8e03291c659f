"""Near misses of the layers in `split`: sorted and split alike, and another function."""

import torch

from tests.corpus.loops.split import run_expert, sorted_by_expert


def reads_a_count(self, x, weights, ids):
    """The number of tokens is part of the result."""
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, out, start = x[token], torch.zeros_like(x), 0
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()):
        end = start + count
        if count == 0:
            continue
        out.index_add_(0, token[start:end], self.experts[e](rows[start:end]) * scale[start:end] * count)
        start = end
    return out


def one_row_too_many(self, x, weights, ids):
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, out, start = x[token], torch.zeros_like(x), 0
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()):
        end = start + count
        if count == 0:
            continue
        out.index_add_(0, token[start : end + 1], self.experts[e](rows[start : end + 1]) * scale[start : end + 1])
        start = end
    return out


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


def never_moves_on(self, x, weights, ids):
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, out, start = x[token], torch.zeros_like(x), 0
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()):
        end = start + count
        if count == 0:
            continue
        out.index_add_(0, token[start:end], self.experts[e](rows[start:end]) * scale[start:end])
    return out


def skips_before_moving_on(self, x, weights, ids):
    """Expert 1 is left out, and those behind it get its rows."""
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, out, start = x[token], torch.zeros_like(x), 0
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()):
        if e == 1:
            continue
        end = start + count
        out.index_add_(0, token[start:end], self.experts[e](rows[start:end]) * scale[start:end])
        start = end
    return out


def skips_small_groups(self, x, weights, ids):
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, out, start = x[token], torch.zeros_like(x), 0
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()):
        end = start + count
        if count > 1:
            out.index_add_(0, token[start:end], self.experts[e](rows[start:end]) * scale[start:end])
        start = end
    return out


def counts_of_other_ids(self, x, weights, ids):
    """Groups are not those that the rows were sorted into."""
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    counts = (ids.flatten() // 2 * 2).bincount(minlength=len(self.experts)).tolist()
    rows, out, start = x[token], torch.zeros_like(x), 0
    for e, count in enumerate(counts):
        end = start + count
        if count == 0:
            continue
        out.index_add_(0, token[start:end], self.experts[e](rows[start:end]) * scale[start:end])
        start = end
    return out


def starts_at_one(self, x, weights, ids):
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, out, start = x[token], torch.zeros_like(x), 1
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()):
        end = start + count
        if count == 0:
            continue
        out.index_add_(0, token[start:end], self.experts[e](rows[start:end]) * scale[start:end])
        start = end
    return out


def not_sorted(self, x, weights, ids):
    token = torch.arange(x.shape[0]).repeat_interleave(ids.shape[1])
    rows, scale = x[token], weights.flatten().unsqueeze(1)
    outputs = []
    for e, part in enumerate(rows.split(ids.flatten().bincount(minlength=len(self.experts)).tolist())):
        outputs.append(self.experts[e](part))
    return torch.zeros_like(x).index_add(0, token, torch.cat(outputs) * scale)


def joined_in_reverse(self, x, weights, ids):
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    outputs = []
    for e, part in enumerate(x[token].split(ids.flatten().bincount(minlength=len(self.experts)).tolist())):
        outputs.append(self.experts[e](part))
    return torch.zeros_like(x).index_add(0, token, torch.cat(outputs[::-1]) * scale)


def counts_results(self, x, weights, ids):
    """How many experts were hit is part of the result."""
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, outputs, start = x[token], [], 0
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()):
        if count == 0:
            continue
        outputs.append(self.experts[e](rows[start : start + count]))
        start += count
    return torch.zeros_like(x).index_add(0, token, torch.cat(outputs) * scale) * len(outputs)


def mean_of_each_group(self, x, weights, ids):
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, outputs, start = x[token], [], 0
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()):
        if count == 0:
            continue
        y = self.experts[e](rows[start : start + count])
        outputs.append(y - y.mean(0, keepdim=True))
        start += count
    return torch.zeros_like(x).index_add(0, token, torch.cat(outputs) * scale)


def writes_to_a_slice(self, x, weights, ids):
    """A slice is a view: what it holds afterwards is read."""
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, outputs, start = x[token], [], 0
    seen = torch.zeros_like(scale)
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()):
        if count == 0:
            continue
        part = seen[start : start + count]
        part += e
        outputs.append(self.experts[e](rows[start : start + count]))
        start += count
    return torch.zeros_like(x).index_add(0, token, torch.cat(outputs) * scale) + seen.sum()


def changes_the_counts(self, x, weights, ids):
    """The list is that of before: a layer only where the graph has its numbers."""
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    counts = ids.flatten().bincount(minlength=len(self.experts))
    sizes = counts.tolist()
    counts.add_(1)
    outputs = []
    for e, part in enumerate(x[token].split(sizes)):
        outputs.append(self.experts[e](part))
    return torch.zeros_like(x).index_add(0, token, torch.cat(outputs) * scale)


def negative_sizes(self, x, weights, ids):
    """Numbers that are no counts: groups may overlap."""
    sizes = (3 - 2 * ids[: len(self.experts), 0]).tolist()
    y, start = torch.zeros_like(x), 0
    for e, size in enumerate(sizes):
        end = start + size
        y[start:end] = self.experts[e](x[start:end])
        start = end
    return y * weights[:, :1]


def reads_the_counts_later(self, x, weights, ids):
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    counts = ids.flatten().bincount(minlength=len(self.experts)).tolist()
    outputs = []
    for e, part in enumerate(x[token].split(counts)):
        outputs.append(self.experts[e](part))
    return torch.zeros_like(x).index_add(0, token, torch.cat(outputs) * scale) * max(counts)


def last_start(self, x, weights, ids):
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, out, start = x[token], torch.zeros_like(x), 0
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()[:3]):
        end = start + count
        if count == 0:
            continue
        out.index_add_(0, token[start:end], self.experts[e](rows[start:end]) * scale[start:end])
        start = end
    return out * start


def one_expert_less(self, x, weights, ids):
    """The rows of the last expert stay zero: a layer of the others, where the graph has its numbers."""
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    counts = ids.flatten().bincount(minlength=len(self.experts))[:-1].tolist()
    rows, out, start = x[token], torch.zeros_like(x), 0
    for e, count in enumerate(counts):
        end = start + count
        if count == 0:
            continue
        out.index_add_(0, token[start:end], self.experts[e](rows[start:end]) * scale[start:end])
        start = end
    return out


def more_experts_than_counts_at_least(self, x, weights, ids):
    """There are as many numbers as the largest id says."""
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, out, start = x[token], torch.zeros_like(x), 0
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts) - 1).tolist()):
        end = start + count
        if count == 0:
            continue
        out.index_add_(0, token[start:end], run_expert(self, e, rows[start:end]) * scale[start:end])
        start = end
    return out


def sorted_on_the_same_line(self, x, weights, ids):
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    counts = torch.nn.functional.one_hot(ids.flatten(), len(self.experts)).sum(0)
    sizes = counts.tolist(); sizes.sort()  # noqa: E702
    rows, out, start = x[token], torch.zeros_like(x), 0
    for e, count in enumerate(sizes):
        end = start + count
        if count == 0:
            continue
        out.index_add_(0, token[start:end], self.experts[e](rows[start:end]) * scale[start:end])
        start = end
    return out


def behind_a_name_for_a_mode(self, x, weights, ids):
    """What is around the loop is not gone into."""
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    seen, start = torch.zeros_like(scale), 0
    with torch.no_grad() as _mode:
        for count in ids.flatten().bincount().tolist():
            end = start + count
            self.calls += 1
            seen[start:end] += self.calls
            start = end
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        rows, slot = torch.where(ids == e)
        if rows.numel() == 0:
            continue
        out.index_add_(0, rows, self.experts[e](x[rows]) * weights[rows, slot, None])
    return out * seen.sum()


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
    moves_on_beside_a_loop,
    divides_by_padding,
    rows_to_another_sum,
    reads_a_count, one_row_too_many, never_moves_on, skips_before_moving_on, skips_small_groups, counts_of_other_ids,
    by_map(rows_by_token, in_its_groups), by_map(rows_by_expert, in_the_next_groups), scores_not_sorted,
    starts_at_one, not_sorted, joined_in_reverse, counts_results, mean_of_each_group, writes_to_a_slice,
    negative_sizes, reads_the_counts_later, last_start, more_experts_than_counts_at_least,
    sorted_on_the_same_line, fewer_rows_are_joined,
    *map(_counts_in_a_tensor, (one_row_behind, from_the_last_start, asked_what_it_is, read_at_the_end, written_under_two_names)),
    *map(_by_highest_id, (how_many_counts, count_of_the_highest)),
)  # fmt: skip
BY_HIGHEST_ID = (_by_highest_id(counts_of_no_experts),)
"""Right whatever becomes of it: the counts are those of before."""
