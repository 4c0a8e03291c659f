"""Random Mixture-of-Experts layers as source text: a router, experts in some storage, and a way to combine them.

Every draw is a program that the rewrite supports. Names in the text: ``x`` ``[T, D]``, ``logits`` and ``scores``
``[T, E]``, ``weights`` and ``ids`` ``[T, K]``, ``g`` and ``u`` the gate and up rows, ``a`` the hidden rows, ``y`` the
expert's output.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

SHAPES = ((5,), (7,), (12,), (1,), (2, 3), (3, 4))
GATED = {
    "silu": "F.silu(g) * u",
    "silu_after": "u * F.silu(g)",
    "silu_sigmoid": "g * torch.sigmoid(g) * u",
    "silu_exp": "g / (1 + torch.exp(-g)) * u",
    "gelu": "F.gelu(g) * u",
    "gelu_tanh": "F.gelu(g, approximate='tanh') * u",
    "gelu_erf": "0.5 * g * (1 + torch.erf(g / 2**0.5)) * u",
    "relu": "torch.relu(g) * u",
    "clamped": "(u.clamp(-7.0, 7.0) + 1) * g.clamp(max=7.0) * torch.sigmoid(1.702 * g.clamp(max=7.0))",
    "bilinear": "torch.sigmoid(g) * u",
    "tanh": "torch.tanh(g) * u",
}
UNGATED = {
    "silu": "F.silu(g)",
    "silu_sigmoid": "g * g.sigmoid()",
    "gelu": "F.gelu(g)",
    "gelu_hand": "0.5 * g * (1 + torch.tanh(0.7978845608028654 * (g + 0.044715 * g**3)))",
    "relu": "F.relu(g)",
    "relu_clamp": "g.clamp(min=0)",
    "relu2": "F.relu(g).square()",
    "relu2_pow": "torch.relu(g) ** 2",
    "tanh": "g.tanh()",
    "softplus": "F.softplus(g)",
}
FAMILIES = ("masked", "stack", "slots", "select", "sorted", "gathered", "dense")
_PRODUCTS = (
    "def mm(rows, weight, offs):",
    "    if rows.dtype == torch.bfloat16:",
    "        return torch._grouped_mm(rows, weight, offs=offs)",
    "    return grouped_mm_fallback(rows, weight, offs)", "", "",
)  # fmt: skip
DTYPES = ("float64", "float64", "float32", "float32", "float32", "bfloat16")


@dataclass
class Layer:
    """One drawn program. ``parameters`` are (name, shape); ``body`` are the lines of ``forward``."""

    family: str
    storage: str
    dtype: str
    shape: tuple[int, ...]
    E: int
    K: int
    D: int
    H: int
    gated: bool
    activation: str
    bias: tuple[bool, bool]
    linear: tuple[bool, bool]  # stored as nn.Linear does, [out, in]
    parameters: list[tuple[str, str]] = field(default_factory=list)
    expert: list[str] = field(default_factory=list)  # body of ``expert(self, e, x)``
    body: list[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        """A module that defines ``MoE`` and ``inputs``."""
        made = [f"self.{name} = nn.Parameter(torch.randn({shape}) * 0.4)" for name, shape in self.parameters]
        if self.storage == "list":
            up, down = (", bias=True" if b else ", bias=False" for b in self.bias)
            kinds = [("up", f"D, H{up}"), ("down", f"H, D{down}"), *([("gate", f"D, H{up}")] if self.gated else [])]
            parts = ", ".join(f"{name}=nn.Linear({sizes})" for name, sizes in kinds)
            made.append(f"self.experts = nn.ModuleList(nn.ModuleDict(dict({parts})) for _ in range(E))")
        method = ["", "    def expert(self, e, x):", *_indented(self.expert, 2)] if self.expert else []
        lines = [
            "import torch", "import torch.nn.functional as F", "from torch import nn",
            "from tests.moe_zoo import grouped_mm_fallback", "",
            f"T, E, K, D, H = {_product(self.shape)}, {self.E}, {self.K}, {self.D}, {self.H}", "", "",
            *(_PRODUCTS if self.family == "sorted" else ()),
            "class MoE(nn.Module):", "    def __init__(self):", "        super().__init__()",
            *_indented(made, 2), *method, "", "    def forward(self, x):", *_indented(self.body, 2), "", "",
            "def inputs():", f"    return torch.randn({', '.join(map(str, (*self.shape, self.D)))})", "",
        ]  # fmt: skip
        return "\n".join(lines)


def _indented(lines: list[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]


def _product(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 1 else shape[0] * shape[1]


def draw(rng: random.Random) -> Layer:
    """A layer of the supported grammar."""
    E = rng.choice((2, 3, 3, 4, 4, 5))
    family = rng.choice(FAMILIES)
    storages = ("list", "split", "packed", "interleaved", "flat")
    storage = rng.choice(storages)
    gated = storage in ("packed", "interleaved") or rng.random() < 0.7
    bias = (False, False) if storage == "flat" else rng.choice(((False, False),) * 3 + ((True, True), (True, False), (False, True)))
    layer = Layer(
        family, storage, rng.choice(DTYPES), rng.choice(SHAPES), E, rng.randint(1, min(3, E)), rng.choice((8, 16)),
        rng.choice((8, 24)), gated, rng.choice(sorted(GATED if gated else UNGATED)), bias,
        (rng.random() < 0.5, rng.random() < 0.5),
    )  # fmt: skip
    if storage in ("list", "flat"):
        layer.linear = (True, storage == "list")
    _declare(layer, rng)
    before, after = _surroundings(layer, rng)
    combine = {
        "masked": _masked, "stack": _stack, "slots": _slots, "select": _select, "sorted": _sorted,
        "gathered": _gathered, "dense": _dense,
    }[family]  # fmt: skip
    layer.body = [*before, *_router(layer, rng), *combine(layer, rng), *after]
    return layer


def _declare(layer: Layer, rng: random.Random) -> None:
    up, down = ("H, D" if layer.linear[0] else "D, H"), ("D, H" if layer.linear[1] else "H, D")
    names = ["up", *(["gate"] if layer.gated else [])]
    add = layer.parameters.append
    add(("w_router", "E, D"))
    if layer.storage == "list":
        return
    if layer.storage in ("split", "flat"):
        for name in names:
            add((f"w_{name}", "E * H, D" if layer.storage == "flat" else f"E, {up}"))
            if layer.bias[0]:
                add((f"b_{name}", "E, H"))
        add(("w_down", "E * H, D" if layer.storage == "flat" else f"E, {down}"))
    else:
        add(("w_up", "E, 2 * H, D" if layer.linear[0] else "E, D, 2 * H"))
        if layer.bias[0]:
            add(("b_up", "E, 2 * H"))
        add(("w_down", f"E, {down}"))
    if layer.bias[1]:
        add(("b_down", "E, D"))


def _surroundings(layer: Layer, rng: random.Random) -> tuple[list[str], list[str]]:
    before, after = [], []
    residual = rng.random()
    if residual < 0.25:
        before += ["residual = x", "x = F.layer_norm(x, (D,))"]
    elif residual < 0.4:
        before += ["x = x * 1.25"]
    if len(layer.shape) == 2:
        before += ["shape = x.shape", rng.choice(("x = x.view(-1, D)", "x = x.reshape(-1, D)", "x = x.flatten(0, 1)"))]
    if rng.random() < 0.2:
        layer.parameters.append(("w_shared", "D, D"))
        after += ["out = out + F.silu(x @ self.w_shared)"]
    if len(layer.shape) == 2:
        after += [rng.choice(("out = out.view(shape)", "out = out.reshape(shape)"))]
    if residual < 0.25:
        after += [rng.choice(("out = residual + out", "out = out + residual"))]
    return before, [*after, "return out"]


def _router(layer: Layer, rng: random.Random) -> list[str]:
    lines = [rng.choice(("logits = F.linear(x, self.w_router)", "logits = x @ self.w_router.t()"))]
    wide = rng.choice(("float32", "")) if layer.dtype != "float64" else rng.choice(("float32", "", ""))
    dtype = f", dtype=torch.{wide}" if wide else ""
    kind = rng.choice(("softmax", "softmax", "softmax_topk", "sigmoid", "gather", "biased", "max" if layer.K == 1 else "softmax"))
    score = rng.choice((f"F.softmax(logits, dim=-1{dtype})", f"logits.softmax(-1{dtype})"))
    if kind == "sigmoid" or (kind == "biased" and rng.random() < 0.7):
        score = "logits.float().sigmoid()" if wide else "torch.sigmoid(logits)"
    if kind == "softmax_topk":
        lines += ["values, ids = torch.topk(logits, K, dim=-1)", f"weights = F.softmax(values, dim=-1{dtype})"]
    else:
        lines += [f"probs = {score}"]
    if kind in ("softmax", "sigmoid"):
        lines += [rng.choice(("weights, ids = torch.topk(probs, K, dim=-1)", "weights, ids = probs.topk(K)"))]
    elif kind == "gather":
        lines += ["ids = torch.topk(probs, K, dim=-1).indices", "weights = probs.gather(-1, ids)"]
    elif kind == "biased":
        layer.parameters.append(("b_router", "E"))
        lines += ["_, ids = torch.topk(probs + self.b_router, K, dim=-1)", "weights = torch.gather(probs, -1, ids)"]
    elif kind == "max":
        lines += ["weights, ids = probs.max(dim=-1, keepdim=True)"]
    lines += rng.choice((
        [], [], ["weights = weights / weights.sum(-1, keepdim=True)"], ["weights /= weights.sum(dim=-1, keepdim=True)"],
        ["weights = weights / (weights.sum(-1, keepdim=True) + 1e-9)"],
    ))  # fmt: skip
    lines += rng.choice(([], [], ["weights = weights * 2.5"], ["weights.mul_(2.5)"], ["weights *= 1.5"]))
    if wide or rng.random() < 0.2:
        lines += ["weights = weights.to(x.dtype)"]
    return lines


def _stored(layer: Layer, name: str) -> tuple[str, bool]:
    """Text of a weight as ``[E, a, b]``, and whether that is ``[E, out, in]``."""
    if layer.storage == "list":
        return f"torch.stack([m['{name}'].weight for m in self.experts])", True
    if layer.storage == "flat":
        return f"self.w_{name}.view(E, H, D)", name != "down"
    return f"self.w_{name}", layer.linear[name == "down"]


def _bias(layer: Layer, name: str, index: str) -> str:
    """`` + bias`` at an index text such as ``[e]``, or nothing."""
    if not layer.bias[name == "down"]:
        return ""
    stored = f"torch.stack([m['{name}'].bias for m in self.experts])" if layer.storage == "list" else f"self.b_{name}"
    return f" + {stored}{index}"


def _mlp(layer: Layer, rng: random.Random, rows: str, product: Callable[[str, str], str], scale: str = "") -> list[str]:
    """Lines from ``rows`` to ``y``; ``product(rows, name)`` is the text of one projection."""
    if layer.storage in ("packed", "interleaved"):
        halves = ["g, u = h.chunk(2, dim=-1)", "g, u = h[..., :H], h[..., H:]", "g, u = h.split(H, dim=-1)"]
        if layer.storage == "interleaved":
            halves = ["g, u = h[..., ::2], h[..., 1::2]", "g, u = h.unflatten(-1, (H, 2)).unbind(-1)"]
        lines = [f"h = {product(rows, 'up')}", rng.choice(halves)]
    elif layer.gated:
        lines = [f"g = {product(rows, 'gate')}", f"u = {product(rows, 'up')}"]
    else:
        lines = [f"g = {product(rows, 'up')}"]
    activation = (GATED if layer.gated else UNGATED)[layer.activation]
    if scale:
        activation = f"({activation}) * {scale}"
    return [*lines, f"a = {activation}", f"y = {product('a', 'down')}"]


def _expert_method(layer: Layer, rng: random.Random) -> None:
    """``expert(self, e, x)``: expert ``e`` on some rows."""
    slices = rng.random() < 0.5

    def product(rows: str, name: str) -> str:
        if layer.storage == "list":
            return f"self.experts[e]['{name}']({rows})"
        tensor, linear = _stored(layer, name)
        weight = f"self.w_{name}[e * H : (e + 1) * H]" if layer.storage == "flat" and slices else f"{tensor}[e]"
        if linear and layer.bias[name == "down"] and rng.random() < 0.5:
            return f"F.linear({rows}, {weight}, self.b_{name}[e])"
        text = rng.choice((f"F.linear({rows}, {weight})", f"{rows} @ {weight}.t()")) if linear else f"{rows} @ {weight}"
        return text + _bias(layer, name, "[e]")

    layer.expert = [*_mlp(layer, rng, "x", product), "return y"]


def _scores(layer: Layer, rng: random.Random) -> list[str]:
    """Lines that make ``scores`` ``[T, E]`` of weights and ids."""
    return rng.choice((
        ["scores = torch.zeros(T, E, dtype=weights.dtype).scatter(1, ids, weights)"],
        ["scores = torch.zeros_like(logits, dtype=weights.dtype).scatter_(-1, ids, weights)"],
        ["scores = weights.new_zeros(T, E).scatter_add(1, ids, weights)"],
        ["mask = F.one_hot(ids, E).to(weights.dtype)", "scores = (mask * weights.unsqueeze(-1)).sum(1)"],
        ["scores = torch.einsum('tk,tke->te', weights, F.one_hot(ids, E).to(weights.dtype))"],
        ["mask = ids.unsqueeze(-1) == torch.arange(E)", "scores = (weights[:, :, None] * mask).sum(dim=1)"],
    ))  # fmt: skip


def _share(layer: Layer, rng: random.Random) -> tuple[list[str], str]:
    """How much of expert ``e`` a token gets, ``[T, 1]``."""
    if rng.random() < 0.4:
        return _scores(layer, rng), rng.choice(("scores[:, e : e + 1]", "scores[:, e, None]", "scores[:, e].unsqueeze(-1)"))
    return [], rng.choice((
        "(weights * (ids == e)).sum(-1, keepdim=True)",
        "torch.where(ids == e, weights, 0.0).sum(dim=-1, keepdim=True)",
        "weights.masked_fill(ids != e, 0).sum(-1)[:, None]",
        "((ids == e).to(weights.dtype) * weights).sum(1).unsqueeze(-1)",
    ))  # fmt: skip


def _fresh(rng: random.Random) -> str:
    return "out = " + rng.choice(("torch.zeros_like(x)", "x.new_zeros(x.shape)", "torch.zeros(T, D, dtype=x.dtype)"))


def _masked(layer: Layer, rng: random.Random) -> list[str]:
    _expert_method(layer, rng)
    lines, share = _share(layer, rng)
    step = rng.choice((
        "out = out + y * s", "out = y * s + out", "out += s * y", "out.add_(y * s)", "out = torch.add(out, y.mul(s))",
        "out = torch.addcmul(out, y, s)",
    ))  # fmt: skip
    return [*lines, _fresh(rng), "for e in range(E):", f"    s = {share}", "    y = self.expert(e, x)", f"    {step}"]


def _stack(layer: Layer, rng: random.Random) -> list[str]:
    _expert_method(layer, rng)
    if rng.random() < 0.3:
        lines, share = _share(layer, rng)
        total = rng.choice(("sum(parts)", "torch.stack(parts).sum(0)", "torch.stack(parts, dim=1).sum(1)"))
        return [*lines, "parts = []", "for e in range(E):", f"    parts.append(self.expert(e, x) * {share})", f"out = {total}"]
    return [*_scores(layer, rng), "parts = [self.expert(e, x) for e in range(E)]", rng.choice((
        "out = (torch.stack(parts, dim=1) * scores[..., None]).sum(1)",
        "out = (torch.stack(parts) * scores.t().unsqueeze(-1)).sum(dim=0)",
        "out = torch.einsum('te,etd->td', scores, torch.stack(parts))",
        "out = torch.einsum('ted,te->td', torch.stack(parts, 1), scores)",
        "out = torch.bmm(scores.unsqueeze(1), torch.stack(parts, 1)).squeeze(1)",
    ))]  # fmt: skip


def _slots(layer: Layer, rng: random.Random) -> list[str]:
    """A loop over slots around a loop over experts."""
    _expert_method(layer, rng)
    step = rng.choice((
        "out = out + self.expert(e, x) * weights[:, k : k + 1] * (ids[:, k] == e).unsqueeze(-1)",
        "out += torch.where(ids[:, k] == e, weights[:, k], 0.0)[:, None] * self.expert(e, x)",
        "out = out + (ids[:, k] == e)[:, None].to(x.dtype) * (weights[:, k, None] * self.expert(e, x))",
    ))  # fmt: skip
    return [_fresh(rng), "for k in range(K):", "    for e in range(E):", f"        {step}"]


def _select(layer: Layer, rng: random.Random) -> list[str]:
    """A loop over experts that runs each on its own tokens."""
    _expert_method(layer, rng)
    rows = rng.choice(("x[token]", "x.index_select(0, token)", "x[None, token].reshape(-1, D)"))
    setup: list[str] = []
    chosen = rng.choice(("where", "nonzero", "columns", "one_hot", "share", "boolean"))
    if chosen == "boolean":
        find, rows, weight = ["token = (ids == e).any(-1)", "s = (weights * (ids == e)).sum(-1, keepdim=True)"], "x[token]", "s[token]"
    elif chosen == "share":
        find = ["token = (ids == e).any(dim=-1).nonzero(as_tuple=True)[0]", "s = (weights * (ids == e)).sum(-1)"]
        weight = "s[token].unsqueeze(-1)"
    elif chosen == "one_hot":
        setup = ["mask = F.one_hot(ids, E).permute(2, 1, 0)"]
        find, weight = ["slot, token = torch.where(mask[e])"], "weights[token, slot, None]"
    elif chosen == "columns":
        find, weight = ["hits = (ids == e).nonzero()", "token, slot = hits[:, 0], hits[:, 1]"], "weights[token, slot].unsqueeze(1)"
    else:
        find = ["token, slot = torch.where(ids == e)" if chosen == "where" else "token, slot = (ids == e).nonzero(as_tuple=True)"]
        weight = "weights[token, slot, None]"
    adds = ["out[token] += y * s", "out[token] = out[token] + y * s"]
    if chosen != "boolean":
        adds += ["out.index_add_(0, token, y * s)", "out = out.index_add(0, token, s * y)", "out.index_put_((token,), y * s, accumulate=True)",
                 "out.scatter_add_(0, token[:, None].expand(-1, D), y * s)"]  # fmt: skip
    return [*setup, _fresh(rng), "for e in range(E):", *_indented([*find, f"y = self.expert(e, {rows})", f"s = {weight}", rng.choice(adds)], 1)]


def _sorted(layer: Layer, rng: random.Random) -> list[str]:
    """Rows sorted by expert, grouped products, and back."""
    lines = ["flat = " + rng.choice(("ids.view(-1)", "ids.flatten()", "ids.reshape(-1)"))]
    lines += rng.choice((
        ["order = torch.argsort(flat, stable=True)", "chosen = flat[order]"], ["order = flat.argsort()", "chosen = flat[order]"],
        ["chosen, order = flat.sort()"], ["chosen, order = torch.sort(flat, stable=True)"],
    ))  # fmt: skip
    lines += ["token = " + rng.choice((
        "order // K", "torch.div(order, K, rounding_mode='floor')", "torch.arange(T).repeat_interleave(K)[order]",
        "torch.arange(T)[:, None].expand(-1, K).reshape(-1)[order]",
    ))]  # fmt: skip
    lines += ["counts = " + rng.choice((
        "torch.bincount(flat, minlength=E)", "torch.histc(chosen.float(), bins=E, min=0, max=E - 1)", "F.one_hot(flat, E).sum(0)",
        "(chosen[:, None] == torch.arange(E)).sum(0)",
    ))]  # fmt: skip
    lines += [rng.choice(("offs = counts.cumsum(0).to(torch.int32)", "offs = torch.cumsum(counts, 0, dtype=torch.int32)"))]
    lines += ["rows = " + rng.choice(("x[token]", "x.index_select(0, token)", "torch.gather(x, 0, token[:, None].expand(-1, D))"))]

    def product(rows: str, name: str) -> str:
        tensor, linear = _stored(layer, name)
        tensor = f"{tensor}.transpose(-2, -1)" if linear else tensor
        return f"mm({rows}, {tensor}, offs)" + _bias(layer, name, "[chosen]")

    lines += ["s = weights.reshape(-1)[order].unsqueeze(-1)"]
    on = rng.choice(("y", "y", "y", "rows", "y" if layer.bias[1] else "a"))
    lines += ["rows = rows * s"] if on == "rows" else []
    lines += _mlp(layer, rng, "rows", product, "s" if on == "a" else "")
    lines += ["y = y * s"] if on == "y" else []
    return lines + rng.choice((
        ["out = y[torch.argsort(order)].view(T, K, D).sum(1)"],
        ["inverse = torch.empty_like(order)", "inverse[order] = torch.arange(T * K)", "out = y[inverse].view(T, K, D).sum(dim=1)"],
        [_fresh(rng), "out.index_add_(0, token, y)"],
        ["out = torch.zeros_like(x).index_add(0, token, y)"],
        ["out = torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, D), y)"],
    ))  # fmt: skip


def _gathered(layer: Layer, rng: random.Random) -> list[str]:
    """Every token's own copy of its experts' weights."""
    if rng.random() < 0.5:
        def product(rows: str, name: str) -> str:
            tensor, linear = _stored(layer, name)
            side, (i, o) = ("tk" if rows == "a" else "t"), ("hd" if name == "down" else "dh")
            return f"torch.einsum('{side}{i},tk{o + i if linear else i + o}->tk{o}', {rows}, {tensor}[ids])" + _bias(layer, name, "[ids]")

        total = rng.choice(("(y * weights.unsqueeze(-1)).sum(1)", "torch.einsum('tkd,tk->td', y, weights)"))
        return [*_mlp(layer, rng, "x", product), f"out = {total}"]

    def product(rows: str, name: str) -> str:
        tensor, linear = _stored(layer, name)
        weight = f"{tensor}[flat].transpose(1, 2)" if linear else f"{tensor}[flat]"
        return rng.choice((f"torch.bmm({rows}.unsqueeze(1), {weight})", f"({rows}[:, None] @ {weight})")) + ".squeeze(1)" + _bias(layer, name, "[flat]")

    rows = rng.choice(("x.repeat_interleave(K, dim=0)", "x[:, None].expand(-1, K, -1).reshape(-1, D)"))
    lines = ["flat = ids.reshape(-1)", f"rows = {rows}", *_mlp(layer, rng, "rows", product)]
    return [*lines, rng.choice(("out = (y * weights.reshape(-1, 1)).view(T, K, D).sum(1)", "out = (y.view(T, K, D) * weights[..., None]).sum(1)"))]


def _dense(layer: Layer, rng: random.Random) -> list[str]:
    """Every expert on every token in one product, weighted by scores that are zero for the unselected."""
    if rng.random() < 0.5:
        def product(rows: str, name: str) -> str:
            tensor, linear = _stored(layer, name)
            side, (i, o) = ("te" if rows == "a" else "t"), ("hd" if name == "down" else "dh")
            return f"torch.einsum('{side}{i},e{o + i if linear else i + o}->te{o}', {rows}, {tensor})" + _bias(layer, name, "")

        total = rng.choice(("(y * scores.unsqueeze(-1)).sum(1)", "torch.einsum('ted,te->td', y, scores)"))
        return [*_scores(layer, rng), *_mlp(layer, rng, "x", product), f"out = {total}"]

    def product(rows: str, name: str) -> str:
        tensor, linear = _stored(layer, name)
        tensor = f"{tensor}.transpose(1, 2)" if linear else tensor
        return rng.choice((f"torch.bmm({rows}, {tensor})", f"({rows} @ {tensor})")) + _bias(layer, name, "[:, None]")

    rows = rng.choice(("x.repeat(E, 1).view(E, T, D)", "x.unsqueeze(0).expand(E, -1, -1)"))
    lines = [*_scores(layer, rng), f"rows = {rows}"]
    if not any(layer.bias) and layer.activation not in ("softplus", "tanh", "bilinear", "clamped") and rng.random() < 0.3:
        return [*lines, "rows = rows * scores.t().unsqueeze(-1)", *_mlp(layer, rng, "rows", product), "out = y.sum(dim=0)"]
    return [*lines, *_mlp(layer, rng, "rows", product), rng.choice(("out = (y * scores.t()[..., None]).sum(0)", "out = torch.einsum('etd,te->td', y, scores)"))]
