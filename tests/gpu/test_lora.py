"""Low-rank additions on a GPU: the ops against fp64 on the CPU, and a compiled layer as people adapt it."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

import moeblaze_ops.compile  # registers the backend where the package is not installed
from moeblaze_ops import config
from tests.corpus.codecs import Int8

pytestmark = pytest.mark.gpu

E, K, D, H = 8, 2, 256, 128


@pytest.fixture(params=["hopper", "portable"])
def path(request, monkeypatch):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    monkeypatch.setattr(config, "hopper", "auto" if request.param == "hopper" else "off")
    torch.manual_seed(0)
    return request.param


def case(T, rank, num_experts=E, width=D, hidden=H):
    weights, experts = torch.randn(T, num_experts).softmax(-1).topk(K, dim=-1)
    tensors = {
        "x": torch.randn(T, width),
        "weights": weights,
        "w_up": torch.randn(num_experts, 2 * hidden, width) / width**0.5,
        "w_down": torch.randn(num_experts, width, hidden) / hidden**0.5,
        "up_a": torch.randn(num_experts, rank, width) / width**0.5,
        "up_b": torch.randn(num_experts, 2 * hidden, rank) / rank**0.5,
        "down_a": torch.randn(num_experts, rank, hidden) / hidden**0.5,
        "down_b": torch.randn(num_experts, width, rank) / rank**0.5,
    }
    return tensors, experts


LEARNED = ("x", "weights", "up_a", "up_b", "down_a", "down_b")


def step(tensors, experts, factors, dtype, device, run=lambda function: function):
    """The output and the gradients of the tokens, routing weights and factors."""
    # What both sides start from is rounded alike.
    given = {name: t if name == "weights" else t.to(torch.bfloat16) for name, t in tensors.items()}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    given = {name: t.to(device, wide if name == "weights" else dtype) for name, t in given.items()}
    for name in LEARNED:
        given[name] = given[name].detach().requires_grad_()

    def layer(x, weights, w_up, w_down, up_a, up_b, down_a, down_b):
        if factors:
            lora = {"lora_up": (up_a, up_b, 0.5), "lora_down": (down_a, down_b, 0.5)}
            return moeblaze_ops.moe(x, weights, experts.to(device), w_up, w_down, **lora)
        merged = torch.baddbmm(w_up, up_b, up_a, alpha=0.5), torch.baddbmm(w_down, down_b, down_a, alpha=0.5)
        return moeblaze_ops.moe(x, weights, experts.to(device), *merged)

    out = run(layer)(**given)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    return [t.double().cpu() for t in (out.detach(), *torch.autograd.grad(out, [given[name] for name in LEARNED], dout))]


def assert_no_worse_than_merged_weights(tensors, experts, run=lambda function: function):
    truth = step(tensors, experts, False, torch.float64, "cpu")
    ours = step(tensors, experts, True, torch.bfloat16, "cuda", run)
    merged = step(tensors, experts, False, torch.bfloat16, "cuda")
    for name, got, other, want in zip(("out", *LEARNED), ours, merged, truth, strict=True):
        mine, theirs = ((value - want).norm() / want.norm() for value in (got, other))
        assert mine <= 1.5 * theirs + torch.finfo(torch.bfloat16).eps / 4, (name, float(mine), float(theirs))


def _calls(rank, num_experts=E, width=D, hidden=H, T=700):
    """Arguments of every operator that a layer with factors calls, on the CPU in fp32."""
    _, experts = case(T, rank, num_experts)
    routing = torch.ops.moeblaze.dispatch(experts, num_experts)
    slots, offsets, _, blocks = routing
    N = T * K

    def new(*shape):
        return (torch.randn(shape) / shape[-1] ** 0.5).bfloat16().float()

    x, h, a, rows, dout = new(T, width), new(N, 2, hidden), new(N, hidden), new(N, rank), new(T, width)
    w_up, w_down = [new(num_experts, 2, hidden, width)], [new(num_experts, width, hidden).mT]
    up_a, up_b = new(num_experts, rank, width), new(num_experts, 2, hidden, rank)
    down_a, down_b = new(num_experts, rank, hidden), new(num_experts, width, rank).mT
    weights, numbers = torch.rand(T, K), torch.arange(N, dtype=torch.int32)
    return {
        "u": ("expert_up", x, [up_a.unsqueeze(1)], [], None, *routing, "identity"),
        "v": ("expert_rows", a.unsqueeze(1), down_a.mT.unsqueeze(1), offsets, blocks),
        "du": ("expert_rows", h, up_b, offsets, blocks),
        "up": ("expert_up", x, w_up, [], None, *routing, "swiglu", rows, up_a, up_b),
        "down": ("expert_down", h, a, w_down, [], weights, *routing, "swiglu", rows, down_a, down_b),
        "down_backward": ("expert_down_backward", dout, h, w_down, [], weights, *routing, "swiglu", rows, down_a),
        "up_backward": ("expert_up_backward", h, None, w_up, None, *routing, None, None, None, rows, up_a),
        "d_up_a": ("expert_weight_grad", x, rows.unsqueeze(1), [up_a.unsqueeze(1)], None, slots, offsets, K),
        "d_up_b": ("low_rank_backward", h, rows, up_b, None, *routing),
        "d_down_a": ("expert_weight_grad", a, rows.unsqueeze(1), [down_a], None, numbers, offsets, 1),
        "d_down_b": ("low_rank_backward", dout, rows, down_b.mT, weights, *routing),
    }  # fmt: skip


CALLS = ("u", "v", "du", "up", "down", "down_backward", "up_backward", "d_up_a", "d_up_b", "d_down_a", "d_down_b")


@pytest.mark.parametrize("rank", [16, 24, 200])
@pytest.mark.parametrize("call", CALLS)
def test_operators_with_low_rank_columns(path, call, rank):
    name, *arguments = _calls(rank)[call]

    def low(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_routing = not leaf.is_floating_point() or leaf.shape[-1] == K
        return leaf.cuda() if is_routing else leaf.to("cuda", torch.bfloat16)

    op = getattr(torch.ops.moeblaze, name)
    got, expected = op(*tree_map(low, arguments)), op(*arguments)
    for ours, wanted in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        if wanted.numel():
            error = (ours.float().cpu() - wanted).norm() / wanted.norm()
            assert error < 0.02, float(error)


@pytest.mark.parametrize("rank", [1, 8, 16, 20, 64, 200])
def test_factors_match_merged_weights(path, rank):
    assert_no_worse_than_merged_weights(*case(700, rank))


@pytest.mark.parametrize("T", [1, 5, 4000])
def test_any_number_of_tokens(path, T):
    assert_no_worse_than_merged_weights(*case(T, 16))


def test_widths_that_no_tile_divides(path):
    assert_no_worse_than_merged_weights(*case(500, 24, width=328, hidden=200))


def test_compiled(path):
    torch._dynamo.reset()
    assert_no_worse_than_merged_weights(*case(700, 16), run=lambda layer: torch.compile(layer, fullgraph=True))


def test_two_runs_agree(path):
    given = case(3000, 16)
    first, second = (step(*given, True, torch.bfloat16, "cuda") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_experts_side_by_side_give_the_same_rows(monkeypatch):
    """Tokens that do not fit in L2 are read in another order."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    from moeblaze_ops.kernels.hopper import expert_up

    T = 3000
    _, x, (w,), _, _, slots, offsets, _, blocks, activation = _calls(16, T=T)["u"]
    x, w, slots, offsets, blocks = x.bfloat16().cuda(), w.bfloat16().cuda(), slots.cuda(), offsets.cuda(), blocks.cuda()
    rows = []
    for is_spread in (False, True):
        monkeypatch.setattr(expert_up, "reads_more_than_cached", lambda *_, is_spread=is_spread: is_spread)
        h = torch.full((T * K, 1, 16), float("nan"), device="cuda", dtype=torch.bfloat16)
        expert_up.hopper_expert_up(x, [w], [], slots, offsets, blocks, K, activation, h, h.new_empty(0, 16))
        rows.append(h)
    assert torch.equal(*rows) and not rows[1].isnan().any()


def test_memory_of_a_step_holds_nothing_of_the_size_of_the_weights(path):
    tensors, experts = case(64, 16, num_experts=64, width=1024, hidden=1024)
    given = {name: t.to("cuda", torch.float32 if name == "weights" else torch.bfloat16) for name, t in tensors.items()}
    for name in LEARNED:
        given[name].requires_grad_()
    lora = {"lora_up": (given["up_a"], given["up_b"], 0.5), "lora_down": (given["down_a"], given["down_b"], 0.5)}

    def train():
        moeblaze_ops.moe(given["x"], given["weights"], experts.cuda(), given["w_up"], given["w_down"], **lora).sum().backward()

    train()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train()
    assert torch.cuda.max_memory_allocated() - before < given["w_down"].numel() * 2 / 2


class Adapted(torch.nn.Module):
    """PEFT's form: sums of stacked weights, lora_B with experts on its fastest axis."""

    def __init__(self, rank=16):
        super().__init__()
        tensors, _ = case(1, rank)
        self.router = torch.nn.Linear(D, E, bias=False)
        self.rank, self.frozen = rank, torch.nn.ParameterDict({n: tensors[n] for n in ("w_up", "w_down")}).requires_grad_(False)
        a = {n: tensors[n].flatten(0, 1) for n in ("up_a", "down_a")}
        b = {n: tensors[n].permute(1, 2, 0).flatten(1).contiguous() for n in ("up_b", "down_b")}
        self.learned = torch.nn.ParameterDict(a | b)

    def weight(self, name):
        a, b = self.learned[f"{name}_a"], self.learned[f"{name}_b"]
        lhs, rhs = b.view(-1, self.rank, E).permute(2, 0, 1), a.view(E, self.rank, -1)
        return torch.baddbmm(self.frozen[f"w_{name}"], lhs, rhs, alpha=0.5)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1, dtype=torch.float32).topk(K, dim=-1)
        ids = chosen.flatten()
        order = ids.argsort(stable=True)
        ends = torch.histc(ids.float(), bins=E, min=0, max=E - 1).cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(x[order // K], self.weight("up").mT, offs=ends).chunk(2, dim=-1)
        y = torch._grouped_mm(F.silu(gate) * up, self.weight("down").mT, offs=ends)
        y = y * weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(x).index_add_(0, order // K, y)


def assert_trains_as_in_eager_mode(layer):
    """A rewritten layer of adapters gives the outputs and the adapters' gradients that it gives as written, in bf16."""
    torch._dynamo.reset()
    x = torch.randn(900, D, device="cuda", dtype=torch.bfloat16)
    seen = moeblaze_ops.explain(layer, x)
    assert [c.became for c in seen.candidates] == ["expert_up(swiglu, rank 16) -> expert_down(rank 16)"]

    def train(run):
        layer.zero_grad()
        out = run(x)
        out.float().square().mean().backward()
        return [out.detach().double(), *(p.grad.double() for p in layer.learned.values())]

    for got, want in zip(train(torch.compile(layer, backend="moeblaze")), train(layer), strict=True):
        assert (got - want).norm() <= 0.02 * want.norm()


def test_a_rewritten_layer_trains_as_it_does_in_eager_mode(path):
    assert_trains_as_in_eager_mode(Adapted().to("cuda", torch.bfloat16))


def test_memory_of_layers_on_packed_weights():
    """The peak is packed weights, the weights of one layer as they are multiplied by, and x and h of all layers."""
    num_experts, width, hidden, T, layers = 64, 1024, 1024, 64, 3
    torch.manual_seed(0)
    shapes = (num_experts, 2 * hidden, width), (num_experts, width, hidden)
    packed = [[Int8(torch.randn(shape).bfloat16()).cuda() for shape in shapes] for _ in range(layers)]
    weights, experts = torch.randn(T, num_experts).softmax(-1).topk(K, dim=-1)
    weights, experts = weights.cuda(), experts.cuda()
    x = torch.randn(T, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def forward(x):
        for w_up, w_down in packed:
            x = x + moeblaze_ops.moe(x, weights, experts, w_up, w_down)
        return x

    one_layer = 3 * num_experts * width * hidden * 2
    activations = layers * T * (2 * width + 2 * K * hidden) * 2
    for run in (forward, torch.compile(forward, fullgraph=True)):
        run(x).sum().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(x).sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        # A codec in eager mode has its integers in bf16 beside the weight that it gives; a few rows more are at work at once.
        room = one_layer * 2 / 3 if run is forward else 0
        assert peak <= 1.05 * (one_layer + activations) + room + 2**23, peak / one_layer


class QuantisedAdapted(Adapted):
    """The sums are of factors and of what a codec gives."""

    def __init__(self, rank=16):
        super().__init__(rank)
        self.codecs = torch.nn.ModuleDict({name: Int8(w.detach().bfloat16()) for name, w in self.frozen.items()})
        del self.frozen

    def weight(self, name):
        a, b = self.learned[f"{name}_a"], self.learned[f"{name}_b"]
        lhs, rhs = b.view(-1, self.rank, E).permute(2, 0, 1), a.view(E, self.rank, -1)
        return torch.baddbmm(self.codecs[f"w_{name}"](), lhs, rhs, alpha=0.5)


def test_adapters_on_quantised_weights_train_as_in_eager_mode(path):
    layer = QuantisedAdapted().to("cuda")
    for parameter in layer.parameters():
        parameter.data = parameter.data.bfloat16()
    assert_trains_as_in_eager_mode(layer)


def test_several_adapters_at_once(path):
    tensors, experts = case(700, 16)
    given = {name: t.to("cuda", torch.float32 if name == "weights" else torch.bfloat16) for name, t in tensors.items()}
    pairs = {name: (given[f"{name}_a"], given[f"{name}_b"], 0.5) for name in ("up", "down")}
    twice = {f"lora_{name}": [(a[:, :5], b[..., :5], s), (a[:, 5:], b[..., 5:], s)] for name, (a, b, s) in pairs.items()}
    once = {f"lora_{name}": pair for name, pair in pairs.items()}
    arguments = (given["x"], given["weights"], experts.cuda(), given["w_up"], given["w_down"])
    got, want = moeblaze_ops.moe(*arguments, **twice), moeblaze_ops.moe(*arguments, **once)
    assert (got.float() - want.float()).norm() <= 0.01 * want.float().norm()
