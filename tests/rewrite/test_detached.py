"""`.detach()` inside of a layer, as Llama 4's own code has it between scores and experts: gradients stop in the same places.

``LAYERS`` are rewritten. ``OTHERS`` differ from them in what has a gradient; they may stay as they are, and are right.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.operands.find_operands import attached_of
from tests.tools.rewrite_harness import check_against_eager

D, H, E, T, K = 6, 10, 4, 9, 2


class Layer(nn.Module):
    def __init__(self, forward):
        super().__init__()
        shapes = {"router": (D, E), "up": (E, D, H), "gate": (E, D, H), "down": (E, H, D), "bias": (E, D), "slope": (1,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64) * 0.4))
        self.rule = forward

    def expert(self, e, rows):
        return (F.silu(rows @ self.up[e]) * (rows @ self.gate[e])) @ self.down[e]

    def routed(self, x):
        scores = x @ self.router
        top, ids = scores.topk(K, dim=1)
        full = torch.full_like(scores, float("-inf")).scatter_(1, ids, top).sigmoid()
        return top.sigmoid(), ids, full

    def forward(self, x):
        return self.rule(self, x)

    def sum_of(self, x, rows_of, share_of=None):
        """What experts make of ``rows_of(e)``, as many as tokens, times ``share_of(e)`` where that is given."""
        out = torch.zeros_like(x)
        for e in range(E):
            y = self.expert(e, rows_of(e))
            out = out + (y if share_of is None else y * share_of(e))
        return out

    def looped(self, x, weights, ids, of=lambda y: y):
        out = torch.zeros_like(x)
        for e in range(E):
            token, k = torch.where(ids == e)
            out = out.index_add(0, token, of(self.expert(e, x[token]) * weights[token, k, None]))
        return out


def batched(self, rows):
    return torch.bmm(F.silu(torch.bmm(rows, self.up)) * torch.bmm(rows, self.gate), self.down)


def llama4(self, x):
    _, _, full = self.routed(x)
    rows = torch.arange(T).view(1, -1).expand(E, -1).reshape(-1, 1).expand(-1, D)
    inputs = torch.gather(x, 0, rows) * full.t().reshape(-1, 1)
    out = x * 2
    return out.scatter_add(0, rows, batched(self, inputs.detach().view(E, T, D)).view(-1, D))


def repeated(self, x):
    full = self.routed(x)[2]
    return batched(self, (x.repeat(E, 1) * full.t().reshape(-1, 1)).view(E, T, D).detach()).sum(0)


def rows_alone(self, x):
    full = self.routed(x)[2]
    return batched(self, x.detach() * full.t().unsqueeze(-1)).sum(0)


def scores_alone(self, x):
    full = self.routed(x)[2]
    return batched(self, x * full.t().unsqueeze(-1).detach()).sum(0)


def of_a_product(self, x):
    weights, ids, _ = self.routed(x)
    return self.looped(x, (weights * 2).detach(), ids)


def of_rows(self, x):
    weights, ids, _ = self.routed(x)
    return self.looped((x * 3).detach(), weights, ids)


def of_a_slice(self, x):
    weights, ids, _ = self.routed(x)
    out = torch.zeros_like(x)
    for e in range(E):
        token, k = torch.where(ids == e)
        out = out.index_add(0, token, self.expert(e, x[token].detach()) * weights[token, k, None].detach())
    return out


def of_ids(self, x):
    scores = (x @ self.router).sigmoid()
    ids = scores.detach().topk(K, dim=1).indices
    return self.looped(x, scores.gather(1, ids), ids)


def divided(self, x):
    """Of each weight's own value: a weight of one with the gradient of a score."""
    weights, ids, _ = self.routed(x)
    return self.looped(x, weights / weights.detach(), ids)


def normed(self, x):
    weights, ids, _ = self.routed(x)
    return self.looped(x, weights / weights.detach().sum(-1, keepdim=True), ids)


def without_grad(self, x):
    with torch.no_grad():
        return llama4(self, x)


def masked(self, x):
    weights, ids, _ = self.routed(x)
    return self.sum_of(x, lambda e: x.detach(), lambda e: (weights * (ids == e)).sum(-1, keepdim=True))


def share_of_each(self, x):
    weights, ids, _ = self.routed(x)
    return self.sum_of(x, lambda e: x, lambda e: (weights * (ids == e)).sum(-1, keepdim=True).detach())


def twice(self, x):
    full = self.routed(x)[2]
    return batched(self, (x.detach() * full.t().unsqueeze(-1)).detach()).sum(0)


LAYERS = (
    llama4, repeated, rows_alone, scores_alone, of_a_product, of_rows, of_a_slice, of_ids, divided, normed, without_grad, masked,
    share_of_each, twice,
)  # fmt: skip


def one_expert(self, x):
    weights, ids, _ = self.routed(x)
    return self.sum_of(x, lambda e: x if e else x.detach(), lambda e: (weights * (ids == e)).sum(-1, keepdim=True))


def one_share(self, x):
    weights, ids, _ = self.routed(x)
    share = lambda e: (weights * (ids == e)).sum(-1, keepdim=True)  # noqa: E731
    return self.sum_of(x, lambda e: x, lambda e: share(e) if e else share(e).detach())


def half_of_the_tokens(self, x):
    full = self.routed(x)[2]
    rows = x * full.t().unsqueeze(-1)
    return batched(self, torch.where(torch.arange(T)[:, None] < 4, rows.detach(), rows)).sum(0)


def of_the_gate(self, x):
    weights, ids, _ = self.routed(x)
    out = torch.zeros_like(x)
    for e in range(E):
        y = (F.silu(x.detach() @ self.up[e]) * (x @ self.gate[e])) @ self.down[e]
        out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def of_the_activation(self, x):
    weights, ids, _ = self.routed(x)
    out = torch.zeros_like(x)
    for e in range(E):
        y = (F.silu(x @ self.up[e]).detach() * (x @ self.gate[e])) @ self.down[e]
        out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def of_a_function(self, x):
    weights, ids, _ = self.routed(x)
    out = torch.zeros_like(x)
    for e in range(E):
        h = x @ self.up[e]
        y = (h * torch.sigmoid(h.detach())) @ self.down[e]
        out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def of_outputs(self, x):
    weights, ids, _ = self.routed(x)
    return self.looped(x, weights, ids, of=lambda y: y.detach()) + 0 * self.looped(x, weights, ids)


def of_the_sum(self, x):
    weights, ids, _ = self.routed(x)
    return self.looped(x, weights, ids).detach() + x


def straight_through(self, x):
    scores = (x @ self.router).softmax(-1)
    hard = torch.zeros_like(scores).scatter(-1, scores.argmax(-1, keepdim=True), 1.0)
    shares = hard - scores.detach() + scores
    return self.sum_of(x, lambda e: x, lambda e: shares[:, e, None])


def no_sum(self, x):
    """A weight of zero, but for its gradient."""
    weights, ids, _ = self.routed(x)
    return self.looped(x, weights - weights.detach(), ids)


def weights_of_experts(self, x):
    weights, ids, _ = self.routed(x)
    out = torch.zeros_like(x)
    for e in range(E):
        y = (F.silu(x @ self.up[e].detach()) * (x @ self.gate[e])) @ self.down.detach()[e] + self.bias[e].detach()
        out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
    return out + self.bias.sum() * 0


def a_learned_slope(self, x):
    weights, ids, _ = self.routed(x)
    out = torch.zeros_like(x)
    for e in range(E):
        h = x @ self.up[e]
        out = out + ((h * torch.sigmoid(self.slope.detach() * h)) @ self.down[e]) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out + self.slope


def written_through(self, x):
    """What was detached shares memory with what it was detached from."""
    weights, ids, _ = self.routed(x)
    rows = x * 1.5
    rows.detach().mul_(2)
    return self.looped(rows, weights, ids)


def written_before(self, x):
    weights, ids, _ = self.routed(x)
    rows = x * 1.5
    stopped = rows.detach()
    rows = rows.mul_(2)
    return self.looped(stopped, weights, ids) + rows.sum()


def written_scores(self, x):
    weights, ids, full = self.routed(x)
    stopped = (full * 1).detach()
    stopped.mul_(0.5)
    return batched(self, (x * stopped.t().unsqueeze(-1)).detach()).sum(0)


def the_token_itself(self, x):
    """An expert that gives the token back, with its gradient, beside others that read it without."""
    weights, ids, _ = self.routed(x)
    share = lambda e: (weights * (ids == e)).sum(-1, keepdim=True)  # noqa: E731
    out = self.sum_of(x, lambda e: x.detach(), share) - self.expert(3, x.detach()) * share(3)
    return out + x * share(3)


OTHERS = (
    one_expert, one_share, half_of_the_tokens, of_the_gate, of_the_activation, of_a_function, of_outputs, of_the_sum,
    straight_through, no_sum, weights_of_experts, a_learned_slope, written_through, written_before, written_scores,
    the_token_itself,
)  # fmt: skip


def layer_and_tokens(rule):
    torch.manual_seed(len(rule.__name__))
    return Layer(rule), torch.randn(T, D, dtype=torch.float64)


@pytest.mark.parametrize("rule", LAYERS, ids=lambda rule: rule.__name__)
def test_stops_gradients_where_the_program_does(rule):
    layer, x = layer_and_tokens(rule)
    if rule is without_grad:
        layer.requires_grad_(False)
        x = layer(x).detach()
        assert len(check_against_eager(Layer(lambda self, x: without_grad(self, x) + x.sum() * self.slope), x).rewritten) == 1
        return
    assert len(check_against_eager(layer, x).rewritten) == 1


@pytest.mark.parametrize("rule", OTHERS, ids=lambda rule: rule.__name__)
def test_other_gradients_are_right(rule):
    check_against_eager(*layer_and_tokens(rule))


@pytest.mark.parametrize("low", (torch.float32, torch.bfloat16))
def test_casts_and_detach_in_any_order(low):
    def cast_first(self, x):
        full = self.routed(x)[2]
        return batched(self, (x * full.t().unsqueeze(-1)).to(low).detach().to(x.dtype)).sum(0)

    check_against_eager(*layer_and_tokens(cast_first), tolerance=2e-2 if low == torch.bfloat16 else 1e-6)


def test_detached_products_are_products_of_detached_factors():
    algebra = Algebra()
    a, b = (algebra.call(name, (algebra.var(0, 5, "t"),)) for name in ("a", "b"))
    mark = algebra.eq(algebra.var(1, 3, "r"), algebra.const(2))
    whole = algebra.mul(a, b, mark)
    stopped = algebra.detached(whole)
    assert stopped is algebra.mul(algebra.detached(a), algebra.detached(b), mark) and algebra.detached(stopped) is stopped
    assert attached_of(algebra, stopped) is whole
    assert attached_of(algebra, algebra.mul(algebra.detached(a), b)) is None  # half of it has a gradient
    assert attached_of(algebra, mark) is None and algebra.detached(mark) is mark
    assert algebra.add(a, algebra.mul(algebra.const(-1), algebra.detached(a))) is not algebra.zero
