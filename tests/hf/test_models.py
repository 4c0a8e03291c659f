"""Models of transformers, as they are: every MoE layer is rewritten, and outputs and gradients are as good as eager's."""

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn

from moeblaze_ops import compile as moeblaze_compile
from tests.tools.compiling import graphs_compiled_anew
from tests.tools.rewrite_harness import Rewriting, compiled

transformers = pytest.importorskip("transformers")

_COMMON = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2,
}  # fmt: skip
_DENSE_TOO = {"intermediate_size": 48, "moe_intermediate_size": 24}
pytestmark = pytest.mark.usefixtures("fused_routers")

CONFIGS = {
    "mixtral": {"intermediate_size": 48, "num_local_experts": 4},
    "qwen3_moe": dict(_DENSE_TOO, num_experts=4, head_dim=8, decoder_sparse_step=1),
    "olmoe": {"intermediate_size": 24, "num_experts": 4},
    "qwen2_moe": dict(_DENSE_TOO, num_experts=4, shared_expert_intermediate_size=40, decoder_sparse_step=1),
    "deepseek_v3": dict(
        _DENSE_TOO, n_routed_experts=12, n_group=3, topk_group=2, first_k_dense_replace=0, n_shared_experts=1,
        num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ),
    "gpt_oss": {"intermediate_size": 24, "num_local_experts": 4, "head_dim": 8, "sliding_window": 16},
    "glm4_moe": dict(_DENSE_TOO, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=0, n_shared_experts=1),
    "granitemoe": {"intermediate_size": 24, "num_local_experts": 4},
    "llama4_text": {
        "intermediate_size": 24, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 8,
        "interleave_moe_layer_step": 1, "attention_chunk_size": 32,
    },
}  # fmt: skip
MODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}
"""Dtypes of the parameters; autocast is to bf16."""
SCORED_IN_BF16 = {("deepseek_v3", "autocast")}
"""Models whose router computes its scores in bf16: it stays."""


@pytest.fixture(autouse=True)
def scratch():
    """No caches on disk: a graph that is found there is not rewritten again."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    with graphs_compiled_anew():
        yield
    moeblaze_compile.disable()
    torch._dynamo.reset()


def make_model(name: str, mode: str = "fp32", *, layers: int = 1, experts: str | None = None) -> nn.Module:
    config = transformers.AutoConfig.for_model(name, **{**_COMMON, **CONFIGS[name], "num_hidden_layers": layers})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # some are left empty, to be loaded
        nn.init.normal_(parameter, std=0.1)
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        if key.endswith("router.weight") or (key.endswith("gate.weight") and tensor.shape[0] < 16):
            tensor.data.mul_(10)  # or all experts weigh the same
        elif key.endswith("e_score_correction_bias"):
            tensor.data.uniform_(-0.5, 0.5)
    if experts is not None:
        model.set_experts_implementation(experts)
    return model.to(MODES[mode])


def in_double(model: nn.Module, name: str) -> nn.Module:
    """The same model with its weights in fp64; what transformers computes in fp32 on purpose stays so."""
    twin = make_model(name, layers=model.config.num_hidden_layers, experts=None if name == "llama4_text" else "eager")
    twin.load_state_dict(model.state_dict())
    return twin.double()


def tokens(length: int = 6) -> Tensor:
    return torch.randint(3, _COMMON["vocab_size"], (2, length))


def decided_tokens(twin: nn.Module, length: int = 6) -> Tensor:
    """Random tokens whose experts are the same when their embeddings change by 1%, so that rounding changes none."""
    for _ in range(500):
        ids = tokens(length)
        plain = choices(twin, ids, 0.0)
        if all(map(torch.equal, plain * 3, sum((choices(twin, ids, 0.01) for _ in range(3)), []))):
            return ids
    raise AssertionError("every draw has a token between two experts")


def choices(twin: nn.Module, ids: Tensor, noise: float) -> list[Tensor]:
    """What each router chooses, in no order."""
    chosen: list[Tensor] = []

    def remember(router: nn.Module, args: tuple, outputs: tuple[Tensor, ...]) -> None:
        ids = [output for output in outputs if not output.is_floating_point()]
        # Llama 4 returns scores of all experts, which are zero where they are not chosen.
        chosen.append(ids[0].sort(-1).values if ids else outputs[0].sign())

    def disturb(embedding: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return output * (1 + noise * torch.randn_like(output))

    hooks = [m.register_forward_hook(remember) for m in twin.modules() if type(m).__name__.endswith("Router")]
    hooks.append(twin.get_input_embeddings().register_forward_hook(disturb))
    with torch.no_grad():
        twin(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(chosen) == len(hooks) - 1 > 0
    return chosen


def autocast(mode: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast")


def training_step(model: nn.Module, run: Callable, ids: Tensor, mode: str = "fp32") -> dict[str, Tensor]:
    model.zero_grad()
    with autocast(mode):
        output = run(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), **gradients}


def check_as_good(actual: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], epsilon: float) -> None:
    """Each tensor is at most three times as far from ``exact`` as eager's, but for a few roundings of size ``epsilon``."""
    assert actual.keys() == eager.keys() == exact.keys()
    for name, expected in exact.items():
        error, allowed = ((result[name].double() - expected).norm().item() for result in (actual, eager))
        size = expected.norm().item()
        assert allowed <= 0.1 * size + 1e-6, f"{name}: eager is wrong by {allowed} of {size}"
        assert error <= 3 * allowed + 4 * epsilon * size, f"{name}: {error}, in eager mode {allowed}, of {size}"


def became(name: str, training: bool = True) -> str:
    activation = "swiglu_clamped" if name == "gpt_oss" else "swiglu"
    return f"expert_up({activation}) -> expert_down" if training else f"expert_mlp({activation})"


def check_rewritten(rewriting: Rewriting, name: str, mode: str, *, training: bool) -> None:
    assert [c.became or f"{c.reason}: {c.detail}" for c in rewriting.candidates] == [became(name, training)]
    fused = (name, mode) not in SCORED_IN_BF16
    assert rewriting.operators().count("route.default") == fused
    assert len(rewriting.modules) == 1


ROUTERS = ("mixtral", "deepseek_v3", "gpt_oss", "llama4_text")
"""One model for each way to score experts and to use their weights: the others score as one of these does."""
LOW_PRECISION = [(name, mode) for name in ROUTERS for mode in ("bf16", "autocast")]


@pytest.mark.parametrize(("name", "mode"), [*((name, "fp32") for name in CONFIGS), *LOW_PRECISION])
def test_training(name, mode):
    model = make_model(name, mode)
    run, rewriting = compiled(model, aot=True)
    ids = decided_tokens(twin := in_double(model, name))
    exact = training_step(twin, twin, ids)
    eager, actual = (training_step(model, step, ids, mode) for step in (model, run))
    check_as_good(actual, eager, exact, torch.finfo(torch.float32 if mode == "fp32" else torch.bfloat16).eps)
    check_rewritten(rewriting, name, mode, training=True)


@pytest.mark.parametrize(
    ("name", "mode"), [("mixtral", "fp32"), ("deepseek_v3", "fp32"), ("gpt_oss", "bf16"), ("llama4_text", "autocast")]
)
def test_inference_in_one_graph_for_all_lengths(name, mode):
    model = make_model(name, mode)
    run, rewriting = compiled(model, aot=True)
    twin = in_double(model, name)
    for length in (6, 8, 5):
        torch._dynamo.mark_dynamic(ids := decided_tokens(twin, length), 1)
        with torch.no_grad():
            exact = {"logits": twin(input_ids=ids, use_cache=False).logits}
            with autocast(mode):
                eager, actual = ({"logits": step(input_ids=ids, use_cache=False).logits} for step in (model, run))
        check_as_good(actual, eager, exact, torch.finfo(torch.float32 if mode == "fp32" else torch.bfloat16).eps)
    check_rewritten(rewriting, name, mode, training=False)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_batched_mm_experts(name):
    """One function of transformers for all models: experts without biases, and transposed ones with biases."""
    model = make_model(name, experts="batched_mm")
    run, rewriting = compiled(model, aot=True)
    ids = decided_tokens(twin := in_double(model, name))
    exact = training_step(twin, twin, ids)
    eager, actual = (training_step(model, step, ids) for step in (model, run))
    check_as_good(actual, eager, exact, torch.finfo(torch.float32).eps)
    check_rewritten(rewriting, name, "fp32", training=True)


def test_training_in_one_graph_for_all_lengths():
    model = make_model("qwen3_moe")
    run, rewriting = compiled(model, aot=True)
    twin = in_double(model, "qwen3_moe")
    for length in (6, 8, 5):
        torch._dynamo.mark_dynamic(ids := decided_tokens(twin, length), 1)
        exact = training_step(twin, twin, ids)
        eager, actual = (training_step(model, step, ids) for step in (model, run))
        check_as_good(actual, eager, exact, torch.finfo(torch.float32).eps)
    check_rewritten(rewriting, "qwen3_moe", "fp32", training=True)


@pytest.mark.parametrize(("name", "mode"), [("qwen3_moe", "bf16"), ("gpt_oss", "autocast")])
def test_inductor(name, mode):
    model = make_model(name, mode)
    check_inductor(model, torch.compile(model, backend="moeblaze", fullgraph=True), name, mode)


def test_enable():
    model = make_model("mixtral", layers=2)
    moeblaze_compile.enable()
    check_inductor(model, torch.compile(model, fullgraph=True), "mixtral", "fp32")


def check_inductor(model: nn.Module, run: Callable, name: str, mode: str) -> None:
    ids = decided_tokens(twin := in_double(model, name))
    exact = training_step(twin, twin, ids)
    eager = training_step(model, model, ids, mode)
    with moeblaze_compile.recording() as records:
        actual = training_step(model, run, ids, mode)
    check_as_good(actual, eager, exact, torch.finfo(torch.float32 if mode == "fp32" else torch.bfloat16).eps)
    reports = [record.report for record in records if getattr(record, "dropped", "frame") is None]
    layers = model.config.num_hidden_layers
    assert [candidate.became for report in reports for candidate in report.candidates] == [became(name)] * layers
