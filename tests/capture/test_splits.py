"""Rows that are split by counts on the host: captured in one graph where that is the same function."""

import pytest
import torch
from torch import nn

import moeblaze_ops
from moeblaze_ops import compile as moeblaze_compile
from tests.capture import test_capture as guarded
from tests.capture.test_capture import assert_one_rewritten_graph, check, make_layer, rewriting_backend
from tests.corpus.loops import split
from tests.corpus.loops import split_lookalikes as lookalikes
from tests.corpus.zoo import catalogue as zoo

pytestmark = pytest.mark.usefixtures("scratch", "fp64")

T = guarded.T


@pytest.mark.parametrize("combine", [*split.SPLIT, *split.SPLIT_ELSEWHERE], ids=lambda f: f.__name__)
def test_one_graph(combine):
    experts = zoo.GluMLP if combine in split.SPLIT[::4] else zoo.BareMLP
    layer = make_layer(combine, expert=zoo.PlainMLP if combine is split.split_list else experts)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        check(layer, torch.compile(layer, backend=backend, fullgraph=True))
    assert_one_rewritten_graph(records)


_SPLIT_TENSORS = (split.split_list, split.split_scaled, split.routing_map)


@pytest.mark.parametrize("combine", [f for f in split.SPLIT if f not in _SPLIT_TENSORS][::4], ids=lambda f: f.__name__)
def test_spellings_break_without_us(combine):
    layer = make_layer(combine)
    assert not guarded.captures(layer, torch.randn(T, zoo.D))


@pytest.mark.parametrize("combine", lookalikes.NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses_are_left_alone(combine):
    guarded.assert_left_alone(guarded.check_twins(lambda: make_layer(combine)))


@pytest.mark.parametrize("combine", lookalikes.BY_HIGHEST_ID, ids=lambda f: f.__name__)
def test_counts_that_were_taken_before_ids_changed(combine):
    guarded.check_twins(lambda: make_layer(combine))


_IN_INFERENCE = (*split.SCATTERED, *split.SPLIT, *split.SPLIT_ELSEWHERE)


@pytest.mark.parametrize(
    ("combine", "numbers_of_tokens"),
    [
        pytest.param(combine, (T,) if number % 4 else (T, 5), id=combine.__name__)
        for number, combine in enumerate(_IN_INFERENCE)
        if number % 2 == 0 or combine in split.SCATTERED
    ],
)
def test_inference(combine, numbers_of_tokens):
    """Every fourth spelling with another number of tokens as well, for which Dynamo compiles again, for any number."""
    layer = make_layer(combine)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records, torch.no_grad():
        run = torch.compile(layer, backend=backend, fullgraph=True)
        for num_tokens in numbers_of_tokens:
            x = torch.randn(num_tokens, zoo.D)
            torch.testing.assert_close(run(x), layer(x))
    graphs = guarded.kept(records, moeblaze_compile.GraphRecord)
    assert graphs and all(len(graph.report.rewritten) == 1 for graph in graphs)


DEGENERATE = {"one_token": (1, 2, 2), "one_of_all": (1, 1, 1), "one_expert": (5, 1, 1)}


@pytest.mark.parametrize(
    ("combine", "shape"),
    [
        pytest.param(combine, DEGENERATE[name], id=f"{combine.__name__}-{name}")
        for number, combine in enumerate((*split.SPLIT, *split.SPLIT_ELSEWHERE))
        for name in [list(DEGENERATE)[number % 3]]
    ],
)
def test_degenerate_sizes_compile(combine, shape):
    """Some are rewritten, and the others run as they did."""
    num_tokens, num_experts, top_k = shape
    layer = zoo.ModuleListMoE(combine, E=num_experts, K=top_k)
    layer.calls = 0
    with rewriting_backend() as backend, torch.no_grad():
        x = torch.randn(num_tokens, zoo.D)
        torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))


class Model(nn.Module):
    """Part of the class as in DeepSeek: without gradients in inference."""

    def __init__(self):
        super().__init__()
        self.layer = make_layer(split.deepseek_infer)
        self.router, self.calls, self.experts = self.layer.router, 0, self.layer.experts

    def forward(self, x):
        return self.infer(x, *self.router(x))

    @torch.no_grad()
    def infer(self, x, weights, ids):
        return split.deepseek_infer(self, x, weights, ids)


def test_without_gradients_inside():
    layer = Model()
    with rewriting_backend() as backend, moeblaze_compile.recording() as records, torch.no_grad():
        x = torch.randn(T, zoo.D)
        torch.testing.assert_close(torch.compile(layer, backend=backend, fullgraph=True)(x), layer(x))
    assert_one_rewritten_graph(records)


def test_without_gradients_where_others_have_them():
    layer = Model()
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        x = torch.randn(T, zoo.D, requires_grad=True)
        out = torch.compile(layer, backend=backend, fullgraph=True)(x)
    assert not out.requires_grad
    torch.testing.assert_close(out, layer(x))
    assert_one_rewritten_graph(records)


@pytest.mark.parametrize("expert", [guarded.CountingExpert, guarded.BufferExpert, guarded.ListingExpert])
def test_effects_of_experts_are_not_repeated(expert):
    guarded.assert_left_alone(guarded.check_twins(lambda: make_layer(split.running_sum, expert=expert)))


class WritingExpert(zoo.GluMLP):
    def forward(self, x):
        y = super().forward(x)
        x.detach().zero_()
        return y


def reads_rows_afterwards(self, x, weights, ids):
    order = ids.flatten().argsort()
    rows, outputs, start = x[order // ids.shape[1]].detach(), [], 0
    for e, count in enumerate(ids.flatten().bincount(minlength=len(self.experts)).tolist()):
        if count == 0:
            continue
        outputs.append(self.experts[e](rows[start : start + count]))
        start += count
    y = torch.cat(outputs)[order.argsort()].view(*ids.shape, -1)
    return (y * weights.unsqueeze(-1)).sum(1) + rows.sum(0)


def test_experts_that_write_to_their_input():
    """It is a view: what it holds afterwards is read."""
    torch.manual_seed(0)
    layer = make_layer(reads_rows_afterwards, expert=WritingExpert)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records, torch.no_grad():
        x = torch.randn(T, zoo.D)
        torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))
    guarded.assert_left_alone(records)


class HalvingExpert(zoo.GluMLP):
    def forward(self, x):
        return super().forward(x.mul_(0.5))


def test_experts_that_halve_their_input():
    """Which is one of the parts that a split gives."""
    torch.manual_seed(0)
    layer = make_layer(split.split_list, expert=HalvingExpert)
    with rewriting_backend() as backend, torch.no_grad():
        x = torch.randn(T, zoo.D)
        torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))


def test_any_number_of_tokens():
    layer = make_layer(split.deepseek_infer)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        run = torch.compile(layer, backend=backend, dynamic=True)
        for num_tokens in (5, 9, 14):
            x = torch.randn(num_tokens, zoo.D)
            torch.testing.assert_close(guarded.step(layer, run, x), guarded.step(layer, layer, x))
    assert_one_rewritten_graph(records)


def test_explain_says_what_was_done():
    explanation = moeblaze_ops.explain(make_layer(split.running_sum), torch.randn(T, zoo.D))
    assert [candidate.became for candidate in explanation.candidates] == ["expert_up(relu) -> expert_down"]
    assert any("compiled without the branch" in note for note in explanation.notes)


def test_explain_says_why_a_loop_stays():
    explanation = moeblaze_ops.explain(make_layer(lookalikes.TWINS["reads_a_count"]), torch.randn(T, zoo.D))
    assert "ROUTING" in str(explanation) and "scale[start:end] * count" in str(explanation)
