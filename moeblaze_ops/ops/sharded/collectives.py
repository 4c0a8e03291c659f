"""Collectives of the ranks that share a layer's experts, and what a host has to know before tokens move.

They start at once, by the name of a process group, and are waited for. Copy engines move the data where ``copies`` says so
(``peer_copies``), torch's functional collectives elsewhere: these keep their arguments as they are until somebody has waited.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ops.ops.dispatch import used_slots
from moeblaze_ops.ops.register import number_of_data, register_plain_op
from moeblaze_ops.ops.sharded import peer_copies
from moeblaze_ops.ops.sharded.apart import told_apart
from moeblaze_ops.ops.sharded.groups import members_of, process_group
from moeblaze_ops.ops.sharded.host_numbers import largest_number, questions
from moeblaze_ops.ops.sharded.stored_layers import path_of

Size = int | torch.SymInt

_functional = torch.ops._c10d_functional


def start_gathers(local: list[Tensor], rows: Size, ranks: int, group: str, copies: bool, routing: bool = False) -> list[Tensor]:
    """Start to gather ``rows`` rows of every rank on the first axis: those of ``local``, and behind them -1, or any with copies.

    The results are for ``wait``, and have no gradient. ``routing``: rows behind are -1 with copies too, or 0 of floating dtypes.
    """
    with torch.no_grad():
        sent = [told_apart(tensor) for tensor in local]
        if copies:
            return gather_rows([tensor.contiguous() for tensor in sent], rows, ranks, group, routing)
        sent = [t.contiguous() if _is_same(t.shape[0], rows) else with_rows(t, rows) for t in sent]
        return [_functional.all_gather_into_tensor(tensor, ranks, group) for tensor in sent]


Gathered = tuple[Tensor, Tensor | None]


def start_gather_of_tokens(
    x_TD: Tensor, rows: int | tuple[Tensor, Tensor], ranks: int, group: str, copies: bool
) -> Gathered:
    """``start_gathers`` of x with so many rows, or with what ``most_tokens`` gave, and the number of that question."""
    most, question = (rows, None) if isinstance(rows, int) else (rows[0].shape[0], rows[1])
    return start_gathers([x_TD], most, ranks, group, copies)[0], question


def start_reduce_scatters(
    whole: list[Tensor], ranks: int, group: str, copies: bool, by_columns: bool = False
) -> list[Tensor]:
    """Start to sum tensors over the ranks, of which each gets its part of the first axis; to be waited for.

    ``by_columns``: with copies, other ranks may send what they add some columns at a time.
    """
    sent = [tensor.contiguous() for tensor in whole]
    if copies:
        return sum_parts(sent, ranks, group, by_columns)
    return [_functional.reduce_scatter_tensor(tensor, "sum", ranks, group) for tensor in sent]


def wait(started: Tensor, copies: bool) -> Tensor:
    """The result of what was started, with ``copies`` or without."""
    return arrived(started) if copies else _functional.wait_tensor(started)


class Gathering(NamedTuple):
    """Tokens go to every rank, ``rows`` of each, and a reduce-scatter brings back the sums of this rank's own ``num_tokens``."""

    rows: Size
    num_tokens: Size
    ranks: int
    group: str
    copies: bool
    question: Tensor | None = None

    def start_out(self, local: list[Tensor], routing: bool = False) -> list[Tensor]:
        """Start to bring rows of tokens to the ranks of their experts, for ``arrived``; ``routing`` as for ``start_gathers``."""
        return start_gathers(local, self.rows, self.ranks, self.group, self.copies, routing)

    def arrived(self, started: Tensor) -> Tensor:
        """The rows that this rank has got."""
        return wait(started, self.copies)

    def start_back(self, computed: list[Tensor], by_columns: bool = False) -> list[Tensor]:
        """Start to bring back what was computed for the rows that arrived, for ``sums``."""
        return start_reduce_scatters(computed, self.ranks, self.group, self.copies, by_columns)

    def sums(self, started: Tensor) -> Tensor:
        """For each token of this rank, the sum of what the ranks computed."""
        return first_rows(wait(started, self.copies), self.num_tokens)

    def used(self, slots_N: Tensor, offsets_E1: Tensor) -> Tensor:
        """The slots of ``dispatch`` that are used."""
        return used_slots(slots_N, offsets_E1)

    def tensors(self) -> list[Tensor]:
        """What backward finds, to go the same way."""
        return [] if self.question is None else [self.question]

    def met(self, x: Tensor, shard: Tensor) -> Tensor:
        """``met_for_gradients`` where the hosts have met before tokens left."""
        return x if self.question is None else met_for_gradients(x, shard, self.group, self.question)


def met_for_gradients(x: Tensor, shard: Tensor, group: str, question: Tensor) -> Tensor:
    """A copy of x, once all ranks go back through the call of a layer whose tokens left behind this question."""
    return met(x, shard, group, "gradients of tokens", question)


def _gather_rows(local: list[Tensor], rows: int, ranks: int, group: str, routing: bool) -> list[Tensor]:
    if local[0].shape[0] > rows:
        raise ValueError(_too_many(local[0].shape[0], rows))
    return peer_copies.gather(local, rows, group, routing)


def first_rows(tensor: Tensor, rows: Size) -> Tensor:
    """Without the rows that ``start_gathers`` put behind those of this rank."""
    if _is_same(tensor.shape[0], rows):
        return tensor
    torch._check_value(rows <= tensor.shape[0], lambda: _too_many(rows, tensor.shape[0]))
    return tensor.narrow(0, 0, rows)


def _too_many(own: Size, most: Size) -> str:
    return f"sharded experts: tokens must be at most config.tokens_per_rank={most} on every rank, got {int(own)}"


def _is_same(size: Size, other: Size) -> bool:
    """True if two sizes are numbers and the same: a size of one rank alone gets no guard."""
    return isinstance(size, int) and isinstance(other, int) and size == other


def local_shard(sharded: Tensor) -> Tensor:
    """What this rank stores of a DTensor; its gradient is that of the shard."""
    return sharded.to_local()


def _first_of_rank(x: Tensor, num_local: int, group: str, members: list[int]) -> Tensor:
    if members != (now := members_of(group)):
        rule = f"process group {group!r} must have the ranks {members} for which the graph was compiled"
        raise RuntimeError(f"sharded experts: {rule}, got {now}; torch.compiler.reset() has it compiled anew")
    return x.new_full((), process_group(group).rank() * num_local, dtype=torch.int32)


def asked(group: str) -> Tensor:
    """The number of the question that the hosts of a group have just asked each other: [], int64, on the CPU."""
    return torch.tensor(questions(group), device="cpu")


def asked_fake(like: Tensor) -> Tensor:
    return like.new_empty((), dtype=torch.int64, device="cpu")


def _most_tokens(x_TD: Tensor, shard: Tensor | None, group: str, layer: str) -> tuple[Tensor, Tensor]:
    most = largest_number(x_TD.shape[0], group, layer, path_of(shard))
    return x_TD.new_empty(max(1, most), 0), asked(group)


def _most_tokens_fake(x_TD: Tensor, shard: Tensor | None, group: str, layer: str) -> tuple[Tensor, Tensor]:
    most = number_of_data()
    torch._check(most >= 1)
    torch._check(most >= x_TD.shape[0])
    return x_TD.new_empty(most, 0), asked_fake(x_TD)


def _meet(shard: Tensor, group: str, layer: str, question: Tensor | None = None) -> Tensor:
    words = layer if question is None else f"{layer} behind question {int(question)}"
    largest_number(0, group, words, path_of(shard))
    return shard.new_empty(0)


def _met(x: Tensor, shard: Tensor, group: str, layer: str, question: Tensor | None = None) -> Tensor:
    _meet(shard, group, layer, question)
    return x.clone()


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    own = tensor.shape[0]
    if own > rows:
        raise ValueError(_too_many(own, rows))
    padded = tensor.new_empty(rows, *tensor.shape[1:])
    padded[:own] = tensor
    padded[own:] = -1
    return padded


gather_rows = register_plain_op(
    "gather_rows",
    "(Tensor[] local, SymInt rows, int ranks, str group, bool routing) -> Tensor[]",
    _gather_rows,
    lambda local, rows, ranks, *_: [tensor.new_empty(ranks * rows, *tensor.shape[1:], 0) for tensor in local],
)
"""Starts to gather so many rows of each rank by copy engines, of several tensors; it has read them when it returns.

It returns what ``arrived`` takes: the shapes of the results with an axis of 0 behind.
"""

sum_parts = register_plain_op(
    "sum_parts",
    "(Tensor[] whole, int ranks, str group, bool by_columns=False) -> Tensor[]",
    lambda whole, ranks, group, by_columns=False: peer_copies.sum_parts(whole, group, by_columns),
    lambda whole, ranks, *_: [tensor.new_empty(tensor.shape[0] // ranks, *tensor.shape[1:], 0) for tensor in whole],
)
"""Starts to sum tensors over the ranks by copy engines: each gets its rows. It has read them when it returns, for ``arrived``."""

arrived = register_plain_op(
    "arrived",
    "(Tensor started) -> Tensor",
    peer_copies.arrived,
    lambda started: started.new_empty(started.shape[:-1]),
)
"""The result of what ``gather_rows`` or ``sum_parts`` started, of which each is taken once; the current stream waits for it."""

first_of_rank = register_plain_op(
    "first_of_rank",
    "(Tensor x, int num_local, str group, int[] members) -> Tensor",
    _first_of_rank,
    lambda x, *_: x.new_empty((), dtype=torch.int32),
)
"""[], int32, where x is: the number of the first expert on this rank, each having so many. Code of one rank is that of another.

Raises:
    RuntimeError: the name of the group is that of one with other members by now.
"""

most_tokens = register_plain_op(
    "most_tokens",
    "(Tensor x_TD, Tensor? shard, str group, str layer) -> (Tensor, Tensor)",
    _most_tokens,
    _most_tokens_fake,
)
"""[M, 0], no data: M is the largest number of tokens that a rank of the group has, 1 at least. The hosts tell each other.

And the number of this question, [], int64, on the CPU: the same on all ranks, and of no other call.

Args:
    shard: of a weight of the layer, which tells its path.
    layer: what all ranks have to ask for, in words.
"""

meet = register_plain_op(
    "meet",
    "(Tensor shard, str group, str layer, Tensor? question=None) -> Tensor",
    _meet,
    lambda shard, *_: shard.new_empty(0),
)
"""[0], no data. The hosts of the group wait for each other: all of them have to come to this layer, in words, and by its path.

Args:
    question: the number of an earlier one, which all of them have to come back to.
"""

met = register_plain_op(
    "met",
    "(Tensor x, Tensor shard, str group, str layer, Tensor? question=None) -> Tensor",
    _met,
    lambda x, *_: torch.empty_like(x),
)
"""A copy of x, once the hosts have met as in ``meet``. Inductor takes x itself."""

with_rows = register_plain_op(
    "with_rows",
    "(Tensor tensor, SymInt rows) -> Tensor",
    _with_rows,
    lambda tensor, rows: tensor.new_empty(rows, *tensor.shape[1:]),
)
"""A copy with so many rows, the last ones filled with -1: no expert's id.

Raises:
    ValueError: the tensor has more rows.
"""
