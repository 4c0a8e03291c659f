"""More loops over experts that skip those without tokens, and their near-miss twins: by counts, or with a branch for the others.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import torch
import torch.nn.functional as F

from tests.corpus.zoo.changed import all_changed


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


def _count(layer):
    layer.calls += 1
    return layer.calls


def _by_counts(self, x, weights, ids):
    out = torch.zeros_like(x)
    counts = torch.bincount(ids.flatten(), minlength=len(self.experts))
    for e, expert in enumerate(self.experts):
        if counts[e] == 0:
            continue
        token, slot = torch.where(ids == e)
        out[token] += expert(x[token]) * weights[token, slot, None]
    return out


_ONE_MORE = ("self.experts))\n", "self.experts) + 1)\n")
_LISTED = ("self.experts))\n", "self.experts)).tolist()\n")
_BEGIN = "out = torch.zeros_like(x)\n"
_FOR_OTHERS = "row = expert(torch.zeros_like(x[0]).unsqueeze(0))\n            out = out + row * 0\n"
_ZEROS = "sum(p.sum() for p in expert.parameters())"
_CHANGES = {
    "counts_of_the_next": (_by_counts, _ONE_MORE, ("counts[e]", "counts[e + 1]")),
    "counts_of_other_ids": (_by_counts, _LISTED, ("ids.flatten()", "ids[:, 0].flatten()")),
    "counts_at_least_two": (_by_counts, ("== 0", "<= 1")),
    "counts_are_weights": (  # no count: weights that may cancel
        _by_counts, ("ids.flatten(), ", "ids.flatten(), weights=(torch.arange(ids.numel()) % 2 * 2 - 1).to(x.dtype), "),
    ),
    "counts_change": (  # the loop takes the next expert's tokens away
        _by_counts, _ONE_MORE, ("    return out", "        counts[e + 1] = 0\n    return out"),
    ),
    "counts_are_read": (_by_counts, _LISTED, ("None]", "None] / counts[e]")),
    "ids_change_through_a_view": (  # the counts are those of before
        _by_counts, (_BEGIN, "ids, out = ids.clone(), torch.zeros_like(x)\n"),
        ("self.experts))\n", "self.experts)).tolist()\n    first = ids[:, 0]\n    first.fill_(1)\n"),
        ("out[token] += expert", "out.index_add_(0, token, expert"), ("None]", "None])"),
    ),
    "adds_parameters": (adds_zero_parameters, ("0 * sum", "1 * sum")),
    "stores_one_times_parameters": (stores_zero_parameters, ("> 0", "> 2"), ("+ 0 *", "+ 1 *")),
    "stores_elsewhere": (
        stores_zero_parameters, ("empty_like", "zeros_like"), ("> 0", "> 2"),
        (f"y[chosen == e] = out.to(y.dtype) + 0 * {_ZEROS}", "y[ids.view(-1) == e] = out * 2 + 0 * out.sum()"),
    ),
    "stores_zero_of_a_counter": (stores_zero_parameters, (_ZEROS, "_count(self)")),
    "stores_a_zero_row": (adds_a_zero_row, (_FOR_OTHERS, "out[0] = expert(x[:1])[0] * 0\n")),
    "counts_the_others": (
        adds_a_zero_row, (_BEGIN, "out, others = torch.zeros_like(x), 0\n"), (_FOR_OTHERS, "others = others + 1\n"),
        ("return out", "return out * others"),
    ),
    "others_write_in_an_expression": (
        adds_a_zero_row, (_BEGIN, "out, used = torch.zeros_like(x), torch.ones(())\n"),
        (_FOR_OTHERS, "now = used.sub_(0.25)\n"), ("return out", "return out * used"),
    ),
    "others_set_a_name": (
        adds_a_zero_row, (_BEGIN, "out, n = torch.zeros_like(x), 1\n"), (_FOR_OTHERS, "out[0, 0] += 0 * (n := 3)\n"),
        ("return out", "return out * n"),
    ),
    "others_fill_a_set": (
        adds_a_zero_row, (_BEGIN, "out, used = torch.zeros_like(x), set()\n"), (_FOR_OTHERS, "done = used.add(e)\n"),
        ("return out", "return out * (1 + len(used))"),
    ),
    "others_widen_the_sum": (
        adds_a_zero_row, (_FOR_OTHERS, "out = out + 0 * x.double()\n"),
        ("expert(x[token]) * weights[token, slot, None]", "(expert(x[token]) * weights[token, slot, None]).to(out.dtype)"),
    ),
    "puts_other_rows": (
        puts_rows, ("(token,), expert(x[token]) * weights[token, k, None]", "(ids[:2, k],), expert(x[token]).sum(0)"),
    ),
    "copies_into_others": (  # the result is a copy of something else than itself
        copies_rows, (_BEGIN, "out, first = torch.zeros_like(x), torch.zeros_like(x)\n"), ("out.index_copy", "first.index_copy"),
    ),
}  # fmt: skip
NEAR_MISSES = (counts_of_turned_pairs, *all_changed(_CHANGES).values())
