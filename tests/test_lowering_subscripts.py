"""Weights indexed by ids that the graph is given: negative ids count from the end, others that are no expert's are an error."""

import pytest
import torch
import torch.nn.functional as F

from tests.rewrite_harness import compiled

T, D, HIDDEN, E, K = 7, 6, 5, 4, 2


def layer(x, weights, ids, up, down):
    h = F.silu(torch.einsum("td,tkdf->tkf", x, up[ids]))
    return (torch.einsum("tkf,tkfd->tkd", h, down[ids]) * weights.unsqueeze(-1)).sum(1)


@pytest.fixture
def operands():
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    return [torch.randn(T, D), torch.rand(T, K), ids, torch.randn(E, D, HIDDEN), torch.randn(E, HIDDEN, D)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("lowest", [0, -1, -E])
def test_ids_count_from_the_end(operands, lowest, dtype):
    operands[2][3, 1] = lowest
    operands[2] = operands[2].to(dtype)
    run, backend = compiled(layer)
    torch.testing.assert_close(run(*operands), layer(*operands))
    assert len(backend.rewritten) == 1


@pytest.mark.parametrize("wrong", [E, -E - 1])
def test_ids_of_no_expert_raise(operands, wrong):
    operands[2][3, 1] = wrong
    run, backend = compiled(layer)
    with pytest.raises(IndexError):
        layer(*operands)
    with pytest.raises(IndexError):
        run(*operands)
    assert len(backend.rewritten) == 1


def test_ids_of_a_choice_are_taken_as_they_are(operands):
    def chosen(x, logits, up, down):
        return layer(x, *logits.topk(K), up, down)

    x, _, _, up, down = operands
    run, backend = compiled(chosen)
    logits = torch.randn(T, E)
    torch.testing.assert_close(run(x, logits, up, down), chosen(x, logits, up, down))
    assert "arange" not in backend.operators()
