"""Reinforcement learning of an MoE model: train with the experts that the rollout chose, not with those chosen anew.

A rollout in bf16 and a training step in fp32 choose other experts for some tokens, and the ratio of their probabilities is off
where it should be 1. Replaying what the rollout chose removes that part of the error.
"""

import copy

import torch

import moeblaze_ops
from moe_lm import ModelShape, MoELanguageModel


def log_probabilities(model, tokens_BL):
    logits = []
    with model.head.register_forward_hook(lambda head, args, output: logits.append(output.float())):
        model(tokens_BL, tokens_BL)
    return logits[0].log_softmax(-1).gather(-1, tokens_BL.unsqueeze(-1)).squeeze(-1)


def main():
    torch.manual_seed(0)
    trainer = MoELanguageModel(ModelShape(num_layers=4, dim=64, num_heads=4, context=64, expert_hidden=64, num_experts=16))
    rollout = copy.deepcopy(trainer).bfloat16()
    tokens_BL = torch.randint(0, 256, (16, 64))
    with torch.no_grad(), moeblaze_ops.record_routing(rollout) as record:
        rolled = log_probabilities(rollout, tokens_BL)
        anew = log_probabilities(trainer, tokens_BL)
    with moeblaze_ops.replay_routing(trainer, record):
        replayed = log_probabilities(trainer, tokens_BL)
        (replayed - rolled).exp().mean().backward()  # the policy gradient's ratio; routers get gradients, too
    for name, trained in (("routed anew", anew), ("as rolled out", replayed.detach())):
        print(f"largest |ratio - 1|, {name}: {(trained - rolled).exp().sub(1).abs().max().item():.4f}")


if __name__ == "__main__":
    main()
