"""Hand-written MoE layers, as people write them. Parameters are named as in the spelling that each imitates.

Every layer takes ``x`` ([T, D] or [B, S, D]) and routes by itself. A *combine* or *experts* function is one spelling.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, FF, E, K = 16, 24, 4, 2


class Router(nn.Module):
    """Softmax, top-k, renormalised."""

    def __init__(self, E: int = E, K: int = K, normalise: bool = True):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.K, self.normalise = K, normalise

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = F.softmax(self.gate(x), dim=-1, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
        weights, ids = torch.topk(p, self.K, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), ids


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.2)


class GluMLP(nn.Module):
    """The Llama expert: three bias-free linears."""

    def __init__(self, act=F.silu):
        super().__init__()
        self.w1, self.w3 = nn.Linear(D, FF, bias=False), nn.Linear(D, FF, bias=False)
        self.w2 = nn.Linear(FF, D, bias=False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)) * self.w3(x))


class PlainMLP(nn.Module):
    """The classic expert: two linears with biases."""

    def __init__(self, act=F.gelu):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, FF), nn.Linear(FF, D)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class ModuleListMoE(nn.Module):
    """Separate experts and one function that runs and combines them."""

    def __init__(self, combine, expert=GluMLP, E: int = E, K: int = K, **router):
        super().__init__()
        self.router = Router(E, K, **router)
        self.experts = nn.ModuleList(expert() for _ in range(E))
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        return self.combine(self, x, weights, ids)


class StackedMoE(nn.Module):
    """Stacked parameters in one of the usual storages."""

    def __init__(self, experts, storage: str = "split", E: int = E, K: int = K, bias: bool = False, **router):
        super().__init__()
        self.router = Router(E, K, **router)
        self.E, self.K, self.experts = E, K, experts
        if storage == "split":  # x @ w1[e]
            self.w1, self.w3, self.w2 = _parameter(E, D, FF), _parameter(E, D, FF), _parameter(E, FF, D)
        elif storage == "linear":  # F.linear(x, w1[e])
            self.w1, self.w3, self.w2 = _parameter(E, FF, D), _parameter(E, FF, D), _parameter(E, D, FF)
        elif storage == "packed":  # x @ gate_up[e], [gate | up]
            self.gate_up, self.down = _parameter(E, D, 2 * FF), _parameter(E, FF, D)
        elif storage == "packed_linear":
            self.gate_up, self.down = _parameter(E, 2 * FF, D), _parameter(E, D, FF)
        elif storage == "rows":  # DBRX: experts concatenated along rows
            self.w1, self.v1, self.w2 = _parameter(E * FF, D), _parameter(E * FF, D), _parameter(E * FF, D)
        if bias:
            self.gate_up_bias, self.down_bias = _parameter(E, 2 * FF), _parameter(E, D)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        return self.experts(self, x, weights, ids)


# Every expert on every token, weighted by its mask.


def masked_sum(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def masked_inplace(self, x, weights, ids):
    out = x.new_zeros(x.shape)
    for e, expert in enumerate(self.experts):
        share = torch.where(ids == e, weights, 0.0).sum(dim=-1)
        out += share.unsqueeze(-1) * expert(x)
    return out


def masked_add_method(self, x, weights, ids):
    out = torch.zeros(x.shape, dtype=x.dtype)
    for e, expert in enumerate(self.experts):
        out.add_(expert(x).mul(weights.masked_fill(ids != e, 0).sum(-1)[..., None]))
    return out


def masked_list_sum(self, x, weights, ids):
    mask = F.one_hot(ids, len(self.experts)).to(x.dtype)
    scores = (mask * weights.unsqueeze(-1)).sum(-2)
    return sum(scores[..., e : e + 1] * expert(x) for e, expert in enumerate(self.experts))


def masked_stack(self, x, weights, ids):
    scores = torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype).scatter(-1, ids, weights)
    outs = torch.stack([expert(x) for expert in self.experts], dim=-2)
    return (outs * scores[..., None]).sum(dim=-2)


def masked_stack_einsum(self, x, weights, ids):
    scores = torch.einsum("tk,tke->te", weights, F.one_hot(ids, len(self.experts)).to(x.dtype))
    outs = torch.stack([expert(x) for expert in self.experts])
    return torch.einsum("te,etd->td", scores, outs)


def masked_per_slot(self, x, weights, ids):
    out = torch.zeros_like(x)
    for k in range(ids.shape[-1]):
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * weights[..., k : k + 1] * (ids[..., k] == e).unsqueeze(-1)
    return out


MASKED = (masked_sum, masked_inplace, masked_add_method, masked_list_sum, masked_stack, masked_per_slot)


# A loop over experts that selects their tokens.


def _flat(x, weights, ids):
    return x.reshape(-1, x.shape[-1]), weights.reshape(-1, weights.shape[-1]), ids.reshape(-1, ids.shape[-1])


def loop_mixtral(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, len(self.experts)).permute(2, 1, 0)
    for e, expert in enumerate(self.experts):
        slot, token = torch.where(mask[e])
        current = x[None, token].reshape(-1, x.shape[-1])
        out.index_add_(0, token, expert(current) * weights[token, slot, None])
    return out.reshape(shape)


def loop_mistral(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out[token] += weights[token, slot, None] * expert(x[token])
    return out.view(shape)


def loop_nonzero(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    out = x.new_zeros(x.shape)
    for e, expert in enumerate(self.experts):
        hits = (ids == e).nonzero()
        token, slot = hits[:, 0], hits[:, 1]
        out = out.index_add(0, token, expert(x.index_select(0, token)) * weights[token, slot].unsqueeze(1))
    return out.view(shape)


def loop_dense_scores(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        share = (weights * (ids == e)).sum(-1)
        token = (ids == e).any(dim=-1).nonzero(as_tuple=True)[0]
        out.index_add_(0, token, expert(x[token]) * share[token].unsqueeze(-1))
    return out.view(shape)


def loop_boolean_mask(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        mask = (ids == e).any(-1)
        share = (weights * (ids == e).to(weights.dtype)).sum(-1, keepdim=True)
        out[mask] += expert(x[mask]) * share[mask]
    return out.view(shape)


LOOPS = (loop_mixtral, loop_mistral, loop_nonzero, loop_dense_scores, loop_boolean_mask)


# Loops over stacked parameters: one spelling per storage.


def stacked_loop(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(self.E):
        y = (F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e]
        out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def stacked_linear_loop(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, (w1, w3, w2) in enumerate(zip(self.w1.unbind(0), self.w3.unbind(0), self.w2.unbind(0), strict=True)):
        y = F.linear(F.gelu(F.linear(x, w1), approximate="tanh") * F.linear(x, w3), w2)
        out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def packed_loop(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e in range(self.E):
        token, slot = torch.where(ids == e)
        gate, up = (x[token] @ self.gate_up[e]).chunk(2, dim=-1)
        out.index_add_(0, token, ((up * F.silu(gate)) @ self.down[e]) * weights[token, slot, None])
    return out.reshape(shape)


def gpt_oss_loop(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    out = torch.zeros_like(x)
    for e in range(self.E):
        token, slot = torch.where(ids == e)
        h = x[token] @ self.gate_up[e] + self.gate_up_bias[e]
        gate, up = h[..., ::2], h[..., 1::2]
        gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
        y = ((up + 1) * (gate * torch.sigmoid(gate * 1.702))) @ self.down[e] + self.down_bias[e]
        out.index_add_(0, token, y * weights[token, slot, None])
    return out.reshape(shape)


def dbrx_loop(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    out = torch.zeros_like(x)
    w1, v1, w2 = (w.chunk(self.E, dim=0) for w in (self.w1, self.v1, self.w2))
    for e in range(self.E):
        token, slot = torch.where(ids == e)
        y = (F.silu(x[token] @ w1[e].t()) * (x[token] @ v1[e].t())) @ w2[e]
        out.index_add_(0, token, y * weights[token, slot, None])
    return out.reshape(shape)


# Sorted by expert: grouped matrix products, then unsort or scatter.


@torch.library.custom_op("transformers::grouped_mm_fallback", mutates_args=())
def grouped_mm_fallback(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """What transformers emits where ``torch._grouped_mm`` cannot run: a host loop over groups."""
    out = input.new_zeros(input.shape[0], weight.shape[2])
    start = 0
    for e, end in enumerate(offs.tolist()):
        out[start:end] = input[start:end] @ weight[e]
        start = end
    return out


@grouped_mm_fallback.register_fake
def _(input, weight, offs):
    return input.new_empty(input.shape[0], weight.shape[2])


@torch.library.custom_op("moe_zoo::grouped_mm_backward", mutates_args=())
def _grouped_mm_backward(grad: Tensor, input: Tensor, weight: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    grad_weight = torch.zeros_like(weight)
    bounds = [0, *offs.tolist()]
    for e, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        grad_weight[e] = input[start:end].T @ grad[start:end]
    return grouped_mm_fallback(grad, weight.transpose(1, 2), offs), grad_weight


@_grouped_mm_backward.register_fake
def _(grad, input, weight, offs):
    return torch.empty_like(input), torch.empty_like(weight)


grouped_mm_fallback.register_autograd(
    lambda ctx, grad: (*_grouped_mm_backward(grad, *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def _mm(rows, weight, offs):
    if rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, weight, offs=offs)
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, offs)


def sorted_transformers(self, x, weights, ids):
    """transformers' ``grouped_mm`` experts: sort, gather, unsort by ``inv[perm] = arange``."""
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    top_k, num_tokens = ids.shape[-1], x.size(0)
    token = torch.arange(num_tokens).unsqueeze(1).expand(-1, top_k).reshape(-1)
    sample_weights, expert_ids = weights.reshape(-1), ids.reshape(-1)
    perm = torch.argsort(expert_ids)
    inv = torch.empty_like(perm)
    inv[perm] = torch.arange(perm.size(0))
    grouped_ids = expert_ids[perm]
    weights_g, rows = sample_weights[perm], x[token[perm]]
    counts = torch.histc(grouped_ids.float(), bins=self.E, min=0, max=self.E - 1)
    offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
    h = _mm(rows, self.gate_up.transpose(-2, -1), offs)
    gate, up = h.chunk(2, dim=-1)
    y = _mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs)
    y = (y * weights_g.unsqueeze(-1))[inv]
    return y.view(num_tokens, top_k, -1).sum(dim=1).to(x.dtype).view(shape)


def sorted_transformers_bias(self, x, weights, ids):
    """The same with gpt-oss's clamped interleaved activation and biases added in place."""
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    top_k, num_tokens = ids.shape[-1], x.size(0)
    expert_ids = ids.reshape(-1)
    perm = torch.argsort(expert_ids)
    grouped_ids = expert_ids[perm]
    rows = x[perm // top_k]
    offs = torch.cumsum(torch.bincount(grouped_ids, minlength=self.E), dim=0).to(torch.int32)
    h = _mm(rows, self.gate_up, offs)
    h.add_(self.gate_up_bias[grouped_ids])
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    y = _mm((up + 1) * gate * torch.sigmoid(1.702 * gate), self.down, offs)
    y.add_(self.down_bias[grouped_ids])
    y = y * weights.reshape(-1)[perm].unsqueeze(-1)
    return y[torch.argsort(perm)].view(num_tokens, top_k, -1).sum(1).view(shape)


def sorted_torchtitan(self, x, weights, ids):
    """torchtitan: three products, scores in the highest precision, scatter_add by token."""
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    top_k = ids.shape[-1]
    order = torch.argsort(ids.view(-1), stable=True)
    scores = weights.view(-1)[order]
    token = (order // top_k).reshape(-1, 1).expand(-1, x.shape[-1])
    rows = torch.gather(x, 0, token)
    offs = torch.cumsum(F.one_hot(ids.view(-1), self.E).sum(0), 0, dtype=torch.int32)
    h = F.silu(_mm(rows, self.w1.transpose(-2, -1), offs)) * _mm(rows, self.w3.transpose(-2, -1), offs)
    y = _mm(h, self.w2.transpose(-2, -1), offs)
    y = (y.to(scores.dtype) * scores.reshape(-1, 1)).to(x.dtype)
    return torch.zeros_like(x).scatter_add(0, token, y).reshape(shape)


def sorted_index_add(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    sorted_ids, order = ids.flatten().sort()
    token = order.div(ids.shape[1], rounding_mode="floor")
    counts = (sorted_ids[:, None] == torch.arange(self.E)).sum(0)
    offs = counts.cumsum(0).int()
    h = F.silu(_mm(x[token], self.w1, offs)) * _mm(x[token], self.w3, offs)
    y = _mm(h * weights.flatten()[order, None], self.w2, offs)
    return torch.zeros_like(x).index_add_(0, token, y).view(shape)


# Weights gathered per token, and every expert in one batched product.


def gathered_einsum(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    gate = F.silu(torch.einsum("td,tkfd->tkf", x, self.w1[ids]))
    up = torch.einsum("td,tkfd->tkf", x, self.w3[ids])
    y = torch.einsum("tkf,tkdf->tkd", gate * up, self.w2[ids])
    return torch.einsum("tkd,tk->td", y, weights).view(shape)


def gathered_bmm(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    top_k = ids.shape[-1]
    rows = x.repeat_interleave(top_k, dim=0)
    expert_ids = ids.reshape(-1)
    h = torch.bmm(self.gate_up[expert_ids], rows.unsqueeze(-1)).squeeze(-1)
    gate, up = h.chunk(2, dim=-1)
    y = torch.bmm(self.down[expert_ids], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    y = y * weights.reshape(-1, 1)
    return y.view(x.shape[0], top_k, -1).sum(dim=1).view(shape)


def gathered_gpt_oss(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    h = torch.einsum("beck,bk->bec", self.gate_up[ids, ...], x) + self.gate_up_bias[ids, ...]
    gate, up = h[..., ::2], h[..., 1::2]
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    y = torch.einsum("beck,bek->bec", self.down[ids, ...], h) + self.down_bias[ids, ...]
    return torch.einsum("bec,be->bc", y, weights).view(shape)


def gathered_per_slot(self, x, weights, ids):
    out = 0
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    for k in range(ids.shape[1]):
        w1, w3, w2 = self.w1[ids[:, k]], self.w3[ids[:, k]], self.w2[ids[:, k]]
        h = F.silu(x.unsqueeze(1) @ w1.mT) * (x.unsqueeze(1) @ w3.mT)
        out = out + (h @ w2.mT).squeeze(1) * weights[:, k, None]
    return out.view(shape)


def dense_einsum(self, x, weights, ids):
    scores = torch.zeros(*x.shape[:-1], self.E, dtype=x.dtype).scatter_(-1, ids, weights)
    lead = "bt"[-(x.dim() - 1) :]
    h = F.silu(torch.einsum(f"{lead}d,edf->{lead}ef", x, self.w1)) * torch.einsum(f"{lead}d,edf->{lead}ef", x, self.w3)
    y = torch.einsum(f"{lead}ef,efd->{lead}ed", h, self.w2)
    return (y * scores.unsqueeze(-1)).sum(-2)


def dense_bmm(self, x, weights, ids):
    """Old gpt-oss evaluation: tokens repeated per expert, batched products, weighted by scattered scores."""
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    rows = x.repeat(self.E, 1).view(self.E, -1, x.shape[-1])
    h = torch.bmm(rows, self.gate_up) + self.gate_up_bias[..., None, :]
    gate, up = h[..., ::2], h[..., 1::2]
    gate, up = gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)
    y = torch.bmm((up + 1) * (gate * torch.sigmoid(gate * 1.702)), self.down) + self.down_bias[..., None, :]
    scores = torch.zeros(x.shape[0], self.E, dtype=x.dtype).scatter_(1, ids, weights)
    y = y.view(self.E, x.shape[0], -1) * scores.transpose(0, 1).view(self.E, -1)[..., None]
    return y.sum(dim=0).view(shape)


def dense_llama4(self, x, weights, ids):
    """Llama 4: the score multiplies the expert's input; unselected scores are zero."""
    shape = x.shape
    x, weights, ids = _flat(x, weights, ids)
    scores = torch.zeros(x.shape[0], self.E, dtype=x.dtype).scatter_(1, ids, weights).transpose(0, 1)
    rows = x.repeat(self.E, 1) * scores.reshape(-1, 1)
    h = torch.bmm(rows.view(self.E, -1, x.shape[-1]), self.gate_up)
    gate, up = h.chunk(2, dim=-1)
    y = torch.bmm(up * F.silu(gate), self.down).view(-1, x.shape[-1])
    return y.reshape(self.E, -1, x.shape[-1]).sum(dim=0).view(shape)


# (spelling, storage, biases)
STACKED = (
    (stacked_loop, "split", False),
    (stacked_linear_loop, "linear", False),
    (packed_loop, "packed", False),
    (gpt_oss_loop, "packed", True),
    (dbrx_loop, "rows", False),
    (sorted_transformers, "packed_linear", False),
    (sorted_transformers_bias, "packed", True),
    (sorted_torchtitan, "linear", False),
    (sorted_index_add, "split", False),
    (gathered_einsum, "linear", False),
    (gathered_bmm, "packed_linear", False),
    (gathered_gpt_oss, "packed_linear", True),
    (gathered_per_slot, "linear", False),
    (dense_einsum, "split", False),
    (dense_bmm, "packed", True),
    (dense_llama4, "packed", False),
)
