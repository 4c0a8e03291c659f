"""What others have reported to break in MoE layers, one case for each thread; docs/elsewhere.md is the table of them.

A case is named by its thread, and says what the thread says. ``THREADS`` is compared with the table, once
`test_known_failures_of_ranks` has added those of several ranks.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

import moeblaze_ops
from moeblaze_ops import compile as switch
from moeblaze_ops import config, moe
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

D, H, E, K, T = 24, 40, 4, 2, 67
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

on_devices = pytest.mark.parametrize("device", DEVICES)

THREADS: set[str] = set()


def reported(*threads: str):
    """Marks a case with the threads that it is about."""
    THREADS.update(threads)
    return lambda test: test


class Masked(nn.Module):
    """Each expert on each token; the weights of what was not chosen are zero."""

    def __init__(self, dim=D, hidden=H, num_experts=E):
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(dim, hidden, bias=False) for _ in range(num_experts))
        self.down = nn.ModuleList(nn.Linear(hidden, dim, bias=False) for _ in range(num_experts))

    def route(self, x):
        return self.router(x).softmax(dim=-1, dtype=torch.float32).to(x.dtype).topk(K, dim=-1)

    def expert(self, e, x):
        return self.down[e](F.silu(self.up[e](x)))

    def forward(self, x):
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            out = out + (weights * (chosen == e)).sum(dim=-1, keepdim=True) * self.expert(e, x)
        return out


class Loop(Masked):
    """Each expert on the tokens that chose it."""

    def forward(self, x):
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            token, k = torch.where(chosen == e)
            if len(token) == 0:
                continue
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, k, None])
        return out


class Stacked(nn.Module):
    """Stacked parameters; ``transposed`` stores them the other way round, and ``act`` takes the place of SiLU."""

    def __init__(self, transposed=False):
        super().__init__()
        shape_up, shape_down = ((E, D, H), (E, H, D)) if transposed else ((E, H, D), (E, D, H))
        self.router = nn.Linear(D, E, bias=False)
        self.w_up = nn.Parameter(torch.randn(shape_up) / D**0.5)
        self.w_down = nn.Parameter(torch.randn(shape_down) / H**0.5)
        self.transposed = transposed

    def route(self, x):
        return self.router(x).softmax(dim=-1).topk(K, dim=-1)

    def forward(self, x):
        scores, chosen = self.route(x)
        scores_TE = torch.zeros(x.shape[0], E, dtype=scores.dtype, device=x.device).scatter(1, chosen, scores)
        w_up, w_down = (w.transpose(1, 2) if self.transposed else w for w in (self.w_up, self.w_down))
        a = F.silu(torch.einsum("td,efd->tef", x, w_up))
        return torch.einsum("te,tef,edf->td", scores_TE, a, w_down)


def problem(device="cpu", dtype=torch.float64, experts=None, hidden=H, dim=D):
    """Arguments of ``moe`` for SwiGLU; every float requires gradients."""
    torch.manual_seed(0)
    if experts is None:
        experts = torch.rand(T, E).topk(K, dim=-1).indices
    x = torch.randn(len(experts), dim)
    w_up, w_down = torch.randn(E, 2 * hidden, dim) / dim**0.5, torch.randn(E, dim, hidden) / hidden**0.5
    weights = torch.rand(experts.shape)
    x, weights, w_up, w_down = (t.to(device, dtype).requires_grad_() for t in (x, weights, w_up, w_down))
    return x, weights, experts.to(device), w_up, w_down


def plainly(x, weights, experts, w_up, w_down):
    """The same with a loop over the experts."""
    out = torch.zeros_like(x)
    for e in range(E):
        gate, up = (x @ w_up[e].T).chunk(2, dim=-1)
        out = out + (weights * (experts == e)).sum(dim=-1, keepdim=True) * ((F.silu(gate) * up) @ w_down[e].T)
    return out


def gradients(function, arguments):
    """The output, and the gradient of each float, for one output gradient."""
    floats = [t for t in arguments if t.is_floating_point()]
    out = function(*arguments)
    torch.manual_seed(1)
    dout = torch.randn(out.shape, dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad(out, floats, dout)]


def check_moe(arguments, function=moe):
    """Against the loop in fp64: exactly as many digits as eager mode has in the same dtype, twice over for luck of rounding."""
    exact = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in arguments]
    expected, eager = gradients(plainly, exact), gradients(plainly, arguments)
    results = gradients(function, arguments)
    for result, plain, truth in zip(results, eager, expected, strict=True):
        assert torch.isfinite(result).all()
        noise = (plain.double() - truth).norm() + 1e-12 * truth.norm()
        assert (result.double() - truth).norm() <= 2 * noise
    return results


def trained(model, x, wrap=lambda model: model):
    """The output and all gradients of a copy of ``model``, which ``wrap`` compiles."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    out = wrap(model)(x)
    out.square().sum().backward()
    return out.detach(), x.grad, {name: p.grad for name, p in model.named_parameters()}


def check_rewritten(model, x, layers=1, **options):
    """A compile with rewriting replaces the layers, in one graph, and gives the numbers of eager mode."""
    torch._dynamo.reset()
    expected = trained(model, x)
    with rewriting_backend() as backend, switch.recording() as records:
        got = trained(model, x, lambda model: torch.compile(model, backend=backend, fullgraph=True, **options))
    assert len(rewritten_in(records)) == layers, records
    torch.testing.assert_close(got, expected)
    return got


@pytest.fixture
def poisoned_memory():
    """Memory that nobody has written yet holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@reported("pytorch#174763")
@on_devices
def test_pytorch_174763_grouped_products_have_an_autocast_rule(device):
    arguments = problem(device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        out = moe(*arguments)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert [t.grad.dtype for t in arguments if t.is_floating_point()] == [torch.float32] * 4
    torch.testing.assert_close(out.float(), plainly(*arguments), rtol=0.02, atol=0.05)  # sums of bf16 products


@reported("transformers#43828", "transformers#43839")
@pytest.mark.parametrize("layer", [Masked, Loop, Stacked])
def test_transformers_43828_43839_dtypes_under_autocast(layer):
    torch.manual_seed(0)
    model, x = layer(), torch.randn(T, D)

    def under_autocast(model):
        def run(x):
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        return run

    with rewriting_backend() as backend, switch.recording() as records:
        torch._dynamo.reset()
        out, dx, got = trained(model, x, lambda model: under_autocast(torch.compile(model, backend=backend)))
    assert len(rewritten_in(records)) == 1
    plain_out, plain_dx, plain = trained(model, x, under_autocast)
    assert out.dtype == plain_out.dtype
    assert dx.dtype == torch.float32
    assert {name: grad.dtype for name, grad in got.items()} == {name: grad.dtype for name, grad in plain.items()}
    torch.testing.assert_close(dx, plain_dx, rtol=0.05, atol=0.2)  # gradients of a sum over bf16 products


@reported("pytorch#172439")
@on_devices
def test_pytorch_172439_experts_without_tokens_have_zero_gradients(device):
    experts = torch.stack([torch.zeros(T, dtype=torch.int64), torch.full((T,), 2)], 1)
    *_, dw_up, dw_down = check_moe(problem(device, torch.float32, experts))
    for gradient in (dw_up, dw_down):
        assert gradient[[1, 3]].eq(0).all()
        assert gradient[[0, 2]].ne(0).any()


@reported("pytorch#193633")
@on_devices
def test_pytorch_193633_no_nan_from_a_tail_of_empty_groups(device, poisoned_memory):
    experts = torch.zeros(T, K, dtype=torch.int64)
    experts[:, 1] = 1
    check_moe(problem(device, torch.float32, experts))


@reported("pytorch#154557", "pytorch#174314")
@on_devices
def test_pytorch_154557_174314_no_uninitialised_rows_behind_the_last_group(device, poisoned_memory):
    experts = torch.rand(T, E).topk(K, dim=-1).indices
    experts[T // 2 :] = -1
    out, dx, *_ = check_moe(problem(device, torch.float32, experts))
    assert out[T // 2 :].eq(0).all()
    assert dx[T // 2 :].eq(0).all()


@reported("pytorch#172440", "pytorch#173395", "transformers#46743")
@on_devices
def test_pytorch_172440_173395_transformers_46743_no_alignment_is_asked_for(device):
    x, weights, experts, w_up, w_down = problem(device, torch.bfloat16, dim=7, hidden=5)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=device)[1:].view(x.shape).copy_(x.detach()).requires_grad_()
    assert shifted.data_ptr() % 16
    check_moe((shifted, weights, experts, w_up, w_down))


@reported("torchtitan#1651")
@on_devices
def test_torchtitan_1651_groups_are_not_padded(device):
    x, weights, experts, w_up, w_down = problem(device, torch.float32)
    assert (torch.bincount(experts.flatten(), minlength=E) % 8).any()
    sizes = []

    def pack(tensor):
        sizes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        moe(x, weights, experts, w_up, w_down)
    assert torch.Size([T * K, 2, H]) in sizes
    assert not [size for size in sizes if len(size) == 2 and size[0] > T and size[1] == D]


@reported("transformers#48644")
def test_transformers_48644_transposed_stacks_are_read_as_stored():
    torch.manual_seed(0)
    _, _, got = check_rewritten(Stacked(transposed=True), torch.randn(T, D))
    assert got["w_up"].shape == (E, D, H)
    x, weights, experts, w_up, w_down = problem()
    turned = [w.detach().transpose(1, 2).contiguous().requires_grad_() for w in (w_up, w_down)]
    for function, up, down in ((moe, w_up, w_down), (lambda *a: moe(*a, transposed=True), *turned)):
        out = function(x, weights, experts, up, down)
        torch.testing.assert_close(out, plainly(x, weights, experts, w_up, w_down))


@reported("transformers#43193")
def test_transformers_43193_experts_of_gpt_oss():
    class GptOss(nn.Module):
        """Biases, interleaved halves, a clamp, and a gate that is added to one."""

        def __init__(self):
            super().__init__()
            self.router = nn.Linear(D, E)
            self.gate_up, self.gate_up_bias = nn.Parameter(torch.randn(E, D, 2 * H)), nn.Parameter(torch.randn(E, 2 * H))
            self.down, self.down_bias = nn.Parameter(torch.randn(E, H, D)), nn.Parameter(torch.randn(E, D))

        def forward(self, x):
            scores, chosen = self.router(x).topk(K, dim=-1)
            scores_TE = torch.zeros_like(self.router(x)).scatter(1, chosen, scores.softmax(dim=-1))
            h = torch.bmm(x.expand(E, -1, -1), self.gate_up) + self.gate_up_bias[:, None]
            gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
            rows = torch.bmm((up + 1) * gate * torch.sigmoid(1.702 * gate), self.down) + self.down_bias[:, None]
            return (rows * scores_TE.T[..., None]).sum(0)

    torch.manual_seed(0)
    check_rewritten(GptOss().double(), torch.randn(T, D, dtype=torch.float64))


@reported("transformers#43360", "transformers#43362", "torchtitan#1974")
@on_devices
def test_transformers_43360_43362_torchtitan_1974_the_same_bits_in_every_run(device):
    arguments = problem(device, torch.float32, torch.rand(4096, E).topk(K, dim=-1).indices)
    first = gradients(moe, arguments)
    for _ in range(3):
        assert all(map(torch.equal, gradients(moe, arguments), first))


@reported("transformers#47467", "pytorch#171355", "torchtitan#1117")
def test_transformers_47467_pytorch_171355_torchtitan_1117_recomputation_that_routes_differently():
    """The shapes of what is recomputed do not depend on the routing; those of a loop over the experts do."""
    torch.manual_seed(0)
    x, weights, experts, w_up, w_down = problem()
    calls = []

    def changing(function):
        def run(x):
            calls.append(None)
            return function(x, weights, experts if len(calls) % 2 else experts.flip(0) // 2, w_up, w_down)

        return run

    def loop(x, weights, experts, w_up, w_down):
        out = torch.zeros_like(x)
        for e in range(E):
            token, k = torch.where(experts == e)
            gate, up = (x[token] @ w_up[e].T).chunk(2, dim=-1)
            out = out.index_add(0, token, ((F.silu(gate) * up) @ w_down[e].T) * weights[token, k, None])
        return out

    with pytest.raises(CheckpointError):
        checkpoint(changing(loop), x, use_reentrant=False).sum().backward()
    calls.clear()
    checkpoint(changing(moe), x, use_reentrant=False).sum().backward()
    assert len(calls) == 2


@reported("DeepSpeed#7461", "accelerate#2662", "trl#4204")
def test_deepspeed_7461_accelerate_2662_trl_4204_every_expert_has_a_gradient():
    """A process whose expert got no token must not leave out the collective of its gradient."""
    torch.manual_seed(0)
    model, x = Loop(), torch.randn(T, D).abs()
    with torch.no_grad():
        model.router.weight[3] = -10.0
    assert trained(model, x)[2]["up.3.weight"] is None
    with rewriting_backend() as backend, switch.recording() as records:
        torch._dynamo.reset()
        got = trained(model, x, lambda model: torch.compile(model, backend=backend))[2]
    assert len(rewritten_in(records)) == 1
    assert got["up.3.weight"].eq(0).all()
    assert got["down.3.weight"].eq(0).all()


@reported("transformers#38518", "transformers#46929")
@pytest.mark.parametrize("layer", ["plain", "ours"])
def test_transformers_38518_46929_export(layer):
    torch.manual_seed(0)
    model = Masked() if layer == "plain" else moeblaze_ops.MoE(D=D, F=H, E=E, K=K)
    x = torch.randn(T, D)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    torch.testing.assert_close(program.module()(x[:9]), model(x[:9]))
    if layer == "ours":
        assert any("moeblaze.expert_up" in str(node.target) for node in program.graph.nodes)
    else:
        check_rewritten(program.module(), x)


@reported("torchtitan#1895", "torchtitan#2369")
def test_torchtitan_1895_2369_no_graph_break_and_no_recompile_for_other_tokens():
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Loop()
    with rewriting_backend() as backend, switch.recording() as records:
        step = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
        for tokens in (67, 66, 9, 130):
            x = torch.randn(tokens, D)
            torch.testing.assert_close(step(x), model(x))
    assert len(rewritten_in(records)) == 1


@reported("unsloth-zoo#838")
def test_unsloth_zoo_838_frozen_experts_are_not_copied():
    x, weights, experts, w_up, w_down = problem()
    kept = []

    def pack(tensor):
        kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    w_up.requires_grad_(False)
    w_down.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.profiler.profile() as profile:
        out = moe(x, weights, experts, w_up, w_down)
        before = set(kept)
        out.sum().backward()
    assert {w_up.data_ptr(), w_down.data_ptr()} <= before
    called = {event.key for event in profile.key_averages()}
    assert "moeblaze::expert_up_backward" in called
    assert "moeblaze::expert_weight_grad" not in called


@reported("Megatron-Bridge#5768")
@pytest.mark.parametrize("rank", [1, 3, 4])
def test_megatron_bridge_5768_adapters_of_small_rank(rank):
    """Adapters on experts are rewritten and right; one expert gets no token."""

    class Adapted(Loop):
        def __init__(self):
            super().__init__()
            self.lora_A = nn.ModuleList(nn.Linear(D, rank, bias=False) for _ in range(E))
            self.lora_B = nn.ModuleList(nn.Linear(rank, H, bias=False) for _ in range(E))

        def expert(self, e, x):
            return self.down[e](F.silu(self.up[e](x) + self.lora_B[e](self.lora_A[e](x))))

    torch.manual_seed(0)
    model, x = Adapted().double(), torch.randn(T, D, dtype=torch.float64).abs()
    with torch.no_grad():
        model.router.weight[3] = -10.0
    torch._dynamo.reset()
    with rewriting_backend() as backend, switch.recording() as records:
        out, dx, got = trained(model, x, lambda model: torch.compile(model, backend=backend))
    (layer,) = rewritten_in(records)
    assert f"rank {rank}" in layer.became
    plain_out, plain_dx, plain = trained(model, x)
    torch.testing.assert_close((out, dx), (plain_out, plain_dx))
    for name, gradient in plain.items():
        expected = torch.zeros_like(got[name]) if gradient is None and got[name] is not None else gradient
        torch.testing.assert_close(got[name], expected)


@reported("pytorch#158042", "sonic-moe#60")
@on_devices
def test_pytorch_158042_sonic_moe_60_nothing_is_tuned(device):
    from torch._dynamo.utils import counters

    x, weights, experts, w_up, w_down = problem(device, torch.bfloat16, hidden=64, dim=32)
    torch._dynamo.reset()
    counters.clear()
    step = torch.compile(moe, mode="max-autotune-no-cudagraphs", dynamic=True)
    for tokens in (T, T // 2):
        part = (t.detach()[:tokens].clone() for t in (x, weights, experts))
        step(*part, w_up, w_down).sum().backward()
    assert counters["inductor"]["select_algorithm_autotune"] == 0
    assert counters["stats"]["unique_graphs"] == 1


@reported("pytorch#186620", "pytorch#186615", "transformers#47999", "transformers#45001")
@pytest.mark.gpu
@pytest.mark.parametrize("hopper", ["auto", "off"])
def test_pytorch_186620_186615_transformers_47999_45001_no_sync_and_no_hopper_needed(hopper, monkeypatch):
    monkeypatch.setattr(config, "hopper", hopper)
    arguments = problem("cuda", torch.bfloat16, hidden=64, dim=32)
    check_moe(arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moe(*arguments).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
