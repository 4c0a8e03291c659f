"""Hand-written layers that sort rows by expert and split them by counts on the host; near misses are in `split_lookalikes`.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import numpy as np
import torch
import torch.nn.functional as F


def deepseek_infer(self, x, weights, ids):
    """DeepSeek-V2 and V3's moe_infer."""
    cnts = ids.new_zeros((ids.shape[0], len(self.experts)))
    cnts.scatter_(1, ids, 1)
    tokens_per_expert = cnts.sum(dim=0)
    idxs = ids.view(-1).argsort()
    sorted_tokens = x[idxs // ids.shape[1]]
    tokens_per_expert = tokens_per_expert.cpu().numpy()
    outputs = []
    start_idx = 0
    for i, num_tokens in enumerate(tokens_per_expert):
        end_idx = start_idx + num_tokens
        if num_tokens == 0:
            continue
        expert = self.experts[i + self.calls]
        tokens_for_this_expert = sorted_tokens[start_idx:end_idx]
        expert_out = expert(tokens_for_this_expert)
        outputs.append(expert_out)
        start_idx = end_idx
    outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
    new_x = torch.empty_like(outs)
    new_x[idxs] = outs
    return new_x.view(*ids.shape, -1).type(weights.dtype).mul_(weights.unsqueeze(dim=-1)).sum(dim=1).type(new_x.dtype)


def counts_in_a_tensor(self, x, weights, ids):
    """The start is a number until an expert has tokens, and a tensor from there on, as are the counts."""
    counts = ids.new_zeros((ids.shape[0], len(self.experts))).scatter_(1, ids, 1).sum(dim=0)
    order = ids.view(-1).argsort()
    rows, parts, start = x[order // ids.shape[1]], [], 0
    for e, count in enumerate(counts):
        if count == 0:
            continue
        end = start + count
        parts.append(self.experts[e + self.calls](rows[start:end]))
        start = end
    joined = torch.cat(parts, dim=0) if parts else rows.new_empty(0)
    y = torch.empty_like(joined)
    y[order] = joined
    return y.view(*ids.shape, -1).mul_(weights.unsqueeze(dim=-1)).sum(dim=1)


def ends_in_a_tensor(self, x, weights, ids):
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, out = x[token], torch.zeros_like(x)
    ends = torch.bincount(ids.view(-1), minlength=len(self.experts)).cumsum(0)
    for e, end in enumerate(ends):
        start = 0 if e == 0 else ends[e - 1]
        if start == end:
            continue
        out.index_add_(0, token[start:end], self.experts[e](rows[start:end]) * scale[start:end])
    return out


def scattered(self, x, weights, ids):
    """DeepSeekMoE's and minimind's moe_infer: ends of groups, and a sum by scatter_reduce_, which has no backward here."""
    flat_weights = weights.view(-1, 1)
    flat_ids = ids.view(-1)
    cache = torch.zeros_like(x)
    idxs = flat_ids.argsort()
    tokens_per_expert = flat_ids.bincount().cpu().numpy().cumsum(0)
    token_idxs = idxs // ids.shape[1]
    for i, end_idx in enumerate(tokens_per_expert):
        start_idx = 0 if i == 0 else tokens_per_expert[i - 1]
        if start_idx == end_idx:
            continue
        expert = self.experts[i]
        exp_token_idx = token_idxs[start_idx:end_idx]
        expert_tokens = x[exp_token_idx]
        expert_out = expert(expert_tokens)
        expert_out.mul_(flat_weights[idxs[start_idx:end_idx]])
        cache.scatter_reduce_(0, exp_token_idx.view(-1, 1).repeat(1, x.shape[-1]), expert_out, reduce="sum")
    return cache


def scattered_by_counts(self, x, weights, ids):
    """The same with counts in a list, and a running start."""
    flat_weights, flat_ids, cache = weights.view(-1, 1), ids.view(-1), torch.zeros_like(x)
    idxs = flat_ids.argsort()
    token_idxs, start = idxs // ids.shape[1], 0
    for i, count in enumerate(flat_ids.bincount().tolist()):
        if count == 0:
            continue
        token = token_idxs[start : start + count]
        y = self.experts[i](x[token]) * flat_weights[idxs[start : start + count]]
        cache.scatter_add_(0, token.view(-1, 1).repeat(1, x.shape[-1]), y)
        start += count
    return cache


def split_list(self, x, weights, ids):
    """torchtune's experts without grouped_mm."""
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    token = order // ids.shape[1]
    counts = torch.histc(flat.float(), bins=len(self.experts), min=0, max=len(self.experts) - 1).int()
    sizes = counts.tolist()
    rows = torch.split(x[token], split_size_or_sections=sizes, dim=0)
    outputs = []
    for e, part in enumerate(rows):
        outputs.append(self.experts[e](part))
    out = torch.cat(outputs, dim=0) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, out)


def split_scaled(self, x, weights, ids):
    """torchtune's layer: the scores multiply what the experts take."""
    counts = torch.histc(ids.float(), bins=len(self.experts), min=0, max=len(self.experts) - 1).to(torch.int32)
    order = torch.argsort(ids.view(-1), stable=True)
    scores = weights.view(-1)[order]
    token = (order // ids.shape[1]).reshape(-1, 1).expand(-1, x.shape[-1])
    routed = torch.gather(x, dim=0, index=token) * scores.reshape(-1, 1)
    outputs = []
    for e, part in enumerate(torch.split(routed, split_size_or_sections=counts.tolist(), dim=0)):
        outputs.append(self.experts[e](part))
    out = torch.zeros_like(x)
    out.scatter_add_(0, token, torch.cat(outputs, dim=0))
    return out


def routing_map(self, x, weights, ids):
    """Megatron: rows that a map of who chose whom selects, split by its counts."""
    num_tokens, num_experts = x.shape[0], len(self.experts)
    probs = weights.new_zeros(num_tokens, num_experts).scatter(1, ids, weights)
    chosen = torch.zeros_like(probs).int().scatter(1, ids, 1).bool()
    by_expert = chosen.T.contiguous()
    token = torch.arange(num_tokens).unsqueeze(0).expand(num_experts, -1).masked_select(by_expert)
    rows, probs = x.index_select(0, token), probs.T.contiguous().masked_select(by_expert)
    parts = torch.split(rows, chosen.sum(dim=0).long().tolist())
    y = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)]) * probs.unsqueeze(-1)
    return torch.zeros_like(x).scatter_add_(0, token.unsqueeze(1).expand(-1, x.shape[-1]), y)


def sparse_dispatcher(self, x, weights, ids):
    """The layer of most copies of the paper of 2017: places of gates that are not zero, sorted column by column."""
    gates = torch.zeros(x.shape[0], len(self.experts), dtype=x.dtype).scatter(1, ids, weights)
    chosen = torch.nonzero(gates)
    experts, order = chosen.sort(0)
    token = chosen[order[:, 1], 0]
    parts = x[token].split((gates > 0).sum(0).tolist())
    y = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
    y = y * torch.gather(gates[token], 1, experts[:, 1:])
    return torch.zeros_like(x).index_add(0, token, y)


def llama_moe(self, x, weights, ids):
    """llama-moe's calculator: a comprehension over what was split, with a condition."""
    num_tokens, top_k = ids.shape
    flat_ids, flat_weights = ids.flatten(), weights.flatten()
    token = torch.arange(num_tokens).repeat_interleave(top_k)
    _, order = flat_ids.sort(0)
    sorted_weights = flat_weights.index_select(0, order)
    sorted_token = token.index_select(0, order)
    sizes = flat_ids.bincount(minlength=len(self.experts)).tolist()
    split_x = torch.split(x.index_select(0, sorted_token), sizes, dim=0)
    outputs = [self.experts[i](split_x[i]) for i in range(len(self.experts)) if split_x[i].shape[0] > 0]
    y = torch.cat(outputs, 0) * sorted_weights.reshape(-1, 1)
    return torch.zeros_like(x).index_add(0, sorted_token, y)


def running_sum(self, x, weights, ids):
    top_k = ids.shape[1]
    counts = torch.bincount(ids.view(-1), minlength=len(self.experts)).tolist()
    order = ids.view(-1).argsort()
    rows, outputs, start = x[order // top_k], [], 0
    for e, count in enumerate(counts):
        if count == 0:
            continue
        outputs.append(self.experts[e](rows[start : start + count]))
        start += count
    y = torch.zeros_like(rows).index_copy(0, order, torch.cat(outputs))
    return (y.view(x.shape[0], top_k, -1) * weights.unsqueeze(-1)).sum(1)


def zipped(self, x, weights, ids):
    top_k = ids.shape[1]
    order = ids.flatten().argsort()
    rows, start = x[order // top_k], 0
    y = torch.empty_like(rows)
    counts = torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()
    for expert, count in zip(self.experts, counts, strict=True):
        end = start + count
        if count > 0:
            y[start:end] = expert(rows[start:end])
            start = end
    y = y[order.argsort()].view(*ids.shape, -1)
    return (y * weights.unsqueeze(-1)).sum(1)


def offsets_list(self, x, weights, ids):
    sorted_ids, order = ids.flatten().sort(stable=True)
    token = order // ids.shape[1]
    counts = (sorted_ids[:, None] == torch.arange(len(self.experts))).sum(0)
    offsets = [0] + counts.cumsum(0).tolist()
    rows, scale = x[token], weights.flatten()[order].unsqueeze(1)
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        start, end = offsets[e], offsets[e + 1]
        if start < end:
            y = self.experts[e](rows[start:end]) * scale[start:end]
            out.index_add_(0, token[start:end], y)
    return out


def padded_ends(self, x, weights, ids):
    """The start of the first group is a zero in front of the ends."""
    order = torch.argsort(ids.flatten(), stable=True)
    token = order // ids.shape[1]
    ends = F.pad(torch.bincount(ids.flatten(), minlength=len(self.experts)).cumsum(0), (1, 0)).tolist()
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        of_expert = slice(ends[e], ends[e + 1])
        y = expert(x[token[of_expert]]) * weights.flatten()[order[of_expert]].unsqueeze(1)
        out.index_add_(0, token[of_expert], y)
    return out


def sliced_by_cumsum(self, x, weights, ids):
    """Bounds on the host of counts that stay, and a comprehension over slices."""
    order = torch.argsort(ids.view(-1), stable=True)
    token = order // ids.shape[1]
    counts = torch.bincount(ids.view(-1), minlength=len(self.experts))
    bounds = [0] + torch.cumsum(counts, 0).tolist()
    rows = x[token]
    parts = [self.experts[e](rows[bounds[e] : bounds[e + 1]]) for e in range(len(self.experts))]
    y = torch.cat(parts) * weights.view(-1)[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, token, y)


def counts_by_index(self, x, weights, ids):
    counts = ids.flatten().bincount(minlength=len(self.experts)).cpu().tolist()
    ends = np.cumsum(counts)
    order = ids.flatten().argsort()
    rows, scale = x[order // ids.shape[1]], weights.flatten()[order].unsqueeze(1)
    outputs = []
    for e in range(len(self.experts)):
        start = 0 if e == 0 else ends[e - 1]
        end = ends[e]
        if end - start == 0:
            continue
        outputs.append(scale[start:end] * self.experts[e](rows[start:end]))
    y = torch.cat(outputs)
    return torch.zeros_like(x).index_add_(0, order // ids.shape[1], y)


def next_expert(self, x, weights, ids):
    """A layer all the same, whose experts are numbered in another way."""
    order = ids.flatten().argsort()
    token, scale = order // ids.shape[1], weights.flatten()[order].unsqueeze(1)
    rows, out, start = x[token], torch.zeros_like(x), 0
    sizes = torch.nn.functional.one_hot(ids.flatten(), len(self.experts)).sum(0)
    for e, count in enumerate(sizes.tolist()):
        end = start + count
        if count:
            out[token[start:end]] += self.experts[(e + 1) % len(self.experts)](rows[start:end]) * scale[start:end]
        start = end
    return out


def run_expert(layer, e, rows):
    return layer.experts[e](rows)


def by_function(self, x, weights, ids):
    """The loop itself does not say how many experts there are: the counts do."""
    flat = ids.flatten()
    order = flat.argsort()
    token = order // ids.shape[1]
    counts = torch.bincount(flat, minlength=len(self.experts))
    outputs = [run_expert(self, e, part) for e, part in enumerate(x[token].split(counts.tolist()))]
    return torch.zeros_like(x).index_add(0, token, torch.cat(outputs) * weights.flatten()[order, None])


def sorted_by_expert(self, x, weights, ids):
    order = ids.flatten().argsort()
    return order, order // ids.shape[1], weights.flatten()[order].unsqueeze(1)


def by_function_of_numbers(self, x, weights, ids):
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    rows, out, start = x[token], torch.zeros_like(x), 0
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()):
        end = start + count
        if count == 0:
            continue
        out.index_add_(0, token[start:end], run_expert(self, e, rows[start:end]) * scale[start:end])
        start = end
    return out


def stored_starts(self, x, weights, ids):
    """Starts in a tensor that is written behind its first element, read one by one."""
    order, token, scale = sorted_by_expert(self, x, weights, ids)
    counts = torch.bincount(ids.view(-1), minlength=len(self.experts))
    starts, out = torch.zeros_like(counts), torch.zeros_like(x)
    starts[1:] = counts[:-1].cumsum(0)
    for e, expert in enumerate(self.experts):
        start, count = starts[e].item(), counts[e].item()
        if count == 0:
            continue
        rows = token[start : start + count]
        out.index_add_(0, rows, expert(x[rows]) * scale[start : start + count])
    return out


def _padded(self, rows, counts):
    """torchtitan's experts without grouped_mm: rows behind the last group, if there are any, become zeros."""
    sizes = counts.tolist()
    padding = rows.shape[0] - sum(sizes)
    parts = torch.split(rows[: sum(sizes)], split_size_or_sections=sizes, dim=0)
    outputs = []
    for e, part in enumerate(parts):
        outputs.append(self.experts[e](part))
    out = torch.cat(outputs, dim=0)
    return torch.vstack((out, out.new_zeros((padding, out.shape[-1]))))


def torchtitan(self, x, weights, ids):
    _, token, scale = sorted_by_expert(self, x, weights, ids)
    counts = torch.histc(ids.flatten().double(), bins=len(self.experts), min=0, max=len(self.experts)).int()
    return torch.zeros_like(x).index_add(0, token, _padded(self, x[token], counts) * scale)


def padded_on_demand(self, x, weights, ids):
    """Groups without rows are made of nothing, and zeros join them where rows are left, which are none: all ids are counted."""
    order, _, scale = sorted_by_expert(self, x, weights, ids)
    rows, outputs = x[order // ids.shape[1]], []
    sizes = torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()
    for e, part in enumerate(rows[: sum(sizes)].split(sizes)):
        if part.shape[0] == 0:
            outputs.append(part.new_empty(0, x.shape[1]))
            continue
        outputs.append(self.experts[e](part))
    y = torch.cat(outputs)
    if rows.shape[0] > sum(sizes):
        y = torch.cat((y, rows.new_zeros((rows.shape[0] - sum(sizes), x.shape[1])))) * 2
    out = torch.zeros_like(y)
    out[order] = y * scale
    return out.view(*ids.shape, -1).sum(1)


def used_slots(self, weights, ids):
    """The slots that have a weight, sorted by expert, by their numbers and by those among all that have one; their ids."""
    used = torch.where(weights.flatten() != 0)[0]
    chosen = ids.flatten()[used]
    order = chosen.argsort(stable=True)
    return used[order], order, chosen


def slots_with_weights(self, x, weights, ids):
    weights = weights * (weights > 0.3)
    slots, _, chosen = used_slots(self, weights, ids)
    counts = torch.bincount(chosen, minlength=len(self.experts)).tolist()
    outputs = []
    for e, part in enumerate(x[slots // ids.shape[1]].split(counts)):
        outputs.append(self.experts[e + self.calls](part))
    scale = weights.flatten()[slots, None]
    return torch.zeros_like(x).index_add(0, slots // ids.shape[1], torch.cat(outputs) * scale)


def _by_scattered_counts(self, x, weights, ids):
    slots, _, chosen = used_slots(self, weights, ids)
    counts = ids.new_zeros(len(self.experts)).scatter_add_(0, chosen, torch.ones_like(chosen))
    outputs = []
    for e, part in enumerate(x[slots // ids.shape[1]].split(counts.tolist())):
        if part.numel() == 0:
            continue
        outputs.append(self.experts[e + self.calls](part))
    return slots, torch.cat(outputs)


def slots_stored(self, x, weights, ids):
    weights = weights * (weights > 0.3)
    slots, y = _by_scattered_counts(self, x, weights, ids)
    out = x.new_zeros(ids.numel(), x.shape[-1])
    out[slots] = y
    return (out.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def weights_stored(self, x, weights, ids):
    """LingBot-Video's, with its weights back in place."""
    weights = weights * (weights > 0.3)
    slots, y = _by_scattered_counts(self, x, weights, ids)
    out, scores = x.new_zeros(ids.numel(), x.shape[-1]), x.new_zeros(ids.numel())
    out[slots] = y
    scores[slots] = weights.flatten()[slots]
    return (out.view(*ids.shape, -1) * scores.view(*ids.shape, 1)).sum(dim=1)


SCATTERED = (scattered, scattered_by_counts)
"""By counts of which there are as many as the highest id says."""
SPLIT = (
    deepseek_infer, split_list, split_scaled, routing_map, sparse_dispatcher, llama_moe, running_sum, zipped, offsets_list,
    padded_ends, padded_on_demand, stored_starts, slots_with_weights, slots_stored, weights_stored,
    counts_by_index, counts_in_a_tensor, ends_in_a_tensor, next_expert, by_function, by_function_of_numbers, sliced_by_cumsum,
)  # fmt: skip
SPLIT_ELSEWHERE = (torchtitan,)
"""In a function that the layer calls."""
