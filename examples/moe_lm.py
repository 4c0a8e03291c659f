"""A byte-level Mixture-of-Experts language model in plain PyTorch, its experts spelled in either of two ways.

Most tutorials run every expert on every token, and let a routing weight of zero drop what was not chosen: easy to read and
right, but E / K times the work that is needed. Most models run an expert on the tokens that chose it, which wastes nothing.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

NUM_BYTES = 256


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model: widths in elements, `context` in tokens."""

    num_layers: int
    dim: int
    num_heads: int
    context: int
    expert_hidden: int
    num_experts: int = 8
    top_k: int = 2


class Expert(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class MoE(nn.Module):
    def __init__(self, shape: ModelShape, every_token: bool):
        super().__init__()
        self.top_k, self.every_token = shape.top_k, every_token
        self.router = nn.Linear(shape.dim, shape.num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(shape.dim, shape.expert_hidden) for _ in range(shape.num_experts))

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        probabilities = functional.softmax(self.router(tokens), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(probabilities, self.top_k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(tokens.dtype)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            if self.every_token:
                weight = (weights * (chosen == e)).sum(dim=-1, keepdim=True)
                out = out + weight * expert(tokens)
            else:
                token, k = torch.where(chosen == e)
                out.index_add_(0, token, expert(tokens[token]) * weights[token, k, None])
        return out.reshape(x.shape)


class Attention(nn.Module):
    def __init__(self, shape: ModelShape):
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    def __init__(self, shape: ModelShape, every_token: bool):
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.dim)
        self.attention = Attention(shape)
        self.moe_norm = nn.LayerNorm(shape.dim)
        self.moe = MoE(shape, every_token)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class MoELanguageModel(nn.Module):
    """Mean cross-entropy of the next byte.

    Args:
        tokens_BL: bytes. Shape [batch, length], int64, length at most `shape.context`.
        targets_BL: the bytes that follow them. Shape and dtype of `tokens_BL`.
    """

    def __init__(self, shape: ModelShape, every_token: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, shape.dim)
        self.position = nn.Embedding(shape.context, shape.dim)
        self.blocks = nn.ModuleList(Block(shape, every_token) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, NUM_BYTES, bias=False)

    def forward(self, tokens_BL, targets_BL):
        position = self.position(torch.arange(tokens_BL.shape[1], device=tokens_BL.device))
        x = self.embedding(tokens_BL) + position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets_BL.flatten())
