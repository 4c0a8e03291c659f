import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

import moeblaze_ops
from moeblaze_ops import config
from tests.corpus import reference
from tests.corpus.layers import ROUTINGS, E, K, routing

dispatch = torch.ops.moeblaze.dispatch


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dispatch_matches_reference(case, dtype):
    torch.manual_seed(0)
    experts_TK = routing(case).to(dtype)
    for got, expected in zip(dispatch(experts_TK, E), reference.dispatch(experts_TK, E), strict=True):
        assert got.dtype == torch.int32
        assert torch.equal(got, expected)


def test_dispatch_splits_an_expert_into_blocks_of_128_rows():
    experts_TK = torch.tensor([0] * 300 + [2] * 128 + [1]).view(-1, 1)
    _, _, _, blocks_B2 = dispatch(experts_TK, 4)
    used = blocks_B2[1 : 1 + int(blocks_B2[0, 0])].tolist()
    assert used == [[0, 0], [0, 128], [0, 256], [1, 300], [2, 301]]
    assert blocks_B2[1 + len(used) :, 0].eq(-1).all()


def test_dispatch_reads_strided_ids():
    torch.manual_seed(0)
    wide = torch.randint(0, E, (9, 2 * K))
    strided = wide[:, ::2]
    for got, expected in zip(dispatch(strided, E), dispatch(strided.contiguous(), E), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("case", ROUTINGS)
def test_dispatch_opcheck(case):
    torch.manual_seed(0)
    opcheck(dispatch.default, (routing(case), E))
    opcheck(dispatch.default, (routing(case), E, True))


def test_dispatch_compiles_once_for_several_token_counts():
    compiled = torch.compile(lambda ids: dispatch(ids, E), fullgraph=True, backend="aot_eager")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda ids: dispatch(ids, E), fullgraph=True, backend=counter)
    for num_tokens in (8, 12, 200):
        ids = torch.randint(0, E, (num_tokens, K))
        torch._dynamo.mark_dynamic(ids, 0)
        for got, expected in zip(compiled(ids), reference.dispatch(ids, E), strict=True):
            assert torch.equal(got, expected)
    assert counter.frame_count == 1


def test_dispatch_treats_any_id_outside_the_experts_as_unused():
    ids = torch.tensor([[0, E], [-5, 1]])
    expected = torch.tensor([[0, -1], [-1, 1]])
    assert torch.equal(dispatch(ids, E)[0], dispatch(expected, E)[0])


@pytest.mark.parametrize(("bad", "value"), [(E, str(E)), (-2, "-2")])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("keep", ["preactivation", "input"])
def test_moe_rejects_ids_out_of_range(bad, value, backend, keep):
    """Plain PyTorch raises, too; the op alone does not, since a rewritten layer may have ids that are no expert's."""

    def run(ids):
        return moeblaze_ops.moe(torch.ones(1, 4), torch.ones(1, 2), ids, torch.ones(E, 6, 4), torch.ones(E, 4, 3), keep=keep)

    run = run if backend is None else torch.compile(run, backend=backend)
    run(torch.tensor([[0, -1]]))
    with pytest.raises(ValueError, match=f"must hold expert ids below num_experts={E}, or -1 for an unused slot, got {value}"):
        run(torch.tensor([[0, bad]]))


@pytest.mark.parametrize(("bad", "value"), [(E, str(E)), (-2, "-2")])
def test_dispatch_rejects_ids_out_of_range_in_debug_mode(monkeypatch, bad, value):
    monkeypatch.setattr(config, "check_expert_ids", True)
    ids = torch.tensor([[0, bad]])
    message = f"dispatch: experts_TK must hold expert ids below num_experts={E}, or -1 for an unused slot, got {value}"
    with pytest.raises(ValueError) as error:
        dispatch(ids, E)
    assert str(error.value) == message
    with pytest.raises(ValueError, match="dispatch: experts_TK must hold"):
        torch.compile(lambda ids: dispatch(ids, E), backend="aot_eager")(ids)


def test_dispatch_takes_more_slots_than_experts():
    """As where a rank has few experts, and other ranks the others."""
    slots, offsets, positions, _ = dispatch(torch.tensor([[-1, 1, -1, 0], [-1, -1, 1, -1]]), 2)
    assert slots[:3].tolist() == [3, 1, 6]
    assert offsets.tolist() == [0, 1, 3]
    assert positions.tolist() == [[-1, 1, -1, 0], [-1, -1, 2, -1]]


def test_dispatch_rejects_no_choices():
    with pytest.raises(ValueError, match=r"dispatch: experts_TK must have 1 column or more, got 0"):
        dispatch(torch.zeros(2, 0, dtype=torch.int64), 3)


def test_dispatch_rejects_float_ids():
    with pytest.raises(TypeError, match="dispatch: experts_TK must be int32 or int64, got torch.float32"):
        dispatch(torch.zeros(2, 2), 3)


def test_dispatch_rejects_a_wrong_number_of_dimensions():
    with pytest.raises(ValueError, match=r"dispatch: experts_TK must have 2 dimensions \[T, K\], got shape \[4\]"):
        dispatch(torch.zeros(4, dtype=torch.int64), 3)


def test_dispatch_rejects_too_many_experts():
    with pytest.raises(ValueError, match="dispatch: num_experts must be between 1 and 4096, got 5000"):
        dispatch(torch.zeros(2, 2, dtype=torch.int64), 5000)
