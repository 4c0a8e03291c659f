"""Which MoE layers of transformers are rewritten: each family that we know a small configuration of, asked by ``explain``.

    python -m tests.corpus.survey                    # all of them, many minutes
    python -m tests.corpus.survey mixtral gpt_oss    # these, and the others as they stand in the file

It writes ``benchmarks/results/models.json``, of which ``benchmarks/tables.py`` makes the table of docs/models.md.
"""

import importlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moeblaze_ops
from tests.hf import test_blocks, test_families, test_models

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "models.json"
OTHERS = {
    "doge": {"is_moe": True, "num_experts": 16},
    "inkling2_loop_text": {},
    "jetmoe": {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4},
    "lara_mini": {},
    "longcat_flash": {
        "num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "zero_expert_num": 2, "num_key_value_heads": 4,
    },
    "qwen3_5_moe_text": {},
}  # fmt: skip
"""Families that no test trains, by fields beside ``test_families.SIZES``."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def families() -> dict[str, Callable[[], nn.Module]]:
    """What makes a small model, or one block, of each family."""
    known: dict[str, Callable[[], nn.Module]] = {}
    for name in test_models.CONFIGS:
        known[name] = lambda name=name: test_models.make_model(name)
    for name in test_families.FAMILIES:
        known[name] = lambda name=name: test_families.make_model(name)
    for name in test_blocks.BLOCKS:
        known[name] = lambda name=name: test_blocks.make_block(name, "grouped_mm")
    for name, more in OTHERS.items():
        known[name] = lambda name=name, more=more: test_families.make_model(name, more)
    return known


def published_sizes(name: str) -> dict[str, int]:
    """D, F, E, K and layers of the family's default configuration, those of them that it names."""
    if name in test_blocks.BLOCKS:
        module = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
        config: Any = getattr(module, test_blocks.BLOCKS[name][1])()
    else:
        config = CONFIG_MAPPING[name]()

    def first(*fields: str) -> int | None:
        found = [getattr(config, field, None) for field in fields]
        return next((int(value) for value in found if isinstance(value, int)), None)

    sizes = {
        "D": first("hidden_size", "d_model"),
        "F": first("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
        "E": first(*EXPERTS),
        "K": first(*TOP_K),
        "layers": first("num_hidden_layers", "num_layers", "n_layers"),
    }
    return {letter: size for letter, size in sizes.items() if size is not None}


def outcome(make: Callable[[], nn.Module]) -> dict[str, Any]:
    """For each way to call experts: how many layers there are, how many are rewritten, and why the others are not."""
    torch.manual_seed(0)
    model = make()
    found = {"grouped_mm": explained(model)}
    if isinstance(model, transformers.PreTrainedModel):
        model.set_experts_implementation("eager")
        found["eager"] = explained(model)
    return found


def explained(model: nn.Module) -> dict[str, Any]:
    torch._dynamo.reset()
    if isinstance(model, transformers.PreTrainedModel):
        found = moeblaze_ops.explain(model, input_ids=torch.randint(3, 64, (2, 16)), use_cache=False)
    else:
        found = moeblaze_ops.explain(model, torch.randn(2, 16, test_families.SIZES["hidden_size"]))
    left = [candidate.reason for candidate in found.candidates if candidate.became is None]
    return {
        "layers": len(found.candidates),
        "rewritten": len(found.candidates) - len(left),
        "became": sorted({candidate.became for candidate in found.candidates if candidate.became}),
        "left": sorted({reason.partition(",")[0] for reason in left}),
    }


def survey(names: list[str]) -> None:
    data = json.loads(FILE.read_text()) if FILE.exists() else {"families": {}}
    known = families()
    for name in names or list(known):
        try:
            data["families"][name] = {"sizes": published_sizes(name), **outcome(known[name])}
        except Exception as error:  # one family that cannot be made does not end the survey
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", flush=True)
            continue
        print(name, data["families"][name], flush=True)
        data |= {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
        data["families"] = dict(sorted(data["families"].items()))
        FILE.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    survey(sys.argv[1:])
