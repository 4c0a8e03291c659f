"""Shared by the tests that run kernels under Triton's interpreter, on CPU tensors."""

import os

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.corpus.layers import Layer, make_layer

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs kernels in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/interpreter",
)

SIZES = (5, 2, 40, 36)
"""E, K, D and F: wider than one block in every axis, and a multiple of none."""


def layer_for(*args, **keywords) -> Layer:
    """``make_layer`` of these sizes in fp32, without gradients, if not asked for otherwise."""
    return make_layer(*args, **{"dtype": torch.float32, "sizes": SIZES, "requires_grad": False} | keywords)


def mend_interpreter() -> None:
    """Two faults of Triton's interpreter, up to triton 3.9: it multiplies the bit patterns of bf16 values, and is slow.

    Each call of a device function replaces all of the language's functions, as the kernel that calls it did before: that is
    half of the time.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot
    if getattr(create_dot, "mended", False):
        return

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def mended_dot(self, a, b, *args):
        return create_dot(self, widen(a), widen(b), *args)

    mended_dot.mended = True
    interpreter.InterpreterBuilder.create_dot = mended_dot

    patch_lang, patched = interpreter._patch_lang, set()

    def patch_once(fn):
        """Modules of the language that ``fn`` sees, until the kernel that runs is done."""
        modules = {module.__name__ for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values())}
        if modules <= patched:
            return None  # to a device function, which does not look at it
        scope = patch_lang(fn)
        if not patched:  # a kernel
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.update(modules)
        return scope

    interpreter._patch_lang = patch_once


def oracle(name: str, *args):
    """Result of ``moeblaze::<name>`` on the CPU in fp64, on the values of ``args``."""

    def widen(value):
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.double() if is_float else value

    return getattr(torch.ops.moeblaze, name)(*tree_map(widen, args))


def assert_near(got, expected, used_rows: int | None = None, roundings: float = 4.0) -> None:
    """Every tensor of ``got`` is within a few roundings, of its own dtype, of the largest number in ``expected``.

    Results are sums of at most some tens of products in fp32, rounded once or twice to the result's dtype.
    ``used_rows`` limits the comparison to the rows that hold something.
    """
    for got_leaf, expected_leaf in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        assert got_leaf.shape == expected_leaf.shape
        got_rows, expected_rows = got_leaf[:used_rows].double(), expected_leaf[:used_rows].double()
        if got_rows.numel():
            tolerance = roundings * torch.finfo(got_leaf.dtype).eps * max(1.0, expected_rows.abs().max().item())
            torch.testing.assert_close(got_rows, expected_rows, rtol=0, atol=tolerance)


def poison_unused(routing, *buffers) -> None:
    """NaN in the rows of ``buffers`` that belong to no expert: kernels must not read them."""
    for buffer in buffers:
        buffer[int(routing[1][-1]) :] = float("nan")


def assert_half_a_step(got, h) -> None:
    """What is kept of h in 8 bits is within half a step of it: at most 1.25 times a 127th of a block's largest number."""
    blocks = torch.nn.functional.pad(h.double(), (0, -h.shape[2] % 16)).unflatten(2, (-1, 16))
    step = 1.2501 / 127 * blocks.abs().amax(3).repeat_interleave(16, 2)[..., : h.shape[2]]
    assert ((got - h).abs() <= 0.5 * step + 2.0**-41).all()
