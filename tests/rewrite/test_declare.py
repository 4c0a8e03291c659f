"""``declare``: an operator of a library is taken for the call of torch's that it computes, once both agree."""

import re
import sys
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moeblaze_ops
from moeblaze_ops.compile.switch import cache_key
from moeblaze_ops.lowering.graph import operators
from tests.tools.rewrite_harness import check_against_eager, compiled

T, K, E, D, FF = 24, 2, 4, 16, 8


@torch.library.custom_op("declared::add_rows", mutates_args=())
def add_rows(out: Tensor, index: Tensor, src: Tensor) -> Tensor:
    return out.scatter_add(0, index, src)


@torch.library.custom_op("declared::silu", mutates_args=())
def silu(x: Tensor) -> Tensor:
    return F.silu(x)


@torch.library.custom_op("declared::write", mutates_args=("x",))
def write(x: Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("declared::without_gradient", mutates_args=())
def without_gradient(x: Tensor) -> Tensor:
    return F.silu(x)


for own in (add_rows, silu, without_gradient):
    own.register_fake(lambda x, *others: torch.empty_like(x))
add_rows.register_autograd(
    lambda ctx, d: (d, None, d.gather(0, ctx.saved_tensors[0])),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)
silu.register_autograd(
    lambda ctx, d: torch.ops.aten.silu_backward(d, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)
# Twice the gradient that it should have.
without_gradient.register_autograd(lambda ctx, d: 2 * d, setup_context=lambda ctx, inputs, output: None)

ROWS = (torch.zeros(3, D), torch.tensor([0, 2, 0, 1]).unsqueeze(1).expand(-1, D), torch.randn(4, D))
NUMBERS = (torch.linspace(-3, 3, 7),)


@pytest.fixture(autouse=True)
def declared():
    torch._dynamo.reset()
    with mock.patch.dict(operators.CALLS):
        yield


class Layer(nn.Module):
    """Rows sorted by expert, as torchtitan's dispatcher has them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(E, FF, D) * D**-0.5) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(E, D, FF) * FF**-0.5)

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        weights, ids = scores.topk(K, dim=-1)
        order = ids.view(-1).argsort(stable=True)
        tokens = order // K
        expert = ids.view(-1)[order]
        h = silu(torch.einsum("nd,nfd->nf", x[tokens], self.w1[expert])) * torch.einsum("nd,nfd->nf", x[tokens], self.w3[expert])
        y = torch.einsum("nf,ndf->nd", h, self.w2[expert]) * weights.view(-1)[order].unsqueeze(1)
        return add_rows(torch.zeros_like(x), tokens.unsqueeze(1).expand(-1, D), y)


def declare_both():
    moeblaze_ops.declare(add_rows, lambda out, index, src: out.scatter_add(0, index, src), ROWS)
    moeblaze_ops.declare(torch.ops.declared.silu, F.silu, NUMBERS)


def test_layer_of_declared_operators_is_rewritten():
    layer, x = Layer(), torch.randn(T, D)
    run, rewriting = compiled(layer)
    run(x)
    assert not rewriting.rewritten
    declare_both()
    rewriting = check_against_eager(layer, x)
    assert len(rewriting.rewritten) == 1 and not {"add_rows", "silu"} & {name.partition(".")[0] for name in rewriting.operators()}


def test_operator_stays_where_nothing_is_rewritten():
    declare_both()
    run, rewriting = compiled(lambda out, index, src: add_rows(out, index, silu(src)))
    run(*ROWS)
    assert {"add_rows.default", "silu.default"} <= set(rewriting.operators())


def test_what_is_declared_is_in_the_keys_of_caches():
    before = cache_key()
    declare_both()
    assert cache_key() != before


def test_a_later_declaration_replaces_one():
    declare_both()
    moeblaze_ops.declare(add_rows, lambda out, index, src: torch.scatter_add(out, 0, index, src), ROWS)
    assert operators.CALLS["declared::add_rows"].target is torch.scatter_add


@pytest.mark.parametrize(
    ("op", "function", "examples", "says"),
    [
        (F.silu, F.silu, [NUMBERS], "declare: op must be an operator of torch.library, got <function silu"),
        (torch.ops.aten.silu.default, F.silu, [NUMBERS], "declare: op must be of another library, got aten::silu"),
        (write, F.silu, [NUMBERS], "op must write to no argument and give one tensor, got declared::write(Tensor(a0!) x)"),
        (silu, F.silu, [], "declare: examples must be one or more, got none"),
        (silu, lambda x: F.silu(x) + 1, [NUMBERS], "function must be one call of a function of torch that the rewriter knows"),
        (silu, lambda x: x.relu_(), [NUMBERS], "function must be one call of"),
        (add_rows, lambda out, index, src: out + src, [ROWS], "function must be one call of"),
        (silu, F.relu, [NUMBERS], "function must compute what the operator does, results and gradients, got AssertionError"),
        (without_gradient, F.silu, [NUMBERS], "declare: function must compute what the operator does, results and gradients"),
        (add_rows, lambda out, index, src: out.scatter_add(1, index, src), [ROWS], "got RuntimeError (Expected index"),
    ],
)  # fmt: skip
def test_what_cannot_be_declared(op, function, examples, says):
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        moeblaze_ops.declare(op, function, *examples)
    assert not operators.CALLS


def test_torchtitans_operator_is_declared_when_it_is_imported(monkeypatch):
    library = torch.library.Library("torchtitan", "FRAGMENT")
    library.define("deterministic_scatter_add(Tensor out, Tensor index, Tensor src) -> Tensor")
    library.impl("deterministic_scatter_add", lambda out, index, src: out.scatter_add(0, index, src), "CompositeImplicitAutograd")
    from moeblaze_ops.integrations import registration

    monkeypatch.setitem(sys.modules, "torchtitan.ops.scatter_add", types.ModuleType("torchtitan.ops.scatter_add"))
    monkeypatch.delitem(sys.modules, "moeblaze_ops.compile.torchtitan", raising=False)
    registration.register_when_imported()
    assert operators.CALLS["torchtitan::deterministic_scatter_add"].target == "scatter_add"
