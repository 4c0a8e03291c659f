"""What the work of a branch on data says of sizes holds where the work is done, and nowhere else."""

import pytest
import torch

from moeblaze_ops import compile as moeblaze_compile
from tests.capture.test_branches import D, E, Layer, T, check, rows
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
