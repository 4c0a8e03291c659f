"""``keep="h8"``: the numbers, the operators on a CPU, and ``moe`` over them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import moeblaze_ops
from moeblaze_ops.kernels import eight_bits
from tests.corpus.layers import make_layer
from tests.ops.recomputed.test_repeated_up import CASES, Case
from tests.tools.kernel_helpers import assert_half_a_step

ops = torch.ops.moeblaze


@pytest.mark.parametrize("columns", [1, 31, 32, 40, 257, 768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_is_near(columns, dtype):
    torch.manual_seed(0)
    h = (torch.randn(50, 2, columns) * torch.tensor([1e-3, 1.0, 300.0]).repeat(17)[:50, None, None]).to(dtype)
    kept = eight_bits.packed(h)
    assert kept.dtype == torch.int8 and kept.shape == (50, 2, eight_bits.row_width(columns)) and kept.is_contiguous()
    assert_half_a_step(eight_bits.unpacked(kept, columns, torch.float32), h.float())


def test_bytes_of_a_row():
    """17 bytes of 32 that bf16 takes, wherever rows end with a block of 256 columns."""
    for columns in (256, 768, 1024, 14336):
        assert eight_bits.row_width(columns) * 32 == 17 * 2 * columns
    assert eight_bits.row_width(1) == 32


def test_zeros_and_far_numbers():
    h = torch.zeros(5, 1, 64)
    h[1, 0, 3], h[2, 0, :2], h[3, 0, :2], h[4, 0, 0] = 1.8e9, torch.tensor([1e-38, -1e-38]), torch.tensor([6e4, 1.0]), 1e-8
    got = eight_bits.unpacked(eight_bits.packed(h), 64, torch.float32)
    assert got[[0, 2]].eq(0).all() and got[1].ne(0).sum() == 1
    for row, column in ((1, 3), (3, 0), (4, 0)):
        torch.testing.assert_close(got[row, 0, column], h[row, 0, column], rtol=0.005, atol=0)


def arguments(layer):
    return layer.x_TD, layer.w_up, layer.b_up, None, *layer.routing, layer.activation


def test_ops_are_well_formed():
    torch.manual_seed(0)
    layer = make_layer(dtype=torch.float32, bias=True)
    given = arguments(layer)
    torch.library.opcheck(ops.expert_up_h8.default, given)
    h, a, h8 = (each.detach() for each in ops.expert_up_h8(*given))
    down = (layer.w_down, layer.b_down, layer.weights_TK, *layer.routing, layer.activation)
    torch.library.opcheck(ops.expert_down.default, (h.requires_grad_(), a, *down, None, None, None, None, h8))
    with torch.no_grad():
        torch.library.opcheck(ops.expert_down_backward.default, (torch.randn_like(layer.x_TD), h8, *down))


@pytest.mark.parametrize("stored_as", ["packed", "split", "separate"])
def test_gradients_are_those_of_what_is_kept(stored_as):
    """Backward of h in 8 bits is backward of the numbers that they are."""
    torch.manual_seed(0)
    layer = make_layer(dtype=torch.float32, bias=True, stored_as=stored_as)
    F_ = layer.w_down[0].shape[1]
    h, a, h8 = ops.expert_up_h8(*arguments(layer))
    plain_h, plain_a = ops.expert_up(*arguments(layer))
    assert torch.equal(a, plain_a) and h.shape == plain_h.shape
    down = (layer.w_down, layer.b_down, layer.weights_TK, *layer.routing, layer.activation)
    dout = torch.randn_like(layer.x_TD)
    got = ops.expert_down_backward(dout, h8, *down)
    expected = ops.expert_down_backward(dout, eight_bits.unpacked(h8, F_, torch.float32), *down)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_layers_with_factors_and_parameters(name):
    case = Case(**CASES[name])
    kept, plain = case("h8"), case("preactivation")
    assert torch.equal(kept, plain)
    for ours, theirs in zip(case.gradients(kept), case.gradients(plain), strict=True):
        assert (ours - theirs).norm() <= 0.05 * theirs.norm()


@pytest.mark.parametrize("name", CASES)
def test_compiled_layers(name):
    torch._dynamo.reset()
    case = Case(**CASES[name])
    compiled = torch.compile(lambda: case("h8"), backend="aot_eager_decomp_partition", fullgraph=True)()
    eager = case("h8")
    assert torch.equal(compiled, eager)
    for ours, theirs in zip(case.gradients(compiled), case.gradients(eager), strict=True):
        assert torch.equal(ours, theirs)


def test_compiled_code_holds_for_any_number_of_tokens():
    torch._dynamo.reset()
    module = moeblaze_ops.MoE(16, 40, 4, 2, keep="h8")
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (7, 30, 12):
            x = torch.randn(T, 16, requires_grad=True)
            ours, theirs = (torch.autograd.grad(run(x).square().sum(), [x, *module.parameters()]) for run in (compiled, module))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_under_autocast():
    module = moeblaze_ops.MoE(16, 40, 4, 2, keep="h8")
    x = torch.randn(20, 16, requires_grad=True)
    outs = []
    for keep in ("h8", "preactivation"):
        module.keep = keep
        with torch.autocast("cpu", torch.bfloat16):
            outs.append(module(x))
        outs[-1].float().sum().backward()
    assert torch.equal(*outs)


def saved_by(run):
    """What autograd saves of the layer beyond its leaves, by dtype and shape."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        run()
    return {(tensor.dtype, tuple(tensor.shape)) for tensor in saved if not tensor.is_leaf or tensor.dtype == torch.int8}


@pytest.mark.parametrize("keep", ["preactivation", "h8"])
def test_hooks_reach_what_is_kept(keep):
    """torch's hooks on saved tensors, which offload them for one, get h as it is kept, and backward reads what they give."""
    T, D, hidden, E, K = 24, 16, 40, 4, 2
    module = moeblaze_ops.MoE(D, hidden, E, K, keep=keep)
    x = torch.randn(T, D, requires_grad=True)
    of_h = {"preactivation": (torch.float32, (T * K, 2, hidden)), "h8": (torch.int8, (T * K, 2, eight_bits.row_width(hidden)))}
    saved = saved_by(lambda: module(x))
    assert of_h[keep] in saved and not (saved & (set(of_h.values()) - {of_h[keep]}))
    packed: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: packed.append(tensor) or len(packed) - 1, lambda place: packed[place].clone()):
        out = module(x)
    with save_on_cpu():
        moved = module(x)
    leaves = [x, *module.parameters()]
    expected, offloaded, copied = (torch.autograd.grad(run.square().sum(), leaves) for run in (module(x), moved, out))
    for results in (offloaded, copied):
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_error_beside_that_of_bf16():
    """Each gradient's error against fp32 is at most 2.6 times that of a bf16 h; ``benchmarks/NOTES.md`` has other formats."""
    torch.manual_seed(0)
    T, D, hidden, E, K = 512, 128, 256, 4, 2
    x, w_up, w_down = torch.randn(T, D), torch.randn(E, 2 * hidden, D) * D**-0.5, torch.randn(E, D, hidden) * hidden**-0.5
    weights, dout = torch.rand(T, K), torch.randn(T, D)
    experts = torch.rand(T, E).topk(K).indices
    exact = [tensor.bfloat16().float() for tensor in (x, w_up, w_down)]

    def gradients(dtype, keep):
        leaves = [*(tensor.to(dtype) for tensor in exact), weights]
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        out = moeblaze_ops.moe(leaves[0], leaves[3], experts, leaves[1], leaves[2], keep=keep)
        return torch.autograd.grad(out, leaves, dout.bfloat16().to(dtype))

    reference = gradients(torch.float32, "preactivation")

    def errors(keep):
        pairs = zip(gradients(torch.bfloat16, keep), reference, strict=True)
        return torch.stack([(got.float() - want).norm() / want.norm() for got, want in pairs])

    of_bf16, of_h8 = errors("preactivation"), errors("h8")
    assert (of_h8 <= 2.6 * of_bf16).all() and (of_h8 < 0.012).all()


def test_refusals():
    layer = make_layer(dtype=torch.float32)
    given = arguments(layer)
    with pytest.raises(ValueError, match="expert_up_h8: activation must have h for backward alone, got 'identity'"):
        ops.expert_up_h8(*given[:-1], "identity")
    h, a, h8 = (each.detach() for each in ops.expert_up_h8(*given))
    down = (layer.w_down, layer.b_down, layer.weights_TK, *layer.routing, layer.activation)
    with pytest.raises(TypeError, match="expert_down: h8_NGB must be int8"):
        ops.expert_down(h, a, *down, None, None, None, None, h8.float())
    with pytest.raises(ValueError, match="expert_down_backward: h_NGF must have shape"):
        ops.expert_down_backward(layer.x_TD.detach(), h8[..., :-1], *down)
    tokens, weights, parameters = torch.randn(4, 16), torch.rand(4, 2), moeblaze_ops.MoE(16, 8, 4, 2)
    experts = torch.zeros(4, 2, dtype=torch.long)
    with pytest.raises(NotImplementedError, match="expert_up_h8: forward-mode AD"):
        torch.func.jvp(
            lambda x: moeblaze_ops.moe(x, weights, experts, parameters.w_up, parameters.w_down, keep="h8"), (tokens,), (tokens,)
        )


def test_no_gradients_keep_nothing():
    module = moeblaze_ops.MoE(16, 40, 4, 2, keep="h8")
    x = torch.randn(8, 16)
    with torch.no_grad(), torch.profiler.profile() as profile:
        module(x)
    assert "moeblaze::expert_up_h8" not in {event.name for event in profile.events()}
    assert F.mse_loss(module(x), module(x)) == 0
