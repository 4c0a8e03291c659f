"""How often a frame is traced: what an attempt did as the next one would is not done again."""

import types

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import moeblaze_ops
from moeblaze_ops import compile as switch
from moeblaze_ops import config
from moeblaze_ops.compile import attempts as attempts_of_frames
from moeblaze_ops.compile import given_up
from moeblaze_ops.compile import switch as switch_of_frames
from moeblaze_ops.lowering import patches
from moeblaze_ops.lowering.tracing import canary
from moeblaze_ops.lowering.tracing.branches import Branches
from tests.capture import test_branches as guarded
from tests.corpus.loops.guarded import shape_continue
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in


def rows_of_data(x):
    return x[torch.where(x[:, 0] > 0)[0]].sum(0)


@pytest.mark.parametrize("function, is_told", [(lambda x: x.sin(), False), (rows_of_data, True)], ids=["any_size", "of_data"])
def test_nothing_is_kept_for_sizes_that_only_the_data_tell(function, is_told):
    torch._dynamo.reset()
    with rewriting_backend() as backend:
        torch.compile(torch.cos, backend=backend)(torch.randn(3, 2))  # two functions are traced before the first attempt
        FakeTensorMode.cache_clear()
        torch.compile(function, backend=backend, dynamic=True)(torch.randn(3, 2))
    assert bool(FakeTensorMode.cache_bypasses["a size that only the data tell"]) is is_told


def in_two_functions(x):
    return rows_of_data(x) + rows_of_data(-x)


def in_two_graphs(x):
    y = x * 2
    torch._dynamo.graph_break()
    return rows_of_data(y)


def without_operators(x):
    return x


def a_branch(x):
    y = rows_of_data(x)
    if (x > 0).any():
        y = y + 1
    return y


def a_number(x):
    return rows_of_data(x) * x[0, 0].item()


def numbers(x):
    return rows_of_data(x) * sum(x[0].int().tolist())


def a_list_too_long(x):
    return rows_of_data(x) + len(x.int().flatten().tolist())


def a_number_inside_an_operator(x):
    return rows_of_data(x) + x.select(0, torch.argmax(x[:, 0])).sum()


def counts(x):
    return rows_of_data(x) + torch.bincount(x[:, 0].abs().int(), minlength=4)[0]


def a_question(x):
    return rows_of_data(x) * (1 in x)


def a_number_that_a_loop_breaks_at(x):
    for _ in range(2):
        x = x * torch.tensor(2).item()
        torch._dynamo.graph_break()
    return x


TWO = torch.tensor(2)


def an_input_that_a_loop_breaks_at(x):
    for _ in range(2):
        x = x * TWO.item()
        torch._dynamo.graph_break()
    return x


def counts_that_a_loop_breaks_at(x):
    for _ in range(2):
        x = x * torch.bincount(x[:, 0].abs().int(), minlength=4)[0]
        torch._dynamo.graph_break()
    return x


def a_branch_that_a_loop_breaks_at(x):
    for _ in range(2):
        if (x > 0).any():
            x = x + 1
        torch._dynamo.graph_break()
    return x


@pytest.fixture
def attempts(monkeypatch):
    """The attempts at frames that are made, each with whether it follows branches on data."""
    torch._dynamo.reset()
    made = []
    attempt = attempts_of_frames._try

    def noted(compile_frame, frame, branches):
        made.append((frame.code.co_name, branches is not None))
        return attempt(compile_frame, frame, branches)

    monkeypatch.setattr(attempts_of_frames, "_try", noted)
    yield made
    torch._dynamo.reset()


def run(function) -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    with rewriting_backend() as backend:
        torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))


@pytest.mark.parametrize("function", [rows_of_data, in_two_functions, in_two_graphs, without_operators], ids=lambda f: f.__name__)
def test_an_attempt_like_the_first_is_not_made(function, attempts):
    run(function)
    assert (function.__name__, True) in attempts
    assert not [name for name, follows_branches in attempts if not follows_branches]


@pytest.mark.parametrize(
    "function",
    [
        a_branch,
        a_number,
        numbers,
        a_list_too_long,
        a_number_inside_an_operator,
        counts,
        a_question,
        a_number_that_a_loop_breaks_at,
        an_input_that_a_loop_breaks_at,
        counts_that_a_loop_breaks_at,
        a_branch_that_a_loop_breaks_at,
    ],  # fmt: skip
    ids=lambda f: f.__name__,
)
def test_an_attempt_that_is_another_is_made(function, attempts):
    run(function)
    assert [follows_branches for name, follows_branches in attempts if name == function.__name__] == [True, False]


def a_loop_that_breaks(x):
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


def an_iterator_that_dynamo_does_not_know(x):
    for row, _ in zip(iter(x), memoryview(b"ab"), strict=False):
        x = x + row
    return x


def rows_of_data_that_a_loop_breaks_at(x):
    for _ in range(2):
        x = x + rows_of_data(x)
        torch._dynamo.graph_break()
    return x


def rows_of_no_tokens(x):
    """Their number is known where it may be asked for; else the graph breaks."""
    x = x + x[:0][torch.where(x[:0, 0] > 0)[0]].sum()
    for _ in range(2):
        x = x + 1
        torch._dynamo.graph_break()
    return x


def a_question_in_a_loop(x):
    for _ in range(2):
        x = x * (1 in x)
        torch._dynamo.graph_break()
    return x


@pytest.fixture
def traced(monkeypatch):
    """The functions that Dynamo is asked to compile, each as often as it is."""
    made = []
    compile_as = switch_of_frames._compile_frame

    def noted(compile_frame, frame):
        def compile_code(code):
            made.append(code.co_name)
            return compile_frame(code)

        return compile_as(compile_code, frame)

    monkeypatch.setattr(switch_of_frames, "_compile_frame", noted)
    return made


@pytest.mark.parametrize(
    ("function", "times"),
    [
        (without_operators, 1),
        (a_loop_that_breaks, 1),
        (an_iterator_that_dynamo_does_not_know, 1),
        (rows_of_data_that_a_loop_breaks_at, 2),
        (rows_of_no_tokens, 2),
        (a_number_that_a_loop_breaks_at, 2),
        (a_question_in_a_loop, 2),
    ],
    ids=lambda f: getattr(f, "__name__", f),
)
def test_what_fails_as_it_is_written_is_traced_once(function, times, traced):
    """Where an attempt asked for nothing that Dynamo alone has not, Dynamo ends as it did; what it counted stays counted."""
    found = []
    for rewrites in (False, True):
        torch._dynamo.reset()
        counters.clear()
        if rewrites:
            run(function)
        else:
            torch.compile(function, backend="eager")(torch.randn(200, 4))
        found.append((counters["graph_break"], counters["stats"]["unique_graphs"]))
    assert found[0] == found[1]
    assert traced.count(function.__name__) == times


def an_idle_loop(x):
    out = torch.zeros_like(x)
    for e in range(2):
        (token,) = torch.where(x[:, 0].int() == e)
        if len(token) == 0:
            continue
        out[token] += x[token] * (e + 1)
    return out


FLAGS = ("capture_dynamic_output_shape_ops", "capture_scalar_outputs")


def rows_and_a_number(x):
    (rows,) = torch.where(x[:, 0] > 0)
    return x.index_add(0, rows, x[rows]) * x.abs().max().item()


@pytest.mark.parametrize("function", [rows_of_data, an_idle_loop], ids=lambda f: f.__name__)
def test_what_the_compiler_raises_is_raised(function, attempts):
    """A graph that is compiled in an attempt is the one that is compiled, by the backend that the user named."""
    compiler = []

    def backend(gm, example_inputs):
        compiler.append(gm)
        raise OSError("no C++ compiler")

    with switch.rewriting(backend, lambda gm: "a report"), pytest.raises(Exception, match="(?s)backend='backend' .*no C"):
        torch.compile(function, backend=backend)(torch.randn(200, 4))
    assert len(compiler) == len(attempts) == 1


def test_own_error_in_an_attempt_is_raised_or_said(attempts, monkeypatch, caplog):
    def fails(*args):
        raise ZeroDivisionError("of ours")

    monkeypatch.setitem(fails.__globals__, "__name__", "moeblaze_ops.somewhere")
    monkeypatch.setattr(Branches, "takes_number", fails)
    with pytest.raises(Exception, match="of ours"):
        run(a_number)
    monkeypatch.setattr(config, "strict", False)
    run(a_number)
    assert "please report it" in caplog.text


def test_counters_are_those_of_what_was_compiled(attempts):
    """Attempts that are given up leave Dynamo's counters as they were."""
    counted = []
    for rewrites in (False, True):
        torch._dynamo.reset()
        counters.clear()
        if rewrites:
            run(in_two_graphs)
        else:
            torch.compile(in_two_graphs, backend="eager")(torch.randn(200, 4))
        counted.append(counters["graph_break"])
    assert counted[0] == counted[1] and counted[0]


def test_what_the_user_lets_dynamo_capture(attempts):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run(rows_of_data)
    assert attempts == [("rows_of_data", True)]


@pytest.mark.parametrize("captures", [dict.fromkeys(FLAGS, False), *({name: True} for name in FLAGS), dict.fromkeys(FLAGS, True)])
def test_functions_without_layers_break_where_the_user_lets_them(captures, attempts):
    """What he told Dynamo to capture holds, and nothing that he did not is captured."""
    found = []
    for rewrites in (False, True):
        torch._dynamo.reset()
        counters.clear()
        with torch._dynamo.config.patch(captures):
            if rewrites:
                run(rows_and_a_number)
            else:
                torch.compile(rows_and_a_number, backend="eager")(torch.randn(200, 4))
        found.append((counters["graph_break"], counters["stats"]["unique_graphs"]))
    assert found[0] == found[1]


def test_a_python_number_in_the_graph_is_no_number_that_an_attempt_asked_for(attempts):
    x = torch.randn(200, 4)
    with rewriting_backend() as backend:
        compiled = torch.compile(lambda x, n: rows_of_data(x) * n, backend=backend, dynamic=True)
        torch.testing.assert_close(compiled(x, 2.5), rows_of_data(x) * 2.5)
    assert [attempt for attempt in attempts if attempt[0] == "<lambda>"] == [("<lambda>", True)]


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_number_that_the_program_changes_keeps_no_layer(dynamic):
    """A graph has a temperature and a scale as inputs, from the second value on or from the first."""
    layer = guarded.Layer(shape_continue)
    layer.combine = lambda self, x, weights, ids: shape_continue(self, x, weights * self.state.heat, ids) * self.state.scale
    with rewriting_backend() as backend, switch.recording() as records:
        run = torch.compile(layer, backend=backend, dynamic=dynamic, fullgraph=True)
        for step in range(4):
            layer.state.heat, layer.state.scale = 1.5 + step, 2.75 - step
            x = torch.randn(6, guarded.D)
            torch.testing.assert_close(run(x), layer(x))
    assert len(rewritten_in(records)) == (2 if dynamic is None else 1)


class Experts(nn.Module):
    """Linear maps of rows that are split on the host, as JetMoE has them in its attention and in its MLP."""

    def __init__(self, num_experts, dim_in, dim_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, dim_out, dim_in) / 4)

    def forward(self, rows, counts):
        parts = rows.split(counts.tolist())
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, self.weight, strict=True)])


class Routed(nn.Module):
    def __init__(self, act, num_experts=3, dim=8):
        super().__init__()
        self.act, self.router = act, nn.Linear(dim, num_experts, bias=False)
        self.up, self.down = Experts(num_experts, dim, 2 * dim), Experts(num_experts, 2 * dim, dim)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self.router.out_features)
        rows = self.down(self.act(self.up(x[order // 2], counts)), counts)
        return torch.zeros_like(x).index_add(0, order // 2, rows * weights.flatten()[order, None])


class Block(nn.Module):
    def __init__(self, *acts):
        super().__init__()
        self.parts = nn.ModuleList(map(Routed, acts))

    def forward(self, x):
        return self.last(x + self.parts[0](x))

    def last(self, x):
        return x + self.parts[-1](x) if len(self.parts) > 1 else x


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Norm(nn.Module):
    """No activation: what it gives for a feature depends on all of them."""

    def forward(self, x):
        return x / (1 + x.norm(dim=-1, keepdim=True))


def rewritten_layers(model) -> int:
    x = torch.randn(7, 8)
    with rewriting_backend() as backend, switch.recording() as records:
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    return len(rewritten_in(records))


class Dropping(Model):
    """Skips blocks, as NLLB-MoE does in training, and keeps a number of what it did."""

    def forward(self, x):
        return self.run(x)

    def run(self, x):
        for block in self.blocks:
            if (x > 9).all():
                continue
            x, self.kind = block(x), x.dtype
        return x


def followed(attempts) -> list[str]:
    """Whole functions that were tried with branches on data."""
    return [name for name, follows_branches in attempts if follows_branches and "resume" not in name]


def test_what_a_frame_was_given_up_for_is_not_tried_again_inside(attempts):
    """Neither in the functions on the way to it; what stands beside it is tried."""
    assert rewritten_layers(Model(*(Block(Norm(), nn.SiLU()) for _ in range(2)))) == 2
    assert followed(attempts) == ["forward"]


def test_the_same_line_of_another_module_is_tried(attempts):
    assert rewritten_layers(Model(Block(Norm()), Block(nn.SiLU()))) == 1
    assert followed(attempts) == ["forward"] * 2


class Few(nn.Module):
    """Its condition is left."""

    def forward(layer, x):
        rows = torch.where(x[:, 0] > 0)[0]
        return x if len(rows) < 3 else x.index_add(0, rows, x[rows])


class Named(Routed):
    """It is no `self` to its forward."""

    _code = Routed.forward.__code__
    forward = types.FunctionType(_code.replace(co_varnames=("layer", *_code.co_varnames[1:])), globals())


def test_another_function_of_the_same_name_is_tried(attempts):
    """Where it is not known of which module it is, too."""
    assert rewritten_layers(Model(Few(), Named(nn.SiLU()))) == 1


def test_a_branch_that_is_left_is_not_tried_again_around_it(attempts):
    assert rewritten_layers(Dropping(Block(nn.SiLU()), Block(nn.SiLU()))) == 2
    assert followed(attempts) == ["forward"] * 3  # and not `run`


def test_what_was_given_up_is_tried_in_another_call(attempts):
    model = Model(Block(Norm()))
    for _ in range(2):
        torch._dynamo.reset()
        rewritten_layers(model)
    assert followed(attempts) == ["forward"] * 2


def test_too_many_attempts_that_are_given_up(attempts, monkeypatch, caplog):
    monkeypatch.setattr(given_up, "MOST", 3)
    assert rewritten_layers(Model(*(Block(Norm(), nn.SiLU()) for _ in range(2)))) == 0
    assert len(attempts) == 3
    assert "3 attempts at functions of this model were given up" in caplog.text


def skips_idle_experts(x):
    ids, out = x[:, 0].abs().long() % 2, torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(ids == e)[0]
        if len(rows) == 0:
            continue
        out = out.index_add(0, rows, x[rows])
    return out


@torch._dynamo.assume_constant_result
def two():
    return 2


def twice(x):
    return skips_idle_experts(x) * two()


def around_what_is_done_for_real(x):
    return twice(x)


def test_what_is_done_for_real_is_not_tried_again_inside(attempts):
    """It gives up whatever was followed before; the loop beside it is tried."""
    run(around_what_is_done_for_real)
    assert followed(attempts)[:2] == ["around_what_is_done_for_real", "skips_idle_experts"]


@pytest.mark.parametrize("unseen", ["moved", "step"])
def test_no_attempt_where_dynamo_does_something_unseen(monkeypatch, unseen):
    """As a later torch may, although it has all functions that are replaced."""
    original = getattr(Branches, unseen)
    passed_by = {"moved": lambda branches, iterator: None, "step": lambda branches, tx, original: original(tx)}
    monkeypatch.setattr(Branches, unseen, passed_by[unseen])
    monkeypatch.setattr(patches, "_off", {})
    monkeypatch.setattr(attempts_of_frames, "why_not_watched", canary.why_not_watched.__wrapped__)
    x = torch.randn(5, 3)
    torch._dynamo.reset()
    with rewriting_backend() as backend, switch.recording() as records:
        torch.testing.assert_close(torch.compile(skips_idle_experts, backend=backend)(x), skips_idle_experts(x))
    assert not [record for record in records if isinstance(record, switch.CaptureRecord)]
    said = {"moved": "an iterator that a branch on data moves on is not refused", "step": "a branch on data is not traced"}
    assert said[unseen] in switch.why_no_attempts()
    monkeypatch.setattr(Branches, unseen, original)
    assert said[unseen] in str(moeblaze_ops.explain(skips_idle_experts, x))


class Refusing(TorchFunctionMode):
    """A mode of the program's that cannot work with the tensors of another function."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.zeros, torch.where)
        return function(*args, **(kwargs or {}))


MODES = {"inference": torch.inference_mode, "device": lambda: torch.device("meta"), "functions": Refusing}


@pytest.mark.parametrize("around", MODES.values(), ids=MODES)
def test_the_first_attempt_is_looked_at_in_any_mode(monkeypatch, around):
    monkeypatch.setattr(patches, "_off", {})
    monkeypatch.setattr(attempts_of_frames, "why_not_watched", canary.why_not_watched.__wrapped__)
    torch._dynamo.reset()
    x = torch.randn(5, 3)
    with rewriting_backend() as backend, around():
        torch.compile(lambda x: x + 1, backend=backend)(x)
    assert switch.why_no_attempts() is None


TAKE_NUMBERS = {
    "subscript": lambda x, n: x[n] * 2,
    "classes": lambda x, n: F.one_hot(x.argmax(-1), num_classes=n),
    "parts": lambda x, n: torch.cat([part * 2 for part in x.split(n)]),
    "steps": lambda x, n: torch.linspace(0, 1, n) * 2,
}


@pytest.mark.parametrize("takes", TAKE_NUMBERS.values(), ids=TAKE_NUMBERS)
def test_tensors_that_are_taken_for_numbers(takes):
    """Where Dynamo traces numbers of elements, it knows those of its inputs, and Inductor does not."""
    torch._dynamo.reset()
    x = torch.randn(12, 4)
    with moeblaze_ops.enabled():
        compiled = torch.compile(takes)
        for n in (torch.tensor(4), torch.tensor(6)):
            torch.testing.assert_close(compiled(x, n), takes(x, n))


class Passing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("around", [lambda: torch.device("cpu"), Passing], ids=["device", "functions"])
def test_attempts_are_made_below_a_mode(around):
    """As below `torch.set_default_device`, whose functions Dynamo traces for each operator, sets of functions among them."""
    x = torch.randn(5, 3)
    torch._dynamo.reset()
    with rewriting_backend() as backend, switch.recording() as records, around():
        torch.testing.assert_close(torch.compile(skips_idle_experts, backend=backend)(x), skips_idle_experts(x))
    assert [record.done for record in records if isinstance(record, switch.CaptureRecord)]


class Layer(torch.nn.Module):
    """Dynamo alone gives up a function whose graph breaks in a loop, for all that run its code from then on."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(16, 4, bias=False)
        self.up, self.down = (torch.nn.Parameter(torch.randn(4, *shape) / 4) for shape in ((16, 24), (24, 16)))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(4):
            token, k = torch.where(chosen == e)
            out.index_add_(0, token, (x[token] @ self.up[e]).relu() @ self.down[e] * weights[token, k, None])
        return out


def test_enable_looks_once_more_at_what_was_left_to_eager_mode():
    torch._dynamo.reset()
    counters.clear()
    layer, x = Layer(), torch.randn(8, 16)
    torch.compile(layer, backend="eager")(x)
    with moeblaze_ops.enabled(), torch._inductor.config.patch(fallback_by_default=True):
        torch.compile(layer)(x)
        assert counters["moeblaze"]["rewritten"] == 1
    torch.compile(in_a_loop, backend="eager")(x)
    looked = []
    for _ in range(3):  # a context for each step, as in a loop of training
        before = counters["frames"]["total"]
        with moeblaze_ops.enabled(), torch._inductor.config.patch(fallback_by_default=True):
            torch.compile(in_a_loop)(x)
        looked.append(counters["frames"]["total"] - before)
    assert looked[0] > 0 and looked[1:] == [0, 0]


def in_a_loop(x):
    for _ in range(2):
        x = x[torch.where(x[:, 0] > 2)[0]] + rows_of_data(x)
    return x
