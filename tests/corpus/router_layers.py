"""Routers as functions of the logits: those that are `route`, those that look like it, and a layer to put them in front of."""

import torch
import torch.nn.functional as F
from torch import nn

T, D, E, K, HIDDEN = 19, 8, 4, 2, 6
BIAS = torch.tensor([0.31, -0.24, 0.12, -0.43])


class Layer(nn.Module):
    """A masked loop over experts behind a router given as a function of the logits."""

    def __init__(self, router, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.route = router
        self.gate = nn.Linear(D, E, bias=False, dtype=dtype)
        self.up = nn.Parameter(torch.randn(E, 2 * HIDDEN, D, dtype=dtype) / 3)
        self.down = nn.Parameter(torch.randn(E, D, HIDDEN, dtype=dtype) / 3)

    def forward(self, x):
        weights, experts, *rest = self.route(self.gate(x))
        out = torch.zeros_like(x)
        for e in range(E):
            chosen = (weights * (experts == e)).sum(-1, keepdim=True)
            gate, up = F.linear(x, self.up[e]).chunk(2, -1)
            out = out + F.linear(F.silu(gate) * up, self.down[e]) * chosen.to(x.dtype)
        return out + sum(rest) if rest else out


def softmax_first(logits):
    return torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K)


def renormalized(logits):
    weights, experts = torch.topk(logits.softmax(-1, dtype=torch.float), K, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), experts


def renormalized_in_place(logits):
    weights, experts = torch.topk(F.softmax(logits, 1, dtype=torch.float), K)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts


def scaled_in_place(logits):
    weights, experts = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K)
    weights.mul_(0.5)
    return weights, experts


def softmax_last(logits):
    values, experts = torch.topk(logits, K, dim=1)
    return F.softmax(values, dim=1, dtype=torch.float32), experts


def sigmoid_scaled(logits):
    weights, experts = logits.float().sigmoid().topk(K, dim=-1, sorted=True)
    return weights / weights.sum(-1, keepdim=True) * 2.5, experts


def scaled_from_the_left(logits):
    weights, experts = logits.float().sigmoid().topk(K, dim=-1)
    return 2.5 * (weights / (1e-20 + weights.sum(-1)[:, None])), experts


def flattened(logits):
    values, experts = torch.topk(logits, K, dim=-1)
    return torch.softmax(values, dim=-1, dtype=torch.float32).reshape(-1).view(-1, K), experts.flatten().view(-1, K)


def softmax_of_the_flattened(logits):
    """All choices of all tokens share one softmax."""
    values, experts = torch.topk(logits, K, dim=-1)
    return torch.softmax(values.reshape(-1), dim=-1, dtype=torch.float32).view(-1, K), experts


def softmax_gathered(logits):
    scores = F.softmax(logits, dim=-1, dtype=torch.float32)
    experts = torch.topk(scores, K, dim=-1, sorted=False).indices
    weights = scores.gather(1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), experts


def softmax_biased(logits):
    scores = logits.float().softmax(dim=-1)
    _, experts = torch.topk(scores + BIAS, K)
    return torch.gather(scores, -1, experts) * 1.5, experts


def sigmoid_biased(logits):
    scores = logits.float().sigmoid()
    experts = torch.topk(BIAS.to(torch.bfloat16) + scores, K, dim=-1)[1]
    weights = scores.gather(-1, experts)
    weights /= weights.sum(-1, keepdim=True) + 1e-20
    return weights * 2.5, experts


def limited_to_groups(
    logits, score=torch.sigmoid, mask_of=None, group_score=None, left_out=float("-inf"), weigh=None, bias=BIAS, count=K, number=2
):
    """Sigmoid scores plus a bias; a token chooses inside the better half of the experts. Options are for others."""
    scores = score(logits.float())
    choice = scores + bias
    grouped = choice.view(-1, number, E // number)
    best = torch.topk((group_score or (lambda g: g.topk(2, dim=-1)[0].sum(dim=-1)))(grouped), 1, dim=-1, sorted=False)[1]
    groups = torch.zeros(T, number).scatter_(1, best, 1)
    kept = (mask_of or (lambda g: g.unsqueeze(-1).expand(-1, number, E // number).reshape(-1, E)))(groups)
    choice = choice.masked_fill(~kept.bool(), left_out)
    experts = torch.topk(choice, count, dim=-1, sorted=False)[1]
    weights = (weigh or (lambda scores: scores))(scores).gather(1, experts)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * 2.5, experts


def repeated_groups(logits):
    return limited_to_groups(logits, mask_of=lambda groups: groups.repeat_interleave(2, dim=1))


def limited_to_the_one_group(logits):
    """As GLM-4.5 and Kimi K2 are configured."""
    return limited_to_groups(logits, number=1)


def sigmoid_last(logits):
    values, experts = torch.topk(logits, K, dim=-1)
    return torch.sigmoid(values.float()), experts


def sigmoid_last_renormalized(logits):
    values, experts = torch.topk(logits, K, dim=-1)
    weights = values.float().sigmoid()
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, experts


ROUTERS = (
    sigmoid_last, sigmoid_last_renormalized, scaled_in_place, scaled_from_the_left,
    flattened, softmax_first, renormalized, renormalized_in_place, softmax_last, sigmoid_scaled, softmax_gathered,
    softmax_biased, sigmoid_biased, limited_to_groups, repeated_groups, limited_to_the_one_group,
)  # fmt: skip


def smallest(logits):
    return torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K, largest=False)


def over_tokens(logits):
    weights, experts = torch.topk(F.softmax(logits, dim=0, dtype=torch.float32), K)
    return weights, experts


def sigmoid_of_the_last_rounded(logits):
    """Rounded before it is divided by the sum."""
    values, experts = torch.topk(logits, K, dim=-1)
    weights = values.sigmoid().to(torch.bfloat16)
    return weights / weights.sum(-1, keepdim=True), experts


def scaled_by_a_negative_number(logits):
    weights, experts = logits.float().sigmoid().topk(K)
    return weights * -2.5, experts


def scaled_after_it_is_rounded(logits):
    weights, experts = logits.float().sigmoid().topk(K)
    return weights.to(torch.bfloat16) * 2.5, experts


def divided_by_the_sum_of_a_copy_that_is_rounded(logits):
    weights, experts = logits.float().sigmoid().topk(K)
    return weights / weights.to(torch.bfloat16).float().sum(-1, keepdim=True), experts


def tanh_last(logits):
    values, experts = torch.topk(logits, K, dim=-1)
    return torch.tanh(values.float()), experts


def shuffled(logits):
    weights, experts = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K)
    return weights.flip(-1), experts


def choices_used_elsewhere(logits):
    weights, experts = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K)
    return weights, experts, weights.sum()


def logits_changed_later(logits):
    values, experts = torch.topk(logits, K)
    logits.mul_(3)
    return F.softmax(values, dim=-1, dtype=torch.float32), experts


def divided_by_another_sum(logits):
    scores = F.softmax(logits, dim=-1, dtype=torch.float32)
    weights, experts = torch.topk(scores, K)
    return weights / scores.sum(-1, keepdim=True), experts


def gathered_for_other_experts(logits):
    scores = F.softmax(logits, dim=-1, dtype=torch.float32)
    experts = torch.topk(scores, K).indices
    return scores.gather(1, experts.flip(-1)), experts


def gathered_along_tokens(logits):
    scores = F.softmax(logits, dim=-1, dtype=torch.float32)
    experts = torch.topk(scores, K).indices
    return scores.gather(0, experts), experts


def chosen_by_other_scores(logits):
    scores = logits.float().sigmoid()
    experts = torch.topk(F.softmax(-logits, dim=-1, dtype=torch.float32), K).indices
    return scores.gather(1, experts), experts


def biased_with_a_bias_of_tokens(logits):
    scores = logits.float().sigmoid()
    experts = torch.topk(scores + logits.detach().float().roll(1, 0), K).indices
    return scores.gather(1, experts), experts


def softmax_with_a_large_epsilon(logits):
    weights, experts = torch.topk(F.softmax(logits, dim=-1, dtype=torch.float32), K)
    return weights / (weights.sum(-1, keepdim=True) + 1e-6), experts


def sigmoid_with_another_epsilon(logits):
    weights, experts = logits.float().sigmoid().topk(K)
    return weights / (weights.sum(-1, keepdim=True) + 1e-9), experts


def groups_masked_with_zero(logits):
    return limited_to_groups(logits, left_out=0.0)


def groups_of_every_other_expert(logits):
    return limited_to_groups(logits, mask_of=lambda groups: groups.repeat(1, 2))


def groups_left_out(logits):
    return limited_to_groups(logits, mask_of=lambda groups: (1 - groups).repeat_interleave(2, dim=1))


def groups_by_their_best(logits):
    return limited_to_groups(logits, group_score=lambda grouped: grouped.amax(-1))


def groups_by_their_worst(logits):
    return limited_to_groups(logits, group_score=lambda grouped: grouped.topk(2, dim=-1, largest=False)[0].sum(-1).neg())


def groups_by_other_scores(logits):
    return limited_to_groups(logits, group_score=lambda grouped: (grouped * 2 - 1).topk(2, dim=-1)[0].sum(-1))


def groups_of_softmax_scores(logits):
    return limited_to_groups(logits, score=lambda logits: logits.softmax(-1))


def biased_in_fp64(logits):
    return limited_to_groups(logits, bias=BIAS.double() / 3)


def groups_weighed_by_biased_scores(logits):
    return limited_to_groups(logits, weigh=lambda scores: scores + BIAS)


def chosen_without_gradient(logits):
    scores = logits.softmax(-1, dtype=torch.float32)
    with torch.no_grad():
        experts = scores.topk(K, dim=-1).indices
    return scores.gather(-1, experts), experts


def scored_without_gradient(logits):
    with torch.no_grad():
        return logits.softmax(-1, dtype=torch.float32).topk(K, dim=-1)


def softmax_of_choices_without_gradient(logits):
    values, experts = logits.topk(K, dim=-1)
    with torch.no_grad():
        return values.softmax(-1, dtype=torch.float32), experts


def divided_by_a_sum_without_gradient(logits):
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(K, dim=-1)
    with torch.no_grad():
        total = weights.sum(-1, keepdim=True)
    return weights / total, experts


def biased_softmax_with_an_epsilon(logits):
    """An expert that the bias alone chooses may have a probability of zero, and the sum is the epsilon."""
    scores = (logits * 300).softmax(-1, dtype=torch.float32)
    experts = (scores + BIAS.sign() * 5).topk(1, dim=-1).indices
    weights = scores.gather(-1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), experts


LOOKALIKES = (
    sigmoid_of_the_last_rounded, tanh_last, scaled_by_a_negative_number, scaled_after_it_is_rounded,
    divided_by_the_sum_of_a_copy_that_is_rounded,
    softmax_of_the_flattened, smallest, over_tokens, shuffled, choices_used_elsewhere,
    logits_changed_later, divided_by_another_sum,
    gathered_for_other_experts, gathered_along_tokens, chosen_by_other_scores, biased_with_a_bias_of_tokens,
    softmax_with_a_large_epsilon, sigmoid_with_another_epsilon, groups_masked_with_zero, groups_of_every_other_expert,
    groups_left_out, groups_by_their_best, groups_by_their_worst, groups_by_other_scores, groups_weighed_by_biased_scores,
    groups_of_softmax_scores, biased_in_fp64, scored_without_gradient, softmax_of_choices_without_gradient,
    divided_by_a_sum_without_gradient, biased_softmax_with_an_epsilon,
)  # fmt: skip
