"""Families of transformers whose own experts are loops that break the graph: one graph each, rewritten, as good as eager."""

import pytest
import torch
import torch._dynamo
from torch import nn

pytest.importorskip("transformers")

import transformers
from transformers.models.switch_transformers.configuration_switch_transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

from moeblaze_ops import compile as switch
from tests.hf.test_models import tokens, training_step
from tests.hf.test_registry import assert_steps_equal
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

_COMMON = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "longcat_flash": {
        "hidden_size": 32, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "num_layers": 2, "num_attention_heads": 4,
        "n_routed_experts": 4, "zero_expert_num": 3, "moe_topk": 3, "kv_lora_rank": 16, "q_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "max_position_embeddings": 64,
    },
}  # fmt: skip


def make_model(name: str) -> nn.Module:
    config = transformers.AutoConfig.for_model(name, **_COMMON, **FAMILIES[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def check_step(actual: dict, expected: dict, model: nn.Module) -> None:
    """Skipping an expert leaves no gradient, where running it on nothing gives zeros."""
    unused = {key: torch.zeros_like(p) for key, p in model.named_parameters() if key in actual.keys() - expected.keys()}
    assert_steps_equal(actual, expected | unused)


@pytest.mark.parametrize("name", FAMILIES)
def test_training(name):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, ids = make_model(name), tokens()
    with rewriting_backend() as backend, switch.recording() as records:
        actual = training_step(model, torch.compile(model, backend=backend, fullgraph=True), ids)
    torch._dynamo.reset()
    check_step(actual, training_step(model, model, ids), model)
    found = rewritten_in(records)
    assert len(found) == 2
    assert name != "longcat_flash" or all(layer.became.endswith(" -> 3 identity experts") for layer in found)


@pytest.mark.parametrize("room", [64, 2])
def test_switch_transformers(room):
    """Its layer of experts, some of which have no room for all of their tokens."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    config = SwitchTransformersConfig(
        d_model=32, d_ff=24, num_experts=4, expert_capacity=room, router_jitter_noise=0.0, dropout_rate=0.0
    )
    layer, x = SwitchTransformersSparseMLP(config), torch.randn(2, 8, 32)

    def step(run) -> dict[str, torch.Tensor]:
        layer.zero_grad()
        out = run(x)
        out.square().sum().backward()
        return {"out": out.detach(), **{name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}}

    with rewriting_backend() as backend, switch.recording() as records:
        actual = step(torch.compile(layer, backend=backend, fullgraph=True))
    torch._dynamo.reset()
    expected = step(layer)
    check_step(actual, expected, layer)
    assert len(rewritten_in(records)) == 1
    assert bool((expected["out"] == 0).all(-1).any()) == (room == 2)


JETMOE = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8,
    "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip


def test_jetmoe():
    """Its experts of attention break the graph, and stay; those of its MLP hand one another counts on the host."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    config = transformers.AutoConfig.for_model("jetmoe", **_COMMON, **JETMOE)
    model, ids = transformers.AutoModelForCausalLM.from_config(config), tokens()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    with rewriting_backend() as backend, switch.recording() as records:
        actual = training_step(model, torch.compile(model, backend=backend), ids)
    torch._dynamo.reset()
    check_step(actual, training_step(model, model, ids), model)
    assert {candidate.became for candidate in rewritten_in(records)} == {"expert_up(swiglu) -> expert_down"}
