"""Train a Mixture-of-Experts model by Lightning, with its layers rewritten.

    python examples/train_lightning.py            # a tiny byte-level model on random bytes, a minute on a CPU
    python examples/train_lightning.py --plain    # the same steps without moeblaze

Needs lightning. Two lines are new to a LightningModule that trains already: ``moeblaze_ops.enable()`` before the first step, and
``self.model.compile()`` in the module. Lightning's own loop, its precision plugins and its strategies stay as they are.
"""

import argparse

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import moeblaze_ops
from moe_lm import ModelShape, MoELanguageModel

SHAPE = ModelShape(num_layers=2, dim=32, num_heads=2, context=24, expert_hidden=48, num_experts=4)
BATCH = 4


class LanguageModel(lightning.LightningModule):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.model, self.losses = MoELanguageModel(SHAPE, every_token=False), []
        if compiled:
            self.model.compile()  # the module itself stays what it was: names of parameters, checkpoints, hooks

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = self.model(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def random_bytes(steps: int) -> DataLoader:
    bytes_NL = torch.randint(256, (steps * BATCH, SHAPE.context + 1), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(bytes_NL[:, :-1], bytes_NL[:, 1:]), batch_size=BATCH)


def train(steps: int, plain: bool) -> list[float]:
    """The losses of all steps; each call makes the same model and the same data."""
    if not plain:
        moeblaze_ops.enable()
    torch.manual_seed(0)
    module = LanguageModel(compiled=not plain)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="auto", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, random_bytes(steps))
    return module.losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plain", action="store_true", help="without torch.compile and moeblaze")
    arguments = parser.parse_args()
    losses = train(arguments.steps, arguments.plain)
    print("losses:", *(f"{loss:.4f}" for loss in losses))
    if not arguments.plain:
        print(moeblaze_ops.report())


if __name__ == "__main__":
    main()
