"""Arrays of numpy that share memory with tensors: what they write, the tensors have; what they read is no obstacle."""

import numpy as np
import pytest
import torch

from moeblaze_ops import compile as moeblaze_compile
from tests.capture import test_capture as guarded
from tests.capture.test_capture import make_layer
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch", "fp64")


def _loop(self, x, weights, ids, before_expert=lambda e: None):
    out = torch.zeros_like(x)
    for e in range(len(self.experts)):
        before_expert(e)
        out = out + (weights * (ids == e)).sum(-1, keepdim=True) * self.experts[e](x)
    return out


def in_place(self, x, weights, ids):
    weights = weights.clone()
    array = weights.detach().numpy()

    def double(e):
        nonlocal array
        if e == 2:
            array *= 2

    return _loop(self, x, weights, ids, double)


def by_a_method(self, x, weights, ids):
    weights = weights.clone()
    return _loop(self, x, weights, ids, lambda e: weights.detach().numpy().fill(0.25) if e == 2 else None)


def by_the_last_argument(self, x, weights, ids):
    weights = weights.clone()
    array = weights.detach().numpy()
    return _loop(self, x, weights, ids, lambda e: np.add(array, 2, array) if e == 2 else None)


def by_the_only_other_argument(self, x, weights, ids):
    weights = weights.clone()
    array = weights.detach().numpy()
    return _loop(self, x, weights, ids, lambda e: np.negative(array, array) if e == 2 else None)


def of_ids(self, x, weights, ids):
    ids = ids.clone()
    array = ids.numpy()

    def others(e):
        if e == 2:
            array[:] = (array + 1) % 4

    return _loop(self, x, weights, ids, others)


class Counted(torch.nn.Module):
    """A layer that counts in an array which experts had tokens."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.router, self.array = layer, layer.router, np.zeros(4)

    def forward(self, x):
        weights, ids = self.router(x)
        out = torch.zeros_like(x)
        for e in range(4):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            self.array[e] += 1
            out.index_add_(0, token, self.layer.experts[e](x[token]) * weights[token, slot, None])
        return out


def reads(self, x, weights, ids):
    array = weights.detach().numpy()
    self.router.penalty += torch.from_numpy(array.max(0) * 0).sum()
    return _loop(self, x, weights, ids)


@pytest.mark.parametrize("combine", [in_place, by_a_method, by_the_last_argument, by_the_only_other_argument, of_ids])
def test_writes_of_arrays_are_seen(combine):
    guarded.check_twins(lambda: make_layer(combine))


def test_array_that_counts_experts_with_tokens():
    arrays = []

    def make():
        layer = Counted(make_layer(reads))
        arrays.append(layer.array)
        return layer

    guarded.assert_left_alone(guarded.check_twins(make))
    assert arrays[0].tolist() == arrays[1].tolist()


def test_arrays_that_are_read():
    layer = make_layer(reads)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        guarded.check(layer, torch.compile(layer, backend=backend, fullgraph=True))
    assert len(rewritten_in(records)) == 1
