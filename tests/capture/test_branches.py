"""Branches on data that a compile traces as if always taken: what may not be, is compiled as written and equals eager.

Each program is a loop over experts whose guarded body moves something that no tensor shows, or changes ids behind a helper.
"""

import ast
import code
import itertools
import linecache
import operator
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.variables import ConstantVariable

import moeblaze_ops
from moeblaze_ops import compile as moeblaze_compile
from moeblaze_ops.lowering.obligations import branches
from moeblaze_ops.lowering.tracing.hit_loops import Declined, Taken, handled
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

D, E, K, T = zoo.D, zoo.E, zoo.K, 6


pytestmark = pytest.mark.usefixtures("scratch")


class Layer(nn.Module):
    """Experts in a list, and a router that never chooses experts 1 and 3 if told so."""

    def __init__(self, combine):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(zoo.BareMLP() for _ in range(E))
        self.register_buffer("penalty", torch.zeros(E))
        self.combine, self.state = combine, SimpleNamespace(seen=[], calls=0, table={})

    def flat(self, ids):
        return ids.view(-1)

    def draw(self, experts):
        return next(experts)

    def forward(self, x):
        weights, ids = (self.gate(x) + self.penalty).softmax(-1).topk(K, -1)
        return self.combine(self, x, weights, ids)

    def add(self, out, expert, x, weights, ids, e):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])


def rows(ids, e):
    return torch.where(ids == e)[0]


# Iterators and generators that only a guarded body moves.


def moves(make, draw):
    """A loop whose guarded body draws from ``make(self)`` what it takes for the next expert."""

    def combine(self, x, weights, ids):
        out, left = torch.zeros_like(x), make(self)
        for e in range(E):
            if rows(ids, e).numel() == 0:
                continue
            self.add(out, draw(self, left), x, weights, ids, e)
        return out

    return combine


def generator(self):
    yield from self.experts


def counting(self):
    taken = 0
    while True:
        step = yield self.experts[taken % E]
        taken += 1 if step is None else step


def first_of(self):
    for expert in self.left:
        return expert
    return None


def drawn_with_first_of(self, left):
    self.left = left
    return first_of(self)


def extended(self, left):
    found = []
    found.extend(left)
    return found[0] if found else self.experts[0]


MOVES = {
    "iter": (lambda self: iter(self.experts), Layer.draw),
    "dunder": (lambda self: iter(self.experts), lambda self, left: left.__next__()),
    "enumerate": (lambda self: enumerate(self.experts), lambda self, left: next(left)[1]),
    "map": (lambda self: map(self.experts.__getitem__, range(E)), Layer.draw),
    "filter": (lambda self: filter(lambda e: e is not None, self.experts), Layer.draw),
    "reversed": (lambda self: reversed(self.experts), Layer.draw),
    "zip": (lambda self: zip(self.experts, range(E), strict=True), lambda self, left: next(left)[0]),
    "chain": (lambda self: itertools.chain(self.experts, self.experts), Layer.draw),
    "count": (lambda self: itertools.count(), lambda self, left: self.experts[next(left) % E]),
    "islice": (lambda self: itertools.islice(self.experts, E), Layer.draw),
    "dict_values": (lambda self: iter(dict(enumerate(self.experts)).values()), Layer.draw),
    "range": (lambda self: iter(range(E)), lambda self, left: self.experts[next(left)]),
    "generator": (generator, Layer.draw),
    "expression": (lambda self: (expert for expert in self.experts), Layer.draw),
    "loop_that_returns": (lambda self: iter(self.experts), drawn_with_first_of),
    "unpacked": (lambda self: iter(self.experts), lambda self, left: ([*left] or [self.experts[0]])[0]),
    "extended": (lambda self: iter(self.experts), extended),
    "listed": (lambda self: iter(self.experts), lambda self, left: (list(left) or [self.experts[0]])[0]),
    "zipped": (lambda self: iter(self.experts), lambda self, left: next(zip(left, range(1), strict=False))[0]),
    "in_a_list": (lambda self: iter(self.experts), lambda self, left: next(map(next, [left]))),
    "generator_in_a_list": (lambda self: [generator(self)], lambda self, left: next(left[0])),
    "list_pop": (lambda self: list(self.experts), lambda self, left: left.pop()),
    "dict_pop": (lambda self: dict(enumerate(self.experts)), lambda self, left: left.popitem()[1]),
}


# Python objects that only a guarded body changes, and names that it sets.


def state(change, read=lambda self, found: 1.0 + self.state.calls):
    """A loop whose guarded body changes what ``read`` reads behind it."""

    def combine(self, x, weights, ids):
        out, found = torch.zeros_like(x), {}
        for e, expert in enumerate(self.experts):
            if (ids == e).any():
                self.add(out, expert, x, weights, ids, e)
                change(self, found, e)
        return out * read(self, found)

    return combine


def count_call(self, found, e):
    self.state.calls += 1


def closure_counts(self, x, weights, ids):
    out, calls = torch.zeros_like(x), 0

    def run(e):
        nonlocal calls
        if len(rows(ids, e)):
            self.add(out, self.experts[e], x, weights, ids, e)
            calls += 1

    for e in range(E):
        run(e)
    return out * calls


def last_is_read(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if (ids == e).any():
            self.add(out, expert, x, weights, ids, e)
            last = e
    return out * last


def returns_early(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if not (ids == e).any():
            return out
        self.add(out, expert, x, weights, ids, e)
    return out


def helper_says_whether(self, x, weights, ids):
    out, used = torch.zeros_like(x), 0

    def run(e):
        if not (ids == e).any():
            return 0
        self.add(out, self.experts[e], x, weights, ids, e)
        return 1

    for e in range(E):
        used += run(e)
    return out * used


def lengths_are_read(self, x, weights, ids):
    out, parts = torch.zeros_like(x), []
    for e, expert in enumerate(self.experts):
        token = rows(ids, e)
        if token.numel() == 0:
            continue
        self.add(out, expert, x, weights, ids, e)
        parts.append(x[token])
    return out * len(parts)


def lists_are_walked(self, x, weights, ids):
    out, parts = torch.zeros_like(x), []
    for e, expert in enumerate(self.experts):
        token = rows(ids, e)
        if token.numel() == 0:
            continue
        self.add(out, expert, x, weights, ids, e)
        parts.append(x[token])
    for place, part in enumerate(parts):
        out = out + place * part.sum()
    return out


STATE = {
    "attribute": state(count_call),
    "list": state(lambda self, found, e: self.state.seen.append(e), lambda self, found: 1.0 + len(self.state.seen)),
    "dict": state(lambda self, found, e: self.state.table.update({e: 1}), lambda self, found: 1.0 + len(self.state.table)),
    "local_dict": state(lambda self, found, e: found.update({e: 1}), lambda self, found: 1.0 + len(found)),
    "setdefault": state(lambda self, found, e: found.setdefault(e, 1), lambda self, found: 1.0 + len(found)),
    "closure": closure_counts,
    "last": last_is_read,
    "returns_early": returns_early,
    "helper_says_whether": helper_says_whether,
    "lengths_are_read": lengths_are_read,
    "lists_are_walked": lists_are_walked,
}


# Ids that change between what says which experts have tokens and what they are compared with.


def changed(alias, *, loop):
    """Ids written through ``alias(self, ids)`` behind the numbers that ``loop`` goes by."""

    def combine(self, x, weights, ids):
        ids, out = ids.clone(), torch.zeros_like(x)
        change = alias(self, ids)
        hit = ids.unique() if loop == "unique" else torch.bincount(ids.flatten(), minlength=E)
        change((ids + 1) % E)
        if loop == "unique":
            for e in hit:
                self.add(out, self.experts[e], x, weights, ids, e)
        else:
            for e, expert in enumerate(self.experts):
                if hit[e] == 0:
                    continue
                self.add(out, expert, x, weights, ids, e)
        return out

    return combine


def through(held, write):
    return lambda other: write(held, other)


ALIASES = {
    "method": lambda self, ids: through(self.flat(ids), lambda flat, other: flat.copy_(other.view(-1))),
    "lambda": lambda self, ids: lambda other: ids.copy_(other),
    "dict": lambda self, ids: through({"ids": ids}, lambda held, other: held["ids"].copy_(other)),
    "namespace": lambda self, ids: through(SimpleNamespace(ids=ids), lambda held, other: held.ids.copy_(other)),
}


def gradients(layer, run, x):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = run(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    # Skipping an expert leaves None, where running it on nothing gives zeros.
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **found}


def check(combine) -> int:
    """Outputs, gradients, buffers and Python state equal those of eager; returns how many layers were rewritten."""

    def make():
        torch.manual_seed(1)
        return Layer(combine)

    eager, layer = make(), make()
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        run = torch.compile(layer, backend=backend)
        for penalty in (0.0, -1000.0, 0.0):
            x = torch.randn(T, D)
            for twin in (eager, layer):
                twin.penalty[[1, 3]] = penalty
            torch.testing.assert_close(gradients(layer, run, x), gradients(eager, eager, x), atol=1e-5, rtol=1e-4)
            assert layer.state == eager.state
    return len(rewritten_in(records))


@pytest.mark.parametrize("name", MOVES)
def test_iterators_are_not_moved_for_experts_without_tokens(name):
    if name == "reversed" and torch.__version__ < "2.13":
        pytest.skip("Dynamo 2.11 takes reversed(...) for a tuple, whose first item next() gives each time, whoever compiles")
    assert check(moves(*MOVES[name])) == 0


@pytest.mark.parametrize("name", STATE)
def test_python_objects_are_not_changed_for_experts_without_tokens(name):
    assert check(STATE[name]) == 0


@pytest.mark.parametrize(("name", "loop"), zip(ALIASES, ["unique", "bincount"] * 2, strict=True))
def test_ids_that_change_behind_a_helper(name, loop):
    assert check(changed(ALIASES[name], loop=loop)) == 0


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
@pytest.mark.parametrize("mirrored", [False, True])
def test_comparisons_of_a_number_that_is_more_where_a_branch_was_taken(name, mirrored):
    """What a comparison gives is what it is of all numbers that it may be, or nothing."""
    compare, way = getattr(operator, name), ((None, True),)
    for least, more, number in itertools.product(range(-2, 3), range(2), range(-3, 5)):
        numbers = least + more, *range(least + more + 1, 9)
        first, *others = (compare(number, n) if mirrored else compare(n, number) for n in numbers)
        taken, constant = Taken(least, (way,), more), ConstantVariable.create(number)
        args = (constant, taken) if mirrored else (taken, constant)
        if len(set(others)) > 1:
            with pytest.raises(Declined):
                handled(None, compare, [*args])
            continue
        found = handled(None, compare, [*args])
        known = (found.least, not found.least) if isinstance(found, Taken) else (found.value, found.value)
        assert known == (first, others[0]) and all(value is not number for value in known)


# Counts that do not say which experts have tokens.


def counted(change):
    """A loop that goes by ``change`` of the numbers of tokens, which says the same of an expert whatever its tokens are."""

    def combine(self, x, weights, ids):
        out, counts = torch.zeros_like(x), change(torch.bincount(ids.flatten(), minlength=E))
        for e, expert in enumerate(self.experts):
            if counts[e] > 0:
                self.add(out, expert, x, weights, ids, e)
        return out

    return combine


def without_first(counts):
    counts[0] = 0
    return counts


COUNTED = {
    "a count is written": without_first,
    "a count is multiplied away": lambda counts: counts * torch.arange(E).clamp(max=1),
    "all ids are one": lambda counts: torch.bincount(counts * 0, minlength=E),
    "only the first is kept": lambda counts: torch.cat([counts[:1], torch.zeros_like(counts[1:])]),
}


@pytest.mark.parametrize("name", COUNTED)
def test_experts_that_are_skipped_whatever_their_tokens_are(name):
    assert check(counted(COUNTED[name])) == 0


# Guards that nothing but Dynamo's instructions show, which are taken.


def in_a_method(self, x, weights, ids):
    out = torch.zeros_like(x)

    def run(e):
        if len(rows(ids, e)) == 0:
            return
        self.add(out, self.experts[e], x, weights, ids, e)

    for e in range(E):
        run(e)
    return out


def returns_its_argument(self, x, weights, ids):
    def run(out, e):
        token, slot = torch.where(ids == e)
        if token.shape[0] == 0:
            return out
        return out.index_add(0, token, self.experts[e](x[token]) * weights[token, slot, None])

    out = torch.zeros_like(x)
    for e in range(E):
        out = run(out, e)
    return out


def in_a_lambda(self, x, weights, ids):
    out, used = torch.zeros_like(x), lambda r: r.numel() > 0
    add = lambda e: self.add(out, self.experts[e], x, weights, ids, e)  # noqa: E731
    for e in range(E):
        if used(rows(ids, e)):
            add(e)
    return out


def nonlocal_sum(self, x, weights, ids):
    out = torch.zeros_like(x)

    def run(e):
        nonlocal out
        token, slot = torch.where(ids == e)
        if token.numel() > 0:
            out = out.index_add(0, token, self.experts[e](x[token]) * weights[token, slot, None])

    for e in range(E):
        run(e)
    return out


def own_iterators(self, x, weights, ids):
    """Iterators that the guarded body makes are its own."""
    out = torch.zeros_like(x)
    for e in range(E):
        if not (ids == e).any():
            continue
        expert = next(expert for place, expert in enumerate(self.experts) if place == e)
        self.add(out, expert, x, weights, ids, e)
    return out


def either_value(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None]) if len(token) else out
    return out


def two_conditions(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        if e < E and (ids == e).any() and self.state is not None:
            self.add(out, expert, x, weights, ids, e)
    return out


def adds_zero_otherwise(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if len(token):
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        else:
            out = out + 0 * expert(x[:1]).sum()
    return out


TAKEN = (
    in_a_method, returns_its_argument, in_a_lambda, nonlocal_sum, own_iterators, either_value, two_conditions,
    adds_zero_otherwise,
)  # fmt: skip


@pytest.mark.parametrize("combine", TAKEN, ids=lambda f: f.__name__)
def test_guards_in_helpers_are_rewritten(combine):
    assert check(combine) == 1


def adds_more_otherwise(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if len(token):
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        else:
            out = out + 1e-3 * expert(x[:1]).sum()
    return out


def aliased_without_tokens(self, x, weights, ids):
    """Without tokens ``out`` is ``base`` itself, which is written later."""
    base = torch.zeros_like(x)
    out = base
    for e, expert in enumerate(self.experts):
        token, slot = torch.where(ids == e)
        if len(token) and e == 1:
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
    out += 1
    return out + base + x


@pytest.mark.parametrize("combine", [adds_more_otherwise, aliased_without_tokens], ids=lambda f: f.__name__)
def test_work_on_the_other_side_is_kept(combine):
    assert check(combine) == 0


SOURCE = """
class FromText(Layer):
    def forward(self, x):
        weights, ids = (self.gate(x) + self.penalty).softmax(-1).topk(K, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out
"""


def _from_a_text() -> dict:
    found = dict(globals())
    exec(SOURCE, found)
    return found


def _from_a_notebook() -> dict:
    """A cell is compiled statement by statement, and its file is known to the cache of lines alone."""
    found, name = dict(globals()), "<ipython-input-1-0123456789ab>"
    linecache.cache[name] = len(SOURCE), None, SOURCE.splitlines(keepends=True), name
    for statement in ast.parse(SOURCE).body:
        exec(compile(ast.Module([statement], []), name, "exec"), found)
    return found


def _from_a_prompt() -> dict:
    console = code.InteractiveConsole(dict(globals()))
    for line in SOURCE.splitlines():
        console.push(line)
    console.push("")
    return console.locals


@pytest.mark.parametrize("define", [_from_a_text, _from_a_notebook, _from_a_prompt], ids=lambda f: f.__name__)
def test_code_without_a_source_file(define):
    layer, x = define()["FromText"](None), torch.randn(T, D)
    layer.penalty[[1, 3]] = -1000.0
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        torch.testing.assert_close(torch.compile(layer, backend=backend, fullgraph=True)(x), layer(x), atol=1e-6, rtol=1e-5)
    assert len(rewritten_in(records)) == 1
    explained = moeblaze_ops.explain(layer, x).candidates
    assert [entry.became for entry in explained] == ["expert_up(relu) -> expert_down"] and explained[0].kept_before


def test_first_run_of_a_proven_branch_is_verified(monkeypatch):
    monkeypatch.setattr(moeblaze_ops.config, "verify", "first")
    layer, x = _from_a_text()["FromText"](None), torch.randn(T, D)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        torch.testing.assert_close(torch.compile(layer, backend=backend, fullgraph=True)(x), layer(x), atol=1e-6, rtol=1e-5)
    assert len(rewritten_in(records)) == 1


def test_known_sizes_are_not_asked_for_without_need(monkeypatch):
    """No rows are written for an expert without tokens, whatever is known of those of the others."""
    monkeypatch.setattr(branches, "known_sizes", lambda view: pytest.fail("nothing here depends on sizes of several parts"))
    layer, x = _from_a_text()["FromText"](None), torch.randn(T, D)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        torch.testing.assert_close(torch.compile(layer, backend=backend, fullgraph=True)(x), layer(x), atol=1e-6, rtol=1e-5)
    assert len(rewritten_in(records)) == 1


# Flags of data, asked in other ways than by `if flag:`.


@pytest.mark.parametrize(
    "ask",
    [
        lambda hit: hit.any().item() is True,
        lambda hit: hit.any().item() is not False,
        lambda hit: bool(hit.any()) is True,
        lambda hit: hit.any().item() == 1,
        lambda hit: hit.any().item() != 0,
        lambda hit: hit.any().item() == True,  # noqa: E712
        lambda hit: (hit.sum().item() > 0) == 1,
    ],
)
def test_flags_that_are_compared(ask):
    """Dynamo takes a flag that only the data tell for another object than True, and for another number than 1."""

    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            if ask(ids == e):
                self.add(out, self.experts[e], x, weights, ids, e)
        return out

    torch.manual_seed(0)
    layer, x = Layer(combine), torch.randn(T, D)
    with rewriting_backend() as backend:
        torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))


# Loggers, which Dynamo calls behind the graph.


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_loggers_are_called_for_each_expert_that_the_program_calls_them_for(guarded, inside):
    logged = []

    def log(text):
        logged.append(text)

    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            if guarded and len(token) == 0:
                continue
            log(f"expert {e}")
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out

    layer, x = Layer(combine), torch.randn(T, D)
    layer.penalty[[1, 3]] = -1000.0
    expected, as_written = layer(x), list(logged)
    loggers = torch._dynamo.config.patch(reorderable_logging_functions={log})
    with loggers, rewriting_backend() as backend, moeblaze_compile.recording() as records:
        logged.clear()
        out = torch.compile(nn.Sequential(layer) if inside else layer, backend=backend)(x)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    assert logged == as_written and len(rewritten_in(records)) == (not guarded)
