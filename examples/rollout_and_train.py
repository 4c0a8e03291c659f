"""Generate with a static cache, then score the same tokens in a training forward: what the MoE layers give is equal to the bit.

A step of generation has a token of each sequence, the training forward all tokens of all sequences. With ``batch_invariant`` an
MoE layer gives a token the same bits in both. Attention, norms and plain products round otherwise in the two, so the layers'
inputs differ in the last bits: compared are the MoE layers on the inputs that the rollout had, and beside them the probabilities
that the whole model gives. ``replay_rollout.py`` keeps the rollout's experts where inputs differ by more.
"""

import torch
from torch import nn
from torch.nn import functional

import moeblaze_ops
from moeblaze_ops import config

VOCABULARY, BATCH, PROMPT, LENGTH = 256, 3, 4, 24


class Attention(nn.Module):
    """Causal attention that reads the keys and values of earlier tokens from a cache of fixed length."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x, start, cache):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0][:, :, start : start + T], cache[1][:, :, start : start + T] = k, v
            k, v = cache
        seen = torch.arange(k.shape[2], device=x.device) <= start + torch.arange(T, device=x.device)[:, None]
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(mixed.transpose(1, 2).reshape(B, T, D))


class Model(nn.Module):
    def __init__(self, dim=64, heads=4, layers=3, experts=16):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, dim), nn.Embedding(LENGTH, dim)
        self.attention = nn.ModuleList(Attention(dim, heads) for _ in range(layers))
        self.moe = nn.ModuleList(moeblaze_ops.MoE(D=dim, F=96, E=experts, K=4, renormalize=True) for _ in range(layers))
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens, start=0, caches=None):
        x = self.embedding(tokens) + self.position(start + torch.arange(tokens.shape[1], device=tokens.device))
        for i, (attention, moe) in enumerate(zip(self.attention, self.moe, strict=True)):
            x = x + attention(functional.layer_norm(x, x.shape[-1:]), start, caches and caches[i])
            x = x + moe(functional.layer_norm(x, x.shape[-1:]))
        return self.head(functional.layer_norm(x, x.shape[-1:])).float().log_softmax(-1)


class Calls:
    """The inputs and outputs of the MoE layers, a list for each layer."""

    def __init__(self, model):
        self.of = [[] for _ in model.moe]
        self.hooks = [moe.register_forward_hook(self.note(i)) for i, moe in enumerate(model.moe)]

    def note(self, i):
        return lambda module, args, output: self.of[i].append((args[0].detach(), output.detach()))

    def joined(self, i):
        """All tokens of layer i, ``[batch, length, dim]``."""
        return (torch.cat(tensors, dim=1) for tensors in zip(*self.of[i], strict=True))

    def stop(self):
        for hook in self.hooks:
            hook.remove()


@torch.no_grad()
def generate(model, prompt):
    """Greedy tokens, and the log-probability of each but the first."""
    head = model.head.weight
    shape = (BATCH, model.attention[0].heads, LENGTH, head.shape[1] // model.attention[0].heads)
    caches = [tuple(torch.zeros(shape, dtype=head.dtype, device=head.device) for _ in range(2)) for _ in model.attention]
    tokens, scores = prompt, []
    for step in range(LENGTH - 1):
        scores.append(model(tokens[:, step : step + 1], step, caches))
        if step + 1 == tokens.shape[1]:
            tokens = torch.cat([tokens, scores[-1][:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens, torch.cat(scores, dim=1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def different(model, batch_invariant):
    """Numbers of the MoE layers' outputs that differ between rollout and training, of equal inputs; and what was rolled out."""
    config.batch_invariant = batch_invariant
    torch.manual_seed(1)
    calls = Calls(model)
    tokens, rolled = generate(model, torch.randint(VOCABULARY, (BATCH, PROMPT), device=model.head.weight.device))
    calls.stop()
    number = 0
    for i, moe in enumerate(model.moe):
        read, gave = calls.joined(i)
        number += int((moe(read.requires_grad_()) != gave).sum())
    return number, tokens, rolled


def main():
    torch.manual_seed(0)
    model = Model()
    for batch_invariant in (False, True):
        number, tokens, rolled = different(model, batch_invariant)
        scored = model(tokens[:, :-1]).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        off = (scored - rolled).exp().sub(1).abs().max().item()
        print(f"batch_invariant={batch_invariant}: {number} numbers of MoE layers differ; largest |ratio - 1| {off:.0e}")
    (scored - rolled.detach()).exp().mean().backward()  # the policy gradient's ratio


if __name__ == "__main__":
    main()
