"""Loss of a small language model with ``keep="h8"`` beside ``keep="preactivation"``, over seeds, on a CPU.

    python benchmarks/bench_loss.py --json loss.json

Two blocks of attention and experts read bytes of Python's standard library, in bf16 under autocast, with AdamW. A seed draws the
weights and the batches. What a contender differs by from the other one at the same seed is beside what seeds differ by.
"""

import argparse
import ast
import inspect
import statistics
import typing
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moeblaze_ops
from environment import command_line, save

KEEPS = ("preactivation", "h8")
D, HIDDEN, E, K, HEADS, LENGTH, BATCH = 64, 96, 8, 2, 4, 64, 4
LAST = 50
"""Steps at the end whose losses are averaged."""


@dataclass
class Measurement:
    """One training run."""

    keep: str
    seed: int
    steps: int
    first_loss: float
    last_loss: float


class Block(nn.Module):
    def __init__(self, keep: str) -> None:
        super().__init__()
        self.before_attention, self.before_experts = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.experts = moeblaze_ops.MoE(D, HIDDEN, E, K, keep=keep)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before_attention(x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.experts(self.before_experts(x))


class Model(nn.Module):
    def __init__(self, keep: str) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, D), nn.Embedding(LENGTH, D)
        self.blocks = nn.Sequential(Block(keep), Block(keep))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place.weight
        return self.head(self.norm(self.blocks(x)))


def text() -> Tensor:
    source = "".join(inspect.getsource(module) for module in (argparse, ast, inspect, statistics, typing))
    return torch.frombuffer(bytearray(source.encode()), dtype=torch.uint8).long()


def train(keep: str, seed: int, steps: int) -> Measurement:
    torch.manual_seed(seed)
    model, data = Model(keep), text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH, 1))
        batch = data[starts + torch.arange(LENGTH + 1)]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Measurement(keep, seed, steps, losses[0], statistics.mean(losses[-LAST:]))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    rows: list[Measurement] = []
    for seed in range(arguments.seeds):
        for keep in KEEPS:
            rows.append(train(keep, seed, arguments.steps))
            print(asdict(rows[-1]), flush=True)
        save(arguments, rows)
    of = {keep: [row.last_loss for row in rows if row.keep == keep] for keep in KEEPS}
    for keep, losses in of.items():
        print(f"{keep}: mean {statistics.mean(losses):.4f}, standard deviation of seeds {statistics.stdev(losses):.4f}")
    differences = [h8 - kept for kept, h8 in zip(of["preactivation"], of["h8"], strict=True)]
    print(f"h8 minus preactivation at a seed: mean {statistics.mean(differences):+.4f}, at most {max(map(abs, differences)):.4f}")


if __name__ == "__main__":
    main()
