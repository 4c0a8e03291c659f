"""Routing that was recorded is chosen again: the same experts, weights and gradients of the router as it is now."""

import copy

import pytest
import torch
from torch import nn

import moeblaze_ops
from moeblaze_ops.routing.record import RoutingRecord
from tests.corpus.module_lists import D, E, K, ModuleListMoE, T
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("fp64")


class Grouped(nn.Module):
    """Chooses 2 of 4 groups, and then 2 of their experts: two choices of one shape."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(8))

    def forward(self, x):
        scores = self.router(x).sigmoid()
        groups = torch.topk(scores.view(-1, 4, 2).amax(-1), k=2, dim=-1)[1]
        mask = torch.zeros(x.shape[0], 4).scatter(1, groups, 1).repeat_interleave(2, 1)
        ids = torch.topk(input=scores.masked_fill(mask == 0, 0), k=2, dim=-1, sorted=False)[1]
        weights = scores.gather(1, ids)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


class Network(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


MODELS = {
    "plain": ModuleListMoE,
    "grouped": Grouped,
    "explicit": lambda: moeblaze_ops.MoE(D, 12, E, K),
    "explicit, not renormalized": lambda: moeblaze_ops.MoE(D, 12, E, K, renormalize=False),
}


def eager(model):
    return model


def step(model, run, x):
    model.zero_grad()
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return Network(MODELS[request.param])


def test_a_record_replayed_changes_nothing(model):
    x = torch.randn(T, D)
    with moeblaze_ops.record_routing(model) as record, torch.no_grad():
        model(x)
    assert list(record.ids) == ["layers.0", "layers.1"]
    assert all(ids.shape == (T, K) and ids.dtype == torch.int64 for ids in record.ids.values())
    expected = step(model, model, x)
    with moeblaze_ops.replay_routing(model, record):
        torch.testing.assert_close(step(model, model, x), expected)
    torch.testing.assert_close(step(model, model, x), expected, rtol=0, atol=0)


def moved(model):
    """The model, with routers that choose otherwise."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in other.layers:
            layer.router.weight.copy_(torch.randn_like(layer.router.weight))
    return other


@pytest.mark.parametrize("run", ["eager", "rewritten"])
def test_another_router_chooses_what_was_recorded(model, run):
    """Its weights and their gradients are its own: as if the scores of all others were none."""
    x = torch.randn(T, D)
    with moeblaze_ops.record_routing(model) as record:
        model(x)
    other = moved(model)
    with moeblaze_ops.record_routing(other) as its_own:
        other(x)
    assert not torch.equal(its_own.ids["layers.0"], record.ids["layers.0"])
    torch._dynamo.reset()
    with rewriting_backend() as backend, moeblaze_ops.compile.recording() as records:
        called = other if run == "eager" else torch.compile(other, backend=backend, fullgraph=True)
        before = step(other, called, x)
        with moeblaze_ops.replay_routing(other, record):
            replayed = step(other, called, x)
            with moeblaze_ops.record_routing(other) as again, torch.no_grad():
                other(x)
        torch.testing.assert_close(step(other, called, x), before)
    if run == "rewritten" and isinstance(model.layers[0], ModuleListMoE):
        assert len(rewritten_in(records)) >= 4, "with its own choice, and with the recorded one"
    torch.testing.assert_close(replayed, expected_of(other, record, x))
    assert torch.equal(again.ids["layers.0"], its_own.ids["layers.0"]), "under replay a record is what would have been chosen"


def expected_of(model, record, x):
    """By a router of its own, written out."""

    def forward(layer, x, ids):
        logits = layer.router(x)
        if isinstance(layer, Grouped):
            weights = logits.sigmoid().gather(1, ids)
        else:
            weights = logits.softmax(-1).gather(1, ids)
        if isinstance(layer, moeblaze_ops.MoE):
            weights = weights / weights.sum(-1, keepdim=True) if layer.renormalize else weights
            return moeblaze_ops.moe(x, weights, ids, layer.w_up, layer.w_down)
        out = torch.zeros_like(x)
        for e, expert in enumerate(layer.experts):
            out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out

    def run(x):
        for name, layer in model.named_modules():
            if name in record.ids:
                x = x + forward(layer, x, record.ids[name])
        return x

    return step(model, run, x)


@pytest.mark.parametrize("run", ["eager", "rewritten"])
def test_tokens_without_a_record_choose_for_themselves(model, run):
    x, mask = torch.randn(T, D), torch.arange(T) % 3 > 0
    with moeblaze_ops.record_routing(model) as record:
        model(x)
    other = moved(model)
    with moeblaze_ops.record_routing(other) as own:
        other(x)
    part = RoutingRecord({"layers.0": record.ids["layers.0"].masked_fill(~mask[:, None], -1).int()}, record.widths)
    torch._dynamo.reset()
    with rewriting_backend() as backend:
        called = other if run == "eager" else torch.compile(other, backend=backend, fullgraph=True)
        with moeblaze_ops.replay_routing(other, part, mask=mask):
            out = called(x)
    mixed = torch.where(mask[:, None], record.ids["layers.0"], own.ids["layers.0"])
    with moeblaze_ops.replay_routing(other, RoutingRecord({"layers.0": mixed}, record.widths)):
        torch.testing.assert_close(out, other(x))


def test_other_ids_of_one_shape_compile_nothing():
    model, x = Network(ModuleListMoE), torch.randn(T, D)
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    run = torch.compile(model, backend=backend, fullgraph=True)
    outs = []
    for _ in range(3):
        ids = {f"layers.{i}": torch.rand(T, E).topk(K).indices for i in range(2)}
        with moeblaze_ops.replay_routing(model, ids):
            outs.append(run(x))
            torch.testing.assert_close(outs[-1], model(x))
    assert len(graphs) == 1 and not torch.equal(outs[0], outs[1])
    torch.testing.assert_close(run(x), model(x))
    assert len(graphs) == 2


def test_blocks_that_are_compiled_one_by_one_share_a_graph():
    layers, x = [ModuleListMoE() for _ in range(3)], torch.randn(T, D)
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    for layer in layers:
        layer.compile(backend=backend, fullgraph=True)
        ids = torch.rand(T, E).topk(K).indices
        with moeblaze_ops.replay_routing(layer, {"": ids}):
            torch.testing.assert_close(layer(x), layer.forward(x))
    assert len(graphs) == 1


def test_several_calls_are_recorded_in_order():
    model = ModuleListMoE()
    first, second = torch.randn(3, D), torch.randn(5, D)
    with moeblaze_ops.record_routing(model) as record:
        model(first)
        model(second)
    with moeblaze_ops.record_routing(model) as at_once:
        model(torch.cat([first, second]))
    assert torch.equal(record.ids[""], at_once.ids[""]) and record.widths == {"": E}


def test_some_layers_are_recorded():
    model = Network(ModuleListMoE)
    with moeblaze_ops.record_routing(model, layers=lambda name, module: name.endswith("1")) as record:
        model(torch.randn(T, D))
    assert list(record.ids) == ["layers.1"]


def test_modules_are_what_they_were_after_an_error():
    model = ModuleListMoE()
    with pytest.raises(ZeroDivisionError), moeblaze_ops.replay_routing(model, {"": torch.zeros(T, K, dtype=torch.int64)}):
        raise ZeroDivisionError
    assert "forward" not in model.__dict__
    with pytest.raises(ZeroDivisionError), moeblaze_ops.record_routing(model):
        raise ZeroDivisionError


def call(ids, **options):
    model = Network(ModuleListMoE)
    with moeblaze_ops.replay_routing(model, ids, **options):
        model(torch.randn(T, D))


def ids_of(*shape, dtype=torch.int64):
    return {"layers.0": torch.zeros(shape, dtype=dtype)}


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda: call({"layer.0": torch.zeros(T, K)}), ValueError, "ids must be named after modules of the model, got 'layer.0'"),
        (lambda: call([torch.zeros(T, K)]), TypeError, "ids must be a record, or a mapping from names to tensors, got a list"),
        (lambda: call({"layers.0": [[0, 1]]}), TypeError, "ids['layers.0'] must be a tensor, got a list"),
        (lambda: call(ids_of(T, K, dtype=torch.float32)), TypeError, "ids['layers.0'] must be integers, got torch.float32"),
        (lambda: call({}), ValueError, "ids must name a module or more, got none"),
        (lambda: call(ids_of(T)), ValueError, "ids['layers.0'] must have shape [T, K], got shape [40]"),
        (
            lambda: call(ids_of(T - 1, K)),
            ValueError,
            "layers.0 must choose 2 experts for each of 39 tokens once in a call (see ids), got 0 such choices",
        ),
        (
            lambda: call(ids_of(T, K), mask=[True]),
            TypeError,
            "mask must be a tensor, or a mapping from names to tensors, got a li",
        ),
        (lambda: call(ids_of(T, K), mask=torch.ones(T)), TypeError, "mask['layers.0'] must be bool, got torch.float64"),
        (
            lambda: call(ids_of(T, K), mask=torch.ones(T, K).bool()),
            ValueError,
            "mask['layers.0'] must have shape [40] (tokens of ids), got shape [40, 2]",
        ),
        (
            lambda: call({"layers.0.experts": torch.zeros(T, K, dtype=torch.int64), "layers.0.router": ids_of(T, K)["layers.0"]}),
            ValueError,
            "layers.0.router must choose 2 experts for each of 40 tokens once in a call (see ids), got 0 such choices",
        ),
    ],
)
def test_replay_rejects(run, error, message):
    with pytest.raises(error) as raised:
        run()
    assert str(raised.value).startswith(f"replay_routing: {message}")


def test_a_plain_mapping_cannot_tell_groups_from_experts():
    model = Grouped()
    with (
        pytest.raises(ValueError, match="must choose 2 experts for each of 40 tokens once in a call .*, got 2 such choices"),
        moeblaze_ops.replay_routing(model, {"": torch.zeros(T, 2, dtype=torch.int64)}),
    ):
        model(torch.randn(T, D))


@pytest.mark.parametrize("scoring", ["softmax", "softmax_topk", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_route_at_its_own_ids_is_route(scoring, renormalize):
    from moeblaze_ops.routing.choice import route_at

    logits = torch.randn(3, 5, 8, requires_grad=True)
    options = {"scoring": scoring, "renormalize": renormalize, "scale": 2.5}
    weights, ids = moeblaze_ops.route(logits, 3, **options)
    again, same = route_at(logits, ids.long(), **options)
    assert torch.equal(same, ids) and same.dtype == ids.dtype and again.dtype == weights.dtype
    torch.testing.assert_close(again, weights)
    seed = torch.randn_like(weights)
    torch.testing.assert_close(*(torch.autograd.grad(w, logits, seed) for w in (again, weights)))
