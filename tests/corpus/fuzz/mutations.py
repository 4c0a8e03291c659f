"""Changes to a drawn layer: most give another function that has to be left alone, or rewritten as what it now is.

``mutate`` applies one at random: a replaced piece of text, an inserted statement, another result, or a blind change of
the syntax tree. A change may also give a program that does not run; whoever draws it tries the next one.
"""

import ast
import random
import re

from tests.corpus.fuzz.layer import Layer, assigned

# (pattern, replacements): one occurrence is replaced
REPLACEMENTS = (
    (r"\[e\]", ("[e - 1]", "[0]", "[E - 1 - e]", "[max(e, 1)]", "[e].detach()")),
    (r"range\(E\)", (
        "range(E - 1)", "range(1, E)", "[*range(E), 0]", "reversed(range(E))", "range(0, E, 2)", "[0, *range(E - 1)]",
    )),
    (r"range\(K\)", ("range(K - 1)", "[0, 0]", "range(1)", "reversed(range(K))")),
    (r"ids == e", (
        "ids == e + 1", "ids >= e", "ids != e", "(ids == e) | (ids == 0)", "(ids == e) & (weights > 0.3)",
        "ids == E - 1 - e", "ids.roll(1, 0) == e", "ids.flip(-1) == e", "ids[:, :1] == e", "ids == e // 2",
    )),
    (r"ids != e", ("ids == e", "ids > e", "ids != e + 1")),
    (r"\.sum\(", (".amax(", ".mean(", ".prod(")),
    (r"sum\(-1, keepdim=True\)", ("amax(-1, keepdim=True)", "sum(0, keepdim=True)", "mean(-1, keepdim=True)", "sum()")),
    (r"\bweights\b(?! =|,)", (
        "weights.detach()", "weights.flip(-1)", "weights.roll(1, 0)", "weights.square()", "weights.clamp(max=0.4)",
        "weights[:, :1]", "probs[:, :K]", "weights.t().reshape(T, K)", "(weights > 0.3)", "weights.round()", "weights.t()",
    )),
    (r"\bhigh\b(?!\),)", ("low", "high[:, :1].expand(-1, K)", "(1 - high)", "high.flip(-1)")),
    (r"\* 2 \+ low", ("* 1 + low", "+ low * 2", "* 2 + low[:, :1]", "* 3 + low")),
    (r"\bids\b(?! =|,)", (
        "ids.flip(-1)", "ids.roll(1, 0)", "((ids + 1) % E)", "ids.clamp(max=E - 2)", "(ids // 2 * 2)", "ids[:, :1]",
        "ids.t().reshape(T, K)", "ids.flip(0)", "(E - 1 - ids)", "ids.sort(-1)[0]", "ids.t()", "ids[:, [*range(K)][::-1]]",
        "(ids % 2)",
    )),
    (r"\border\b(?! =)", ("order.flip(0)", "order.argsort()", "order.roll(1)", "order.sort()[0]")),
    (r"\btoken\b(?! =|,)", ("token.flip(0)", "((token + 1) % T)", "token.sort()[0]")),
    (r"\bflat\b(?! =)", ("flat.flip(0)", "flat.roll(1)", "(E - 1 - flat)", "flat.clamp(min=1)")),
    (r"\bchosen\b(?! =|,)", ("chosen.flip(0)", "flat", "chosen.roll(1)")),
    (r"order // K", ("order % T", "order // E", "order // T", "(order + 1) // K % T")),
    (r"cumsum\(0\)", ("cumsum(0) - counts", "cumsum(0).roll(1)", "flip(0).cumsum(0)")),
    (r"\boffs\b(?! =)", ("offs.roll(1).sort()[0]", "(offs - 1).clamp(min=0)", "offs // 2")),
    (r"\bx\b(?!\.dtype| =|\.shape|\))", (
        "x.tanh()", "x.roll(1, 0)", "x.detach()", "x.flip(-1)", "(x * 2)", "(x * x)", "x.flip(0)",
    )),
    (r"\brows\b(?! =)", ("rows.roll(1, 0)", "rows.detach()", "rows.tanh()", "rows.flip(1)")),
    (r"\ba\b(?! =)", (
        "a.detach()", "a.clamp(-0.5, 0.5)", "F.normalize(a, dim=-1)", "F.dropout(a, 0.3, training=False)", "a.flip(-1)",
        "(a * torch.arange(H, dtype=x.dtype))", "(a + 1)", "a.float().to(x.dtype)", "a.softmax(-1)", "(a + a.mean())",
        "a.relu()", "(a if 'e' not in locals() or e != 1 else a.tanh())", "a.cumsum(-1)", "a.abs()",
    )),
    (r"\by\b(?! =|\.)", (
        "F.layer_norm(y, (D,))", "y.relu()", "y.detach()", "y.flip(-1)", "y.roll(1, 0)", "(y + x)", "y.square()", "(-y)",
        "y.softmax(-1)", "(y - 0.1)", "(y * 3)", "(y * torch.arange(D, dtype=y.dtype))", "y.cumsum(-1)",
    )),
    (r"\bs\b(?! =|\.)", (
        "s.square()", "s.detach()", "(s > 0)", "(1 - s)", "s.relu()", "s.roll(1, 0)", "(s + 0.1)", "s.sum()",
    )),
    (r"\bg\b(?! =|,)", (
        "g.detach()", "(g + 1)", "g.clamp(max=1.0)", "u", "g.flip(-1)", "g.abs()", "(g * 2)", "g.roll(1, -1)",
    )),
    (r"\bu\b(?! =)", ("u.detach()", "(u + 1)", "g", "u.flip(-1)", "(u * u)", "u.roll(1, 0)", "u.clamp(min=0)")),
    (r"\bscores\b(?! =)", (
        "scores.flip(1)", "scores.detach()", "scores.roll(1, 0)", "scores.square()", "(scores + 0.1)", "scores.sqrt()",
        "torch.where(scores > 0.5, scores, 0.0)", "scores.softmax(-1)", "F.softmax(logits, -1)",
    )),
    (r"dim=-1", ("dim=0",)),
    (r"\bK\b", ("1", "max(1, K - 1)", "E")),
    (r"K, dim=-1", ("K, dim=-1, largest=False", "K, dim=-1, sorted=False")),
    (r"zeros_like", ("ones_like",)),
    (r"\bcounts\b(?! =)", ("counts[::-1]", "counts.flip(0)", "counts.to(torch.int8)", "(counts + 1)", "counts.bfloat16()")),
    (r"counts\[e\] (== 0|> 0)", ("counts[e] <= 1", "counts[e] > 1", "counts[e - 1] == 0", "counts[e] != 2")),
    (r"mask\.any\(\)", ("mask.all()", "mask[0].any()", "(ids == e - 1).any()", "mask.any() and e", "mask.sum() > 1")),
    (r"numel\(\) == 0|shape\[0\] == 0", ("numel() <= 1", "numel() == 1")),
    (r"continue", ("break", "return out", "out = out + 0.1", "pass")),
    (r"start \+ count\w*(\[e\])?", ("start + 1", "start + count - 1 if e else start", "end")),
    (r"start = end", ("start = end + 1", "start = 0", "start = start")),
    (r"accumulate=True", ("accumulate=False",)),
    (r"index_add_?\(0, token, ([^)]+)\)", ("index_add(0, token, y * s, alpha=2)",)),
    (r"new_zeros", ("new_ones",)),
    (r"zeros\(", ("ones(",)),
    (r"scatter_add", ("scatter",)),
    (r"out\[token\] \+=", ("out[token] =", "out[token] -=", "out[token] *=")),
    (r"out \+ ", ("out - ", "out * ")),
    (r"out \+=", ("out -=", "out =")),
    (r"::2", ("1::2", "::-1")),
    (r":H\]", ("H:]",)),
    (r"\.view\(T, K, D\)\.sum\((dim=)?1\)", (
        ".view(K, T, D).sum(0)", ".view(T, K, D).amax(1)", ".view(T, K, D).flip(0).sum(1)",
    )),
    (r"repeat_interleave\(K, dim=0\)", ("repeat(K, 1)",)),
    (r"self\.expert\(e, x\)", (
        "self.expert(e, self.expert(e, x))", "self.expert(e, x.detach())", "(self.expert(e, x) + self.expert(0, x))",
        "self.expert(0 if e == 1 else e, x)", "torch.utils.checkpoint.checkpoint(self.expert, e, x, use_reentrant=False)",
    )),
)  # fmt: skip

# Statements put anywhere after the first assignment of the name.
INSERTIONS = {
    "x": (
        "x.mul_(0.5)", "x[0] = 1.0", "x.view(-1)[:3].zero_()", "x = x.tanh()", "x = x.roll(1, 0)", "x = x.detach()",
        "x.clamp_(-1, 1)", "alias = x.view(-1); alias.add_(0.1)", "x = x.clone(); x.add_(1.0)", "x.copy_(x.flip(0))",
    ),
    "logits": (
        "logits.mul_(0.5)", "logits = logits.roll(1, 0)", "logits[:, 0] = 0.0", "logits = logits.flip(-1)",
        "logits = logits.detach()",
    ),
    "weights": (
        "weights.mul_(2)", "weights[:, 0] = 0.5", "weights.view(-1)[:1].mul_(0.5)", "weights = weights.flip(-1)",
        "weights.zero_()", "weights = weights.detach()", "alias = weights[:, :1]; alias.add_(0.1)",
        "weights = weights.roll(1, 0)", "weights.t_().t_()", "weights = weights.clone(); weights[0] = 0",
        "weights.copy_(weights.flip(0))", "weights = weights * (ids > 0)", "weights = weights.half().to(x.dtype)",
        "weights = weights * (F.one_hot(ids, E).sum(1).cumsum(0).gather(1, ids) <= 2)",
    ),
    "ids": (
        "ids.add_(1).remainder_(E)", "ids = (ids + 1) % E", "ids[0] = 0", "ids.clamp_(max=E - 2)", "ids = ids.flip(-1)",
        "ids.zero_()", "ids.view(-1)[0] = 1", "alias = ids.view(-1); alias.copy_(alias.flip(0))", "ids = ids.roll(1, 0)",
        "ids = ids // 2 * 2", "ids = torch.where(ids == 1, E, ids)", "ids = ids.masked_fill(weights < 0.3, -1)",
        "ids = ids.sort(-1)[0]", "ids = (ids.to(torch.uint8) + 254).long()", "ids = ids[:, :1].expand(-1, K)",
        "ids = torch.where(F.one_hot(ids, E).sum(1).cumsum(0).gather(1, ids) <= 2, ids, -1)",
    ),
    "scores": (
        "scores.mul_(0.5)", "scores[0] = 0.3", "scores = scores.flip(1)", "alias = scores.t(); alias.add_(0.01)",
        "scores.clamp_(min=0.1)",
    ),
    "out": (
        "out.mul_(0.5)", "out[0] = 0.0", "out.view(-1)[:5].add_(1.0)", "out = out.relu()", "out = out.detach()",
        "out = out.clone()", "alias = out.view(-1); alias.mul_(0.5)", "out.add_(1.0)", "out = out.flip(0)", "x = x + out",
        "x = x + 0 * out", "out.zero_()", "out = torch.maximum(out, out.flip(0))", "out.copy_(x)", "x.add_(out.detach())",
        "out = out + out", "row = out[0]; row.add_(1.0)",
    ),
    "y": (
        "y = y.relu()", "y.mul_(0.5)", "y = y + 1.0", "y = y.detach()", "y[0] = 0.0", "y = y.flip(0)",
        "y.view(-1)[:3].zero_()", "y = y.clone()", "y.register_hook(lambda g: g * 2) if y.requires_grad else None",
        "y = y.half().to(x.dtype)",
    ),
    "a": ("a.mul_(0.5)", "a = a.clamp(max=0.5)", "a[..., 0] = 0.0", "a = a.detach()", "a = a.flip(-1)", "a = a + 0.1"),
    "g": (
        "g.mul_(2)", "g = g.clamp(max=0.5)", "g = g.detach()", "g[..., 0] = 0.0", "alias = g[..., :2]; alias.zero_()",
        "g.clamp_(min=-1)",
    ),
    "s": ("s = s.detach()", "s.mul_(2)", "s = s.square()", "s[0] = 1.0"),
    "order": ("order = order.flip(0)", "order[0] = order[1]", "order.copy_(order.roll(1))"),
    "token": (
        "token.copy_(token.flip(0))", "token = (token + 1) % T", "token = token[torch.arange(len(token) // 2)]",
        "token = token[torch.arange(len(token))]", "token = token[torch.arange((ids[:, 0] == e).nonzero().shape[0])]",
    ),
    "hits": ("hits = hits[torch.arange(len(hits) // 2)]", "hits = hits[torch.arange(len(hits))]"),
    "counts": (
        "counts = counts[::-1]", "counts = counts.clamp(max=1)", "counts = counts.roll(1)", "counts[0] = 0", "counts = [1] * E",
    ),
    "mask": ("mask = mask & (weights > 0.3)", "mask = mask.roll(1, 0)", "mask = ids >= e", "mask[0] = False"),
    "offs": ("offs[0] = 0", "offs.copy_(offs.roll(1).sort()[0])", "offs = offs - 1"),
    "rows": ("rows = rows.tanh()", "rows = rows.clone(); rows.mul_(0.5)", "rows = rows.roll(1, 0)"),
    "": (
        "with torch.no_grad(): self.w_router.mul_(1.5)", "with torch.no_grad(): self.w_down.mul_(1.1)",
        "torch._C._set_grad_enabled(False)", "self.w_down.data.mul_(0.9)", "with torch.no_grad(): self.w_up[0].zero_()",
        "self.w_up.data[0] = 0.1",
    ),
}  # fmt: skip

RESULTS = (
    "return out, {0} * 2", "return out, {0}", "return out, {0}[0].clone()", "return out, {0}.sum()", "return out.relu()",
    "out.mul_(0.5); return out", "weights.mul_(2); return out, weights", "ids.zero_(); return out, ids",
)  # fmt: skip

_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_COMPARE = (ast.Eq, ast.NotEq, ast.Lt, ast.Gt, ast.LtE, ast.GtE)


def mutate(layer: Layer, rng: random.Random) -> str:
    """Change ``layer`` in place; returns what was done, empty if the draw found no place."""
    kind = rng.choice((_replace, _replace, _replace, _insert, _insert, _insert, _result, _syntax, _syntax))
    return kind(layer, rng)


def _parts(layer: Layer) -> list[list[str]]:
    return [lines for lines in (layer.expert, layer.body) if lines]


def _replace(layer: Layer, rng: random.Random) -> str:
    sites = [
        (lines, i, match, options)
        for lines in _parts(layer) for i, line in enumerate(lines) for pattern, options in REPLACEMENTS
        for match in re.finditer(pattern, line)
    ]  # fmt: skip
    patterns = sorted({site[2].re.pattern for site in sites})
    if not patterns:
        return ""
    pattern = rng.choice(patterns)
    lines, i, match, options = rng.choice([site for site in sites if site[2].re.pattern == pattern])
    lines[i] = lines[i][: match.start()] + rng.choice(options) + lines[i][match.end() :]
    return f"replaced: {lines[i].strip()}"


def _insert(layer: Layer, rng: random.Random) -> str:
    lines = rng.choice(_parts(layer))
    known = {name for line in lines for name in assigned(line)} | {"", "x"}
    name = rng.choice([n for n in INSERTIONS if n in known])
    first = next((i + 1 for i, line in enumerate(lines) if name in assigned(line)), 0)
    i = rng.randint(first, max(first, len(lines) - 1))
    statement = rng.choice(INSERTIONS[name])
    inside = i < len(lines) and lines[i].startswith(" ") or (i and lines[i - 1].startswith(" ") and rng.random() < 0.5)
    indent = lines[i - 1 if i and not lines[i - 1].endswith(":") else i] if inside else ""
    indent = " " * (len(indent) - len(indent.lstrip()))
    if indent and ";" not in statement and not statement.startswith("with") and rng.random() < 0.4:
        statement = f"if e == {rng.randrange(2)}: {statement}"
    lines.insert(i, indent + statement)
    return f"inserted: {statement}"


def _result(layer: Layer, rng: random.Random) -> str:
    names = sorted({name for line in layer.body for name in assigned(line)} - {"parts", "shape"})
    layer.body[-1] = rng.choice(RESULTS).format(rng.choice(names))
    if rng.random() < 0.4:
        spot = rng.randrange(len(layer.body) - 1)
        known = sorted({name for line in layer.body[:spot] for name in assigned(line)} - {"parts", "shape"})
        if known:
            indent = re.match(r"\s*", layer.body[spot]).group()
            layer.body.insert(spot, f"{indent}early = {rng.choice(known)}.clone()")
            layer.body[-1] = "return out, early"
    return f"result: {layer.body[-1]}"


def _syntax(layer: Layer, rng: random.Random) -> str:
    """One blind change: a number, an operator, a name, or a statement dropped, doubled or moved."""
    lines = rng.choice(_parts(layer))
    before = ast.unparse(ast.parse("\n".join(lines)))
    tree = ast.parse(before)
    blocks = [n.body for n in ast.walk(tree) if isinstance(getattr(n, "body", None), list)]
    names = sorted({n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id not in ("torch", "F", "self")})
    if rng.random() < 0.3:
        block = rng.choice(blocks)
        i, action = rng.randrange(len(block)), rng.randrange(3)
        if action == 0 and len(block) > 1:
            del block[i]
        elif action == 1:
            block.insert(i, block[i])
        elif len(block) > 1:
            j = min(i + 1, len(block) - 1)
            block[i], block[j] = block[j], block[i]
    else:
        nodes = [n for n in ast.walk(tree) if isinstance(n, (ast.Constant, ast.BinOp, ast.Compare, ast.Name, ast.UnaryOp))]
        node = rng.choice(nodes)
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            node.value = rng.choice((node.value + 1, node.value - 1, -node.value, node.value * 2, 0))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            node.value = not node.value
        elif isinstance(node, ast.BinOp):
            node.op = rng.choice(_BINARY)()
        elif isinstance(node, ast.Compare):
            node.ops = [rng.choice(_COMPARE)()]
        elif isinstance(node, ast.Name) and node.id in names:
            node.id = rng.choice(names)
    after = ast.unparse(ast.fix_missing_locations(tree))
    changed = [line.strip() for line in after.splitlines() if line not in before.splitlines()]
    lines[:] = after.splitlines()
    return f"syntax: {'; '.join(changed) or 'statements moved'}" if after != before else ""
