"""From one term of the combining sum to an expert: up projection, activation, down projection.

A term is a product. Its one factor that depends on the feature of the output is the expert, everything else decides
how much of it a token gets and is left to `routing_term`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from moeblaze_ops.kernels.formulas.expression import PARAMETER_SYMBOLS
from moeblaze_ops.kernels.formulas.named import num_parameters, value_at_zero
from moeblaze_ops.lowering.graph.functional_view import Value, target_name
from moeblaze_ops.lowering.graph.operators import PROJECTIONS
from moeblaze_ops.lowering.index_notation.distribution import factored
from moeblaze_ops.lowering.index_notation.expr import (
    DROPOUT,
    Expr,
    Indices,
    factors_of,
    is_changing,
    is_hidden,
    leaves_of,
    subexpressions,
)
from moeblaze_ops.lowering.index_notation.indicators import is_indicator
from moeblaze_ops.lowering.index_notation.normal_form import Algebra
from moeblaze_ops.lowering.match.reasons import Declined, Reason, prove
from moeblaze_ops.lowering.match.terms.activation import Formulas, is_double


@dataclass(frozen=True)
class Projection:
    """``weight`` (and ``bias``) as elements: leaves, or casts of leaves, indexed by expert and feature variables."""

    weight: Expr
    bias: Expr | None


@dataclass(frozen=True)
class ExpertTerm:
    """One expert's part of the sum, with the variables its weights are indexed by."""

    binders: tuple[Expr, ...]
    routing: tuple[Expr, ...]
    x: Expr
    scale: tuple[Expr, ...]
    up: tuple[Projection, ...]
    down: Projection
    activation: str
    width: Expr  # the variable of F
    feature_in: Expr  # the variable of D inside the up projection
    parameters: tuple[Expr, ...] = ()  # what the activation reads as p0, p1 and so on
    dropout: tuple[float, float] = (0, 0)  # how likely an element is dropped: of the activation, of the output


MORE_PROJECTIONS = "experts of three projections or more, of which the operators compute two"
ONE_PROJECTION = "experts of one projection each, without an activation, which no operator computes"
_RESIDUAL = "an expert adds more than a bias, such as its input: add `x * weights.sum(-1, keepdim=True)` behind the layer instead"
_ONE_FEATURE = "experts of one feature each (F = 1), whose slots are summed as features are"


def _undropped(e: Expr) -> tuple[Expr, float]:
    """What dropout is of, and its probability."""
    return (e.args[1][0], e.args[2][0]) if e.kind == "call" and e.args[0] == DROPOUT else (e, 0)


def _terms(e: Expr) -> tuple[Expr, ...]:
    return e.args if e.kind == "add" else (e,)


def is_expert_term(e: Expr, feature: Expr) -> bool:
    """A cheap look: two projections, chosen by a comparison, beside them or on the input, or by their weights' indices."""
    chosen = False
    binders: set[Expr] = set()
    while True:
        outputs = [f for f in factors_of(e) if feature in f.free]
        chosen = chosen or any(map(holds_comparison, (f for f in factors_of(e) if f not in outputs)))
        if len(outputs) != 1:
            return False
        e = outputs[0]
        if e.kind != "sum" or e.args[0].args[2] != "r":
            break
        binders.add(e.args[0])
        e = e.args[1]
    sums = (_scaled_sum(term, feature) for term in _terms(_undropped(e)[0]))
    down = next((s for s in sums if s is not None and s.args[1].has_dot), None)
    if down is None or chosen:
        return down is not None
    return any(_chooses(f, binders) if feature in f.free else _scales_input(f) for f in factors_of(down.args[1]))


def is_scored_term(e: Expr, feature: Expr) -> bool:
    """True if a term is like an expert without any comparison with one, beside what is zero for some tokens.

        out + gate.relu()[:, 2, None] * expert(x)                   but not  out + gate.softmax(-1)[:, 2, None] * expert(x)
    """
    marks = (f for f in factors_of(e) if is_indicator(f) or (f.kind == "call" and f.args[0] == "relu"))
    return any(map(_differs_by_token, marks)) and _is_weighed(e, feature)


def scored_terms(terms: Iterable[Expr], feature: Expr) -> list[Expr]:
    """The experts that no comparison chooses: beside scores that leave tokens out, or each beside columns of its own of a tensor.

    One alone may be any gated block, and  gate * block(x) + (1 - gate) * other(x)  has no router.
    """
    found = [term for term in terms if _is_weighed(term, feature)]
    columns = [_columns(term, feature) for term in found]
    of_values = {value: [own[value] for own in columns if value in own] for value in set().union(*columns)}
    tables = {value for value, each in of_values.items() if len(set(each)) == len(each) > 1}
    scored = [
        term for term, own in zip(found, columns, strict=True) if is_scored_term(term, feature) or not tables.isdisjoint(own)
    ]
    return scored if len(scored) > 1 else []


def _is_weighed(e: Expr, feature: Expr) -> bool:
    """A cheap look at a term: two projections of a token, beside what differs between tokens.

        share[:, 2, None] * expert(x)     but not     self.share[2] * expert(x), share[:, 2, None] * expert(x.mean(0))
    """
    outputs = [f for f in factors_of(e) if feature in f.free]
    if len(outputs) != 1 or not any(_differs_by_token(f) for f in factors_of(e) if f is not outputs[0]):
        return False
    down = next((s for s in (_scaled_sum(term, feature) for term in _terms(_undropped(outputs[0])[0])) if s is not None), None)
    return down is not None and down.args[1].has_dot and _differs_by_token(down)


def _differs_by_token(e: Expr) -> bool:
    return any(var.args[2] == "t" for var in e.free)


def _columns(e: Expr, feature: Expr) -> dict[Value, frozenset[Indices]]:
    """Which numbers the values have as indices that the score of an expert is made of: a router's those of the expert."""
    found: dict[Value, set[Indices]] = defaultdict(set)
    for leaf in (s for f in factors_of(e) if feature not in f.free for s in subexpressions(f, lambda s: s.kind == "leaf")):
        found[leaf.args[0]].add(tuple(index for index in leaf.args[1] if index.kind == "const"))
    return {value: frozenset(places) for value, places in found.items()}


def _scaled_sum(e: Expr, feature: Expr) -> Expr | None:
    """The projection's sum in a term that is one, up to factors that are the same for every feature of the output."""
    found = [f for f in factors_of(e) if f.kind == "sum" and f.args[0].args[2] == "d" and feature in f.free]
    return found[0] if len(found) == 1 and all(f is found[0] or feature not in f.free for f in factors_of(e)) else None


def _scales_input(hidden: Expr) -> bool:
    """True if a factor of what the last projection takes compares: a weight, or an activation of a weighted projection.

    A sum of projections is no activation: it may be the output of another layer, for a linear layer behind it.
    """
    return holds_comparison(hidden) and not (hidden.has_dot and hidden.kind in ("add", "mul", "sum"))


def are_stored_over(terms: Sequence[Expr]) -> bool:
    """True if each expert's output is there for a token that none of those behind it takes: ``out[mask] = y``, one by one."""
    taken = [sum(f.kind == "add" and holds_comparison(f) for f in factors_of(term)) for term in terms]
    return len(terms) > 1 and sorted(taken) == list(range(len(terms)))


def holds_comparison(e: Expr) -> bool:
    """True if a part of ``e`` is a comparison, or whether any holds."""
    return next(iter(subexpressions(e, lambda s: s.kind in ("eq", "any"))), None) is not None


def _chooses(weight: Expr, binders: set[Expr]) -> bool:
    """True if a weight is indexed by data, by the group of a row, or by the variable of a sum around the expert."""
    for leaf in subexpressions(weight, lambda s: s.kind == "leaf"):
        for index in leaf.args[1]:
            atoms = [atom for _, atom in index.args[1]] if index.kind == "linear" else [index]
            if any(atom.kind in ("leaf", "group", "call") or atom in binders for atom in atoms):
                return True
    return False


def _chooses_by(width: Expr, weight: Expr) -> bool:
    """True if data that ``width`` is a subscript of choose a weight: up[ids[t, f]], down[ids[t, f]]."""
    indices = (index for leaf in subexpressions(weight, lambda s: s.kind == "leaf") for index in leaf.args[1])
    return any(width in leaf.free for index in indices for leaf in subexpressions(index, lambda s: s.kind == "leaf"))


def read_expert(algebra: Algebra, formulas: Formulas, term: Expr, feature: Expr) -> ExpertTerm:
    binders: list[Expr] = []
    routing: list[Expr] = []
    core = term
    while True:
        outputs = [f for f in factors_of(core) if feature in f.free]
        routing += [f for f in factors_of(core) if feature not in f.free]
        prove(len(outputs) == 1, Reason.NOT_TWO_PROJECTIONS, "the output is a product of several feature vectors")
        core = factored(algebra, outputs[0])  # y * weight + bias * weight
        if core.kind == "mul":
            continue
        if core.kind == "sum" and core.args[0].args[2] == "r":
            var, core = algebra.open(core)
            binders.append(var)
            continue
        break
    core, behind = _undropped(core)
    down_sum, scale, down_bias = _projection(core, feature)
    width, body = algebra.open(down_sum)
    weights = [f for f in factors_of(body) if feature in f.free]
    prove(len(weights) == 1, Reason.PROJECTION_WEIGHTS, "down projection")
    prove(not _chooses_by(width, weights[0]), Reason.NOT_TWO_PROJECTIONS, _ONE_FEATURE)
    parts = [(f, *_undropped(f)) for f in factors_of(body) if feature not in f.free]
    alone = sum(width in f.free for f, *_ in parts) == 1  # F.dropout(F.silu(gate)) * up drops another function
    between = max((p for *_, p in parts), default=0) if alone else 0
    hidden = algebra.mul(*scale, *(inner if alone else f for f, inner, _ in parts))
    whole = not any(True for _ in subexpressions(hidden, lambda s: s.kind == "call" and s.args[0] == DROPOUT))
    prove(whole, Reason.NOT_TWO_PROJECTIONS, "dropout between the projections of less than the activation")
    of_experts = frozenset(binders)
    read: dict[str, Any] = _read_hidden(algebra, formulas, hidden, tuple(routing), width, down_bias is None, of_experts)
    down = Projection(weights[0], down_bias)
    return ExpertTerm(binders=tuple(binders), down=down, width=width, dropout=(between, behind), **read)


def _projection(e: Expr, output: Expr) -> tuple[Expr, list[Expr], Expr | None]:
    """``[scale *] sum over d of ... [+ bias]``."""
    products = [t for t in _terms(e) if _scaled_sum(t, output) is not None]
    others = [t for t in _terms(e) if t not in products]
    prove(len(products) == 1, Reason.NOT_TWO_PROJECTIONS, describe(e, output))
    prove(len(others) <= 1 and all(map(_is_weight_element, others)), Reason.NOT_TWO_PROJECTIONS, _RESIDUAL)
    product = _scaled_sum(products[0], output)
    return product, [f for f in factors_of(products[0]) if f is not product], others[0] if others else None


def _is_weight_element(e: Expr) -> bool:
    while e.kind == "cast":
        e = e.args[1]
    return e.kind == "leaf" and not any(index.kind == "var" and index.args[2] == "t" for index in e.args[1])


def is_chosen_bias(e: Expr) -> bool:
    return _is_weight_element(e) and _chooses(e, set())


def describe(e: Expr, feature: Expr) -> str:
    """What stands where a projection is expected."""
    return f"{made_by(e, feature)} where a projection is expected"


def describe_last(e: Expr, feature: Expr) -> str:
    """What stands before the last projection of a term, of which nothing else is known; in its place if there is none.

        F.rms_norm(F.silu(x @ up), (F,)) @ down             'rms_norm'
    """
    for width, inner in _projected(e, feature):
        return f"{made_by(inner, width)} where a pointwise function of a projection is expected"
    return describe(e, feature)


def has_one_projection(terms: Sequence[Expr], feature: Expr) -> bool:
    """True if several experts project one vector each, the same for all: what it is made of is no expert's.

        out + experts[e].weight @ h * share(e)              whatever ``h`` was projected from
    """
    projected = {frozenset(_projected(term, feature)) for term in terms}
    return len(terms) > 1 and len(projected) == 1 and projected != {frozenset()}


def has_more_projections(terms: Sequence[Expr], feature: Expr) -> bool:
    """True if what the first of two projections takes was projected before, by each expert for itself.

        self.down[e](F.relu(self.mid[e](F.relu(self.up[e](x)))))        but not self.down[e](F.relu(self.up[e](self.norm[e](x))))
    """
    read = [leaves_of(f) for term in terms for f in factors_of(term) if feature in f.free]
    shared = set.intersection(*read) if len(read) > 1 else set()
    return all(any(_is_projected(value.node) for value in values - shared) for values in read)


def _is_projected(node: fx.Node) -> bool:
    """True if a product was computed for this node alone."""
    while len(node.users) == 1 and node.all_input_nodes:
        if target_name(node) in PROJECTIONS:
            return True
        node = node.all_input_nodes[0]
    return False


def shared_projection(terms: Sequence[Expr], feature: Expr) -> str | None:
    """What is said of several experts that project by one weight, computed once for each token; None if they do not.

        base(x)[token] + experts[e].adapter(x[token])
    """
    outputs = [leaves_of(f) for term in terms for f in factors_of(term) if feature in f.free]
    weights = [value.node for value in set.intersection(*outputs) if value.of_state and len(value.shape) == 2]
    if len(outputs) < 2 or not weights:
        return None
    name = min(str(node.target) for node in weights)
    return f"experts share '{name}', whose product is computed once for each token: as weights of each it would be K times"


def _projected(e: Expr, feature: Expr) -> list[tuple[Expr, Expr]]:
    """What the last projections of a term are of, with the variables of their sums."""
    lasts = subexpressions(e, lambda s: s.kind == "sum" and s.args[0].args[2] == "d" and feature in s.free, over=feature)
    inner = ((width, f) for width, body in (last.args for last in lasts) for f in factors_of(body) if feature not in f.free)
    return [(width, f) for width, f in inner if width in f.free]


def made_by(e: Expr, feature: Expr) -> str:
    """The operator that ``feature`` leads to."""
    while e.kind in ("cast", "mul", "add", "sum"):
        parts = e.args[1:] if e.kind in ("cast", "sum") else e.args
        e = next((part for part in parts if feature in part.free), parts[0])
    if e.kind == "leaf":
        node = e.args[0].node
        return f"'{getattr(node.target, '__name__', node.target)}'"
    return f"'{e.args[0] if e.kind == 'call' else e.kind}'"


def _read_hidden(
    algebra: Algebra,
    formulas: Formulas,
    hidden: Expr,
    routing: tuple[Expr, ...],
    width: Expr,
    movable: bool,
    binders: frozenset[Expr],
) -> dict[str, object]:
    halves = tuple(subexpressions(hidden, lambda e: _is_up_projection(e, width)))
    parts = {factor for half in halves if half.kind == "add" for part in half.args for factor in (part, *factors_of(part))}
    halves = tuple(sorted((half for half in halves if half not in parts), key=lambda e: e.uid))
    prove(0 < len(halves) <= 2, Reason.NOT_TWO_PROJECTIONS, describe(hidden, width))
    symbols = tuple(algebra.var(-10 - i, 0, "r") for i in range(len(halves)))
    in_symbols = dict(zip(halves, symbols, strict=True))

    def read(parameters: tuple[Expr, ...]) -> tuple[tuple[Expr, ...], str, tuple[Expr, ...], tuple[Expr, ...]]:
        scale, bare, others = _input_scale(hidden, halves, parameters), hidden, routing
        if scale and all(half.kind == "sum" for half in halves):
            bare, others = _unscaled(algebra, hidden, routing, halves, scale, movable)
        function = _in_symbols(algebra, bare, in_symbols)
        return scale, *_read_activation(algebra, formulas, function, others, symbols, parameters, movable, is_double(halves))

    learned: tuple[Expr, ...] = ()
    try:
        scale, activation, order, routing = read(())
    except Declined:
        learned = tuple(dict.fromkeys(_parameters(_in_symbols(algebra, hidden, in_symbols), binders)))
        if not 0 < len(learned) <= len(PARAMETER_SYMBOLS):
            raise
        scale, activation, order, routing = read(learned)
    masked = any(map(holds_comparison, scale)) and all(half.kind == "sum" for half in halves)
    finite = not masked or math.isfinite(value_at_zero(activation))  # else [m] f([m] x) = [m] f(x) does not hold
    prove(finite, Reason.ACTIVATION, "of zeros, which a mask makes of what an expert reads, it is no finite number")
    projections = [_read_up(algebra, halves[symbols.index(symbol)], width) for symbol in order]
    (_, x, feature_in), *others = projections
    prove(all(own[1:] == (x, feature_in) for own in others), Reason.DIFFERENT_INPUTS, "gate and up")
    return {
        "routing": routing,
        "x": x,
        "scale": tuple(map(algebra.unscaled, scale)),
        "up": tuple(projection for projection, _, _ in projections),
        "activation": activation,
        "feature_in": feature_in,
        "parameters": learned[: num_parameters(activation)],
    }


def _parameters(e: Expr, binders: frozenset[Expr]) -> Iterator[Expr]:
    """The largest parts of an activation that are the same for all tokens and features, and no numbers that stay as they are.

        gate * torch.sigmoid(self.beta * gate) * up          # beta: a parameter, or a number that changes from call to call
        gate * torch.sigmoid(self.beta[t] * gate) * up       # none: it depends on the token
    """
    if e.kind in ("add", "mul"):
        for part in e.args:
            yield from _parameters(part, binders)
    elif e.free <= binders:
        if e.kind != "const":
            yield e
    elif e.kind == "call":
        for part in e.args[1]:
            yield from _parameters(part, binders)


def _in_symbols(algebra: Algebra, e: Expr, symbols: dict[Expr, Expr]) -> Expr:
    """``e`` with pre-activations as symbols, also where a projection and its bias are two terms of a longer sum."""
    if e in symbols:
        return symbols[e]
    if e.kind == "call":
        return algebra.call(e.args[0], tuple(_in_symbols(algebra, a, symbols) for a in e.args[1]), *e.args[2])
    if e.kind not in ("add", "mul"):
        return e
    args = list(e.args)
    for half, symbol in symbols.items():
        if e.kind == half.kind == "add" and all(part in args for part in half.args):
            args = [a for a in args if a not in half.args] + [symbol]
    return getattr(algebra, e.kind)(*(_in_symbols(algebra, a, symbols) for a in args))


def _read_activation(
    algebra: Algebra,
    formulas: Formulas,
    hidden: Expr,
    routing: tuple[Expr, ...],
    halves: tuple[Expr, ...],
    parameters: tuple[Expr, ...],
    movable: bool,
    double: bool,
) -> tuple[str, tuple[Expr, ...], tuple[Expr, ...]]:
    """The activation; constant factors of it have moved out of the down projection's sum, among the routing.

    They are not ``movable`` where they would be out of a sum with a bias.
    """
    constants = tuple(f for f in routing if f.kind == "const") if movable else ()
    others = tuple(f for f in routing if f not in constants)
    half = algebra.const(0.5)  # of the GELU written by hand, when the routing weight has a constant too
    doubled = (algebra.mul(algebra.const(2), *constants), *others)
    for own, rest in (((), routing), (constants, others), ((half,) if constants else (), doubled)):
        named = formulas.name(algebra.mul(hidden, *own), halves, double)
        if named is not None:
            return *named, rest
    try:
        return *formulas.text(hidden, halves, parameters, double), routing
    except ValueError as error:
        raise Declined(Reason.ACTIVATION, f"{_spelled_activation(hidden, halves)}: {error}") from error


def _is_up_projection(e: Expr, width: Expr) -> bool:
    """A projection onto ``width``, or one plus a bias."""
    if width not in e.free:
        return False
    if e.kind == "sum":
        return e.args[0].args[2] == "d"
    return e.kind == "add" and len(e.args) == 2 and any(
        a.kind in ("sum", "mul") and a.has_dot and _scaled_sum(a, width) is not None and _is_weight_element(b) and width in b.free
        for a, b in (e.args, e.args[::-1])
    )  # fmt: skip


def _input_scale(hidden: Expr, halves: tuple[Expr, ...], parameters: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Factors on the experts' input: they stand beside the projection inside a function or a bias addition.

    Parameters of the activation may stand there, too.
    """
    scales = []
    for half in halves:
        if half.kind == "add":
            (product,) = [t for t in half.args if t.has_dot]
            scales.append(tuple(f for f in factors_of(product) if f.kind != "sum" or f.args[0].args[2] != "d"))
    if scales:
        prove(len(set(scales)) == 1, Reason.ACTIVATION, "the up projections are scaled by different numbers before their biases")
        return scales[0]
    for product in subexpressions(hidden, lambda e: e.kind == "mul" and e is not hidden and any(h in e.args for h in halves)):
        scale = tuple(f for f in product.args if not f.has_dot and f.kind != "const" and not is_changing(f))
        if scale := tuple(f for f in scale if f not in parameters):
            return scale
    return ()


def _unscaled(
    algebra: Algebra,
    hidden: Expr,
    routing: tuple[Expr, ...],
    halves: tuple[Expr, ...],
    scale: tuple[Expr, ...],
    movable: bool,
) -> tuple[Expr, tuple[Expr, ...]]:
    """``hidden`` with every scaled projection written as the bare one, which then stands for the pre-activation.

    A scale that is a factor of the hidden value too has moved out of the down projection's sum, among the routing; it is
    not ``movable`` out of a sum with a bias.
    """
    whole = algebra.mul(hidden, *routing) if movable else hidden
    bare = algebra.substitute(whole, dict.fromkeys(scale, algebra.const(1)))
    if movable:
        bare = algebra.mul(*filter(is_hidden, factors_of(bare)))
    scaled = algebra.substitute(bare, {half: algebra.mul(half, *scale) for half in halves})
    others = tuple((Counter(factors_of(whole)) - Counter(factors_of(scaled))).elements())
    is_whole = algebra.mul(scaled, *others) is whole and (movable or not others)
    prove(is_whole, Reason.ACTIVATION, "a scale that is not on the whole input, such as a learned parameter")
    return bare, others if movable else routing


def _read_up(algebra: Algebra, half: Expr, width: Expr) -> tuple[Projection, Expr, Expr]:
    bias = None
    if half.kind == "add":
        (bias,) = [t for t in half.args if not t.has_dot]
        (half,) = [f for t in half.args for f in factors_of(t) if f.kind == "sum" and f.args[0].args[2] == "d"]
    feature_in, body = algebra.open(half)
    weights = [f for f in factors_of(body) if width in f.free]
    prove(len(weights) == 1, Reason.PROJECTION_WEIGHTS, "up projection")
    x = algebra.mul(*(algebra.unscaled(f) for f in factors_of(body) if width not in f.free))
    return Projection(weights[0], bias), x, feature_in


def _spelled_activation(hidden: Expr, halves: tuple[Expr, ...]) -> str:
    names = sorted({e.args[0] for e in subexpressions(hidden, lambda e: e.kind == "call")})
    return f"{'gated ' if len(halves) == 2 else ''}{' of '.join(names) if names else 'no function'}"
