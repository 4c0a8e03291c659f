"""Programs whose meaning hides: in helpers, aliases, iterators, hooks, strides, and foreign operators of the same name.

``hide`` writes a layer in another way that means the same; how many of them are rewritten is counted and not asserted.
``deceive`` changes what it computes, where only running it, or tracing it, shows that.
"""

import itertools
import random
import re

from tests.corpus.fuzz.layer import Layer, assigned

# (what is replaced, the text in its place, a definition in the module, lines of ``forward`` before it)
_CALLS = (
    (r"ids == e", "same(ids, e)", ("def same(a, b):", "    return a == b"), ()),
    (r"ids == e", "(lambda i: i == e)(ids)", (), ()),
    (r"ids == e", "box['ids'] == e", (), ("box = {'ids': ids}",)),
    (r"ids == e", "held.ids == e", ("Held = collections.namedtuple('Held', 'ids')",), ("held = Held(ids)",)),
    (r"ids == e", "torch.stack([i == e for i in ids.unbind(1)], 1)", (), ()),
    (r"torch\.where\(([^,()]+)\)", r"find(\1)", ("def find(mask):", "    return torch.where(mask)"), ()),
    (r"torch\.where\(([^,()]+)\)", r"(\1).nonzero().unbind(1)", (), ()),
    (r"self\.expert\(e, (\w+)\)", r"run(e, \1)", (), ("run = self.expert",)),
    (r"self\.expert\(e, (\w+)\)", r"functools.partial(self.expert, e)(\1)", (), ()),
    (r"self\.expert\(e, (\w+)\)", r"run[e](\1)", (), ("run = [functools.partial(self.expert, i) for i in range(E)]",)),
    (r"self\.expert\(e, (\w+)\)", r"(lambda rows: self.expert(e, rows))(\1)", (), ()),
    (r"token\.numel\(\) == 0", "empty(token)", ("def empty(rows):", "    return not rows.numel()"), ()),
    (r"token\.shape\[0\] == 0", "token.size(0) < 1", (), ()),
    (r"len\(token\) == 0", "not len(token)", (), ()),
    (r"mask\.any\(\)", "some(mask)", ("def some(mask):", "    return mask.sum() > 0"), ()),
    (r"mask\.any\(\)", "bool(mask.any())", (), ()),
    (r"mask\.any\(\)", "mask.any().item()", (), ()),
    (r"range\(E\)", "numbers(E)", ("def numbers(count):", "    yield from range(count)"), ()),
    (r"range\(E\)", "[i for i in range(E)]", (), ()),
    (r"range\(E\)", "map(int, range(E))", (), ()),
    (r"range\(E\)", "itertools.islice(itertools.count(), E)", (), ()),
    (r"range\(E\)", "ids.unique().tolist()", (), ()),
    (r"range\(E\)", "sorted(set(ids.flatten().tolist()))", (), ()),
)  # fmt: skip

_DECORATOR = (
    "def logged(function):", "    @functools.wraps(function)", "    def call(*args, **kwargs):",
    "        return function(*args, **kwargs)", "    return call",
)  # fmt: skip


def hide(layer: Layer, rng: random.Random) -> None:
    """Write ``layer`` in a way that hides one to three of its steps, in place."""
    for _ in range(rng.randint(1, 3)):
        rng.choice((_call_a_helper, _call_a_helper, _call_a_helper, _loop_over_a_function, _decorate))(layer, rng)


def _call_a_helper(layer: Layer, rng: random.Random) -> None:
    sites = [(i, entry) for i, line in enumerate(layer.body) for entry in _CALLS if re.search(entry[0], line)]
    if not sites:
        return
    i, (pattern, text, definition, before) = rng.choice(sites)
    layer.body[i] = re.sub(pattern, text, layer.body[i], count=1)
    layer.define(definition)
    if before and before[0] not in layer.body:
        statement = _statement(layer, i)
        layer.body[statement:statement] = before
    layer.hidden.append(text)


def _statement(layer: Layer, i: int) -> int:
    """Where the outermost statement begins that line ``i`` is in."""
    while layer.body[i].startswith(" "):
        i -= 1
    return i


def _end(layer: Layer, head: int) -> int:
    """The line behind the statement that begins in line ``head``."""
    inside = itertools.takewhile(lambda line: line.startswith(" "), layer.body[head + 1 :])
    return head + 1 + len(list(inside))


def _loop_over_a_function(layer: Layer, rng: random.Random) -> None:
    """The rounds of a loop are calls of a nested function: ``for e in range(E): one(e)``."""
    heads = [i for i, line in enumerate(layer.body) if re.fullmatch(r"for \w+ in .*:", line)]
    if not heads:
        return
    head = rng.choice(heads)
    end = _end(layer, head)
    rounds = layer.body[head + 1 : end]
    if any(re.search(r"\b(break|for|return)\b", line) for line in rounds):
        return
    changed = {name for line in rounds for name in re.findall(r"^\s*(\w+) [-+*]?= ", line)}
    shared = sorted(changed.intersection(name for line in layer.body[:head] for name in assigned(line)))
    variable = re.match(r"for (\w+) in", layer.body[head])[1]
    function = [f"def one({variable}):", *([f"    nonlocal {', '.join(shared)}"] if shared else [])]
    function += [re.sub(r"\bcontinue\b", "return", line) for line in rounds]
    layer.body[head:end] = [*function, layer.body[head], f"    one({variable})"]
    layer.hidden.append("one(e)")


def _decorate(layer: Layer, rng: random.Random) -> None:
    if layer.decorator:
        return
    layer.decorator = "@logged"
    layer.define(_DECORATOR)
    layer.hidden.append("@logged")


# Writes to what other lines read, by names that do not show it: (lines before the loop, the line that writes).
_WRITES = (
    (("swap = lambda: {0}.copy_({0}.flip(0))",), "swap()"),
    (("def swap():", "    {0}.copy_({0}.roll(1, 0))"), "swap()"),
    (("box = {{'of': {0}}}",), "box['of'][0] = box['of'][-1]"),
    (("alias = flattened({0})",), "alias.copy_(alias.flip(0))"),
    (("alias = flattened({0})", "swap = functools.partial(alias.copy_, alias.flip(0))"), "swap()"),
    (("parts_of = list({0}.unbind(0))",), "parts_of[0].copy_(parts_of[-1])"),
)  # fmt: skip
_FLATTENED = ("def flattened(tensor):", "    return tensor.view(-1)")

# State of Python that a round of the loop changes: (lines before the loop, the line in it, the line after it).
_STATE = (
    ((), "self.seen += 1", ""),
    ((), "self.log.append(e)", ""),
    (("used = []",), "used.append(e)", "out = out * len(used)"),
    (("used = {}",), "used[e] = 1", "out = out * (1 + sum(used))"),
    (("used = set()",), "used.add(e)", "out = out + len(used)"),
    (("last = -1",), "last = e", "out = out + last"),
    (("rounds = 0",), "rounds += 1", "out = out * rounds"),
    (("turn = iter(range(1, E + 1))",), "y = y * next(turn)", ""),
    (("turn = itertools.count(1)", "draw = functools.partial(next, turn)"), "y = y * draw()", ""),
    (("turn = (i + 1 for i in range(E))",), "y = y * next(turn)", ""),
    (("turn = collections.deque(range(1, E + 1))",), "y = y * turn.popleft()", ""),
    (("seen = torch.zeros(E)",), "seen[e] += 1", "out = out * seen.sum().to(out.dtype)"),
    ((), "self.loads[e] += 1", ""),
)  # fmt: skip

_FOREIGN = (
    (r"F\.silu\(", "foreign.silu("), (r"F\.gelu\((\w+)\)", r"foreign.gelu(\1)"), (r"torch\.relu\(|F\.relu\(", "foreign.relu("),
    (r"torch\.tanh\(", "foreign.tanh("), (r"F\.softmax\(", "foreign.softmax("), (r"torch\.topk\(", "foreign.topk("),
    (r"torch\.argsort\(", "foreign.argsort("), (r"torch\.zeros_like\(", "foreign.zeros_like("),
    (r"F\.linear\(", "foreign.linear("),
)  # fmt: skip

_LAYOUT = (
    "return out.as_strided(out.shape, out.stride())", "return torch.as_strided(out, (out.numel(),), (1,))", "return out.view(-1)",
    "return out * 2 if out.is_contiguous() else out", "return out * out.stride(0) if len(out) > 1 else out", "return out.mT",
)  # fmt: skip

# Lines of ``__init__`` for experts in a list of modules, and for stacked ones.
_MODULES = (
    "self.experts[0]['up'].register_forward_hook(lambda module, args, out: out * 2)",
    "self.experts[-1]['down'].register_forward_pre_hook(lambda module, args: (args[0] + 1,))",
    "self.experts[0]['up'].weight.register_hook(lambda g: g * 3)",
    "nn.utils.parametrizations.weight_norm(self.experts[0]['up'])",
    "nn.utils.parametrizations.weight_norm(self.experts[0]['down'])",
    "self.experts[1] = self.experts[0]",
    "self.experts[1]['up'].weight = self.experts[0]['up'].weight",
    "self.experts[0]['up'].weight.requires_grad_(False)",
    "self.experts.requires_grad_(False)",
    "self.experts[0]['up'].forward = lambda rows: rows @ self.experts[0]['up'].weight.t() * 2",
    "self.experts[0]['down'].__class__ = type('Linear', (nn.Linear,), {'forward': lambda s, r: F.linear(r, s.weight).tanh()})",
)  # fmt: skip
_STACKS = (
    "self.w_up.requires_grad_(False)",
    "self.w_down.requires_grad_(False)",
    "self.w_up.register_hook(lambda g: g * 3)",
    "nn.utils.parametrize.register_parametrization(self, 'w_up', Doubled())",
    "nn.utils.parametrize.register_parametrization(self, 'w_down', Doubled())",
)  # fmt: skip
_DOUBLED = ("class Doubled(nn.Module):", "    def forward(self, weight):", "        return 2 * weight")


def deceive(layer: Layer, rng: random.Random) -> str:
    """Change ``layer`` in place where its text does not show it; returns what was done, empty if the draw found no place."""
    return rng.choice((_write, _write, _keep_state, _keep_state, _take_foreign, _lay_out, _change_modules))(layer, rng)


def _heads(layer: Layer) -> list[int]:
    return [i for i, line in enumerate(layer.body) if re.fullmatch(r"for e\b.* in .*:", line)]


def _write(layer: Layer, rng: random.Random) -> str:
    text = "\n".join(layer.body)
    named = [name for name in ("ids", "weights", "x", "scores", "token", "flat", "order", "counts") if f"{name} = " in text]
    if not named:
        return ""
    name = rng.choice(named)
    before, line = rng.choice(_WRITES)
    before = [text.format(name) for text in before]
    spots = [i for i, text in enumerate(layer.body) if not text.startswith(" ") and re.search(rf"\b{name}\b.* = ", text)]
    if not spots:
        return ""
    first = spots[0] + 1
    layer.define(_FLATTENED)
    layer.body[first:first] = before
    spot = rng.randint(first + len(before), len(layer.body) - 1)
    depth = re.match(r"\s*", layer.body[spot]).group()
    layer.body.insert(spot, depth + line)
    return f"hidden write: {'; '.join(before)}: {line}"


def _keep_state(layer: Layer, rng: random.Random) -> str:
    heads = _heads(layer)
    if not heads:
        return ""
    before, line, after = rng.choice(_STATE)
    head = rng.choice(heads)
    end = _end(layer, head)
    spots = range(head + 1, end + 1)
    if "y = y" in line:
        spots = [i + 1 for i in range(head + 1, end) if re.match(r"\s+y = ", layer.body[i])]
    if not spots:
        return ""
    spot = rng.choice(spots)
    depth = re.match(r"\s*", layer.body[min(spot, end - 1)]).group()
    if layer.body[spot - 1].endswith(":"):
        depth = re.match(r"\s*", layer.body[spot - 1]).group() + "    "
    if after:
        layer.body.insert(end, after)
    layer.body.insert(spot, depth + line)
    layer.body[head:head] = before
    return f"state: {line}"


def _take_foreign(layer: Layer, rng: random.Random) -> str:
    sites = [
        (lines, i, pattern, text)
        for lines in (layer.expert, layer.body) for i, line in enumerate(lines) for pattern, text in _FOREIGN
        if re.search(pattern, line)
    ]  # fmt: skip
    if not sites:
        return ""
    lines, i, pattern, text = rng.choice(sites)
    lines[i] = re.sub(pattern, text, lines[i], count=1)
    layer.define(("from tests.corpus.fuzz import foreign",))
    return f"foreign: {lines[i].strip()}"


def _lay_out(layer: Layer, rng: random.Random) -> str:
    """Tokens in another layout, and a result that depends on the layout."""
    begin = rng.choice(("x = x.t().contiguous().t()", "x = torch.cat([x, x], -1)[:, :D]", "x = x.repeat_interleave(2, 0)[::2]"))
    i = next((i for i, line in enumerate(layer.body) if "logits = " in line), 0)
    layer.body.insert(i, begin)
    layer.body[-1] = rng.choice(_LAYOUT)
    return f"layout: {begin}; {layer.body[-1]}"


def _change_modules(layer: Layer, rng: random.Random) -> str:
    line = rng.choice(_MODULES if layer.storage == "list" else _STACKS)
    layer.define(_DOUBLED)
    layer.made.append(line)
    return f"modules: {line}"
