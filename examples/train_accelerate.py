"""Train a Mixture-of-Experts model of transformers in a loop of one's own with accelerate, its layers rewritten.

    accelerate launch examples/train_accelerate.py            # a tiny Qwen3-MoE on random tokens, a minute on a CPU
    accelerate launch examples/train_accelerate.py --plain    # the same steps without moeblaze

Needs transformers and accelerate. Two lines are new to a loop that trains already: ``moeblaze_ops.enable()`` before the first
step, and ``dynamo_backend="inductor"`` for the Accelerator, which compiles what ``prepare`` is given.
"""

import argparse

import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader

import moeblaze_ops

BATCH = 4


def tiny_model() -> transformers.PreTrainedModel:
    """In its place: AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", dtype="bfloat16")."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config)


def random_tokens(steps: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(64, (steps * BATCH, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(steps: int, plain: bool) -> list[float]:
    """The losses of all steps; each call makes the same model and the same data."""
    if not plain:
        moeblaze_ops.enable()
    accelerator = Accelerator(dynamo_backend="no" if plain else "inductor")
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(random_tokens(steps), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plain", action="store_true", help="without torch.compile and moeblaze")
    arguments = parser.parse_args()
    losses = train(arguments.steps, arguments.plain)
    if Accelerator().is_main_process:
        print("losses:", *(f"{loss:.4f}" for loss in losses))
        if not arguments.plain:
            print(moeblaze_ops.report())


if __name__ == "__main__":
    main()
