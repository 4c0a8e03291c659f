"""Writes around a layer and scales beside its biases: cases that random layers found."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager, compiled, rewrite_of

pytestmark = pytest.mark.usefixtures("fp64")


def _share(weights, ids, e):
    return (weights * (ids == e)).sum(-1, keepdim=True)


def hidden_column_stored(self, x, weights, ids):
    def expert(e):
        gate = x @ self.w1[e]
        gate[..., 0] = 1.0
        return (F.silu(gate) * (x @ self.w3[e])) @ self.w2[e]

    return sum(expert(e) * _share(weights, ids, e) for e in range(self.E))


def offset_stored_between_products(self, x, weights, ids):
    order = ids.view(-1).argsort()
    ends = torch.bincount(ids.view(-1), minlength=self.E).cumsum(0).int()
    mm, rows = torch.ops.moe_zoo.grouped_mm_fallback, x[order // ids.shape[1]]
    hidden = F.silu(mm(rows, self.w1, ends)) * mm(rows, self.w3, ends)
    ends[0] = 0
    y = mm(hidden, self.w2, ends) * weights.view(-1)[order].unsqueeze(-1)
    return y[order.argsort()].view(x.shape[0], ids.shape[1], -1).sum(1)


def _loop(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(self.E):
        token, slot = torch.where(ids == e)
        y = (F.silu(x[token] @ self.w1[e]) * (x[token] @ self.w3[e])) @ self.w2[e]
        out.index_add_(0, token, y * weights[token, slot, None])
    return out


def weights_written(self, x, weights, ids):
    out = _loop(self, x, weights, ids)
    weights.view(-1).mul_(2)
    return out, weights


def computed_weights_written(self, x, weights, ids):
    return weights_written(self, x, weights + 0.0 * ids, ids)


def tokens_written(self, x, weights, ids):
    x = x + 1
    out = _loop(self, x, weights, ids)
    x.mul_(2)
    return out, x


def test_written_layers_stay():
    backend = check_against_eager(zoo.StackedMoE(hidden_column_stored, "split"), torch.randn(10, zoo.D), aot=True)
    assert not backend.rewritten


@pytest.mark.parametrize("aot", [False, True])
@pytest.mark.parametrize("function", [computed_weights_written, tokens_written])
def test_what_the_graph_made_may_be_written_before_the_backward(function, aot):
    backend = check_against_eager(zoo.StackedMoE(function, "split"), torch.randn(10, zoo.D), aot=aot)
    assert len(backend.rewritten) == 1


@pytest.mark.parametrize("aot", [False, True])
@pytest.mark.parametrize("write", [lambda ids: ids.add_(8), lambda ids: ids.masked_fill_(ids == 1, -1)], ids=["add", "fill"])
def test_ids_may_be_written_behind_scores_that_they_choose(write, aot):
    def ids_written(self, x, weights, ids):
        scores, ids = (x @ self.w1[:, :, 0].T).softmax(-1), ids.clone()
        chosen = ((ids == e).any(-1, keepdim=True) * scores[:, e, None] for e in range(self.E))
        out = sum((F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] * share for e, share in enumerate(chosen))
        write(ids)
        return out, ids

    assert len(check_against_eager(zoo.StackedMoE(ids_written, "split"), torch.randn(10, zoo.D), aot=aot).rewritten) == 1


def test_what_a_caller_gave_may_not():
    layer = zoo.StackedMoE(weights_written, "split")

    def given(x, weights, ids):
        return weights_written(layer, x, weights, ids)

    x, (weights, ids) = torch.randn(10, zoo.D), layer.router(torch.randn(10, zoo.D))
    assert rewrite_of(given, x, weights.detach(), ids).reasons == ["OPERAND_CHANGED"]


def test_offsets_stored_between_products():
    layer = zoo.StackedMoE(offset_stored_between_products, "split")
    assert not rewrite_of(layer, torch.randn(10, zoo.D)).rewritten  # eager has no backward to compare with


def test_write_that_autograd_does_not_see():
    def through_detached(self, x, weights, ids):
        detached = (x := x + 1).detach()
        detached.mul_(2)
        return sum((F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] * _share(weights, ids, e) for e in range(self.E))

    check_against_eager(zoo.StackedMoE(through_detached, "split"), torch.randn(10, zoo.D), aot=True)


@pytest.mark.parametrize("activation", [torch.tanh, F.silu], ids=["unfused", "fused"])
def test_scaled_weights_beside_a_bias(activation):
    def scaled(self, x, weights, ids):
        weights = weights * 2.5
        experts = ((activation(mlp.fc1(x)), mlp.fc2) for mlp in self.experts)
        return sum(down(hidden) * _share(weights, ids, e) for e, (hidden, down) in enumerate(experts))

    backend = check_against_eager(zoo.ModuleListMoE(scaled, expert=zoo.PlainMLP), torch.randn(10, zoo.D), aot=True)
    assert len(backend.rewritten) == 1


def test_logits_written_before_the_backward(fused_routers):
    class Layer(zoo.StackedMoE):
        def forward(self, x):
            logits = self.router.gate(x)
            weights, ids = torch.topk(logits.softmax(-1), zoo.K)
            out = self.experts(self, x, weights, ids)
            logits.mul_(2)
            return out, logits

    torch.set_default_dtype(torch.float32)
    layer = Layer(zoo.stacked_loop, "split")
    backend = check_against_eager(layer, torch.randn(10, zoo.D), tolerance=1e-5, aot=True)
    assert len(backend.rewritten) == 1 and "route.default" not in backend.operators()


def test_scaled_weights_are_written_afterwards():
    """The weights before the scaling are still there, and the number is known."""

    def written(self, x, weights, ids):
        weights = weights * 2.0
        shares = [_share(weights, ids, e) for e in range(self.E)]
        weights.mul_(2)
        return sum((F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e] * share for e, share in enumerate(shares))

    assert len(check_against_eager(zoo.StackedMoE(written, "split"), torch.randn(10, zoo.D), aot=True).rewritten) == 1


@pytest.mark.parametrize("activation", [torch.tanh, F.silu], ids=["unfused", "fused"])
def test_hidden_scaled_in_place(activation):
    """The number belongs to the weights, also to those that the fused router makes."""

    def scaled(self, x, weights, ids):
        def expert(e):
            hidden = activation(x @ self.w1[e]) * (x @ self.w3[e])
            hidden.mul_(0.5)
            return hidden @ self.w2[e]

        return sum(expert(e) * _share(weights, ids, e) for e in range(self.E))

    torch.set_default_dtype(torch.float32)
    layer = zoo.StackedMoE(scaled, "split")
    assert len(check_against_eager(layer, torch.randn(10, zoo.D), tolerance=1e-5, aot=True).rewritten) == 1


def test_tokens_scaled_after_the_gather():
    def scaled(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(self.E):
            token, slot = torch.where(ids == e)
            rows = x[token] * 1.25
            y = (F.silu(rows @ self.w1[e]) * (rows @ self.w3[e])) @ self.w2[e]
            out.index_add_(0, token, y * weights[token, slot, None])
        return out

    (found,) = check_against_eager(zoo.StackedMoE(scaled, "split"), torch.randn(10, zoo.D), aot=True).rewritten
    assert found.activation == "swiglu"


@pytest.mark.parametrize("again", [0, 1, 3])
def test_rows_stored_again(again):
    """Later rows go over earlier ones: what expert 0 stores last is there, once."""

    def twice(self, x, weights, ids):
        rows, chosen = x.repeat_interleave(ids.shape[-1], dim=0), ids.view(-1)
        y = torch.zeros_like(rows)
        for e, number in ((0, 0), (1, 1), (2, 2), (3, 3), (0, again)):
            hits = chosen == number
            y[hits] = (F.silu(rows[hits] @ self.w1[e]) * (rows[hits] @ self.w3[e])) @ self.w2[e]
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)

    check_against_eager(zoo.StackedMoE(twice, "split"), torch.randn(10, zoo.D), aot=True)


def _rows_of_slots(self, x, ids):
    rows, chosen = x.repeat_interleave(ids.shape[-1], dim=0), ids.view(-1)
    y = torch.zeros_like(rows)
    for e in range(self.E):
        hits = chosen == e
        y[hits] = (F.silu(rows[hits] @ self.w1[e]) * (rows[hits] @ self.w3[e])) @ self.w2[e]
    return y


def test_stored_rows_are_read_elsewhere():
    """They are a layer of one expert for each slot, to which the weighted sum does not belong."""

    def read(self, x, weights, ids):
        y = _rows_of_slots(self, x, ids)
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1), y[0].clone()

    (found,) = check_against_eager(zoo.StackedMoE(read, "split"), torch.randn(10, zoo.D), aot=True).rewritten
    assert (found.T, found.K) == (20, 1)


def test_inverse_permutation_is_read_elsewhere():
    """It is stored into a buffer by a node that nobody reads, and has to stay."""

    def read(self, x, weights, ids):
        order = ids.view(-1).argsort()
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        ends = torch.bincount(ids.view(-1), minlength=self.E).cumsum(0).int()
        mm, rows = torch.ops.moe_zoo.grouped_mm_fallback, x[order // ids.shape[1]]
        y = mm(F.silu(mm(rows, self.w1, ends)) * mm(rows, self.w3, ends), self.w2, ends)[inverse]
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1), inverse * weights.mean()

    (found,) = check_against_eager(zoo.StackedMoE(read, "split"), torch.randn(10, zoo.D), aot=True).rewritten
    assert found.K == zoo.K


class Stacked(nn.Module):
    """Experts of one hidden layer, stacked; what combines them is given as a function of the layer and the tokens."""

    def __init__(self, combine, num_experts=3):
        super().__init__()
        torch.manual_seed(0)
        self.combine = combine
        self.router = nn.Linear(8, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, 8, 6) / 3)
        self.down = nn.Parameter(torch.randn(num_experts, 6, 8) / 3)

    def expert(self, e, x):
        return F.silu(x @ self.up[e]) @ self.down[e]

    def forward(self, x):
        return self.combine(self, x)


def written_back_in_another_order(layer, x):
    weights, ids = layer.router(x).softmax(-1).topk(2)
    mask = F.one_hot(ids, 3).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for e in range(3):
        slot, token = torch.where(mask[e])
        out[token.sort()[0]] = out[token] + layer.expert(e, x[token]) * weights[token, slot, None]
    return out


def fewer_ids_than_rows(layer, x):
    weights, ids = layer.router(x).softmax(-1).topk(1)
    flat = ids.reshape(-1)
    rows = x[:, None].expand(-1, 2, -1).reshape(-1, 8)
    y = torch.zeros_like(rows)
    for e in range(3):
        hits = (flat == e).nonzero(as_tuple=True)[0]
        y.index_copy_(0, hits, layer.expert(e, rows.index_select(0, hits)))
    return (y.view(-1, 2, 8) * weights.unsqueeze(-1)).sum(dim=1)


def one_expert_broadcast(layer, x):
    weights, ids = layer.router(x).softmax(-1).topk(2)
    scores = torch.zeros(x.shape[0], 3).scatter(1, ids, weights)
    return torch.einsum("ted,te->td", torch.stack([layer.expert(0, x)], 1), scores)


@pytest.mark.parametrize("combine", [written_back_in_another_order, fewer_ids_than_rows, one_expert_broadcast])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_lookalikes_of_writes_and_sums(combine, num_tokens):
    check_against_eager(Stacked(combine), torch.randn(num_tokens, 8), aot=True)


def test_weights_of_one_slot_are_stored():
    """A write by subscript is among the nodes that the result depends on, and holds no tensor."""

    def stored(self, x, weights, ids):
        weights = weights.clone()
        weights[:, 0] = 0.5
        rows = x.repeat_interleave(ids.shape[1], dim=0).unsqueeze(1)
        w1, w3, w2 = (w[ids.view(-1)] for w in (self.w1, self.w3, self.w2))
        y = torch.bmm(F.silu(torch.bmm(rows, w1)) * torch.bmm(rows, w3), w2).squeeze(1)
        return (y * weights.view(-1, 1)).view(*ids.shape, -1).sum(1)

    check_against_eager(zoo.StackedMoE(stored, "split"), torch.randn(10, zoo.D), aot=True)


def test_outputs_are_stored_with_an_axis_more():
    """``ys[:, e] = y`` for ``y`` of shape [1, T, D]; of [1, D] it is another function."""

    def stored(rows):
        def combine(self, x, weights, ids):
            ys = torch.empty(x.shape[0], self.E, x.shape[1])
            for e in range(self.E):
                ys[:, e] = rows((F.silu(x @ self.w1[e]) * (x @ self.w3[e])) @ self.w2[e])
            return (ys * torch.zeros(x.shape[0], self.E).scatter(1, ids, weights)[..., None]).sum(1)

        return zoo.StackedMoE(combine, "split")

    x = torch.randn(10, zoo.D)
    assert len(check_against_eager(stored(lambda y: y[None]), x, aot=True).rewritten) == 1
    assert not check_against_eager(stored(lambda y: y[:1]), x, aot=True).rewritten


def with_a_write(write):
    """A layer whose tokens, weights or output are written to between two of its steps, in a way of its own."""

    def combine(self, x, weights, ids):
        x, weights, out = x * 1, weights * 1, torch.zeros_like(x)
        shares = [_share(weights, ids, e) for e in range(self.E)]
        hidden = [F.silu(x @ self.w1[e]) * (x @ self.w3[e]) for e in range(self.E)]
        write(x, weights, out)
        for e in range(self.E):
            out += (hidden[e] @ self.w2[e]) * shares[e]
        return out

    return combine


def tokens_in_a_list(x, weights, out):
    torch._foreach_mul_([x], 2.0)


def one_of_several(x, weights, out):
    torch._foreach_add_([torch.zeros_like(x), x, weights], 1.0)


def second_of_two_outputs(x, weights, out):
    torch.sort(weights * 2, out=(weights, torch.empty_like(weights, dtype=torch.int64)))


def without_an_overload(x, weights, out):
    torch.ops.moeblaze_tests.add_into(out, x)


@pytest.fixture(scope="module")
def add_into():
    library = torch.library.Library("moeblaze_tests", "FRAGMENT")
    library.define("add_into(Tensor(a!) out, Tensor x) -> ()")
    library.impl("add_into", _add, "CPU")
    library.impl("add_into", lambda out, x: None, "Meta")
    yield
    library._destroy()


def _add(out, x):
    out.add_(x)


@pytest.mark.parametrize("write", [tokens_in_a_list, one_of_several, second_of_two_outputs, without_an_overload])
def test_writes_of_every_kind_are_seen(write, add_into):
    layer, x = zoo.StackedMoE(with_a_write(write), "split"), torch.randn(10, zoo.D)
    with torch.no_grad():
        run, _ = compiled(layer, aot=True)
        torch.testing.assert_close(run(x), layer(x))


def first_id_is_the_last(flat, weights, x):
    flat[0] = flat[-1]


def first_id_is_filled(flat, weights, x):
    flat.view(-1, 2)[:1].fill_(1)


def first_weights_are_others(flat, weights, x):
    weights.view(-1)[0] = weights[-1, 0]


def first_token_is_another(flat, weights, x):
    x.view(-1)[: zoo.D] = x[-1]


def written_by_an_alias(write):
    """Ids, weights and tokens in memory of their own, written to after they were made, and before experts store rows of slots."""

    def combine(self, x, weights, ids):
        x, weights, ids = x.clone(), weights.clone(), ids.clone()
        flat = ids.view(-1)
        write(flat, weights, x)
        rows = x.repeat_interleave(ids.shape[1], 0)
        y = torch.empty_like(rows)
        for e in range(self.E):
            rows_e = rows[flat == e]
            y[flat == e] = (F.silu(rows_e @ self.w1[e]) * (rows_e @ self.w3[e])) @ self.w2[e]
        return (y.view(x.shape[0], ids.shape[1], -1) * weights[..., None]).sum(1)

    return combine


@pytest.mark.parametrize("write", [first_id_is_the_last, first_id_is_filled, first_weights_are_others, first_token_is_another])
def test_what_writes_to_operands_stays(write):
    layer = zoo.StackedMoE(written_by_an_alias(write), "split")
    assert len(check_against_eager(layer, torch.randn(10, zoo.D), aot=True).rewritten) == 1


def sum_as_large_as_a_copy(self, x, weights, ids):
    """The sum starts from zeros in the shape of a tensor that others read, and that is made of one that was written to."""
    first = x.clone()
    first.add_(1.0)
    second = first.clone()
    second.mul_(2.0)
    out = torch.zeros_like(second)
    for e in range(self.E):
        token, slot = torch.where(ids == e)
        h = F.silu(x[token] @ self.w1[e]) * (x[token] @ self.w3[e])
        out.index_add_(0, token, h @ self.w2[e] * weights[token, slot, None])
    return out + second


def test_writes_to_what_a_reader_is_made_of(fp64):
    backend = check_against_eager(zoo.StackedMoE(sum_as_large_as_a_copy), torch.randn(10, zoo.D))
    assert len(backend.rewritten) == 1 and backend.operators().count("add_") == 1


STORES = {
    "index_add": lambda out, token, y: out.index_add_(0, token, y),
    "index_add of a copy": lambda out, token, y: out.copy_(out.index_add(0, token, y)),
    "index_put": lambda out, token, y: out.index_put_((token,), y, accumulate=True),
    "setitem": lambda out, token, y: out.__setitem__(token, out[token].to(y.dtype) + y),
    "index_copy": lambda out, token, y: out.index_copy_(0, token, out[token].to(y.dtype) + y),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STORES)
def test_rows_of_another_dtype_than_what_they_are_stored_in(name, dtype):
    """They raise an error as written, as under autocast, and do so where a graph has the layer."""

    def layer(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(self.E):
            token, slot = torch.where(ids == e)
            y = (F.silu(x[token] @ self.w1[e]) * (x[token] @ self.w3[e])) @ self.w2[e]
            STORES[name](out, token, (y * weights[token, slot, None]).to(dtype))
        return out

    module, x = zoo.StackedMoE(layer, "split").float(), torch.randn(12, zoo.D).float()
    if dtype == x.dtype:
        assert len(check_against_eager(module, x, tolerance=1e-5).rewritten) == 1
    else:
        run, backend = compiled(module)
        for forward in (module, run):
            with (
                torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
                pytest.raises(RuntimeError, match="dtype|scalar type"),
            ):
                forward(x)
        assert not backend.rewritten


def hidden_written_afterwards(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in range(self.E):
        gate = x @ self.w1[e]
        hidden = F.silu(gate) * (x @ self.w3[e])
        gate.zero_()
        out = out + hidden @ self.w2[e] * _share(weights, ids, e)
    return out


def hidden_written_afterwards_and_read(self, x, weights, ids):
    gate = x @ self.w1[0]
    out = torch.zeros_like(x)
    for e in range(self.E):
        hidden = F.silu(gate if e == 0 else x @ self.w1[e]) * (x @ self.w3[e])
        out = out + hidden @ self.w2[e] * _share(weights, ids, e)
        if e == 0:
            gate.zero_()
    return out, gate


def test_writes_that_nobody_reads_go_with_the_layer():
    with torch.no_grad():
        run, backend = compiled(zoo.StackedMoE(hidden_written_afterwards))
        run(torch.randn(10, zoo.D))
    assert len(backend.rewritten) == 1 and "zero_" not in backend.operators()


def test_writes_that_somebody_reads_do_not():
    with torch.no_grad():
        run, backend = compiled(zoo.StackedMoE(hidden_written_afterwards_and_read))
        run(torch.randn(10, zoo.D))
    assert backend.reasons == ["EXTRA_USER"]


WEIGHTS_ARE_WRITTEN = {
    "in place by position": lambda weights: F.hardsigmoid(weights, True),
    "alpha dropout of all": lambda weights: F.alpha_dropout(weights, 1.0, True, True),
    "feature dropout of all": lambda weights: F.feature_alpha_dropout(weights[None], 1.0, True, True),
    "dropout of all rows": lambda weights: F.dropout1d(weights, 1.0, True, True),
    "operator as a method": lambda weights: torch.Tensor.__imul__(weights, 2),
    "result by position": lambda weights: F.normalize(weights.detach() + 1, 2.0, 1, 1e-12, weights.detach()),
    "embedding of bounded norm": lambda weights: F.embedding(torch.tensor([0, 1, 2]), weights.detach(), None, 0.1),
    "statistics": lambda weights: F.batch_norm(weights + 1, *weights.detach()[:2], None, None, True),
}


@pytest.mark.parametrize("name", WEIGHTS_ARE_WRITTEN)
def test_weights_that_are_written_between_two_experts(name):
    def combine(self, x, weights, ids):
        weights, out = weights * 1, torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if e == 1:
                WEIGHTS_ARE_WRITTEN[name](weights)
            out = out + expert(x) * _share(weights, ids, e)
        return out

    backend = check_against_eager(zoo.ModuleListMoE(combine), torch.randn(9, zoo.D), aot=True)
    assert not backend.rewritten


NOTHING_IS_WRITTEN = {
    "a new result": lambda weights: F.hardsigmoid(weights, False),
    "embedding": lambda weights: F.embedding(torch.tensor([0, 1, 2]), weights.detach(), None),
    "given statistics": lambda weights: F.batch_norm(weights + 1, *weights.detach()[:2], None, None, False),
}


@pytest.mark.parametrize("name", NOTHING_IS_WRITTEN)
def test_weights_that_are_read_between_two_experts(name):
    def combine(self, x, weights, ids):
        weights, out = weights * 1, torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if e == 1:
                self.seen = NOTHING_IS_WRITTEN[name](weights)
            out = out + expert(x) * _share(weights, ids, e)
        return out

    assert len(check_against_eager(zoo.ModuleListMoE(combine), torch.randn(9, zoo.D)).rewritten) == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("rows_apart", "num_layers"), [(None, 1), (2, 0)])
def test_outputs_stored_where_others_are(rows_apart, num_layers, dynamic):
    """Where only a call tells how many tokens there are, strides still tell whether outputs of one expert are another's, too."""

    def combine(self, x, weights, ids):
        size, (T, D) = len(self.experts), x.shape
        outputs = x.new_zeros(size * T * D).as_strided((size, T, D), ((rows_apart or T) * D, D, 1))
        for e, expert in enumerate(self.experts):
            outputs[e] = expert(x)
        return torch.stack([out * _share(weights, ids, e) for e, out in enumerate(outputs)]).sum(0)

    backend = check_against_eager(zoo.ModuleListMoE(combine), torch.randn(9, zoo.D), dynamic=dynamic)
    assert len(backend.rewritten) == num_layers


def test_gradients_inside_of_a_graph():
    """True if a tensor requires one is set by an operator whose result nobody reads."""
    layer = zoo.stacked("dense_einsum")
    parameters, x = {name: p.detach() for name, p in layer.named_parameters()}, torch.randn(10, zoo.D)
    gradients = torch.func.grad(lambda given: torch.func.functional_call(layer, given, (x,)).square().sum())
    run, _ = compiled(gradients)
    torch.testing.assert_close(run(parameters), gradients(parameters))
