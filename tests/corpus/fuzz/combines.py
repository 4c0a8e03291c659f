"""The families of spellings that run the experts of a layer and combine them, as lines that end in ``out``."""

import math
import random
from collections.abc import Callable

from tests.corpus.fuzz.hosts import guarded, split
from tests.corpus.fuzz.layer import Layer, bias, expert_method, indented, mlp, stored


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


def _fresh(layer: Layer, rng: random.Random) -> str:
    """What the sum starts from: zeros, or the output of something else."""
    if rng.random() < 0.2 and layer.out == "D":
        layer.parameters.append(("w_base", "D, D"))
        return "out = " + rng.choice(("F.silu(x @ self.w_base)", "x @ self.w_base", "F.linear(x, self.w_base)"))
    return "out = " + rng.choice(("torch.zeros_like(x)", "x.new_zeros(x.shape)", "torch.zeros(T, D, dtype=x.dtype)"))


def _masked(layer: Layer, rng: random.Random) -> list[str]:
    expert_method(layer, rng)
    lines, share = _share(layer, rng)
    step = rng.choice((
        "out = out + y * s", "out = y * s + out", "out += s * y", "out.add_(y * s)", "out = torch.add(out, y.mul(s))",
        "out = torch.addcmul(out, y, s)",
    ))  # fmt: skip
    return [*lines, _fresh(layer, rng), "for e in range(E):", f"    s = {share}", "    y = self.expert(e, x)", f"    {step}"]


def _stack(layer: Layer, rng: random.Random) -> list[str]:
    expert_method(layer, rng)
    if rng.random() < 0.3:
        lines, share = _share(layer, rng)
        total = rng.choice(("sum(parts)", "torch.stack(parts).sum(0)", "torch.stack(parts, dim=1).sum(1)"))
        return [*lines, "parts = []", "for e in range(E):", f"    parts.append(self.expert(e, x) * {share})", f"out = {total}"]
    if rng.random() < 0.3:
        chosen = rng.choice((
            "torch.stack(parts, 1).gather(1, ids.unsqueeze(-1).expand(-1, -1, D))",
            "torch.stack(parts)[ids, torch.arange(T)[:, None]]", "torch.stack(parts, 1)[torch.arange(T).unsqueeze(1), ids]",
        ))  # fmt: skip
        total = rng.choice(("(y * weights.unsqueeze(-1)).sum(1)", "torch.einsum('tkd,tk->td', y, weights)"))
        if layer.K == 1 and random.Random(chosen + total).random() < 0.5:
            total = "y[:, 0] * weights"
        return ["parts = [self.expert(e, x) for e in range(E)]", f"y = {chosen}", f"out = {total}"]
    lines = [*_scores(layer, rng), "parts = [self.expert(e, x) for e in range(E)]"]
    return [*lines, rng.choice((
        "out = (torch.stack(parts, dim=1) * scores[..., None]).sum(1)",
        "out = (torch.stack(parts) * scores.t().unsqueeze(-1)).sum(dim=0)",
        "out = torch.einsum('te,etd->td', scores, torch.stack(parts))",
        "out = torch.einsum('ted,te->td', torch.stack(parts, 1), scores)",
        "out = torch.bmm(scores.unsqueeze(1), torch.stack(parts, 1)).squeeze(1)",
    ))]  # fmt: skip


def _slots(layer: Layer, rng: random.Random) -> list[str]:
    """A loop over slots around a loop over experts."""
    expert_method(layer, rng)
    step = rng.choice((
        "out = out + self.expert(e, x) * weights[:, k : k + 1] * (ids[:, k] == e).unsqueeze(-1)",
        "out += torch.where(ids[:, k] == e, weights[:, k], 0.0)[:, None] * self.expert(e, x)",
        "out = out + (ids[:, k] == e)[:, None].to(x.dtype) * (weights[:, k, None] * self.expert(e, x))",
    ))  # fmt: skip
    return [_fresh(layer, rng), "for k in range(K):", "    for e in range(E):", f"        {step}"]


def _select(layer: Layer, rng: random.Random) -> list[str]:
    """A loop over experts that runs each on its own tokens."""
    expert_method(layer, rng)
    own = random.Random("cut" + "".join(layer.expert))  # seeds keep their programs
    if own.random() < 0.15 and layer.K > 1 < math.prod(layer.shape):  # rows of one token name no token
        return _cut(layer, own)
    rows = rng.choice(("x[token]", "x.index_select(0, token)", "x[None, token].reshape(-1, D)"))
    setup: list[str] = []
    chosen = rng.choice(("where", "nonzero", "columns", "one_hot", "share", "boolean"))
    if chosen == "boolean":
        find = ["token = (ids == e).any(-1)", "s = (weights * (ids == e)).sum(-1, keepdim=True)"]
        rows, weight = "x[token]", "s[token]"
    elif chosen == "share":
        find = ["token = (ids == e).any(dim=-1).nonzero(as_tuple=True)[0]", "s = (weights * (ids == e)).sum(-1)"]
        weight = "s[token].unsqueeze(-1)"
    elif chosen == "one_hot":
        setup = ["mask = F.one_hot(ids, E).permute(2, 1, 0)"]
        find, weight = ["slot, token = torch.where(mask[e])"], "weights[token, slot, None]"
    elif chosen == "columns":
        find = ["hits = (ids == e).nonzero()", "token, slot = hits[:, 0], hits[:, 1]"]
        weight = "weights[token, slot].unsqueeze(1)"
    else:
        find = ["token, slot = " + ("torch.where(ids == e)" if chosen == "where" else "(ids == e).nonzero(as_tuple=True)")]
        weight = "weights[token, slot, None]"
    adds = ["out[token] += y * s", "out[token] = out[token] + y * s"]
    if chosen != "boolean":
        adds += [
            "out.index_add_(0, token, y * s)", "out = out.index_add(0, token, s * y)",
            "out.index_put_((token,), y * s, accumulate=True)", "out.scatter_add_(0, token[:, None].expand(-1, D), y * s)",
        ]  # fmt: skip
    step = [*find, f"y = self.expert(e, {rows})", f"s = {weight}", rng.choice(adds)]
    if rng.random() < 0.25:  # the weight is on the input
        add = step[-1].replace(" * s", "").replace("s * ", "")
        step = [*find, f"s = {weight}", f"y = self.expert(e, ({rows} * s).to(x.dtype))", add]
    return [*setup, _fresh(layer, rng), "for e in range(E):", *indented(step, 1)]


def _cut(layer: Layer, rng: random.Random) -> list[str]:
    """Rows of slots that a mask keeps, sorted by expert or not, from which each expert's are selected."""
    layer.expert = [line for line in layer.expert if "dropout" not in line]
    count = "(F.one_hot(flat, E).cumsum(0) - 1).gather(1, flat[:, None])[:, 0]"
    place = "torch.arange(T * K) - (counts.cumsum(0) - counts)[flat[order]]"
    kept = rng.choice((f"{place} < 3", f"({place}) % 3 > 0", "weights.reshape(-1)[order] > 0.2", f"({count})[order] < 3"))
    order = rng.choice(("flat.argsort(stable=True)", "flat.sort(stable=True)[1]", "torch.arange(T * K)"))
    rows = rng.choice(("torch.where(chosen == e)[0]", "(chosen == e).nonzero()[:, 0]", "chosen == e"))
    return [
        "flat = ids.reshape(-1)", f"order = {order}", "counts = torch.bincount(flat, minlength=E)", f"order = order[{kept}]",
        "chosen, token, s = flat[order], order // K, weights.reshape(-1)[order, None]", _fresh(layer, rng),
        "for e in range(E):", f"    rows = {rows}",
        "    out.index_add_(0, token[rows], self.expert(e, x[token[rows]]) * s[rows])",
    ]  # fmt: skip


def _stored(layer: Layer, rng: random.Random) -> list[str]:
    """A row for every slot, which its expert stores."""
    expert_method(layer, rng)
    rows = rng.choice(("x.repeat_interleave(K, dim=0)", "x[:, None].expand(-1, K, -1).reshape(-1, D)"))
    buffer = rng.choice(("torch.empty_like(rows)", "torch.zeros_like(rows)", "rows.clone()"))
    lines = ["flat = ids.reshape(-1)", f"rows = {rows}", f"y = {buffer}"]
    step = rng.choice((
        ["y[flat == e] = self.expert(e, rows[flat == e])"],
        ["hits = flat == e", "y[hits] = self.expert(e, rows[hits])"],
        ["hits = torch.where(flat == e)[0]", "y[hits] = self.expert(e, rows[hits])"],
        ["hits = (flat == e).nonzero(as_tuple=True)[0]", "y.index_copy_(0, hits, self.expert(e, rows.index_select(0, hits)))"],
    ))  # fmt: skip
    return [*lines, "for e in range(E):", *indented(step, 1), rng.choice((
        "out = (y.view(T, K, D) * weights.unsqueeze(-1)).sum(dim=1)", "out = (y * weights.reshape(-1, 1)).view(T, K, D).sum(1)",
    ))]  # fmt: skip


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
        "torch.histc(flat.float(), bins=E, min=0, max=E - 1).int()", "ids.new_zeros((T, E)).scatter_(1, ids, 1).sum(0)",
        "(chosen[:, None] == torch.arange(E)).sum(0)",
    ))]  # fmt: skip
    lines += [rng.choice(("offs = counts.cumsum(0).to(torch.int32)", "offs = torch.cumsum(counts, 0, dtype=torch.int32)"))]
    lines += ["rows = " + rng.choice((
        "x[token]", "x.index_select(0, token)", "torch.gather(x, 0, token[:, None].expand(-1, D))",
    ))]  # fmt: skip

    def product(rows: str, name: str) -> str:
        tensor, linear = stored(layer, name)
        tensor = f"{tensor}.transpose(-2, -1)" if linear else tensor
        return f"mm({rows}, {tensor}, offs)" + bias(layer, name, "[chosen]")

    lines += ["s = weights.reshape(-1)[order].unsqueeze(-1)"]
    on = rng.choice(("y", "y", "y", "rows", "y" if layer.bias[1] else "a"))
    lines += ["rows = rows * s"] if on == "rows" else []
    lines += mlp(layer, rng, "rows", product, "s" if on == "a" else "")
    lines += ["y = y * s"] if on == "y" else []
    return lines + rng.choice((
        ["out = y[torch.argsort(order)].view(T, K, D).sum(1)"],
        ["inverse = torch.empty_like(order)", "inverse[order] = torch.arange(T * K)", "out = y[inverse].view(T, K, D).sum(1)"],
        [_fresh(layer, rng), "out.index_add_(0, token, y)"],
        ["out = torch.zeros_like(x).index_add(0, token, y)"],
        ["out = torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, D), y)"],
    ))  # fmt: skip


def _einsum(layer: Layer, result: str, experts: str, index: str) -> Callable[[str, str], str]:
    """Products of the tokens, axis ``t``, and then of what is activated, axes ``result``, with weights on axes ``experts``."""

    def product(rows: str, name: str) -> str:
        tensor, linear = stored(layer, name)
        side, (i, o) = (result if rows == "a" else "t"), ("hd" if name == "down" else "dh")
        equation = f"{side}{i},{experts}{o + i if linear else i + o}->{result}{o}"
        return f"torch.einsum('{equation}', {rows}, {tensor}{index})" + bias(layer, name, index)

    return product


def _gathered(layer: Layer, rng: random.Random) -> list[str]:
    """Every token's own copy of its experts' weights."""
    if rng.random() < 0.5:
        total = rng.choice(("(y * weights.unsqueeze(-1)).sum(1)", "torch.einsum('tkd,tk->td', y, weights)"))
        return [*mlp(layer, rng, "x", _einsum(layer, "tk", "tk", "[ids]")), f"out = {total}"]

    def product(rows: str, name: str) -> str:
        tensor, linear = stored(layer, name)
        weight = f"{tensor}[flat].transpose(1, 2)" if linear else f"{tensor}[flat]"
        batched = rng.choice((f"torch.bmm({rows}.unsqueeze(1), {weight})", f"({rows}[:, None] @ {weight})"))
        return batched + ".squeeze(1)" + bias(layer, name, "[flat]")

    rows = rng.choice(("x.repeat_interleave(K, dim=0)", "x[:, None].expand(-1, K, -1).reshape(-1, D)"))
    lines = ["flat = ids.reshape(-1)", f"rows = {rows}", *mlp(layer, rng, "rows", product)]
    return [*lines, rng.choice((
        "out = (y * weights.reshape(-1, 1)).view(T, K, D).sum(1)", "out = (y.view(T, K, D) * weights[..., None]).sum(1)",
    ))]  # fmt: skip


def _dense(layer: Layer, rng: random.Random) -> list[str]:
    """Every expert on every token in one product, weighted by scores that are zero for the unselected."""
    if rng.random() < 0.5:
        total = rng.choice(("(y * scores.unsqueeze(-1)).sum(1)", "torch.einsum('ted,te->td', y, scores)"))
        return [*_scores(layer, rng), *mlp(layer, rng, "x", _einsum(layer, "te", "e", "")), f"out = {total}"]

    def product(rows: str, name: str) -> str:
        tensor, linear = stored(layer, name)
        tensor = f"{tensor}.transpose(1, 2)" if linear else tensor
        return rng.choice((f"torch.bmm({rows}, {tensor})", f"({rows} @ {tensor})")) + bias(layer, name, "[:, None]")

    rows = rng.choice(("x.repeat(E, 1).view(E, T, D)", "x.unsqueeze(0).expand(E, -1, -1)"))
    lines = [*_scores(layer, rng), f"rows = {rows}"]
    if not any(layer.bias) and layer.activation not in ("softplus", "tanh", "bilinear", "clamped") and rng.random() < 0.3:
        return [*lines, "rows = rows * scores.t().unsqueeze(-1)", *mlp(layer, rng, "rows", product), "out = y.sum(dim=0)"]
    total = rng.choice(("(y * scores.t()[..., None]).sum(0)", "torch.einsum('etd,te->td', y, scores)"))
    return [*lines, *mlp(layer, rng, "rows", product), f"out = {total}"]


def _stored_over(layer: Layer, rng: random.Random) -> list[str]:
    """The tokens of each expert and zeros between them, over which it stores what it makes of them."""
    expert_method(layer, rng)
    mask = rng.choice((
        "torch.zeros(T, E, dtype=torch.bool).scatter(1, ids, True)", "(ids.unsqueeze(-1) == torch.arange(E)).any(1)",
    ))  # fmt: skip
    rows = rng.choice(("torch.einsum('td,te->etd', x, mask.to(x.dtype))", "x * mask.t().unsqueeze(-1)"))
    s = rng.choice(("scores[at, e, None]", "scores[at][:, e].unsqueeze(-1)", "scores[:, e][at, None]"))
    return [
        *_scores(layer, rng), f"mask = {mask}", f"rows = {rows}", "for e in range(E):", "    at = mask[:, e]",
        f"    s = {s}", "    y = self.expert(e, rows[e, at])", "    rows[e, at] = y * s", "out = rows.sum(dim=0)",
    ]  # fmt: skip


def _placed(layer: Layer, rng: random.Random) -> list[str]:
    """Places ``[E, C]`` that running counts give, and one-hot products: some tokens may have none."""
    expert_method(layer, rng)
    layer.expert = [line for line in layer.expert if "dropout" not in line]  # masks of places are not those of tokens
    most = rng.choice(("chosen.sum(0).max()", "chosen.sum(0).max().item()", "min(chosen.sum(0).max(), torch.tensor(T * K))"))
    C = rng.choice((2, 3, 5, "C"))
    kept = rng.choice((f"(place >= 0) & (place < {C})", f"(place >= 0) & (place < torch.ceil(torch.tensor({C} - 0.5)).long())"))
    if C == "C":
        kept = rng.choice(("(place >= 0) & (place < C)", "place >= 0"))
    elif not layer.scaled and (own := random.Random("".join(layer.expert))).random() < 0.5:  # seeds keep their programs
        return _in_buffer(C, own)
    return [
        *_scores(layer, rng), "flat = ids.t().reshape(-1)", "chosen = F.one_hot(flat, E)", *([f"C = {most}"] if C == "C" else ()),
        f"place = (chosen.cumsum(0) * chosen - 1).view(K, T, E){rng.choice(('.amax(0)', '.max(dim=0).values', '.max(0)[0]'))}",
        f"kept = {kept}",
        f"places = F.one_hot({rng.choice(('place.masked_fill(~kept, 0)', 'place * kept', 'torch.where(kept, place, 0)'))}, {C})",
        "hot = " + rng.choice(("places * kept.unsqueeze(-1)", "places.masked_fill(~kept.unsqueeze(-1), 0)")),
        "rows = torch.einsum('tec,td->ecd', hot.to(x.dtype), x)", "y = torch.stack([self.expert(e, rows[e]) for e in range(E)])",
        "out = torch.einsum('te,tec,ecd->td', scores.to(x.dtype), hot.to(x.dtype), y)",
    ]  # fmt: skip


def _in_buffer(C: int, rng: random.Random) -> list[str]:
    """A buffer that slots are added to at their places, those without a place as zeros, and read from."""
    count = rng.choice(("(chosen.cumsum(0) - 1).gather(1, flat[:, None])[:, 0]", "((chosen.cumsum(0) - 1) * chosen).sum(-1)"))
    place = rng.choice(("torch.where(kept, count, 0)", "count * kept", f"count.clamp(max={C - 1})"))
    rows = rng.choice(("torch.where(kept[:, None], rows, 0)", "rows * kept[:, None]", "rows.masked_fill(~kept.unsqueeze(1), 0)"))
    out = rng.choice(("y * kept[:, None] * weights.reshape(-1, 1)", "y * (weights.reshape(-1) * kept).unsqueeze(-1)"))
    if rng.random() < 0.4:
        read = "y[flat[kept], count[kept]]"
        out = rng.choice((f"weights.reshape(-1)[kept].unsqueeze(1) * {read}", f"{read} * weights.flatten()[kept, None]"))
        return [
            "flat = ids.reshape(-1)", "chosen = F.one_hot(flat, E)", f"count = {count}", f"kept = count < {C}",
            "token = torch.arange(flat.shape[0]) // K", f"buffer = x.new_zeros(E, {C}, x.shape[-1])",
            "buffer[flat[kept], count[kept]] = x[token[kept]]", "y = torch.stack([self.expert(e, buffer[e]) for e in range(E)])",
            f"out = torch.zeros_like(x).index_add(0, token[kept], {out})",
        ]  # fmt: skip
    return [
        "flat = ids.reshape(-1)", "chosen = F.one_hot(flat, E)", f"count = {count}", f"kept = count < {C}", f"place = {place}",
        "rows = x.repeat_interleave(K, dim=0)",
        f"buffer = torch.zeros(E, {C}, x.shape[-1], dtype=x.dtype).index_put((flat, place), {rows}, accumulate=True)",
        "y = torch.stack([self.expert(e, buffer[e]) for e in range(E)])[flat, place]", f"out = ({out}).view(T, K, -1).sum(1)",
    ]  # fmt: skip


FAMILIES = {
    "masked": _masked, "stack": _stack, "slots": _slots, "select": _select, "sorted": _sorted, "gathered": _gathered,
    "dense": _dense, "stored": _stored, "stored_over": _stored_over, "placed": _placed, "guarded": guarded, "split": split,
}  # fmt: skip
