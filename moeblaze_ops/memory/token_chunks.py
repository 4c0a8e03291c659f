"""How many tokens an expert layer takes at a time when it must not allocate more than a limit.

What a layer with ``keep="input"`` allocates besides its results grows with the tokens that it works on at once. Beyond
``config.max_layer_transient_bytes`` it goes through ranges of tokens, one after another in the same memory, so that
only x, the output and their gradients grow with T.
"""

from collections.abc import Iterator

import torch

from moeblaze_ops import config
from moeblaze_ops.kernels.devices import memory_bytes

CHUNK_MULTIPLE = 1024
"""Tokens by which chunks grow, and of the smallest one: fewer would leave most of a GPU idle."""

_DEVICE_SHARE = 16
"""By default a layer's transients get this part of a device's memory."""
PARTIAL_COLUMNS = 128
"""Columns of F behind one partial sum of the routing weights' gradient."""
_ROUTING_BYTES = 24
"""Bytes of a slot in the routing, in what makes it, and in its weight's gradient."""
_NO_LIMIT = 1 << 60


def tokens_per_chunk(D: int, F: int, K: int, dtype: torch.dtype, gated: bool, device: torch.device) -> int:
    """Tokens that an expert layer without kept pre-activations takes at a time.

    The largest multiple of 1024 for which the transient buffers of its backward stay below
    ``config.max_layer_transient_bytes``, but at least 1024. Those of forward are smaller.

    Args:
        D: model width. F: hidden width of an expert. K: experts per token.
        dtype: of x and the weights. gated: the activation has a gate and an up half.
        device: where the layer runs; without a limit in the configuration, it sets it.
    """
    return _tokens_per_chunk(D, F, K, dtype, gated, layer_limit(device))


def _tokens_per_chunk(D: int, F: int, K: int, dtype: torch.dtype, gated: bool, limit: int) -> int:
    """As a function of constants alone, so that a graph with a symbolic T can compare with a number."""
    return max(1, limit // transient_bytes(D, F, K, dtype, gated) // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


def layer_limit(device: torch.device) -> int:
    """Bytes that an expert layer on ``device`` may allocate besides its results, by the configuration or by default."""
    return _layer_limit(device.type, device.index, config.max_layer_transient_bytes)


def _layer_limit(device_type: str, device_index: int | None, limit: int | None) -> int:
    if limit is not None:
        return limit
    if device_type != "cuda" or not torch.cuda.is_available():
        return _NO_LIMIT
    return memory_bytes(device_index) // _DEVICE_SHARE


# What `torch.compiler.assume_constant_result` does, without importing the compiler with this package.
_tokens_per_chunk._dynamo_marked_constant = True  # type: ignore[attr-defined]
_layer_limit._dynamo_marked_constant = True  # type: ignore[attr-defined]


def transient_bytes(D: int, F: int, K: int, dtype: torch.dtype, gated: bool) -> int:
    """Bytes that a token needs in backward, beyond its x, output and gradients of both.

    The gradient of h, and beside it the scaled activation with the partial sums of the routing weights' gradient, later
    the rows that are summed to the gradient of x; the routing; the gradient of x before it is in its place.
    """
    number = dtype.itemsize
    partials = -(-F // PARTIAL_COLUMNS) + 1
    dh = number * (2 if gated else 1) * F
    return K * (dh + max(number * F + 4 * partials, number * D) + _ROUTING_BYTES) + number * D


def token_ranges(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Consecutive ranges of at most ``chunk_tokens`` tokens, as equal as multiples of 128 allow; one range if T is 0."""
    num_chunks = max(1, -(-num_tokens // chunk_tokens))
    size = min(chunk_tokens, -(-num_tokens // num_chunks // 128) * 128)
    for start in range(0, max(1, num_tokens), max(1, size)):
        yield slice(start, min(start + size, num_tokens))
