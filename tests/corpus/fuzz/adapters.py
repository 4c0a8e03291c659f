"""Random layers with low-rank adapters on their experts: dA, dB, dx and the output against fp64, and changed twins.

    python tests/corpus/fuzz/adapters.py --seeds 0:500
    python tests/corpus/fuzz/adapters.py --seeds 0:5000 --through moe

A seed draws sizes (E, T, K, r), how the sum is written, in which order factors are packed, scales, activation, biases and dtype
(fp32, bf16, or fp32 under autocast). Half of the seeds change the layer in one place: factors of another expert, a factor read in
another order, the scale twice, dropped ranks. Either way the layer is compiled with rewriting and must have the numbers of the
same layer in eager mode in fp64, no worse than rounding can make it in its own dtype, whatever became of it. Through ``moe``
nothing is compiled: it takes the factors, as the twin reads them.

The rule. Eager mode in the case's dtype is one way to round, and it may be lucky. A pre-activation that is exactly -1.1e-3, of
terms that sum to 3.4 in absolute value, is behind relu's kink in one order of bf16 sums and before it in another one. A gradient
of rank one whose factor is a sum of 0.0014, of terms that sum to 0.117, is off by half of it. So where the error is more than
twice that of eager mode, rounding is drawn (``Rounded``): the layer in fp64 with each result off by at most half a unit in the
last place of the case's dtype. A case is wrong if its error is more than twice that of eager mode and of each of 64 draws.
Another function is wrong by this rule: the draws are of the one that is wanted.
"""

import argparse
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import moeblaze_ops
from tests.tools.rewrite_harness import compiled

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh}

SUMS = {
    "baddbmm": lambda w, b, a, s: torch.baddbmm(w, b, a, alpha=s),
    "bmm": lambda w, b, a, s: w + s * torch.bmm(b, a),
    "matmul": lambda w, b, a, s: (b @ a) * s + w,
    "einsum": lambda w, b, a, s: w + torch.einsum("eor,eri->eoi", b, a) * s,
    "scaled_factor": lambda w, b, a, s: w + (b * s) @ a,
    "add_with_alpha": lambda w, b, a, s: torch.add(w, b @ a, alpha=s),
}
"""W + s B A."""

PACKINGS = {
    "stacked": (lambda a: a, lambda b: b, lambda a: a, lambda b: b),
    "peft": (
        lambda a: a.flatten(0, 1),
        lambda b: b.permute(1, 2, 0).flatten(1),
        lambda a: a.unflatten(0, (SIZES["E"], -1)),
        lambda b: b.unflatten(1, (-1, SIZES["E"])).permute(2, 0, 1),
    ),
    "turned": (lambda a: a.mT, lambda b: b.mT, lambda a: a.mT, lambda b: b.mT),
    "ranks_first": (
        lambda a: a.transpose(0, 1),
        lambda b: b.permute(2, 0, 1),
        lambda a: a.transpose(0, 1),
        lambda b: b.permute(1, 2, 0),
    ),
}
"""How A [E, r, I] and B [E, O, r] are stored, and read again."""
SIZES: dict[str, int] = {}

TWINS = {
    "none": lambda a, b, s: (a, b, s),
    "other_expert_a": lambda a, b, s: (a.roll(1, 0), b, s),
    "other_expert_b": lambda a, b, s: (a, b.flip(0), s),
    "first_expert_for_all": lambda a, b, s: (a[:1].expand_as(a), b, s),
    "ranks_reversed": lambda a, b, s: (a, b.flip(2), s),
    "order_of_experts_and_ranks": lambda a, b, s: (a, b.permute(1, 2, 0).reshape(b.shape[1], *b.shape[::2]).permute(1, 0, 2), s),
    "scale_twice": lambda a, b, s: (a, b, s * s),
    "fewer_ranks": lambda a, b, s: (a[:, :-1], b[..., :-1], s),
    "detached": lambda a, b, s: (a.detach(), b, s),
    "factor_of_a_function": lambda a, b, s: (a.sin(), b, s),
}
"""What is read in place of A, B and the scale."""


@dataclass(frozen=True)
class Case:
    """What a seed draws."""

    E: int
    T: int
    K: int
    D: int
    H: int
    rank: int
    spelling: str
    packing: str
    twin: str
    rows: str
    activation: str
    gated: bool
    bias: bool
    scale: float
    dtype: str
    adapters: int


def case_of(seed: int) -> Case:
    rng = random.Random(seed)
    E = rng.randint(2, 5)
    return Case(
        E=E, T=rng.choice((1, 3, 8, 17)), K=rng.randint(1, min(E, 3)), D=rng.choice((6, 8, 12)), H=rng.choice((5, 8, 10)),
        rank=rng.choice((1, 1, 2, 3, 4)), spelling=rng.choice(list(SUMS)), packing=rng.choice(list(PACKINGS)),
        twin=rng.choice(list(TWINS)) if rng.random() < 0.5 else "none",
        rows=rng.choice(("masked", "selected")), activation=rng.choice(list(ACTIVATIONS)), gated=rng.random() < 0.6,
        bias=rng.random() < 0.3, scale=rng.choice((1.0, 2.0, 0.5, -0.25)), dtype=rng.choice(("fp32", "bf16", "autocast")),
        adapters=rng.choice((1, 1, 1, 2)),
    )  # fmt: skip


class Layer(nn.Module):
    """The layer of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        SIZES["E"] = case.E
        outputs = case.H * (1 + case.gated)
        self.router = nn.Linear(case.D, case.E, bias=False)
        self.w_up, self.w_down = _drawn(case.E, outputs, case.D, frozen=True), _drawn(case.E, case.D, case.H, frozen=True)
        self.b_up = _drawn(case.E, outputs) if case.bias else None
        self.b_down = _drawn(case.E, case.D) if case.bias else None
        pack_a, pack_b, *_ = PACKINGS[case.packing]
        self.factors = nn.ParameterDict()
        for i in range(case.adapters):
            for name, (rows, columns) in {"up": (outputs, case.D), "down": (case.D, case.H)}.items():
                self.factors[f"{name}_a{i}"] = nn.Parameter(pack_a(_drawn(case.E, case.rank, columns).data).contiguous())
                self.factors[f"{name}_b{i}"] = nn.Parameter(pack_b(_drawn(case.E, rows, case.rank).data).contiguous())

    def adapters(self, name: str) -> list[tuple[Tensor, Tensor, float]]:
        _, _, read_a, read_b = PACKINGS[self.case.packing]
        pairs = [(read_a(self.factors[f"{name}_a{i}"]), read_b(self.factors[f"{name}_b{i}"])) for i in range(self.case.adapters)]
        read = TWINS[self.case.twin if name == "up" else "none"]
        return [read(a, b, self.case.scale) for a, b in pairs]

    def weight(self, w: Tensor, name: str) -> Tensor:
        for a, b, scale in self.adapters(name):
            w = SUMS[self.case.spelling](w, b, a, scale)
        return w

    def through_moe(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.case.K, dim=-1)
        act = self.case.activation
        function = (lambda g, u: ACTIVATIONS[act](g) * u) if self.case.gated else ACTIVATIONS[act]
        lora = {"lora_up": self.adapters("up"), "lora_down": self.adapters("down")}
        if any(a.shape[1] == 0 for a, _, _ in lora["lora_up"]):
            del lora["lora_up"]  # the twin without its only rank
        biases = {"b_up": self.b_up, "b_down": self.b_down}
        weights = weights.to(x.dtype) if weights.dtype != torch.float32 else weights
        return moeblaze_ops.moe(x, weights, chosen, self.w_up, self.w_down, activation=function, **biases, **lora)

    def expert(self, rows: Tensor, w_up: Tensor, w_down: Tensor, e: int) -> Tensor:
        h = F.linear(rows, w_up[e], None if self.b_up is None else self.b_up[e])
        act = ACTIVATIONS[self.case.activation]
        a = act(h[:, : self.case.H]) * h[:, self.case.H :] if self.case.gated else act(h)
        return F.linear(a, w_down[e], None if self.b_down is None else self.b_down[e])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.case.K, dim=-1)
        w_up, w_down = self.weight(self.w_up, "up"), self.weight(self.w_down, "down")
        out = torch.zeros_like(x)
        for e in range(self.case.E):
            if self.case.rows == "masked":
                out = out + (weights * (chosen == e)).sum(-1, keepdim=True) * self.expert(x, w_up, w_down, e)
            else:
                token, k = torch.where(chosen == e)
                y = self.expert(x[token], w_up, w_down, e) * weights[token, k, None]
                out.index_add_(0, token, y.to(out.dtype))
        return out


def _drawn(*shape: int, frozen: bool = False) -> nn.Parameter:
    return nn.Parameter((torch.randn(shape) / shape[-1] ** 0.5).bfloat16().float(), requires_grad=not frozen)


def _step(layer: Layer, run, x: Tensor, dout: Tensor, chosen_dtype: torch.dtype | None) -> list[Tensor]:
    """The output and the gradients of the tokens, the factors and the biases."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if chosen_dtype else nullcontext():
        out = run(x)
    out.backward(dout.to(out.dtype))
    learned = [p for name, p in layer.named_parameters() if p.requires_grad and not name.startswith("router")]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in learned]
    return [tensor.detach().double() for tensor in (out, x.grad, *gradients)]


class Rounded(TorchDispatchMode):
    """Results of operators off by a random part of half a unit in the last place, from the first topk on: ids stay what they are.

    So are the operands of products of matrices, which stand for what is rounded within their sums.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps, self.is_routed = eps, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.is_routed and func.overloadpacket in PRODUCTS:
            args = tree_map_only(Tensor, lambda t: self._off(t.clone()), args)
        result = func(*args, **(kwargs or {}))
        self.is_routed = self.is_routed or func is torch.ops.aten.topk.default
        if not self.is_routed or func.is_view or func is torch.ops.aten.detach.default:
            return result
        return tree_map_only(Tensor, self._off, result)

    def _off(self, t: Tensor) -> Tensor:
        return t.mul_(1 + self.eps * (torch.rand_like(t) - 0.5)) if t.is_floating_point() else t


PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}
DRAWS = 64


def failure_of(case: Case, seed: int, through_moe: bool = False, wanted: str | None = None) -> tuple[str, str]:
    """What is wrong with the numbers, "" where nothing is, and what the layer became, with " by rounding" where eager mode alone
    does not explain them. ``wanted`` is the twin whose numbers are asked for, if not the case's own."""
    torch.manual_seed(seed)
    layer = Layer(case)
    low = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    # Nothing of the router is rounded differently: its logits are far apart.
    layer.router.weight.data = (torch.randn(case.E, case.D) * 2).bfloat16().float()
    x = torch.randn(case.T, case.D).bfloat16().float()
    dout = torch.randn(case.T, case.D).bfloat16().float()
    autocast = torch.bfloat16 if case.dtype == "autocast" else None
    layer.to(low)
    run, backend = (layer.through_moe, None) if through_moe else compiled(layer)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = _step(layer, run, x.to(low), dout.to(low), autocast)
    if wanted is not None:
        layer.case = replace(case, twin=wanted)
    eager = _step(layer, layer, x.to(low), dout.to(low), autocast)
    layer.double()
    exact = _step(layer, layer, x.double(), dout.double(), None)
    became = (", ".join(candidate.became for candidate in backend.rewritten) if backend else "moe with rank") or "left alone"
    eps = torch.finfo(torch.float32 if case.dtype == "fp32" else torch.bfloat16).eps
    errors, allowed = _errors(got, exact), _errors(eager, exact)
    draws = 0
    while (worst := _beyond(errors, allowed)) is not None and draws < DRAWS:
        with Rounded(eps):
            rounded = _step(layer, layer, x.double(), dout.double(), None)
        allowed = [max(pair) for pair in zip(allowed, _errors(rounded, exact), strict=True)]
        draws += 1
    if worst is not None:
        return f"tensor {worst}: {errors[worst]:.3g}, {allowed[worst]:.3g} by rounding", became
    return "", became + " by rounding" * (draws > 0)


def _errors(tensors: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((t - want).norm() / (want.norm() + 1e-3)) for t, want in zip(tensors, exact, strict=True)]


def _beyond(errors: list[float], allowed: list[float]) -> int | None:
    """The first tensor whose error rounding does not explain."""
    return next((i for i, (e, a) in enumerate(zip(errors, allowed, strict=True)) if e > 2 * a), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:500", help="first:last, the last one not included")
    parser.add_argument("--through", default="compiled", choices=("compiled", "moe"))
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split(":"))
    counts: Counter[str] = Counter()
    for seed in range(first, last):
        case = case_of(seed)
        failure, became = failure_of(case, seed, arguments.through == "moe")
        counts["factors" if "rank" in became else "left alone" if became == "left alone" else "computed weights"] += 1
        counts["explained by rounding that is drawn"] += became.endswith(" by rounding")
        if failure:
            counts["wrong"] += 1
            print(f"seed {seed}: {failure} ({became})\n  {case}", flush=True)
    print(f"seeds {first}:{last}: {dict(counts)}, wrong {counts['wrong']}")


if __name__ == "__main__":
    main()
