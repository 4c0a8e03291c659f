"""Routers without ids: a score for each token and expert that a ReLU or a mask makes zero, and experts that choose tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import assert_replaced, check_against_eager

pytestmark = pytest.mark.usefixtures("fp64")

ROOM = 3


class Layer(nn.Module):
    """``spelling`` gets the layer, the tokens and the logits."""

    def __init__(self, spelling, expert=zoo.BareMLP, scale: float = 1.0):
        super().__init__()
        self.spelling, self.scale = spelling, scale
        self.gate = nn.Linear(zoo.D, zoo.E)
        self.experts = nn.ModuleList(expert() for _ in range(zoo.E))
        self.shared = zoo.PlainMLP()
        self.up = nn.Parameter(torch.randn(zoo.E, zoo.D, zoo.FF) * 0.2)
        self.down = nn.Parameter(torch.randn(zoo.E, zoo.FF, zoo.D) * 0.2)

    def forward(self, x):
        return self.spelling(self, x, self.gate(x) * self.scale)

    def of_all(self, x):
        return torch.einsum("etf,efd->etd", F.silu(torch.einsum("td,edf->etf", x, self.up)), self.down)

    def of_rows(self, rows):
        return torch.bmm(F.silu(torch.bmm(rows, self.up)), self.down)


def _loop(self, x, scores, chosen, out=None):
    """The rows of each expert alone; ``chosen`` says of an expert which."""
    out = torch.zeros_like(x) if out is None else out
    for e, expert in enumerate(self.experts):
        (token,) = torch.where(chosen(e))
        out.index_add_(0, token, expert(x[token]) * scores[token, e, None])
    return out


def _sum(self, x, scores):
    return sum(scores[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


def relu_of_all(self, x, logits):
    return torch.einsum("etd,te->td", self.of_all(x), logits.relu())


def relu_sum(self, x, logits):
    """ReMoE."""
    return _sum(self, x, logits.relu())


def relu_rows(self, x, logits):
    gate = logits.relu()
    return _loop(self, x, gate, lambda e: gate[:, e] > 0)


def relu_normed(self, x, logits):
    """BlockFFN: what the ReLU leaves is normed, and may be of any sign."""
    gate = logits.relu()
    return _sum(self, x, gate * torch.rsqrt(gate.square().mean(-1, keepdim=True) + 1e-6) * self.gate.bias)


def relu_onto_shared(self, x, logits):
    out = self.shared(x)
    for e, expert in enumerate(self.experts):
        out = out + logits.relu()[:, e, None] * expert(x)
    return out


def threshold_of_all(self, x, logits):
    scores = logits.softmax(-1)
    return torch.einsum("etd,te->td", self.of_all(x), scores * (scores > 0.25))


def threshold_rows(self, x, logits):
    scores = logits.softmax(-1)
    return _loop(self, x, scores, lambda e: scores[:, e] > 0.25)


def threshold_normed(self, x, logits):
    scores = logits.softmax(-1)
    kept = scores > 0.25
    shares = scores * kept
    shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-9)
    return _loop(self, x, shares, lambda e: kept[:, e])


def signed_scores(self, x, logits):
    return _sum(self, x, logits * (logits.abs() > 0.3))


def mask_alone(self, x, logits):
    chosen = logits > 0
    return sum(chosen[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


def with_padding(self, x, logits):
    """A mask of tokens beside that of the experts."""
    scores, padding = logits.sigmoid(), x[:, :1] < 0.5
    return sum(scores[:, e, None] * (scores[:, e, None] > 0.5) * padding * expert(x) for e, expert in enumerate(self.experts))


def capacity(self, x, logits):
    """Every expert takes the first tokens above a threshold."""
    scores = logits.softmax(-1)
    above = scores > 0.2
    return _sum(self, x, scores * above * (above.cumsum(0) <= ROOM))


def top_p(self, x, logits):
    shares, ids = logits.softmax(-1).sort(dim=-1, descending=True)
    kept = shares.cumsum(-1) - shares < 0.6
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where((ids == e) & kept)
        out.index_add_(0, token, expert(x[token]) * shares[token, slot, None])
    return out


def top_p_placed(self, x, logits):
    scores = logits.softmax(-1)
    shares, ids = scores.sort(dim=-1, descending=True)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, shares.cumsum(-1) - shares < 0.6)
    return _loop(self, x, scores, lambda e: chosen[:, e])


SCORED = (
    relu_of_all, relu_sum, relu_rows, relu_normed, relu_onto_shared, threshold_of_all, threshold_rows, threshold_normed,
    signed_scores, mask_alone, with_padding, capacity, top_p, top_p_placed,
)  # fmt: skip


def _named(x, logits, dim=0):
    return logits.softmax(-1).topk(min(ROOM, x.shape[0]), dim=dim)


def choice_rows(self, x, logits):
    shares, token = _named(x, logits.t(), dim=-1)
    y = self.of_rows(x[token]) * shares.unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, token.reshape(-1), y.reshape(-1, zoo.D))


def choice_scattered(self, x, logits):
    shares, token = _named(x, logits.t(), dim=-1)
    y = self.of_rows(x[token]) * shares.unsqueeze(-1)
    return torch.zeros_like(x).scatter_add(0, token.reshape(-1, 1).expand(-1, zoo.D), y.reshape(-1, zoo.D))


def choice_of_columns(self, x, logits):
    shares, token = _named(x, logits)
    h = F.silu(torch.einsum("ced,edf->cef", x[token], self.up))
    y = torch.einsum("cef,efd->ced", h, self.down) * shares.unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, token.reshape(-1), y.reshape(-1, zoo.D))


def choice_one_hot(self, x, logits):
    """The paper's own: a permutation as a one-hot."""
    shares, token = _named(x, logits.t(), dim=-1)
    permutation = F.one_hot(token, x.shape[0]).to(x.dtype)
    y = self.of_rows(torch.einsum("ect,td->ecd", permutation, x))
    return torch.einsum("ect,ec,ecd->td", permutation, shares, y)


def choice_loop(self, x, logits):
    shares, token = _named(x, logits.t(), dim=-1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out.index_add_(0, token[e], expert(x[token[e]]) * shares[e, :, None])
    return out


def choice_one_by_one(self, x, logits):
    scores, out = logits.sigmoid(), torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        shares, token = _named(x, scores[:, e])
        out[token] += expert(x[token]) * shares[:, None]
    return out


def choice_of_wide_shares(self, x, logits):
    """Scores in a wider dtype, which each expert casts for itself."""
    shares, token = _named(x, logits.t().double(), dim=-1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out.index_add(0, token[e], expert(x[token[e]]) * shares[e, :, None].to(x.dtype))
    return out


def choice_without_weights(self, x, logits):
    token, out = _named(x, logits)[1], torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out.index_add(0, token[:, e], expert(x[token[:, e]]))
    return out


def choice_normed(self, x, logits):
    """The scores of a token that several experts chose add up to one."""
    scores, (_, token) = logits.sigmoid(), _named(x, logits)
    chosen = torch.zeros_like(scores).scatter(0, token, 1.0)
    shares = scores * chosen / (scores * chosen).sum(-1, keepdim=True).clamp(min=1e-9)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out.index_add(0, token[:, e], expert(x[token[:, e]]) * shares[token[:, e], e, None])
    return out


CHOICES = (choice_rows, choice_scattered, choice_of_columns, choice_one_hot, choice_loop, choice_one_by_one,
           choice_without_weights)  # fmt: skip
EDGES = (relu_of_all, relu_rows, threshold_rows, capacity, choice_of_columns, choice_loop)


@pytest.mark.parametrize("spelling", [*SCORED, *CHOICES], ids=lambda f: f.__name__)
def test_rewritten(spelling):
    backend = check_against_eager(Layer(spelling, zoo.PlainMLP), torch.randn(20, zoo.D))
    (found,) = backend.rewritten
    assert (found.K, found.E) == (zoo.E, zoo.E) and "expert_down.default" in backend.operators() and not backend.reasons


@pytest.mark.parametrize("spelling", [relu_rows, relu_of_all], ids=lambda f: f.__name__)
def test_nothing_is_left(spelling):
    assert_replaced(check_against_eager(Layer(spelling), torch.randn(20, zoo.D)))


@pytest.mark.parametrize(("spelling", "num_tokens"), [(relu_of_all, 1), *zip(EDGES, [0, 1] * 3, strict=True)])
def test_few_tokens(spelling, num_tokens):
    check_against_eager(Layer(spelling, zoo.PlainMLP), torch.randn(num_tokens, zoo.D))


@pytest.mark.parametrize(("spelling", "chosen"), zip(EDGES, [(2,), (2,), (), ()] + [(), (2,)], strict=True))
def test_experts_without_tokens(spelling, chosen):
    """All tokens to one expert, or to none."""
    layer = Layer(spelling, zoo.PlainMLP, scale=0.1)
    with torch.no_grad():
        layer.gate.bias.fill_(-30).index_fill_(0, torch.tensor(chosen, dtype=torch.int64), 30)
    assert check_against_eager(layer, torch.randn(12, zoo.D)).rewritten


@pytest.mark.parametrize("spelling", [relu_sum, threshold_rows, choice_loop], ids=lambda f: f.__name__)
def test_logits_of_zero(spelling):
    """Where a ReLU is at its bound no gradient gets through, as it is written."""
    x = torch.randn(12, zoo.D)
    x[::2] = 0
    layer = Layer(spelling)
    nn.init.zeros_(layer.gate.bias)
    assert check_against_eager(layer, x).rewritten


@pytest.mark.parametrize("spelling", [relu_rows, threshold_of_all, choice_rows], ids=lambda f: f.__name__)
def test_other_numbers_of_tokens(spelling):
    """One compiled layer for several T."""
    backend = check_against_eager(Layer(spelling), torch.randn(11, zoo.D), dynamic=True)
    assert len(backend.rewritten) == 1 and not backend.reasons


@pytest.mark.parametrize(("spelling", "counts"), [(relu_rows, True), (threshold_rows, True), (relu_of_all, False)])
def test_rows_are_counted_where_the_program_counts_them(spelling, counts):
    """A loop that gathers rows becomes a layer with as many; one that computes all of them reads no number on the host."""
    backend = check_against_eager(Layer(spelling), torch.randn(20, zoo.D))
    assert backend.rewritten and ("used_slots.default" in backend.operators()) == counts


def test_scores_in_a_wider_dtype():
    backend = check_against_eager(Layer(choice_of_wide_shares).float(), torch.randn(20, zoo.D, dtype=torch.float32))
    assert backend.rewritten and not backend.reasons


def test_rows_of_experts_that_choose():
    """A row for every place, not for every token and expert."""
    backend = check_against_eager(Layer(choice_rows), torch.randn(20, zoo.D))
    rows = {n.meta["example_value"].shape[0] for n in backend.modules[0].graph.nodes if n.name.startswith("narrow")}
    assert rows == {zoo.E * ROOM}


# Near misses: left alone, or equal.


def softmax_of_all(self, x, logits):
    """Every expert takes every token."""
    return torch.einsum("etd,te->td", self.of_all(x), logits.softmax(-1))


def clamp_of_all(self, x, logits):
    """At its bound a clamp lets gradients through."""
    return torch.einsum("etd,te->td", self.of_all(x), logits.clamp(min=0))


def leaky(self, x, logits):
    return torch.einsum("etd,te->td", self.of_all(x), F.leaky_relu(logits))


def half_a_mask(self, x, logits):
    return torch.einsum("etd,te->td", self.of_all(x), logits * ((logits > 0) + 0.5))


def of_other_tokens(self, x, logits):
    gate = logits.relu()
    return sum(gate[:, e, None] * expert(x.flip(0) if e else x) for e, expert in enumerate(self.experts))


def mask_of_the_input(self, x, logits):
    """A bias gives something for nothing."""
    gate = logits.relu()
    return sum(expert(x * gate[:, e, None]) for e, expert in enumerate(self.experts))


def choice_read_elsewhere(self, x, logits):
    shares, token = _named(x, logits.t(), dim=-1)
    y = self.of_rows(x[token.flip(1)]) * shares.unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, token.reshape(-1), y.reshape(-1, zoo.D))


def choice_of_the_next(self, x, logits):
    shares, token = _named(x, logits.t(), dim=-1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out.index_add_(0, token[(e + 1) % zoo.E], expert(x[token[e]]) * shares[e, :, None])
    return out


def choice_that_overwrites(self, x, logits):
    """The last expert that chose a token has it for itself."""
    shares, token = _named(x, logits.t(), dim=-1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out[token[e]] = expert(x[token[e]]) * shares[e, :, None]
    return out


def choice_stored_once(self, x, logits):
    """A token that is named twice is stored once."""
    token, out = _named(x, logits)[1] // 2, torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out[token[:, e]] += expert(x[token[:, e]])
    return out


NEAR = (softmax_of_all, clamp_of_all, leaky, half_a_mask, of_other_tokens, mask_of_the_input, choice_read_elsewhere,
        choice_of_the_next, choice_that_overwrites, choice_stored_once)  # fmt: skip


@pytest.mark.parametrize("spelling", NEAR, ids=lambda f: f.__name__)
def test_near_misses(spelling):
    x = torch.randn(20, zoo.D)
    x[::3] = 0
    layer = Layer(spelling, zoo.PlainMLP)
    nn.init.zeros_(layer.gate.bias)
    assert not check_against_eager(layer, x).rewritten


def scores_in_another_order(self, x, logits):
    """What is beside an expert is its own, in whatever order the tensor has it."""
    gate = logits.relu()
    return sum(gate[:, (e + 1) % zoo.E, None] * expert(x) for e, expert in enumerate(self.experts))


def masks_in_another_order(self, x, logits):
    scores, chosen = logits.softmax(-1), logits > 0
    return sum(scores[:, e, None] * chosen[:, (e + 1) % zoo.E, None] * expert(x) for e, expert in enumerate(self.experts))


def tokens_and_weights_in_two_orders(self, x, logits):
    shares, token = _named(x, logits.t(), dim=-1)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out.index_add(0, token[e], expert(x[token[e]]) * shares[(e + 1) % zoo.E, :, None])
    return out


@pytest.mark.parametrize(
    "spelling",
    [scores_in_another_order, masks_in_another_order, tokens_and_weights_in_two_orders, choice_normed],
    ids=lambda f: f.__name__,
)
def test_other_orders_are_equal(spelling):
    check_against_eager(Layer(spelling), torch.randn(20, zoo.D))
