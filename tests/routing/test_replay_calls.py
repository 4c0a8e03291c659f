"""Which call has which ids: several microbatches in flight, recomputation, threads, modules that are called several times."""

import _thread
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moeblaze_ops
from tests.corpus.module_lists import D, E, K, ModuleListMoE, T
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("fp64")

LAYERS = {"plain": ModuleListMoE, "explicit": lambda: moeblaze_ops.MoE(D, 12, E, K)}


class Block(nn.Module):
    """Calls its layer as often as is said, each time under activation checkpointing if it is said how."""

    def __init__(self, layer, use_reentrant=None, calls=1):
        super().__init__()
        self.layer, self.use_reentrant, self.calls = layer, use_reentrant, calls

    def forward(self, x):
        for _ in range(self.calls):
            x = x + (self.layer(x) if self.use_reentrant is None else checkpoint(self.layer, x, use_reentrant=self.use_reentrant))
        return x


def ids_of(model, T=T):
    """Other ones for each call of each layer."""
    return {"layer": torch.rand(T * model.calls, E).topk(K).indices}


def gradients(model, x):
    found = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    x.grad = None
    return found


def one_by_one(model, batches):
    found = []
    for x, ids in batches:
        with moeblaze_ops.replay_routing(model, ids):
            model(x).square().sum().backward()
        found.append(gradients(model, x))
    return found


@pytest.fixture
def batches():
    torch.manual_seed(0)
    return [torch.randn(T, D, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("compiled", ["nothing", "the block", "the layer"])
def test_backward_has_the_ids_of_its_own_forward(compiled, layer, use_reentrant, batches):
    model = Block(LAYERS[layer](), use_reentrant)
    told = [(x, ids_of(model)) for x in batches]
    expected = one_by_one(model, told)
    torch._dynamo.reset()
    with rewriting_backend() as backend, moeblaze_ops.compile.recording() as records:
        called = torch.compile(model, backend=backend, fullgraph=True) if compiled == "the block" else model
        if compiled == "the layer":
            model.layer.compile(backend=backend, fullgraph=True)
        for order in ((0, 1, 2), (2, 0, 1)):
            outs = []
            for x, ids in told:
                with moeblaze_ops.replay_routing(model, ids):
                    outs.append(called(x))
            for position in order:
                outs[position].square().sum().backward()
                torch.testing.assert_close(gradients(model, told[position][0]), expected[position])
    assert compiled == "nothing" or layer == "explicit" or rewritten_in(records)
    assert "forward" not in model.__dict__ and "forward" not in model.layer.__dict__


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_backward_inside_of_another_replay(use_reentrant, batches):
    """Nor does one that is open then reach a forward that had none."""
    model = Block(ModuleListMoE(), use_reentrant)
    with moeblaze_ops.replay_routing(model, ids_of(model)):
        pass  # what is called again in backward is known from the first replay on
    told, (own, *_) = [(x, ids_of(model)) for x in batches[1:]], batches
    expected = one_by_one(model, told)
    model(own).square().sum().backward()
    expected_own, out_own = gradients(model, own), model(own)
    with moeblaze_ops.replay_routing(model, told[0][1]):
        first = model(told[0][0])
        with moeblaze_ops.replay_routing(model, told[1][1]):
            second = model(told[1][0])
            first.square().sum().backward()
            torch.testing.assert_close(gradients(model, told[0][0]), expected[0])
            out_own.square().sum().backward()
            torch.testing.assert_close(gradients(model, own), expected_own)
        second.square().sum().backward()
        torch.testing.assert_close(gradients(model, told[1][0]), expected[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_regions_of_checkpointing_inside_of_others(use_reentrant, batches):
    model = Block(Block(ModuleListMoE(), use_reentrant, calls=2), use_reentrant)
    told = [(x, {"layer.layer": torch.rand(2 * T, E).topk(K).indices}) for x in batches]
    expected = one_by_one(model, told)
    outs = []
    for x, ids in told:
        with moeblaze_ops.replay_routing(model, ids):
            outs.append(model(x))
    for (x, _), out, gradient in zip(told, outs, expected, strict=True):
        out.square().sum().backward()
        torch.testing.assert_close(gradients(model, x), gradient)


class ByHand(torch.autograd.Function):
    """Calls a function again in backward, in a thread that Python did not start, as autograd's are for GPUs."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.x, ctx.function = x.detach(), function
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        x, errors, done = ctx.x.requires_grad_(), [], threading.Event()

        def run():
            try:
                with torch.enable_grad():
                    ctx.function(x).backward(grad)
            except ValueError as error:
                errors.append(error)
            done.set()

        _thread.start_new_thread(run, ())
        assert done.wait(60)
        if errors:
            raise errors[0]
        return x.grad, None


def test_a_thread_of_autograds_has_the_replay_that_is_open(batches):
    model = Block(ModuleListMoE())
    (x, other, _), ids = batches, ids_of(model)
    (expected,) = one_by_one(model, [(x, ids)])
    with moeblaze_ops.replay_routing(model, ids):
        ByHand.apply(x, model).square().sum().backward()
        torch.testing.assert_close(gradients(model, x), expected)
        with moeblaze_ops.replay_routing(model, ids_of(model)), pytest.raises(ValueError, match=r"by torch.utils.checkpoint, or"):
            ByHand.apply(other, model).square().sum().backward()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_replay_is_that_of_its_thread(layer, batches):
    """Two threads with other ids for one model, and one without."""
    model, x = Block(LAYERS[layer]()), batches[0].detach()
    told = [None, ids_of(model), ids_of(model)]
    expected = [model(x)]
    for ids in told[1:]:
        with moeblaze_ops.replay_routing(model, ids):
            expected.append(model(x))
    ready, outs = threading.Barrier(3, timeout=60), {}

    def run(position):
        if told[position] is None:
            ready.wait()
            outs[position] = model(x)
            ready.wait()
        else:
            with moeblaze_ops.replay_routing(model, told[position]):
                ready.wait()
                outs[position] = model(x)
                ready.wait()

    threads = [threading.Thread(target=run, args=(position,)) for position in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close([outs[position] for position in range(3)], expected)
    assert "forward" not in model.layer.__dict__


def test_a_record_is_that_of_its_thread():
    model, x = ModuleListMoE(), torch.randn(3, D)
    with moeblaze_ops.record_routing(model) as record:
        thread = threading.Thread(target=model, args=(torch.randn(5, D),))
        thread.start()
        thread.join()
        model(x)
    assert record.ids[""].shape == (3, K)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inside", [True, False])
def test_what_backward_calls_again_is_not_recorded(inside, use_reentrant, batches):
    """It runs as written, as its forward did, where that is compiled outside of the record, and with the ids of a replay."""
    model, x = Block(ModuleListMoE(), use_reentrant), batches[0]
    ids = ids_of(model)
    (expected,) = one_by_one(model, [(x, ids)])
    torch._dynamo.reset()
    with rewriting_backend() as backend:
        model.layer.compile(backend=backend)
        model(x)
        with moeblaze_ops.replay_routing(model, ids), moeblaze_ops.record_routing(model) as record:
            loss = model(x).square().sum()
            if inside:
                torch.autograd.backward(loss)  # in its method no mode is on
        if not inside:
            loss.backward()
    torch.testing.assert_close(gradients(model, x), expected)
    assert record.ids["layer"].shape == (T, K)


@pytest.mark.parametrize("run", ["eager", "compiled"])
def test_calls_of_one_record_in_order(run, batches):
    """A router that is called twice, by microbatches of other lengths than those of the record."""
    model = Block(ModuleListMoE(), calls=2)
    x = batches[0].detach()
    with moeblaze_ops.record_routing(model) as record, torch.no_grad():
        expected = model(x)
    assert record.ids["layer"].shape == (2 * T, K)
    with torch.no_grad():
        model.layer.router.weight.neg_()
    torch._dynamo.reset()
    called = torch.compile(model, backend="eager", fullgraph=True) if run == "compiled" else model
    before = called(x)
    assert not torch.allclose(before, expected)
    with moeblaze_ops.replay_routing(model, record):
        once = [called(x) for _ in range(2)]  # behind the last token the ids begin anew
    torch.testing.assert_close(*once)
    model.calls = 1
    ids = {"layer": record.ids["layer"][:T]}
    with moeblaze_ops.replay_routing(model, ids):
        whole = model(x)
        parts = torch.cat([called(part) for part in x.split([T // 4, T // 2, T - T // 2 - T // 4])])
    torch.testing.assert_close(parts, whole)


def test_ids_that_no_call_took():
    model, x = ModuleListMoE(), torch.randn(T, D)
    ids = {"": torch.rand(T, E).topk(K).indices}
    expected = "the model must choose for all 40 tokens of ids, in one call of the context or several, got 30 of them"
    with pytest.raises(ValueError, match=expected), moeblaze_ops.replay_routing(model, ids):
        model(x[:30])
    with (
        pytest.raises(ValueError, match=r"must choose 2 experts for each of 40 tokens .* got 0 such choices after 30"),
        moeblaze_ops.replay_routing(model, ids),
    ):
        model(x[:30])
        model(x[:11])
    with pytest.raises(ZeroDivisionError), moeblaze_ops.replay_routing(model, ids):
        model(x[:30])
        raise ZeroDivisionError


class WritesItsIds(nn.Module):
    """Takes ``torch.topk(..., out=)`` and writes to the ids: experts E and above stand before the others."""

    def __init__(self, out):
        super().__init__()
        self.router, self.up, self.out = nn.Linear(D, E, bias=False), nn.Parameter(torch.randn(2 * E, D, D)), out

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        if self.out:
            chosen = torch.empty(x.shape[0], K), torch.empty(x.shape[0], K, dtype=torch.int64)
            torch.topk(scores.detach(), K, out=chosen)
            ids = chosen[1]
        else:
            ids = scores.topk(K).indices
        weights = scores.gather(-1, ids)
        ids += E
        return torch.einsum("tk,tkdf,td->tf", weights, self.up[ids], x)


@pytest.mark.parametrize("out", [False, True])
def test_ids_that_the_layer_writes_to(out):
    model, x = WritesItsIds(out), torch.randn(T, D)
    with moeblaze_ops.record_routing(model) as record:
        expected = model(x)
    assert record.ids[""].max() < E
    with torch.no_grad():
        scale = torch.rand(1, D)
        model.router.weight.mul_(scale)
    ids = record.ids[""].clone()
    weights = model.router(x).softmax(-1).gather(-1, ids)
    expected = torch.einsum("tk,tkdf,td->tf", weights, model.up[ids + E], x)
    with moeblaze_ops.replay_routing(model, record):
        for _ in range(2):
            torch.testing.assert_close(model(x), expected)
    assert torch.equal(record.ids[""], ids)


@pytest.mark.parametrize("run", ["eager", "rewritten"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64])
def test_ids_of_any_integer_dtype(dtype, run):
    model, x = ModuleListMoE(), torch.randn(T, D)
    ids = torch.rand(T, E).topk(K).indices
    torch._dynamo.reset()
    with rewriting_backend() as backend:
        called = torch.compile(model, backend=backend, fullgraph=True) if run == "rewritten" else model
        with moeblaze_ops.replay_routing(model, {"": ids}):
            expected = model(x)
        with moeblaze_ops.replay_routing(model, {"": ids.to(dtype)}):
            torch.testing.assert_close(called(x), expected)


@pytest.mark.parametrize("run", ["eager", "rewritten"])
def test_tokens_of_padding_choose_for_themselves(run):
    model, x = ModuleListMoE(), torch.randn(T, D)
    ids, padding = torch.rand(T, E).topk(K).indices, torch.arange(T) % 4 == 0
    torch._dynamo.reset()
    with rewriting_backend() as backend, moeblaze_ops.compile.recording() as records:
        called = torch.compile(model, backend=backend, fullgraph=True) if run == "rewritten" else model
        with moeblaze_ops.replay_routing(model, {"": ids}, mask=~padding):
            expected = model(x)
        with moeblaze_ops.replay_routing(model, {"": ids.masked_fill(padding[:, None], -1)}):
            torch.testing.assert_close(called(x), expected)
    assert run == "eager" or len(rewritten_in(records)) == 1
    torch.testing.assert_close(expected[padding], model(x)[padding])


def test_ids_of_no_expert():
    model, ids = ModuleListMoE(), torch.full((T, K), E)
    with (
        pytest.raises(ValueError, match=rf"replay_routing: ids\[''\] must be below {E}, the experts, got {E}"),
        moeblaze_ops.replay_routing(model, {"": ids}),
    ):
        model(torch.randn(T, D))
