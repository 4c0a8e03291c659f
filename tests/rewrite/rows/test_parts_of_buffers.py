"""Experts add their rows to a part of a larger buffer: a row, a slice, a column of it."""

import pytest
import torch
from torch import nn

from moeblaze_ops import compile as moeblaze_compile
from moeblaze_ops import explain
from tests.corpus.zoo.catalogue import BareMLP, D
from tests.tools.rewrite_harness import compiled, rewrite_of, rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch")

B, S, E = 2, 9, 3


class Layer(nn.Module):
    """``combine(layer, x)`` adds up what experts make of sequences ``[B, S, D]``."""

    def __init__(self, combine):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.shared = nn.Linear(D, E, bias=False), nn.Linear(D, D)
        self.experts = nn.ModuleList(BareMLP() for _ in range(E))
        self.combine = combine

    def expert(self, e, rows):
        return self.experts[e](rows)

    def add(self, out, x, after=lambda e: None):
        """Add the layer of tokens ``[S, D]`` to rows, and do something ``after`` each expert."""
        weights, ids = self.router(x).softmax(dim=-1).topk(2)
        for e in range(E):
            token, k = torch.where(ids == e)
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, k, None])
            after(e)

    def dense(self, x):
        weights, ids = self.router(x).softmax(dim=-1).topk(2)
        return [self.expert(e, x) * (weights * (ids == e)).sum(dim=-1, keepdim=True) for e in range(E)]

    def forward(self, x):
        return self.combine(self, x)


def rows(layer, x):
    out = torch.zeros_like(x)
    for b in range(len(x)):
        layer.add(out[b], x[b])
    return out


def rows_of_a_tensor(layer, x):
    weights, ids = layer.router(x).softmax(dim=-1).topk(2)
    out = torch.zeros_like(x)
    for b in range(len(x)):
        for e in range(E):
            token, k = torch.where(ids[b] == e)
            out[b][token] += layer.expert(e, x[b][token]) * weights[b][token, k, None]
    return out


def rows_by_two_subscripts(layer, x):
    out = torch.zeros_like(x)
    for b in range(len(x)):
        weights, ids = layer.router(x[b]).softmax(dim=-1).topk(2)
        for e in range(E):
            token, k = torch.where(ids == e)
            out[b, token] += layer.expert(e, x[b, token]) * weights[token, k, None]
    return out


def sequences_in_the_inner_loop(layer, x):
    weights, ids = layer.router(x).softmax(dim=-1).topk(2)
    out = torch.zeros_like(x)
    for e in range(E):
        for b in range(len(x)):
            token, k = torch.where(ids[b] == e)
            out[b].index_add_(0, token, layer.expert(e, x[b][token]) * weights[b][token, k, None])
    return out


def columns(layer, x):
    x = x.transpose(0, 1).contiguous()
    out = torch.zeros_like(x)
    for b in range(x.shape[1]):
        layer.add(out[:, b], x[:, b])
    return out


def turned(layer, x):
    out = torch.zeros(x.shape[1], x.shape[0], D, dtype=x.dtype).transpose(0, 1)
    for b in range(len(x)):
        layer.add(out[b], x[b])
    return out


def features(layer, x):
    out = x.new_zeros(len(x) * x.shape[1], 2 * D)
    layer.add(out[:, :D], x.flatten(0, 1))
    layer.add(out[:, D:], x.flatten(0, 1).tanh())
    return out


def every_other(layer, x):
    x = x.flatten(0, 1)
    out = torch.zeros_like(x)
    layer.add(out[::2], x[::2])
    layer.add(out[1::2], x[1::2])
    return out


def slices_in_place(layer, x):
    out = torch.zeros_like(x)
    for b in range(len(x)):
        for y in layer.dense(x[b : b + 1].flatten(0, 1)):
            out[b : b + 1] += y
    return out


def sums_stored(layer, x):
    out = torch.zeros_like(x)
    for b in range(len(x)):
        for y in layer.dense(x[b]):
            out[b] = out[b] + y
    return out


def onto_what_is_stored(layer, x):
    out = torch.empty_like(x)
    for b in range(len(x)):
        out[b] = layer.shared(x[b])
        layer.add(out[b], x[b])
    return out


def onto_a_copy(layer, x):
    out = x.clone()
    for b in range(len(x)):
        layer.add(out[b], x[b])
    return out


def doubled_afterwards(layer, x):
    out = torch.zeros_like(x)
    for b in range(len(x)):
        layer.add(out[b], x[b])
        out[b].mul_(2)
    return out, out[0], out.sum()


def without_rows(layer, x):
    out = torch.zeros_like(x)
    for b in range(len(x)):
        weights, ids = layer.router(x[b]).softmax(dim=-1).topk(2)
        for e in range(E):
            token, k = torch.where(ids == e)
            if len(token) == 0:
                continue
            out[b].index_add_(0, token, layer.expert(e, x[b][token]) * weights[token, k, None])
    return out


def others_read_between(layer, x):
    out, seen = torch.zeros_like(x), []
    for b in range(len(x)):
        layer.add(out[b], x[b], lambda e, b=b: seen.append(out[b - 1].sum() / out.shape[1]) if e == 1 else None)
    return out, *seen


SPELLINGS = [
    rows, rows_of_a_tensor, rows_by_two_subscripts, sequences_in_the_inner_loop, columns, turned, features, every_other,
    slices_in_place, sums_stored, onto_what_is_stored, onto_a_copy, doubled_afterwards, without_rows, others_read_between,
]  # fmt: skip


def trained(layer, run, x):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    results = run(x * 1)
    results = results if isinstance(results, tuple) else (results,)
    sum((y * torch.arange(1.0, y.numel() + 1, dtype=x.dtype).view(y.shape)).sum() for y in results).backward()
    zero = torch.zeros((), dtype=x.dtype)
    gradients = [zero if parameter.grad is None else parameter.grad.clone() for parameter in layer.parameters()]
    return results, [y.stride() for y in results if 1 not in y.shape], x.grad, gradients


def layers_of(combine, *batches):
    """How many layers are rewritten; results and gradients agree with eager mode for each batch."""
    layer = Layer(combine).to(batches[0].dtype)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        run = torch.compile(layer, backend=backend)
        for x in batches:
            torch.testing.assert_close(trained(layer, run, x), trained(layer, layer, x))
    return len(rewritten_in(records))


def batch(*sizes):
    torch.manual_seed(1)
    return torch.randn(*sizes, D, dtype=torch.float64)


@pytest.mark.parametrize("combine", SPELLINGS)
def test_parts_are_layers(combine):
    """Each third with another number of tokens as well, which is a symbol then."""
    batches = batch(B, S), batch(B, S + 2)
    batches = batches if SPELLINGS.index(combine) % 3 == 0 else batches[:1]
    assert layers_of(combine, *batches) == len(batches) * B


@pytest.mark.parametrize(("combine", "tokens"), [(rows, 0), (rows, 1), (rows_of_a_tensor, 2), (columns, 0), (features, 1)])
def test_few_tokens(combine, tokens):
    layers_of(combine, batch(B, tokens))


@pytest.mark.parametrize(("combine", "num_sequences"), [
    (rows_of_a_tensor, 1), (sequences_in_the_inner_loop, 3), (sums_stored, 1), (without_rows, 3),
])  # fmt: skip
def test_number_of_sequences(combine, num_sequences):
    assert layers_of(combine, batch(num_sequences, S)) == num_sequences


def test_all_tokens_to_one_expert():
    def combine(layer, x):
        out = torch.zeros_like(x)
        for b in range(len(x)):
            share, chosen = (layer.router(x[b]) * 0 + torch.arange(E)).softmax(dim=-1).max(dim=-1)
            for e in range(E):
                rows = chosen == e
                out[b][rows] = layer.expert(e, x[b][rows]) * share[rows, None]
        return out

    assert layers_of(combine, batch(B, S)) == B


def test_read_without_gradient_afterwards():
    """What is read there is stored before gradients are off."""

    def combine(layer, x):
        out = rows(layer, x)
        with torch.no_grad():
            seen = out.mean()
        return out, seen + out.sum()

    assert layers_of(combine, batch(B, S)) == B


def test_explain_runs_what_it_stores():
    """Without AOTAutograd: views that are older than the buffer's first gradient may not be written to."""
    candidates = explain(Layer(sequences_in_the_inner_loop).double(), batch(B, S)).candidates
    assert [candidate.reason for candidate in candidates] == [None] * B


def test_results_of_writes_are_read():
    def combine(layer, x):
        weights, ids = layer.router(x[0]).softmax(dim=-1).topk(2)
        out = torch.zeros_like(x)
        part = out[0]
        for e in range(E):
            token, k = torch.where(ids == e)
            part = part.index_add_(0, token, layer.expert(e, x[0][token]) * weights[token, k, None])
        first, later = part.unsqueeze(0), part[1:]
        out[1] = 3.0
        return out, first * 1, part, later

    assert layers_of(combine, batch(B, S)) == 1


def test_the_last_of_several_shapes():
    """A part may have an axis more, and be read as it is flat."""

    def combine(layer, x):
        out = torch.zeros_like(x)
        for b in range(len(x)):
            part = out[b]
            for y in layer.dense(x[b]):
                out[b : b + 1] += y
            part.view(-1).mul_(torch.arange(part.numel()))
            out[b].unsqueeze(0).mul_(2)
        return out

    assert layers_of(combine, batch(B, S)) == B


def test_a_part_alone_is_given():
    """It has the strides of a part."""

    def combine(layer, x):
        part = x.new_zeros(S, D + 3)[:, :D]
        layer.add(part, x[0])
        return part

    assert layers_of(combine, batch(B, S)) == 1


@pytest.mark.parametrize("subscript", [(slice(None), torch.tensor([1])), [3]], ids=["columns", "rows"])
def test_what_is_stored_behind_a_layer(subscript):
    def combine(layer, x):
        out = torch.zeros_like(x[0])
        first = out[:1]
        layer.add(out, x[0])
        out[subscript] = 0.5
        return out, first * 2

    assert layers_of(combine, batch(B, S)) == 1


def test_a_part_is_stored_elsewhere():
    def combine(layer, x):
        out, other = torch.zeros_like(x), torch.zeros_like(x[0])
        layer.add(out[0], x[0])
        other[:] = out[0]
        return out, other

    assert layers_of(combine, batch(B, S)) == 1


def test_a_buffer_is_stored_in_itself():
    def combine(layer, x):
        out = torch.zeros_like(x)
        layer.add(out[0], x[0])
        out[0:1] = out
        return out

    layers_of(combine, batch(1, S))


@pytest.mark.parametrize("copy", [torch.Tensor.contiguous, torch.flatten, lambda part: part.reshape(-1, 3)])
@pytest.mark.parametrize("write", [lambda part, y: part.mul_(2), lambda part, y: y.mul_(2)], ids=["part", "copy"])
def test_a_part_with_gaps_is_copied(copy, write):
    """A view of it may not be contiguous, but one of what holds it is."""

    def combine(layer, x):
        out = x.new_zeros(S, 2 * D)
        part = out[:, :D]
        layer.add(part, x[0])
        y = copy(part)
        write(part, y)
        return out, y

    assert layers_of(combine, batch(B, S)) == 1


@pytest.mark.parametrize("change", [lambda part: part.t_(), lambda part: part.unsqueeze_(0), lambda part: part.cumsum_(0)])
def test_a_part_is_changed_in_another_way(change):
    def combine(layer, x):
        out = torch.zeros_like(x)
        part = out[0]
        layer.add(part, x[0])
        change(part)
        return out, part * 1

    layers_of(combine, batch(B, S))


def test_a_row_of_the_result_is_read_by_an_older_view():
    def combine(layer, x):
        out = torch.zeros_like(x[0])
        first_row = out[0]
        layer.add(out, x[0])
        return out, first_row * 2

    assert layers_of(combine, batch(B, S)) == 1


def read_and_measured(out):
    rows = out[1] * 2
    with torch.no_grad():
        size = out.mean()
    return rows + size


@pytest.mark.parametrize("read", [lambda out: out[1] * 2, read_and_measured], ids=["another part", "and measured"])
def test_gradients_of_what_nobody_reads_are_zeros(read):
    """A part is stored for those who learn by the buffer: without them it has no gradient, where it has one of zeros."""

    def combine(layer, x):
        out = torch.zeros_like(x)
        for b in range(len(x)):
            for y in layer.dense(x[b]):
                out[b] += y
            layer = other
        return read(out)

    other, layer = Layer(None).double(), Layer(combine).double()
    results = []
    for run in (torch.compile(layer, backend=compiled(layer)[1]), layer):
        layer.zero_grad()
        run(batch(B, S)).sum().backward()
        results.append([parameter.grad is None for parameter in layer.parameters()])
    assert results[0] == results[1]


def test_several_views_of_one_operator():
    def combine(layer, x):
        out = layer.shared(x)
        for y in layer.dense(x[0]):
            out[0] += y
        first, *_ = out.unbind(0)
        return out, first.sum()

    layer = Layer(combine).double()
    assert all(candidate.reason for candidate in explain(layer, batch(B, S)).candidates)


def test_other_buffers_stay_as_they_are():
    """No part is copied to which no layer is added."""

    def combine(layer, x):
        out, other, seen = torch.zeros_like(x), torch.zeros_like(x), 0.0
        for y in layer.dense(x[0]):
            out[0] += y
        for y in layer.dense(x[1].tanh()):
            other[1] += y
            seen = seen + other.sum()
        return out, other, seen

    backend = rewrite_of(Layer(combine).double(), batch(B, S))
    assert len(backend.rewritten) == 1 and backend.operators().count("copy_") == 1


def test_parts_that_overlap():
    """The second is added to what the first made."""

    def combine(layer, x):
        x = x.flatten(0, 1)
        out = torch.zeros_like(x)
        for start in (0, 5):
            for y in layer.dense(x[start : start + 9]):
                out[start : start + 9] += y
        return out, out[7:] * 2

    assert layers_of(combine, batch(B, S)) >= 1


def read_between(layer, x):
    out, seen = torch.zeros_like(x), []
    layer.add(out[0], x[0], lambda e: seen.append(out.sum()) if e == 1 else None)
    return out, *seen


def part_read_between(layer, x):
    out, seen = torch.zeros_like(x), []
    layer.add(out[0], x[0], lambda e: seen.append(out[0].sum()) if e == 1 else None)
    return out, *seen


def overlapping_part_written_between(layer, x):
    out = torch.zeros_like(x)
    layer.add(out[0], x[0], lambda e: out.view(-1, D)[5:14].add_(1) if e == 1 else None)
    return out


def overlapping_part_stored_between(layer, x):
    out = torch.zeros_like(x)
    layer.add(out[0], x[0], lambda e: out.__setitem__((slice(None), slice(2)), 0.5) if e == 1 else None)
    return out


def whole_doubled_between(layer, x):
    out = torch.zeros_like(x)
    layer.add(out[0], x[0], lambda e: out.mul_(2) if e == 1 else None)
    return out


def another_part_added_between(layer, x):
    out = layer.shared(x)
    layer.add(out[0], x[0], lambda e: out[0].add_(out[1]) if e == 1 else out[1].mul_(2))
    return out


def stored_in_itself_between(layer, x):
    out = torch.zeros_like(x)
    layer.add(out[0], x[0], lambda e: out.__setitem__(0, out.sum(0)) if e == 1 else None)
    return out


def the_other_way_round_between(layer, x):
    x = x[0, :D]
    out = torch.zeros_like(x) + layer.shared(x).mean()
    layer.add(out, x, lambda e: out.t()[0].add_(1) if e == 1 else None)
    return out


def bits_read_between(layer, x):
    out, seen = torch.zeros_like(x), []
    layer.add(out[1], x[1], lambda e: seen.append(out.view(torch.int32)[1].float().sum()) if e == 1 else None)
    return out, *seen


def flat_slice_read_between(layer, x):
    out, seen = x.new_zeros(S, 2 * D), []
    layer.add(out[:, :D], x[0], lambda e: seen.append(out.view(-1)[D + 2 : 2 * D + 2].sum()) if e == 1 else None)
    return out, *seen


def one_of_two_parts_read_between(layer, x):
    out, seen = torch.zeros_like(x), []
    parts = [layer.dense(tokens) for tokens in x]
    for e in range(E):
        for b in range(len(x)):
            out[b] += parts[b][e]
        if e == 1:
            seen.append(out.view(-1, D)[S + 2 :].sum())
    return out, *seen


def seen_by_the_caller(layer, x):
    tokens = x * 1
    for b in range(len(x)):
        layer.add(x[b], tokens[b])
    return x


def not_seen_by_autograd(layer, x):
    out = layer.shared(x)
    for b in range(len(x)):
        layer.add(out.detach()[b], x[b])
    return out


def without_gradient(layer, x):
    out = layer.shared(x)
    for b in range(len(x)):
        with torch.no_grad():
            layer.add(out[b], x[b])
    return out


NEAR_MISSES = [
    read_between, part_read_between, overlapping_part_written_between, overlapping_part_stored_between, whole_doubled_between,
    another_part_added_between, stored_in_itself_between, the_other_way_round_between, seen_by_the_caller, not_seen_by_autograd,
    without_gradient, one_of_two_parts_read_between, bits_read_between, flat_slice_read_between,
]  # fmt: skip


@pytest.mark.parametrize("combine", NEAR_MISSES)
def test_near_misses(combine):
    assert layers_of(combine, batch(B, S)) == 0
