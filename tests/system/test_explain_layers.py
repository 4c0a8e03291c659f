"""``explain`` on real layers: names, bytes, reasons and threads."""

import gc
import logging
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import moeblaze_ops
from moeblaze_ops import compile as switch
from moeblaze_ops.explanation import folded, module_name
from moeblaze_ops.plain_words import first_line, in_plain_words
from tests.corpus.zoo.blocks import Blocks, Branching, Dense, Guarded
from tests.tools.programs import printed_by
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in


def run(program: str, folder: Path) -> str:
    """What a program prints, in a process of its own in ``folder``."""
    file = folder / "program.py"
    file.write_text(program)
    return printed_by(file.name, folder=folder)


pytestmark = pytest.mark.usefixtures("scratch")


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
    assert re.match(r"Dense \(.*blocks.py:\d+\)", candidate.where)


def test_names_in_a_function_are_its_own():
    blocks = Blocks(count=1)

    def step(x, model):
        return model(x) + blocks(x)

    names = [c.where.partition(" ")[0] for c in moeblaze_ops.explain(step, torch.randn(6, 16), blocks).candidates]
    assert names and not any("[" in name for name in names)


def test_names_in_a_functional_call_are_those_of_modules():
    blocks = Blocks(count=2)
    weights = dict(blocks.named_parameters())
    explanation = moeblaze_ops.explain(lambda x: torch.func.functional_call(blocks, weights, (x,)), torch.randn(6, 16))
    assert [c.where.partition(" ")[0] for c in explanation.candidates] == ["blocks.layers.0", "blocks.layers.1"]


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
        "from tests.corpus.zoo.blocks import Blocks\n"
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
        "from tests.corpus.zoo.blocks import Blocks\n"
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


def test_branch_on_data_is_named_with_its_line():
    branch, note, _ = moeblaze_ops.explain(Branching(), torch.randn(6, 16)).notes
    assert re.search(r'blocks.py:\d+ "if token.numel\(\) > 1": the condition does not say whether there are', branch)
    assert "a branch depends on the elements of a tensor" in note and "(if token.numel() > 1:), inside a loop" in note
    assert re.search(r"at \S*blocks.py:\d+ ", note)


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


class ScaledLoss(torch.autograd.Function):
    """As Megatron scales the loss of a router: with a tensor that the training loop sets."""

    scale = torch.ones(())

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x

    @staticmethod
    def backward(ctx, d):
        return d, torch.ones_like(ctx.saved_tensors[0]) * ScaledLoss.scale


def test_what_breaks_a_graph_is_said_by_what_to_write():
    def step(x):
        return ScaledLoss.apply(x * 2, x.sum())

    def counted(x):
        return x * sum(x.long().tolist())

    x = torch.randn(3, requires_grad=True)
    if torch.__version__ >= "2.13":
        assert "keep it in a global variable" in str(moeblaze_ops.explain(step, x))
    assert "a number is read from a tensor" in in_plain_words("Data dependent operator\n  Explanation: Operator ...")
    assert any("read from a tensor" in note for note in moeblaze_ops.explain(counted, x.detach()).notes)


def test_a_graph_break_has_its_line():
    def inner(x):
        torch._dynamo.graph_break()
        return x + 1

    def step(x):
        x = inner(x * 2)
        torch._dynamo.graph_break()
        return inner(x).relu()

    notes = [note for note in moeblaze_ops.explain(step, torch.randn(6, 16)).notes if note.startswith("graph break: ")]
    first = inner.__code__.co_firstlineno + 1
    assert len(notes) == 2 and all("test_explain_layers.py:" in note for note in notes)
    assert [int(re.search(r"\.py:(\d+) \(torch._dynamo.graph_break\(\)\)$", note)[1]) for note in notes] == [first, first + 5]


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


class Disabled(nn.Module):
    """A router that Dynamo may not look into: the experts lie on the stack when its graph breaks."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), Squared()

    @torch.compiler.disable
    def choose(self, x):
        return self.router(x).softmax(-1).topk(2, -1)

    def forward(self, x):
        return x + self.experts(x, *self.choose(x))


class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 8, 12)), nn.Parameter(torch.randn(4, 12, 8))

    def forward(self, x, weights, ids):
        experts = (F.rms_norm(F.silu(x @ up), (12,)) @ down for up, down in zip(self.up, self.down, strict=True))
        return sum(y * (weights * (ids == e)).sum(-1, keepdim=True) for e, y in enumerate(experts))


def test_what_lay_on_the_stack_is_named_by_its_parameters():
    (layer,) = moeblaze_ops.explain(nn.Sequential(Disabled()), torch.randn(10, 8)).candidates
    assert layer.where.startswith("0.experts (") and "NOT_TWO_PROJECTIONS" in layer.reason
    assert module_name("L['___stack0']") == "" and module_name("L['___stack12'].mlp") == "mlp"
