"""Random batches of known tokens, and how many bits of a layer's results for a token differ from those in another batch.

A case is a multiset of tokens of a pool in random order, with rows of padding that nobody compares, in one batch or several.
What a layer gives for each of its tokens is compared with what one batch of the whole pool gave.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moeblaze_ops
from tests.tools.documents import blocks

PAGE = Path(__file__).parents[2] / "docs" / "batch_invariance.md"

Results = tuple[Tensor, ...]
"""Of tokens: the output, the gradient of x, and that of the routing weights where they are seen."""


@dataclass(frozen=True)
class Sizes:
    """Widths of a layer; ``bias`` is that of the down projection."""

    D: int
    F: int
    E: int
    K: int
    activation: str = "swiglu"
    bias: bool = False
    weight_on: str = "output"


class Layer(nn.Module):
    """A router and its experts through the ops; ``delta`` is added to the routing weights, so that they have a gradient."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.sizes = sizes
        outputs = sizes.F * (2 if "glu" in sizes.activation else 1)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape, device=device) * shape[-1] ** -0.5).to(dtype))

        self.router, self.w_up = parameter(sizes.E, sizes.D), parameter(sizes.E, outputs, sizes.D)
        self.w_down = parameter(sizes.E, sizes.D, sizes.F)
        self.b_up, self.b_down = (parameter(sizes.E, outputs), parameter(sizes.E, sizes.D)) if sizes.bias else (None, None)

    def forward(self, x: Tensor, delta: Tensor, keep: str | None = None) -> Tensor:
        logits = torch.ops.moeblaze.router_logits(x, self.router)
        weights, experts = moeblaze_ops.route(logits, self.sizes.K, scoring="softmax_topk")
        options = {"activation": self.sizes.activation, "b_up": self.b_up, "b_down": self.b_down, "keep": keep}
        return moeblaze_ops.moe(
            x, weights + delta, experts, self.w_up, self.w_down, weight_on=self.sizes.weight_on, **options
        )


class WrittenLayer(Layer):
    """The same layer in plain PyTorch: sorted rows and grouped products. Its routing weights stay its own."""

    def forward(self, x: Tensor, delta: None = None, keep: str | None = None) -> Tensor:
        (T, _), K, E = x.shape, self.sizes.K, self.sizes.E
        logits, experts = torch.topk(F.linear(x, self.router), K, dim=-1)
        weights, flat = torch.softmax(logits, dim=-1, dtype=torch.float32), experts.reshape(-1)
        order = torch.argsort(flat, stable=True)
        offsets = torch.histc(flat.float() if x.is_cpu else flat.int(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
        h = torch._grouped_mm(x[order // K], self.w_up.transpose(1, 2), offs=offsets)
        if "glu" in self.sizes.activation:
            gate, up = h.chunk(2, dim=-1)
            a = F.silu(gate) * up
        else:
            a = F.silu(h)
        y = torch._grouped_mm(a, self.w_down.transpose(1, 2), offs=offsets)
        y = y * weights.reshape(-1)[order].unsqueeze(1)
        return y[torch.argsort(order)].view(T, K, -1).sum(1).to(x.dtype)


def contract_program() -> str:
    """The code of the page that computes a layer with its roundings, and compares."""
    return next(block.content for block in blocks(PAGE) if "def contract" in block.content)


class Pool:
    """Tokens and gradients of their outputs, and what ``layer`` gives for all of them in one batch."""

    def __init__(self, layer: Callable[..., Tensor], sizes: Sizes, dtype: torch.dtype, device: str, number: int) -> None:
        self.x = torch.randn(number, sizes.D, device=device).to(dtype)
        self.dout = torch.randn(number, sizes.D, device=device).to(dtype)
        self.K = sizes.K
        self.expected = run(layer, self.x, self.dout, self.K)


def run(layer: Callable[..., Tensor], x: Tensor, dout: Tensor, K: int | None) -> Results:
    """The results of one batch; K is None for a layer whose routing weights are its own."""
    x = x.detach().requires_grad_()
    delta = () if K is None else (torch.zeros(x.shape[0], K, device=x.device, requires_grad=True),)
    out = layer(x, *delta)
    return out.detach(), *torch.autograd.grad(out, [x, *delta], dout)


@dataclass(frozen=True)
class Case:
    """``tokens``: numbers in the pool, -1 for padding with ``filler``; ``ends``: where batches end."""

    tokens: Tensor
    filler: float
    ends: tuple[int, ...]


def draw(number: int, pool: int, most: int, generator: torch.Generator, sizes: tuple[int, ...] = ()) -> Iterator[Case]:
    """``number`` cases of up to ``most`` tokens, or of one of ``sizes`` in one batch."""

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(number):
        few = int(2 ** (18 * torch.rand((), generator=generator) ** 2))
        T = sizes[integer(0, len(sizes) - 1)] if sizes else min(most, few)
        # Skew: all tokens are copies of a few.
        distinct = (pool, pool, 1, 3, 17)[integer(0, 4)]
        chosen = torch.randint(pool, (distinct,), generator=generator) if distinct < pool else torch.arange(pool)
        tokens = chosen[torch.randint(len(chosen), (max(1, T),), generator=generator)]
        if integer(0, 1):
            tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.3, -1, tokens)
        cuts = 0 if sizes else integer(0, 2)
        ends = sorted({*(integer(1, len(tokens)) for _ in range(cuts)), len(tokens)})
        yield Case(tokens, (0.0, 1e4, float("nan"))[integer(0, 2)], tuple(ends))


def different_bits(pool: Pool, case: Case, run_batch: Callable[[Tensor, Tensor], Results]) -> int:
    """Numbers of the case's results that are not those of the pool, to the bit."""
    tokens = case.tokens.to(pool.x.device)
    is_token = (tokens >= 0).unsqueeze(1)
    x = torch.where(is_token, pool.x[tokens.clamp(min=0)], case.filler)
    dout = torch.where(is_token, pool.dout[tokens.clamp(min=0)], 0)
    parts, first = [], 0
    for end in case.ends:
        parts.append([result.clone() for result in run_batch(x[first:end], dout[first:end])])
        first = end
    wrong = 0
    for got, expected in zip(map(torch.cat, zip(*parts, strict=True)), pool.expected, strict=False):
        same = got.view(torch.uint8).view(len(got), -1) == expected[tokens.clamp(min=0)].view(torch.uint8).view(len(got), -1)
        wrong += int((~same.all(1) & is_token.squeeze(1)).sum())
    return wrong
