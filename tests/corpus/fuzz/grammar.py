"""Random layers: a router, experts in some storage, and a way to combine them.

Every draw is a program that the rewrite supports.
"""

import random
import re

from tests.corpus.fuzz.combines import FAMILIES
from tests.corpus.fuzz.layer import GATED, UNGATED, Layer
from tests.corpus.fuzz.parts import take_parts

SHAPES = ((5,), (7,), (12,), (1,), (2, 3), (3, 4), (2,), (3,), (8,))  # as many tokens as slots, experts or features, too
DTYPES = ("float64", "float64", "float32", "float32", "float32", "bfloat16")


_BY_NUMBER = ("dense", "guarded", "masked", "select", "slots", "stored", "stored_over")
"""Families that compare ids with the numbers of experts."""
_MASK = "torch.zeros_like(probs).scatter(-1, ids, 1.0)"


def draw(rng: random.Random) -> Layer:
    """A layer of the supported grammar."""
    E = rng.choice((2, 3, 3, 4, 4, 5))
    family = rng.choice(sorted(FAMILIES))
    storages = ("list", "split", "packed", "interleaved", "flat")
    storage = rng.choice(storages)
    gated = storage in ("packed", "interleaved") or rng.random() < 0.7
    biases = ((False, False),) * 3 + ((True, True), (True, False), (False, True))
    bias = (False, False) if storage == "flat" else rng.choice(biases)
    shapes = [shape for shape in SHAPES if family not in ("split", "placed") or shape != (1,)]  # one row is not sorted
    layer = Layer(
        family, storage, rng.choice(DTYPES), rng.choice(shapes), E, rng.randint(1, min(3, E)), rng.choice((8, 16)),
        rng.choice((8, 24)), gated, rng.choice(sorted(GATED if gated else UNGATED)), bias,
        (rng.random() < 0.5, rng.random() < 0.5),
    )  # fmt: skip
    if family == "placed":
        layer.K = max(layer.K, 2)  # places of one slot are not all recognised
    if storage in ("list", "flat"):
        layer.linear = (True, storage == "list")
    widened = storage != "flat" and rng.random() < 0.15
    layer.out = "O" if widened and family in ("masked", "select", "stack", "slots", "guarded", "placed") else "D"
    _declare(layer, rng)
    before, after = _surroundings(layer, rng)
    router = _router(layer, rng)
    stops = [[]] * 6 + [["weights = (weights * 1.5).detach()"], ["x = (x * 0.5).detach()"]]
    stopped = random.Random("".join(router)).choice(stops)  # of a sequence of its own: seeds keep the rest of their programs
    layer.scaled = any(line.startswith(("x = x *", "x = (x *")) for line in (*before, *stopped))
    layer.body = [*before, *router, *stopped, *_skipped(layer, router), *FAMILIES[family](layer, rng), *after]
    if layer.shape != (1,) and random.Random("".join(layer.body)).random() < 0.2:
        layer.body = [re.sub(r"^scores = .*", "scores = logits.softmax(-1).to(weights.dtype)", line) for line in layer.body]
    if layer.out == "O":
        layer.body = [_of_width(line) for line in layer.body]
    if rng.random() < 0.25:
        take_parts(layer, rng)
    return layer


def _skipped(layer: Layer, router: list[str]) -> list[str]:
    """Who chose the last expert goes to the first one with a weight of zero, in a few layers of one slot: ids would repeat."""
    if layer.K > 1 or layer.family not in _BY_NUMBER or random.Random("skipped" + "".join(router)).random() > 0.25:
        return []
    return ["skipped = ids == E - 1", "weights, ids = weights.masked_fill(skipped, 0.0), ids.masked_fill(skipped, 0)"]


def _declare(layer: Layer, rng: random.Random) -> None:
    up, down = ("H, D" if layer.linear[0] else "D, H"), (f"{layer.out}, H" if layer.linear[1] else f"H, {layer.out}")
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
        add(("b_down", f"E, {layer.out}"))


def _of_width(line: str) -> str:
    """A line with the sum of the experts' outputs as wide as they are."""
    sums = r"torch\.zeros_like\(x\)|x\.new_zeros\(x\.shape\)|torch\.zeros\(T, D, dtype=x\.dtype\)"
    line = re.sub(rf"(?<=out = )({sums})", "x.new_zeros(T, O)", line)
    return line.replace("expand(-1, -1, D)", "expand(-1, -1, O)").replace("[:, None].expand(-1, D)", "[:, None].expand(-1, O)")


def _surroundings(layer: Layer, rng: random.Random) -> tuple[list[str], list[str]]:
    before, after = [], []
    residual = rng.random() if layer.out == "D" else 1
    if residual < 0.25:
        before += ["residual = x", "x = F.layer_norm(x, (D,))"]
    elif residual < 0.4:
        before += ["x = x * 1.25"]
    if len(layer.shape) == 2:
        before += ["shape = x.shape", rng.choice(("x = x.view(-1, D)", "x = x.reshape(-1, D)", "x = x.flatten(0, 1)"))]
    if rng.random() < 0.2 and layer.out == "D":
        layer.parameters.append(("w_shared", "D, D"))
        after += ["out = out + F.silu(x @ self.w_shared)"]
    if len(layer.shape) == 2:
        shape = "shape" if layer.out == "D" else "*shape[:-1], O"
        after += [rng.choice((f"out = out.view({shape})", f"out = out.reshape({shape})"))]
    if residual < 0.25:
        after += [rng.choice(("out = residual + out", "out = out + residual"))]
    return before, [*after, "return out"]


def _router(layer: Layer, rng: random.Random) -> list[str]:
    lines = [rng.choice(("logits = F.linear(x, self.w_router)", "logits = x @ self.w_router.t()"))]
    wide = rng.choice(("float32", "")) if layer.dtype != "float64" else rng.choice(("float32", "", ""))
    dtype = f", dtype=torch.{wide}" if wide else ""
    kind = rng.choice(("softmax", "softmax", "softmax_topk", "sigmoid", "gather", "biased", "max" if layer.K == 1 else "softmax"))
    if layer.E == 4 and layer.K <= 2 and rng.random() < 0.3:
        kind = "pairs"
    score = rng.choice((f"F.softmax(logits, dim=-1{dtype})", f"logits.softmax(-1{dtype})"))
    if kind == "sigmoid" or (kind == "biased" and rng.random() < 0.7):
        score = "logits.float().sigmoid()" if wide else "torch.sigmoid(logits)"
    if kind == "pairs":
        lines += [
            "(left, high), (right, low) = logits[:, :2].topk(K, dim=-1), logits[:, 2:].topk(K, dim=-1)",
            "values, best = (left[:, :, None] + right[:, None]).flatten(1).topk(K, dim=-1)",
            "ids = (high[:, :, None] * 2 + low[:, None]).flatten(1).gather(1, best)",
            f"weights = F.softmax(values, dim=-1{dtype})",
        ]
    elif kind == "softmax_topk":
        lines += ["values, ids = torch.topk(logits, K, dim=-1)", f"weights = F.softmax(values, dim=-1{dtype})"]
    else:
        lines += [f"probs = {score}"]
    if kind in ("softmax", "sigmoid"):
        lines += [rng.choice(("weights, ids = torch.topk(probs, K, dim=-1)", "weights, ids = probs.topk(K)"))]
    elif kind == "gather":
        chosen = "ids = torch.topk(probs, K, dim=-1).indices"
        lines += [rng.choice((chosen, f"with torch.no_grad(): {chosen}"))]
        lines += [rng.choice(("weights = probs.gather(-1, ids)", f"weights = (probs * {_MASK}).gather(-1, ids)"))]
    elif kind == "biased":
        layer.parameters.append(("b_router", "E"))
        lines += ["_, ids = torch.topk(probs + self.b_router, K, dim=-1)", "weights = torch.gather(probs, -1, ids)"]
    elif kind == "max":
        lines += ["weights, ids = probs.max(dim=-1, keepdim=True)"]
    lines += rng.choice((
        [], [], ["weights = weights / weights.sum(-1, keepdim=True)"], ["weights /= weights.sum(dim=-1, keepdim=True)"],
        ["weights = weights / (weights.sum(-1, keepdim=True) + 1e-9)"],
    ))  # fmt: skip
    scaled = rng.choice(("", "", "weights = weights * 2.5", "weights.mul_(2.5)", "weights *= 1.5"))
    if scaled:
        lines += [scaled]
    if wide or rng.random() < 0.2:
        lines += ["weights = weights.to(x.dtype)"]
    return lines
