"""Experts quantised by bitsandbytes and torchao, and adapters of PEFT on them: what is unpacked is a weight, and is not kept."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import moeblaze_ops.compile  # registers the backend where the package is not installed
from tests.tools.rewrite_harness import Rewriting

D, H, E, K, T, R = 64, 96, 8, 2, 40, 4


class Layer(nn.Module):
    """Stacked experts by ``grouped_mm``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        options = {"dtype": torch.bfloat16}
        self.router = nn.Linear(D, E, bias=False, **options)
        self.w_up = nn.Parameter(torch.randn(E, 2 * H, D, **options) / 8)
        self.w_down = nn.Parameter(torch.randn(E, D, H, **options) / 8)

    def weights(self):
        return self.w_up, self.w_down

    def forward(self, x):
        return self.of(x, *self.weights())

    def of(self, x, w_up, w_down):
        weights, chosen = self.router(x).softmax(-1, dtype=torch.float32).topk(K, dim=-1)
        ids = chosen.flatten()
        order = ids.argsort()
        ends = torch.bincount(ids, minlength=E).cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(x[order // K], w_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        y = torch._grouped_mm(F.silu(gate) * up, w_down.transpose(1, 2), offs=ends)
        return torch.zeros_like(x).index_add_(0, order // K, (y * weights.flatten()[order, None]).to(x.dtype))


def of_bitsandbytes(kind):
    codec = pytest.importorskip("bitsandbytes.nn.parametrize")
    layer = Layer()
    for name in ("w_up", "w_down"):
        codec.replace_parameter_4bit(layer, name, quant_type=kind, blocksize=64)
    return layer


class Quantised(Layer):
    """Experts that ``pack`` turns into something that is unpacked by ``unpack``."""

    def __init__(self, pack, unpack):
        super().__init__()
        self.unpack = unpack
        for name in ("w_up", "w_down"):
            packed = pack(getattr(self, name).data)
            delattr(self, name)
            setattr(self, f"{name}_packed", nn.Parameter(packed, requires_grad=False))

    def weights(self):
        return self.unpack(self.w_up_packed), self.unpack(self.w_down_packed)


def of_torchao(bits):
    quantization = pytest.importorskip("torchao.quantization")
    granularity = pytest.importorskip("torchao.quantization.granularity")
    if bits == 8:
        pack = partial(quantization.Int8Tensor.from_hp, granularity=granularity.PerRow())
    else:
        # Numbers of 4 bits, one in a byte: the classes that put two in one pack and multiply on GPUs alone.
        pack = partial(quantization.IntxUnpackedToInt8Tensor.from_hp, block_size=(1, 1, 32), target_dtype=torch.int4)
    return Quantised(pack, lambda packed: packed.dequantize())


def of_torchao_nf4():
    """Its NF4 has two axes: all experts are one matrix to it."""
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    return Quantised(
        lambda w: nf4.to_nf4(w.flatten(0, 1), 32, 4),
        lambda packed: packed.get_original_weight().unflatten(0, (E, -1)),
    )


CODECS = {
    "bitsandbytes_nf4": lambda: of_bitsandbytes("nf4"),
    "bitsandbytes_fp4": lambda: of_bitsandbytes("fp4"),
    "torchao_int8": lambda: of_torchao(8),
    "torchao_int4": lambda: of_torchao(4),
    "torchao_nf4": of_torchao_nf4,
}


@pytest.mark.parametrize("codec", CODECS)
def test_experts_of_a_codec(codec):
    torch._dynamo.reset()
    layer, x = CODECS[codec](), torch.randn(T, D, dtype=torch.bfloat16, requires_grad=True)
    assert [c.became for c in moeblaze_ops.explain(layer, x).candidates] == ["expert_up(swiglu) -> expert_down"]
    expected = layer(x)
    expected.float().square().mean().backward()
    dx, x.grad = x.grad, None
    kept = []

    def pack(tensor):
        if tensor.dtype == torch.bfloat16:
            kept.append(tensor.untyped_storage().nbytes() // 2)
        return tensor

    torch._dynamo.reset()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = torch.compile(layer, backend="moeblaze", fullgraph=True)(x)
    out.float().square().mean().backward()
    # Rounded at other places: some units in the last place of bf16, of numbers that are sums of 64 and 96.
    for got, want in ((out, expected), (x.grad, dx)):
        assert (got - want).float().norm() <= 0.02 * want.float().norm()
    assert max(kept) < E * D * H


def test_adapters_of_peft_on_experts_of_bitsandbytes():
    """QLoRA of a model of transformers: the factors on top of what is unpacked.

    A model runs once here. PEFT 0.21.2 does not take its sum off a parameter that has another parametrization: it warns, and
    raises in the next forward, in eager mode as well.
    """
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    codec = pytest.importorskip("bitsandbytes.nn.parametrize")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    tokens = torch.randint(64, (2, 12))

    def step(backend=None):
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM(config)
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[], target_parameters=targets))
        # PEFT names parameters to adapt, and a parametrized one has another name: it is quantised once it is wrapped.
        (experts,) = (module for module in model.modules() if type(module).__name__ == "Qwen3MoeExperts")
        for name in ("gate_up_proj", "down_proj"):
            codec.replace_parameter_4bit(experts, name, quant_type="nf4", blocksize=64)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        if backend is not None:
            (block,) = (module for module in model.modules() if type(module).__name__ == "Qwen3MoeSparseMoeBlock")
            block.compile(backend=backend)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]

    torch._dynamo.reset()
    backend = Rewriting()
    for got, want in zip(step(backend), step(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    # PEFT's warning breaks the graph: the sum for up comes from outside.
    assert [c.became for c in backend.rewritten] == ["expert_up(swiglu) -> expert_down(rank 4)"]


class Adapted(nn.Module):
    """A layer whose weights are unpacked, with factors on them."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.factors = nn.ParameterList(
            torch.randn(E, *shape, dtype=torch.bfloat16) / 16 for shape in ((R, D), (2 * H, R), (R, H), (D, R))
        )

    def forward(self, x):
        up_a, up_b, down_a, down_b = self.factors
        w_up, w_down = self.layer.weights()
        return self.layer.of(x, torch.baddbmm(w_up, up_b, up_a), torch.baddbmm(w_down, down_b, down_a))


@pytest.mark.parametrize("codec", CODECS)
def test_factors_on_experts_of_a_codec(codec):
    """QLoRA, two steps: the factors are trained, and what is unpacked neither has a gradient nor is kept."""
    torch._dynamo.reset()
    layer, x = Adapted(CODECS[codec]()), torch.randn(T, D, dtype=torch.bfloat16)
    backend = Rewriting()

    def losses(run):
        given = copy.deepcopy(layer.factors.state_dict())
        optimizer, seen = torch.optim.SGD(layer.factors.parameters(), lr=1.0), []
        for _ in range(3):
            loss = run(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        layer.factors.load_state_dict(given)
        return seen

    expected = losses(layer)
    assert losses(torch.compile(layer, backend=backend, fullgraph=True)) == pytest.approx(expected, rel=0.02)
    assert [c.became for c in backend.rewritten] == [f"expert_up(swiglu, rank {R}) -> expert_down(rank {R})"]
    assert expected[2] < expected[0]
    assert {name for name, p in layer.named_parameters() if p.grad is not None} == {f"factors.{i}" for i in range(4)}
