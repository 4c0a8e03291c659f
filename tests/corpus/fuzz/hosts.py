"""The families of spellings whose branches and slices depend on data: loops that skip experts, rows split by counts."""

import random

from tests.corpus.fuzz.layer import Layer, expert_method, indented


def guarded(layer: Layer, rng: random.Random) -> list[str]:
    """A loop over experts that skips those without tokens."""
    expert_method(layer, rng)
    setup: list[str] = []
    add = rng.choice((
        "out.index_add_(0, token, y * s)", "out[token] += y * s", "out = out.index_add(0, token, s * y)",
        "out.index_put_((token,), y * s, accumulate=True)",
    ))  # fmt: skip
    rows = ["y = self.expert(e, x[token])", "s = weights[token, slot, None]", add]
    find = ["token, slot = torch.where(mask)"]
    kind = rng.choice(("mask", "size", "counts", "list"))
    if kind == "mask":
        condition = rng.choice(("mask.any()", "torch.any(mask)", "mask.sum() > 0"))
        inside = [f"if {condition}:", *indented([*find, *rows], 1)]
        if rng.random() < 0.4:
            inside = [rng.choice(("if not mask.any():", "if mask.sum() == 0:")), "    continue", *find, *rows]
    elif kind == "size":
        empty = rng.choice(("token.numel() == 0", "token.shape[0] == 0", "len(token) == 0"))
        inside = [*find, f"if {empty}:", "    continue", *rows]
    else:
        setup = ["counts = torch.bincount(ids.flatten(), minlength=E)" + (".tolist()" if kind == "list" else "")]
        inside = rng.choice((
            ["if counts[e] == 0:", "    continue", *find, *rows], ["if counts[e] > 0:", *indented([*find, *rows], 1)],
        ))  # fmt: skip
    return [*setup, "out = torch.zeros_like(x)", "for e in range(E):", "    mask = ids == e", *indented(inside, 1)]


def split(layer: Layer, rng: random.Random) -> list[str]:
    """Rows sorted by expert, split by counts that are on the host, and concatenated."""
    expert_method(layer, rng)
    order = rng.choice(("flat.argsort()", "torch.argsort(flat, stable=True)", "flat.sort()[1]"))
    counts = rng.choice((
        "torch.bincount(flat, minlength=E)", "F.one_hot(flat, E).sum(0)", "ids.new_zeros((T, E)).scatter_(1, ids, 1).sum(0)",
        "torch.histc(flat.float(), bins=E, min=0, max=E - 1).int()",
    ))  # fmt: skip
    lines = ["flat = ids.reshape(-1)", f"order = {order}", "token = order // K", "rows = x[token]", f"counts = {counts}"]
    loop = rng.choice((
        ["parts = [self.expert(e, part) for e, part in enumerate(torch.split(rows, counts))]"],
        ["parts = []", "for e, part in enumerate(rows.split(counts, dim=0)):", "    parts.append(self.expert(e, part))"],
        ["parts, start = [], 0", "for e in range(E):", "    end = start + counts[e]",
         "    parts.append(self.expert(e, rows[start:end]))", "    start = end"],
        ["parts, start = [], 0", "for e, count in enumerate(counts):", "    end = start + count", "    if count == 0:",
         "        continue", "    parts.append(self.expert(e, rows[start:end]))", "    start = end"],
    ))  # fmt: skip
    lines[-1] += ".tolist()" if "split" in "".join(loop) or rng.random() < 0.5 else ""
    back = rng.choice((
        ["out = torch.zeros_like(x).index_add(0, token, y * s)"],
        ["out = torch.zeros_like(x)", "out.index_add_(0, token, y * s)"],
        ["out = (y * s)[order.argsort()].view(T, K, D).sum(1)"],
        ["inverse = torch.empty_like(y)", "inverse[order] = y * s", "out = inverse.view(T, K, D).sum(1)"],
    ))  # fmt: skip
    share = "s = weights.reshape(-1)[order].unsqueeze(-1)"
    if rng.random() < 0.3:  # sorted by a mask of tokens and experts
        mask = "torch.zeros(T, E, dtype=torch.bool).scatter(1, ids, True)"
        sort = ["order = mask.t().reshape(-1).argsort(descending=True, stable=True)[: T * K]", "token = order % T"]
        share = "s = gates.t().reshape(-1)[order].unsqueeze(-1)"
        if "split" in "".join(loop) and rng.random() < 0.6:
            mask, share = "gates > 0", "s = torch.gather(gates[token], 1, experts[:, 1:])"
            sort = ["chosen = torch.nonzero(gates)", "experts, order = chosen.sort(0)", "token = chosen[order[:, 1], 0]"]
        gates = "gates = torch.zeros(T, E, dtype=weights.dtype).scatter(1, ids, weights)"
        lines = [gates, f"mask = {mask}", *sort, "rows = x[token]", lines[-1].replace(counts, "mask.sum(0)")]
        back = ["out = torch.zeros_like(x).index_add(0, token, y * s)"]
    return [*lines, *loop, "y = torch.cat(parts, dim=0)", share, *back]
