"""A Mixture-of-Experts layer as source text, and the text of its experts in every storage.

Names in the text: ``x`` ``[T, D]``, ``logits`` and ``scores`` ``[T, E]``, ``weights`` and ``ids`` ``[T, K]``, ``g`` and
``u`` the gate and up rows, ``a`` the hidden rows, ``y`` the expert's output, ``s`` the routing weight on it.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

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
_PRODUCTS = (
    "def mm(rows, weight, offs):",
    "    if rows.dtype == torch.bfloat16:",
    "        return torch._grouped_mm(rows, weight, offs=offs)",
    "    return grouped_mm_fallback(rows, weight, offs)", "", "",
)  # fmt: skip


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
    out: str = "D"  # as wide as an expert's output is
    parameters: list[tuple[str, str]] = field(default_factory=list)
    expert: list[str] = field(default_factory=list)  # body of ``expert(self, e, x)``
    body: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)  # last lines of ``__init__``
    definitions: list[str] = field(default_factory=list)  # of the module
    decorator: str = ""  # of ``forward``
    scaled: bool = False  # experts are given a multiple of what the layer is given
    calls: int = 1  # before the second one, the module is told to evaluate and its parameters are changed
    hidden: list[str] = field(default_factory=list)  # what is written in a way that hides it

    def define(self, lines: tuple[str, ...]) -> None:
        """Have ``lines`` once in the module."""
        if lines and lines[0] not in self.definitions:
            self.definitions += [*lines, "", ""]

    @property
    def source(self) -> str:
        """A module that defines ``MoE`` and ``inputs``."""
        made = [f"self.{name} = nn.Parameter(torch.randn({shape}) * 0.4)" for name, shape in self.parameters]
        if self.storage == "list":
            up, down = (", bias=True" if b else ", bias=False" for b in self.bias)
            kinds = [("up", f"D, H{up}"), ("down", f"H, {self.out}{down}"), *([("gate", f"D, H{up}")] if self.gated else [])]
            parts = ", ".join(f"{name}=nn.Linear({sizes})" for name, sizes in kinds)
            made.append(f"self.experts = nn.ModuleList(nn.ModuleDict(dict({parts})) for _ in range(E))")
        made += ["self.seen, self.log = 0, []", "self.register_buffer('loads', torch.zeros(E))", *self.made]
        method = ["", "    def expert(self, e, x):", *indented(self.expert, 2)] if self.expert else []
        wide = 1 if self.E == 3 else self.D + 3  # of outputs that are not as wide as tokens
        lines = [
            "import collections", "import functools", "import itertools", "", "import torch", "import torch.nn.functional as F",
            "from torch import nn", "",
            "from tests.corpus.zoo.catalogue import grouped_mm_fallback", "",
            f"T, E, K, D, H, O = {_product(self.shape)}, {self.E}, {self.K}, {self.D}, {self.H}, {wide}", "", "",
            *(_PRODUCTS if self.family == "sorted" else ()),
            *self.definitions, "class MoE(nn.Module):", f"    calls = {self.calls}", "",
            "    def __init__(self):", "        super().__init__()", *indented(made, 2), *method, "",
            *([f"    {self.decorator}"] if self.decorator else ()), "    def forward(self, x):", *indented(self.body, 2), "", "",
            "def inputs():", f"    return torch.randn({', '.join(map(str, (*self.shape, self.D)))})", "",
        ]  # fmt: skip
        return "\n".join(lines)


def assigned(line: str) -> list[str]:
    """The names that a line gives values."""
    match = re.match(r"\s*(\w+(?:, \w+)*) =", line)
    return match[1].split(", ") if match else []


def indented(lines: list[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]


def _product(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 1 else shape[0] * shape[1]


def stored(layer: Layer, name: str) -> tuple[str, bool]:
    """Text of a weight as ``[E, a, b]``, and whether that is ``[E, out, in]``."""
    if layer.storage == "list":
        return f"torch.stack([m['{name}'].weight for m in self.experts])", True
    if layer.storage == "flat":
        return f"self.w_{name}.view(E, H, D)", name != "down"
    return f"self.w_{name}", layer.linear[name == "down"]


def bias(layer: Layer, name: str, index: str) -> str:
    """`` + bias`` at an index text such as ``[e]``, or nothing."""
    if not layer.bias[name == "down"]:
        return ""
    stored = f"torch.stack([m['{name}'].bias for m in self.experts])" if layer.storage == "list" else f"self.b_{name}"
    return f" + {stored}{index}"


def mlp(layer: Layer, rng: random.Random, rows: str, product: Callable[[str, str], str], scale: str = "") -> list[str]:
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


def expert_method(layer: Layer, rng: random.Random) -> None:
    """``expert(self, e, x)``: expert ``e`` on some rows."""
    slices = rng.random() < 0.5

    def product(rows: str, name: str) -> str:
        if layer.storage == "list":
            return f"self.experts[e]['{name}']({rows})"
        tensor, linear = stored(layer, name)
        weight = f"self.w_{name}[e * H : (e + 1) * H]" if layer.storage == "flat" and slices else f"{tensor}[e]"
        if linear and layer.bias[name == "down"] and rng.random() < 0.5:
            return f"F.linear({rows}, {weight}, self.b_{name}[e])"
        axes, (i, o) = ("oi" if linear else "io"), ("hd" if name == "down" else "dh")
        einsum = f"torch.einsum('...{i},{axes.replace('i', i).replace('o', o)}->...{o}', {rows}, {weight})"
        texts = (f"F.linear({rows}, {weight})", f"{rows} @ {weight}.t()", einsum) if linear else (f"{rows} @ {weight}", einsum)
        if name == "down" and linear and rng.random() < 0.2:
            parts = f"zip({rows}.split(H // 2, dim=-1), {weight}.split(H // 2, dim=1))"
            texts = (f"sum(F.linear(part, of) for part, of in {parts})",)
        text = rng.choice(texts)
        return text + bias(layer, name, "[e]")

    layer.expert = [*mlp(layer, rng, "x", product), "return y"]
    dropped = rng.choice(("a", "y", "", "", "", "", "", ""))
    if dropped:  # so rarely that nothing is dropped
        layer.expert.insert(-1 if dropped == "y" else -2, f"{dropped} = F.dropout({dropped}, 1e-9, self.training)")
