"""An all-to-all of tokens: each goes once to every rank that has an expert of it, and a row of what they computed comes back.

    x [T, D]  --rows of tokens that go to rank 0, to rank 1, ...-->  rows [A, D]  --experts-->  sums [A, D]  --back-->  out [T, D]

A rank is to a token what an expert is to a slot: ``dispatch`` of the ranks of each token gives the rows that leave, in the order
of ranks and of tokens within a rank, and where each token finds what comes back. The ranks tell each other how many rows leave,
and the hosts read these numbers once a layer, after they have met: a rank that runs another layer is named. Nobody waits who has
no tokens, or gets none: it sends and receives 0 rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moeblaze_ops.cpu.rows import sum_dtype
from moeblaze_ops.ops.dispatch import dispatch
from moeblaze_ops.ops.register import number_of_data, register_op, register_plain_op
from moeblaze_ops.ops.sharded.apart import told_apart
from moeblaze_ops.ops.sharded.collectives import Size, asked, asked_fake, first_rows, met_for_gradients
from moeblaze_ops.ops.sharded.groups import members_of, process_group
from moeblaze_ops.ops.sharded.host_numbers import largest_number
from moeblaze_ops.ops.sharded.stored_layers import path_of

_functional = torch.ops._c10d_functional


class Route(NamedTuple):
    """Which tokens go to which ranks, and how they get there and back; it does what ``Gathering`` does.

    ``tokens_S``: the token of each row that leaves, those for the first rank first. ``positions_TR``: the row of each token for
    each rank, -1 for none. ``numbers`` and ``question``: of ``row_numbers``. Copy engines have no part in it.
    """

    tokens_S: Tensor
    positions_TR: Tensor
    numbers: list[Tensor]
    question: Tensor
    group: str
    copies: bool = False

    @classmethod
    def of(cls, tensors: list[Tensor], group: str) -> "Route":
        """What gave ``tensors()``."""
        return cls(tensors[0], tensors[1], tensors[2:-1], tensors[-1], group)

    def tensors(self) -> list[Tensor]:
        return [self.tokens_S, self.positions_TR, *self.numbers, self.question]

    def start_out(self, local: list[Tensor], routing: bool = False) -> list[Tensor]:
        with torch.no_grad():
            rows = [tensor.detach().index_select(0, self.tokens_S) for tensor in local]
            return [_functional.all_to_all_single(each, self._arriving, self._leaving, self.group) for each in rows]

    def arrived(self, started: Tensor) -> Tensor:
        return _functional.wait_tensor(started)

    def start_back(self, computed: list[Tensor], by_columns: bool = False) -> list[Tensor]:
        sent = [tensor.contiguous() for tensor in computed]
        return [_functional.all_to_all_single(each, self._leaving, self._arriving, self.group) for each in sent]

    def sums(self, started: Tensor) -> Tensor:
        return sum_rows(_functional.wait_tensor(started), self.positions_TR)

    def used(self, slots_N: Tensor, offsets_E1: Tensor) -> Tensor:
        return first_rows(slots_N, self.numbers[-1].shape[0])

    def met(self, x: Tensor, shard: Tensor) -> Tensor:
        return met_for_gradients(x, shard, self.group, self.question)

    @property
    def num_arriving(self) -> Size:
        return sum(self._arriving)

    @property
    def _leaving(self) -> list[Size]:
        return [number.shape[0] for number in self.numbers[: self.positions_TR.shape[1]]]

    @property
    def _arriving(self) -> list[Size]:
        return [number.shape[0] for number in self.numbers[self.positions_TR.shape[1] : -1]]


def route_to_ranks(
    experts_TK: Tensor, shard: Tensor, group: str, per_member: int = 1, first_rank: Tensor | None = None
) -> Route:
    """The way of tokens to the ranks of a group, all of which have to ask.

    Args:
        experts_TK: expert ids over all ranks, -1 for an unused slot: a token without any goes nowhere. T may be 0.
        shard: a weight of the layer, whose path it tells; each rank stores as many experts as this one.
        per_member: so many ranks behind one another are one to the group, and ``first_rank`` (0) is its first one.
    """
    num_local, ranks = shard.shape[0] * per_member, len(members_of(group))
    numbers_R = torch.arange(ranks, dtype=torch.int32, device=experts_TK.device)
    owners_TK = torch.div(experts_TK.to(torch.int32), num_local, rounding_mode="floor")
    owners_TK = owners_TK if first_rank is None else owners_TK - first_rank
    is_owner_TKR = owners_TK.unsqueeze(2) == numbers_R
    slots_N, offsets_R1, positions_TR, _ = dispatch(torch.where(is_owner_TKR.any(1), numbers_R, -1), ranks)
    rows_R, slots_R = offsets_R1[1:] - offsets_R1[:-1], is_owner_TKR.sum((0, 1))
    layer = f"{ranks * num_local} experts in {shard.dtype}, {experts_TK.shape[1]} a token, by all-to-all"
    *numbers, question = row_numbers(told_apart(torch.stack([rows_R, slots_R], 1)), shard.detach(), group, layer)
    num_rows = sum(number.shape[0] for number in numbers[:ranks])
    return Route(first_rows(slots_N, num_rows) // ranks, positions_TR, numbers, question, group)


def _row_numbers(leaving_R2: Tensor, shard: Tensor, group: str, layer: str) -> list[Tensor]:
    largest_number(0, group, layer, path_of(shard))
    question = asked(group)
    leaving_R2 = leaving_R2.contiguous()
    arriving_R2 = torch.empty_like(leaving_R2)
    dist.all_to_all_single(arriving_R2, leaving_R2, group=process_group(group))
    leaving, arriving, slots = torch.stack([leaving_R2[:, 0], *arriving_R2.unbind(1)]).tolist()
    return [*(_as_long_as(number, leaving_R2) for number in (*leaving, *arriving, sum(slots))), question]


def _row_numbers_fake(leaving_R2: Tensor, *_: object) -> list[Tensor]:
    numbers = [_as_long_as(number_of_data(), leaving_R2) for _ in range(2 * leaving_R2.shape[0] + 1)]
    return [*numbers, asked_fake(leaving_R2)]


def _as_long_as(number: Size, like: Tensor) -> Tensor:
    return like.new_empty(1).expand(number)


def _sum_rows_cpu(rows_SD: Tensor, positions_TR: Tensor) -> Tensor:
    sums_TD = rows_SD.new_zeros(positions_TR.shape[0], rows_SD.shape[1], dtype=sum_dtype(rows_SD))
    for positions_T in positions_TR.unbind(1):
        tokens = (positions_T >= 0).nonzero().squeeze(1)
        sums_TD[tokens] += rows_SD[positions_T[tokens]]
    return sums_TD.to(rows_SD.dtype)


def _sum_rows_launcher() -> Callable:
    from moeblaze_ops.kernels.rows.combine import combine, token_slots

    def launch(rows_SD: Tensor, positions_TR: Tensor) -> Tensor:
        out_TD = _sum_rows_fake(rows_SD, positions_TR)
        combine(rows_SD, token_slots(positions_TR, None, rows_SD.shape[0]), out_TD)
        return out_TD

    return launch


def _sum_rows_fake(rows_SD: Tensor, positions_TR: Tensor) -> Tensor:
    return rows_SD.new_empty(positions_TR.shape[0], rows_SD.shape[1])


row_numbers = register_plain_op(
    "row_numbers",
    "(Tensor leaving_R2, Tensor shard, str group, str layer) -> Tensor[]",
    _row_numbers,
    _row_numbers_fake,
)
"""Tensors [n]: n is how many rows leave for each rank, how many arrive from each, and how many slots arrive in all.

Behind them is the number of the question that hosts asked, as ``most_tokens`` has it.

They hold one element: of tensors without any, Inductor of torch 2.14 and 2.15 does not learn sizes.

Args:
    leaving_R2: rows that leave for each rank, and slots in them that are of its experts. Every rank of the group calls it; the
        host reads all numbers at once.
    shard: of a weight of the layer, which tells its path.
    layer: what all ranks have to ask for, in words.
"""

sum_rows = register_op(
    "sum_rows",
    "(Tensor rows_SD, Tensor positions_TR) -> Tensor",
    fake=_sum_rows_fake,
    cpu=_sum_rows_cpu,
    launcher=_sum_rows_launcher,
)
"""[T, D]: the sum of the rows of each token, in fp32 (fp64 of fp64) and in the order of ranks; two runs agree bit for bit.

Args:
    rows_SD: contiguous, S may be 0. positions_TR: the rows of each token, -1 for none, int32, contiguous.
"""
