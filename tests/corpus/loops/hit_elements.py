"""What loops over tensors of hits do with an element: it is a tensor, and its number only where Python asks for one.

All are combine functions of `ModuleListMoE`: ``(self, x, weights, ids) -> out`` for x [T, D].
"""

import torch
import torch.nn.functional as F


def _add(self, out, x, weights, ids, e, expert):
    token, slot = torch.where(ids == e)
    out.index_add_(0, token, self.experts[expert](x[token]) * weights[token, slot, None])


def _looped(use, hits=lambda self, ids: ids.unique(), name=None):
    """A loop over hits, with ``use(self, out, x, weights, ids, e, seen)`` in its body."""

    def combine(self, x, weights, ids):
        out, seen = torch.zeros_like(x), []
        for e in hits(self, ids):
            use(self, out, x, weights, ids, e, seen)
        return out

    combine.__name__ = name or use.__name__
    return combine


def _rows_of_hits(self, ids):
    mask = F.one_hot(ids, num_classes=len(self.experts)).permute(2, 1, 0)
    return torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()


# Layers.


def as_number(self, out, x, weights, ids, e, seen):
    _add(self, out, x, weights, ids, e, int(e))


def as_index(self, out, x, weights, ids, e, seen):
    _add(self, out, x, weights, ids, e, e.__index__())


def in_a_list(self, out, x, weights, ids, e, seen):
    token, slot = torch.where(ids == e)
    out.index_add_(0, token, list(self.experts)[e](x[token]) * weights[token, slot, None])


def text_of_the_number(self, out, x, weights, ids, e, seen):
    _add(self, out, x, weights, ids, e, int(f"{e}"))


def branch_on_the_element(self, out, x, weights, ids, e, seen):
    if e == 2:
        _add(self, out, x, weights, ids, e, 2)
    else:
        _add(self, out, x, weights, ids, e, e)


def computed(self, out, x, weights, ids, e, seen):
    """As many experts as before, in another order."""
    _add(self, out, x, weights, ids, e, (e + 1) % len(self.experts))


def first_of_a_row(self, out, x, weights, ids, e, seen):
    _add(self, out, x, weights, ids, e[0], e.squeeze(0))


def unpacked(self, out, x, weights, ids, e, seen):
    (number,) = e
    _add(self, out, x, weights, ids, number, number)


def _falling(self, ids):
    return ids.unique().flip(0)


LAYERS = (
    _looped(as_number, _falling, "from_the_last_one"),
    _looped(first_of_a_row, lambda self, ids: _rows_of_hits(self, ids).flip(dims=[0]), "rows_from_the_last_one"),
    _looped(as_index, lambda self, ids: _falling(self, ids).flip(-1), "turned_twice"),
    *map(_looped, (as_number, as_index, in_a_list, text_of_the_number, branch_on_the_element, computed)),
    *(_looped(use, _rows_of_hits) for use in (first_of_a_row, unpacked)),
)


# Near misses.


def among_numbers(self, out, x, weights, ids, e, seen):
    """A tensor is in no set of numbers."""
    _add(self, out, x, weights, ids, e, 0 if e in {1, 2} else e)


def key_of_a_dict(self, out, x, weights, ids, e, seen):
    _add(self, out, x, weights, ids, e, {0: 1, 1: 0, 2: 3}.get(e, e))


def same_object(self, out, x, weights, ids, e, seen):
    seen.append(e)
    _add(self, out, x, weights, ids, e, 0 if e is seen[0] else e)


def text_of_the_tensor(self, out, x, weights, ids, e, seen):
    _add(self, out, x, weights, ids, e, 0 if f"{e!r}" == "2" or str(e) == "2" else e)


def text_by_a_method(self, out, x, weights, ids, e, seen):
    _add(self, out, x, weights, ids, e, 0 if "{}".format(e) == "2" else e)  # noqa: UP032


def text_by_a_function(self, out, x, weights, ids, e, seen):
    _add(self, out, x, weights, ids, e, 0 if "2" in map("{}".format, [e]) or str.format("{e}", e=e) == "2" else e)


def text_of_a_tuple(self, out, x, weights, ids, e, seen):
    _add(self, out, x, weights, ids, e, 0 if f"{(e,)}" == "(2,)" else e)


def text_by_str(self, out, x, weights, ids, e, seen):
    _add(self, out, x, weights, ids, e, 0 if str(e) == "tensor(2)" else e)



def text_by_percent(self, out, x, weights, ids, e, seen):
    _add(self, out, x, weights, ids, e, 0 if "%d" % e == "2" else e)  # noqa: UP031


def text_of_a_row(self, out, x, weights, ids, e, seen):
    _add(self, out, x, weights, ids, e[0], 0 if f"{e}" == "2" else e)


def written(self, out, x, weights, ids, e, seen):
    e += 1
    _add(self, out, x, weights, ids, e - 1, e - 1)


def written_through_a_view(self, out, x, weights, ids, e, seen):
    one = e + 1
    one.view(-1).zero_()
    _add(self, out, x, weights, ids, e, one)


def remembered(self, out, x, weights, ids, e, seen):
    seen.append(e)
    _add(self, out, x, weights, ids, e, seen[0])


def type_of_the_element(self, out, x, weights, ids, e, seen):
    _add(self, out, x, weights, ids, e, 0 if isinstance(e, int) else e)


def hits_change_in_the_loop(self, x, weights, ids):
    """Elements are views of the hits."""
    out, hit = torch.zeros_like(x), ids.unique()
    for e in hit:
        hit.fill_(1)
        _add(self, out, x, weights, ids, e, e)
    return out


def asked_after_the_loop(self, x, weights, ids):
    out, hit = torch.zeros_like(x), ids.unique()
    for e in hit:
        _add(self, out, x, weights, ids, e, e)
        e.add_(1)
    return out * (2 if 0 in hit else 1)


def last_element_is_read(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in ids.unique():
        _add(self, out, x, weights, ids, e, e)
    return out * (e + 1)


def stops_at_an_element(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in ids.unique():
        if e == 2:
            break
        _add(self, out, x, weights, ids, e, e)
    else:
        out += 1
    return out


def number_of_the_round(self, x, weights, ids):
    out = torch.zeros_like(x)
    for i, e in enumerate(ids.unique()):
        _add(self, out, x, weights, ids, e, i)
    return out


def scaled_by_the_round(self, x, weights, ids):
    out = torch.zeros_like(x)
    for i, e in enumerate(ids.unique().tolist()):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, i * self.experts[e](x[token]) * weights[token, slot, None])
    return out


def first_round_only(self, x, weights, ids):
    out = torch.zeros_like(x)
    for i, e in enumerate(ids.unique()):
        if i == 0:
            _add(self, out, x, weights, ids, e, e)
    return out


def drawn_before_the_loop(self, x, weights, ids):
    out, rounds = torch.zeros_like(x), enumerate(ids.unique())
    next(rounds)
    for _, e in rounds:
        _add(self, out, x, weights, ids, e, e)
    return out


def drawn_once_only(self, x, weights, ids):
    """The second loop has no rounds."""
    out, rounds = torch.zeros_like(x), enumerate(ids.unique())
    for _, e in rounds:
        _add(self, out, x, weights, ids, e, e)
    for _, e in rounds:
        _add(self, out, x, weights, ids, e, e)
    return out


def returns_in_the_loop(self, x, weights, ids):
    out = torch.zeros_like(x)
    for e in ids.unique():
        _add(self, out, x, weights, ids, e, e)
        if e > 1:
            return out
    return out


def texts_of_counts(self, x, weights, ids):
    """Counts how many different numbers of tokens experts have, by their texts."""
    out, texts = torch.zeros_like(x), {}
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        texts[f"{len(token)} tokens"] = e
        if len(token) > 0:
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    self.calls = len(texts)
    return out


def texts_of_counts_without_a_guard(self, x, weights, ids):
    out, texts, template = torch.zeros_like(x), {}, "{} tokens"
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        texts[template.format(len(token)) if e % 2 else f"{len(token)} tokens"] = e
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
    self.calls = len(texts)
    return out


def size_that_is_a_number(self, x, weights, ids):
    out, six = torch.zeros_like(x), 6
    for e in range(len(self.experts)):
        token, slot = torch.where(ids == e)
        scale = 2 if token.shape[0] is six or len(token) is (six + 6) else 1
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None] * scale)
    return out


def _asked(question, name, *, backwards=False):
    """A loop over a list of hits, whose experts depend on what else a program asks the list.

    With the highest first Dynamo has no value for the first of the list if experts 0 and 1 alone have tokens.
    """

    def combine(self, x, weights, ids):
        hits, out = ids.unique(), torch.zeros_like(x)
        used = (hits.flip(0) if backwards else hits).tolist()
        swapped = bool(question(used))
        for e in used:
            _add(self, out, x, weights, ids, e, e ^ 1 if swapped else e)
        return out

    combine.__name__ = name
    return combine


QUESTIONS = {
    "equals_a_list": lambda used: used == [0, 2],
    "differs_from_a_list": lambda used: used != [0, 1, 2, 3],
    "is_not_empty": lambda used: 1 if used else 0,
    "is_empty": lambda used: not used,
    "length": lambda used: len(used) == 4,
    "first": lambda used: used[0] == 0,
    "largest": lambda used: max(used) == 3,
    "text": lambda used: str(used) == "[0, 2]" or f"{used}" == "[0, 1, 2, 3]",
    "is_a_list": lambda used: isinstance(used, list) or type(used) is list,
    "joined": lambda used: len(used + [1]) == 3,
    "is_itself": lambda used: used is used,
    "index_of_a_number": lambda used: used.index(2) == 1 if 2 in used else False,
    "has_none": lambda used: None in used or 2.0 in used or True in used,
    "equals_a_list_in_a_tuple": lambda used: (used, 1) == ([0, 2], 1),
    "equals_a_set": lambda used: set(used) == {0, 2},
    "all_and_any": lambda used: all(used) or any(used),
    "sum": lambda used: sum(used) == 6,
    "reversed": lambda used: list(reversed(used))[0] == 3,
    "copied": lambda used: len(list(used)) > 2,
}


_BACKWARDS = {
    "has_one": lambda used: 1 in used and len(used) == 2,
    "has_one_in_a_tuple": lambda used: 1 in tuple(used) and len(used) == 2,
    "has_one_by_a_method": lambda used: used.__contains__(1) and len(used) == 2,
    "has_a_pair": lambda used: (1, 1) in [(e, e) for e in used] and len(used) == 2,
    "is_one": lambda used: used[0] is int("1") and len(used) == 2,
    "index_of_one": lambda used: used.index(1) == 0 and len(used) == 2 if 3 not in used else False,
}
BACKWARDS = tuple(_asked(question, name, backwards=True) for name, question in _BACKWARDS.items())


def halved_before(self, out, x, weights, ids, e, seen):
    """What comes first counts less."""
    out.mul_(0.5)
    _add(self, out, x, weights, ids, e, int(e))


NEAR_MISSES = (
    _looped(halved_before, _falling, "halved_before_from_the_last_one"),
    _looped(as_number, lambda self, ids: _falling(self, ids)[1:], "all_but_the_last_one"),
    _looped(as_number, lambda self, ids: sorted(_falling(self, ids).tolist()), "sorted_from_the_last_one"),
    *(_asked(question, name) for name, question in QUESTIONS.items()),
    *map(_looped, (
        among_numbers, key_of_a_dict, same_object, text_of_the_tensor, text_by_a_method, text_by_a_function, text_by_percent,
        text_by_str, text_of_a_tuple, written, written_through_a_view, remembered, type_of_the_element,
    )),
    _looped(text_of_a_row, _rows_of_hits),
    hits_change_in_the_loop, asked_after_the_loop, last_element_is_read, stops_at_an_element, returns_in_the_loop,
    number_of_the_round, scaled_by_the_round, first_round_only, drawn_before_the_loop, drawn_once_only,
    texts_of_counts, texts_of_counts_without_a_guard, size_that_is_a_number,
)  # fmt: skip
