"""More loops over experts that skip those without tokens, and their near-miss twins: by counts, or with a branch for the others.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import torch
import torch.nn.functional as F


def counts_on_the_host(self, x, weights, ids):
    """DeepSeek-V3's own inference."""
    out = torch.zeros_like(x)
    counts = torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()
    for e in range(len(self.experts)):
        if counts[e] == 0:
            continue
        expert = self.experts[e]
        token, slot = torch.where(ids == e)
        out[token] += expert(x[token]) * weights[token, slot, None]
    return out


def counts_of_a_mask(self, x, weights, ids):
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    counts = mask.sum(dim=(-1, -2))
    for e, expert in enumerate(self.experts):
        if counts[e] > 0:
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def rows_unbound(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        hits = (ids == e).nonzero()
        if hits.size(0) == 0:
            continue
        token, slot = hits.unbind(-1)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot].unsqueeze(-1))
    return out


def hit_scores(self, x, weights, ids):
    """gpt-oss in training: scores of all experts, and the tokens are selected without gradient."""
    scores = torch.zeros(x.shape[0], len(self.experts), dtype=x.dtype).scatter_(1, ids, weights)
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for e in hit[:]:
        e = e[0]
        with torch.no_grad():
            _, token = torch.where(mask[e])
        out.index_add_(0, token, self.experts[e](x[token]) * scores[token, e, None])
    return out


def adds_zero_parameters(self, x, weights, ids):
    """minimind: parameters of the other experts stay in the graph; rows of tokens beside rows of slots."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids == e
        if mask.any():
            token = mask.any(dim=-1).nonzero().flatten()
            share = weights[mask].view(-1, 1)
            out.index_add_(0, token, (expert(x[token]) * share).to(out.dtype))
        elif self.training:
            out[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
    return out


def adds_a_zero_row(self, x, weights, ids):
    """Nemotron-H."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        else:
            row = expert(torch.zeros_like(x[0]).unsqueeze(0))
            out = out + row * 0
    return out


def through_a_view(self, x, weights, ids):
    out = torch.zeros(1, *x.shape, dtype=x.dtype)
    for e, expert in enumerate(self.experts):
        mask = (ids == e).any(dim=-1)
        if mask.any():
            share = (weights * (ids == e)).sum(-1, keepdim=True)
            out.view(-1, x.shape[-1])[mask] += expert(x[mask]) * share[mask]
    return out.squeeze(0)


def stores_zero_parameters(self, x, weights, ids):
    """minimind: stores nothing and a zero for the others."""
    rows, chosen = x.repeat_interleave(ids.shape[1], dim=0), ids.view(-1)
    y = torch.empty_like(rows)
    for e, expert in enumerate(self.experts):
        out = expert(rows[chosen == e])
        if out.shape[0] > 0:
            y[chosen == e] = out.to(y.dtype)
        else:
            y[chosen == e] = out.to(y.dtype) + 0 * sum(p.sum() for p in expert.parameters())
    return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def puts_rows(self, x, weights, ids):
    """Out of place, slot by slot."""
    out = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        for e, expert in enumerate(self.experts):
            token = torch.where(ids[:, k] == e)[0]
            if token.numel():
                out = out.index_put((token,), expert(x[token]) * weights[token, k, None], accumulate=True)
    return out


def copies_rows(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            y = expert(x[token]) * weights[token, slot, None]
            out = out.index_copy(0, token, out[token] + y)
    return out


def _pairs(self, x):
    """The two digits of two ids, as product keys choose them."""
    scores = self.router.gate(x)
    return scores[:, :2].topk(2).indices, scores[:, 2:].topk(2).indices


def _loop_of_counted(self, x, weights, ids, counts):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if counts[e] == 0:
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def counts_of_pairs(self, x, weights, ids):
    high, low = _pairs(self, x)
    ids = high * 2 + low
    return _loop_of_counted(self, x, weights, ids, torch.bincount(ids.flatten(), minlength=len(self.experts)))


GUARDED = (
    counts_of_pairs, stores_zero_parameters, puts_rows, copies_rows,
    counts_on_the_host, counts_of_a_mask, rows_unbound, hit_scores, adds_zero_parameters, adds_a_zero_row, through_a_view,
)  # fmt: skip


# Near misses.


def counts_of_turned_pairs(self, x, weights, ids):
    high, low = _pairs(self, x)
    turned = low * 2 + high
    return _loop_of_counted(self, x, weights, high * 2 + low, torch.bincount(turned.flatten(), minlength=len(self.experts)))


def counts_of_the_next(self, x, weights, ids):
    out = torch.zeros_like(x)
    counts = torch.bincount(ids.flatten(), minlength=len(self.experts) + 1)
    for e, expert in enumerate(self.experts):
        if counts[e + 1] == 0:
            continue
        token, slot = torch.where(ids == e)
        out[token] += expert(x[token]) * weights[token, slot, None]
    return out


def counts_of_other_ids(self, x, weights, ids):
    out = torch.zeros_like(x)
    counts = torch.bincount(ids[:, 0].flatten(), minlength=len(self.experts)).tolist()
    for e, expert in enumerate(self.experts):
        if counts[e] == 0:
            continue
        token, slot = torch.where(ids == e)
        out[token] += expert(x[token]) * weights[token, slot, None]
    return out


def counts_at_least_two(self, x, weights, ids):
    out = torch.zeros_like(x)
    counts = torch.bincount(ids.flatten(), minlength=len(self.experts))
    for e, expert in enumerate(self.experts):
        if counts[e] <= 1:
            continue
        token, slot = torch.where(ids == e)
        out[token] += expert(x[token]) * weights[token, slot, None]
    return out


def counts_are_weights(self, x, weights, ids):
    """No count: weights that may cancel."""
    out = torch.zeros_like(x)
    signs = (torch.arange(ids.numel()) % 2 * 2 - 1).to(x.dtype)
    counts = torch.bincount(ids.flatten(), weights=signs, minlength=len(self.experts))
    for e, expert in enumerate(self.experts):
        if counts[e] == 0:
            continue
        token, slot = torch.where(ids == e)
        out[token] += expert(x[token]) * weights[token, slot, None]
    return out


def counts_change(self, x, weights, ids):
    """The loop takes the next expert's tokens away."""
    out = torch.zeros_like(x)
    counts = torch.bincount(ids.flatten(), minlength=len(self.experts) + 1)
    for e, expert in enumerate(self.experts):
        if counts[e] == 0:
            continue
        token, slot = torch.where(ids == e)
        out[token] += expert(x[token]) * weights[token, slot, None]
        counts[e + 1] = 0
    return out


def counts_are_read(self, x, weights, ids):
    out = torch.zeros_like(x)
    counts = torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()
    for e, expert in enumerate(self.experts):
        if counts[e] == 0:
            continue
        token, slot = torch.where(ids == e)
        out[token] += expert(x[token]) * weights[token, slot, None] / counts[e]
    return out


def adds_parameters(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = ids == e
        if mask.any():
            token, slot = torch.where(mask)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        elif self.training:
            out[0, 0] += 1 * sum(p.sum() for p in expert.parameters())
    return out


def stores_one_times_parameters(self, x, weights, ids):
    rows, chosen = x.repeat_interleave(ids.shape[1], dim=0), ids.view(-1)
    y = torch.empty_like(rows)
    for e, expert in enumerate(self.experts):
        out = expert(rows[chosen == e])
        if out.shape[0] > 2:
            y[chosen == e] = out
        else:
            y[chosen == e] = out + 1 * sum(p.sum() for p in expert.parameters())
    return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def stores_elsewhere(self, x, weights, ids):
    rows, chosen = x.repeat_interleave(ids.shape[1], dim=0), ids.view(-1)
    y = torch.zeros_like(rows)
    for e, expert in enumerate(self.experts):
        out = expert(rows[chosen == e])
        if out.shape[0] > 2:
            y[chosen == e] = out
        else:
            y[ids.view(-1) == e] = out * 2 + 0 * out.sum()
    return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def _count(layer):
    layer.calls += 1
    return layer.calls


def stores_zero_of_a_counter(self, x, weights, ids):
    rows, chosen = x.repeat_interleave(ids.shape[1], dim=0), ids.view(-1)
    y = torch.empty_like(rows)
    for e, expert in enumerate(self.experts):
        out = expert(rows[chosen == e])
        if out.shape[0] > 0:
            y[chosen == e] = out
        else:
            y[chosen == e] = out + 0 * _count(self)
    return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def stores_a_zero_row(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        else:
            out[0] = expert(x[:1])[0] * 0
    return out


def counts_the_others(self, x, weights, ids):
    out, others = torch.zeros_like(x), 0
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        else:
            others = others + 1
    return out * others


def ids_change_through_a_view(self, x, weights, ids):
    """The counts are those of before."""
    ids, out = ids.clone(), torch.zeros_like(x)
    counts = torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()
    first = ids[:, 0]
    first.fill_(1)
    for e, expert in enumerate(self.experts):
        if counts[e] == 0:
            continue
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


def others_write_in_an_expression(self, x, weights, ids):
    out, used = torch.zeros_like(x), torch.ones(())
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        else:
            now = used.sub_(0.25)  # noqa: F841
    return out * used


def others_set_a_name(self, x, weights, ids):
    out, n = torch.zeros_like(x), 1
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        else:
            out[0, 0] += 0 * (n := 3)
    return out * n


def others_fill_a_set(self, x, weights, ids):
    out, used = torch.zeros_like(x), set()
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        else:
            done = used.add(e)  # noqa: F841
    return out * (1 + len(used))


def others_widen_the_sum(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).to(out.dtype))
        else:
            out = out + 0 * x.double()
    return out


def puts_other_rows(self, x, weights, ids):
    out = torch.zeros_like(x)
    for k in range(ids.shape[1]):
        for e, expert in enumerate(self.experts):
            token = torch.where(ids[:, k] == e)[0]
            if token.numel():
                out = out.index_put((ids[:2, k],), expert(x[token]).sum(0), accumulate=True)
    return out


def copies_into_others(self, x, weights, ids):
    """The result is a copy of something else than itself."""
    out, first = torch.zeros_like(x), torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            y = expert(x[token]) * weights[token, slot, None]
            out = first.index_copy(0, token, out[token] + y)
    return out


NEAR_MISSES = (
    puts_other_rows, copies_into_others, counts_of_turned_pairs,
    counts_of_the_next, counts_of_other_ids, counts_at_least_two, counts_are_weights, counts_change, counts_are_read,
    adds_parameters, stores_one_times_parameters, stores_elsewhere, stores_zero_of_a_counter, stores_a_zero_row,
    counts_the_others, ids_change_through_a_view, others_write_in_an_expression, others_set_a_name,
    others_fill_a_set, others_widen_the_sum,
)  # fmt: skip
