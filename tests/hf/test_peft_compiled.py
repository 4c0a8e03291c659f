"""PEFT's adapters on stacked experts, compiled: one graph for all steps, with the low-rank layer in it."""

import contextlib
import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import moeblaze_ops.compile  # noqa: E402
from moeblaze_ops.compile import peft as integration  # noqa: E402
from moeblaze_ops.compile import recording  # noqa: E402
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in  # noqa: E402

STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "use_cache": False,
}  # fmt: skip
TOKENS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))


def lora(rank, **more):
    return peft.LoraConfig(
        r=rank, target_modules=[], lora_dropout=0.0, init_lora_weights=False, **{"target_parameters": STACKED, **more}
    )


def adapted(**more):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return peft.get_peft_model(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES)), lora(3, **more))


def became(rank):
    return f"expert_up(swiglu, rank {rank}) -> expert_down(rank {rank})" if rank else "expert_up(swiglu) -> expert_down"


def step(model, run):
    model.zero_grad()
    loss = run(input_ids=TOKENS).logits.square().mean()
    if loss.requires_grad:
        loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=1e-5 * tensor.abs().max().item(), msg=name)


@contextlib.contextmanager
def compiled(model, by):
    """What runs ``model`` compiled as a whole or by its MoE blocks, and the records."""
    with rewriting_backend() as backend, recording() as records:
        if by == "block":
            for layer in model.base_model.model.model.layers:
                layer.mlp.compile(backend=backend)
        yield (model if by == "block" else torch.compile(model, backend=backend)), records


def layers(records):
    return [candidate.became for candidate in rewritten_in(records)]


@pytest.mark.parametrize("by", [pytest.param("model", marks=pytest.mark.client), "block"])
def test_compiled_once(by):
    model = adapted()
    expected = step(model, model)
    with compiled(model, by) as (run, records):
        for _ in range(3):
            assert_close(step(model, run), expected)
        graphs = len(records)
        for _ in range(47):
            step(model, run)
        assert len(records) == graphs <= 3
        assert_close(step(model, run), expected)
    assert layers(records) == 2 * [became(3)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("by", ["model", "block"])
def test_gradient_checkpointing(by, reentrant):
    model = adapted().train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    expected = step(model, model)
    with compiled(model, by) as (run, records):
        for _ in range(3):
            assert_close(step(model, run), expected)
    assert became(3) in layers(records)
    assert len(layers(records)) <= 4


def test_adapters_switched_merged_and_disabled():
    model = adapted()
    model.add_adapter("other", lora(2))
    as_before = copy.deepcopy(model.state_dict())
    ranks = []
    with compiled(model, "model") as (run, records):

        def check(rank):
            before = len(layers(records))
            actual = step(model, run)
            assert_close(actual, step(model, model))
            ranks.extend(layers(records)[before:])
            assert set(layers(records)[before:]) <= {became(rank)}

        check(3)
        model.set_adapter("other")
        check(2)
        model.base_model.set_adapter(["default", "other"])
        check(5)
        model.set_adapter("default")
        with model.disable_adapter():
            check(0)
        check(3)
        model.merge_adapter()
        check(0)
        model.unmerge_adapter()
        check(3)
    assert {became(rank) for rank in (0, 2, 3, 5)} <= set(ranks)
    assert model.state_dict().keys() == as_before.keys()
    assert type(model.merge_and_unload().model.layers[0].mlp.experts).__name__ == "Qwen3MoeExperts"


def test_weights_beside_experts():
    """A target of two axes, and a module that is trained whole."""
    model = adapted(target_parameters=[*STACKED, "mlp.gate.weight"], modules_to_save=["lm_head"])
    expected = step(model, model)
    with compiled(model, "model") as (run, records):
        assert_close(step(model, run), expected)
    assert layers(records) == 2 * [became(3)]


class Sums(TorchDispatchMode):
    """Counts sums of the size of a stacked weight."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.baddbmm.default
        return function(*args, **(kwargs or {}))


def test_eager_mode_between_graphs():
    """With the switch on, a frame that breaks finds experts of their own class; with it off, PEFT is as written."""
    model = adapted()
    experts = model.base_model.model.model.layers[0].mlp.experts
    seen = []
    experts.get_base_layer().register_forward_pre_hook(lambda module, _: seen.append(type(module).__name__))

    def sums():
        with Sums() as mode, torch.no_grad():
            output = model(input_ids=TOKENS).logits
        return mode.count, output

    with integration.seen_through():
        pass
    with moeblaze_ops.enabled():
        count, ours = sums()
    as_written, theirs = sums()
    assert (count, as_written) == (4, 8)
    assert torch.equal(ours, theirs)
    assert seen == ["Qwen3MoeExperts", "ParametrizedQwen3MoeExperts"]


def test_a_weight_that_is_parametrized_already_is_left_to_peft():
    class Twice(torch.nn.Module):
        def forward(self, w):
            return 2 * w

    model = adapted()
    wrapper = model.base_model.model.model.layers[0].mlp.experts
    assert integration._has_plain_sum(wrapper)
    torch.nn.utils.parametrize.register_parametrization(wrapper.get_base_layer(), wrapper.parameter_name, Twice())
    assert not integration._has_plain_sum(wrapper)
