"""Capacities that are tensors of numbers alone, as DeepSpeed's and InternEvo's gates have them: torch knows their element."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops import compile as moeblaze_compile
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

D, H, E, T = 8, 16, 4, 18


def of_tensors(gates, factor, least):
    capacity = torch.ceil((gates.shape[0] / gates.shape[1]) * torch.tensor(factor)).to(torch.int64)
    if capacity < torch.tensor(least):
        capacity = torch.tensor(least).to(torch.int64)
    return capacity


def of_a_number(gates, factor, least):
    capacity = of_tensors(gates, factor, least)
    return int(capacity + torch.tensor(0.75)) if capacity > 1 else capacity.item()


def by_the_larger(gates, factor, least):
    return torch.max(torch.ceil(gates.shape[0] / gates.shape[1] * torch.tensor(factor)).long(), torch.tensor(least))


def is_changed(gates, factor, least):
    """Written to before it is read: not the number that it was made of."""
    capacity = torch.tensor(1)
    capacity += max(math.ceil(gates.shape[0] / gates.shape[1] * factor), 2)
    return capacity.sub_(1)


def of_the_gates(gates, factor, least):
    """A number that the data tell."""
    capacity = (gates * 0).sum().long() + 4
    return torch.tensor(5) if capacity < least else capacity


def of_no_numbers(gates, factor, least):
    """A tensor that has no element is beside them."""
    return of_tensors(gates, factor, least) + torch.tensor([]).sum().long()


class Layer(nn.Module):
    def __init__(self, capacity, factor=1.0, least=4, late=False):
        super().__init__()
        self.capacity, self.numbers, self.late = capacity, (factor, least), late
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D)) for _ in range(E))

    def forward(self, x):
        gates = self.gate(x).softmax(dim=1)
        capacity = self.capacity(gates, *self.numbers)
        mask = F.one_hot(gates.argmax(dim=1), num_classes=E)
        place = torch.cumsum(mask, dim=0) - 1
        mask = mask * torch.lt(place, capacity)
        if self.late:
            capacity.add_(2)
        place = F.one_hot((place * mask).sum(1), num_classes=capacity).to(x.dtype)
        combine = torch.einsum("se,sc->sec", gates * mask, place)
        rows = torch.einsum("sec,sm->ecm", combine.bool().to(x.dtype), x)
        parts = [expert(part.squeeze(0)) for expert, part in zip(self.experts, rows.chunk(E, 0), strict=True)]
        return torch.einsum("sec,ecm->sm", combine, torch.cat(parts, 0).view(E, -1, D))


def _compiled(layer, x):
    torch._dynamo.reset()
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        results = []
        for run in (torch.compile(layer, backend=backend), layer):
            layer.zero_grad()
            own = x.clone().requires_grad_()
            out = run(own)
            out.square().sum().backward()
            results.append([out.detach(), own.grad, *(p.grad for p in layer.parameters())])
    return *results, len(rewritten_in(records))


def _check(layer, rewritten):
    torch.manual_seed(0)
    actual, expected, found = _compiled(layer.double(), torch.randn(T, D, dtype=torch.float64))
    torch.testing.assert_close(actual, expected)
    assert found == rewritten


# With a factor of ten no token is dropped, whatever the capacity.
CASES = (
    (of_tensors, 10.0, 4), (of_tensors, 0.1, 3), (of_a_number, 0.1, 3), (by_the_larger, 1.1, 4), (is_changed, 1.0, 4),
    (of_no_numbers, 1.1, 4),
)  # fmt: skip


@pytest.mark.parametrize(("capacity", "factor", "least"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_capacity_of_numbers(capacity, factor, least):
    _check(Layer(capacity, factor, least), 1)


def test_capacity_that_is_raised_afterwards():
    """Tokens are dropped by the number that it was before."""
    _check(Layer(of_tensors, 0.5, 2, late=True), 1)


def test_capacity_that_is_not_known():
    _check(Layer(of_the_gates), 0)
