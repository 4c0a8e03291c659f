"""Loops that skip experts without tokens: captured in one graph where nothing is skipped, and left alone otherwise."""

import pytest
import torch
import torch._inductor.config
from torch import nn

import moeblaze_ops
from moeblaze_ops import compile as moeblaze_compile
from tests.corpus.loops import asked, branches, guarded, handed, hits, lists, named, present, split, zeros
from tests.corpus.loops import guarded_counts as counted
from tests.corpus.zoo import catalogue as zoo
from tests.tools.compiling import graphs_compiled_anew
from tests.tools.rewrite_harness import rewriting_backend

T = 12
CAPTURED = (
    *guarded.GUARDED, *counted.GUARDED, *present.PRESENT, *lists.LISTS, *named.NAMED, *branches.BRANCHES, *hits.HITS,
    *asked.ASKED, *zeros.ZEROS,
)  # fmt: skip
NEAR_MISSES = (
    *guarded.NEAR_MISSES, *counted.NEAR_MISSES, *present.NEAR_MISSES, *lists.NEAR_MISSES, *named.NEAR_MISSES,
    *branches.NEAR_MISSES, *hits.NEAR_MISSES, *asked.NEAR_MISSES,
    *zeros.NEAR_MISSES, *present.DROPPED,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("scratch", "fp64")


class Router(nn.Module):
    """The zoo's, which never chooses some experts."""

    def __init__(self, router: zoo.Router):
        super().__init__()
        self.gate = router.gate
        self.register_buffer("penalty", torch.zeros(zoo.E))

    def forward(self, x):
        return tuple(torch.topk((self.gate(x) + self.penalty).softmax(-1), zoo.K))


OF_LINEARS = (hits.rows_of_stacked_weights, handed.two_projections, handed.projections_of_the_next_expert)
"""What reads weights of experts by their names."""


def make_layer(combine, expert=zoo.BareMLP) -> zoo.ModuleListMoE:
    layer = zoo.ModuleListMoE(combine, zoo.GluMLP if combine in OF_LINEARS else expert)
    layer.router = Router(layer.router)
    layer.calls = 0
    if combine in (*named.NAMED, *named.NEAR_MISSES):
        layer.experts = nn.ModuleDict({f"expert_{e}": expert for e, expert in enumerate(layer.experts)})
    return layer


def step(layer, run, x) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
    (loss + 0 * x.sum()).backward()  # where no expert has tokens the output of eager mode has no gradient
    # Skipping an expert leaves None, where running it on nothing gives zeros.
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **gradients}


def check(layer, run, *, unused=(1, 3), **close) -> None:
    """Steps of ``run`` equal those of ``layer``, with and without experts that no token chose."""
    for penalty in (0.0, -1000.0, 0.0):
        layer.router.penalty[list(unused)] = penalty
        x = torch.randn(T, zoo.D)
        torch.testing.assert_close(step(layer, run, x), step(layer, layer, x), **close)


def kept(records, kind) -> list:
    return [r for r in records if isinstance(r, kind) and getattr(r, "dropped", None) is None]


def assert_one_rewritten_graph(records) -> None:
    (graph,) = kept(records, moeblaze_compile.GraphRecord)
    assert len(graph.report.rewritten) == 1
    (capture,) = kept(records, moeblaze_compile.CaptureRecord)
    assert capture.done and not capture.left


@pytest.mark.parametrize("combine", CAPTURED, ids=lambda f: f.__name__)
def test_one_graph(combine):
    """Of bare experts, of GLUs in each fourth spelling, and of experts with biases."""
    experts = zoo.GluMLP if CAPTURED.index(combine) % 4 == 0 else zoo.BareMLP
    layer = make_layer(combine, expert=zoo.PlainMLP if combine is guarded.if_any else experts)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        check(layer, torch.compile(layer, backend=backend, fullgraph=True))
    assert_one_rewritten_graph(records)


@pytest.mark.parametrize(("combine", "dynamic"), [
    (guarded.shape_continue, None), (guarded.hit_rows, True), (split.offsets_list, None), (split.offsets_list, True),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_two_layers_of_one_graph(combine, dynamic):
    """The tokens of the second are what the first added its rows to."""
    layers = nn.Sequential(make_layer(combine), make_layer(combine))
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        run = torch.compile(layers, backend=backend, fullgraph=True, dynamic=dynamic)
        x = torch.randn(T, zoo.D)
        torch.testing.assert_close(step(layers, run, x), step(layers, layers, x))
    (graph,) = kept(records, moeblaze_compile.GraphRecord)
    assert len(graph.report.rewritten) == 2


def captures(layer, x) -> bool:
    """True if the frame can be compiled as one graph by torch.compile alone."""
    torch._dynamo.reset()
    try:
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    except Exception:
        return False
    finally:
        torch._dynamo.reset()
    return True


@pytest.mark.parametrize("combine", CAPTURED[::9], ids=lambda f: f.__name__)
def test_spellings_break_without_us(combine):
    assert not captures(make_layer(combine), torch.randn(T, zoo.D))


def assert_left_alone(records) -> None:
    assert not any(record.done for record in kept(records, moeblaze_compile.CaptureRecord))
    assert not any(record.report.rewritten for record in kept(records, moeblaze_compile.GraphRecord))


def counted_state(layer) -> dict:
    """What the layer's modules hold besides parameters."""
    numbers = {n: m.calls for n, m in layer.named_modules() if isinstance(getattr(m, "calls", None), int)}
    return {**numbers, **{n: b.clone() for n, b in layer.named_buffers()}}


def check_twins(make, *, unused=(1, 3)) -> list:
    """Two equal layers, one of them compiled, give the same and end in the same state; returns the records."""
    torch.set_default_dtype(torch.float32)  # torch 2.13's aot_eager forgets writes to buffers where fp64 is the default
    torch.manual_seed(1)
    eager = make()
    torch.manual_seed(1)
    layer = make()
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        run = torch.compile(layer, backend=backend)
        for penalty in (0.0, -1000.0, 0.0):
            for twin in (eager, layer):
                twin.router.penalty[list(unused)] = penalty
            x = torch.randn(T, zoo.D)
            # fp32 sums of some tens of terms, in another order.
            torch.testing.assert_close(step(layer, run, x), step(eager, eager, x), atol=1e-5, rtol=1e-4)
            assert str(counted_state(layer)) == str(counted_state(eager))
    return records


@pytest.mark.parametrize("combine", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses_are_left_alone(combine):
    assert_left_alone(check_twins(lambda: make_layer(combine)))


@pytest.mark.parametrize("combine", (*present.TRACED, *hits.TRACED), ids=lambda f: f.__name__)
def test_layers_that_only_tracing_proves(combine):
    """Code that reads as another layer, and is the one that it runs: a tensor is in no set of numbers."""
    records = check_twins(lambda: make_layer(combine))
    assert [len(graph.report.rewritten) for graph in kept(records, moeblaze_compile.GraphRecord)] == [1]


def test_numbers_that_are_more_than_experts():
    records = check_twins(lambda: make_layer(present.numbers_are_counted))
    assert not any(record.done for record in kept(records, moeblaze_compile.CaptureRecord))


class CountingExpert(zoo.GluMLP):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class BufferExpert(zoo.GluMLP):
    def __init__(self):
        super().__init__()
        self.register_buffer("used", torch.zeros(()))

    def forward(self, x):
        self.used.add_(1)
        return super().forward(x)


class SettingExpert(BufferExpert):
    def forward(self, x):
        self.used = self.used + 1
        return zoo.GluMLP.forward(self, x)


class NormExpert(zoo.GluMLP):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(zoo.FF)

    def forward(self, x):
        return self.w2(self.norm(torch.cat([self.w3(x), self.w1(x)]))[: x.shape[0]])


_seen: list[int] = []


class ListingExpert(zoo.GluMLP):
    def forward(self, x):
        _seen.append(1)
        return super().forward(x)


@pytest.mark.parametrize("expert", [CountingExpert, BufferExpert, SettingExpert, NormExpert, ListingExpert])
def test_effects_of_experts_are_not_repeated(expert):
    """Called once for each expert that was hit: a call for the others would be seen."""
    _seen.clear()
    records = check_twins(lambda: make_layer(guarded.numel_continue, expert=expert))
    assert_left_alone(records)
    assert any(getattr(record, "left", None) or getattr(record, "line", None) for record in records), "the reason is told"
    assert len(_seen) % 2 == 0, "as often in the compiled layer as in eager mode"


def test_write_to_a_list_of_the_loop():
    records = check_twins(lambda: make_layer(guarded.collects_in_an_expression))
    assert_left_alone(records)
    assert any("a list would be longer" in (getattr(record, "dropped", None) or "") for record in records)


class SequentialExpert(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(zoo.D, zoo.FF), nn.GELU(), nn.Linear(zoo.FF, zoo.D))


def test_experts_that_loop_themselves():
    layer = make_layer(guarded.if_any, expert=SequentialExpert)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        check(layer, torch.compile(layer, backend=backend, fullgraph=True))
    assert_one_rewritten_graph(records)


class LoopInForward(nn.Module):
    """The loop in the frame that is compiled itself."""

    def __init__(self):
        super().__init__()
        self.router = Router(zoo.Router())
        self.experts = nn.ModuleList(zoo.GluMLP() for _ in range(zoo.E))

    def forward(self, x):
        weights, ids = self.router(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = ids == e
            if not mask.any():
                continue
            token, slot = torch.where(mask)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


def test_loop_in_the_compiled_frame():
    scale = 2.0

    class Scaled(LoopInForward):
        def forward(self, x):
            weights, ids = self.router(x)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                token, slot = torch.where(ids == e)
                if len(token) == 0:
                    continue
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            return out * scale

    for layer in (LoopInForward(), Scaled()):
        torch._dynamo.reset()
        with rewriting_backend() as backend, moeblaze_compile.recording() as records:
            check(layer, torch.compile(layer, backend=backend, fullgraph=True))
        assert_one_rewritten_graph(records)


def test_any_number_of_tokens():
    layer = make_layer(guarded.hit_rows)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        run = torch.compile(layer, backend=backend, dynamic=True)
        for num_tokens in (5, 9, 14):
            x = torch.randn(num_tokens, zoo.D)
            torch.testing.assert_close(step(layer, run, x), step(layer, layer, x))
    assert_one_rewritten_graph(records)


def test_graph_break_beside_the_loop():
    """The part before the break may not hand on code without its branches."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = make_layer(guarded.numel_continue)
            self.router = self.layer.router

        def forward(self, x):
            x = x * 2
            torch._dynamo.graph_break()
            return self.layer(x)

    layer = Model()
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        check(layer, torch.compile(layer, backend=backend))
    graphs = kept(records, moeblaze_compile.GraphRecord)
    assert sum(len(graph.report.rewritten) for graph in graphs) == 1


def test_without_the_switch_nothing_is_captured():
    layer = make_layer(guarded.if_any)
    with moeblaze_compile.recording() as records:
        check(layer, torch.compile(layer, backend="aot_eager"))
    assert not kept(records, moeblaze_compile.CaptureRecord)


COMPILED = (guarded.if_any_rows, guarded.hit_rows, split.deepseek_infer)


@pytest.mark.parametrize("combine", COMPILED, ids=lambda f: f.__name__)
def test_inductor(combine):
    """Of one layer what is beside the operators is built in C++."""
    torch.set_default_dtype(torch.float32)
    layer = make_layer(combine)
    calls = torch._inductor.config.patch(fallback_by_default=combine is not guarded.hit_rows)
    with graphs_compiled_anew(), calls, moeblaze_compile.recording() as records:
        check(layer, torch.compile(layer, backend="moeblaze", fullgraph=True), atol=1e-5, rtol=1e-4)
    assert_one_rewritten_graph(records)


def test_explain_says_what_was_done(capsys):
    explanation = moeblaze_ops.explain(make_layer(guarded.numel_continue), torch.randn(T, zoo.D))
    assert [candidate.became for candidate in explanation.candidates] == ["expert_up(relu) -> expert_down"]
    assert any("compiled without the branch" in note for note in explanation.notes)


def test_explain_says_why_a_branch_stays(capsys):
    explanation = moeblaze_ops.explain(make_layer(guarded.counts_experts), torch.randn(T, zoo.D))
    assert any("how often a branch on data was taken; ask `if n == 0:`" in note for note in explanation.notes)


def test_explain_says_what_a_sum_begins_with(capsys):
    def combine(self, x, weights, ids):
        out = 0.0
        for e, expert in enumerate(self.experts):
            mask = ids == e
            if mask.any():
                out = out + expert(x) * (weights * mask).sum(-1, keepdim=True)
        return out

    explanation = moeblaze_ops.explain(make_layer(combine), torch.randn(T, zoo.D))
    assert any("'out' (begin with `torch.zeros_like(x)`, not with a number)" in note for note in explanation.notes)


def test_explain_says_what_an_expert_changes(capsys):
    layer = make_layer(guarded.numel_continue, expert=CountingExpert)
    explanation = moeblaze_ops.explain(layer, torch.randn(T, zoo.D))
    assert any("'calls' of a CountingExpert would be set" in note for note in explanation.notes)


class CachingExpert(zoo.GluMLP):
    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, x):
        self.cache.clear()
        return super().forward(x)


def test_explain_says_where_an_expert_changes_something():
    """As each expert with DoRA does for a cache of its norm."""
    explanation = moeblaze_ops.explain(make_layer(guarded.numel_continue, expert=CachingExpert), torch.randn(T, zoo.D))
    (note,) = [note for note in explanation.notes if "a dict would be changed" in note]
    assert note.startswith("tests/corpus/loops/guarded.py:") and note.endswith('"self.cache.clear()"')
    assert ", at tests/capture/test_capture.py:" in note


def test_explain_says_that_ids_may_name_no_expert(capsys):
    explanation = moeblaze_ops.explain(make_layer(present.TWINS["minus_one_is_the_last"]), torch.randn(T, zoo.D))
    assert any("a loop goes over numbers that may be those of no experts" in note for note in explanation.notes)


@pytest.mark.parametrize("combine", present.DROPPED, ids=lambda f: f.__name__)
def test_explain_says_that_a_set_is_made_of_numbers(combine):
    explanation = moeblaze_ops.explain(make_layer(combine), torch.randn(T, zoo.D))
    assert any("a set is made of numbers that only the data tell" in note for note in explanation.notes)
