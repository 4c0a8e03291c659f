"""Experts with low-rank additions to their weights, in the ways people write them: W + s B A, and a product beside the base's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moeblaze_ops import config
from moeblaze_ops.lowering.rewrite.rewrite import rewrite_graph
from tests.corpus.zoo import catalogue  # noqa: F401
from tests.tools.rewrite_harness import check_against_eager, rewrite_of

pytestmark = pytest.mark.usefixtures("fp64")

grouped_mm = torch.ops.moe_zoo.grouped_mm_fallback
T, D, H, E, K, R = 24, 16, 20, 4, 2, 3


def parameter(*shape, frozen=False):
    return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5, requires_grad=not frozen)


class Stacked(nn.Module):
    """Stacked frozen weights with trained factors; ``add`` is what makes the weight of it all."""

    def __init__(self, add, rows="masked", s=2.0):
        super().__init__()
        self.add, self.rows, self.s = add, rows, s
        self.router = nn.Linear(D, E, bias=False)
        self.w_up, self.w_down = parameter(E, 2 * H, D, frozen=True), parameter(E, D, H, frozen=True)
        self.up_a, self.up_b = parameter(E, R, D), parameter(E, 2 * H, R)
        self.down_a, self.down_b = parameter(E, R, H), parameter(E, D, R)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        w_up = self.add(self.w_up, self.up_a, self.up_b, self.s)
        w_down = self.add(self.w_down, self.down_a, self.down_b, self.s)
        if self.rows == "grouped":
            return grouped(x, weights, chosen, w_up, w_down)
        out = torch.zeros_like(x)
        for e in range(E):
            gate, up = F.linear(x, w_up[e]).chunk(2, dim=-1)
            out = out + (weights * (chosen == e)).sum(-1, keepdim=True) * F.linear(F.silu(gate) * up, w_down[e])
        return out


def grouped(x, weights, chosen, w_up, w_down):
    ids = chosen.flatten()
    order = ids.argsort()
    ends = torch.bincount(ids, minlength=E).cumsum(0).to(torch.int32)
    rows = x[order // K]
    gate, up = grouped_mm(rows, w_up.transpose(1, 2), ends).chunk(2, dim=-1)
    y = grouped_mm(F.silu(gate) * up, w_down.transpose(1, 2), ends)
    return torch.zeros_like(x).index_add_(0, order // K, y * weights.flatten()[order, None])


ADDITIONS = {
    "bmm": lambda w, a, b, s: w + s * torch.bmm(b, a),
    "matmul_scaled_behind": lambda w, a, b, s: w + (b @ a) * s,
    "scaled_factor": lambda w, a, b, s: w + (s * b) @ a,
    "baddbmm": lambda w, a, b, s: torch.baddbmm(w, b, a, alpha=s),
    "baddbmm_without_scale": lambda w, a, b, s: torch.baddbmm(w, b, a),
    "einsum": lambda w, a, b, s: w + torch.einsum("eor,eri->eoi", b, a) * s,
    "add_with_alpha": lambda w, a, b, s: torch.add(w, b @ a, alpha=s),
    "from_the_right": lambda w, a, b, s: s * (b @ a) + w,
}


BECAME = "expert_up(swiglu, rank 3) -> expert_down(rank 3)"


def with_factors(backend):
    """Of each projection, whether the operator takes factors."""
    nodes = [node for module in backend.modules for node in module.graph.nodes]
    return {str(n.target).split(".")[1]: len(n.args) > 10 for n in nodes if str(n.target).startswith("moeblaze.expert_")}


@pytest.mark.parametrize(("spelling", "rows"), [
    *((spelling, ("masked", "grouped")[number % 2]) for number, spelling in enumerate(ADDITIONS)), ("baddbmm", "masked"),
])  # fmt: skip
def test_sums_of_weights_and_products(spelling, rows):
    backend = check_against_eager(Stacked(ADDITIONS[spelling], rows), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [BECAME]
    assert not {"baddbmm", "einsum", "bmm", "matmul", "add"} & set(backend.operators())


class PeftLike(Stacked):
    """Factors as PEFT stores them for stacked parameters: lora_A expert-slowest, lora_B expert-fastest."""

    turn = staticmethod(lambda b: b.view(-1, R, E).permute(2, 0, 1))

    def __init__(self):
        super().__init__(lambda w, a, b, s: torch.baddbmm(w, self.turn(b), a.view(E, R, -1), alpha=s))
        self.up_a, self.up_b = parameter(E * R, D), parameter(2 * H, E * R)
        self.down_a, self.down_b = parameter(E * R, H), parameter(D, E * R)


def test_factors_with_experts_on_the_fastest_axis():
    backend = check_against_eager(PeftLike(), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [BECAME]


TURNS = {
    "experts_swapped": lambda b: b.view(-1, E, R).permute(1, 0, 2),
    "other_expert": lambda b: b.view(-1, R, E).permute(2, 0, 1).roll(1, 0),
    "ranks_reversed": lambda b: b.view(-1, R, E).permute(2, 0, 1).flip(2),
    "one_expert_for_all": lambda b: b.view(-1, R, E).permute(2, 0, 1)[:1].expand(E, -1, -1),
}


@pytest.mark.parametrize("turn", TURNS)
def test_other_orders_of_the_factors_are_equal_or_left_alone(turn, monkeypatch):
    """A factor that is read in another order is another function, whatever becomes of it."""
    monkeypatch.setattr(PeftLike, "turn", staticmethod(TURNS[turn]))
    backend = check_against_eager(PeftLike(), torch.randn(T, D))
    assert [c.became for c in backend.candidates] != [] or backend.reasons


MORE = {
    "scale_twice": (lambda w, a, b, s: w + s * (s * b) @ a, True),
    "weights_scaled": (lambda w, a, b, s: s * (w + b @ a), False),
    "weights_multiplied": (lambda w, a, b, s: w * (1 + b @ a), False),
    "subtracted_from_a_sum": (lambda w, a, b, s: (w + b @ a) - s * (b @ a), False),
    "scaled_by_rows": (lambda w, a, b, s: w + (b @ a) * w[0, :, :1], False),
    "normed": (lambda w, a, b, s: (w + b @ a) / (w + b @ a).norm(dim=2, keepdim=True), False),
    "square_factor": (lambda w, a, b, s: w + b @ a.square(), True),
    "without_gradient": (lambda w, a, b, s: w + s * (b.detach() @ a), True),
    "subtracted": (lambda w, a, b, s: w - b @ a, False),
}


@pytest.mark.parametrize("change", MORE)
def test_other_functions_of_weights_and_factors(change):
    """DoRA's norm, products with another function of a factor and the like: rewritten as what they are, or left alone."""
    add, splits = MORE[change]
    backend = check_against_eager(Stacked(add), torch.randn(T, D))
    assert ([c.became for c in backend.rewritten] == [BECAME]) == splits


ACTIVE = {
    "one_after_another": lambda w, a, b, s: w + b @ a + s * (b * b) @ a.tanh(),
    "baddbmm_twice": lambda w, a, b, s: torch.baddbmm(torch.baddbmm(w, b, a, alpha=s), b.flip(0), a.flip(0), alpha=0.5),
    "summed_before": lambda w, a, b, s: w + s * (b @ a + 0.5 * (b.sin() @ a)),
}


@pytest.mark.parametrize("spelling", ACTIVE)
def test_several_active_adapters(spelling):
    """Their ranks stand beside one another."""
    backend = check_against_eager(Stacked(ACTIVE[spelling]), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [f"expert_up(swiglu, rank {2 * R}) -> expert_down(rank {2 * R})"]


@pytest.mark.parametrize("spelling", ["bmm", "baddbmm", "scaled_factor"])
def test_one_rank(spelling, monkeypatch):
    monkeypatch.setitem(globals(), "R", 1)
    backend = check_against_eager(Stacked(ADDITIONS[spelling]), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == ["expert_up(swiglu, rank 1) -> expert_down(rank 1)"]


class OwnScales(Stacked):
    """A number for each expert."""

    def __init__(self, where=lambda s, delta: s.view(E, 1, 1) * delta):
        super().__init__(lambda w, a, b, s: w + where(self.scales, b @ a))
        self.scales = parameter(E)


def test_a_scale_for_each_expert():
    backend = check_against_eager(OwnScales(), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [BECAME]


@pytest.mark.parametrize("where", [lambda s, d: s.flip(0).view(E, 1, 1) * d, lambda s, d: s[1] * d, lambda s, d: s[3:] * d])
def test_scales_of_other_experts_are_equal_or_left_alone(where):
    check_against_eager(OwnScales(where), torch.randn(T, D))


class LoRALinear(nn.Module):
    """A linear layer and its adapter, as PEFT puts them on each expert's: the products are added."""

    def __init__(self, inputs, outputs, bias=False, dropout=0.0, rank=R):
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        nn.init.normal_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(self.dropout(x))) * 2.0


class Expert(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.gate_proj, self.up_proj = LoRALinear(D, H, **options), LoRALinear(D, H, **options)
        self.down_proj = LoRALinear(H, D, **options)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Listed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(Expert(**options) for _ in range(E))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, k = torch.where(chosen == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, k, None])
        return out


@pytest.mark.parametrize("bias", [False, True])
def test_products_beside_those_of_each_experts_linear_layers(bias):
    """Gate and up have an A each."""
    backend = check_against_eager(Listed(bias=bias), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [BECAME]
    assert "linear" not in set(backend.operators()) - {"linear"} and backend.operators().count("linear") == 1  # the router


def test_dropout_that_drops_nothing():
    backend = check_against_eager(Listed(dropout=0.5).eval(), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [BECAME]


def test_dropout_that_drops_is_left_alone():
    backend = rewrite_of(Listed(dropout=0.5).train(), torch.randn(T, D))
    assert not backend.rewritten and backend.reasons == ["NOT_TWO_PROJECTIONS"]


class OnSome(Listed):
    def __init__(self, changed):
        super().__init__()
        changed(self.experts)


CHANGES = {
    "other_experts_adapter": lambda experts: setattr(experts[0].up_proj, "lora_A", experts[1].up_proj.lora_A),
    "rank_of_its_own": lambda experts: setattr(experts[0], "up_proj", LoRALinear(D, H, rank=R + 1)),
    "none_on_one_expert": lambda experts: setattr(experts[0], "up_proj", nn.Linear(D, H, bias=False)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_experts_with_other_adapters_are_equal_or_left_alone(change):
    check_against_eager(OnSome(CHANGES[change]), torch.randn(T, D))


class Split(Stacked):
    """Stacked weights, and the low-rank product beside theirs."""

    def __init__(self, change=None):
        super().__init__(None)
        self.change = change or (lambda x: x)

    def project(self, x, w, a, b):
        return F.linear(x, w) + self.s * F.linear(F.linear(self.change(x), a), b)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            gate, up = self.project(x, self.w_up[e], self.up_a[e], self.up_b[e]).chunk(2, dim=-1)
            y = self.project(F.silu(gate) * up, self.w_down[e], self.down_a[e], self.down_b[e])
            out = out + (weights * (chosen == e)).sum(-1, keepdim=True) * y
        return out


def test_products_beside_those_of_stacked_weights():
    backend = check_against_eager(Split(), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [BECAME]


@pytest.mark.parametrize("change", [torch.sin, lambda x: x.flip(0), lambda x: 2 * x])
def test_products_of_something_else_are_left_alone(change):
    backend = check_against_eager(Split(change), torch.randn(T, D))
    assert not backend.rewritten


@pytest.mark.parametrize("size", ["outputs", "one"])
def test_products_with_numbers_that_are_passed_in(size, monkeypatch):
    """One number is a scale of the factors; one for each feature of the output is not, of however many inputs."""
    monkeypatch.setitem(globals(), "H", D)

    class Scaled(Split):
        def __init__(self):
            super().__init__()
            self.scales = parameter(2 * H if size == "outputs" else 1)

        def project(self, x, w, a, b):
            return F.linear(x, w) + self.scales[: len(w)] * F.linear(F.linear(x, a), b)

    backend = check_against_eager(Scaled(), torch.randn(T, D))
    if size == "outputs":
        assert not any("rank" in c.became for c in backend.rewritten)


class Halves(Split):
    """A packed up projection with an adapter of its own for each half, which ``join`` adds to the halves."""

    def __init__(self, join, bias=False):
        super().__init__()
        self.join, self.bias = join, parameter(E, 2 * H) if bias else None
        self.gate_a, self.gate_b, self.half_a, self.half_b = (parameter(E, *sizes) for sizes in ((R, D), (H, R)) * 2)
        del self.up_a, self.up_b

    def added(self, x, a, b):
        return self.s * F.linear(F.linear(x, a), b)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            h = F.linear(x, self.w_up[e], None if self.bias is None else self.bias[e])
            added = self.added(x, self.gate_a[e], self.gate_b[e]), self.added(x, self.half_a[e], self.half_b[e])
            gate, up = self.join(h, *added)
            y = self.project(F.silu(gate) * up, self.w_down[e], self.down_a[e], self.down_b[e])
            out = out + (weights * (chosen == e)).sum(-1, keepdim=True) * y
        return out


HALVES = {
    "chunk": lambda h, a, b: [x + y for x, y in zip(h.chunk(2, dim=-1), (a, b), strict=True)],
    "interleaved": lambda h, a, b: (h[:, ::2] + a, h[:, 1::2] + b),
    "of_one_alone": lambda h, a, b: (h[:, :H], h[:, H:] + b),
    "joined": lambda h, a, b: (h + torch.cat((a, b), dim=-1)).chunk(2, dim=-1),
    "swapped": lambda h, a, b: (h[:, H:] + a, h[:, :H] + b),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["chunk", "interleaved", "of_one_alone", "joined", "swapped"])
def test_adapters_of_halves(name, bias):
    backend = check_against_eager(Halves(HALVES[name], bias), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [BECAME]


NO_HALVES = {
    "activated": lambda h, a, b: (F.silu(h)[:, :H] + a, h[:, H:] + b),
    "of_rows": lambda h, a, b: (h.flip(0)[:, :H] + a, h[:, H:] + b),
    "of_more": lambda h, a, b: (h[:, :H] + a + h[:, H:], h[:, H:] + b),
    "turned": lambda h, a, b: (h + torch.cat((a, b), dim=-1).flip(-1)).chunk(2, dim=-1),
    "of_other_rows": lambda h, a, b: (h + torch.cat((a, b), dim=-1).roll(1, 0)).chunk(2, dim=-1),
}


@pytest.mark.parametrize("name", NO_HALVES)
def test_other_sums_of_halves_are_equal_or_left_alone(name):
    x, module, itself = torch.randn(T, D), Halves(NO_HALVES[name]), Halves(HALVES["chunk"])
    itself.load_state_dict(module.state_dict())
    assert not torch.allclose(module(x), itself(x), rtol=1e-3)
    backend = check_against_eager(module, x)
    assert backend.rewritten or backend.reasons


class Dense(Stacked):
    """All experts on all tokens, by products with a batch of weights; ``base`` is what of the weights is taken."""

    def __init__(self, base=lambda w: w):
        super().__init__(None)
        self.base = base

    def project(self, x, w, a, b):
        return x @ self.base(w).mT + self.s * ((x @ a.mT) @ b.mT)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        gate, up = self.project(x.expand(E, -1, -1), self.w_up, self.up_a, self.up_b).chunk(2, dim=-1)
        y = self.project(F.silu(gate) * up, self.w_down, self.down_a, self.down_b)
        scores = torch.zeros(len(x), E).scatter(1, chosen, weights)
        return (y * scores.T[..., None]).sum(0)


def test_products_of_all_experts_at_once():
    backend = check_against_eager(Dense(), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [BECAME]


def test_a_base_that_all_experts_share_is_right():
    check_against_eager(Dense(lambda w: w[:1]), torch.randn(T, D))


class SplitGroups(Stacked):
    def project(self, rows, ends, w, a, b):
        return grouped_mm(rows, w.mT, ends) + self.s * grouped_mm(grouped_mm(rows, a.mT, ends), b.mT, ends)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
        ids = chosen.flatten()
        order = ids.argsort()
        ends = torch.bincount(ids, minlength=E).cumsum(0).to(torch.int32)
        gate, up = self.project(x[order // K], ends, self.w_up, self.up_a, self.up_b).chunk(2, dim=-1)
        y = self.project(F.silu(gate) * up, ends, self.w_down, self.down_a, self.down_b)
        return torch.zeros_like(x).index_add_(0, order // K, y * weights.flatten()[order, None])


def test_products_of_row_groups_beside_each_other():
    backend = check_against_eager(SplitGroups(None), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [BECAME]


def test_with_the_input_alone_kept_the_up_projection_is_repeated(monkeypatch):
    monkeypatch.setattr(config, "keep", "input")
    backend = check_against_eager(Stacked(ADDITIONS["bmm"]), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [f"{BECAME}, up again in backward"]


def test_a_sum_that_someone_else_reads_stays_for_them():
    """As PEFT's do: its cache of parametrizations holds them until the layer is done."""

    class Read(Stacked):
        def forward(self, x):
            return super().forward(x), self.add(self.w_up, self.up_a, self.up_b, self.s).square().mean()

    backend = check_against_eager(Read(ADDITIONS["bmm"]), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == [BECAME]
    assert "bmm" in backend.operators()


def test_an_activation_that_is_not_fused():
    class Unfused(Stacked):
        def forward(self, x):
            weights, chosen = self.router(x).softmax(-1).topk(K, dim=-1)
            w_up = self.add(self.w_up, self.up_a, self.up_b, self.s)
            w_down = self.add(self.w_down, self.down_a, self.down_b, self.s)
            out = torch.zeros_like(x)
            for e in range(E):
                y = F.linear(F.mish(F.linear(x, w_up[e])[:, :H]), w_down[e])
                out = out + (weights * (chosen == e)).sum(-1, keepdim=True) * y
            return out

    backend = check_against_eager(Unfused(ADDITIONS["bmm"]), torch.randn(T, D))
    assert with_factors(backend)["expert_down"] or not backend.rewritten


def test_adapters_on_one_projection_alone():
    class UpOnly(Stacked):
        def forward(self, x):
            kept = self.add  # a name of its own: Dynamo 2.15 refuses a lambda that is made before what it refers to
            self.add = lambda w, a, b, s: kept(w, a, b, s) if w is self.w_up else w
            try:
                return super().forward(x)
            finally:
                self.add = kept

    backend = check_against_eager(UpOnly(ADDITIONS["bmm"]), torch.randn(T, D))
    assert [c.became for c in backend.rewritten] == ["expert_up(swiglu, rank 3) -> expert_down"]


class Sizes(TorchDispatchMode):
    """How many elements each result of an operator has that is no view of an argument."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.made += [t.numel() for t in tensors if t.untyped_storage()._cdata not in given]
        return result


@pytest.mark.parametrize("rewrites", [True, False])
def test_nothing_of_the_size_of_the_weights_is_allocated(rewrites, monkeypatch):
    """With wide experts and few tokens, in forward and in backward."""
    monkeypatch.setitem(globals(), "D", 64)
    wide = 8 * H
    layer, x, sizes = Stacked(ADDITIONS["baddbmm"]), torch.randn(3, D, requires_grad=True), Sizes()
    layer.w_up, layer.w_down = parameter(E, 2 * wide, D, frozen=True), parameter(E, D, wide, frozen=True)
    layer.up_b, layer.down_a = parameter(E, 2 * wide, R), parameter(E, R, wide)

    def backend(gm, example_inputs):
        def run(*args):
            with sizes:
                return gm(*args)

        if rewrites:
            assert [c.became for c in rewrite_graph(gm).candidates] == [BECAME]
        return run

    out = torch.compile(layer, backend=backend, fullgraph=True)(x)
    with sizes:
        out.sum().backward()
    assert layer.up_a.grad is not None and layer.w_up.grad is None
    assert (max(sizes.made) < layer.w_down.numel()) == rewrites
