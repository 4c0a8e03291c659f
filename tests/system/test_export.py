"""torch.export and AOTInductor: programs that hold the ops, and plain layers that are rewritten after they were exported."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import moeblaze_ops
from moeblaze_ops import compile as switch
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = [pytest.mark.usefixtures("scratch"), pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")]

T = 24
OPS = ["route", "dispatch", "expert_up", "expert_down"]


def ops_of(program: torch.export.ExportedProgram) -> list[str]:
    targets = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return [target.overloadpacket.__name__ for target in targets if target.namespace == "moeblaze"]


class OnTop(nn.Module):
    """``moe`` with a router of the user's, and biases."""

    def __init__(self):
        super().__init__()
        self.router = zoo.Router()
        self.layer = moeblaze_ops.MoE(D=zoo.D, F=zoo.FF, E=zoo.E, K=zoo.K, bias=True)

    def forward(self, x):
        own = self.layer
        return moeblaze_ops.moe(x, *self.router(x), own.w_up, own.w_down, b_up=own.b_up, b_down=own.b_down)


def module(**options) -> moeblaze_ops.MoE:
    return moeblaze_ops.MoE(D=zoo.D, F=zoo.FF, E=zoo.E, K=zoo.K, **options)


MODELS = {
    "module": (module, OPS),
    "keep_input": (lambda: module(keep="input"), ["route", "dispatch", "expert_mlp"]),
    "function": (OnTop, OPS[1:]),
}


# Every model with a symbolic T and without, one of them by each way to trace it: that does not depend on the model.
EXPORTED = [
    *((name, dynamic, dynamic) for name in MODELS for dynamic in (False, True)),
    ("module", False, True),
    ("module", True, False),
]


@pytest.mark.parametrize(
    ("name", "dynamic", "strict"),
    EXPORTED,
    ids=[f"{name}-{'dynamic' if dynamic else 'static'}-{'strict' if strict else 'traced'}" for name, dynamic, strict in EXPORTED],
)
def test_exported_program(name, dynamic, strict, tmp_path):
    make, ops = MODELS[name]
    model = make()
    shapes = {"x": {0: torch.export.Dim("tokens", min=2, max=1 << 20)}} if dynamic else None
    program = torch.export.export(model, (torch.randn(T, zoo.D),), dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    for variant in (program, program.run_decompositions(), torch.export.load(tmp_path / "program.pt2")):
        assert ops_of(variant) == ops
        for num_tokens in (T, 7, 40) if dynamic else (T,):
            x = torch.randn(num_tokens, zoo.D)
            torch.testing.assert_close(variant.module()(x), model(x), rtol=0, atol=0)


def test_exported_program_trains():
    model, x = MODELS["module"][0](), torch.randn(T, zoo.D)
    exported = torch.export.export(model, (x,)).module()
    for run in (exported, model):
        run(x).square().mean().backward()
    gradients = {name: p.grad for name, p in exported.named_parameters()}
    torch.testing.assert_close(gradients, {name: p.grad for name, p in model.named_parameters()})


PLAIN = {
    "masks": lambda: zoo.ModuleListMoE(zoo.masked_sum, zoo.GluMLP),
    "mixtral": lambda: zoo.ModuleListMoE(zoo.loop_mixtral, zoo.GluMLP),
    "mistral": lambda: zoo.ModuleListMoE(zoo.loop_mistral, zoo.GluMLP),
    "nonzero": lambda: zoo.ModuleListMoE(zoo.loop_nonzero, zoo.GluMLP),
    "sorted": lambda: zoo.StackedMoE(zoo.sorted_transformers, "packed_linear"),
    "batched": lambda: zoo.StackedMoE(zoo.dense_einsum),
    "gathered": lambda: zoo.StackedMoE(zoo.gathered_bmm, "packed_linear"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_rewritten_after_export(name):
    model, x = PLAIN[name](), torch.randn(T, zoo.D)
    exported = torch.export.export(model, (x,), strict=False).module()
    with rewriting_backend() as backend, switch.recording() as records:
        got = torch.compile(exported, backend=backend)(x)
    assert len(rewritten_in(records)) == 1
    torch.testing.assert_close(got, model(x))


def shifted_mixtral(self, x, weights, ids):
    """Mixtral's loop, but every row is added to the token before its own."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, (token - 1) % x.shape[0], expert(x[token]) * weights[token, slot, None])
    return out


def mixtral_of_columns(self, x, weights, ids):
    """Mixtral's loop on a square, with ``x[:, token]`` for ``x[None, token]``: what is read are no tokens."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        rows = x[:, token].reshape(-1, x.shape[0])
        out.index_add_(0, token, expert(rows) * weights[token, slot, None])
    return out


@pytest.mark.parametrize("combine", [shifted_mixtral, mixtral_of_columns], ids=lambda f: f.__name__)
def test_other_functions_stay_after_export(combine):
    model, x = zoo.ModuleListMoE(combine, zoo.GluMLP), torch.randn(zoo.D, zoo.D)
    exported = torch.export.export(model, (x,), strict=False).module()
    with rewriting_backend() as backend, switch.recording() as records:
        got = torch.compile(exported, backend=backend)(x)
    assert not rewritten_in(records)
    torch.testing.assert_close(got, model(x))


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")


def packaged(model: nn.Module, folder, *, enabled: bool = False) -> str:
    x, tokens = torch.randn(T, zoo.D), torch.export.Dim("tokens", min=2, max=1 << 20)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: tokens}}, strict=False)
    if enabled:
        switch.enable()
    return torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))


def check_package(path: str, model: nn.Module) -> None:
    run = torch._inductor.aoti_load_package(path)
    for num_tokens in (T, 7, 40):
        x = torch.randn(num_tokens, zoo.D)
        torch.testing.assert_close(run(x), model(x))


# "module" is packaged by the process below that has compiled nothing.
@needs_compiler
@pytest.mark.parametrize("name", ["keep_input", "function"])
def test_package(name, tmp_path):
    model = MODELS[name][0]()
    check_package(packaged(model, tmp_path), model)


@needs_compiler
def test_package_of_a_plain_model(tmp_path):
    model = PLAIN["masks"]()
    with switch.recording() as records:
        path = packaged(model, tmp_path, enabled=True)
    assert len(rewritten_in(records)) == 1
    check_package(path, model)


@needs_compiler
def test_package_from_a_process_that_has_compiled_nothing(tmp_path):
    """The ops are lowered for a package although Inductor was imported after they were traced."""
    program = f"""
import torch, moeblaze_ops
model = moeblaze_ops.MoE(D=16, F=16, E=4, K=2)
x = torch.randn(8, 16)
exported = torch.export.export(model, (x,))
path = torch._inductor.aoti_compile_and_package(exported, package_path={str(tmp_path / "model.pt2")!r})
torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), model(x))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
