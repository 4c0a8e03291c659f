"""Blocks of models that are tested by one layer alone: rewritten, with the outputs and gradients of eager."""

import importlib

import pytest
import torch
from torch import nn

from moeblaze_ops import compile as switch
from tests.hf.test_families import SIZES  # skips this file as well where there is no transformers
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

BLOCKS = {
    "deepseek_ocr2": ("DeepseekOcr2TextMoe", "DeepseekOcr2TextConfig"),
    "glm4v_moe": ("Glm4vMoeTextMoE", "Glm4vMoeTextConfig"),
    "inkling2": ("Inkling2SparseMoeBlock", "Inkling2TextConfig"),
    "mistral4": ("Mistral4MoE", "Mistral4Config"),
    "mistral_large4": ("MistralLarge4TextMoE", "MistralLarge4TextConfig"),
    "openai_privacy_filter": ("OpenAIPrivacyFilterMLP", "OpenAIPrivacyFilterConfig"),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerTextSparseMoeBlock", "Qwen3OmniMoeTextConfig"),
    "qwen3_vl_moe": ("Qwen3VLMoeTextSparseMoeBlock", "Qwen3VLMoeTextConfig"),
    "qwen4_exp": ("Qwen4ExpTextSparseMoeBlock", "Qwen4ExpTextConfig"),
    "step3p7": ("Step3p7SparseMoeBlock", "Step3p7TextConfig"),
    "unlimited_ocr": ("UnlimitedOcrTextMoe", "UnlimitedOcrTextConfig"),
}


def make_block(model: str, experts: str) -> nn.Module:
    block, config = BLOCKS[model]
    try:
        found = [importlib.import_module(f"transformers.models.{model}.{part}_{model}") for part in ("modeling", "configuration")]
    except ImportError:
        pytest.skip(f"transformers has no {model}")
    config_class = getattr(found[1], config)
    fields = config_class().to_dict()
    made = config_class(**{field: size for field, size in SIZES.items() if field in fields})
    made._experts_implementation = experts
    number = (0,) if model == "step3p7" else ()
    layer = getattr(found[0], block)(made, *number)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer


@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
@pytest.mark.parametrize("model", BLOCKS)
def test_step(model, experts):
    torch.manual_seed(0)
    torch._dynamo.reset()
    block = make_block(model, experts)
    x = torch.randn(2, 16, SIZES["hidden_size"], requires_grad=True)

    def step(run: nn.Module) -> list[torch.Tensor]:
        out = run(x)
        out = out[0] if isinstance(out, tuple) else out
        of = [x, *(p for p in block.parameters() if p.requires_grad)]
        return [out, *torch.autograd.grad(out.square().sum(), of, allow_unused=True, materialize_grads=True)]

    with rewriting_backend() as backend, switch.recording() as records:
        actual = step(torch.compile(block, backend=backend))
    assert len(rewritten_in(records)) == 1
    for result, expected in zip(actual, step(block), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
