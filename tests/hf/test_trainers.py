"""Trainers by their own entry points: losses of a dozen steps are those without us, and each step ran the layers as rewritten."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

import moeblaze_ops  # noqa: E402
from moeblaze_ops.cpu import experts as cpu_experts  # noqa: E402

STEPS, LAYERS, BATCH = 12, 2, 2
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts_per_tok": 2, "use_cache": False,
}  # fmt: skip
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def qwen3_moe():
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(num_experts=4, moe_intermediate_size=24, intermediate_size=48, **SIZES)
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss():
    torch.manual_seed(0)
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(num_local_experts=4, intermediate_size=24, **SIZES))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(32, 24, bias=False), nn.Linear(32, 24, bias=False)
        self.w2 = nn.Linear(24, 32, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ListedExperts(nn.Module):
    """A module for each expert, and a loop over those that have tokens."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            token, k = torch.where(chosen == e)
            if token.numel() > 0:
                out.index_add_(0, token, expert(tokens[token]) * weights[token, k, None])
        return out.view_as(x)


def listed_experts():
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(intermediate_size=48, **SIZES))
    for layer in model.model.layers:
        layer.mlp = ListedExperts()
    return model


def rows():
    tokens = torch.randint(64, (BATCH * STEPS, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


@contextlib.contextmanager
def counting_layers():
    """A context that counts the products of experts on the CPU between the steps of an optimizer."""
    counts, products = [], cpu_experts.row_blocks
    running = 0

    def counted(*args, **kwargs):
        nonlocal running
        running += 1
        return products(*args, **kwargs)

    def stepped(*_):
        nonlocal running
        counts.append(running)
        running = 0

    hook = register_optimizer_step_post_hook(stepped)
    cpu_experts.row_blocks = counted
    try:
        yield counts
    finally:
        cpu_experts.row_blocks = products
        hook.remove()


def check(run, make, settled=0):
    """What ``run(model, compiled)`` gives is what it gives in eager mode, by graphs in which the layers are rewritten.

    ``settled``: the step from which on no hooks are installed any more while a frame is compiled.
    """
    torch._dynamo.reset()
    expected = run(make(), False)
    torch._dynamo.utils.counters.clear()
    # The C++ of the other operators would take most of the time, and shows nothing of the layers.
    with moeblaze_ops.enabled(), torch._inductor.config.patch(fallback_by_default=True), counting_layers() as counts:
        actual = run(make(), True)
    assert len(expected) == STEPS and all(map(math.isfinite, expected))
    assert actual == pytest.approx(expected, rel=1e-4)
    assert len(counts) == STEPS and len(set(counts[settled:])) == 1 and counts[-1] >= 3 * LAYERS, counts
    assert settled or torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def options(path, **more):
    return {
        "output_dir": str(path), "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "max_steps": STEPS,
        "logging_steps": 1, "per_device_train_batch_size": BATCH, "learning_rate": 1e-2, "report_to": [], **more,
    }  # fmt: skip


def losses_of(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("make", [pytest.param(qwen3_moe, marks=pytest.mark.client), gpt_oss])
def test_trainer(make, checkpointing, tmp_path):
    def run(model, compiled):
        arguments = options(tmp_path, torch_compile=compiled, gradient_checkpointing=checkpointing)
        return losses_of(transformers.Trainer(model, transformers.TrainingArguments(**arguments), train_dataset=rows()))

    check(run, make)


def test_accelerate():
    def run(model, compiled):
        accelerate.state.AcceleratorState._reset_state(True)  # of the process, with the backend of the first accelerator
        accelerator = accelerate.Accelerator(cpu=True, dynamo_backend="inductor" if compiled else "no")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(rows(), batch_size=BATCH)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    check(run, qwen3_moe)


def test_lightning():
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model, compiled):
            super().__init__()
            self.model, self.losses = model, []
            if compiled:
                self.model.compile()

        def training_step(self, batch):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def run(model, compiled):
        module = Module(model.train(), compiled)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(max_steps=STEPS, accelerator="cpu", devices=1, **quiet)
        trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=BATCH))
        return module.losses

    check(run, qwen3_moe)


ADAPTERS = {
    "stacked": (qwen3_moe, {"target_modules": [], "target_parameters": STACKED}),
    "linear": (listed_experts, {"target_modules": ["w1", "w2", "w3"]}),
}


@pytest.mark.parametrize("adapters", [pytest.param("stacked", marks=pytest.mark.client), "linear"])
def test_sft_trainer(adapters, tmp_path):
    """TRL's, on rows of tokens, with adapters of PEFT on experts that are stacked, and on such as are modules of a list."""
    trl, peft, datasets = map(pytest.importorskip, ("trl", "peft", "datasets"))
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    data = datasets.Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in rows()]})
    make, targets = ADAPTERS[adapters]

    def run(model, compiled):
        more = {"bf16": False, "dataset_kwargs": {"skip_prepare_dataset": True}, "torch_compile": compiled}
        more["gradient_checkpointing"] = False  # with it, hooks that record the routing break the graph of the whole model
        torch.manual_seed(0)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=6, lora_dropout=0.0, **targets)
        arguments = trl.SFTConfig(**options(tmp_path, **more))
        return losses_of(trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora))

    check(run, make, settled=2)
