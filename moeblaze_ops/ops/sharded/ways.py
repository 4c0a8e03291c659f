"""The way of a layer's tokens to the ranks of their experts: to all ranks, to those that have one, or by way of their hosts.

    between hosts    x [T, D]   --once to the same place on each host with an expert-->   rows [A, D]
    within a host    rows       --to its ranks, all of them or those with an expert-->    what arrives
    back             sums over a rank --> sums over a host [A, D] --> out [T, D]

Within a host rows go to all ranks where a row has as many experts there as the host has ranks, else to the ranks of its experts.
Sums are rounded within each host first, as its ranks would sum them alone; then hosts are added in their order, in fp32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ops.ops.sharded.all_to_all import Route, route_to_ranks
from moeblaze_ops.ops.sharded.apart import told_apart
from moeblaze_ops.ops.sharded.collectives import Gathered, Gathering, Size, first_of_rank, most_tokens
from moeblaze_ops.ops.sharded.groups import members_of


class Relay(NamedTuple):
    """Tokens cross ``between`` hosts, then go on ``within`` one. What crosses runs beside the products, the rest before them."""

    between: Route
    within: Gathering | Route
    copies: bool = False

    def start_out(self, local: list[Tensor], routing: bool = False) -> list[Tensor]:
        return self.between.start_out(local)

    def arrived(self, started: Tensor) -> Tensor:
        (under_way,) = self.within.start_out([self.between.arrived(started)])
        return self.within.arrived(under_way)

    def start_back(self, computed: list[Tensor], by_columns: bool = False) -> list[Tensor]:
        return self.between.start_back([self.within.sums(each) for each in self.within.start_back(computed)])

    def sums(self, started: Tensor) -> Tensor:
        return self.between.sums(started)

    def used(self, slots_N: Tensor, offsets_E1: Tensor) -> Tensor:
        return self.within.used(slots_N, offsets_E1)

    def tensors(self) -> list[Tensor]:
        return [*self.between.tensors(), *self.within.tensors()]

    def met(self, x: Tensor, shard: Tensor) -> Tensor:
        return self.within.met(self.between.met(x, shard), shard)


Way = Gathering | Route | Relay


def way_of(
    experts_TK: Tensor,
    weights_TK: Tensor | None,
    gathered: Gathered | None,
    x_TD: Tensor,
    shard: Tensor,
    ranks: int,
    group: str,
    hosts: list[str],
    copies: bool,
) -> tuple[Way, Tensor, Tensor | None]:
    """A way of tokens, and the expert ids and routing weights of what arrives on it: ids over all ranks, -1 of rows behind."""
    if gathered is not None:
        everyone, question = gathered
        way: Way = Gathering(everyone.shape[0] // ranks, x_TD.shape[0], ranks, group, copies, question)
    elif not hosts:
        way = route_to_ranks(experts_TK, shard, group)
    else:
        return _relay(experts_TK, weights_TK, shard, *hosts)
    return way, *_routing_of_all(experts_TK, weights_TK, way)


def same_way(
    tensors: list[Tensor], rows: Size, num_tokens: Size, ranks: int, group: str, hosts: list[str], copies: bool
) -> Way:
    """The way that gave ``tensors()``, by which ``num_tokens`` tokens of this rank leave and ``rows`` rows arrive at it."""
    if hosts:
        between, within = hosts
        last = 2 * len(members_of(between)) + 4
        first_leg = Route.of(tensors[:last], between)
        second_leg = same_way(tensors[last:], rows, first_leg.num_arriving, len(members_of(within)), within, [], False)
        return Relay(first_leg, second_leg)
    if len(tensors) > 1:
        return Route.of(tensors, group)
    return Gathering(rows // ranks, num_tokens, ranks, group, copies, *tensors)


def _relay(experts_TK: Tensor, weights_TK: Tensor | None, shard: Tensor, between: str, within: str) -> tuple:
    num_hosts, per_host, K = len(members_of(between)), len(members_of(within)), experts_TK.shape[1]
    first_leg = route_to_ranks(experts_TK, shard, between, per_host)
    ids, weights = _routing_of_all(experts_TK, weights_TK, first_leg)
    if per_host * num_hosts > K:
        first = first_of_rank(ids, per_host, between, members_of(between))
        second_leg: Gathering | Route = route_to_ranks(ids, shard, within, first_rank=first)
    else:
        layer = f"{shard.shape[0] * per_host} experts of a host, {K} a token"
        most, question = most_tokens(told_apart(ids), shard.detach(), within, layer)
        second_leg = Gathering(most.shape[0], ids.shape[0], per_host, within, False, question)
    return Relay(first_leg, second_leg), *_routing_of_all(ids, weights, second_leg)


def _routing_of_all(experts_TK: Tensor, weights_TK: Tensor | None, way: Gathering | Route) -> tuple[Tensor, Tensor | None]:
    """Expert ids and routing weights of what arrives, -1 for ids of rows behind a rank's own.

    They travel together: as they are by copies, else in one collective, for which fp32 and fp64 hold ids and narrower weights
    exactly.
    """
    ids = experts_TK.to(torch.int32)
    if weights_TK is None or way.copies:
        sent = [ids] if weights_TK is None else [ids, weights_TK]
        arrived = [way.arrived(each) for each in way.start_out(sent, routing=True)]
        return arrived[0], arrived[1] if len(arrived) == 2 else None
    wide = torch.promote_types(weights_TK.dtype, torch.float32)
    (both,) = way.start_out([torch.cat([ids.to(wide), weights_TK.to(wide)], 1)])
    ids, weights = way.arrived(both).chunk(2, dim=1)
    return ids.to(torch.int32), weights.to(weights_TK.dtype).contiguous()
