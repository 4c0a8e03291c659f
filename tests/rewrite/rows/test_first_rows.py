"""Experts with room for some tokens: the first rows that a mask selects, by a slice, or by a branch on how many there are."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moeblaze_ops
from moeblaze_ops import compile as moeblaze_compile
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch", "fp64")

T, K, E, D, W, C = 24, 2, 4, 6, 5, 9


class Layer(nn.Module):
    """``rows(layer, e, weights, ids)`` gives an expert's tokens and their weights; experts count what they take."""

    def __init__(self, rows, counted=None):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(D, E)
        self.up = nn.ModuleList(nn.Linear(D, W) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(W, D) for _ in range(E))
        self.rows, self.counted = rows, counted or (lambda load, e, token: None)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        out, load = torch.zeros_like(x), torch.zeros(E, dtype=torch.int64)
        for e in range(E):
            token, share = self.rows(e, weights, ids)
            if token.numel() == 0:
                continue
            self.counted(load, e, token)
            out.index_add_(0, token, self.down[e](F.silu(self.up[e](x[token]))) * share)
        return out, load


def by_slice(e, weights, ids):
    token, k = torch.where(ids == e)
    token, k = token[:C], k[:C]
    return token, weights[token, k, None]


def by_branch(e, weights, ids):
    token, k = torch.where(ids == e)
    if token.shape[0] > C:
        token, k = token[:C], k[:C]
    return token, weights[token, k, None]


def by_expression(e, weights, ids):
    mask = (ids == e).any(dim=-1)
    token = mask.nonzero().squeeze(-1)
    token = token[:C] if token.numel() > C else token
    return token, (weights * (ids == e)).sum(-1)[token].unsqueeze(-1)


def unless_there_is_room(e, weights, ids):
    token, k = torch.where(ids == e)
    if not len(token) <= C:
        token, k = token[:C], k[:C]
    return token, weights[token, k, None]


def of_pairs(e, weights, ids):
    pairs = (ids == e).nonzero()
    if len(pairs) > C:
        pairs = pairs[:C]
    token, k = pairs[:, 0], pairs[:, 1]
    return token, weights[token, k, None]


def of_masked_rows(e, weights, ids):
    flat, mask = torch.arange(T)[:, None].expand(-1, K).flatten(), ids.view(-1) == e
    token, share = flat[mask], weights.view(-1)[mask]
    if len(token) > C:
        token, share = token[:C], share[:C]
    return token, share.unsqueeze(-1)


def with_more_room_than_asked_for(e, weights, ids):
    """The branch is taken where there are more than 7, and keeps 9: these are all where it is not."""
    token, k = torch.where(ids == e)
    if token.shape[0] > 7:
        token, k = token[:C], k[:C]
    return token, weights[token, k, None]


class Stacked(Layer):
    """The same with the weights of all experts in one tensor."""

    def __init__(self, rows):
        super().__init__(rows)
        self.ups, self.downs = nn.Parameter(torch.randn(E, W, D)), nn.Parameter(torch.randn(E, D, W))
        del self.up, self.down

    def forward(self, x):
        self.up = [lambda x, w=w: x @ w.T for w in self.ups]
        self.down = [lambda x, w=w: x @ w.T for w in self.downs]
        return super().forward(x)


class OfSlots(Layer):
    """Each slot has its own room with an expert."""

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for k in range(K):
            for e in range(E):
                token, share = self.rows(e, weights[:, k, None], ids[:, k, None])
                out.index_add_(0, token, self.down[e](F.silu(self.up[e](x[token]))) * share)
        return out, ids


def trained(layer, run, x):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out, load = run(x)
    (out * torch.arange(1.0, D + 1, dtype=x.dtype)).sum().backward()
    return out, load, x.grad, [parameter.grad.clone() for parameter in layer.parameters()]


def layers_of(layer, x):
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        torch.testing.assert_close(trained(layer, torch.compile(layer, backend=backend), x), trained(layer, layer, x))
    return len(rewritten_in(records))


def set_to_length(load, e, token):
    load[e] = len(token)


def add_length(load, e, token):
    load[e] += token.shape[0]


SPELLINGS = [by_slice, by_branch, by_expression, unless_there_is_room, of_pairs, of_masked_rows, with_more_room_than_asked_for]


@pytest.mark.parametrize("rows", SPELLINGS, ids=lambda rows: rows.__name__)
def test_first_rows(rows):
    torch.manual_seed(1)
    assert layers_of(Layer(rows).double(), torch.randn(T, D, dtype=torch.float64)) == 1


@pytest.mark.parametrize("kind", [Stacked, OfSlots])
@pytest.mark.parametrize("rows", [by_branch, by_expression])
def test_first_rows_of_other_layers(kind, rows):
    torch.manual_seed(1)
    assert layers_of(kind(rows).double(), torch.randn(T, D, dtype=torch.float64)) == 1


@pytest.mark.parametrize("counted", [set_to_length, add_length])
@pytest.mark.parametrize("rows", [by_branch, lambda e, weights, ids: all_rows(e, weights, ids)], ids=["kept", "all"])
def test_experts_count_their_rows(rows, counted):
    torch.manual_seed(1)
    assert layers_of(Layer(rows, counted).double(), torch.randn(T, D, dtype=torch.float64)) == 1


def all_rows(e, weights, ids):
    token, k = torch.where(ids == e)
    return token, weights[token, k, None]


def of_integers(e, weights, ids):
    """The mask holds threes: its true elements are counted, not what they hold."""
    token = torch.where(F.one_hot(ids, E).sum(1)[:, e] * 3)[0]
    return token, (weights * (ids == e)).sum(-1)[token].unsqueeze(-1)


def add_length_of_the_first(load, e, token):
    load[e] += len(token[:C])


def test_integers_select_rows():
    torch.manual_seed(1)
    assert layers_of(Layer(of_integers, add_length_of_the_first).double(), torch.randn(T, D, dtype=torch.float64)) == 1


OTHER_NUMBERS = {
    "of all rows twice": lambda token: min(2 * len(token), C),
    "of repeated rows": lambda token: len(token.repeat(2)[:C]),
    "of every second row": lambda token: len(token[::2][:3]),
    "of all but the last": lambda token: len(token[:-1]),
    "and three more": lambda token: min(len(token) + 3, C),
    "less than none": lambda token: min(len(token), -1),
}


@pytest.mark.parametrize("number", OTHER_NUMBERS.values(), ids=OTHER_NUMBERS.keys())
def test_the_lesser_of_another_number_and_a_room(number):
    """Such a number is not that of the first rows, though the same size is all that it is made of."""
    def counted(load, e, token):
        load[e] += number(token)

    torch.manual_seed(1)
    layers_of(Layer(all_rows, counted).double(), torch.randn(T, D, dtype=torch.float64))


class MasksFirst(Layer):
    """All masks are made before experts take their rows in another order."""

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        out, masks = torch.zeros_like(x), [ids == e for e in range(E)]
        for e in reversed(range(E)):
            token, k = (part[:C] for part in torch.where(masks[e]))
            out.index_add_(0, token, self.down[e](F.silu(self.up[e](x[token]))) * weights[token, k, None])
        return out, ids


def test_masks_in_another_order():
    """What says which tokens are kept stands behind all masks: here the search ends with a reason, not with an error."""
    torch.manual_seed(1)
    layer, x = MasksFirst(None).double(), torch.randn(T, D, dtype=torch.float64)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        torch.testing.assert_close(trained(layer, torch.compile(layer, backend=backend), x), trained(layer, layer, x))
    declined = [c.reason for r in records if isinstance(r, moeblaze_compile.GraphRecord) for c in r.report.declined]
    assert "INTERNAL" not in declined


def fewer_than_there_is_room_for(e, weights, ids):
    """With 8 rows the program takes all, and 7 with the branch."""
    token, k = torch.where(ids == e)
    if token.shape[0] > C:
        token, k = token[:7], k[:7]
    return token, weights[token, k, None]


def where_there_are_few(e, weights, ids):
    token, k = torch.where(ids == e)
    if token.shape[0] < C:
        token, k = token[:3], k[:3]
    return token, weights[token, k, None]


def the_last_ones(e, weights, ids):
    token, k = torch.where(ids == e)
    if token.shape[0] > C:
        token, k = token[-C:], k[-C:]
    return token, weights[token, k, None]


def but_for_the_first(e, weights, ids):
    token, k = torch.where(ids == e)
    if token.shape[0] > C:
        token, k = token[1 : C + 1], k[1 : C + 1]
    return token, weights[token, k, None]


def weights_of_other_rows(e, weights, ids):
    token, k = torch.where(ids == e)
    share = weights[token, k, None]
    if token.shape[0] > C:
        token, share = token[:C], share.flip(0)[:C]
    return token, share


def by_another_number(e, weights, ids):
    token, k = torch.where(ids == e)
    if len(torch.where(ids == (e + 1) % E)[0]) > C:
        token, k = token[:C], k[:C]
    return token, weights[token, k, None]


def written_to(e, weights, ids):
    """The slice is a view: what is written to it is in the rows that are read."""
    token, k = torch.where(ids == e)
    first = token[:C]
    first += 1
    first %= T
    return token, weights[token, k, None]


def written_to_beside(e, weights, ids):
    token, k = torch.where(ids == e)
    first = token[:C]
    token += 1
    token %= T
    return first, weights[first, k[:C], None]


def of_columns(e, weights, ids):
    """The rows number columns, of as many rows: the first rows are not those of the first numbers."""
    token, k = torch.where(ids == e)
    table = token[:, None] + torch.zeros(1, T, dtype=torch.int64)
    token = table[:, token][:C].diagonal()
    return token, weights[token, k[:C], None]


TWINS = [
    of_columns, fewer_than_there_is_room_for, where_there_are_few, the_last_ones, but_for_the_first, weights_of_other_rows,
    by_another_number, written_to, written_to_beside,
]  # fmt: skip


@pytest.mark.parametrize(("rows", "seed"), [*zip(TWINS, (1, 5) * len(TWINS), strict=False)])
def test_twin_is_left_alone(rows, seed):
    torch.manual_seed(seed)
    assert layers_of(Layer(rows).double(), torch.randn(T, D, dtype=torch.float64)) == 0


def one_more(load, e, token):
    load[e] += len(token) + 1


def of_bytes(load, e, token):
    load.view(torch.int8)[8 * e] += len(token)


@pytest.mark.parametrize("counted", [one_more, of_bytes])
def test_what_is_no_count_is_left_alone(counted):
    torch.manual_seed(1)
    assert layers_of(Layer(all_rows, counted).double(), torch.randn(T, D, dtype=torch.float64)) == 0


class Dropped(Layer):
    """How many rows are dropped is kept: in a number of Python's, or in a tensor."""

    def __init__(self, in_tensor):
        super().__init__(None)
        self.in_tensor = in_tensor

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        out, dropped = torch.zeros_like(x), 0
        for e in range(E):
            token, k = torch.where(ids == e)
            if self.in_tensor:
                dropped = dropped + ((ids == e).sum() - C).clamp(min=0)
            if len(token) > C:
                dropped = dropped if self.in_tensor else dropped + len(token) - C
                token, k = token[:C], k[:C]
            out.index_add_(0, token, self.down[e](F.silu(self.up[e](x[token]))) * weights[token, k, None])
        return out, dropped


@pytest.mark.parametrize("in_tensor", [False, True])
def test_dropped_rows_are_counted(in_tensor):
    torch.manual_seed(1)
    layer, x = Dropped(in_tensor).double(), torch.randn(T, D, dtype=torch.float64)
    assert layers_of(layer, x) == in_tensor
    assert ("a number of Python's is another" in str(moeblaze_ops.explain(layer, x))) != in_tensor
