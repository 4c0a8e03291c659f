"""Recipes for other trainers, each with the package itself: losses are those without us, and the layers are rewritten or replaced."""

import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import moeblaze_ops

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4


@pytest.fixture
def recipe(monkeypatch):
    """A function that imports an example by its name."""

    def load(name):
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    torch._dynamo.reset()
    yield load
    moeblaze_ops.disable()
    torch._dynamo.reset()


def rewritten(explanation):
    return [candidate.became is not None for candidate in explanation.candidates]


def check(train, layers):
    """``train(steps, plain)`` gives the same losses with its layers rewritten as it does in eager mode."""
    expected = train(STEPS, plain=True)
    # The C++ of the other operators would take most of the time, and shows nothing of the layers.
    with torch._inductor.config.patch(fallback_by_default=True):
        actual = train(STEPS, plain=False)
    assert len(expected) == STEPS and actual == pytest.approx(expected, rel=1e-4)
    assert rewritten(moeblaze_ops.report())[-layers:] == [True] * layers


def test_lightning(recipe):
    pytest.importorskip("lightning")
    check(recipe("train_lightning").train, layers=2)


def test_accelerate(recipe):
    accelerate = pytest.importorskip("accelerate")
    train = recipe("train_accelerate").train

    def fresh(steps, plain):
        accelerate.state.AcceleratorState._reset_state(True)  # of the process, with the backend of the first accelerator
        return train(steps, plain)

    check(fresh, layers=2)


def test_accelerate_on_two_processes(tmp_path):
    """As a reader types it."""
    pytest.importorskip("accelerate")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = []
    for more in (["--plain"], []):
        command = [*launch, str(ROOT / "examples" / "train_accelerate.py"), "--steps", "4", *more]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout)
    losses = [[float(loss) for loss in text.splitlines()[0].split()[1:]] for text in printed]
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], abs=3e-4)
    assert "2 of 2 MoE layers rewritten" in printed[1]


TITAN = "moeblaze_ops.integrations.torchtitan.routed_experts"


def torchtitan_losses(imports, compiled):
    """Losses of the MoE layers of torchtitan's small Qwen3, whose attention needs a GPU, and the kinds of their routed experts.

    The configuration is overridden as torchtitan's trainer does it.
    """
    override = pytest.importorskip("torchtitan.config.override")
    config = importlib.import_module("torchtitan.models.qwen3.config_registry").qwen3_moe_debug()
    override.apply_overrides(override.OverrideConfig(imports=imports), config)
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(layer.moe.build() for layer in config.model_spec.model.layers[:2])
    for layer in layers:
        layer.init_states()
        if compiled:
            layer.compile(fullgraph=True)  # as --compile.enable does to whole blocks
    optimizer = torch.optim.AdamW(layers.parameters(), lr=3e-4)
    x, target = torch.randn(2, 2, 24, 256, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(STEPS):
        out = x
        for layer in layers:
            out = out + layer(out)
        loss = (out - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, [type(layer.routed_experts).__name__ for layer in layers]


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_torchtitan(compiled):
    expected, stock = torchtitan_losses([], compiled=False)
    with torch._inductor.config.patch(fallback_by_default=True):
        actual, fused = torchtitan_losses([TITAN], compiled)
    assert (stock, fused) == (["RoutedExperts"] * 2, ["FusedRoutedExperts"] * 2)
    assert expected[-1] < 0.99 * expected[0]
    # Products are rounded to bf16 in both, where torchtitan rounds weighted rows once more.
    assert actual == pytest.approx(expected, rel=2e-3)


def test_torchtitan_refuses_what_it_cannot_replace():
    moe = pytest.importorskip("torchtitan.models.common.moe")
    gpt_oss = importlib.import_module("torchtitan.models.gpt_oss.moe")
    from moeblaze_ops.integrations.torchtitan import FusedRoutedExperts, routed_experts

    other = gpt_oss.GptOssGroupedExperts.Config(dim=8, hidden_dim=8, num_experts=2)
    with pytest.raises(TypeError, match="inner_experts must be GroupedExperts.Config, got GptOssGroupedExperts.Config"):
        routed_experts(moe.RoutedExperts.Config(inner_experts=other, token_dispatcher=None))
    with pytest.raises(NotImplementedError, match="expert_parallel_degree must be 1"):
        FusedRoutedExperts.parallelize(None, types.SimpleNamespace(ep_enabled=True))
