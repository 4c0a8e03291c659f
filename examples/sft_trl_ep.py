"""Fine-tune a Mixture-of-Experts model by TRL's SFTTrainer with its experts spread over all ranks.

    torchrun --nproc-per-node 8 examples/sft_trl_ep.py --model Qwen/Qwen3-30B-A3B --data trl-lib/Capybara
    torchrun --nproc-per-node 2 examples/sft_trl_ep.py    # a tiny model with random weights, on CPUs where there are no GPUs

Needs transformers 5.24 or newer, trl, accelerate and datasets. Parameters are sharded by FSDP2, and experts stay on their ranks:
each rank has its own tokens, and moeblaze brings them to the experts and back.
"""

import argparse
import os
import tempfile

import datasets
import tokenizers
import torch
import transformers
import trl
from transformers.distributed import DistributedConfig

import moeblaze_ops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a name or a folder; a tiny model is made without")
    parser.add_argument("--data", help="a data set of the hub; random tokens without")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ep-implementation", default="moeblaze", help="or one of transformers' own, such as all_to_all")
    parser.add_argument("--compile", action="store_true", help="compile the model, with layers rewritten")
    parser.add_argument("--out", default="outputs/sft_trl_ep")
    arguments = parser.parse_args()
    if arguments.compile:
        moeblaze_ops.enable()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    sharded = DistributedConfig(ep_size=ranks, fsdp_size=ranks, ep_implementation=arguments.ep_implementation)
    path = arguments.model or tiny_model()
    dtype = torch.bfloat16 if arguments.model else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, distributed_config=sharded if ranks > 1 else None, use_cache=False
    )
    if arguments.data:
        data, tokenizer = datasets.load_dataset(arguments.data, split="train"), transformers.AutoTokenizer.from_pretrained(path)
    else:
        data, tokenizer = random_tokens(), tiny_tokenizer()
    settings = trl.SFTConfig(
        output_dir=arguments.out,
        max_steps=arguments.steps,
        # The batch of all ranks together is the same for any number of them.
        per_device_train_batch_size=max(1, 8 // ranks),
        learning_rate=1e-2 if arguments.model is None else 1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=bool(arguments.model),
        use_cpu=not torch.cuda.is_available(),
        torch_compile=arguments.compile,
        gradient_checkpointing=False,
        dataset_kwargs=None if arguments.data else {"skip_prepare_dataset": True},
    )
    trainer = trl.SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print("losses:", *(f"{loss:.4f}" for loss in losses))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def tiny_model() -> str:
    """The folder of a Qwen3-MoE model with 8 experts; each rank makes the same."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.0,
    )  # fmt: skip
    folder = tempfile.mkdtemp()
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_tokenizer() -> transformers.PreTrainedTokenizerBase:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


def random_tokens() -> datasets.Dataset:
    rows = torch.randint(2, 64, (96, 16), generator=torch.Generator().manual_seed(1))
    return datasets.Dataset.from_dict({"input_ids": rows.tolist()})


if __name__ == "__main__":
    main()
