"""Recipes for trainers, each with the package itself: losses are those without us, and layers are rewritten or replaced."""

import importlib.metadata
import importlib.util
import os
import shutil
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


@pytest.mark.client
def test_lightning(recipe):
    pytest.importorskip("lightning")
    check(recipe("train_lightning").train, layers=2)


@pytest.mark.client
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


@pytest.mark.client
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


QWEN3_MOE = """
import torch, transformers

config = transformers.Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2, head_dim=16,
    num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, use_cache=False,
)
torch.manual_seed(0)
model = transformers.Qwen3MoeForCausalLM(config)
tokens = torch.randint(64, (2, 16))

def step(model):
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]
"""
AXOLOTL = """
import sys
from axolotl.integrations.base import PluginManager
from axolotl.loaders.model import ModelLoader
from axolotl.utils.dict import DictDefault
import tokenizers, moeblaze_ops

model.save_pretrained("model")
words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")

def load(**settings):
    cfg = DictDefault({
        "base_model": "model", "base_model_config": "model", "model_config_type": "qwen3_moe", "torch_dtype": torch.float32,
        "device": "cpu", "device_map": "cpu", "context_parallel_size": 1, "tensor_parallel_size": 1, "sequence_len": 32,
        **settings,
    })
    manager = PluginManager.get_instance()
    manager.plugins.clear()
    manager.cfg = cfg
    for name in cfg.plugins or []:
        manager.register(name)
    loaded, _ = ModelLoader(cfg, tokenizer).load()
    return loaded, manager

PLUGINS = ["moeblaze_ops.integrations.axolotl.MoeblazePlugin"]
plain, _ = load()
expected = step(plain)
fused, _ = load(plugins=PLUGINS)
print(plain.config._experts_implementation, fused.config._experts_implementation)
torch.testing.assert_close(step(fused), expected)

compiled, manager = load(plugins=PLUGINS, torch_compile=True)
print(compiled.config._experts_implementation)
with torch._inductor.config.patch(fallback_by_default=True):
    torch.testing.assert_close(step(torch.compile(compiled)), expected, rtol=1e-4, atol=1e-5)
print(str(moeblaze_ops.report()).splitlines()[0])
for bad in ({"experts_implementation": "eager"}, {"expert_parallel_size": 2}):
    try:
        load(plugins=PLUGINS, **bad)
    except (ValueError, NotImplementedError) as error:
        print(error)
"""
HUB = """
import sys
from pathlib import Path
from kernels import LocalLayerRepository, Mode, kernelize, register_kernel_mapping, replace_kernel_forward_from_hub
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

expected = step(model)
repository = LocalLayerRepository(Path(sys.argv[1]), layer_name="MoeExperts")
register_kernel_mapping({"MoeExperts": {"cpu": {Mode.TRAINING | Mode.TORCH_COMPILE: repository}}})
replace_kernel_forward_from_hub(Qwen3MoeExperts, "MoeExperts")
kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cpu")

calls = []
import moeblaze_ops
from torch.utils._python_dispatch import TorchDispatchMode

class Names(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        calls.append(str(op))
        return op(*args, **(kwargs or {}))

with Names():
    found = step(model)
torch.testing.assert_close(found, expected)
print(moeblaze_ops.__file__)
print(calls.count("moeblaze.expert_up.default"), calls.count("moeblaze.expert_down.default"))
"""


def run_program(program, *arguments, folder, **variables):
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", QWEN3_MOE + program, *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.client
def test_axolotl(tmp_path):
    """Through axolotl's own loader: the registry's implementation as it stands, rewritten layers where axolotl compiles."""
    pytest.importorskip("axolotl.loaders.model")
    assert run_program(AXOLOTL, folder=tmp_path, PYTHONPATH=str(ROOT)) == [
        "grouped_mm moeblaze",
        "grouped_mm",
        "moeblaze: 2 of 2 MoE layers rewritten",
        "axolotl: experts_implementation must be unset or 'moeblaze' without torch_compile, got 'eager'",
        "axolotl: expert_parallel_size must be 1 with MoeblazePlugin, got 2: axolotl's own plugin moves tokens there",
    ]


@pytest.mark.client
def test_kernels_hub(tmp_path):
    """What `make kernels-hub` lays out is loaded by the package kernels, with the moeblaze in it and no other."""
    pytest.importorskip("kernels.layer")
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("needs setuptools 77 or newer, which reads our pyproject.toml")
    left_out = shutil.ignore_patterns(".git*", "build", "tests", "__pycache__")
    checkout = shutil.copytree(ROOT, tmp_path / "checkout", ignore=left_out)
    subprocess.run([sys.executable, ".ci/kernels-hub"], cwd=checkout, check=True, timeout=300)
    repository = checkout / "build" / "kernels-hub"
    file, calls = run_program(HUB, str(repository), folder=tmp_path, PYTHONPATH="")
    assert file == str(repository / "build" / "torch-universal" / "packages" / "moeblaze_ops" / "__init__.py")
    assert calls == "2 2"
