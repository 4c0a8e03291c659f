"""Experts take the tokens whose score ``[T, E]`` is not zero, instead of comparing ids."""

import torch

from tests.corpus.zoo.modules import flat


def _scores(self, x, weights, ids):
    return torch.zeros(x.shape[0], len(self.experts), dtype=x.dtype).scatter(1, ids, weights)


def nonzero_loop(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    scores = _scores(self, x, weights, ids)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token = (scores[:, e] > 0).nonzero().squeeze(-1)
        out.index_add_(0, token, expert(x[token]) * scores[token, e].unsqueeze(-1))
    return out.view(shape)


def nonzero_mask(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    scores = _scores(self, x, weights, ids) * 2.5
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = scores[:, e].bool()
        out[mask] += expert(x[mask]) * scores[mask, e].unsqueeze(-1)
    return out.view(shape)


def nonzero_where(self, x, weights, ids):
    """Every expert on every token."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    scores = _scores(self, x, weights, ids)
    chosen = scores != 0
    outs = [expert(x) * scores[:, e, None] for e, expert in enumerate(self.experts)]
    return sum(torch.where(chosen[:, e, None], y, 0.0) for e, y in enumerate(outs)).view(shape)


def nonzero_joined(self, x, weights, ids):
    """The rows of all experts, added at once."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    scores = _scores(self, x, weights, ids)
    tokens = [torch.nonzero(scores[:, e]).squeeze(-1) for e in range(len(self.experts))]
    y = torch.cat([expert(x[t]) * scores[t, e, None] for e, (expert, t) in enumerate(zip(self.experts, tokens, strict=True))])
    return torch.zeros_like(x).index_add(0, torch.cat(tokens), y).view(shape)


def nonzero_stored(self, x, weights, ids):
    """NLLB: the tokens of each expert apart, of which experts read rows and store over them; zeros are between them."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    scores = _scores(self, x, weights, ids)
    chosen = scores.bool()
    rows = torch.einsum("td,te->etd", x, chosen.to(x.dtype))
    for e, expert in enumerate(self.experts):
        mask = chosen[:, e]
        rows[e, mask] = torch.einsum("t,td->td", scores[mask, e], expert(rows[e, mask]))
    return rows.sum(dim=0).view(shape)
