"""What ``report`` counts of compiled models and what is said of them: each layer that ran, once."""

import logging
import re
from collections import deque

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import moeblaze_ops
from moeblaze_ops import compile as switch
from moeblaze_ops import config
from moeblaze_ops.compile import records, verdict
from tests.corpus.zoo.blocks import Blocks, Branching, Dense, Guarded
from tests.door.programs import calls_of
from tests.tools.rewrite_harness import rewriting_backend


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """Nothing was compiled before."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setattr(verdict, "_said", set())
    monkeypatch.setattr(records, "_recent", deque())
    yield
    torch._dynamo.reset()


def said(caplog, model, *inputs, level=logging.WARNING):
    """The lines on what was compiled, at this level or above, when a model is called twice."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="moeblaze_ops"), rewriting_backend() as backend:
        compiled = torch.compile(model, backend=backend)
        compiled(*inputs)
        compiled(*inputs)
    return [r.getMessage() for r in caplog.records if r.levelno >= level and r.name == "moeblaze_ops.compile.verdict"]


class Mixed(nn.Module):
    """Blocks of which the last has alpha dropout inside."""

    def __init__(self, breaks=False):
        super().__init__()
        self.first, self.last, self.breaks = Blocks(count=3), Dense(activation=nn.AlphaDropout()), breaks

    def forward(self, x):
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x)


MIXED = "moeblaze: 3 of 4 layers rewritten; 1 left: last (NOT_TWO_PROJECTIONS); moeblaze_ops.report() says more"


@pytest.mark.parametrize("breaks", [False, True])
def test_a_layer_that_was_left_is_named_once(caplog, breaks):
    x = torch.randn(6, 16)
    assert said(caplog, Mixed(breaks), x) == [MIXED]
    torch._dynamo.reset()
    assert said(caplog, Mixed(breaks), x) == [], "the same again"
    assert said(caplog, Mixed(breaks).eval(), x) == [], "without dropout they are all rewritten"


def test_all_layers_are_said_at_info_level(caplog):
    x = torch.randn(6, 16)
    assert said(caplog, Blocks(), x) == []
    torch._dynamo.reset()
    assert said(caplog, Blocks(Guarded, 2), x, level=logging.INFO) == ["moeblaze: 2 of 2 layers rewritten: layers.*"]
    assert said(caplog, nn.Linear(16, 16), x, level=logging.INFO) == []


def test_blocks_that_share_a_graph_are_counted_each(caplog):
    lines = said(caplog, Blocks(breaks=True), torch.randn(6, 16), level=logging.INFO)
    assert lines == ["moeblaze: 3 of 3 layers rewritten: layers.*"]
    assert len(moeblaze_ops.report().candidates) == 3


def test_quiet(caplog, monkeypatch):
    monkeypatch.setattr(config, "quiet", True)
    assert said(caplog, Mixed(), torch.randn(6, 16), level=logging.INFO) == []


def test_blocks_compiled_one_by_one_say_it_once(caplog):
    blocks = [Dense(activation=nn.AlphaDropout()) for _ in range(4)]
    lines = [line for block in blocks for line in said(caplog, block, torch.randn(6, 16))]
    assert len(lines) == 1 and "0 of 1 layers rewritten; 1 left: Dense" in lines[0]


def test_blocks_of_a_model_compiled_one_by_one_say_it_once(caplog):
    sizes = iter((16, 24, 32))
    model = Blocks(lambda: Dense(hidden=next(sizes), activation=nn.AlphaDropout()), 3)
    with caplog.at_level(logging.WARNING, logger="moeblaze_ops"), rewriting_backend() as backend:
        compiled_blocks(model, backend)(torch.randn(6, 16))
    (line,) = (record.getMessage() for record in caplog.records if record.name == "moeblaze_ops.compile.verdict")
    assert "0 of 1 layers rewritten; 1 left: layers.0 (" in line


def test_a_loop_that_is_left_to_eager_mode_is_named(caplog):
    (line,) = said(caplog, Branching(), torch.randn(6, 16))
    assert re.search(r"no layer was found; left to eager mode, for a branch on data: forward \(\S+:\d+\); moeblaze_ops", line)


def test_what_is_checkpointed_with_a_side_effect_is_named(caplog):
    class Recording(Blocks):
        def forward(self, x):
            def run(x):
                self.seen.append(x.detach())
                return super(Recording, self).forward(x)

            return checkpoint(run, x, use_reentrant=False)

    model, x = Recording(), torch.randn(6, 16, requires_grad=True)
    model.seen = []
    (line,) = said(caplog, model, x)
    assert re.search(r"left to eager mode, with all that it checkpoints: forward \(\S+:\d+\);", line)
    assert "skip_fwd_side_effects_in_bwd_under_checkpoint" in str(moeblaze_ops.report())
    torch._dynamo.reset()
    model.seen.clear()
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        (line,) = said(caplog, model, x, level=logging.INFO)
    assert "layers rewritten: layers." in line and len(model.seen) == 2


def test_what_checkpoint_sequential_calls_is_named(caplog):
    class Sequential(Blocks):
        def forward(self, x):
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

    (line,) = said(caplog, Sequential(), torch.randn(6, 16, requires_grad=True))
    assert re.search(r"left to eager mode, with all that it checkpoints: forward \(\S+:\d+\);", line)
    assert "call torch.utils.checkpoint.checkpoint instead" in str(moeblaze_ops.report())


def test_dry_runs_say_nothing(caplog):
    with caplog.at_level(logging.INFO, logger="moeblaze_ops"):
        moeblaze_ops.explain(Mixed(), torch.randn(6, 16))
        moeblaze_ops.verify(Mixed(), torch.randn(6, 16))
    assert not [record for record in caplog.records if record.name == "moeblaze_ops.compile.verdict"]


def test_an_error_says_enough(caplog):
    with rewriting_backend() as backend, pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(Branching(), backend=backend, fullgraph=True)(torch.randn(6, 16))
    assert not [record for record in caplog.records if record.name == "moeblaze_ops.compile.verdict"]


def test_logs_of_a_real_compile(caplog):
    with caplog.at_level(logging.INFO, logger="moeblaze_ops.lowering"), rewriting_backend() as backend:
        torch.compile(Dense(), backend=backend)(torch.randn(6, 16))
    (message,) = (record.getMessage() for record in caplog.records if record.name.startswith("moeblaze_ops.lowering"))
    assert re.search(r"blocks.py:\d+\): rewritten to expert_up\(silu\) -> expert_down", message)


def names_in(explanation):
    return [candidate.where.partition(" ")[0] for candidate in explanation.candidates]


def compiled_blocks(model, backend):
    for block in model.layers:
        block.compile(backend=backend)
    return model


def test_report_of_a_real_compile():
    model, x = Blocks(), torch.randn(6, 16)
    with rewriting_backend() as backend:
        torch.compile(model, backend=backend)(x)
    explanation = moeblaze_ops.report()
    assert [c.where.partition(" ")[0] for c in explanation.candidates[-3:]] == ["layers.0", "layers.1", "layers.2"]
    assert all(c.became for c in explanation.candidates[-3:])


def test_report_lists_a_layer_once_for_each_mode():
    model = Blocks(lambda: Dense(activation=nn.AlphaDropout()), 2)
    with rewriting_backend() as backend:
        compiled = torch.compile(model, backend=backend)
        for tokens in (6, 9, 12):
            compiled(torch.randn(tokens, 16))
        assert str(moeblaze_ops.report()).startswith("moeblaze: 0 of 2 MoE layers rewritten\n  2 times layers.* (")
        model.eval()
        with torch.no_grad():
            compiled(torch.randn(6, 16))
    report = moeblaze_ops.report()
    assert str(report).startswith("moeblaze: 0 of 2 MoE layers rewritten in training, 2 of 2 in evaluation\n")
    assert [(c.where.partition(" ")[0], c.mode) for c in report.candidates] == [
        (f"layers.{i}", mode) for mode in ("in training", "in evaluation") for i in range(2)
    ]


def test_report_counts_blocks_that_are_compiled_one_by_one():
    blocks = [Dense(hidden=hidden, activation=nn.AlphaDropout()) for hidden in (16, 24, 32)]  # equal ones would share a graph
    with rewriting_backend() as backend:
        for block in blocks:
            block.compile(backend=backend)
        for tokens in (6, 9):
            for block in blocks:
                block(torch.randn(tokens, 16))
    assert str(moeblaze_ops.report()).startswith("moeblaze: 0 of 3 MoE layers rewritten\n  3 times Dense (")


@pytest.mark.parametrize("activation", [F.silu, nn.AlphaDropout()], ids=["rewritten", "left"])
def test_report_names_blocks_that_share_a_graph(activation):
    """Each block that its code runs for, under the name that ``explain`` gives it, whatever was recompiled."""
    model, x = Blocks(lambda: Dense(activation=activation), 3), torch.randn(6, 16)
    explained = names_in(moeblaze_ops.explain(model, x))
    with rewriting_backend() as backend:
        compiled_blocks(model, backend)
        model.layers[1](model.layers[0](x))
        assert names_in(moeblaze_ops.report()) == ["Dense", "Dense"], "the third did not run"
        records._recent.clear()
        torch._dynamo.reset()
        for tokens in (6, 9, 12):
            model(torch.randn(tokens, 16))
    assert names_in(moeblaze_ops.report()) == explained == ["layers.0", "layers.1", "layers.2"]


def test_report_tells_models_apart_that_share_a_graph():
    """A teacher and a student, and a function that is given one block after the other."""
    teacher, student, x = Blocks(count=2), Blocks(count=2), torch.randn(6, 16)
    with rewriting_backend() as backend:
        for _ in range(2):
            torch.compile(teacher, backend=backend)(x)
            torch.compile(student, backend=backend)(x)
        assert names_in(moeblaze_ops.report()) == ["layers.0", "layers.1"] * 2
        records._recent.clear()
        step = torch.compile(lambda block, x: block(x), backend=backend)
        for block in teacher.layers:
            x = step(block, x)
    assert names_in(moeblaze_ops.report()) == ["block", "block"]


def test_report_lists_a_layer_once_that_is_compiled_in_the_model_and_in_its_block():
    """As where the model ends in eager mode at other sizes: its blocks are compiled one by one then."""
    model = Blocks(Guarded, 2)
    with rewriting_backend() as backend:
        run = torch.compile(model, backend=backend)
        run(torch.randn(6, 16))
        whole = str(moeblaze_ops.report())
        for block in model.layers:
            block.compile(backend=backend)
        model(torch.randn(6, 16))
    assert str(moeblaze_ops.report()) == whole
    assert whole.startswith("moeblaze: 2 of 2 MoE layers rewritten\n") and "layers.*.up.*.weight" in whole


@pytest.mark.parametrize("experts", [Dense, Guarded, lambda: moeblaze_ops.MoE(16, 24, 4, 2)], ids=["dense", "guarded", "ours"])
def test_blocks_of_a_region_that_is_compiled_once_are_counted_each(caplog, experts):
    region = torch.compiler.nested_compile_region(lambda layer, x: layer(x))

    class Regional(Blocks):
        def forward(self, x):
            for layer in self.layers:
                x = x + region(layer, x)
            return region(self.layers[0], x)  # once more

    model, x = Regional(experts, 3), torch.randn(6, 16, requires_grad=True)
    explained = moeblaze_ops.explain(model, x)
    with rewriting_backend() as backend:
        torch.compile(model, backend=backend)(x)
    report = moeblaze_ops.report()
    assert names_in(explained) == names_in(report) == ([] if report.direct else ["layers.0", "layers.1", "layers.2"])
    assert explained.direct == report.direct in (0, 3)


class OfRows(nn.Module):
    """An activation that is not pointwise where there are seven rows."""

    def forward(self, h):
        return h.softmax(0) if len(h) == 7 else F.silu(h)


def test_report_says_in_how_many_compiles_a_layer_is_left():
    model = nn.Sequential(Dense(), Dense(activation=OfRows()))
    with rewriting_backend() as backend:
        run = torch.compile(model, backend=backend, dynamic=False)
        for rows in (6, 7):
            run(torch.randn(rows, 16))
        assert "in 1 of 2 compiles" in str(moeblaze_ops.report())
        run(torch.randn(8, 16))
    head, first, *lines = str(moeblaze_ops.report()).splitlines()
    assert head == "moeblaze: 1 of 1 MoE layers rewritten, 1 of 1 in 2 of 3 compiles, 0 of 1 in 1 of 3 compiles"
    assert first.startswith("  0 (") and "compiles" not in first
    assert re.match(r"  1 \(\S+\), in 2 of 3 compiles: masked experts -> ", lines[0])
    assert re.match(r"  1 \(\S+\), in 1 of 3 compiles: unrecognised, left alone: ", lines[1])


class Asking(Dense):
    """A layer that can be told to look at its output between two experts, which Dynamo cannot follow."""

    asks = False

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            out = out + (weights * (chosen == e)).sum(dim=-1, keepdim=True) * self.down[e](F.silu(self.up[e](x)))
            if self.asks and out.sum() > 1e9:
                break
        return out


@pytest.mark.parametrize("by_block", [False, True])
def test_report_drops_layers_whose_function_ended_in_eager_mode(by_block):
    """What Dynamo gives up once it skips for ever, whatever it had compiled before."""
    model, x = Blocks(Asking, 2), torch.randn(6, 16)
    with rewriting_backend() as backend:
        run = compiled_blocks(model, backend) if by_block else torch.compile(model, backend=backend)
        for asks, rewritten in ((False, 2), (True, 0), (False, 0)):
            model.layers[1].asks = asks
            run(x)
            with calls_of(torch.ops.moeblaze.dispatch.default) as dispatched:
                run(x)
            report = moeblaze_ops.report()
            assert str(report).startswith(f"moeblaze: {rewritten} of 2 MoE layers rewritten")
            assert len(dispatched) == sum(layer.became is not None for layer in report.candidates) == rewritten


def test_report_drops_layers_whose_code_never_ran():
    def fails(gm, example_inputs):
        raise RuntimeError("no compiler here")

    with switch.rewriting(fails), torch._dynamo.config.patch(suppress_errors=True):
        torch.compile(Blocks(), backend=fails)(torch.randn(6, 16))
    assert str(moeblaze_ops.report()).startswith("moeblaze: 0 of 3 MoE layers rewritten\n")


def test_report_lists_a_layer_once_that_changes():
    """Its activation, and how many experts it has, as adapters that are switched on and off change what it becomes."""
    model = Blocks(Dense, 2)
    with rewriting_backend() as backend:
        run = torch.compile(model, backend=backend)
        for activation, number in ((F.silu, 4), (F.gelu, 3), (F.relu, 2)):
            for layer in model.layers:
                layer.up, layer.activation = layer.up[:number], activation
                layer.router = nn.Linear(16, number, bias=False)
            run(torch.randn(6, 16))
    report = str(moeblaze_ops.report())
    assert report.startswith("moeblaze: 2 of 2 MoE layers rewritten\n") and "expert_up(relu)" in report


def test_report_counts_layers_that_call_the_operators():
    model, x = Blocks(lambda: moeblaze_ops.MoE(16, 24, 4, 2), 3), torch.randn(6, 16)
    explained = str(moeblaze_ops.explain(model, x))
    with rewriting_backend() as backend:
        compiled_blocks(model, backend)
        for tokens in (6, 9):
            model(torch.randn(tokens, 16))
    assert str(moeblaze_ops.report()) == explained == "moeblaze: 3 layers call the operators already"


def test_report_of_a_function_called_with_weights_of_other_sizes():
    def layer(x, router, up, down):
        weights, chosen = (x @ router.T).softmax(-1).topk(2)
        return sum((weights * (chosen == e)).sum(-1, keepdim=True) * (F.silu(x @ up[e].T) @ down[e].T) for e in range(len(up)))

    with rewriting_backend() as backend:
        run = torch.compile(layer, backend=backend)
        for hidden, tokens in ((24, 6), (32, 6), (32, 9), (32, 11)):
            run(torch.randn(tokens, 16), torch.randn(4, 16), torch.randn(4, hidden, 16), torch.randn(4, 16, hidden))
    assert str(moeblaze_ops.report()).startswith("moeblaze: 2 of 2 MoE layers rewritten\n  2 times ")
