"""What the work of a branch on data says of sizes holds where the work is done, and nowhere else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moeblaze_ops import compile as moeblaze_compile
from tests.capture.test_branches import D, E, K, Layer, T, check, gradients, rows
from tests.corpus.zoo.sorted import mm_of_groups
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch")


def asserts(token, x, few):
    torch._check(token.numel() == few)


def adds(token, x, few):
    x[token] + x[:few]


def stays_small(token, x, few):
    torch._check(token.numel() <= few)


def loop(says, few, *, if_any):
    """A loop that doubles what experts with ``few`` tokens give, after a branch that ``says`` how many they have."""

    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            if (ids == if_any).any():
                says(token, x, few)
            scale = 2 if token.numel() == few else 1
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None] * scale)
        return out

    return combine


@pytest.mark.parametrize("says", [asserts, adds], ids=lambda says: says.__name__)
def test_a_branch_that_is_not_taken_says_nothing(says):
    assert check(loop(says, 3, if_any=77)) == 0


@pytest.mark.parametrize("says", [asserts, adds, stays_small], ids=lambda says: says.__name__)
def test_what_the_program_says_of_sizes_is_still_asserted(says):
    layer = Layer(loop(says, 2, if_any=0))
    layer.penalty[0] = 100.0  # all tokens choose expert 0
    with rewriting_backend() as backend, pytest.raises(RuntimeError):
        torch.compile(layer, backend=backend)(torch.randn(T, D))


def test_a_branch_that_says_nothing_new_is_taken():
    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            if rows(ids, e).numel() > 0:
                torch._check(token.numel() <= ids.numel())
                out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out

    assert check(combine) == 1


def test_a_bound_of_the_work_is_no_bound_of_all():
    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            if (ids == 77).any():
                stays_small(token, x, 1)
            scale = 2 if token.numel() < 2 else 1
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None] * scale)
        return out

    assert check(combine) == 0


@pytest.mark.parametrize("says", [asserts, adds, stays_small], ids=lambda says: says.__name__)
def test_the_side_without_the_work_says_nothing(says):
    def combine(self, x, weights, ids):
        out, scale = torch.zeros_like(x), 1
        for e in range(E):
            token, slot = torch.where(ids == e)
            later = rows(ids, (e + 1) % E)
            if token.numel() > 0:
                out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None] * scale)
            else:
                says(later, x, 2)
            scale = 2 if later.numel() <= 2 else 1
        return out

    torch.manual_seed(1)
    layer, x = Layer(combine), torch.randn(64, D)  # each expert has more than two tokens
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x), atol=1e-5, rtol=1e-4)
    assert not rewritten_in(records)


def test_a_sum_outside_of_branches_says_nothing():
    """One row is added to each of two, of which Dynamo makes two rows."""

    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            adds(token, x, 2)
            scale = 2 if token.numel() == 2 else 1
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None] * scale)
        return out

    layer, x = Layer(combine), torch.eye(2, D)
    layer.gate.weight.data[:, :2] = torch.tensor([[9.0, -9.0], [9.0, -9.0], [-9.0, 9.0], [-9.0, 9.0]])
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x), atol=1e-5, rtol=1e-4)
    assert not rewritten_in(records)


def test_rows_of_a_mask_that_are_as_many_as_those_of_an_input():
    """Their number has no symbol of its own: it is another one's. They end the graph where no layer takes them."""

    def combine(x, probs, token, expert, place, mask, w):
        buffer = torch.zeros(E, T, D).index_put((expert, place), x[token])
        outputs = torch.relu(buffer @ w[0]) @ w[1]
        scaled = outputs[expert, place] * probs.flatten()[mask].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, scaled)

    w = torch.randn(2, E, D, D)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        run = torch.compile(combine, backend=backend, dynamic=True)
        for num_tokens in (5, 7):
            x, probs, mask = torch.randn(num_tokens, D), torch.rand(num_tokens, 2), torch.arange(2 * num_tokens) % 3 != 0
            token, place = (torch.arange(2 * num_tokens)[mask] // 2, torch.arange(len(mask))[mask] % T)
            given = x, probs, token, token % E, place, mask, w
            torch.testing.assert_close(run(*given), combine(*given))
    graphs = [record for record in records if isinstance(record, moeblaze_compile.GraphRecord)]
    assert not rewritten_in(records) and any(record.dropped is not None for record in graphs)


# Rows that are repeated as often as counts tell are as many as there are ids.


class Repeated(nn.Module):
    """Rows sorted by expert, each with the bias of its own, which ``of_rows`` repeats."""

    def __init__(self, of_rows):
        super().__init__()
        self.of_rows, self.router = of_rows, nn.Linear(D, E)
        self.up, self.down = nn.Parameter(torch.randn(E, D, 6)), nn.Parameter(torch.randn(E, 6, D))
        self.b_up, self.b_down = nn.Parameter(torch.randn(E, 6)), nn.Parameter(torch.randn(E, D))

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, -1)
        order, counts = ids.flatten().argsort(stable=True), torch.bincount(ids.flatten(), minlength=E)
        ends = counts.cumsum(0).to(torch.int32)
        y = mm_of_groups(x[order // K], self.up, ends) + self.of_rows(self.b_up, counts, len(order))
        y = mm_of_groups(F.gelu(y), self.down, ends) + self.of_rows(self.b_down, counts, len(order))
        return torch.zeros_like(x).index_add(0, order // K, y * weights.flatten()[order, None])


def padded(bias, counts, n):
    found = torch.repeat_interleave(bias, counts, dim=0)
    if found.shape[0] < n:
        found = F.pad(found, (0, 0, 0, n - found.shape[0]))
    return found


def by_number(bias, counts, n):
    return bias[torch.arange(len(bias)).repeat_interleave(counts)]


def told(bias, counts, n):
    return bias.t().repeat_interleave(counts, 1, output_size=n).t()


def of_others(bias, counts, n):
    return bias.repeat_interleave(counts.flip(0), 0)


def a_row_late(bias, counts, n):
    return bias.repeat_interleave(counts, 0).roll(1, 0)


def without_the_last(bias, counts, n):
    found = bias[:-1].repeat_interleave(counts[:-1], 0)
    return torch.cat([found, bias.new_zeros(n, bias.shape[1])])[:n]


def all_by_one_number(bias, counts, n):
    ids = bias[:, :1].topk(1, -1).indices.flatten()[: n // E]
    return bias.repeat_interleave(F.one_hot(ids, 1).sum(0), 0)[:n]


def repeated(of_rows, sizes=(T, T + 3, T)) -> int:
    torch.manual_seed(1)
    eager, layer = Repeated(of_rows), Repeated(of_rows)
    layer.load_state_dict(eager.state_dict())
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        run = torch.compile(layer, backend=backend)
        for x in (torch.randn(n, D) for n in sizes):
            torch.testing.assert_close(gradients(layer, run, x), gradients(eager, eager, x), atol=1e-5, rtol=1e-4)
    return len(rewritten_in(records))


@pytest.mark.parametrize("of_rows", [padded, by_number, told], ids=lambda f: f.__name__)
def test_what_is_repeated_for_each_row(of_rows):
    """Again for any number of tokens."""
    assert repeated(of_rows) == 2


@pytest.mark.parametrize("of_rows", [of_others, a_row_late, without_the_last, all_by_one_number], ids=lambda f: f.__name__)
def test_what_is_repeated_for_other_rows(of_rows):
    assert repeated(of_rows, (T,)) == 0
