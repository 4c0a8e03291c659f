"""Compiled training on a GPU: plain models rewritten, equal to eager, with our kernels in the generated code."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

import moeblaze_ops.compile  # registers the backend where the package is not installed
from moeblaze_ops import config

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    """A residual MoE block in the style of Mixtral, experts as stacked parameters, loop over experts."""

    def __init__(self, width: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.norm = nn.RMSNorm(width)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(num_experts, 2 * hidden, width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, hidden) * hidden**-0.5)

    def forward(self, x):
        y = self.norm(x)
        weights, experts = torch.topk(torch.softmax(self.router(y), -1, dtype=torch.float32), self.top_k)
        out = torch.zeros_like(y)
        for e in range(self.down.shape[0]):
            token, choice = torch.where(experts == e)
            gate, up = F.linear(y[token], self.gate_up[e]).chunk(2, dim=-1)
            expert_out = F.linear(F.silu(gate) * up, self.down[e]) * weights[token, choice, None]
            out.index_add_(0, token, expert_out.to(out.dtype))
        return x + out


def model(num_layers=4, dtype=torch.bfloat16, sizes=(256, 128, 8, 2)):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(*sizes) for _ in range(num_layers))).to("cuda", dtype)


def train(run, parameters, x, optimizer=None):
    out = run(x)
    out.float().square().mean().backward()
    gradients = [p.grad.clone() for p in parameters]
    if optimizer is not None:
        optimizer.step()
    for p in parameters:
        p.grad = None
    return [out.detach(), *gradients]


@pytest.fixture(params=["hopper", "portable"])
def path(request, monkeypatch):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    monkeypatch.setattr(config, "hopper", "auto" if request.param == "hopper" else "off")
    torch._dynamo.reset()
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_rewritten_model_trains_like_eager(path, dtype):
    eager = model(dtype=dtype)
    parameters = list(eager.parameters())
    compiled = torch.compile(eager, backend="moeblaze")
    for num_tokens in (300, 300, 77):
        x = torch.randn(num_tokens, 256, device="cuda", dtype=dtype)
        expected, got = train(eager, parameters, x), train(compiled, parameters, x)
        for index, (want, have) in enumerate(zip(expected, got, strict=True)):
            error = float((have.double() - want.double()).norm() / want.double().norm())
            # Four residual layers in the same dtype: a few roundings each, in another order.
            assert error < 30 * torch.finfo(dtype).eps, (index, error)


class Mixture(Block):
    """Every expert on every token."""

    def forward(self, x):
        shares, out = self.router(x).softmax(-1), x
        for e in range(self.down.shape[0]):
            gate, up = F.linear(x, self.gate_up[e]).chunk(2, dim=-1)
            out = out + shares[:, e, None] * F.linear(F.silu(gate) * up, self.down[e])
        return out


@pytest.mark.parametrize("num_tokens", [1, 77, 300])
def test_a_mixture_of_all_experts_is_rewritten(path, num_tokens):
    torch.manual_seed(0)
    eager = Mixture(256, 128, 8, 8).to("cuda")
    parameters = [p for name, p in eager.named_parameters() if "norm" not in name]
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(eager, backend="moeblaze")
    x = torch.randn(num_tokens, 256, device="cuda")
    for want, have in zip(train(eager, parameters, x), train(compiled, parameters, x), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-5)
    assert torch._dynamo.utils.counters["moeblaze"]["rewritten"] == (num_tokens > 1)


def strip_comments(code: str) -> str:
    return "\n".join(line.split("#", 1)[0] for line in code.splitlines())


def test_generated_code_launches_our_kernels(path):
    layers = model(num_layers=2)
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layers, backend="moeblaze")
    _, codes = run_and_get_code(lambda: train(compiled, list(layers.parameters()), x))
    code = strip_comments("\n".join(codes))
    assert "torch.ops.moeblaze." not in code
    assert ("torch.ops.moeblaze_hopper." in code) == (path == "hopper")
    assert "_combine_kernel" in code


def test_reduce_overhead_replays_cuda_graphs(path):
    """Several steps of an optimizer through recorded graphs, as those of eager mode; nothing is compiled twice or left out."""
    layers = model(num_layers=2, dtype=torch.float32)
    twin = copy.deepcopy(layers)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (layers, twin)]
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layers, backend="moeblaze", mode="reduce-overhead", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(6):
            x = torch.randn(300, 256, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            got = [t.clone() for t in train(compiled, list(layers.parameters()), x, optimizers[0])]
            expected = train(twin, list(twin.parameters()), x, optimizers[1])
            for have, want in zip(got, expected, strict=True):
                assert float((have - want).norm() / want.norm()) < 1e-4  # of fp32, over six steps
    counters = torch._dynamo.utils.counters
    assert counters["moeblaze"]["rewritten"] == 2 and counters["inductor"]["cudagraph_skips"] == 0
    assert len(recorded_graphs()) >= 2, "one of forward and one of backward"


def recorded_graphs() -> set:
    """Ids of the functions that the cudagraph trees of the current device hold a recording of."""
    from torch._inductor.cudagraph_trees import get_manager

    nodes, recorded = list(get_manager(torch.cuda.current_device(), create_if_none_exists=False).roots.values()), set()
    while nodes:
        for node in nodes.pop():
            assert node.graph is not None
            recorded.add(node.wrapped_function.id)
            nodes += node.children.values()
    return recorded


def test_bytes_kept_for_backward_are_x_h_and_indices(path):
    T, D, H, E, K = 8192, 512, 256, 16, 4
    layer = moeblaze_ops.MoE(D, H, E, K, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer)
    x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        compiled(x).sum().backward()
        layer.zero_grad(set_to_none=True)
        x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = compiled(x)
    kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    h_bytes, router_bytes, index_bytes = T * K * 2 * H * 2, T * (E * 4 + K * 16), T * K * 4 * 4
    assert kept <= 1.02 * (h_bytes + router_bytes + index_bytes)


@pytest.mark.parametrize("router_dtype", [torch.bfloat16, torch.float32])
def test_a_router_in_fp32_over_bf16_tokens_is_as_exact(router_dtype):
    """Logits and the router's gradient are of exact products; what else is bf16 stays out of the comparison."""
    torch.manual_seed(0)
    T, D, E, K, hidden = 4096, 512, 64, 4, 128
    x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16)
    router = torch.randn(E, D, device="cuda").to(router_dtype).requires_grad_()
    w_up, w_down = (torch.randn(E, *s, device="cuda", dtype=torch.bfloat16) * 0.05 for s in ((2 * hidden, D), (D, hidden)))

    def layer(x, router):
        logits = F.linear(x.float(), router.float())
        weights, experts = moeblaze_ops.route(logits, K)
        return moeblaze_ops.moe(x, weights, experts, w_up, w_down), logits

    torch._dynamo.reset()
    (_, logits), codes = run_and_get_code(torch.compile(layer), x, router)
    wanted = F.linear(x.double(), router.double())
    assert "mm_dtype" in codes[0] and ((logits - wanted).norm() / wanted.norm()).item() < 1e-6
    seed = torch.randn_like(logits)
    logits.backward(seed)
    gradient = seed.double().mT @ x.double()
    # Tensor cores cut off what they sum: 4.4e-6 here, whatever is multiplied.
    limit = 1e-5 if router_dtype == torch.float32 else 3e-3
    assert ((router.grad - gradient).norm() / gradient.norm()).item() < limit


@pytest.mark.parametrize("sums", [None, torch.float32], ids=["grad", "fp32"])
def test_gradients_are_added_in_place(path, sums):
    """The sums of two steps are those of eager mode, and no gradient of a weight's size is allocated for them."""
    layers = [model(1, sizes=(512, 1024, 8, 2)) for _ in range(2)]
    xs = torch.randn(2, 256, 512, device="cuda", dtype=torch.bfloat16)
    results, allocated = [], []
    for layer, run in zip(layers, (layers[0], torch.compile(layers[1], backend="moeblaze")), strict=True):
        experts = [layer[0].gate_up, layer[0].down]
        buffers = [None if sums is None else torch.zeros_like(p, dtype=sums) for p in experts]
        handles = [moeblaze_ops.accumulate_grad(p, buffer) for p, buffer in zip(experts, buffers, strict=True)]
        torch._dynamo.reset()
        for x in xs:
            out = run(x)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out.float().square().mean().backward()
            allocated.append(torch.cuda.max_memory_allocated() - before)
        results.append([p.grad if buffer is None else buffer for p, buffer in zip(experts, buffers, strict=True)])
        assert sums is None or all(p.grad is None for p in experts)
        for handle in handles:
            handle.remove()
    for got, want in zip(*results, strict=True):
        assert (got.float() - want.float()).norm() < 2e-2 * want.float().norm()
    assert allocated[-1] < layers[1][0].down.nbytes
