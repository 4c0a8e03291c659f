"""Adapters of PEFT on the experts of transformers' models: stock files load here and there, trained by what people train with."""

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import moeblaze_ops.compile  # noqa: E402  (registers the backend where the package is not installed)
from tests.tools.rewrite_harness import rewriting_backend  # noqa: E402

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2, "attn_implementation": "eager",
}  # fmt: skip
RANK = 3
BECAME = [f"expert_up(swiglu, rank {RANK}) -> expert_down(rank {RANK})"]


def base(name):
    torch.manual_seed(0)
    if name == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **SIZES))
    config = transformers.Qwen3MoeConfig(num_experts=4, moe_intermediate_size=24, **SIZES)
    return transformers.Qwen3MoeForCausalLM(config)


def adapted(name):
    """A model with adapters on its experts that change something."""
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options = {"r": RANK, "lora_alpha": 6, "target_modules": [], "target_parameters": targets, "lora_dropout": 0.0}
    model = peft.get_peft_model(base(name), peft.LoraConfig(task_type="CAUSAL_LM", **options))
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(params=["qwen3_moe", "mixtral"])
def name(request):
    torch._dynamo.reset()
    return request.param


@pytest.fixture
def tokens():
    return torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def backend():
    """A backend that rewrites and runs graphs as they are: what Inductor makes of them is tested elsewhere."""
    with rewriting_backend() as backend:
        yield backend


def step(run, model, tokens):
    model.zero_grad()
    loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


def assert_same_step(model, tokens, backend):
    expected = step(model, model, tokens)
    before = torch._dynamo.utils.counters["moeblaze"]["rewritten"]
    actual = step(torch.compile(model, backend=backend), model, tokens)
    assert torch._dynamo.utils.counters["moeblaze"]["rewritten"] > before
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_saved_adapters_load_with_the_same_outputs(name, tokens, tmp_path, backend):
    model = adapted(name)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(name), tmp_path, is_trainable=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits)
    seen = moeblaze_ops.explain(loaded, input_ids=tokens, labels=tokens)
    assert [candidate.became for candidate in seen.candidates] == BECAME
    assert_same_step(loaded, tokens, backend)


def test_merged_adapters_are_the_same_function(name, tokens, backend):
    model = adapted(name).eval()
    with torch.no_grad():
        expected = torch.compile(model, backend=backend)(input_ids=tokens).logits
        merged = model.merge_and_unload()
        torch._dynamo.reset()
        logits = torch.compile(merged, backend=backend)(input_ids=tokens).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(merged(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing(name, tokens, backend):
    model = adapted(name).train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_step(model, tokens, backend)


def test_prepared_for_training_on_few_bits(name, tokens, backend):
    """What PEFT does to a quantised model before it is trained: norms in fp32, gradients of the inputs, checkpointing."""
    model = base(name)
    model.is_loaded_in_8bit = True
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    model.is_loaded_in_8bit = False
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=[], target_parameters=targets))
    assert_same_step(model, tokens, backend)


def test_trainer(name, tokens, tmp_path):
    """Losses of three steps are those of eager mode."""
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in tokens.repeat(4, 1)]

    def losses(rewrites):
        torch._dynamo.reset()
        options = {"per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "report_to": []}
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, save_strategy="no", torch_compile=rewrites, **options
        )
        trainer = transformers.Trainer(adapted(name), arguments, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses(False)
    torch._dynamo.utils.counters["moeblaze"].clear()
    with moeblaze_ops.enabled():
        assert losses(True) == pytest.approx(expected, rel=1e-3)
    assert torch._dynamo.utils.counters["moeblaze"]["rewritten"] >= 1
    assert expected[-1] < expected[0]


def test_sft_trainer(name, tmp_path):
    """TRL's, on rows of tokens."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(1)).tolist()
    data = datasets.Dataset.from_dict({"input_ids": rows})
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), pad_token="0", eos_token="1")
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, save_strategy="no", torch_compile=True, max_steps=2,
        report_to=[], per_device_train_batch_size=2, bf16=False, logging_steps=1, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    torch._dynamo.utils.counters["moeblaze"].clear()
    with moeblaze_ops.enabled():
        trainer = trl.SFTTrainer(adapted(name), arguments, train_dataset=data, processing_class=tokenizer)
        trainer.train()
    assert trainer.state.global_step == 2
    assert torch._dynamo.utils.counters["moeblaze"]["rewritten"] >= 1


def _tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
