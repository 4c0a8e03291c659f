"""How tokens get to the ranks of their experts, and a layer whose caller has the experts of this rank already."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from moeblaze_ops import config
from moeblaze_ops.ops.sharded.apart import told_apart
from moeblaze_ops.ops.sharded.collectives import most_tokens, start_gather_of_tokens
from moeblaze_ops.ops.sharded.experts_over_ranks import experts_over_ranks
from moeblaze_ops.ops.sharded.groups import members_of
from moeblaze_ops.ops.sharded.hosts import hosts_of
from moeblaze_ops.ops.sharded.peer_copies import copies_between


class Exchange(NamedTuple):
    """What moves the tokens of a layer, the same on every rank: it follows from settings, the group and K.

    ``rows``: tokens that a rank has at most, if that was promised. ``exact``, ``keep``, ``hosts``: see ``Ranks``.
    """

    members: list[int]
    group: str
    all_to_all: bool
    copies: bool
    rows: int | None
    exact: bool
    keep: str
    hosts: list[str]


def choose_exchange(group: str, K: int, on_gpu: bool) -> Exchange:
    """Choose by ``config.exchange`` and ``config.transport``, for K experts of a token."""
    members = members_of(group)
    hosts = crossed_hosts(group, on_gpu)
    all_to_all = bool(hosts) or goes_all_to_all(group, len(members), K, on_gpu)
    copies = on_gpu and not all_to_all and copies_between(group)
    exact = config.arrived_rows == "exact"
    keep = config.keep if config.keep in ("preactivation", "h8") else "input"
    return Exchange(members, group, all_to_all, copies, config.tokens_per_rank, exact, keep, hosts)


def goes_all_to_all(group: str, ranks: int, K: int, on_gpu: bool) -> bool:
    """True if tokens go to the ranks of their experts alone, see ``config.exchange``."""
    return config.exchange == "all_to_all" or (ranks > K and _may_choose(group, on_gpu))


def crossed_hosts(group: str, on_gpu: bool) -> list[str]:
    """The ``hosts_of`` a group, if tokens cross once to each of them that has an expert of theirs."""
    return hosts_of(group) if _may_choose(group, on_gpu) else []


def _may_choose(group: str, on_gpu: bool) -> bool:
    """True if the host may read how many rows go where, and copy engines do not move tokens.

    These are at the wire with whole tokens and take no multiprocessor: no other way was measured faster.
    """
    asks = config.exchange == "auto" and config.arrived_rows != "bound" and config.transport != "copies"
    return asks and not (on_gpu and copies_between(group))


def moe_over_ranks(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w_up: list[Tensor],
    b_up: list[Tensor],
    w_down: list[Tensor],
    b_down: list[Tensor],
    activation: str,
    *exchange: Any,
) -> Tensor:
    """``moe`` of the tokens of this rank over the experts of all ranks of a group; all of them call it.

    Args:
        x_TD: tokens of this rank. Shape [T, D]; T may be 0, and another one on each rank.
        weights_TK, experts_TK: routing weights and expert ids over all ranks, -1 for an unused slot.
        w_up, b_up, w_down, b_down: of this rank's experts, as ``expert_up`` and ``expert_down`` take them.
        activation: a name or a formula.
        exchange: the fields of an ``Exchange``.

    Returns:
        [T, D]. Gradients of the weights are sums over the tokens of all ranks.
    """
    members, group, all_to_all, copies, rows, exact, keep, hosts = exchange
    with _unseen_sizes(x_TD):
        gathered = None
        if not all_to_all:
            layer = f"{w_down[0].shape[0] * len(members)} experts for tokens in {x_TD.dtype}, {experts_TK.shape[1]} a token"
            most = rows or most_tokens(told_apart(x_TD), None, group, f"{layer}, by {'copies' if copies else 'collectives'}")
            gathered = start_gather_of_tokens(x_TD, most, len(members), group, copies)
        keep = keep if torch.is_grad_enabled() else "input"
        parameters = (w_up, b_up, w_down, b_down)
        settings = (activation, False, members, group, copies, exact, keep, hosts)
        return experts_over_ranks(x_TD, gathered, weights_TK, experts_TK, *parameters, *settings)


@contextlib.contextmanager
def _unseen_sizes(x_TD: Tensor) -> Iterator[None]:
    """Where a compiler asks for the result's shape alone, it does not miss the sizes on the way, which no result has."""
    if isinstance(x_TD, FakeTensor) and x_TD.fake_mode.shape_env is not None and get_proxy_mode() is None:
        with x_TD.fake_mode.shape_env.ignore_fresh_unbacked_symbols():
            yield
    else:
        yield


def refuse_to_move_tokens(what: str) -> None:
    """Raise where the ranks that share a token's experts may not round their parts of its sum."""
    if config.batch_invariant:
        rule = "be False where tokens move to experts of other ranks (shard_experts moves weights)"
        raise NotImplementedError(f"{what}: config.batch_invariant must {rule}, got True")
