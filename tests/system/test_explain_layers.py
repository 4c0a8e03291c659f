"""``explain`` and ``report`` on real layers: names, bytes, counts and threads."""

import gc
import logging
import os
import re
import subprocess
import sys
import weakref
from collections import deque
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import moeblaze_ops
from moeblaze_ops import compile as switch
from moeblaze_ops import config
from moeblaze_ops.compile import records, verdict
from moeblaze_ops.explanation import folded
from moeblaze_ops.plain_words import first_line, in_plain_words
from tests.door.programs import calls_of
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, folder: Path) -> str:
    """What a program prints, in a process of its own in ``folder``."""
    file = folder / "program.py"
    file.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, file.name], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Dense(nn.Module):
    """Every expert on every token; experts are modules of modules."""

    def __init__(self, D=16, hidden=32, E=4, activation=F.silu):
        super().__init__()
        self.router, self.activation = nn.Linear(D, E, bias=False), activation
        self.up = nn.ModuleList(nn.Sequential(nn.Linear(D, hidden, bias=False)) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(hidden, D, bias=False) for _ in range(E))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            weight = (weights * (chosen == e)).sum(dim=-1, keepdim=True)
            out = out + weight * self.down[e](self.activation(self.up[e](x)))
        return out


class Guarded(nn.Module):
    """Experts without tokens are skipped: their parameters get no gradient."""

    def __init__(self, D=16, hidden=32, E=4):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.up = nn.ModuleList(nn.Linear(D, hidden, bias=False) for _ in range(E))
        self.down = nn.ModuleList(nn.Linear(hidden, D, bias=False) for _ in range(E))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            token, slot = torch.where(chosen == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, self.down[e](F.silu(self.up[e](x[token]))) * weights[token, slot, None])
        return out


class Blocks(nn.Module):
    def __init__(self, make=Dense, count=3, breaks=False):
        super().__init__()
        self.layers, self.breaks = nn.ModuleList(make() for _ in range(count)), breaks

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


@pytest.fixture(autouse=True)
def scratch():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    moeblaze_ops.disable()
    torch._dynamo.reset()


def test_prompt_shows_the_text_once(tmp_path):
    program = (
        "import code, torch, moeblaze_ops\n"
        "shell = code.InteractiveInterpreter({'moeblaze_ops': moeblaze_ops, 'torch': torch})\n"
        "shell.runsource('moeblaze_ops.explain(torch.nn.Linear(2, 2), torch.randn(4, 2))', symbol='single')\n"
    )
    assert run(program, tmp_path) == "moeblaze: no MoE layer was found\n"


@pytest.mark.parametrize("make", [Dense, Guarded])
def test_layer_that_is_the_model_keeps_what_its_parts_keep(make):
    """The same bytes, whether the layer is the model or a part of one."""
    layer, x = make(), torch.randn(12, 16)
    (alone,) = moeblaze_ops.explain(layer, x).candidates
    (inside,) = moeblaze_ops.explain(nn.Sequential(layer), x).candidates
    assert (alone.kept_before, alone.kept_after) == (inside.kept_before, inside.kept_after)
    assert alone.where.startswith(f"{make.__name__} (") and inside.where.startswith("0 (")
    assert alone.kept_before > alone.kept_after > 0


def test_bytes_of_a_checkpointed_layer_are_not_counted():
    class Checkpointed(Dense):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    printed = str(moeblaze_ops.explain(nn.Sequential(nn.Linear(16, 16), Checkpointed()), torch.randn(12, 16)))
    assert "rewritten" in printed and "KiB" not in printed
    assert "kept for backward: not counted, the layer is checkpointed or runs without gradients" in printed


def test_bytes_of_a_layer_are_not_those_of_a_layer_inside():
    class Both(Dense):
        def __init__(self):
            super().__init__()
            self.inner = Dense()

        def forward(self, x):
            return super().forward(self.inner(x))

    x = torch.randn(12, 16)
    kept = {c.where.partition(" ")[0]: c.kept_after for c in moeblaze_ops.explain(Both(), x).candidates}
    (alone,) = moeblaze_ops.explain(Dense(), x).candidates
    assert kept["Both"] <= alone.kept_after and kept["inner"] == alone.kept_after


@pytest.mark.parametrize("breaks", [False, True], ids=["one graph", "a graph a layer"])
def test_equal_layers_are_counted_and_named(breaks):
    explanation = moeblaze_ops.explain(Blocks(breaks=breaks), torch.randn(12, 16))
    assert [c.where.partition(" ")[0] for c in explanation.candidates] == ["layers.0", "layers.1", "layers.2"]
    assert str(explanation).startswith("moeblaze: 3 of 3 MoE layers rewritten")


def test_layer_that_is_called_twice_counts_twice():
    weights = [torch.randn(4, 32, 16), torch.randn(4, 16, 32)]

    def layer(x):
        w, chosen = (x @ weights[1][:, :, 0].T).softmax(-1).topk(2)
        return sum((w * (chosen == e)).sum(-1, keepdim=True) * (F.silu(x @ weights[0][e].T) @ weights[1][e].T) for e in range(4))

    def model(x):
        return layer(layer(x))

    text = str(moeblaze_ops.explain(model, torch.randn(6, 16)))
    assert text.startswith("moeblaze: 2 of 2 MoE layers rewritten\n  2 times ") and text.count("test_explain_layers.py:") == 1


def test_line_is_the_users_under_a_default_device():
    """There torch calls each of its functions in a file of its own."""
    with torch.device("cpu"):
        (candidate,) = moeblaze_ops.explain(Dense(), torch.randn(24, 16)).candidates
    assert re.match(r"Dense \(.*test_explain_layers.py:\d+\)", candidate.where)


def test_names_in_a_function_are_its_own():
    blocks = Blocks(count=1)

    def step(x, model):
        return model(x) + blocks(x)

    names = [c.where.partition(" ")[0] for c in moeblaze_ops.explain(step, torch.randn(6, 16), blocks).candidates]
    assert names and not any("[" in name for name in names)


def test_hooks_of_the_model_run():
    """FSDP2 gathers parameters in one; a forward that is called past it reads what is not there."""
    layer, x = Dense(), torch.randn(6, 16)
    called = []
    layer.register_forward_pre_hook(torch._dynamo.disable(lambda module, inputs: called.append(True)))
    (candidate,) = moeblaze_ops.explain(layer, x).candidates
    assert called and candidate.became


def test_fsdp2(tmp_path):
    """Parameters are sharded until the hooks of each module gather them."""
    program = (
        "import torch, torch.distributed as dist, moeblaze_ops\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "from tests.system.test_explain_layers import Blocks\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/meeting', rank=0, world_size=1)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(16, 16), Blocks(count=2))\n"
        "[fully_shard(layer) for layer in model[1].layers]\n"
        "fully_shard(model)\n"
        "print(moeblaze_ops.explain(model, torch.randn(6, 16)))\n"
        "dist.destroy_process_group()\n"
    )
    out = run(program, tmp_path)
    assert out.startswith("moeblaze: 2 of 2 MoE layers rewritten\n  2 times 1.layers.* (")


@pytest.mark.skipif(
    torch.__version__.startswith("2.11"), reason="Dynamo of torch 2.11 crashes in a second thread if no other compiled first"
)
def test_four_threads(tmp_path):
    """Each gets its own right answer; without the lock Dynamo crashed the process."""
    program = (
        "import threading, torch, moeblaze_ops\n"
        "from tests.system.test_explain_layers import Blocks\n"
        "results = []\n"
        "def explain(count):\n"
        "    results.append((count, len(moeblaze_ops.explain(Blocks(count=count), torch.randn(6, 16)).candidates)))\n"
        "threads = [threading.Thread(target=explain, args=(count,)) for count in (1, 2, 3, 1)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "assert len(results) == 4 and all(count == found for count, found in results), results\n"
    )
    run(program, tmp_path)


def test_declined_layer_says_what_to_change():
    (candidate,) = moeblaze_ops.explain(Dense(activation=nn.AlphaDropout()), torch.randn(6, 16)).candidates
    assert candidate.became is None and candidate.remedy and candidate.code.startswith("out = out + weight")
    assert "what would help: " in str(candidate) and "code: out = out + weight" in str(candidate)
    assert "'alpha_dropout' where a pointwise function" in str(candidate)


class Scaled(Dense):
    """The up projection turned round, times a vector: no second projection."""

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        shares = [(weights * (chosen == e)).sum(dim=-1, keepdim=True) for e in range(len(self.up))]
        experts = [F.silu(up(x)) @ up[0].weight * down.weight[:, 0] for up, down in zip(self.up, self.down, strict=True)]
        return sum(share * expert for share, expert in zip(shares, experts, strict=True))


def test_reasons_have_the_names_that_parameters_have():
    (candidate,) = moeblaze_ops.explain(Scaled(), torch.randn(6, 16)).candidates
    assert candidate.became is None and "('up.0.0.weight' where" in str(candidate)


class Unprojected(Dense):
    def forward(self, hidden_states):
        weights, chosen = self.router(hidden_states).softmax(dim=-1).topk(2, dim=-1)
        shares = [(weights * (chosen == e)).sum(dim=-1, keepdim=True) for e in range(len(self.up))]
        return sum(share * hidden_states * hidden_states for share in shares)


def test_reasons_have_the_names_that_arguments_have():
    (candidate,) = moeblaze_ops.explain(Unprojected(), torch.randn(6, 16)).candidates
    assert candidate.became is None and "('hidden_states' where" in str(candidate)


class Branching(Guarded):
    """Skips more than experts without tokens."""

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            token, slot = torch.where(chosen == e)
            if token.numel() > 1:
                out.index_add_(0, token, self.down[e](F.silu(self.up[e](x[token]))) * weights[token, slot, None])
        return out


def test_branch_on_data_is_named_with_its_line():
    branch, note, _ = moeblaze_ops.explain(Branching(), torch.randn(6, 16)).notes
    assert re.search(r'test_explain_layers.py:\d+ "if token.numel\(\) > 1": the condition does not say whether there are', branch)
    assert "a branch depends on the elements of a tensor" in note and "(if token.numel() > 1:), inside a loop" in note
    assert re.search(r"at \S*test_explain_layers.py:\d+ ", note)


class Keeping(Guarded):
    """Sorted rows, split by counts that stay with the module, in a list."""

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        order = chosen.flatten().argsort()
        self.counts = chosen.flatten().bincount(minlength=len(self.up)).tolist()
        parts = x[order // 2].split(self.counts)
        y = torch.cat([self.down[e](F.silu(self.up[e](part))) for e, part in enumerate(parts)])
        return torch.zeros_like(x).index_add(0, order // 2, y * weights.flatten()[order, None])


def test_numbers_that_are_kept_are_named_with_what_would_do():
    (candidate,) = moeblaze_ops.explain(Keeping(), torch.randn(6, 16)).candidates
    assert "would stay in the graph: the program keeps it" in candidate.reason and "a tensor of counts" in candidate.reason


def test_what_a_backend_raised_is_said():
    raised = "backend='backend' raised:\nGuardOnDataDependentSymNode: Could not guard on data-dependent expression u0 > 1\n\nmore"
    assert first_line(raised).startswith("GuardOnDataDependentSymNode: Could not guard")
    assert in_plain_words(raised).startswith("a branch depends on the elements of a tensor (Guard")
    assert first_line("backend='backend' raised:") == "backend='backend' raised:"


def test_functions_without_operations_are_one_note():
    """Dynamo's names for what follows a break are not shown, nor each function that it had nothing to compile of."""

    def label(x, name):
        torch._dynamo.graph_break()
        return f"{name} of {len(x)}"

    def step(x):
        labels = [label(x, "first")]
        torch._dynamo.graph_break()
        labels.append(label(x, "second"))
        torch._dynamo.graph_break()
        return labels

    explanation = moeblaze_ops.explain(step, torch.randn(6, 16))
    assert not any("No ops traced" in note or "torch_dynamo_resume" in note for note in explanation.notes)
    assert sum("without tensor operations" in note for note in explanation.notes) == 1


def test_report_of_a_real_compile():
    model, x = Blocks(), torch.randn(6, 16)
    with rewriting_backend() as backend:
        torch.compile(model, backend=backend)(x)
    explanation = moeblaze_ops.report()
    assert [c.where.partition(" ")[0] for c in explanation.candidates[-3:]] == ["layers.0", "layers.1", "layers.2"]
    assert all(c.became for c in explanation.candidates[-3:])


@pytest.fixture
def nothing_said(monkeypatch):
    monkeypatch.setattr(verdict, "_said", set())
    monkeypatch.setattr(records, "_recent", deque())


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
def test_a_layer_that_was_left_is_named_once(caplog, nothing_said, breaks):
    x = torch.randn(6, 16)
    assert said(caplog, Mixed(breaks), x) == [MIXED]
    torch._dynamo.reset()
    assert said(caplog, Mixed(breaks), x) == [], "the same again"
    assert said(caplog, Mixed(breaks).eval(), x) == [], "without dropout they are all rewritten"


def test_all_layers_are_said_at_info_level(caplog, nothing_said):
    x = torch.randn(6, 16)
    assert said(caplog, Blocks(), x) == []
    torch._dynamo.reset()
    assert said(caplog, Blocks(Guarded, 2), x, level=logging.INFO) == ["moeblaze: 2 of 2 layers rewritten: layers.*"]
    assert said(caplog, nn.Linear(16, 16), x, level=logging.INFO) == []


def test_blocks_that_share_a_graph_are_counted_each(caplog, nothing_said):
    lines = said(caplog, Blocks(breaks=True), torch.randn(6, 16), level=logging.INFO)
    assert lines == ["moeblaze: 3 of 3 layers rewritten: layers.*"]
    assert len(moeblaze_ops.report().candidates) == 3


def test_quiet(caplog, nothing_said, monkeypatch):
    monkeypatch.setattr(config, "quiet", True)
    assert said(caplog, Mixed(), torch.randn(6, 16), level=logging.INFO) == []


def test_blocks_compiled_one_by_one_say_it_once(caplog, nothing_said):
    blocks = [Dense(activation=nn.AlphaDropout()) for _ in range(4)]
    lines = [line for block in blocks for line in said(caplog, block, torch.randn(6, 16))]
    assert len(lines) == 1 and "0 of 1 layers rewritten; 1 left: Dense" in lines[0]


def test_blocks_of_a_model_compiled_one_by_one_say_it_once(caplog, nothing_said):
    sizes = iter((16, 24, 32))
    model = Blocks(lambda: Dense(hidden=next(sizes), activation=nn.AlphaDropout()), 3)
    with caplog.at_level(logging.WARNING, logger="moeblaze_ops"), rewriting_backend() as backend:
        compiled_blocks(model, backend)(torch.randn(6, 16))
    (line,) = (record.getMessage() for record in caplog.records if record.name == "moeblaze_ops.compile.verdict")
    assert "0 of 1 layers rewritten; 1 left: layers.0 (" in line


def test_a_loop_that_is_left_to_eager_mode_is_named(caplog, nothing_said):
    (line,) = said(caplog, Branching(), torch.randn(6, 16))
    assert re.search(r"no layer was found; left to eager mode, for a branch on data: forward \(\S+:\d+\); moeblaze_ops", line)


def test_what_is_checkpointed_with_a_side_effect_is_named(caplog, nothing_said):
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


def test_what_checkpoint_sequential_calls_is_named(caplog, nothing_said):
    class Sequential(Blocks):
        def forward(self, x):
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

    (line,) = said(caplog, Sequential(), torch.randn(6, 16, requires_grad=True))
    assert re.search(r"left to eager mode, with all that it checkpoints: forward \(\S+:\d+\);", line)
    assert "call torch.utils.checkpoint.checkpoint instead" in str(moeblaze_ops.report())


def test_dry_runs_say_nothing(caplog, nothing_said):
    with caplog.at_level(logging.INFO, logger="moeblaze_ops"):
        moeblaze_ops.explain(Mixed(), torch.randn(6, 16))
        moeblaze_ops.verify(Mixed(), torch.randn(6, 16))
    assert not [record for record in caplog.records if record.name == "moeblaze_ops.compile.verdict"]


def test_an_error_says_enough(caplog, nothing_said):
    with rewriting_backend() as backend, pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(Branching(), backend=backend, fullgraph=True)(torch.randn(6, 16))
    assert not [record for record in caplog.records if record.name == "moeblaze_ops.compile.verdict"]


def test_report_lists_a_layer_once_for_each_mode(nothing_said):
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


def test_report_counts_blocks_that_are_compiled_one_by_one(nothing_said):
    blocks = [Dense(hidden=hidden, activation=nn.AlphaDropout()) for hidden in (16, 24, 32)]  # equal ones would share a graph
    with rewriting_backend() as backend:
        for block in blocks:
            block.compile(backend=backend)
        for tokens in (6, 9):
            for block in blocks:
                block(torch.randn(tokens, 16))
    assert str(moeblaze_ops.report()).startswith("moeblaze: 0 of 3 MoE layers rewritten\n  3 times Dense (")


def names_in(explanation):
    return [candidate.where.partition(" ")[0] for candidate in explanation.candidates]


def compiled_blocks(model, backend):
    for block in model.layers:
        block.compile(backend=backend)
    return model


@pytest.mark.parametrize("activation", [F.silu, nn.AlphaDropout()], ids=["rewritten", "left"])
def test_report_names_blocks_that_share_a_graph(nothing_said, activation):
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


def test_report_tells_models_apart_that_share_a_graph(nothing_said):
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


def test_report_lists_a_layer_once_that_is_compiled_in_the_model_and_in_its_block(nothing_said):
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
def test_blocks_of_a_region_that_is_compiled_once_are_counted_each(caplog, nothing_said, experts):
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
def test_report_drops_layers_whose_function_ended_in_eager_mode(nothing_said, by_block):
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


def test_report_drops_layers_whose_code_never_ran(nothing_said):
    def fails(gm, example_inputs):
        raise RuntimeError("no compiler here")

    with switch.rewriting(fails), torch._dynamo.config.patch(suppress_errors=True):
        torch.compile(Blocks(), backend=fails)(torch.randn(6, 16))
    assert str(moeblaze_ops.report()).startswith("moeblaze: 0 of 3 MoE layers rewritten\n")


def test_report_lists_a_layer_once_that_changes(nothing_said):
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


def test_report_counts_layers_that_call_the_operators(nothing_said):
    model, x = Blocks(lambda: moeblaze_ops.MoE(16, 24, 4, 2), 3), torch.randn(6, 16)
    explained = str(moeblaze_ops.explain(model, x))
    with rewriting_backend() as backend:
        compiled_blocks(model, backend)
        for tokens in (6, 9):
            model(torch.randn(tokens, 16))
    assert str(moeblaze_ops.report()) == explained == "moeblaze: 3 layers call the operators already"


def test_report_of_a_function_called_with_weights_of_other_sizes(nothing_said):
    def layer(x, router, up, down):
        weights, chosen = (x @ router.T).softmax(-1).topk(2)
        return sum((weights * (chosen == e)).sum(-1, keepdim=True) * (F.silu(x @ up[e].T) @ down[e].T) for e in range(len(up)))

    with rewriting_backend() as backend:
        run = torch.compile(layer, backend=backend)
        for hidden, tokens in ((24, 6), (32, 6), (32, 9), (32, 11)):
            run(torch.randn(tokens, 16), torch.randn(4, 16), torch.randn(4, hidden, 16), torch.randn(4, 16, hidden))
    assert str(moeblaze_ops.report()).startswith("moeblaze: 2 of 2 MoE layers rewritten\n  2 times ")


def test_names_are_folded():
    text = str(moeblaze_ops.explain(Blocks(Guarded, 12), torch.randn(6, 16)))
    assert "  12 times layers.* (" in text and text.count("gradients of zeros") == 1
    assert "layers.*.up.*.weight, layers.*.down.*.weight" in text
    assert folded(["layers.0.experts.0.w1.weight", "layers.0.experts.1.w1.weight"]) == ["layers.0.experts.*.w1.weight"]


def test_layers_that_call_the_operators():
    layer, x = moeblaze_ops.MoE(16, 24, 4, 2), torch.randn(6, 16)
    assert str(moeblaze_ops.explain(layer, x)) == "moeblaze: 1 layer calls the operators already"
    text = str(moeblaze_ops.explain(nn.Sequential(layer, moeblaze_ops.MoE(16, 24, 4, 2, keep="input"), Dense()), x))
    assert text.startswith("moeblaze: 1 of 1 MoE layers rewritten, 2 layers call the operators already\n")


def test_logs_of_a_real_compile(caplog):
    with caplog.at_level(logging.INFO, logger="moeblaze_ops.lowering"), rewriting_backend() as backend:
        torch.compile(Dense(), backend=backend)(torch.randn(6, 16))
    (message,) = (record.getMessage() for record in caplog.records if record.name.startswith("moeblaze_ops.lowering"))
    assert re.search(r"test_explain_layers.py:\d+\): rewritten to expert_up\(silu\) -> expert_down", message)


@pytest.mark.parametrize("ask", [moeblaze_ops.explain, moeblaze_ops.verify])
@pytest.mark.parametrize("make", [Dense, Guarded, lambda: Blocks(Guarded, 2, breaks=True), lambda: hooked(Dense())])
def test_nothing_of_the_model_is_kept(ask, make):
    model = make()
    kept = weakref.ref(model)
    ask(model, torch.randn(6, 16))
    del model
    gc.collect()
    assert kept() is None


def test_nothing_of_the_model_is_kept_after_an_error(monkeypatch):
    """Torch keeps the backend of a compile that raised; what it logs of that keeps the error."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    model = Dense()
    kept = weakref.ref(model)
    with pytest.raises(RuntimeError):
        moeblaze_ops.explain(model, torch.randn(6, 17))
    del model
    gc.collect()
    assert kept() is None


def hooked(model):
    model.register_forward_pre_hook(lambda module, inputs: None)
    return model


def test_idle_experts_are_named():
    (candidate,) = moeblaze_ops.explain(Blocks(Guarded, 1), torch.randn(6, 16)).candidates
    expected = {f"layers.0.{part}.{e}.weight" for part in ("up", "down") for e in range(4)}
    assert set(candidate.zeros) == expected
    (candidate,) = moeblaze_ops.explain(Blocks(Dense, 1), torch.randn(6, 16)).candidates
    assert candidate.zeros == (), "every expert sees every token: zeros in plain PyTorch, too"


@torch.compiler.nested_compile_region
def region(layer, x):
    return layer(x)


@pytest.mark.parametrize("make", [Dense, Guarded])
def test_region_that_is_compiled_once(make):
    """Its body is a graph in the graph, which runs by itself."""
    layer, x = make(), torch.randn(24, 16)
    (candidate,) = moeblaze_ops.explain(lambda x: region(layer, x.sin()), x).candidates
    assert candidate.became == "expert_up(silu) -> expert_down"
    with rewriting_backend() as backend, switch.recording() as records:
        got = torch.compile(lambda x: region(layer, x.sin()), backend=backend)(x)
    assert len(rewritten_in(records)) == 1
    torch.testing.assert_close(got, layer(x.sin()))
