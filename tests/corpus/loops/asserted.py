"""Layers with counts on the host, of which the program asserts something: pytest would rewrite the assertions of a test file."""

import torch

E, K, T = 4, 2, 6


def infer(says):
    """Slices between running sums of counts on the host, after the program ``says`` something of the counts."""

    def combine(self, x, weights, ids):
        flat = ids.view(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=E)
        numbers, rows = counts.tolist(), x[order // K]
        says(numbers, counts, rows, ids)
        parts, start = [], 0
        for e in range(E):
            parts.append(self.experts[e](rows[start : start + numbers[e]]))
            start += numbers[e]
        outputs = torch.cat(parts) * weights.view(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // K, outputs)

    return combine


def at_most(n, counts, rows, ids):
    assert n[0] < T


def at_most_by_check(n, counts, rows, ids):
    torch._check(n[0] < T)


def at_most_with_a_text(n, counts, rows, ids):
    assert n[0] < T, f"expert 0 has {n[0]}"


def raised(n, counts, rows, ids):
    if n[0] >= T:
        raise ValueError("too many")


def of_two(n, counts, rows, ids):
    assert n[0] + n[1] < T


def of_all(n, counts, rows, ids):
    assert sum(n) - n[0] > T


def not_all(n, counts, rows, ids):
    assert n[0] != T


def at_least(n, counts, rows, ids):
    torch._check(n[2] + n[3] >= 1)


def largest(n, counts, rows, ids):
    assert max(n) < T


def largest_on_the_device(n, counts, rows, ids):
    assert counts.max().item() < T


def an_element(n, counts, rows, ids):
    assert int(counts[0]) < T


def two_alike(n, counts, rows, ids):
    assert n[0] == 2 * n[2]


def a_number(n, counts, rows, ids):
    torch._check(n[0] == 3)


def a_multiple(n, counts, rows, ids):
    assert n[0] % 4 == 3


def of_a_slice(n, counts, rows, ids):
    assert len(rows[: n[0]]) < T


def of_a_mask(n, counts, rows, ids):
    assert len(torch.where(ids == 0)[0]) < T


def of_two_masks(n, counts, rows, ids):
    assert len(torch.where(ids == 0)[0]) == len(torch.where(ids == 2)[0])


def on_the_device(n, counts, rows, ids):
    assert (counts < T).all()


def an_element_on_the_device(n, counts, rows, ids):
    torch._assert_async((counts < T)[0], "too many")


def range_of_a_size(n, counts, rows, ids):
    torch._check_is_size(n[0], max=T - 1)


ASSERTED = (
    at_most, at_most_by_check, at_most_with_a_text, raised, of_two, of_all, not_all, at_least, largest, largest_on_the_device,
    an_element, two_alike, a_number, a_multiple, of_a_slice, of_a_mask, of_two_masks, on_the_device, an_element_on_the_device,
    range_of_a_size,
)  # fmt: skip


def adds_up(n, counts, rows, ids):
    assert sum(n) == ids.numel()
    assert int(counts.sum()) == len(rows)


def room(n, counts, rows, ids):
    assert n[0] <= rows.shape[0]
    assert n[0] + n[1] <= ids.numel()


def as_many_rows(n, counts, rows, ids):
    assert rows[: n[0]].shape[0] == n[0]


def as_many_tokens(n, counts, rows, ids):
    assert len(torch.where(ids == 0)[0]) == len(torch.nonzero(ids == 0))


KNOWN = (adds_up, room, as_many_rows, as_many_tokens)
