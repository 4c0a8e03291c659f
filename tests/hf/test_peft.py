"""Adapters of PEFT on the experts of transformers' models: stock files load here and there."""

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

import moeblaze_ops.compile  # noqa: E402  (registers the backend where the package is not installed)
from tests.tools.rewrite_harness import Rewriting  # noqa: E402

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
    return with_adapters(base(name))


def with_adapters(model):
    """A model with adapters on its experts that change something."""
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options = {"r": RANK, "lora_alpha": 6, "target_modules": [], "target_parameters": targets, "lora_dropout": 0.0}
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
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


def step(model, tokens):
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]


def compile_blocks(model, **options):
    """Compile the MoE blocks in place, as a user would: PEFT breaks the graph of each frame around them. Returns what rewrites.

    Nothing of it is Inductor's: what that makes of rewritten graphs is tested elsewhere.
    """
    backend = Rewriting()
    for module in model.modules():
        if type(module).__name__ in ("Qwen3MoeSparseMoeBlock", "MixtralSparseMoeBlock"):
            module.compile(backend=backend, **options)
    return backend


def became(backend):
    return [candidate.became for candidate in backend.rewritten]


def assert_close(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_saved_adapters_load_with_the_same_outputs(name, tokens, tmp_path):
    """Into eager mode, into compiled blocks, and into ``moe``, which takes the tensors of the file."""
    model = adapted(name)
    expected = step(model, tokens)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(name), tmp_path, is_trainable=True)
    assert_close(step(loaded, tokens), expected)
    backend = compile_blocks(loaded)
    assert_close(step(loaded, tokens), expected)
    assert became(backend) == BECAME


def test_moe_takes_the_tensors_of_a_saved_adapter(name, tmp_path):
    """PEFT wraps the experts once for each parameter, the last one outside: its file has the inner one as ``base_layer``."""
    model = adapted(name)
    model.save_pretrained(tmp_path)
    stored = safetensors_torch.load_file(tmp_path / "adapter_model.safetensors")
    config = peft.PeftConfig.from_pretrained(tmp_path)
    experts = base(name).model.layers[0].mlp.experts
    E = experts.num_experts
    x, ids = torch.randn(20, 32), torch.rand(20, E).topk(2).indices
    weights = torch.rand(20, 2)

    def factors(w):
        """Those whose sizes are the weight's."""
        keys = {key.rsplit(".lora_", 1)[0] for key in stored}
        (own,) = (key for key in keys if stored[f"{key}.lora_A.weight"].shape[1] == w.shape[2])
        a, b = stored[f"{own}.lora_A.weight"], stored[f"{own}.lora_B.weight"]
        scale = config.lora_alpha / config.r
        return a.reshape(E, -1, w.shape[2]), b.reshape(w.shape[1], -1, E).permute(2, 0, 1), scale

    w_up, w_down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    lora = {"lora_up": factors(w_up), "lora_down": factors(w_down)}
    out = moeblaze_ops.moe(x, weights, ids, w_up, w_down, **lora)
    adapted_experts = next(module for module in model.modules() if type(module).__name__ == "ParamWrapper")
    with torch.no_grad():
        torch.testing.assert_close(out, adapted_experts(x, ids, weights), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(out, experts(x, ids, weights), rtol=1e-2)


def test_merged_adapters_are_the_same_function(name, tokens):
    model = adapted(name).eval()
    backend = compile_blocks(model)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        assert became(backend) == BECAME
        merged = model.merge_and_unload()
        torch._dynamo.reset()
        backend = compile_blocks(merged)
        torch.testing.assert_close(merged(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-5)
        assert became(backend) == ["expert_mlp(swiglu)"]
        assert not torch.allclose(base(name).eval()(input_ids=tokens).logits, expected, rtol=1e-2)


def test_gradient_checkpointing(name, tokens):
    model = adapted(name).train()
    model.enable_input_require_grads()
    expected = step(model, tokens)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(step(model, tokens), expected)
    backend = compile_blocks(model)
    assert_close(step(model, tokens), expected)
    assert became(backend) == 2 * BECAME  # in forward, and when backward repeats it


def test_prepared_for_training_on_few_bits(name, tokens):
    """What PEFT does to a quantised model before it is trained: norms in fp32, gradients of the inputs, checkpointing."""
    model = base(name)
    model.is_loaded_in_8bit = True
    model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    model.is_loaded_in_8bit = False
    model = with_adapters(model)
    assert model.is_gradient_checkpointing
    expected = step(model, tokens)
    backend = compile_blocks(model)
    assert_close(step(model, tokens), expected)
    assert became(backend) == 2 * BECAME


class Looped(torch.nn.Module):
    def __init__(self, skips):
        super().__init__()
        self.gate, self.skips = torch.nn.Linear(8, 4, bias=False), skips
        self.up = torch.nn.ModuleList(torch.nn.Linear(8, 12, bias=False) for _ in range(4))
        self.down = torch.nn.ModuleList(torch.nn.Linear(12, 8, bias=False) for _ in range(4))

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, k = torch.where(ids == e)
            if self.skips and len(token) == 0:
                continue
            out.index_add_(0, token, down(up(x[token]).relu()) * weights[token, k, None])
        return out


@pytest.mark.parametrize("skips", [True, False])
def test_dora_is_named_by_what_it_does(skips):
    """Not by the line of PEFT's at which tracing ends; what is named as the way out is one."""
    x = torch.randn(24, 8)

    def explained(use_dora, merged=False):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=RANK, use_dora=use_dora, target_modules=r".*(up|down)\.\d+")
        model = peft.get_peft_model(Looped(skips), config)
        return moeblaze_ops.explain(model.merge_and_unload() if merged else model, x)

    left = explained(use_dora=True)
    said = "\n".join(left.notes)
    assert left.candidates == () and "DoRA divides products by the norms of W + s * B @ A" in said
    assert "_dora_cache" not in said and "Unsupported method call at" not in said
    ways_out = explained(use_dora=False), explained(use_dora=True, merged=True)
    assert [[layer.reason for layer in way.candidates] for way in ways_out] == [[None], [None]]
