"""Quantised weights as modules that give them back: stand-ins for the codecs of libraries, small enough to read."""

import torch
from torch import Tensor, nn

_LEVELS = torch.linspace(-1, 1, 16, dtype=torch.float64)
BLOCK = 8


class Int8(nn.Module):
    """One number of 8 bits a weight and a scale for each row."""

    def __init__(self, w: Tensor):
        super().__init__()
        scales = w.abs().amax(-1, keepdim=True) / 127
        self.register_buffer("codes", (w / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self) -> Tensor:
        return self.codes.to(self.scales.dtype) * self.scales


class NF4(nn.Module):
    """Two numbers of 4 bits a byte, which a table maps to levels, and a scale for each BLOCK weights."""

    def __init__(self, w: Tensor):
        super().__init__()
        blocks = w.unflatten(-1, (-1, BLOCK))
        scales = blocks.abs().amax(-1)
        codes = ((blocks / scales.unsqueeze(-1)).unsqueeze(-1) - _LEVELS.to(w)).abs().argmin(-1).to(torch.uint8).flatten(-2)
        self.register_buffer("codes", (codes[..., ::2] << 4) | codes[..., 1::2])
        self.register_buffer("scales", scales)
        self.register_buffer("levels", _LEVELS.to(w))

    def forward(self) -> Tensor:
        return _unpacked(self.codes, self.scales, self.levels)


def _unpacked(codes: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    levels_of = levels[torch.stack((codes >> 4, codes & 15), -1).flatten(-2).long()]
    return (levels_of.unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)).flatten(-2)


@torch.library.custom_op("moeblaze_tests::unpacked", mutates_args=())
def unpacked(codes: Tensor, scales: Tensor) -> Tensor:
    """``NF4`` as one operator, without a gradient."""
    return _unpacked(codes, scales, _LEVELS.to(scales))


@unpacked.register_fake
def _(codes: Tensor, scales: Tensor) -> Tensor:
    return scales.new_empty((*codes.shape[:-1], 2 * codes.shape[-1]))
