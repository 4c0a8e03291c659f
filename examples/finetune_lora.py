"""Train low-rank adapters on frozen experts: a teacher's layer is the base with a low-rank change, and the student learns that.

    python examples/finetune_lora.py            # some seconds on a CPU
    python examples/finetune_lora.py --rank 2   # fewer ranks than the change has: the loss stays above zero
"""

import argparse

import torch
from torch import Tensor, nn

import moeblaze_ops

D, F, E, K, CHANGE = 64, 96, 8, 2, 4
SCALE = 2.0


class LoRAExperts(nn.Module):
    """Frozen experts with adapters; B starts at zero, so that training starts from the base."""

    def __init__(self, base: moeblaze_ops.MoE, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.up_a, self.up_b = nn.Parameter(torch.randn(E, rank, D) / D**0.5), nn.Parameter(torch.zeros(E, 2 * F, rank))
        self.down_a, self.down_b = nn.Parameter(torch.randn(E, rank, F) / F**0.5), nn.Parameter(torch.zeros(E, D, rank))

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = moeblaze_ops.route(self.base.router(x), K, renormalize=True)
        lora = {"lora_up": (self.up_a, self.up_b, SCALE), "lora_down": (self.down_a, self.down_b, SCALE)}
        return moeblaze_ops.moe(x, weights, experts, self.base.w_up, self.base.w_down, **lora)

    @torch.no_grad()
    def merged(self) -> moeblaze_ops.MoE:
        """The same function as a plain layer."""
        layer = moeblaze_ops.MoE(D, F, E, K)
        layer.load_state_dict(self.base.state_dict())
        layer.w_up += SCALE * self.up_b @ self.up_a
        layer.w_down += SCALE * self.down_b @ self.down_a
        return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=5e-3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    base = moeblaze_ops.MoE(D, F, E, K)
    teacher = LoRAExperts(base, CHANGE)
    for factor in (teacher.up_b, teacher.down_b):
        nn.init.normal_(factor, std=0.2)
    student = LoRAExperts(base, arguments.rank)
    learned = [p for p in student.parameters() if p.requires_grad]
    print(f"training {sum(p.numel() for p in learned):,} of {sum(p.numel() for p in student.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(learned, lr=arguments.lr, weight_decay=0.0)
    for step in range(arguments.steps + 1):
        x = torch.randn(512, D)
        with torch.no_grad():
            wanted = teacher(x)
        loss = (student(x) - wanted).square().mean() / wanted.square().mean()
        if step % 50 == 0:
            print(f"step {step:4d}  relative loss {loss.item():.4f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = torch.randn(512, D)
    print("merged weights agree:", torch.allclose(student(x), student.merged()(x), atol=1e-4))


if __name__ == "__main__":
    main()
