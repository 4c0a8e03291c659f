"""Low-rank additions to the weights (LoRA): values and gradients against W + s B A, the ops, and what is not allocated."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jvp
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import moeblaze_ops
from moeblaze_ops.arguments.activations import is_gated
from moeblaze_ops.ops.low_rank import factors as low_rank
from tests.corpus.layers import ROUTINGS, make_layer, routing
from tests.tools.op_harness import detach

ops = torch.ops.moeblaze
E, K, D, F = 5, 2, 24, 12


def parameter(*shape, dtype=torch.float64):
    return (torch.randn(shape, dtype=torch.float64) / shape[-1] ** 0.5).to(dtype).requires_grad_()


def make_case(name="ragged_tail", activation="swiglu", rank=3, dtype=torch.float64, num_experts=E):
    """x, routing weights, ids, weights and the factors of both projections."""
    experts_TK = routing(name, num_experts, K)
    T, outputs = experts_TK.shape[0], F * (1 + is_gated(activation))
    x = torch.randn(T, D, dtype=torch.float64).to(dtype).requires_grad_()
    weights = torch.rand(T, K, dtype=torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    w_up, w_down = parameter(num_experts, outputs, D, dtype=dtype), parameter(num_experts, D, F, dtype=dtype)
    up = parameter(num_experts, rank, D, dtype=dtype), parameter(num_experts, outputs, rank, dtype=dtype)
    down = parameter(num_experts, rank, F, dtype=dtype), parameter(num_experts, D, rank, dtype=dtype)
    return x, weights, experts_TK, w_up, w_down, up, down


def merged(w, factors, scale):
    scale = scale.view(-1, 1, 1) if isinstance(scale, torch.Tensor) else scale
    return w + scale * torch.bmm(factors[1], factors[0])


def assert_like_merged_weights(case, scale=0.5, **options):
    x, weights, experts, w_up, w_down, up, down = case
    lora = {"lora_up": (*up, scale), "lora_down": (*down, scale)}
    out = moeblaze_ops.moe(x, weights, experts, w_up, w_down, **lora, **options)
    expected = moeblaze_ops.moe(x, weights, experts, merged(w_up, up, scale), merged(w_down, down, scale), **options)
    torch.testing.assert_close(out, expected)
    leaves = [x, weights, w_up, w_down, *up, *down, *([scale] if isinstance(scale, torch.Tensor) else [])]
    leaves += [bias for name, bias in options.items() if name.startswith("b_")]
    dout = torch.randn_like(out)
    got, wanted = torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_low_rank_matches_merged_weights(name, weight_on):
    torch.manual_seed(0)
    assert_like_merged_weights(make_case(name), weight_on=weight_on)


@pytest.mark.parametrize("rank", [1, 5, 8, 16, 33])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_low_rank_of_any_rank(rank, activation):
    torch.manual_seed(1)
    assert_like_merged_weights(make_case("unused_slots", activation, rank), activation=activation)


def test_low_rank_with_biases_and_a_scale_for_each_expert():
    torch.manual_seed(2)
    biases = {"b_up": parameter(E, 2 * F), "b_down": parameter(E, D)}
    assert_like_merged_weights(make_case(), torch.rand(E, dtype=torch.float64).requires_grad_(), **biases)


def test_low_rank_of_interleaved_weights():
    torch.manual_seed(3)
    assert_like_merged_weights(make_case(), interleaved=True)


def test_low_rank_of_transposed_weights():
    torch.manual_seed(4)
    x, weights, experts, w_up, w_down, up, down = make_case()
    lora = {"lora_up": (*up, 2.0), "lora_down": (*down, 2.0)}
    out = moeblaze_ops.moe(x, weights, experts, w_up.mT.contiguous(), w_down.mT.contiguous(), transposed=True, **lora)
    torch.testing.assert_close(out, moeblaze_ops.moe(x, weights, experts, w_up, w_down, **lora))


@pytest.mark.parametrize("given", [("lora_up",), ("lora_gate",), ("lora_gate", "lora_up")])
def test_low_rank_of_gate_and_up_apart(given):
    torch.manual_seed(5)
    x, weights, experts, _, w_down, _, _ = make_case()
    w_gate, w_up = parameter(E, F, D), parameter(E, F, D)
    shapes = {"lora_gate": (2, 0.5), "lora_up": (3, 2.0)}
    factors = {name: (parameter(E, rank, D), parameter(E, F, rank), scale) for name, (rank, scale) in shapes.items()}
    factors = {name: factors[name] for name in given}
    out = moeblaze_ops.moe(x, weights, experts, w_up, w_down, w_gate=w_gate, **factors)
    whole = {"lora_gate": w_gate, "lora_up": w_up}
    whole = {name: merged(w, factors[name], factors[name][2]) if name in given else w for name, w in whole.items()}
    expected = moeblaze_ops.moe(x, weights, experts, whole["lora_up"], w_down, w_gate=whole["lora_gate"])
    torch.testing.assert_close(out, expected)
    leaves = [x, weights, *(tensor for a, b, _ in factors.values() for tensor in (a, b))]
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_low_rank_takes_factors_as_peft_stores_them():
    """lora_A is expert-slowest, lora_B expert-fastest."""
    torch.manual_seed(6)
    x, weights, experts, w_up, w_down, _, _ = make_case()
    rank = 3
    lora_A, lora_B = parameter(E * rank, D), parameter(2 * F, rank * E)
    a, b = lora_A.reshape(E, -1, D), lora_B.reshape(2 * F, -1, E).permute(2, 0, 1)
    out = moeblaze_ops.moe(x, weights, experts, w_up, w_down, lora_up=(a, b, 2.0))
    delta = torch.einsum("ore,eri->eoi", lora_B.reshape(2 * F, rank, E), lora_A.reshape(E, rank, D)) * 2.0
    expected = moeblaze_ops.moe(x, weights, experts, w_up + delta, w_down)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(*(torch.autograd.grad(y.sum(), (lora_A, lora_B)) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_rank_is_no_worse_than_merged_weights_in_the_same_dtype(dtype):
    torch.manual_seed(7)
    low = make_case(rank=8, dtype=dtype)

    def widened(part):
        if isinstance(part, tuple):
            return tuple(map(widened, part))
        return part.detach().double().requires_grad_() if part.is_floating_point() else part

    exact = [widened(part) for part in low]

    def run(case, merge):
        x, weights, experts, w_up, w_down, up, down = case
        lora = {} if merge else {"lora_up": (*up, 2.0), "lora_down": (*down, 2.0)}
        w_up, w_down = (merged(w_up, up, 2.0), merged(w_down, down, 2.0)) if merge else (w_up, w_down)
        out = moeblaze_ops.moe(x, weights, experts, w_up, w_down, **lora)
        return out, *torch.autograd.grad(out.double().square().sum(), (x, weights, *up, *down))

    truth = run(exact, True)

    def errors(merge):
        return [float((got.double() - want).norm() / want.norm()) for got, want in zip(run(low, merge), truth, strict=True)]

    for ours, eager in zip(errors(False), errors(True), strict=True):
        # Weights are not rounded a second time here; 1.5 leaves room for other roundings of the low-rank columns.
        assert ours <= 1.5 * eager + torch.finfo(dtype).eps / 4


def test_factors_in_fp32_beside_low_precision_weights():
    torch.manual_seed(8)
    x, weights, experts, w_up, w_down, up, down = make_case(dtype=torch.bfloat16)
    up, down = ([factor.detach().float().requires_grad_() for factor in factors] for factors in (up, down))
    out = moeblaze_ops.moe(x, weights, experts, w_up, w_down, lora_up=(*up, 2.0), lora_down=(*down, 2.0))
    assert out.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), (*up, *down)))


def test_autocast_casts_the_factors():
    torch.manual_seed(9)
    x, weights, experts, w_up, w_down, up, down = make_case(dtype=torch.float32, rank=8)
    with torch.autocast("cpu", torch.bfloat16):
        out = moeblaze_ops.moe(x, weights, experts, w_up, w_down, lora_up=(*up, 2.0), lora_down=(*down, 2.0))
    assert out.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), (*up, *down)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_low_rank_compiles(backend):
    torch.manual_seed(10)
    x, weights, experts, w_up, w_down, up, down = make_case()

    def run(x, up_a, up_b, down_a, down_b):
        return moeblaze_ops.moe(x, weights, experts, w_up, w_down, lora_up=(up_a, up_b, 2.0), lora_down=(down_a, down_b, 2.0))

    leaves = (x, *up, *down)
    out, expected = torch.compile(run, fullgraph=True, backend=backend)(*leaves), run(*leaves)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


class Largest(TorchDispatchMode):
    """The sizes of the largest results that operators give, results that are views of arguments left out."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)}
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.sizes.append(tensor.numel())
        return result


def test_nothing_of_the_size_of_the_weights_is_written_for_a_frozen_base():
    torch.manual_seed(11)
    x, weights, experts, w_up, w_down, up, down = make_case("one_token", num_experts=64)
    w_up, w_down = w_up.detach(), w_down.detach()
    with Largest() as seen:
        out = moeblaze_ops.moe(x, weights, experts, w_up, w_down, lora_up=(*up, 2.0), lora_down=(*down, 2.0))
        out.sum().backward()
    assert all(factor.grad is not None for factor in (*up, *down))
    assert max(seen.sizes) < min(w_up.numel(), w_down.numel())


def test_what_is_kept_for_backward_is_that_of_a_frozen_base_and_the_low_rank_rows():
    torch.manual_seed(12)
    x, weights, experts, w_up, w_down, up, down = make_case(rank=8)
    w_up, w_down = w_up.detach(), w_down.detach()

    def kept(**lora):
        found = {}

        def keep(tensor):
            return found.setdefault(tensor.untyped_storage().data_ptr(), tensor)

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            moeblaze_ops.moe(x, weights, experts, w_up, w_down, **lora)
        return sum(t.untyped_storage().nbytes() for t in found.values())

    rows = weights.numel() * 8 * x.element_size()
    factors = sum(factor.numel() * factor.element_size() for factor in (*up, *down))
    with_lora = kept(lora_up=(*up, 2.0), lora_down=(*down, 2.0))
    # u and v; the factors as they are given, and B with its scale, in the kernels' layout.
    assert with_lora <= kept() + 2 * rows + 2 * factors


def op_arguments(name, layer, rank=3):
    """Arguments of one op on a layer, with low-rank factors."""
    x, weights, dispatched = layer.x_TD, layer.weights_TK, layer.routing
    experts, halves, width, model = layer.w_up[0].shape
    requires_grad, dtype = x.requires_grad, x.dtype
    h, a = (t.detach() for t in ops.expert_up(x, layer.w_up, layer.b_up, None, *dispatched, layer.activation))
    up = parameter(experts, rank, model, dtype=dtype), parameter(experts, halves, width, rank, dtype=dtype)
    down = parameter(experts, rank, width, dtype=dtype), parameter(experts, model, rank, dtype=dtype).detach().mT
    up, down = ([factor.detach().requires_grad_(requires_grad) for factor in factors] for factors in (up, down))
    rows, dout = torch.randn(h.shape[0], rank, dtype=dtype), torch.randn(x.shape, dtype=dtype)
    return {
        "expert_up": (x, layer.w_up, layer.b_up, None, *dispatched, layer.activation, rows, *up),
        "expert_up_weighted": (x, layer.w_up, layer.b_up, weights, *dispatched, layer.activation, rows, *up),
        "expert_down": (
            h.requires_grad_(requires_grad), a, layer.w_down, layer.b_down, weights, *dispatched, layer.activation, rows, *down
        ),
        "expert_down_backward": (
            dout, h.detach(), layer.w_down, layer.b_down, weights, *dispatched, layer.activation, rows, down[0]
        ),
        "expert_up_backward": (h.detach(), None, layer.w_up, None, *dispatched, None, None, None, rows, up[0]),
        "expert_rows": (h.detach(), up[1], dispatched[1], dispatched[3]),
        "low_rank_backward_up": (h.detach(), rows, up[1], None, *dispatched),
        "low_rank_backward_down": (dout, rows, down[1].mT, weights, *dispatched),
    }[name]  # fmt: skip


FORWARD = ("expert_up", "expert_up_weighted", "expert_down")
OPS = (
    *FORWARD,
    "expert_down_backward",
    "expert_up_backward",
    "expert_rows",
    "low_rank_backward_up",
    "low_rank_backward_down",
)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("case", ["ragged_tail", "unused_slots", "zero_tokens"])
def test_low_rank_opcheck(name, case):
    torch.manual_seed(13)
    layer = make_layer(case, bias=True, requires_grad=name in FORWARD, sizes=(3, 2, 8, 4))
    arguments = op_arguments(name, layer)
    if name not in FORWARD:
        arguments = detach(arguments)
    name = "low_rank_backward" if name.startswith("low_rank_backward") else name.removesuffix("_weighted")
    opcheck(getattr(ops, name).default, arguments)


def test_expert_rows_matches_products():
    torch.manual_seed(14)
    layer = make_layer("unused_slots", requires_grad=False)
    _, offsets, _, blocks = layer.routing
    rows, w = torch.randn(layer.weights_TK.numel(), 2, 12, dtype=torch.float64), torch.randn(5, 2, 12, 7, dtype=torch.float64)
    y, bounds = ops.expert_rows(rows, w, offsets, blocks), offsets.tolist()
    for e in range(5):
        part = slice(bounds[e], bounds[e + 1])
        torch.testing.assert_close(y[part], torch.einsum("ngf,gfc->nc", rows[part], w[e]))
    assert y[bounds[-1] :].eq(0).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_low_rank_backward_matches_products(weighted):
    torch.manual_seed(15)
    layer = make_layer("unused_slots", requires_grad=False)
    slots, offsets, _, _ = layer.routing
    weights = layer.weights_TK.double() if weighted else None
    N, bounds = layer.weights_TK.numel(), offsets.tolist()
    scale = weights.reshape(-1)[slots.clamp(min=0)].unsqueeze(1) if weighted else 1.0
    u, dy_NGF, b_EGFR = (torch.randn(shape, dtype=torch.float64) for shape in ((N, 7), (N, 2, 12), (5, 2, 12, 7)))
    dout, b_EDR = torch.randn(layer.x_TD.shape, dtype=torch.float64), torch.randn(5, D, 7, dtype=torch.float64)
    dout_rows = dout[slots.clamp(min=0) // K]
    for dy, rows, b, b_EWR in (
        (dy_NGF, dy_NGF.flatten(1), b_EGFR, b_EGFR.flatten(1, 2)),
        (dout, dout_rows, b_EDR, b_EDR),
    ):
        du, db = ops.low_rank_backward(dy, u, b, weights, *layer.routing)
        db_EWR = db if b is b_EDR else db.flatten(1, 2)
        for e in range(5):
            part = slice(bounds[e], bounds[e + 1])
            torch.testing.assert_close(du[part], rows[part] @ b_EWR[e])
            torch.testing.assert_close(db_EWR[e], rows[part].T @ (scale * u)[part])


def test_flops_of_low_rank_columns_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    x, weights, experts, w_up, w_down, up, down = make_case(rank=8)
    lora = {"lora_up": (*up, 2.0), "lora_down": (*down, 2.0)}
    with FlopCounterMode(display=False) as counter:
        moeblaze_ops.moe(x, weights, experts, w_up.detach(), w_down.detach(), **lora).sum().backward()
    N, dense, columns = weights.numel(), 2 * F * D + F * D, 8 * (D + 2 * F + F + D)
    # Forward and the gradient of the input once each; the factors' gradients in place of the weights'.
    assert counter.get_total_flops() == 2 * N * (2 * dense + 3 * columns)


UP, DOWN = (torch.zeros(E, 3, D), torch.zeros(E, 2 * F, 3), 1.0), (torch.zeros(E, 3, F), torch.zeros(E, D, 3), 1.0)
BAD_FACTORS = [
    ({"lora_up": (UP[0], torch.zeros(E, F, 3), 1.0)}, ValueError, r"B of lora_up must have shape \[5, 24, 3\]"),
    ({"lora_up": (DOWN[0], UP[1], 1.0)}, ValueError, r"A of lora_up must have shape \[5, r, 24\]"),
    ({"lora_down": (DOWN[0], torch.zeros(E, D, 4), 1.0)}, ValueError, r"B of lora_down must have shape \[5, 24, 3\]"),
    (
        {"lora_down": DOWN[:2]},
        TypeError,
        r"lora_down must be a tuple \(A, B, scale\), got \(a tensor of shape .*, a tensor of shape",
    ),
    ({"lora_down": (*DOWN[:2], "2")}, TypeError, "scale of lora_down must be a number"),
    ({"lora_down": (*DOWN[:2], torch.ones(2))}, ValueError, "scale of lora_down must be a number or"),
    ({"lora_gate": UP}, ValueError, "lora_gate must come with w_gate"),
    ({"lora_up": (UP[0], UP[1].half(), 1.0)}, TypeError, "B of lora_up must be float32"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_FACTORS)
def test_moe_rejects_factors(change, error, message):
    x, weights, experts = torch.zeros(7, D), torch.zeros(7, K), torch.zeros(7, K, dtype=torch.int64)
    with pytest.raises(error, match=f"moe: {message}"):
        moeblaze_ops.moe(x, weights, experts, torch.zeros(E, 2 * F, D), torch.zeros(E, D, F), **change)


@pytest.mark.parametrize("name", ["expert_up", "expert_down"])
def test_ops_reject_factors_without_rows(name):
    arguments = list(op_arguments(name, make_layer(requires_grad=False)))
    arguments[-3] = None
    with pytest.raises(ValueError, match="must be given exactly when [uv]_NR is"):
        getattr(ops, name)(*arguments)


def test_ops_reject_factors_of_another_rank():
    arguments = list(op_arguments("expert_up", make_layer(requires_grad=False)))
    arguments[-2] = arguments[-2][:, :2]
    with pytest.raises(ValueError, match=r"expert_up: lora_a_ERD must have shape \[5, 3, 24\]"):
        ops.expert_up(*arguments)


@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_forward_mode(weight_on):
    """Along each of the arguments and along all of them, with slots that no expert has."""
    torch.manual_seed(22)
    x, weights, experts, w_up, w_down, up, down = make_case("unused_slots")
    primals = tuple(tensor.detach() for tensor in (x, weights, w_up, w_down, *up, *down))

    def run(x, weights, w_up, w_down, up_a, up_b, down_a, down_b, merge=False):
        up, down = (up_a, up_b), (down_a, down_b)
        if merge:
            w_up, w_down, lora = merged(w_up, up, 0.5), merged(w_down, down, 0.5), {}
        else:
            lora = {"lora_up": (*up, 0.5), "lora_down": (*down, 0.5)}
        return moeblaze_ops.moe(x, weights, experts, w_up, w_down, weight_on=weight_on, **lora)

    directions = [torch.randn_like(p) for p in primals]
    along_one = [tuple(d if i == j else torch.zeros_like(d) for j, d in enumerate(directions)) for i in range(len(primals))]
    for tangents in (*along_one, tuple(directions)):
        got, wanted = (jvp(partial(run, merge=merge), primals, tangents) for merge in (False, True))
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)
    for i, direction in enumerate(directions):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(p, direction) if i == j else p for j, p in enumerate(primals)]
            got = forward_ad.unpack_dual(run(*duals)).tangent
        torch.testing.assert_close(got, jvp(partial(run, merge=True), primals, along_one[i])[1])


@pytest.mark.parametrize("rank", [1, 8, 11])
def test_padding_adds_ranks_of_zeros(rank):
    a, b = low_rank.padded(torch.ones(2, rank, 3), torch.ones(2, 4, rank))
    assert a.shape[1] == b.shape[2] == -(-rank // 8) * 8 and a.is_contiguous() and b.mT.is_contiguous()
    assert torch.equal(b @ a, torch.full((2, 4, 3), float(rank)))


def test_several_adapters_are_one_with_all_their_ranks():
    torch.manual_seed(20)
    x, weights, experts, w_up, w_down, up, down = make_case()
    more_up, more_down = (parameter(E, 5, D), parameter(E, 2 * F, 5)), (parameter(E, 5, F), parameter(E, D, 5))
    lora = {"lora_up": [(*up, 0.5), (*more_up, 2.0)], "lora_down": [(*down, 0.5), (*more_down, 2.0)]}
    out = moeblaze_ops.moe(x, weights, experts, w_up, w_down, **lora)
    whole = [merged(merged(w, a, 0.5), b, 2.0) for w, a, b in ((w_up, up, more_up), (w_down, down, more_down))]
    expected = moeblaze_ops.moe(x, weights, experts, *whole)
    leaves = [x, weights, *up, *down, *more_up, *more_down]
    dout = torch.randn_like(out)
    for ours, theirs in zip(*(torch.autograd.grad(y, leaves, dout) for y in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match=r"moe: B of lora_up\[1\] must have shape"):
        moeblaze_ops.moe(x, weights, experts, w_up, w_down, lora_up=[(*up, 0.5), (up[0], more_up[1], 2.0)])
    torch.testing.assert_close(
        moeblaze_ops.moe(x, weights, experts, w_up, w_down, lora_up=[], lora_down=[]),
        moeblaze_ops.moe(x, weights, experts, w_up, w_down),
    )


@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"activation": lambda g, b, c: torch.tanh(b * g) * c, "activation_parameters": (1.5, 2)}]
)
def test_module_from_the_meta_device(options):
    """``to_empty`` leaves what memory held; ``reset_parameters`` of each module gives every parameter its first value."""
    with torch.device("meta"):
        layer = moeblaze_ops.MoE(D, F, E, K, **options)
        layer.add_adapter("first", 3)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not [name for name, parameter in layer.named_parameters() if parameter.isnan().any()]
    assert not layer.adapters["first"].up_b.any() and layer.adapters["first"].up_a.any()
    if "activation_parameters" in options:
        assert layer.activation_parameters.tolist() == [1.5, 2.0]


def test_adapters_of_a_module():
    torch.manual_seed(21)
    layer, x = moeblaze_ops.MoE(D, F, E, K, bias=True, dtype=torch.float64), torch.randn(30, D, dtype=torch.float64)
    base, names = layer(x), set(layer.state_dict())
    first, second = layer.add_adapter("first", 3, scale=0.5), layer.add_adapter("second", 5)
    torch.testing.assert_close(layer(x), base)
    for factors in (first.up_b, first.down_b, second.up_b, second.down_b):
        torch.nn.init.normal_(factors)
    layer(x).sum().backward()
    assert {name for name, p in layer.named_parameters() if p.grad is not None} == set(layer.state_dict()) - names
    layer.active_adapters = ["second"]
    only_second = layer(x)
    layer.active_adapters = []
    torch.testing.assert_close(layer(x), base)
    layer.active_adapters = ["first", "typo"]
    with pytest.raises(ValueError, match=r"MoE: active_adapters must be names of adapters \(first, second\), got 'typo'"):
        layer(x)
    layer.active_adapters = "first"
    with pytest.raises(TypeError, match="MoE: active_adapters must be a list of names of adapters, got 'first'"):
        layer(x)
    layer.active_adapters = ["first", "second"]
    both = layer(x)
    assert not torch.allclose(both, only_second)
    layer.merge_adapters()
    torch.testing.assert_close(layer(x), both)
    assert set(layer.state_dict()) == names
    with pytest.raises(ValueError, match="MoE.add_adapter: rank must be at least 1, got 0"):
        layer.add_adapter("third", 0)
    with pytest.raises(TypeError, match="MoE.add_adapter: scale must be a number, got"):
        layer.add_adapter("third", 4, scale="1")
    layer.add_adapter("third", 4)
    with pytest.raises(ValueError, match="MoE.add_adapter: name must be new, got 'third'"):
        layer.add_adapter("third", 4)
