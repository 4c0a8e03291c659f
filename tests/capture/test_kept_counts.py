"""Counts of tokens in a tensor that is made of numbers on the host: it is made of what was counted, instead."""

import pytest
import torch
from torch import nn

from moeblaze_ops import compile as moeblaze_compile
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch", "fp64")

T, E, D, F = 12, 4, 6, 5


class Switch(nn.Module):
    """labml's layer: one expert for each token, and how many tokens each has; ``counted(x, parts)`` are these."""

    def __init__(self, counted):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, F), nn.ReLU(), nn.Linear(F, D)) for _ in range(E))
        self.switch, self.counted = nn.Linear(D, E), counted

    def forward(self, x):
        probs = self.switch(x).softmax(dim=-1)
        most, routes = torch.max(probs, dim=-1)
        parts = [torch.eq(routes, i).nonzero(as_tuple=True)[0] for i in range(E)]
        counts = self.counted(x, parts)
        outputs = [self.experts[i](x[parts[i], :]) for i in range(E)]
        out = x.new_zeros(x.shape)
        for i in range(E):
            out[parts[i], :] = outputs[i]
        return out * most.view(-1, 1), counts, probs.sum(0)


def by_length(x, parts):
    return x.new_tensor([len(part) for part in parts])


def by_shape(x, parts):
    return parts[0].new_tensor([parts[e].shape[0] for e in (2, 0, 1, 3)])


def multiples(x, parts):
    return x.new_tensor([2 * len(part) for part in parts])


def of_a_part(x, parts):
    return x.new_tensor([len(part[:2]) for part in parts])


def in_a_list(x, parts):
    return [len(part) for part in parts]


def in_a_tensor(x, parts):
    return torch.tensor([part.numel() for part in parts], device=x.device)


def in_a_tensor_of_floats(x, parts):
    return torch.tensor([len(part) for part in parts], dtype=torch.float32, device=x.device)


def in_a_leaf(x, parts):
    return torch.tensor([len(part) for part in parts], dtype=x.dtype, device=x.device, requires_grad=True)


def wherever_tensors_are_made(x, parts):
    return torch.tensor([len(part) for part in parts])


def in_32_bits(x, parts, dtype=torch.int32):
    load = torch.zeros(E, dtype=dtype)
    for e, part in enumerate(parts):
        load[e] += len(part)
    return torch.stack([load[e] + len(part) for e, part in enumerate(parts)])


def in_16_bits(x, parts):
    """More rows than it holds would be an error."""
    return in_32_bits(x, parts, torch.int16)


def trained(layer, run, x):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out, counts, probs = run(x)
    (out.square().sum() + probs[0]).backward()
    return out, counts, probs, x.grad, [parameter.grad.clone() for parameter in layer.parameters()]


@pytest.mark.parametrize(
    ("counted", "number"),
    [
        (by_length, 1), (by_shape, 1), (in_a_tensor, 1), (in_a_tensor_of_floats, 1), (in_32_bits, 1), (of_a_part, 1),
        (multiples, 0), (in_a_list, 0), (in_a_leaf, 0), (wherever_tensors_are_made, 0), (in_16_bits, 0),
    ],  # fmt: skip
    ids=lambda of: getattr(of, "__name__", ""),
)
def test_counts_in_a_tensor(counted, number):
    layer = Switch(counted).double()
    x = torch.randn(T, D, dtype=torch.float64)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        torch.testing.assert_close(trained(layer, torch.compile(layer, backend=backend), x), trained(layer, layer, x))
    assert len(rewritten_in(records)) == number


def test_masks_that_are_written_to():
    """What was true when it was counted is no longer."""

    def forward(x, ids, up, down):
        masks, out = [ids == e for e in range(E)], torch.zeros_like(x)
        parts = [mask.nonzero(as_tuple=True)[0] for mask in masks]
        for mask in masks:
            mask.logical_not_()
        for e, part in enumerate(parts):
            out[part] = torch.relu(x[part] @ up[e]) @ down[e]
        return out, x.new_tensor([len(part) for part in parts])

    torch.manual_seed(0)
    operands = torch.randn(T, D), torch.randn(T, E).argmax(-1), torch.randn(E, D, F), torch.randn(E, F, D)
    with rewriting_backend() as backend, moeblaze_compile.recording():
        torch.testing.assert_close(torch.compile(forward, backend=backend)(*operands), forward(*operands))
