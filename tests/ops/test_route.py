from itertools import cycle, product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck
from torch.library import opcheck

from moeblaze_ops.ops.dispatch import dispatch
from moeblaze_ops.ops.route import route, route_backward
from tests.corpus import reference
from tests.corpus.router_cases import LOGITS, ROUTERS, Router, make_logits

op = torch.ops.moeblaze.route


def backward_arguments(router, logits_TE):
    weights_TK, experts_TK = op(*router.arguments(logits_TE, router.bias(logits_TE.dtype)))
    dweights_TK = torch.randn_like(weights_TK)
    return dweights_TK, logits_TE, weights_TK, experts_TK, router.scoring, router.renormalize, router.scale


# Each router with each kind of logits, and each of either with all dtypes: 7 kinds and 3 dtypes have no common divisor.
DTYPES = cycle((torch.bfloat16, torch.float32, torch.float64))
CASES = [(name, case, dtype) for (name, case), dtype in zip(product(ROUTERS, LOGITS), DTYPES, strict=False)]


@pytest.mark.parametrize(("name", "case", "dtype"), CASES, ids=str)
def test_route_matches_reference(name, case, dtype):
    torch.manual_seed(0)
    router = ROUTERS[name]
    arguments = router.arguments(make_logits(case, router.num_experts, dtype), router.bias())
    weights_TK, experts_TK = op(*arguments)
    expected_weights, expected_experts = reference.route(*arguments)
    assert experts_TK.dtype == torch.int32
    assert torch.equal(experts_TK, expected_experts)
    torch.testing.assert_close(weights_TK, expected_weights, equal_nan=True)


@pytest.mark.parametrize("name", ROUTERS)
def test_route_agrees_with_topk_without_ties(name):
    torch.manual_seed(1)
    router = ROUTERS[name]
    if router.num_groups > 1:
        pytest.skip("torch.topk knows no groups")
    logits_TE = make_logits("distinct", router.num_experts, torch.float64)
    bias_E = router.bias(torch.float64)
    scores_TE = {"softmax": logits_TE.softmax(1), "softmax_topk": logits_TE, "sigmoid": logits_TE.sigmoid()}
    choice_TE = scores_TE[router.scoring] + (0 if bias_E is None else bias_E)
    _, experts_TK = op(*router.arguments(logits_TE, bias_E))
    assert torch.equal(experts_TK.long(), choice_TE.topk(router.top_k).indices)


def test_route_matches_deepseek_v3():
    torch.manual_seed(2)
    logits_TE = make_logits("distinct", 64, torch.float64)
    bias_E = torch.randn(64, dtype=torch.float64) / 8
    weights_TK, experts_TK = route(
        logits_TE, 6, bias=bias_E, scoring="sigmoid", renormalize=True, scale=2.5, num_groups=8, top_groups=3
    )
    scores_TE = logits_TE.sigmoid()
    grouped = (scores_TE + bias_E).view(-1, 8, 8)
    kept = grouped.topk(2, dim=-1).values.sum(-1).topk(3, dim=-1).indices
    outside = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter(1, kept, False)
    choice_TE = grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)
    expected_experts = choice_TE.topk(6, dim=-1).indices
    expected = scores_TE.gather(1, expected_experts)
    expected = expected / (expected.sum(-1, keepdim=True) + 1e-20) * 2.5
    assert torch.equal(experts_TK.long(), expected_experts)
    torch.testing.assert_close(weights_TK, expected)


def test_route_prefers_the_lower_id_and_nan():
    nan = float("nan")
    logits_TE = torch.tensor([[1.0, 2.0, 2.0, nan], [-0.0, 0.0, -1.0, 0.0], [nan, nan, 1.0, nan]])
    _, experts_TK = route(logits_TE, 3, scoring="softmax_topk")
    assert experts_TK.tolist() == [[3, 1, 2], [0, 1, 3], [0, 1, 3]]


def test_route_goes_by_logits_where_their_sigmoids_are_equal():
    logits_TE = torch.tensor([[20.0, 30.0, 25.0, 0.0], [-200.0, -150.0, -300.0, -110.0]])
    for grouped in ({}, {"num_groups": 2, "top_groups": 2}):
        _, experts_TK = route(logits_TE, 2, scoring="sigmoid", **grouped)
        assert experts_TK.tolist() == [[1, 2], [3, 1]]
    _, experts_TK = route(logits_TE, 2, scoring="sigmoid", bias=torch.zeros(4))
    assert experts_TK.tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("name", ROUTERS)
def test_route_gradients(name):
    torch.manual_seed(4)
    router = ROUTERS[name]
    logits_TE = make_logits("distinct", router.num_experts, torch.float64, num_tokens=3).requires_grad_()
    arguments = router.arguments(logits_TE, router.bias(torch.float64))
    assert gradcheck(lambda logits: op(logits, *arguments[1:])[0], logits_TE)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_route_backward_is_no_worse_than_eager_in_the_same_dtype(name, dtype):
    torch.manual_seed(5)
    router = ROUTERS[name]
    logits_TE = make_logits("distinct", router.num_experts, dtype)
    bias_E = router.bias()
    dweights_TK = torch.randn(logits_TE.shape[0], router.top_k)

    def gradient(run, dtype):
        leaf = logits_TE.to(dtype).requires_grad_()
        weights_TK, _ = run(*router.arguments(leaf, bias_E))
        return torch.autograd.grad(weights_TK, leaf, dweights_TK.to(weights_TK.dtype))[0]

    truth = gradient(reference.route, torch.float64)
    got, eager = gradient(op, dtype), gradient(reference.route, dtype)
    assert got.dtype == dtype
    error, eager_error = (got.double() - truth).norm(), (eager.double() - truth).norm()
    # Both round to the dtype once at the end; eps/4 leaves room where eager's error happens to vanish.
    assert error <= 1.5 * eager_error + torch.finfo(dtype).eps / 4 * truth.norm() + torch.finfo(dtype).tiny


@pytest.mark.parametrize(("name", "case"), zip(ROUTERS, cycle(["distinct", "zero_tokens"]), strict=False))
def test_route_opcheck(name, case):
    torch.manual_seed(6)
    router = ROUTERS[name]
    logits_TE = make_logits(case, router.num_experts).requires_grad_()
    opcheck(op.default, router.arguments(logits_TE, router.bias()))
    opcheck(route_backward, tuple(_detached(backward_arguments(router, logits_TE))))


def _detached(arguments):
    return [argument.detach() if isinstance(argument, torch.Tensor) else argument for argument in arguments]


@pytest.mark.parametrize("name", ["softmax", "softmax_topk", "sigmoid_groups"])
def test_route_opcheck_strided(name):
    torch.manual_seed(7)
    router = ROUTERS[name]
    transposed = make_logits("distinct", router.num_experts).t().contiguous().t()
    opcheck(op.default, router.arguments(transposed.requires_grad_(), router.bias()))
    opcheck(route_backward, tuple(_detached(backward_arguments(router, transposed))))


def test_route_compiles_once_for_several_token_counts():
    torch.manual_seed(8)
    counter = CompileCounterWithBackend("aot_eager")
    options = {"scoring": "sigmoid", "renormalize": True, "scale": 2.5, "num_groups": 8, "top_groups": 3}
    bias_E = torch.randn(32)

    def run(logits_TE):
        return route(logits_TE, 4, bias=bias_E, **options)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for num_tokens in (6, 31, 200):
        logits_TE = torch.randn(num_tokens, 32, requires_grad=True)
        torch._dynamo.mark_dynamic(logits_TE, 0)
        (got, got_experts), (want, want_experts) = compiled(logits_TE), run(logits_TE)
        torch.testing.assert_close(got, want)
        assert torch.equal(got_experts, want_experts)
        dweights_TK = torch.randn_like(want)
        gradients = [torch.autograd.grad(weights, logits_TE, dweights_TK)[0] for weights in (got, want)]
        torch.testing.assert_close(*gradients)
    assert counter.frame_count == 1


def test_route_takes_leading_axes_and_feeds_dispatch():
    torch.manual_seed(9)
    logits = torch.randn(2, 5, 8)
    weights, experts = route(logits, 3)
    flat_weights, flat_experts = route(logits.flatten(0, 1), 3)
    assert weights.shape == experts.shape == (2, 5, 3)
    assert torch.equal(weights.flatten(0, 1), flat_weights) and torch.equal(experts.flatten(0, 1), flat_experts)
    assert int(dispatch(flat_experts, 8)[1][-1]) == 30


def test_autocast_leaves_the_logits_alone():
    torch.manual_seed(10)
    logits_TE = torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        weights_TK, _ = route(logits_TE, 2)
    assert torch.equal(weights_TK, route(logits_TE, 2)[0])


def test_only_logits_weights_and_experts_are_kept_for_backward():
    logits_TE = torch.randn(5, 8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        route(logits_TE, 2)
    assert sorted((tuple(t.shape), t.dtype.itemsize) for t in kept) == [((5, 2), 4), ((5, 2), 4), ((5, 8), 4)]


def test_bias_gets_no_gradient():
    bias_E = torch.zeros(8, requires_grad=True)
    logits_TE = torch.randn(5, 8, requires_grad=True)
    weights_TK, experts_TK = route(logits_TE, 2, bias=bias_E, scoring="sigmoid")
    weights_TK.sum().backward()
    assert bias_E.grad is None and logits_TE.grad is not None and not experts_TK.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring": "tanh"}, "route: scoring must be one of softmax, softmax_topk, sigmoid, got 'tanh'"),
        ({"top_k": 0}, r"route: top_k must be between 1 and 12 \(the experts, and at most 32\), got 0"),
        ({"top_k": 13}, r"route: top_k must be between 1 and 12 \(the experts, and at most 32\), got 13"),
        ({"scale": 0.0}, "route: scale must be positive and finite, got 0.0"),
        ({"num_groups": 5}, "route: num_groups must divide the 12 experts, got 5"),
        ({"num_groups": 4, "top_groups": 5}, "route: top_groups must be between 1 and num_groups=4, got 5"),
        ({"num_groups": 6, "top_groups": 1, "top_k": 3}, "route: top_k must be at most 2, the experts of 1 groups, got 3"),
        (
            {"num_groups": 12, "top_groups": 6, "scoring": "sigmoid"},
            "route: num_groups must leave 2 experts or more in a group, whose score is the sum of two, got 12",
        ),
        ({"bias": torch.zeros(11)}, r"route: bias_E must have shape \[12\] \(experts of logits_TE\), got shape \[11\]"),
    ],
)
def test_route_rejects_bad_options(change, message):
    with pytest.raises(ValueError, match=message):
        route(torch.zeros(3, 12), **{"top_k": 2, **change})


def test_route_rejects_bad_dtypes():
    with pytest.raises(TypeError, match="route: logits_TE must be bfloat16, .* got torch.int64 on cpu"):
        route(torch.zeros(3, 8, dtype=torch.int64), 2)
    with pytest.raises(TypeError, match="route: bias_E must be float32 or torch.float32, got torch.bfloat16"):
        route(torch.zeros(3, 8), 2, bias=torch.zeros(8, dtype=torch.bfloat16))


def test_route_rejects_too_many_experts():
    with pytest.raises(ValueError, match=r"route: logits_TE must have 1 to 4096 experts, got shape \[1, 5000\]"):
        route(torch.zeros(1, 5000), 2)


def test_route_backward_rejects_another_number_of_choices():
    arguments = list(backward_arguments(Router(8, 2), torch.randn(3, 8)))
    arguments[0] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"route_backward: dweights_TK must have shape \[3, 2\] of experts_TK, got"):
        route_backward(*arguments)
