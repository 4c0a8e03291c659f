"""As many places as the largest count of tokens of an expert: nothing is dropped, and only the data tell how many there are."""

import pytest
import torch
import torch.nn.functional as F

import moeblaze_ops
from tests.corpus.zoo.changed import changed
from tests.rewrite.shaped import test_tensor_capacity as of_numbers
from tests.rewrite.shaped.test_tensor_capacity import D, E, T


class Layer(of_numbers.Layer):
    """Experts that take the rows of their places; ``places`` gives ``combine`` [T, E, C] of the gates."""

    def forward(self, x):
        combine = self.capacity(self.gate(x).softmax(dim=1))
        rows = torch.einsum("sec,sm->ecm", combine.bool().to(x.dtype), x)
        parts = [expert(part.squeeze(0)) for expert, part in zip(self.experts, rows.chunk(E, 0), strict=True)]
        return torch.einsum("sec,ecm->sm", combine, torch.stack(parts))


def of_a_mask(gates):
    """DeepSpeed's gating of any number of experts, rounded up to a multiple of one rank."""
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, gates.topk(2, dim=1).indices, True)
    counts = mask.sum(dim=0).detach()
    capacity = torch.ceil(torch.max(counts) / 1).mul(1).to(counts.dtype)
    place = (torch.cumsum(mask, dim=0) - 1) * mask
    gates = gates * mask
    return torch.einsum("se,sec->sec", gates, F.one_hot(place, num_classes=capacity).to(gates.dtype))


def of_two_masks(gates):
    """Its gating of two experts: second choices stand behind all first ones."""
    first = F.one_hot(gates.argmax(dim=1), num_classes=E)
    second = F.one_hot(gates.masked_fill(first.bool(), float("-inf")).argmax(dim=1), num_classes=E)
    capacity = (first + second).sum(dim=0).max()
    before = first.sum(dim=0, keepdim=True)
    combine = 0
    for mask, place in ((first, first.cumsum(0) - 1), (second, second.cumsum(0) - 1 + before)):
        place = F.one_hot((place * mask).sum(dim=1), num_classes=capacity).to(gates.dtype)
        combine = combine + torch.einsum("se,sc->sec", gates * mask, place)
    return combine


def of_priorities(gates):
    """HunyuanImage-3.0's gating: places behind all first choices, and a capacity that is a number of Python's."""
    top_k, ids = gates.topk(2, dim=1)
    capacity = torch.max(torch.bincount(ids.flatten(), minlength=E)).item()
    mask = F.one_hot(ids.transpose(0, 1).reshape(-1), E).to(torch.int32)
    place = (torch.cumsum(mask, dim=0) * mask - 1).reshape(2, -1, E).transpose(0, 1).max(dim=1)[0]
    valid = torch.logical_and(place >= 0, place < capacity)
    dispatch = F.one_hot(place.masked_fill(~valid, 0), capacity).bool()
    dispatch = dispatch.masked_fill(~valid.unsqueeze(-1).expand(-1, -1, capacity), 0)
    return torch.einsum("te,tec->tec", gates, dispatch)


_ONE_HOT = "F.one_hot(place, num_classes=capacity).to(gates.dtype)"
_COMPARED = (_ONE_HOT, "(place.unsqueeze(-1) == torch.arange(capacity.item())).to(gates.dtype)")
compared = changed(of_a_mask, _COMPARED, name="compared")
_AT_MOST = ("torch.max(counts) / 1", "min(torch.max(counts), torch.tensor(len(gates))) / 1")
at_most_all = changed(of_a_mask, _AT_MOST, name="at_most_all")
_FEWER = ("place < capacity", "place < torch.bincount(ids.flatten(), minlength=E).min()")
that_drops = changed(of_priorities, _FEWER, name="that_drops")
_ROUNDED = "torch.ceil(torch.max(counts) / 1).mul(1).to(counts.dtype)"
_CAPACITIES = {
    "one_less": "torch.max(counts) - 1",
    "smallest": "counts.min()",
    "at_most_fewer": "min(counts.max(), torch.tensor(4))",
    "at_least": "max(counts.max(), torch.tensor(7)) - 1",
    "of_some_experts": "counts[:-1].max()",
    "of_tokens": "mask.sum(1).max()",
    "of_other_experts": "(mask & (gates > 0.3)).sum(0).max()",
    "rounded_down": "torch.floor(counts.max() / 2).mul(2).long()",
}
NEAR_MISSES = [changed(of_a_mask, _COMPARED, (_ROUNDED, new), name=name) for name, new in _CAPACITIES.items()]
NEAR_MISSES += [
    changed(of_a_mask, _COMPARED, ("dim=0) - 1) * mask", "dim=0)) * mask"), name="one_place_further"),
    changed(of_a_mask, _COMPARED, ("torch.cumsum(mask, dim=0)", "torch.cumsum(mask, dim=1)"), name="places_among_experts"),
    changed(of_two_masks, ("0) - 1 + before", "0) - 1"), name="places_taken_twice"),
    changed(of_priorities, ("minlength=E)", "minlength=E)[1:]"), name="priorities_of_some_experts"),
    changed(of_priorities, ("ids.flatten()", "ids[:, 0]"), name="priorities_of_first_choices"),
    changed(of_two_masks, ("(first + second)", "(first + second + 0 * first.flip(1))"), ("- 1 + before", "- 1 + before.flip(1)"),
            ("sum(dim=0).max()", "sum(dim=0).sum()"), name="behind_another_expert"),
]  # fmt: skip


SPELLINGS = (of_a_mask, at_most_all, compared, of_two_masks, of_priorities, that_drops)


@pytest.mark.parametrize("places", SPELLINGS, ids=lambda f: f.__name__)
def test_places_of_the_largest_count(places):
    of_numbers._check(Layer(places), 1)


def test_places_of_scaled_tokens():
    class Scaled(Layer):
        def forward(self, x):
            return super().forward(x * 1.25)

    of_numbers._check(Scaled(of_a_mask), 1)


def test_paths_of_einsums_compare_no_unknown_sizes(monkeypatch):
    """Where opt_einsum is installed, torch asks it for the order of three operands, and it compares sizes."""

    class Paths:
        def contract_path(self, equation, *operands, **options):
            sorted(operand.numel() for operand in operands)
            return [(0, 1)] * (len(operands) - 1), None

    class Weighted(Layer):
        def forward(self, x):
            combine = self.capacity(self.gate(x).softmax(dim=1))
            rows = torch.einsum("sec,sm->ecm", combine.bool().to(x.dtype), x)
            outputs = torch.stack([expert(part) for expert, part in zip(self.experts, rows, strict=True)])
            return torch.einsum("s,sec,ecm->sm", torch.full_like(x[:, 0], 0.5), combine, outputs)

    monkeypatch.setattr(torch.backends.opt_einsum.m, "enabled", True)
    monkeypatch.setattr(torch.backends.opt_einsum, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.opt_einsum, "get_opt_einsum", Paths)
    of_numbers._check(Weighted(of_priorities), 1)


@pytest.mark.parametrize("places", NEAR_MISSES, ids=lambda f: f.__name__)
def test_other_numbers_of_places(places):
    of_numbers._check(Layer(places), 0)


def test_reasons_name_places():
    """As many of a mask as its largest count are all of it, but that is not proven: ``explain`` says what to write of places."""
    chosen = "torch.zeros_like(mask).scatter_(0, mask.int().topk(capacity, dim=0).indices, True)"
    of_some = changed(of_a_mask, ("    place = ", f"    mask = mask & {chosen}\n    place = "), name="of_some")
    (candidate,) = moeblaze_ops.explain(Layer(of_some), torch.randn(T, D)).candidates
    assert "places [E, C]" in candidate.reason and "running count" in candidate.remedy


def test_places_out_of_range_still_raise():
    """``F.one_hot`` refuses what is no class, whatever is rewritten."""
    layer = Layer(changed(of_a_mask, (_ROUNDED, "counts.min()"), name="too_few")).double()
    with pytest.raises(RuntimeError):
        of_numbers._compiled(layer, torch.randn(T, D, dtype=torch.float64))
