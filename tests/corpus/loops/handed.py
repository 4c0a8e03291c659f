"""Layers whose functions hand counts on the host to one another, and their near-miss twins.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import torch
import torch.nn.functional as F


def sizes_of(ids, num_experts):
    return torch.bincount(ids.flatten(), minlength=num_experts).tolist()


def gating(ids, weights, num_experts):
    """As JetMoE's and ScatterMoE's: who goes where, in the order of experts."""
    zeros = torch.zeros([ids.shape[0], num_experts], dtype=weights.dtype)
    sizes = zeros.scatter(1, ids, 1).long().sum(0).tolist()
    _, order = ids.flatten().sort(0)
    return order.div(ids.shape[1], rounding_mode="trunc"), weights.flatten()[order], sizes


def linears(rows, sizes, weights):
    parts = rows.split(sizes, dim=0)
    results = []
    for i in range(len(weights)):
        results.append(F.linear(parts[i], weights[i]))
    return torch.cat(results, dim=0)


def two_projections(self, x, weights, ids):
    """JetMoE: each projection splits its rows and joins its results."""
    token, share, sizes = gating(ids, weights, len(self.experts))
    up = linears(x[token], sizes, [torch.cat([e.w1.weight, e.w3.weight]) for e in self.experts])
    gate, value = up.chunk(2, dim=-1)
    down = linears(F.silu(gate) * value, sizes, [e.w2.weight for e in self.experts])
    return torch.zeros_like(x).index_add(0, token, down * share[:, None])


def sizes_by_a_function(self, x, weights, ids):
    order = ids.flatten().argsort(stable=True)
    parts = torch.split(x[order // ids.shape[1]], sizes_of(ids, len(self.experts)))
    rows = torch.cat([self.experts[e](parts[e]) for e in range(len(self.experts))])
    y = torch.empty_like(rows)
    y[order] = rows
    return (y.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)


class Dispatcher:
    def __init__(self, ids, weights, num_experts):
        flat = ids.flatten()
        self.order = flat.argsort()
        self.token = self.order // ids.shape[1]
        self.sizes = (flat[:, None] == torch.arange(num_experts)).sum(0).tolist()
        self.share = weights.flatten()[self.order, None]

    def split(self, x):
        return x[self.token].split(self.sizes)

    def join(self, parts, like):
        return torch.zeros_like(like).index_add(0, self.token, torch.cat(parts) * self.share)


def by_a_class(self, x, weights, ids):
    dispatcher = Dispatcher(ids, weights, len(self.experts))
    return dispatcher.join([expert(part) for expert, part in zip(self.experts, dispatcher.split(x), strict=True)], x)


def sorted_rows(x, weights, ids):
    order = ids.flatten().argsort()
    token = order // ids.shape[1]
    return x[token], token, weights.flatten()[order, None]


def slices_by_tensors(self, x, weights, ids):
    """Megatron's sequential experts and Aria's: bounds on the device, a zero in front."""
    rows, token, scale = sorted_rows(x, weights, ids)
    ends = torch.cumsum(torch.bincount(ids.flatten(), minlength=len(self.experts)), 0)
    ends = torch.cat((torch.zeros(1, dtype=torch.long), ends))
    y = torch.zeros_like(rows)
    for e, expert in enumerate(self.experts):
        start, end = ends[e], ends[e + 1]
        y[start:end] = expert(rows[start:end])
    return torch.zeros_like(x).index_add(0, token, y * scale)


def guarded_start(self, x, weights, ids):
    """OLMo-core's running start, and experts without rows left out."""
    rows, token, scale = sorted_rows(x, weights, ids)
    y, start = torch.empty_like(rows), 0
    for expert, size in zip(self.experts, sizes_of(ids, len(self.experts)), strict=True):
        if size > 0:
            y[start : start + size] = expert(rows[start : start + size])
        start += size
    return torch.zeros_like(x).index_add(0, token, y * scale)


def array_of_sizes(self, x, weights, ids):
    rows, token, scale = sorted_rows(x, weights, ids)
    sizes = torch.bincount(ids.flatten(), minlength=len(self.experts)).cpu().numpy()
    parts, start = [], 0
    for e, size in enumerate(sizes):
        if size == 0:
            continue
        parts.append(self.experts[e](rows[start : start + size]))
        start += size
    return torch.zeros_like(x).index_add(0, token, torch.cat(parts) * scale)


HANDED = (two_projections, sizes_by_a_function, by_a_class, slices_by_tensors, guarded_start, array_of_sizes)


# Near misses.


def _joined(self, x, weights, ids, sizes):
    order = ids.flatten().argsort()
    token = order // ids.shape[1]
    parts = torch.split(x[token], sizes)
    y = torch.cat([self.experts[e](parts[e]) for e in range(len(self.experts))])
    return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order, None])


def sizes_of_other_ids(self, x, weights, ids):
    return _joined(self, x, weights, ids, sizes_of((ids + 1) % len(self.experts), len(self.experts)))


def sizes_in_another_order(self, x, weights, ids):
    return _joined(self, x, weights, ids, sizes_of(ids, len(self.experts))[::-1])


def sizes_are_changed(self, x, weights, ids):
    sizes = sizes_of(ids, len(self.experts))
    sizes[0], sizes[1] = sizes[1], sizes[0]
    return _joined(self, x, weights, ids, sizes)


def moves_a_row(self, x, weights, ids):
    """The last row of the largest group goes to another expert."""
    sizes = sizes_of(ids, len(self.experts))
    largest = sizes.index(max(sizes))
    sizes[largest] -= 1
    sizes[(largest + 1) % len(sizes)] += 1
    return _joined(self, x, weights, ids, sizes)


def sizes_are_a_weight(self, x, weights, ids):
    sizes = sizes_of(ids, len(self.experts))
    return _joined(self, x, weights, ids, sizes) * (sizes[0] + 1)


def largest_size_is_kept(self, x, weights, ids):
    sizes = sizes_of(ids, len(self.experts))
    self.calls = max(sizes)
    return _joined(self, x, weights, ids, sizes)


def parts_in_another_order(self, x, weights, ids):
    order = ids.flatten().argsort()
    token = order // ids.shape[1]
    parts = torch.split(x[token], sizes_of(ids, len(self.experts)))
    y = torch.cat([self.experts[e](parts[e]) for e in reversed(range(len(self.experts)))])
    return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order, None])


def one_part_twice(self, x, weights, ids):
    order = ids.flatten().argsort()
    token = order // ids.shape[1]
    parts = torch.split(x[token], sizes_of(ids, len(self.experts)))
    y = [self.experts[e](parts[e]) for e in range(len(self.experts))]
    y = torch.cat([*y[:-1], y[-1] * 0, y[-1]])[: order.shape[0]]
    return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order, None])


def not_sorted(self, x, weights, ids):
    token = torch.arange(x.shape[0]).repeat_interleave(ids.shape[1])
    parts = torch.split(x[token], sizes_of(ids, len(self.experts)))
    y = torch.cat([self.experts[e](parts[e]) for e in range(len(self.experts))])
    return torch.zeros_like(x).index_add(0, token, y * weights.reshape(-1, 1))


def projections_of_the_next_expert(self, x, weights, ids):
    """A layer all the same? The second projection is split in another order: its rows are those of several experts."""
    token, share, sizes = gating(ids, weights, len(self.experts))
    up = linears(x[token], sizes, [torch.cat([e.w1.weight, e.w3.weight]) for e in self.experts])
    gate, value = up.chunk(2, dim=-1)
    down = linears(F.silu(gate) * value, sizes[::-1], [e.w2.weight for e in self.experts])
    return torch.zeros_like(x).index_add(0, token, down * share[:, None])


def mean_of_each_part(self, x, weights, ids):
    order = ids.flatten().argsort()
    token = order // ids.shape[1]
    parts = torch.split(x[token], sizes_of(ids, len(self.experts)))
    y = torch.cat([self.experts[e](part - part.sum(0, keepdim=True)) for e, part in enumerate(parts)])
    return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order, None])


def counts_change_afterwards(self, x, weights, ids):
    """The numbers are those of before."""
    counts = torch.bincount((ids.flatten() + 1) % len(self.experts), minlength=len(self.experts))
    sizes = listed(counts)
    counts.copy_(torch.bincount(ids.flatten(), minlength=len(self.experts)))
    return _joined(self, x, weights, ids, sizes)


def listed(counts):
    return counts.tolist()


def next_slice_by_tensors(self, x, weights, ids):
    """One row too many."""
    rows, token, scale = sorted_rows(x, weights, ids)
    ends = torch.cat((torch.zeros(1, dtype=torch.long), torch.bincount(ids.flatten(), minlength=len(self.experts)).cumsum(0)))
    y = torch.zeros_like(rows)
    for e, expert in enumerate(self.experts):
        y[ends[e] : ends[e + 1]] += expert(rows[ends[e] : ends[e + 1] + 1])[: y[ends[e] : ends[e + 1]].shape[0]] * 0.5
        y[ends[e] : ends[e + 1] + 1] += expert(rows[ends[e] : ends[e + 1] + 1])
    return torch.zeros_like(x).index_add(0, token, y * scale)


def start_waits_for_rows(self, x, weights, ids):
    """The start moves on for large groups only."""
    rows, token, scale = sorted_rows(x, weights, ids)
    y, start = torch.zeros_like(rows), 0
    for expert, size in zip(self.experts, sizes_of(ids, len(self.experts)), strict=True):
        if size > 1:
            y[start : start + size] = expert(rows[start : start + size])
            start += size
    return torch.zeros_like(x).index_add(0, token, y * scale)


def array_is_written(self, x, weights, ids):
    """An array shares the memory of its tensor."""
    rows, token, scale = sorted_rows(x, weights, ids)
    counts = torch.bincount(ids.flatten(), minlength=len(self.experts))
    sizes = counts.numpy()
    counts.copy_(counts.flip(0))
    y, start = torch.zeros_like(rows), 0
    for e, size in enumerate(sizes):
        y[start : start + size] = self.experts[e](rows[start : start + size])
        start += size
    return torch.zeros_like(x).index_add(0, token, y * scale)


NEAR_MISSES = (
    sizes_of_other_ids, sizes_in_another_order, sizes_are_changed, moves_a_row, sizes_are_a_weight, largest_size_is_kept,
    parts_in_another_order, one_part_twice, not_sorted, projections_of_the_next_expert, mean_of_each_part,
    counts_change_afterwards, next_slice_by_tensors, start_waits_for_rows, array_is_written,
)  # fmt: skip
