"""The experts implementation "moeblaze" of transformers: outputs and gradients are those of "eager"."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from moeblaze_ops import config as moeblaze_config
from moeblaze_ops.integrations import transformers as integration
from tests.hf import test_models as models

MODELS = [name for name in models.CONFIGS if name != "llama4_text"]  # its experts use no registry
LAYERS = 2
T, K, E, D, FF = 13, 2, 4, 16, 12


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    ALL_EXPERTS_FUNCTIONS._global_mapping.pop("moeblaze")
    torch._dynamo.reset()


@pytest.mark.parametrize("first, second", [("transformers", "moeblaze_ops"), ("moeblaze_ops", "transformers")])
@pytest.mark.parametrize("loaded", ["", "import transformers.integrations.moe"])
def test_nobody_has_to_register(first, second, loaded):
    program = (
        f"import torch, {first}\n{loaded if first == 'transformers' else ''}\nimport {second}\n"
        "config = transformers.AutoConfig.for_model('mixtral', vocab_size=32, hidden_size=16, intermediate_size=24,\n"
        "    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)\n"
        "model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation='moeblaze')\n"
        "calls = []\n"
        "from moeblaze_ops.integrations import transformers as integration\n"
        "moe = integration.moe\n"
        "integration.moe = lambda *args, **kwargs: calls.append(1) or moe(*args, **kwargs)\n"
        "model(torch.arange(6)[None])\n"
        "assert calls == [1], calls\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


class Calls:
    """Counts what runs as "moeblaze"."""

    def __init__(self, monkeypatch):
        self.count = 0
        moe = integration.moe

        def counted(*args, **kwargs):
            self.count += 1
            return moe(*args, **kwargs)

        monkeypatch.setattr(integration, "moe", counted)


def assert_steps_equal(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        # A gradient sums some tens of fp32 terms of its largest element's size.
        close = {"atol": 1e-5 * max(1.0, tensor.abs().max().item()), "rtol": 1e-3}
        torch.testing.assert_close(actual[name], tensor, msg=lambda text, name=name: f"{name}: {text}", **close)


@pytest.mark.parametrize("name", MODELS)
def test_training_step(name, monkeypatch):
    model = models.make_model(name, layers=LAYERS, experts="eager")
    ids = models.decided_tokens(models.in_double(model, name))
    expected = models.training_step(model, model, ids)
    model.set_experts_implementation("moeblaze")
    calls = Calls(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_steps_equal(models.training_step(model, model, ids), expected)
    assert calls.count == LAYERS


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_compiled_training_step(name):
    """The experts of other models have the flags of Mixtral's."""
    model = models.make_model(name, layers=LAYERS, experts="eager")
    ids = models.decided_tokens(models.in_double(model, name))
    expected = models.training_step(model, model, ids)
    model.set_experts_implementation("moeblaze")
    operators = []

    def backend(gm, inputs):
        operators.extend(str(node.target) for node in gm.graph.nodes)
        return gm.forward

    run = torch.compile(model, backend=backend, fullgraph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*grouped_mm.*")
        assert_steps_equal(models.training_step(model, run, ids), expected)
    assert sum("moeblaze" in op and "expert_down" in op for op in operators) == LAYERS


def test_chosen_when_the_model_is_made():
    config = models.make_model("mixtral").config
    model = models.transformers.AutoModelForCausalLM.from_config(config, experts_implementation="moeblaze")
    assert model.config._experts_implementation == "moeblaze"


def test_regional_compilation_shares_one_graph():
    """Layers compiled one by one are the same code with the same guards."""
    model = models.make_model("mixtral", layers=LAYERS, experts="moeblaze")
    ids = models.decided_tokens(models.in_double(model, "mixtral"))
    expected = model(ids, use_cache=False).logits
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    for layer in model.model.layers:
        layer.mlp.compile(backend=backend, fullgraph=True)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=1e-5, rtol=1e-3)
    assert len(graphs) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_inference(name, dtype):
    model = models.make_model(name, layers=LAYERS, experts="eager").to(dtype)
    ids = models.decided_tokens(models.in_double(model, name))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        model.set_experts_implementation("moeblaze")
        actual = model(ids, use_cache=False).logits
    assert actual.dtype == expected.dtype
    # Half precision rounds every layer's output: a few times 2^-8 of the largest value.
    torch.testing.assert_close(actual, expected, atol=3e-2 * expected.abs().max().item(), rtol=3e-2)


def default_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def clamped_gate(self, gate_up):
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
    return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


def clamped_silu_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def softmax_gate(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.softmax(dim=-1) * up


class Norm(nn.Module):
    def forward(self, y):
        return y / y.norm(dim=-1, keepdim=True)


def experts(act="silu", gate=default_gate, limit=7.0, alpha=1.702, **flags) -> nn.Module:
    """An experts module as the decorator makes it, with its flags."""
    is_transposed, has_bias, has_gate = (
        flags.get(name, default) for name, default in (("is_transposed", False), ("has_bias", False), ("has_gate", True))
    )

    class Experts(nn.Module):
        _apply_gate = gate

        def __init__(self, config):
            super().__init__()
            self.num_experts, self.limit, self.alpha, self.calls = E, limit, alpha, 0
            self.act_fn = ACT2FN[act]
            outputs = (2 if has_gate else 1) * FF
            up, down = (E, outputs, D), (E, D, FF)
            if is_transposed:
                up, down = (E, D, outputs), (E, FF, D)
            prefix = "gate_up_proj" if has_gate else "up_proj"
            self.register_parameter(prefix, nn.Parameter(torch.randn(up)))
            self.down_proj = nn.Parameter(torch.randn(down))
            if has_bias:
                self.register_parameter(f"{prefix}_bias", nn.Parameter(torch.randn(E, outputs)))
                self.down_proj_bias = nn.Parameter(torch.randn(E, D))
            if flags.get("has_post_expert_norm"):
                self.post_expert_norm = Norm()

        def forward(self, hidden_states, top_k_index, top_k_weights):
            out = torch.zeros_like(hidden_states)
            for e in range(self.num_experts):
                token, slot = torch.where(top_k_index == e)
                h = self.linear(hidden_states[token], "gate_up_proj" if has_gate else "up_proj", e)
                y = self.linear(self._apply_gate(h) if has_gate else self.act_fn(h), "down_proj", e)
                if flags.get("has_post_expert_norm"):
                    y = self.post_expert_norm(y)
                out.index_add_(0, token, (y * top_k_weights[token, slot, None]).to(out.dtype))
            return out

        def linear(self, x, name, e):
            weight = getattr(self, name)[e]
            bias = getattr(self, f"{name}_bias")[e] if has_bias else None
            return F.linear(x, weight.t() if is_transposed else weight, bias)

    return use_experts_implementation(Experts, **flags)(SimpleNamespace(_experts_implementation="eager"))


def inputs(dtype=torch.float32):
    x = torch.randn(T, D, dtype=dtype, requires_grad=True)
    weights = torch.rand(T, K, requires_grad=True)
    return x, torch.rand(T, E).topk(K).indices, weights


def step(module, implementation, x, ids, weights, run=None):
    module.config._experts_implementation = implementation
    module.zero_grad()
    x.grad = weights.grad = None
    out = (module if run is None else run)(x, ids, weights)
    (out * torch.arange(D)).sum().backward()
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **{n: p.grad for n, p in module.named_parameters()}}


FLAGS = {
    "concatenated": {},
    "transposed": {"is_transposed": True},
    "bias": {"has_bias": True},
    "interleaved_clamped": {"gate": clamped_gate, "is_concatenated": False, "is_transposed": True, "has_bias": True},
    "ungated": {"has_gate": False, "act": "relu2"},
    "ungated_bias": {"has_gate": False, "act": "gelu_pytorch_tanh", "has_bias": True, "is_transposed": True},
    "no_limit": {"gate": clamped_silu_gate, "limit": float("inf")},
    "clamped_silu": {"gate": clamped_silu_gate, "limit": 1.0},
    "another_limit": {"gate": clamped_gate, "limit": 1.0},
    "another_slope": {"gate": clamped_gate, "alpha": 1.0},
    "gated_relu2": {"act": "relu2"},
    **{act: {"act": act} for act in ("gelu", "gelu_python", "gelu_new", "gelu_pytorch_tanh", "gelu_accurate", "relu", "swish")},
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_flags(flags, compiled, monkeypatch):
    module, arguments = experts(**flags), inputs()
    expected = step(module, "eager", *arguments)
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else None
    calls = Calls(monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*grouped_mm.*")
        assert_steps_equal(step(module, "moeblaze", *arguments, run), expected)
    assert compiled or calls.count == 1


OTHER_FUNCTIONS = {
    "softmax": {"gate": softmax_gate},
    "quick_gelu": {"act": "quick_gelu"},
    "ungated_tanh": {"has_gate": False, "act": "tanh"},
    "post_expert_norm": {"has_post_expert_norm": True},
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("flags", OTHER_FUNCTIONS.values(), ids=OTHER_FUNCTIONS)
def test_other_functions_run_as_grouped_mm(flags, compiled, monkeypatch):
    if flags.get("has_post_expert_norm") and not accepts_post_expert_norm():
        pytest.skip("this version of transformers has no such flag")
    module, arguments = experts(**flags), inputs()
    expected = step(module, "eager", *arguments)
    run = torch.compile(module, backend="aot_eager") if compiled else None
    calls = Calls(monkeypatch)
    with pytest.warns(UserWarning, match="runs as 'grouped_mm', not as 'moeblaze': "):
        actual = step(module, "moeblaze", *arguments, run)
    assert_steps_equal(actual, expected)
    assert calls.count == 0


def accepts_post_expert_norm() -> bool:
    return "has_post_expert_norm" in use_experts_implementation.__kwdefaults__


def test_changed_attribute_is_seen_by_compiled_code():
    module, arguments = experts(gate=clamped_gate), inputs()
    run = torch.compile(module, backend="aot_eager")
    before = step(module, "moeblaze", *arguments, run)
    module.limit = 1.0
    expected = step(module, "eager", *arguments)
    assert not torch.allclose(before["out"], expected["out"])
    assert_steps_equal(step(module, "moeblaze", *arguments, run), expected)


def test_gate_replaced_on_the_module():
    module, arguments = experts(), inputs()
    module._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[0]
    expected = step(module, "eager", *arguments)
    with pytest.warns(UserWarning, match="_apply_gate was replaced"):
        assert_steps_equal(step(module, "moeblaze", *arguments), expected)


def test_hook_on_the_activation():
    module, arguments = experts(), inputs()
    module.act_fn.register_forward_hook(lambda act, args, output: output * 2)
    expected = step(module, "eager", *arguments)
    with pytest.warns(UserWarning, match="act_fn has hooks"):
        assert_steps_equal(step(module, "moeblaze", *arguments), expected)


@pytest.mark.parametrize("check_ids", [False, True])
def test_sentinels_of_expert_parallelism(check_ids, monkeypatch):
    """Ids from ``num_experts`` on belong to other ranks: they add nothing, here and in the gradients."""
    monkeypatch.setattr(moeblaze_config, "check_expert_ids", check_ids)
    module, (x, ids, weights) = experts(), inputs()
    ids = torch.where(torch.rand(T, K) < 0.3, E, ids)
    expected = step(module, "eager", x, ids, weights)
    module._is_expert_parallel = True
    assert_steps_equal(step(module, "moeblaze", x, ids, weights), expected)


def test_activations_wider_than_weights():
    """Norms give fp32 under autocast, which transformers' own implementations round to the weights' dtype."""
    module, (x, ids, weights) = experts().to(torch.bfloat16), inputs()
    module.config._experts_implementation = "moeblaze"
    out = module(x, ids, weights)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, module(x.bfloat16(), ids, weights).float())


class Allocations(TorchDispatchMode):
    """The sizes of new floating-point tensors outside the ops."""

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.sizes.add(result.numel())
        return result


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_parameters_are_not_copied(flags):
    module, (x, ids, weights) = experts(**flags), inputs()
    module.config._experts_implementation = "moeblaze"
    with Allocations() as allocations, torch.no_grad():
        module(x, ids, weights)
    assert not allocations.sizes & {parameter.numel() for parameter in module.parameters() if parameter.dim() == 3}


def test_package_does_not_import_transformers():
    program = "import sys, moeblaze_ops, moeblaze_ops.integrations; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
