"""More families of transformers, one small layer each: rewritten, with the outputs and gradients of eager.

That models with our operators pass through AOTAutograd is shown in `test_models`.
"""

import pytest
import torch
import torch._dynamo
from torch import nn

pytest.importorskip("transformers")

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.hf.test_models import tokens, training_step
from tests.hf.test_registry import assert_steps_equal
from tests.tools.rewrite_harness import compiled

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 16,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "n_shared_experts": 1, "num_shared_experts": 1,
    "moe_num_shared_experts": 1, "shared_expert_intermediate_size": 40, "shared_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 24, "dense_intermediate_size": 48, "mlp_layer_types": ["sparse"],
    "layer_types": ["full_attention"], "first_k_dense_replace": 0, "num_dense_layers": 0, "mlp_only_layers": [],
    "moe_layer_start_index": 0, "num_nextn_predict_layers": 0, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "rotary_dim": 4, "router_hidden_size": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0, "router_jitter_noise": 0.0,
}  # fmt: skip
"""Fields of configurations, for those that have them."""
_MULTI_LATENT = {"num_key_value_heads": 4}
_GROUPS = {"n_group": 2, "topk_group": 1}
_INDEXED = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 8}
FAMILIES = {
    "afmoe": {},
    "aria_text": {},
    "axk1": {**_MULTI_LATENT, **_GROUPS},
    "axk2": {**_MULTI_LATENT, **_GROUPS, **_INDEXED},
    "bailing_hybrid": {**_MULTI_LATENT, **_GROUPS},
    "beam": _GROUPS,
    "cohere2_moe": {},
    "deepseek_v2": _MULTI_LATENT,
    "deepseek_v32": {**_MULTI_LATENT, **_GROUPS, **_INDEXED},
    "deepseek_v4": {
        "layer_types": None, "mlp_layer_types": ["moe"] * 2, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16,
        "hc_mult": 2, "hc_sinkhorn_iters": 4, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 8,
        "index_topk": 8,
    },
    "dots1": {},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "flint": {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
    "gemma4_text": {
        "enable_moe_block": True, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 8, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64,
    },
    "glm4_moe_lite": _MULTI_LATENT,
    "glm_moe_dsa": {**_MULTI_LATENT, **_INDEXED},
    "granitemoe_swa": {},
    "granitemoehybrid": {"layer_types": ["attention"], "mamba_n_heads": 8, "mamba_d_head": 8},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": _MULTI_LATENT,
    "hy_v4": {**_MULTI_LATENT, "num_hidden_layers": 2, "layer_types": None, "mlp_layer_types": ["sparse"] * 2, "hc_mult": 2},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 1, "expert_layer_offset": 0},
    "inkling_text": {},
    "kimi_linear": _MULTI_LATENT,
    "kolibri1": {},
    "laguna": {},
    "lfm2_moe": {},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax": {},
    "minimax_m2": {},
    "minimax_m3_vl_text": {},
    "nemotron_h": {"layers_block_type": ["moe"], "num_hidden_layers": 1},
    "phimoe": {},
    "qwen3_next": {"decoder_sparse_step": 1},
    "solar_open": {},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid"]},
}  # fmt: skip

SINCE = {"aria_text": (5, 23), "phimoe": (5, 23), "zaya": (5, 23)}
"""Versions of transformers before which a family is not rewritten: Aria has other experts, the others compare ids with E."""


def make_model(name: str, more: dict | None = None) -> nn.Module:
    """A small model of a family, by ``SIZES`` and the fields that ``FAMILIES`` or ``more`` has for it."""
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if name not in CONFIG_MAPPING or version < SINCE.get(name, (5,)):
        pytest.skip(f"too old a version of transformers for {name}")
    config_class = CONFIG_MAPPING[name]
    fields = config_class().to_dict()
    more = FAMILIES[name] if more is None else more
    config = config_class(**{**{field: size for field, size in SIZES.items() if field in fields}, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_training(name):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, ids = make_model(name), tokens()
    run, rewriting = compiled(model)
    actual = training_step(model, run, ids)
    assert_steps_equal(actual, training_step(model, model, ids))
    layers = [path for path, m in model.named_modules() if type(m).__name__.endswith("Experts") and "shared" not in path]
    assert len(rewriting.rewritten) == len(layers) > 0
