"""Every expert on every token in products of three operands, in any letters and order."""

import torch
import torch.nn.functional as F

from tests.corpus.zoo.modules import flat


def _scores(self, x, weights, ids):
    return torch.zeros(x.shape[0], self.E, dtype=x.dtype).scatter(1, ids, weights)


def einsum_masked_tokens(self, x, weights, ids):
    """A token is zeroed for the experts that it did not choose."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    mask = F.one_hot(ids, self.E).sum(1).to(x.dtype)
    gate, up = (torch.einsum("te,td,edf->etf", mask, x, w) for w in (self.w1, self.w3))
    y = torch.einsum("etf,efd->etd", F.silu(gate) * up, self.w2)
    return torch.einsum("te,etd->td", _scores(self, x, weights, ids), y).view(shape)


def einsum_dispatched(self, x, weights, ids):
    """The same in two steps: the tokens of every expert first."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    mask = F.one_hot(ids, self.E).sum(1).to(x.dtype)
    rows = torch.einsum("te,td->etd", mask, x)
    gate, up = (torch.einsum("etd,edf->etf", rows, w) for w in (self.w1, self.w3))
    y = torch.einsum("etf,efd->etd", F.silu(gate) * up, self.w2)
    return torch.einsum("te,etd->td", _scores(self, x, weights, ids), y).view(shape)


def einsum_weighted_tokens(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    scores = _scores(self, x, weights, ids)
    gate, up = (torch.einsum("edf,te,td->tef", w, scores, x) for w in (self.w1, self.w3))
    return torch.einsum("tef,efd->td", F.silu(gate) * up, self.w2).view(shape)


def einsum_combined(self, x, weights, ids):
    """The last projection, the weighting and the sum in one."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    gate, up = (torch.einsum("xyz, ay -> axz", w, x) for w in (self.w1, self.w3))
    scores = _scores(self, x, weights, ids)
    return torch.einsum("ebd,ae,aeb->ad", self.w2, scores, F.silu(gate) * up).view(shape)


def einsum_of_slots(self, x, weights, ids):
    """Slots, experts and outputs in one sum; the letters of the result of others are implied."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    gate, up = (torch.einsum("bc,acd", x, w) for w in (self.w1, self.w3))
    y = torch.einsum(F.silu(gate) * up, [0, 1, 2], self.w2, [0, 2, 3], [1, 0, 3])
    return torch.einsum("tk,tke,ted->td", weights, F.one_hot(ids, self.E).to(x.dtype), y).view(shape)
