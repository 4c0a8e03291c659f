"""The Hopper kernels on a GPU against fp32 products, outputs full of NaN before and NaN wherever nothing may be read."""

from dataclasses import replace

import pytest
import torch

from moeblaze_ops.arguments.activations import activate, activation_gradient
from moeblaze_ops.kernels import eight_bits
from tests.tools.hopper_problems import (
    PROBLEMS,
    assert_close,
    down_weight,
    grouped,
    joined,
    nan_like,
    random,
    route,
    run_twice,
    up_biases,
    up_weights,
)
from tests.tools.kernel_helpers import assert_half_a_step

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")]


@pytest.fixture(params=PROBLEMS.values(), ids=PROBLEMS.keys())
def problem(request):
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    return request.param


def test_expert_up_matches_reference(problem):
    from moeblaze_ops.kernels.hopper.expert_up import hopper_expert_up

    routing, N = route(problem), problem.num_tokens * problem.top_k
    x_TD = random(problem, problem.num_tokens, problem.num_d)
    w_up, b_up = up_weights(problem), up_biases(problem)
    h_NGF = nan_like(problem, N, problem.parts, problem.num_f)
    has_a = problem.activation != "identity"
    a_NF = nan_like(problem, N if has_a else 0, problem.num_f)
    args = (routing.slots_N, routing.offsets_E1, routing.blocks_B2, problem.top_k, problem.activation, h_NGF, a_NF)
    run_twice(lambda: hopper_expert_up(x_TD, w_up, b_up, *args), [h_NGF, a_NF])
    for e, (rows, tokens) in enumerate(zip(routing.rows, routing.tokens, strict=True)):
        h = torch.einsum("td,gfd->tgf", x_TD[tokens].float(), joined(w_up)[e])
        assert_close(h_NGF[rows], h + joined(b_up)[e] if b_up else h)
        if has_a:
            assert_close(a_NF[rows], activate(h_NGF[rows], problem.activation))
    assert h_NGF[routing.rows[-1].stop :].isnan().all()


def test_expert_up_keeps_eight_bits(problem):
    from moeblaze_ops.kernels.hopper.expert_up import hopper_expert_up

    if problem.activation == "identity":
        pytest.skip("forward reads its h")
    routing, N = route(problem), problem.num_tokens * problem.top_k
    x_TD = random(problem, problem.num_tokens, problem.num_d)
    h_NGF, a_NF = nan_like(problem, N, problem.parts, problem.num_f), nan_like(problem, N, problem.num_f)
    h8_NGB = h_NGF.new_full((N, problem.parts, eight_bits.row_width(problem.num_f)), 77, dtype=torch.int8)
    beside_NF = nan_like(problem, N, problem.num_f)
    args = (x_TD, up_weights(problem), up_biases(problem), routing.slots_N, routing.offsets_E1, routing.blocks_B2)
    args = (*args, problem.top_k, problem.activation)
    hopper_expert_up(*args, h_NGF, a_NF)
    run_twice(lambda: hopper_expert_up(*args, h8_NGB, beside_NF), [h8_NGB, beside_NF])
    assert torch.equal(a_NF.nan_to_num(7.0), beside_NF.nan_to_num(7.0))
    used = routing.rows[-1].stop
    assert_half_a_step(eight_bits.unpacked(h8_NGB[:used], problem.num_f, torch.float32), h_NGF[:used].float())
    assert (h8_NGB[used:] == 77).all()


def test_down_rows_matches_reference(problem):
    from moeblaze_ops.kernels.hopper.row_gemm import hopper_down_rows

    routing = route(problem)
    a_NF = grouped(problem, routing, problem.num_f)
    w_down = down_weight(problem)
    b_down = [random(problem, problem.num_experts, problem.num_d)] if problem.bias else []
    y_ND = nan_like(problem, a_NF.shape[0], problem.num_d)
    run_twice(lambda: hopper_down_rows(a_NF, [w_down], b_down, routing.offsets_E1, routing.blocks_B2, y_ND), [y_ND])
    for e, rows in enumerate(routing.rows):
        y = a_NF[rows].float() @ w_down[e].float()
        assert_close(y_ND[rows], y + b_down[0][e].float() if b_down else y)
    assert y_ND[routing.rows[-1].stop :].isnan().all()


def test_up_backward_rows_matches_reference(problem):
    from moeblaze_ops.kernels.hopper.row_gemm import hopper_up_backward_rows

    routing = route(problem)
    dh_NGF = grouped(problem, routing, problem.parts, problem.num_f)
    w_up = up_weights(problem)
    dx_ND = nan_like(problem, dh_NGF.shape[0], problem.num_d)
    run_twice(lambda: hopper_up_backward_rows(dh_NGF, w_up, routing.offsets_E1, routing.blocks_B2, dx_ND), [dx_ND])
    for e, rows in enumerate(routing.rows):
        assert_close(dx_ND[rows], torch.einsum("rgf,gfd->rd", dh_NGF[rows].float(), joined(w_up)[e]))


@pytest.mark.parametrize("in_eight_bits", [False, True], ids=["", "h8"])
def test_down_backward_matches_reference(problem, in_eight_bits):
    from moeblaze_ops.kernels.hopper.configs import num_partials
    from moeblaze_ops.kernels.hopper.expert_down_backward import hopper_down_backward

    routing = route(problem)
    dout_TD = random(problem, problem.num_tokens, problem.num_d)
    # Clamped activations beyond their limits, too.
    h_NGF = grouped(problem, routing, problem.parts, problem.num_f) * (8 if problem.activation.startswith("swiglu_") else 1)
    kept = h_NGF
    if in_eight_bits:
        kept = eight_bits.packed(h_NGF)
        h_NGF = eight_bits.unpacked(kept, problem.num_f, torch.float32)
    N = h_NGF.shape[0]
    w_down = down_weight(problem)
    weights_TK = torch.rand(problem.num_tokens, problem.top_k, device="cuda") if problem.weighted else None
    dh_NGF, wa_NF = nan_like(problem, *h_NGF.shape), nan_like(problem, N, problem.num_f)
    partials_CN = nan_like(problem, num_partials(problem.num_f, problem.num_d), N, dtype=torch.float32)
    args = (routing.slots_N, routing.offsets_E1, routing.blocks_B2, problem.top_k, problem.activation)
    outputs = [dh_NGF, partials_CN, wa_NF]
    run_twice(lambda: hopper_down_backward(dout_TD, kept, [w_down], weights_TK, *args, *outputs), outputs)
    for e, (rows, tokens) in enumerate(zip(routing.rows, routing.tokens, strict=True)):
        da = dout_TD[tokens].float() @ w_down[e].float().T
        scale = torch.ones(len(tokens), 1, device="cuda")
        if weights_TK is not None:
            scale = weights_TK.flatten()[routing.slots_N[rows].long()][:, None]
        h = h_NGF[rows].float()
        a = activate(h, problem.activation)
        assert_close(wa_NF[rows], a * scale)
        assert_close(dh_NGF[rows], activation_gradient(da * scale, h, problem.activation))
        dweights = partials_CN[:, rows].sum(0)
        assert not dweights.isnan().any()
        # Sums of F products of both signs, one of the factors rounded: relative to the sum of their sizes.
        assert ((dweights - (da * a).sum(1)).abs() <= 4e-3 * (da * a).abs().sum(1) + 1e-6).all()


@pytest.mark.parametrize("which", ["up", "down"])
def test_weight_grad_matches_reference(problem, which):
    from moeblaze_ops.kernels.hopper.weight_grad import hopper_weight_grad

    routing = route(problem)
    parts = problem.parts if which == "up" else 1
    gathered_TD = random(problem, problem.num_tokens, problem.num_d)
    grouped_NGF = grouped(problem, routing, parts, problem.num_f)
    dw = up_weights(problem, nan_like) if which == "up" else [down_weight(problem, nan_like)]
    args = (routing.slots_N, routing.offsets_E1, problem.top_k)
    run_twice(lambda: hopper_weight_grad(gathered_TD, grouped_NGF, dw, *args), dw)
    for e, (rows, tokens) in enumerate(zip(routing.rows, routing.tokens, strict=True)):
        reference = torch.einsum("rgf,rd->gfd", grouped_NGF[rows].float(), gathered_TD[tokens].float())
        result = torch.cat([part[e].view(-1, *part.shape[-2:]) for part in dw])
        assert_close(result, reference)


@pytest.mark.parametrize("which", ["up", "down"])
@pytest.mark.parametrize("sums", [torch.float32, None], ids=["fp32", "same"])
def test_adding_weight_grad_matches_reference(problem, which, sums):
    """Sums grow by the gradient, from run to run alike; those of experts without rows, NaN here, stay as they are."""
    from moeblaze_ops.kernels.hopper.weight_grad import hopper_weight_grad

    routing = route(problem)
    dtype = sums or problem.dtype
    filled = replace(problem, dtype=dtype)
    gathered_TD = random(problem, problem.num_tokens, problem.num_d)
    grouped_NGF = grouped(problem, routing, problem.parts if which == "up" else 1, problem.num_f)
    start = up_weights(filled) if which == "up" else [down_weight(filled)]
    for e, rows in enumerate(routing.rows):
        for part in start:
            if rows.start == rows.stop:
                part[e] = float("nan")
    results = []
    for _ in range(2):
        dw = [part.clone() for part in start]
        hopper_weight_grad(gathered_TD, grouped_NGF, dw, routing.slots_N, routing.offsets_E1, problem.top_k, accumulate=True)
        results.append(torch.cat([part.flatten(1, -3) if part.dim() == 4 else part[:, None] for part in dw], dim=1))
    assert torch.equal(*(result.nan_to_num(7.0) for result in results))
    before = torch.cat([part.flatten(1, -3) if part.dim() == 4 else part[:, None] for part in start], dim=1)
    for e, (rows, tokens) in enumerate(zip(routing.rows, routing.tokens, strict=True)):
        if rows.start == rows.stop:
            assert results[0][e].isnan().all()
            continue
        added = torch.einsum("rgf,rd->gfd", grouped_NGF[rows].float(), gathered_TD[tokens].float())
        assert_close(results[0][e], before[e].float() + added)


@pytest.mark.parametrize("which", ["up", "down"])
def test_fresh_experts_are_written_and_others_added_to(problem, which):
    """Those marked as fresh hold NaN before; of the others, those without rows keep it."""
    from moeblaze_ops.kernels.hopper.weight_grad import hopper_weight_grad

    routing = route(problem)
    gathered_TD = random(problem, problem.num_tokens, problem.num_d)
    grouped_NGF = grouped(problem, routing, problem.parts if which == "up" else 1, problem.num_f)
    args = (routing.slots_N, routing.offsets_E1, problem.top_k)
    written = up_weights(problem, nan_like) if which == "up" else [down_weight(problem, nan_like)]
    hopper_weight_grad(gathered_TD, grouped_NGF, written, *args)
    start = up_weights(problem) if which == "up" else [down_weight(problem)]
    added = [part.clone() for part in start]
    for part in added:
        for e, rows in enumerate(routing.rows):
            if rows.start == rows.stop:
                part[e] = float("nan")
    hopper_weight_grad(gathered_TD, grouped_NGF, added, *args, accumulate=True)
    for first in (0, 1):
        fresh_E = (torch.arange(len(routing.rows), device="cuda") % 2 == first).int()
        dw = [part.clone() for part in start]
        for part in dw:
            for e, rows in enumerate(routing.rows):
                if fresh_E[e] or rows.start == rows.stop:
                    part[e] = float("nan")
        hopper_weight_grad(gathered_TD, grouped_NGF, dw, *args, accumulate=True, fresh_E=fresh_E)
        for got, new, summed in zip(dw, written, added, strict=True):
            for e in range(len(routing.rows)):
                expected = new[e] if fresh_E[e] else summed[e]
                assert torch.equal(got[e].nan_to_num(7.0), expected.nan_to_num(7.0))


def test_kernels_that_begin_early_change_nothing(problem):
    """A range's backward in its order: each kernel may begin before the one launched last has ended, with the same bits."""
    from moeblaze_ops.kernels.hopper.configs import num_partials
    from moeblaze_ops.kernels.hopper.expert_down_backward import hopper_down_backward
    from moeblaze_ops.kernels.hopper.expert_order import order_experts
    from moeblaze_ops.kernels.hopper.expert_up import hopper_expert_up
    from moeblaze_ops.kernels.hopper.row_gemm import hopper_up_backward_rows
    from moeblaze_ops.kernels.hopper.weight_grad import hopper_weight_grad

    routing = route(problem)
    T, D, F, K = problem.num_tokens, problem.num_d, problem.num_f, problem.top_k
    N = routing.slots_N.shape[0]
    x_TD, dout_TD = random(problem, T, D), random(problem, T, D)
    w_up, w_down = up_weights(problem), down_weight(problem)
    weights_TK = torch.rand(T, K, device="cuda") if problem.weighted else None
    slots = (routing.slots_N, routing.offsets_E1)
    order_E1 = order_experts(routing.offsets_E1)
    results = []
    for early in (False, True, True, True):
        h_NGF = torch.zeros(N, problem.parts, F, device="cuda", dtype=problem.dtype)
        # The rows of the gradient of x take the place of the activation.
        place = torch.zeros(N * max(D, F), device="cuda", dtype=problem.dtype)
        wa_NF, dx_ND = place[: N * F].view(N, F), place[: N * D].view(N, D)
        partials_CN = torch.zeros(num_partials(F, D), N, device="cuda")
        dw_up, dw_down = [torch.ones_like(part) for part in w_up], torch.ones_like(w_down)
        hopper_expert_up(x_TD, w_up, [], *slots, routing.blocks_B2, K, "identity", h_NGF, wa_NF[:0])
        written = (h_NGF, partials_CN, wa_NF)
        given = (dout_TD, h_NGF, [w_down], weights_TK, *slots, routing.blocks_B2, K, problem.activation)
        hopper_down_backward(*given, *written, early)
        options = {"accumulate": True, "order_E1": order_E1}
        hopper_weight_grad(dout_TD, wa_NF.unsqueeze(1), [dw_down], *slots, K, **options)
        hopper_up_backward_rows(h_NGF, w_up, routing.offsets_E1, routing.blocks_B2, dx_ND, early=early)
        hopper_weight_grad(x_TD, h_NGF, dw_up, *slots, K, **options, early=early)
        # What comes next finds all of them ended.
        results.append([value.clone() for value in (place, h_NGF, partials_CN, dw_down, *dw_up)])
    for again in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], again, strict=True))


def test_weight_grad_isolates_experts(problem):
    """Inf and NaN in one expert's rows, of either operand, reach no other expert."""
    from moeblaze_ops.kernels.hopper.weight_grad import hopper_weight_grad

    routing = route(problem)
    gathered_TD = random(problem, problem.num_tokens, problem.num_d)
    grouped_NGF = grouped(problem, routing, problem.parts, problem.num_f)
    grouped_NGF[routing.rows[3]] = float("inf")
    dw = up_weights(problem, nan_like)
    hopper_weight_grad(gathered_TD, grouped_NGF, dw, routing.slots_N, routing.offsets_E1, problem.top_k)
    for e in (0, 1, 2, 4, 5):
        assert all(part[e].isfinite().all() for part in dw)


@pytest.mark.parametrize("channels", [0, 1, 8])
def test_rows_go_to_their_tokens(problem, channels):
    """With one expert a token; everything else keeps what it has."""
    from moeblaze_ops.kernels.hopper.row_gemm import hopper_down_rows, hopper_up_backward_rows

    problem = replace(problem, top_k=1)
    routing = route(problem)
    T, D = problem.num_tokens, problem.num_d
    a_NF, dh_NGF = (grouped(problem, routing, *widths) for widths in ((problem.num_f,), (problem.parts, problem.num_f)))
    w_down, w_up = down_weight(problem), up_weights(problem)
    b_down = [random(problem, problem.num_experts, D)] if problem.bias else []
    weights_TK = torch.rand(T, 2, device="cuda")[:, 1:] if problem.weighted else None
    # Strided on both sides.
    left_TC, right_CD = random(problem, 2 * channels, T).t()[:, ::2], random(problem, D, channels).t()
    table = (routing.offsets_E1, routing.blocks_B2)
    y_ND, out_TD, dx_ND, dx_TD = (nan_like(problem, T, D) for _ in range(4))
    hopper_down_rows(a_NF, [w_down], b_down, *table, y_ND)
    run_twice(lambda: hopper_down_rows(a_NF, [w_down], b_down, *table, out_TD, routing.slots_N, weights_TK), [out_TD])
    hopper_up_backward_rows(dh_NGF, w_up, *table, dx_ND)
    product = (left_TC, right_CD) if channels else (None, None)
    run_twice(lambda: hopper_up_backward_rows(dh_NGF, w_up, *table, dx_TD, routing.slots_N, *product), [dx_TD])
    reached = torch.zeros(T, dtype=torch.bool, device="cuda")
    for rows, tokens in zip(routing.rows, routing.tokens, strict=True):
        scale = 1.0 if weights_TK is None else weights_TK[tokens]
        assert torch.equal(out_TD[tokens], (y_ND[rows].float() * scale).to(problem.dtype))
        assert_close(dx_TD[tokens], dx_ND[rows].float() + left_TC[tokens].float() @ right_CD.float())
        reached[tokens] = True
    assert out_TD[~reached].isnan().all() and dx_TD[~reached].isnan().all()


@pytest.mark.parametrize("top_k", [1, 2])
def test_steps_launch_again_what_steps_before_launched(top_k, monkeypatch):
    """Each step has tensors of its own, and gives what it gives where everything is launched in full."""
    import moeblaze_ops
    from moeblaze_ops.kernels import launch, repeated

    T, D, F, E = 512, 256, 128, 8
    in_full = []
    original = launch.run_compiled
    monkeypatch.setattr(launch, "run_compiled", lambda *args: (in_full.append(args[0]), original(*args)))

    def step():
        shapes = (T, D), (E, 2 * F, D), (E, D, F)
        x, w_up, w_down = ((torch.randn(s, device="cuda") * 0.1).bfloat16().requires_grad_() for s in shapes)
        weights, experts = torch.rand(T, E, device="cuda").topk(top_k)
        weights.requires_grad_()
        out = moeblaze_ops.moe(x, weights, experts, w_up, w_down)
        dout = torch.randn_like(out)
        return [out, *torch.autograd.grad(out, (x, weights, w_up, w_down), dout)]

    for seed in range(4):
        torch.manual_seed(seed)
        in_full.clear()
        results = step()
        if seed > 1:
            assert not in_full, "the third step repeats launches"
        with monkeypatch.context() as patch:
            patch.setattr(repeated, "_is_watched", lambda: True)
            torch.manual_seed(seed)
            wanted = step()
        if seed > 1:
            assert in_full, "and what is watched launches in full"
        assert all(torch.equal(got, want) for got, want in zip(results, wanted, strict=True))
