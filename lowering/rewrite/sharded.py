"""Layers whose expert weights are gathered from the ranks that store them: their tokens move instead, where that is fewer bytes.

A weight is sharded if the graph says so: its node is ``to_local(grad_placements=[Partial()])`` of a ``redistribute`` from
``Shard(0)`` to ``Replicate()`` on one mesh axis. So each rank needs the sum of all ranks' gradients for its own experts, and
that is what experts compute that see the tokens of all ranks. Accepted and refused:

    w = p.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])    # p: Shard(0)
    w = p.redistribute(placements=[Replicate()]).to_local()                               # gradients of this rank alone
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import fx

from moeblaze_ops import config
from moeblaze_ops.explanation import size_text
from moeblaze_ops.lowering.graph.dtensors import dtensor_call
from moeblaze_ops.lowering.graph.fake_values import fake_of
from moeblaze_ops.lowering.graph.functional_view import inplace_name
from moeblaze_ops.lowering.match.match_result import MoEMatch
from moeblaze_ops.lowering.match.operands.weight_layout import Part, WeightView
from moeblaze_ops.lowering.rewrite.inserter import Inserter
from moeblaze_ops.lowering.torch_internals.callers import call_of_layer, places
from moeblaze_ops.ops.sharded import gathered_weights
from moeblaze_ops.ops.sharded.apart import told_apart
from moeblaze_ops.ops.sharded.collectives import local_shard, most_tokens, start_gather_of_tokens
from moeblaze_ops.ops.sharded.exchange import choose_exchange, crossed_hosts, goes_all_to_all, moe_over_ranks
from moeblaze_ops.ops.sharded.experts_over_ranks import experts_over_ranks
from moeblaze_ops.ops.sharded.groups import members_of

_TOKEN_LEGS, _WEIGHT_LEGS = 5, 3
"""Forward and backward: x, out, dout, x again and dx; weights and their gradients, gathered once more in backward."""


@dataclass(frozen=True)
class ShardedWeights:
    """The stored DTensor behind each whole weight of a layer, all on one mesh axis."""

    stored: dict[fx.Node, fx.Node]
    group: str
    members: list[int]
    weight_bytes: int

    @property
    def ranks(self) -> int:
        return len(self.members)

    @property
    def moved_weight_bytes(self) -> int:
        """Bytes that a rank receives in forward and backward where weights move."""
        return _WEIGHT_LEGS * (self.ranks - 1) * self.weight_bytes // self.ranks


def sharded_weights(match: MoEMatch) -> ShardedWeights | None:
    """What stores the layer's weights, if all of them are gathered from shards of whole experts."""
    stored: dict[fx.Node, fx.Node] = {}
    for view in match.views:
        source = _gathered_from(view.nodes[0]) if len(view.nodes) == 1 else None
        if source is None or not _by_experts(view, source, match.E):
            return None
        stored[view.nodes[0]] = source
    meshes = {fake_of(source).device_mesh for source in stored.values()}
    if len(meshes) != 1:
        return None
    (mesh,) = meshes
    sizes = [math.prod(fake_of(source).shape) * fake_of(source).element_size() for source in stored.values()]
    group = mesh.get_group().group_name
    return ShardedWeights(stored, group, members_of(group), sum(sizes))


def share_reached(places: int, E: int, K: int) -> Fraction:
    """Of the other ranks, or hosts, those that have one of a token's K experts, if any K of E are as likely as others."""
    return 1 - Fraction(math.comb(E - E // places, K), math.comb(E, K))


@dataclass(frozen=True)
class Moving:
    """What moves between the ranks of a layer with sharded experts, and how many bytes that are.

    Every rank comes to the same choice: it follows from settings, the mesh and the weights, and not from the tokens of a rank.
    """

    sharded: ShardedWeights
    x: torch.Tensor
    E: int
    K: int

    @property
    def layer(self) -> str:
        """The layer in words that are the same on every rank."""
        return f"{self.E} experts of {_size(self.sharded.weight_bytes)} for tokens in {self.x.dtype}, {self.K} a token"

    @property
    def tokens(self) -> bool:
        """True if tokens move: where that is asked for, or not known to be more bytes than the weights are."""
        most = config.tokens_per_rank
        return config.experts_move == "tokens" or most is None or self._token_bytes(most) <= self.sharded.moved_weight_bytes

    @property
    def all_to_all(self) -> bool:
        return goes_all_to_all(self.sharded.group, self.sharded.ranks, self.K, self.x.is_cuda)

    @property
    def num_hosts(self) -> int:
        """The hosts that tokens cross to once, 1 where they do not."""
        hosts = crossed_hosts(self.sharded.group, self.x.is_cuda)
        return len(members_of(hosts[0])) if hosts else 1

    def describe(self) -> str:
        most = config.tokens_per_rank
        T = self.x.shape[0] if most is None else most
        tokens = f"{_size(self._token_bytes(T))} of tokens"
        weights = f"{_size(self.sharded.moved_weight_bytes)} of weights"
        moved, other = (tokens, weights) if self.tokens else (weights, tokens)
        text = f"{moved} move between {self.sharded.ranks} ranks, not {other}"
        return f"{text}; {self._describe_exchange(T)}" if self.tokens else text

    def _describe_exchange(self, T: int | torch.SymInt) -> str:
        gathered = f"{_size(self._bytes_of(T, self.sharded.ranks, everywhere=True))} by all-gather"
        sent = f"{_size(self._bytes_of(T, self.sharded.ranks))} by all-to-all"
        if self.num_hosts > 1:
            return f"{_size(self._token_bytes(T))} between {self.num_hosts} hosts, not {gathered} or {sent}"
        taken, other = (sent, gathered) if self.all_to_all else (gathered, sent)
        return f"{taken}, not {other}"

    def _token_bytes(self, T: int | torch.SymInt) -> int | torch.SymInt:
        if self.num_hosts > 1:
            return self._bytes_of(T, self.num_hosts)
        return self._bytes_of(T, self.sharded.ranks, everywhere=not self.all_to_all)

    def _bytes_of(self, T: int | torch.SymInt, places: int, everywhere: bool = False) -> int | torch.SymInt:
        """What a rank receives in forward and backward where tokens go once to each of the places, or those of their experts."""
        whole = _TOKEN_LEGS * (places - 1) * T * self.x.shape[1] * self.x.element_size()
        share = Fraction(1) if everywhere else share_reached(places, self.E, self.K).limit_denominator(1000)
        return whole * share.numerator // share.denominator


def may_move(match: MoEMatch, x_TD: fx.Node, experts_TK: fx.Node) -> Moving | None:
    """What moves, if the layer's experts are sharded and its tokens may."""
    if config.experts_move == "weights" or config.batch_invariant or match.has_low_rank or match.parameters:
        return None
    if match.out_width != match.D or any(match.dropout):
        return None
    sharded = sharded_weights(match)
    return None if sharded is None else Moving(sharded, fake_of(x_TD), match.E, fake_of(experts_TK).shape[1])


def insert_moved_tokens(
    insert: Inserter, match: MoEMatch, moving: Moving, x_TD: fx.Node, weights_TK: fx.Node | None, experts_TK: fx.Node
) -> fx.Node:
    """Insert the layer with tokens that move. They leave before the router chooses, unless it says where they go."""
    x, sharded = fake_of(x_TD), moving.sharded
    exchange = choose_exchange(sharded.group, moving.K, x.is_cuda)
    gathered = None if exchange.all_to_all else _start_gather(insert, match, moving, x_TD, exchange.copies)
    w_up, b_up, w_down, b_down = (
        [_local(insert, view, sharded) for view in views]
        for views in (match.w_up, match.b_up, (match.w_down,), (match.b_down,) if match.b_down else ())
    )
    differentiable = [x_TD, weights_TK, *w_up, *b_up, *w_down, *b_down]
    learns = torch.is_grad_enabled() and any(fake_of(node).requires_grad for node in differentiable if node is not None)
    together = exchange.members, exchange.group, exchange.copies, exchange.exact
    settings = (match.activation, match.weights_on_input, *together, exchange.keep if learns else "input", exchange.hosts)
    parameters = (w_up, b_up, w_down, b_down)
    operands = (x_TD, gathered, weights_TK, experts_TK, *parameters, *settings)
    with x.fake_mode:
        value = x.new_empty(x.shape)
    return insert.given(value.requires_grad_(learns), experts_over_ranks, *operands)


def _start_gather(insert: Inserter, match: MoEMatch, moving: Moving, x_TD: fx.Node, copies: bool) -> fx.Node:
    x, place = fake_of(x_TD), _where_tokens_leave(match, moving.sharded)
    ranks, group = moving.sharded.ranks, moving.sharded.group
    first = insert if place is None else insert.at(place, match.x.node)
    early_TD = x_TD if place is None else first.rows(match.x, match.D)
    with x.fake_mode:
        # What copies have started holds nothing yet.
        everyone = x.new_empty(ranks * x.shape[0], x.shape[1], *([0] if copies else []))
        question = None if config.tokens_per_rank else torch.empty((), dtype=torch.int64)
    rows = config.tokens_per_rank or _most_tokens(
        first, early_TD, moving.sharded, f"{moving.layer}, by {'copies' if copies else 'collectives'}"
    )
    return first.given((everyone, question), start_gather_of_tokens, early_TD, rows, ranks, group, copies)


def _most_tokens(first: Inserter, x_TD: fx.Node, sharded: ShardedWeights, layer: str) -> fx.Node:
    """How many tokens the ranks have at most: they tell each other once for each layer.

    Two layers that have equally many on this rank may have different numbers on another, which asks twice then.
    """
    x, stored = fake_of(x_TD), next(iter(sharded.stored.values()))
    shard = first.call(local_shard, stored) if stored.op == "placeholder" else None
    with x.fake_mode:
        value = x.new_empty(x.shape[0], 0), torch.empty((), dtype=torch.int64)
    return first.given(value, most_tokens, first.given(x.detach(), told_apart, x_TD), shard, sharded.group, layer)


def join_gathers(graph: fx.Graph) -> None:
    """Let all readers of a sharded parameter in a call of its layer read one gather: it travels once, and so do its gradients.

    It joins ``w[0]`` and ``w[1]`` of two reads of a parameter, and leaves those between which something writes to it, and those
    of two calls: a rank whose graph breaks in between gathers twice as well.
    """
    first: dict[tuple, fx.Node] = {}
    for node in list(graph.nodes):
        call = dtensor_call(node)
        if call is None or any(inplace_name(user) is not None for user in node.args[0].users):
            continue
        of_layer = node.meta["call_of_layer"] = call_of_layer(node)  # for the node's form
        same = first.setdefault((node.args[0], call[0], repr(sorted(call[1].items())), of_layer), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def drop_unread_gathers(graph: fx.Graph) -> None:
    """Remove gathers of sharded weights that nobody reads any more: AOTAutograd keeps a collective without readers."""
    for node in reversed(list(graph.nodes)):
        if not node.users and (_is_call(node, "to_local") or _is_call(node, "redistribute")):
            graph.erase_node(node)


def meet_before_gathers(graph: fx.Graph) -> None:
    """Let the hosts meet before weights travel that ``shard_experts`` stores: a rank whose tokens move instead is named."""
    for node in list(graph.nodes):
        source = _gathered_from(node) if _is_call(node, "to_local") else None
        if source is None or not any(file == gathered_weights.__file__ for file, *_ in places(node)):
            continue
        stored, whole = fake_of(source), node.args[0]
        mesh, words = stored.device_mesh, f"a weight {list(stored.shape)} that moves"
        node.op, node.target, node.kwargs = "call_function", gathered_weights.met_and_gathered, {}
        node.args = source, mesh.size(), mesh.get_group().group_name, words
        whole.append(node)  # where ranks would have talked: tokens of a later layer may leave from there on
        if not whole.users:
            graph.erase_node(whole)


def _is_call(node: fx.Node, method: str) -> bool:
    call = dtensor_call(node)
    return call is not None and call[0] == method


def _gathered_from(node: fx.Node) -> fx.Node | None:
    """The DTensor ``Shard(0)`` that ``node`` is the whole of, with gradients that are summed over its ranks."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if not _is_call(node, "to_local") or not _is_call(node.args[0], "redistribute"):
        return None
    grad_placements = dtensor_call(node)[1].get("grad_placements")
    whole, source = fake_of(node.args[0]), node.args[0].args[0]
    stored = fake_of(source)
    is_sum = grad_placements is not None and tuple(grad_placements) == (Partial("sum"),)
    same = whole.device_mesh == stored.device_mesh and whole.dtype == stored.dtype and stored.device_mesh.ndim == 1
    placed = tuple(stored.placements) == (Shard(0),) and tuple(whole.placements) == (Replicate(),)
    written = any(inplace_name(user) is not None for user in source.users)
    return source if is_sum and same and placed and not written else None


def _by_experts(view: WeightView, source: fx.Node, num_experts: int) -> bool:
    """True if each rank stores whole experts, as many as the others: the axis E is the outermost of what is stored."""
    stored = fake_of(source)
    ranks = stored.device_mesh.size()
    outermost = view.order[0] == 0 and all(len(part.sizes) > 1 and part.sizes[0] == num_experts for part in view.parts[0])
    return outermost and not view.apart and num_experts % ranks == 0 and stored.shape[0] % num_experts == 0


def _local(insert: Inserter, view: WeightView, sharded: ShardedWeights) -> fx.Node:
    """The experts of this rank, as the ops take them."""
    count = view.sizes[0] // sharded.ranks
    parts = tuple(Part((count, *part.sizes[1:]), part.start, part.length) for part in view.parts[0])
    view = replace(view, sizes=(count, *view.sizes[1:]))
    node = insert.viewed(insert.call(local_shard, sharded.stored[view.nodes[0]]), view, parts)
    return insert.call("to", node, view.dtype) if view.cast else node


def _where_tokens_leave(match: MoEMatch, sharded: ShardedWeights) -> fx.Node | None:
    """The node behind which the layer's tokens may leave: their own, or a later one where ranks talk about something else.

    All ranks talk in the order of the program. Tokens have a node of their own right before the layer where this rank has none of
    them, so they may not leave before what stands between. None: something writes to a tensor in between.

        y = norm(x); w, i = router(y); return layer(y, w, i)       behind norm
        y = norm(x); a = other_layer(x); return a + layer(y)       behind other_layer, if its experts are sharded
        y = norm(x); y.mul_(2); return layer(y)                    None
    """
    own = {match.root, *sharded.stored, *(whole.args[0] for whole in sharded.stored)}
    inputs = match.root.graph.find_nodes(op="placeholder")
    place, node = None, match.root
    while node is not match.x.node and node.op != "placeholder":
        if place is None and node not in own and _is_talk(node):
            place = node
        if node is not match.root and inplace_name(node) is not None and node not in match.region.nodes:
            return None
        node = node.prev
    return place or (inputs[-1] if node.op == "placeholder" else node)


def _is_talk(node: fx.Node) -> bool:
    """True if ranks talk to each other where a node runs, or may: in a graph inside of this one, too.

        dist.all_reduce(x), w.redistribute(placements=[Replicate()]), checkpoint(f, x)        and not        x.to_local()
    """
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator) or _is_call(node, "redistribute") or target == "full_tensor":
        return True
    module = getattr(target, "__module__", None) or ""
    ours = target in (most_tokens, start_gather_of_tokens, experts_over_ranks, moe_over_ranks)
    return ours or getattr(target, "namespace", None) == "_c10d_functional" or module.startswith("torch.distributed")


def _size(num_bytes: int | torch.SymInt) -> str:
    return size_text(num_bytes) if isinstance(num_bytes, int) else f"{num_bytes} bytes"
