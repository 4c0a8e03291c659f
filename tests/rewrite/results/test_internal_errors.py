"""An error in the rewrite itself: the compile goes on with the graph as it was, with one warning."""

import copy
import logging

import pytest
import torch
from torch import nn

import moeblaze_ops
from moeblaze_ops import compile as switch
from moeblaze_ops import config
from moeblaze_ops.lowering.match import internal_errors, layer_proof, matcher
from moeblaze_ops.lowering.rewrite import rewrite
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import check_against_eager, rewriting_backend


@pytest.fixture(autouse=True)
def lenient(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(config, "strict", False)
    monkeypatch.setattr(internal_errors, "_reported", set())
    yield
    switch.disable()
    torch._dynamo.reset()


def broken(*args, **kwargs):
    raise RuntimeError("broken")


def _broken_after(function, calls):
    """``function``, which raises at the end of that call."""
    left = [calls]

    def then_broken(*args, **kwargs):
        result = function(*args, **kwargs)
        left[0] -= 1
        return result if left[0] else broken()

    return then_broken


# What is broken, and from which call on; none is at once.
PLACES = {
    "view": (matcher, "GraphView", None),
    "candidate": (layer_proof, "read_expert", None),
    "router": (rewrite, "match_router", 2),
    "operands": (rewrite, "insert_layer_ops", None),
    "inserted": (rewrite, "insert_layer_ops", 2),
    "redirected": (rewrite, "_redirect", 1),
    "all redirected": (rewrite, "_redirect", 2),
    "report": (rewrite, "_rewritten", 2),
    "erasing": (rewrite, "_dead", None),
}


def _two_layers() -> nn.Module:
    return nn.Sequential(zoo.StackedMoE(zoo.stacked_loop), nn.Tanh(), zoo.ModuleListMoE(zoo.masked_inplace))


def _break(monkeypatch, place):
    module, name, calls = PLACES[place]
    monkeypatch.setattr(module, name, _broken_after(getattr(module, name), calls) if calls else broken)


def _state(graph):
    return [(node, node.args, node.kwargs, dict(node.users), set(node.meta)) for node in graph.nodes]


@pytest.fixture(scope="module")
def graph_of_two_layers():
    captured = []
    torch._dynamo.reset()
    torch.compile(_two_layers(), backend=lambda gm, inputs: captured.append(gm) or gm.forward)(torch.randn(6, zoo.D))
    return captured[0]


@pytest.mark.parametrize("place", PLACES)
def test_graph_is_left_as_it_was(monkeypatch, place, graph_of_two_layers):
    gm = copy.deepcopy(graph_of_two_layers)
    text, code, state = str(gm.graph), gm.code, _state(gm.graph)
    with monkeypatch.context() as patch:
        _break(patch, place)
        report = rewrite.rewrite_graph(gm)
    assert {c.reason for c in report.candidates} == {"INTERNAL"} and report.candidates[0].detail == "RuntimeError: broken"
    assert (str(gm.graph), gm.code) == (text, code) and _state(gm.graph) == state
    gm.graph.lint()
    assert len(rewrite.rewrite_graph(gm).rewritten) == 2


@pytest.mark.parametrize("place", ["candidate", "redirected"])
def test_compile_goes_on(monkeypatch, place):
    _break(monkeypatch, place)
    backend = check_against_eager(_two_layers(), torch.randn(6, zoo.D))
    assert set(backend.reasons) == {"INTERNAL"} and not backend.rewritten


def test_other_layers_of_the_graph_are_rewritten(monkeypatch):
    """An error while one candidate is read is that candidate's own."""
    monkeypatch.setattr(layer_proof, "read_expert", lambda *args, read=layer_proof.read_expert: _of_stacked(read(*args)))
    backend = check_against_eager(_two_layers(), torch.randn(6, zoo.D))
    assert sorted(backend.reasons) == ["INTERNAL"] and len(backend.rewritten) == 1


def _of_stacked(expert):
    if expert.down.weight.args[1][0].kind == "const":  # indexed by expert
        broken()
    return expert


def test_one_warning_with_the_traceback_for_each_place(monkeypatch, caplog):
    monkeypatch.setattr(layer_proof, "read_expert", broken)
    with caplog.at_level(logging.WARNING, logger="moeblaze_ops"):
        for _ in range(2):
            check_against_eager(_two_layers(), torch.randn(6, zoo.D))
        monkeypatch.setattr(rewrite, "Matcher", lambda *views: 1 / 0)
        check_against_eager(_two_layers(), torch.randn(6, zoo.D))
    first, second = caplog.records
    assert "RuntimeError: broken" in first.getMessage() and first.exc_info[0] is RuntimeError
    assert "Traceback" in caplog.text and second.exc_info[0] is ZeroDivisionError


def test_strict_raises(monkeypatch):
    monkeypatch.setattr(config, "strict", True)
    for place in ("view", "candidate", "router"):
        with monkeypatch.context() as patch:
            _break(patch, place)
            with pytest.raises(Exception, match="broken"):
                check_against_eager(_two_layers(), torch.randn(6, zoo.D))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("combine", [zoo.masked_sum, zoo.loop_mistral], ids=lambda f: f.__name__)
def test_switch(monkeypatch, combine, strict):
    """Also where the frame is compiled a second time, without data-dependent shapes."""
    monkeypatch.setattr(config, "strict", strict)
    monkeypatch.setattr(layer_proof, "read_expert", broken)
    model, x = zoo.ModuleListMoE(combine), torch.randn(6, zoo.D)
    with rewriting_backend() as without_inductor, torch._inductor.config.patch(fallback_by_default=True):
        step = torch.compile(model, backend="moeblaze" if combine is zoo.loop_mistral else without_inductor)
        if strict:
            with pytest.raises(Exception, match="broken"):
                step(x)
        else:
            torch.testing.assert_close(step(x), model(x))


def test_explain_names_the_error(monkeypatch):
    monkeypatch.setattr(rewrite, "match_router", broken)
    (candidate,) = moeblaze_ops.explain(zoo.ModuleListMoE(zoo.masked_sum), torch.randn(6, zoo.D)).candidates
    assert candidate.reason == "INTERNAL, an error in the rewrite itself (RuntimeError: broken)"
    assert "masked.py" in candidate.where
