"""Rows sorted by expert: grouped matrix products, then unsort or scatter."""

import torch
import torch.nn.functional as F
from torch import Tensor

from moeblaze_ops.lowering.graph import operators
from tests.corpus.zoo.modules import FF, flat

operators.OTHERS.add("moe_zoo::grouped_mm_fallback")


@torch.library.custom_op("moe_zoo::grouped_mm_fallback", mutates_args=())
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


def mm_of_groups(rows, weight, offs):
    if rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, weight, offs=offs)
    return torch.ops.moe_zoo.grouped_mm_fallback(rows, weight, offs)


def sorted_transformers(self, x, weights, ids):
    """transformers' ``grouped_mm`` experts: sort, gather, unsort by ``inv[perm] = arange``."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
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
    h = mm_of_groups(rows, self.gate_up.transpose(-2, -1), offs)
    gate, up = h.chunk(2, dim=-1)
    y = mm_of_groups(F.silu(gate) * up, self.down.transpose(-2, -1), offs)
    y = (y * weights_g.unsqueeze(-1))[inv]
    return y.view(num_tokens, top_k, -1).sum(dim=1).to(x.dtype).view(shape)


def sorted_transformers_bias(self, x, weights, ids):
    """The same with gpt-oss's clamped interleaved activation and biases added in place."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    top_k, num_tokens = ids.shape[-1], x.size(0)
    expert_ids = ids.reshape(-1)
    perm = torch.argsort(expert_ids)
    grouped_ids = expert_ids[perm]
    rows = x[perm // top_k]
    offs = torch.cumsum(torch.bincount(grouped_ids, minlength=self.E), dim=0).to(torch.int32)
    h = mm_of_groups(rows, self.gate_up, offs)
    h.add_(self.gate_up_bias[grouped_ids])
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    y = mm_of_groups((up + 1) * gate * torch.sigmoid(1.702 * gate), self.down, offs)
    y.add_(self.down_bias[grouped_ids])
    y = y * weights.reshape(-1)[perm].unsqueeze(-1)
    return y[torch.argsort(perm)].view(num_tokens, top_k, -1).sum(1).view(shape)


def sorted_torchtitan(self, x, weights, ids):
    """torchtitan: three products, scores in the highest precision, scatter_add by token."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    top_k = ids.shape[-1]
    order = torch.argsort(ids.view(-1), stable=True)
    scores = weights.view(-1)[order]
    token = (order // top_k).reshape(-1, 1).expand(-1, x.shape[-1])
    rows = torch.gather(x, 0, token)
    offs = torch.cumsum(F.one_hot(ids.view(-1), self.E).sum(0), 0, dtype=torch.int32)
    h = F.silu(mm_of_groups(rows, self.w1.transpose(-2, -1), offs)) * mm_of_groups(rows, self.w3.transpose(-2, -1), offs)
    y = mm_of_groups(h, self.w2.transpose(-2, -1), offs)
    y = (y.to(scores.dtype) * scores.reshape(-1, 1)).to(x.dtype)
    return torch.zeros_like(x).scatter_add(0, token, y).reshape(shape)


def sorted_index_add(self, x, weights, ids):
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    sorted_ids, order = ids.flatten().sort()
    token = order.div(ids.shape[1], rounding_mode="floor")
    counts = (sorted_ids[:, None] == torch.arange(self.E)).sum(0)
    offs = counts.cumsum(0).int()
    h = F.silu(mm_of_groups(x[token], self.w1, offs)) * mm_of_groups(x[token], self.w3, offs)
    y = mm_of_groups(h * weights.flatten()[order, None], self.w2, offs)
    return torch.zeros_like(x).index_add_(0, token, y).view(shape)


def sorted_rows(self, x, weights, ids):
    """Experts concatenated along rows, one offset of all of them at a time."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    order = ids.flatten().argsort(stable=True)
    token = order // ids.shape[1]
    offs = torch.bincount(ids.flatten(), minlength=self.E).cumsum(0).int()
    w1, v1, w2 = (w.view(self.E, FF, -1) for w in (self.w1, self.v1, self.w2))
    h = F.silu(mm_of_groups(x[token], w1.mT, offs)) * mm_of_groups(x[token], v1.mT, offs)
    y = mm_of_groups(h, w2, offs) * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add_(0, token, y).view(shape)


def sorted_llama4(self, x, weights, ids):
    """The routing weight multiplies the rows before the experts."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    order = ids.flatten().argsort(stable=True)
    token = order // ids.shape[1]
    offs = torch.bincount(ids.flatten(), minlength=self.E).cumsum(0).int()
    rows = x[token] * weights.flatten()[order, None]
    y = mm_of_groups(F.silu(mm_of_groups(rows, self.w1, offs)) * mm_of_groups(rows, self.w3, offs), self.w2, offs)
    return torch.zeros_like(x).index_add_(0, token, y).view(shape)


def sorted_torchtune(self, x, weights, ids):
    """Bins up to the number of experts, of which the last is one longer."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    order = torch.argsort(ids.view(-1), stable=True)
    token = (order // ids.shape[1]).reshape(-1, 1).expand(-1, x.shape[-1])
    rows = torch.gather(x, 0, token)
    offs = torch.cumsum(torch.histc(ids.view(-1).float(), bins=self.E, min=0, max=self.E), 0, dtype=torch.int32)
    h = F.silu(mm_of_groups(rows, self.w1, offs)) * mm_of_groups(rows, self.w3, offs)
    y = mm_of_groups(h, self.w2, offs) * weights.view(-1)[order].reshape(-1, 1)
    return torch.zeros_like(x).scatter_add(0, token, y).view(shape)


def sorted_scaled_wide(self, x, weights, ids):
    """torchtitan's scores before experts: multiplied in fp32, and rounded again."""
    shape = x.shape
    x, weights, ids = flat(x, weights, ids)
    order = torch.argsort(ids.view(-1), stable=True)
    token = (order // ids.shape[1]).reshape(-1, 1).expand(-1, x.shape[-1])
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = (torch.gather(x, 0, token).to(wide) * weights.view(-1)[order].reshape(-1, 1)).to(x.dtype)
    offs = torch.cumsum(torch.bincount(ids.view(-1), minlength=self.E), 0, dtype=torch.int32)
    y = mm_of_groups(F.silu(mm_of_groups(rows, self.w1, offs)) * mm_of_groups(rows, self.w3, offs), self.w2, offs)
    return torch.zeros_like(x).scatter_add(0, token, y).view(shape)
