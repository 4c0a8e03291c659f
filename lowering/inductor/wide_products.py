"""Products of a recognised router in fp32 whose numbers came in bf16: tensor cores compute them, and round no factor.

    logits = F.linear(x.float(), w.float())          # bf16 x and w: one product of them that is summed and given in fp32
    logits = F.linear(x.float(), w)                  # fp32 w: one product with three bf16 parts of w, but none if x is fp32

A product of two bf16 numbers is exact in fp32. An fp32 number is the sum of three bf16 numbers, eight bits of it each, so the
gradient of the logits and a weight in fp32 become such parts side by side, once for all that reads them. Where the product is
rounded to bf16 the first two do: what the third adds is 2**-8 of what rounding may take. The parts are cut off by a mask of
bits, because generated code drops a cast to bf16 and back. Where a gradient is infinite the sum of its parts is NaN. Tensor
cores cut off what they sum: the relative error of a sum of 4096 to 32768 products is 4.4e-6 on an H100, that of fp32 units 2e-7
to 4e-7. Without this the tokens are copied to fp32 and kept for backward, and products leave tensor cores idle. So this is done
to the graph of forward and backward, before it is parted.
"""

import torch
from torch import fx

from moeblaze_ops.lowering.inductor.graph_writer import CAST, VIEWS, Writer
from moeblaze_ops.lowering.inductor.router_products import comes_from_route, feeds_route

aten = torch.ops.aten
_MOVED = (*VIEWS, aten.permute.default)
_HIGH_BITS = -(1 << 16)
"""Sign, exponent and the part of the mantissa that bf16 has."""
_PARTS = "moeblaze_parts"
"""In the meta of parts side by side: of which node, and along which axis."""
_MOST_EXPERTS = 1024
"""As many as the other products of a router take."""


def narrow_router_product(mm: fx.Node) -> bool:
    """Replace ``mm`` if it is such a product, and say whether it was."""
    value = mm.meta["val"]
    if not (value.is_cuda and value.dtype == torch.float32):
        return False
    num_experts = _num_experts(mm)
    if num_experts is None:
        return False
    chains = [_cast_from(side) for side in mm.args]
    given = {chain[-1].meta["val"].dtype for chain in chains if chain}
    if len(given) != 1:
        return False
    call = Writer(mm)
    if all(chains):
        result = call(aten.mm.dtype, *(_moved(call, chain) for chain in chains), torch.float32)
    elif given == {torch.bfloat16}:
        wide = 0 if chains[1] else 1
        result = _in_parts(call, mm, num_experts, wide, chains[1 - wide])
    else:
        return False
    if result is None:
        return False
    call.instead(result)
    return True


def _num_experts(mm: fx.Node) -> int | None:
    """The experts of the router that ``mm`` is a product of; None if it is none's, or if they are many."""
    if feeds_route(mm):
        number = mm.meta["val"].shape[1]
    elif comes_from_route(dlogits := _chain(mm.args[0])[-1]):
        number = dlogits.meta["val"].shape[-1]
    else:
        return None
    return number if isinstance(number, int) and number <= _MOST_EXPERTS else None


def _chain(node: fx.Node) -> list[fx.Node]:
    """``node``, and what it is a move of the elements of, and so on."""
    chain = [node]
    while chain[-1].target in _MOVED:
        chain.append(chain[-1].args[0])
    return chain


def _cast_from(node: fx.Node) -> list[fx.Node]:
    """The moves from ``node`` to the 16-bit tensor that it is cast from, and that tensor; empty if it is not cast."""
    *moves, last = _chain(node)
    if last.target != CAST:
        return []
    (source,) = last.all_input_nodes
    return [*moves, source] if source.meta["val"].dtype in (torch.bfloat16, torch.float16) else []


def _moved(call: Writer, chain: list[fx.Node]) -> fx.Node:
    """The same moves of the tensor itself."""
    *moves, moved = chain
    for move in reversed(moves):
        moved = call(move.target, moved, *move.args[1:])
    return moved


def _in_parts(call: Writer, mm: fx.Node, num_experts: int, wide: int, narrow: list[fx.Node]) -> fx.Node | None:
    """The product with the parts of the fp32 factor at position ``wide`` side by side, None if it has no axis of experts."""
    factor = mm.args[wide]
    sizes = list(factor.meta["val"].shape)
    if num_experts not in sizes:
        return None
    axis = sizes.index(num_experts)
    parts, other = _side_by_side(call, factor, axis), _moved(call, narrow)
    if axis != wide:
        number = 3
        if _is_only_rounded(mm):
            number = 2
            parts = call(aten.slice.Tensor, parts, axis, 0, number * num_experts)
        other = call(aten.cat.default, [other] * number, wide)
    factors = (parts, other) if wide == 0 else (other, parts)
    if axis != wide and _is_only_rounded(mm):
        result = call(aten.mm.default, *factors)
        (cast,) = mm.users
        cast.replace_all_uses_with(result)
        mm.graph.erase_node(cast)
        return result
    product = call(aten.mm.dtype, *factors, torch.float32)
    if axis != wide:
        return product
    rows, columns = mm.meta["val"].shape
    shape = (3, rows, columns) if wide == 0 else (rows, 3, columns)
    return call(aten.sum.dim_IntList, call(aten.view.default, product, shape), [wide])


def _is_only_rounded(mm: fx.Node) -> bool:
    """True if nothing reads the product but a cast to bf16, which the product then makes itself."""
    return [(user.target, user.args[1:]) for user in mm.users] == [(CAST, (torch.bfloat16,))]


def _side_by_side(call: Writer, factor: fx.Node, axis: int) -> fx.Node:
    """Its three parts along an axis: of what the factor is the transposition of, so that all products have the same ones."""
    *moves, source = _chain(factor)
    are_turns = all(move.target == aten.permute.default and list(move.args[1]) == [1, 0] for move in moves)
    if not are_turns or source.op != "call_function":
        return call(aten.cat.default, _parts(call, factor), axis)
    own = source.name, axis if len(moves) % 2 == 0 else 1 - axis
    cats = source.graph.find_nodes(op="call_function", target=aten.cat.default)
    parts = next((cat for cat in cats if cat.meta.get(_PARTS) == own), None)
    if parts is None:
        behind = Writer(source.next, like=source)
        parts = behind(aten.cat.default, _parts(behind, source), own[1])
        parts.meta[_PARTS] = own
    return _moved(call, [*moves, parts])


def _parts(call: Writer, node: fx.Node) -> list[fx.Node]:
    """Three bf16 tensors whose sum is the fp32 tensor."""
    parts, rest = [], node
    for _ in range(2):
        bits = call(aten.bitwise_and.Scalar, call(aten.view.dtype, rest, torch.int32), _HIGH_BITS)
        parts.append(call(aten.view.dtype, bits, torch.float32))
        rest = call(aten.sub.Tensor, rest, parts[-1])
    return [call(CAST, part, torch.bfloat16) for part in (*parts, rest)]
