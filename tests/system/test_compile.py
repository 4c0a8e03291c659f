"""The switch and the backend, with a toy rewrite in place of the real one."""

import copy
import gc
import sys
import threading

import pytest
import torch
from torch._dynamo.utils import counters

from moeblaze_ops import compile as moeblaze_compile
from moeblaze_ops.lowering.torch_internals import frames, inductor
from tests.tools import toy_rewrite
from tests.tools.compiling import graphs_compiled_anew
from tests.tools.programs import printed_by
from tests.tools.toy_rewrite import LoopMoE, tanh_layer

inductor_config = inductor.inductor_config
dynamo_config = frames.dynamo_config


@pytest.fixture(scope="module", autouse=True)
def toy_ops():
    library = toy_rewrite.define_ops()
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def scratch(monkeypatch):
    """The toy rewrite, no caches on disk, no C++, nothing compiled before, and the switch off afterwards."""
    toy_rewrite.install(monkeypatch)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    with graphs_compiled_anew(), inductor_config.patch(fallback_by_default=True):
        yield
    moeblaze_compile.disable()
    torch._dynamo.reset()


def tanh_inputs():
    return torch.randn(4, 6, requires_grad=True), torch.randn(6, 5, requires_grad=True)


def run(compiled, function=tanh_layer, inputs=None) -> list:
    """Names of what was rewritten while ``compiled`` ran; its values and gradients must be those of ``function``."""
    inputs = inputs or tanh_inputs()
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    with moeblaze_compile.recording() as records:
        got = compiled(*inputs)
        got_gradients = torch.autograd.grad(got.square().sum(), trained) if trained else ()
    expected = function(*inputs)
    torch.testing.assert_close(got, expected)
    if trained:
        torch.testing.assert_close(got_gradients, torch.autograd.grad(expected.square().sum(), trained))
    kept = [record.report for record in records if getattr(record, "dropped", "frame") is None]
    return [candidate.spelling for report in kept for candidate in report.rewritten]


def test_enable_and_disable():
    assert run(torch.compile(tanh_layer)) == []
    torch._dynamo.reset()
    moeblaze_compile.enable()
    assert run(torch.compile(tanh_layer)) == ["tanh"]
    torch._dynamo.reset()
    moeblaze_compile.disable()
    assert run(torch.compile(tanh_layer)) == []


def test_enabled_restores():
    with moeblaze_compile.enabled():
        with moeblaze_compile.enabled():
            pass
        assert run(torch.compile(tanh_layer)) == ["tanh"]
    torch._dynamo.reset()
    assert run(torch.compile(tanh_layer)) == []


def test_collector_of_garbage_rests_while_a_graph_is_rewritten(monkeypatch):
    rests = []

    def rewrite_graph(gm):
        rests.append(not gc.isenabled())
        return toy_rewrite.rewrite_graph(gm)

    monkeypatch.setattr(sys.modules["moeblaze_ops.lowering.rewrite.rewrite"], "rewrite_graph", rewrite_graph)
    with moeblaze_compile.enabled():
        run(torch.compile(tanh_layer))
    assert rests == [True] and gc.isenabled()


def test_names_that_a_caller_asked_for_stay():
    """Up to Python 3.12 ``locals()`` is the dictionary that a frame has, which is asked for the module that calls another."""

    class Caller(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.compile(LoopMoE(), backend="moeblaze")

        def forward(self, x):
            given = locals()
            return self.layer(x), given

    caller = Caller()
    _, given = caller(torch.randn(4, 8))
    assert given["self"] is caller and "x" in given


def test_inference():
    with moeblaze_compile.enabled(), torch.no_grad():
        inputs = tuple(tensor.detach() for tensor in tanh_inputs())
        assert run(torch.compile(tanh_layer), inputs=inputs) == ["tanh"]


def test_switch_reaches_every_thread():
    moeblaze_compile.enable()
    rewritten = []

    def compile_without_caches():
        with graphs_compiled_anew():  # a thread has settings of its own
            rewritten.extend(run(torch.compile(tanh_layer)))

    thread = threading.Thread(target=compile_without_caches)
    thread.start()
    thread.join()
    assert rewritten == ["tanh"]


class CountingPass(torch._inductor.custom_graph_pass.CustomGraphPass):
    def __init__(self):
        self.graphs = 0

    def __call__(self, graph):
        self.graphs += 1

    def uuid(self):
        return "counting"


@pytest.mark.parametrize("backend", ["inductor", "moeblaze"])
@pytest.mark.parametrize("where", ["global", "options"])
def test_user_pass_keeps_running(backend, where):
    user_pass = CountingPass()
    if backend == "inductor":
        moeblaze_compile.enable()
    if where == "options":
        compiled = torch.compile(tanh_layer, backend=backend, options={"pre_grad_custom_pass": user_pass})
        assert run(compiled) == ["tanh"]
    else:
        with inductor_config.patch(pre_grad_custom_pass=user_pass):
            assert run(torch.compile(tanh_layer, backend=backend)) == ["tanh"]
            assert inductor_config.pre_grad_custom_pass is user_pass
    assert user_pass.graphs == 1


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"mode": "max-autotune-no-cudagraphs"},
        {"options": {"epilogue_fusion": False}},
        {"options": {"pattern_matcher": False}},
        {"options": {"use_pre_grad_passes": False}},
        {"dynamic": True},
        {"fullgraph": True},
    ],
    ids=str,
)
def test_backend(keywords):
    assert run(torch.compile(tanh_layer, backend="moeblaze", **keywords)) == ["tanh"]
    torch._dynamo.reset()
    assert run(torch.compile(tanh_layer)) == []


def test_mode_and_options_with_enable():
    moeblaze_compile.enable()
    assert run(torch.compile(tanh_layer, mode="max-autotune-no-cudagraphs")) == ["tanh"]
    torch._dynamo.reset()
    assert run(torch.compile(tanh_layer, options={"epilogue_fusion": False})) == ["tanh"]


def test_backend_as_function():
    assert run(torch.compile(tanh_layer, backend=moeblaze_compile.moeblaze_backend)) == ["tanh"]


@pytest.mark.parametrize("times", [1, 2])
def test_backend_of_the_user_that_calls_inductor(times):
    """Its graphs come to Inductor on another way, and once or in parts: each is rewritten."""
    from torch._inductor.compile_fx import compile_fx

    def backend(gm, example_inputs):
        for _ in range(times):
            compiled = compile_fx(copy.deepcopy(gm), example_inputs)
        return compiled

    assert run(torch.compile(tanh_layer, backend=backend)) == []
    torch._dynamo.reset()
    moeblaze_compile.enable()
    assert run(torch.compile(tanh_layer, backend=backend)) == ["tanh"] * times


def test_backend_called_by_another():
    def backend(gm, example_inputs):
        return moeblaze_compile.moeblaze_backend(gm, example_inputs)

    assert run(torch.compile(tanh_layer, backend=backend)) == ["tanh"]


def test_entry_point_and_import_register_once(tmp_path):
    """The backend is registered by whichever comes first, the entry point or our import."""
    script = """
import os, torch, sys
from importlib.metadata import EntryPoint
from torch._dynamo.backends import registry
registry._lazy_import()
registry._COMPILER_FNS.pop("moeblaze", None)
registry._BACKENDS["moeblaze"] = EntryPoint("moeblaze", "moeblaze_ops.compile:moeblaze_backend", "torch_dynamo_backends")
assert "moeblaze_ops.compile" not in sys.modules
child = os.fork()
if child:
    import moeblaze_ops.compile
backend = registry.lookup_backend("moeblaze")
from moeblaze_ops.compile import moeblaze_backend
assert backend is moeblaze_backend
assert not child or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    printed_by("-c", script, folder=tmp_path)


@pytest.mark.parametrize("backend", ["inductor", "moeblaze"])
@pytest.mark.parametrize("after_reset", [False, True])
def test_loop_is_captured(backend, after_reset):
    if backend == "inductor":
        moeblaze_compile.enable()
    compiled = torch.compile(LoopMoE(), backend=backend, fullgraph=True)
    if after_reset:
        torch._dynamo.reset()
    with torch.no_grad():
        assert run(compiled, compiled._orig_mod, (torch.randn(6, 8),)) == ["loop"]
    assert not dynamo_config.capture_dynamic_output_shape_ops


def test_loop_with_dynamic_shapes_compiles_once():
    model = LoopMoE()
    compiled = torch.compile(model, backend="moeblaze", dynamic=True)
    with torch.no_grad():
        for num_tokens in (6, 12, 20):
            inputs = (torch.randn(num_tokens, 8),)
            assert run(compiled, model, inputs) == (["loop"] if num_tokens == 6 else [])
    assert counters["stats"]["unique_graphs"] == 1


def sizes_of_experts(x_TD, experts_T):
    """Compiles by default, with a break; with dynamic output shapes in the graph it raises."""
    order = torch.argsort(experts_T)
    sizes = torch.bincount(experts_T).tolist()
    parts = torch.split(x_TD[order], sizes)
    return torch.cat([part * (i + 1) for i, part in enumerate(parts)])


@pytest.mark.parametrize("backend", ["inductor", "moeblaze"])
def test_data_dependent_model_compiles_as_before(backend):
    inputs = torch.randn(8, 4), torch.tensor([0, 1, 1, 2, 2, 2, 0, 1])
    plain = torch.compile(sizes_of_experts)
    run(plain, sizes_of_experts, inputs)
    graphs_before = counters["stats"]["unique_graphs"]
    with dynamo_config.patch(capture_dynamic_output_shape_ops=True), pytest.raises(Exception, match="u0"):
        torch._dynamo.reset()
        torch.compile(sizes_of_experts)(*inputs)

    torch._dynamo.reset()
    counters.clear()
    if backend == "inductor":
        moeblaze_compile.enable()
    with moeblaze_compile.recording() as records:
        assert run(torch.compile(sizes_of_experts, backend=backend), sizes_of_experts, inputs) == []
    assert len([record for record in records if getattr(record, "dropped", "frame") is None]) == graphs_before


def test_loop_that_does_not_match_compiles_as_before():
    moeblaze_compile.enable()
    model = LoopMoE(activation=torch.sigmoid)
    with torch.no_grad(), moeblaze_compile.recording() as records:
        assert run(torch.compile(model), model, (torch.randn(6, 8),)) == []
    assert any("would stay in the graph" in (getattr(record, "dropped", None) or "") for record in records)


def test_other_backends_are_left_alone():
    """Under the switch a backend that runs no passes of ours breaks the graph where it always did."""
    moeblaze_compile.enable()
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    def positives(x):
        return (x * 2)[x > 0].nonzero() + 1

    torch.compile(positives, backend=backend)(torch.randn(8))
    assert len(graphs) > 1


def test_own_setting_of_the_user_is_kept():
    """Who asked for dynamic output shapes gets them, rewritten or not."""
    moeblaze_compile.enable()
    with dynamo_config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        compiled = torch.compile(lambda x: x.nonzero() + 1, fullgraph=True)
        x = torch.randn(8)
        torch.testing.assert_close(compiled(x), x.nonzero() + 1)
