"""transformers' "eager" experts, loops over the experts that were hit: one graph each, and rewritten."""

import importlib
import inspect

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from moeblaze_ops import compile as moeblaze_compile

pytest.importorskip("transformers")

from transformers.models.nllb_moe import configuration_nllb_moe, modeling_nllb_moe

from tests.hf import test_models as models
from tests.hf.test_registry import assert_steps_equal
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in


def loop_of(name: str) -> str:
    """The source of a model's loop: transformers copies one to most of its models."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    (experts,) = (made for key, made in vars(module).items() if key.endswith("Experts") and made.__module__ == module.__name__)
    return inspect.getsource(experts.forward)


# The first model of each loop; Llama 4's experts use no registry.
LOOPS = {loop_of(name): name for name in reversed(models.CONFIGS) if name != "llama4_text"}


@pytest.mark.parametrize("name", LOOPS.values())
def test_training_step(name):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = models.make_model(name, experts="eager", layers=2)
    ids = models.decided_tokens(models.in_double(model, name))

    def backend(gm, example_inputs):
        moeblaze_compile.rewrite(gm)
        return aot_eager(gm, example_inputs)

    with moeblaze_compile.rewriting(backend), moeblaze_compile.recording() as records:
        actual = models.training_step(model, torch.compile(model, backend=backend, fullgraph=True), ids)
    torch._dynamo.reset()
    assert_steps_equal(actual, models.training_step(model, model, ids))
    reports = [record.report for record in records if isinstance(record, moeblaze_compile.GraphRecord) and not record.dropped]
    assert [len(report.rewritten) for report in reports] == [2]


class Nllb(torch.nn.Module):
    """NLLB-MoE's experts, which have names, behind a router."""

    def __init__(self):
        super().__init__()
        config = configuration_nllb_moe.NllbMoeConfig(d_model=16, num_experts=4, activation_dropout=0.0, moe_token_dropout=0.0)
        self.gate = torch.nn.Linear(16, 4)
        self.experts = modeling_nllb_moe.NllbMoeExperts(config, ffn_dim=24)

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        return self.experts(x, ids, weights)


def test_experts_by_name():
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer, x = Nllb().double(), torch.randn(12, 16, dtype=torch.float64)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        torch.testing.assert_close(torch.compile(layer, backend=backend, fullgraph=True)(x), layer(x))
    torch._dynamo.reset()
    assert len(rewritten_in(records)) == 1
