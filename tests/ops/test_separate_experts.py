"""Experts apart in place of one tensor of all: what the ops make of them, and how they are joined."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moeblaze_ops.arguments import separate_experts
from moeblaze_ops.cpu import experts as cpu
from tests.corpus.layers import make_layer


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def apart(tensors):
    return [piece for tensor in tensors for piece in tensor.split(1)]


@pytest.mark.parametrize("stored_as", ["packed", "interleaved", "transposed", "split", "split_transposed"])
@pytest.mark.parametrize("mlp", [False, True])
def test_ops_take_experts_apart(stored_as, mlp):
    """Same numbers, and the same gradients, as for whole tensors."""
    layer = make_layer(stored_as=stored_as, bias=True)

    def run(form):
        lists = [form(tensors) for tensors in (layer.w_up, layer.b_up, layer.w_down, layer.b_down)]
        if mlp:
            ops = torch.ops.moeblaze
            return ops.expert_mlp(layer.x_TD, *lists, layer.weights_TK, *layer.routing, layer.activation, False)
        w_up, b_up, w_down, b_down = lists
        h, a = torch.ops.moeblaze.expert_up(layer.x_TD, w_up, b_up, None, *layer.routing, layer.activation)
        return torch.ops.moeblaze.expert_down(h, a, w_down, b_down, layer.weights_TK, *layer.routing, layer.activation)

    expected, actual = run(list), run(apart)
    assert torch.equal(actual, expected)
    grad = torch.randn_like(actual)
    for actual_grad, expected_grad in zip(
        torch.autograd.grad(actual, layer.leaves, grad), torch.autograd.grad(expected, layer.leaves, grad), strict=True
    ):
        assert torch.equal(actual_grad, expected_grad)


@torch.no_grad()
@pytest.mark.parametrize(
    "join", [separate_experts.joined, separate_experts.copied, separate_experts.OneByOne], ids=["joined", "copied", "one_by_one"]
)
@pytest.mark.parametrize("stored_as", ["packed", "split_transposed"])
def test_every_way_to_join_gives_the_same(join, stored_as):
    layer = make_layer(stored_as=stored_as, bias=True, requires_grad=False)
    up = separate_experts.with_experts_joined(torch.ops.moeblaze.expert_up.default, cpu.expert_up, join)
    down = separate_experts.with_experts_joined(torch.ops.moeblaze.expert_down.default, cpu.expert_down, join)
    h, a = up(layer.x_TD, apart(layer.w_up), apart(layer.b_up), None, *layer.routing, "swiglu")
    out = down(h, a, apart(layer.w_down), apart(layer.b_down), layer.weights_TK, *layer.routing, "swiglu")
    assert torch.equal(out, layer.run())


def test_opcheck_of_experts_apart():
    layer = make_layer(stored_as="split_transposed", bias=True)
    ops = torch.ops.moeblaze
    w_up, b_up, w_down, b_down = map(apart, (layer.w_up, layer.b_up, layer.w_down, layer.b_down))
    torch.library.opcheck(ops.expert_up.default, (layer.x_TD, w_up, b_up, None, *layer.routing, "swiglu"))
    h, a = ops.expert_up(layer.x_TD, w_up, b_up, None, *layer.routing, "swiglu")
    h = h.detach().requires_grad_()
    arguments = (h, a.detach(), w_down, b_down, layer.weights_TK, *layer.routing, "swiglu")
    torch.library.opcheck(ops.expert_down.default, arguments)


def test_flops_are_those_of_whole_tensors():
    layer = make_layer(stored_as="split")
    counts = []
    for form in (list, apart):
        with FlopCounterMode(display=False) as counter:
            w_up, w_down = form(layer.w_up), form(layer.w_down)
            h, a = torch.ops.moeblaze.expert_up(layer.x_TD, w_up, [], None, *layer.routing, "swiglu")
            out = torch.ops.moeblaze.expert_down(h, a, w_down, [], layer.weights_TK, *layer.routing, "swiglu")
            out.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_expert_up_rejects_too_few_experts():
    layer = make_layer(stored_as="packed")
    w_up = apart(layer.w_up)[:-1]
    with pytest.raises(ValueError, match="expert_up: w_up must hold 5 or 10 tensors where each is of one expert, got 4"):
        torch.ops.moeblaze.expert_up(layer.x_TD, w_up, [], None, *layer.routing, "swiglu")


def test_expert_up_rejects_experts_of_several_shapes():
    layer = make_layer(stored_as="packed")
    w_up = apart(layer.w_up)
    w_up[2] = w_up[2][..., 1:]
    with pytest.raises(ValueError, match="expert_up: w_up must hold tensors of one shape and device"):
        torch.ops.moeblaze.expert_up(layer.x_TD, w_up, [], None, *layer.routing, "swiglu")


def test_expert_down_rejects_experts_of_several_dtypes():
    layer = make_layer(stored_as="packed")
    w_down = apart(layer.w_down)
    w_down[1] = w_down[1].float()
    h = torch.zeros(layer.routing[0].shape[0], 2, 12, dtype=torch.float64)
    with pytest.raises(TypeError, match="expert_down: w_down must hold tensors of one dtype, torch.float64, got torch.float32"):
        torch.ops.moeblaze.expert_down(h, None, w_down, [], None, *layer.routing, "swiglu")


def pieces_of(block):
    return [piece.unsqueeze(0) for piece in block]


@pytest.mark.parametrize("transposed", [False, True])
def test_joined_in_place(transposed):
    block = torch.randn(5, 4, 8)
    wanted = block.transpose(1, 2) if transposed else block
    whole = separate_experts.joined(pieces_of(wanted))
    assert torch.equal(whole, wanted)
    assert (whole.data_ptr(), whole.stride()) == (block.data_ptr(), wanted.stride())
    assert separate_experts.empty_joined(pieces_of(wanted)).stride() == whole.stride()


NOT_SIDE_BY_SIDE = {
    "reversed": lambda: pieces_of(torch.randn(5, 4, 8).flip(0).clone())[::-1],
    "one_twice": lambda: pieces_of(torch.randn(5, 4, 8)[[0, 1, 1, 2, 3]])[:2] * 2,
    "gaps": lambda: pieces_of(torch.randn(5, 2, 4, 8)[:, 0]),
    "misaligned": lambda: pieces_of(torch.randn(5 * 32 + 1)[1:].view(5, 4, 8)),
    "own_storages": lambda: pieces_of([torch.randn(4, 8) for _ in range(5)]),
    "not_dense": lambda: pieces_of(torch.randn(5, 4, 16)[:, :, ::2]),
    "one_transposed": lambda: [piece.mT if i == 2 else piece for i, piece in enumerate(pieces_of(torch.randn(5, 4, 4)))],
    "all_tied": lambda: pieces_of([torch.randn(4, 8)] * 5),
}


@pytest.mark.parametrize("case", NOT_SIDE_BY_SIDE)
def test_joined_by_a_copy(case):
    pieces = NOT_SIDE_BY_SIDE[case]()
    whole = separate_experts.joined(pieces)
    assert torch.equal(whole, torch.cat(pieces))
    assert whole.untyped_storage().data_ptr() != pieces[0].untyped_storage().data_ptr()
    assert separate_experts.empty_joined(pieces).stride() == whole.stride()
