"""Random numbers of a seed and a place, as ``moeblaze_ops.arguments.draws`` has them bit for bit."""

import triton
import triton.language as tl


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def draw(seed, row, column):
    """A multiple of ``2 ** -23`` in [0, 1), fp32: the digits of a number in [1, 2). ``seed``: fp32; the place: integers."""
    own = _mixed(row.to(tl.uint32) ^ _mixed(seed.to(tl.uint32)))
    bits = own + column.to(tl.uint32) * 0x9E3779B1
    bits = (bits ^ (bits >> 16)) * 0x21F0AAAD
    bits = (bits ^ (bits >> 15)) * ((own >> 1) | 1)
    return ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
