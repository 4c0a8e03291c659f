"""transformers' expert parallelism, ``ep_implementation="moeblaze"``: losses and gradients are those of one process."""

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers.distributed.expert_parallel")

import transformers
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import AllToAllEP

import moeblaze_ops  # noqa: F401
from moeblaze_ops import config
from tests.tools.ranks import assert_passed, run_checks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)

WIDTHS = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 32,
}  # fmt: skip
MODELS = {
    "qwen3_moe": {"moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "mixtral": {"intermediate_size": 24, "num_local_experts": 8},
    "gpt_oss": {"intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
}
OF_TWO = {"own tokens": {"fsdp_size": 2, "ep_size": 2}, "one batch": {"tp_size": 2, "ep_size": 2}}
OF_FOUR = {"slices": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, "copies of experts": {"fsdp_size": 4, "ep_size": 2}}
TOLERANCE = 5e-6
"""Of the largest element, in fp32: FSDP2 divides gradients in fp16 and fp64 twice where a group has one rank."""


def tokens_of(batch: int) -> torch.Tensor:
    return torch.randint(0, 32, (2, 4 + 3 * batch), generator=torch.Generator().manual_seed(batch))


def save(kind: str, folder: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **WIDTHS, **MODELS[kind]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)


def whole_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def check(
    kind: str,
    folder: str,
    layout: dict[str, int],
    implementation: str = "moeblaze",
    prepare=lambda model, one: None,
) -> None:
    """Two steps without an optimizer; ``prepare`` is given the sharded model and the one of one process."""
    torch.set_default_dtype(torch.float32)
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
    load = functools.partial(from_pretrained, f"{folder}/{kind}", experts_implementation="eager")
    layout = DistributedConfig(**layout, ep_implementation=implementation)
    model, one = load(distributed_config=layout), load()
    prepare(model, one)
    batches = [tokens_of(batch) for batch in range(layout.fsdp_size)]
    own = batches[dist.get_rank() // layout.tp_size]
    for _ in range(2):
        model.zero_grad(), one.zero_grad()
        loss = model(own, labels=own).loss
        torch.testing.assert_close(loss, one(own, labels=own).loss, atol=1e-6, rtol=0)
        loss.backward()
        for batch in batches:
            (one(batch, labels=batch).loss / len(batches)).backward()
    wanted = whole_gradients(one)
    for name, grad in whole_gradients(model).items():
        limit = TOLERANCE * wanted[name].abs().max().item()
        torch.testing.assert_close(grad, wanted[name], atol=limit, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def check_compiled(folder: str, backend: str) -> None:
    """The layer is a call in a graph of Dynamo's, whose hooks of FSDP2 it leaves out."""
    graphs = []

    def compiled(gm: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(gm.code)
        return lookup_backend(backend)(gm, inputs)

    def compile_blocks(model: torch.nn.Module, one: torch.nn.Module) -> None:
        for layer in model.model.layers:
            layer.mlp.compile(backend=compiled)

    check("qwen3_moe", folder, OF_TWO["own tokens"], prepare=compile_blocks)
    assert sum("moe_over_ranks" in graph for graph in graphs) == 1


def check_as_others_fail(folder: str) -> None:
    """Memory is NaN until it is written, layers are checkpointed, a loss keeps balance, and no token goes to the last rank."""

    def prepare(*models: torch.nn.Module) -> None:
        for model in models:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
            model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
            for layer in model.model.layers:
                layer.mlp.gate.register_forward_hook(lambda gate, args, results: (*results[:-1], results[-1] % 4))

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        check("qwen3_moe", folder, OF_TWO["own tokens"], prepare=prepare)
    finally:
        torch.use_deterministic_algorithms(False)


def check_all_to_all(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "exchange", "all_to_all")
        check("qwen3_moe", folder, OF_TWO["own tokens"])


def check_unknown_experts(folder: str) -> None:
    """A gate that is no pointwise function goes transformers' way, and that is said."""

    def replace_gate(model: torch.nn.Module, one: torch.nn.Module) -> None:
        for layer in model.model.layers:
            layer.mlp.experts._apply_gate = type(layer.mlp.experts)._apply_gate.__get__(layer.mlp.experts)

    said = "Qwen3MoeExperts runs as ep_implementation='all_to_all', not as 'moeblaze': _apply_gate"
    with pytest.warns(UserWarning, match=said):
        check("qwen3_moe", folder, OF_TWO["own tokens"], prepare=replace_gate)


def check_ours_ran(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(AllToAllEP, "_dispatch_tokens", None)
        warnings.filterwarnings("error", message=".*not as 'moeblaze'")
        check("qwen3_moe", folder, OF_TWO["own tokens"])


def check_slots_of_no_expert(folder: str) -> None:
    """Ids below 0 or from E on are unused slots, whatever their weights; ids and weights are not changed."""
    torch.set_default_dtype(torch.float32)
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
    load = functools.partial(from_pretrained, f"{folder}/qwen3_moe", experts_implementation="eager")
    layout = DistributedConfig(**OF_TWO["own tokens"], ep_implementation="moeblaze")
    experts, whole = (model.model.layers[0].mlp.experts for model in (load(distributed_config=layout), load()))
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(9, WIDTHS["hidden_size"], generator=generator)
    ids, weights = torch.randint(-1, 9, (9, 2), generator=generator), torch.rand(9, 2, generator=generator)
    before = ids.clone(), weights.clone()
    out = experts(x, ids, weights)
    wanted = whole(x, ids.clamp(0, 7), weights * ((ids >= 0) & (ids < 8)))
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=0)
    assert torch.equal(ids, before[0]) and torch.equal(weights, before[1]) and (ids < 0).any() and (ids > 7).any()


def check_generate(folder: str) -> None:
    """Greedy tokens of a model in pieces are those of a whole one, on ranks that share their prompts and on those that do not."""
    torch.set_default_dtype(torch.float32)
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, f"{folder}/qwen3_moe")
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for name, layout in OF_TWO.items():
        model = load(distributed_config=DistributedConfig(**layout, ep_implementation="moeblaze"))
        prompt = tokens_of(0 if name == "one batch" else dist.get_rank())
        assert torch.equal(model.generate(prompt, **settings), load().generate(prompt, **settings)), name


def check_saved(folder: str) -> None:
    """``save_pretrained`` writes all experts."""
    torch.set_default_dtype(torch.float32)
    load = transformers.AutoModelForCausalLM.from_pretrained
    layout = DistributedConfig(**OF_TWO["own tokens"], ep_implementation="moeblaze")
    load(f"{folder}/qwen3_moe", distributed_config=layout).save_pretrained(f"{folder}/again")
    dist.barrier()
    again, wanted = (load(f"{folder}/{name}").state_dict() for name in ("again", "qwen3_moe"))
    assert again.keys() == wanted.keys() and all(torch.equal(again[key], wanted[key]) for key in wanted)


def checks(folder: str, layouts: dict[str, dict[str, int]]) -> dict[str, functools.partial]:
    named = [(kind, name) for name in layouts for kind in MODELS]
    found = {f"{kind}, {name}": functools.partial(check, kind, folder, layouts[name]) for kind, name in named}
    if layouts is OF_TWO:
        found["as others fail"] = functools.partial(check_as_others_fail, folder)
        found["all-to-all"] = functools.partial(check_all_to_all, folder)
        found["unknown experts"] = functools.partial(check_unknown_experts, folder)
        found["generate"] = functools.partial(check_generate, folder)
        found["slots of no expert"] = functools.partial(check_slots_of_no_expert, folder)
        found["saved"] = functools.partial(check_saved, folder)
        found["ours ran"] = functools.partial(check_ours_ran, folder)
        for backend in ("aot_eager", "moeblaze", "inductor"):
            found[f"compiled by {backend}"] = functools.partial(check_compiled, folder, backend)
    return found


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory) -> dict[int, dict[str, list[str]]]:
    """Of the checks that are asked for."""
    asked = {item.callspec.params["name"] for item in request.session.items if "outcomes" in getattr(item, "fixturenames", ())}
    folder = str(tmp_path_factory.mktemp("models"))
    for kind in MODELS:
        save(kind, f"{folder}/{kind}")
    found = {}
    for ranks, layouts in ((2, OF_TWO), (4, OF_FOUR)):
        if chosen := {name: run for name, run in checks(folder, layouts).items() if name in asked}:
            found[ranks] = run_checks(chosen, ranks, tmp_path_factory.mktemp("ranks"))
    return found


CLIENTS = ("qwen3_moe, own tokens", "compiled by moeblaze")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.client] * (n in CLIENTS)) for n in checks("", OF_TWO)])
def test_on_two_ranks(outcomes, name):
    assert_passed(outcomes[2][name])


@pytest.mark.parametrize("name", checks("", OF_FOUR))
def test_on_four_ranks(outcomes, name):
    assert_passed(outcomes[4][name])


def test_recipe(tmp_path):
    """The example of TRL's trainer has the losses of one process on two, as it stands and compiled."""
    for package in ("trl", "datasets", "accelerate"):
        pytest.importorskip(package)
    example = str(Path(__file__).parents[2] / "examples" / "sft_trl_ep.py")
    on_two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = []
    for command in ([sys.executable, example], [*on_two, example], [*on_two, example, "--compile"]):
        environment = {**os.environ, "PYTHONPATH": str(Path(example).parents[1])}
        command += ["--out", str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("losses:"))
        losses.append([float(loss) for loss in line.split()[1:]])
    assert len(losses[0]) == 12
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=3e-4)
