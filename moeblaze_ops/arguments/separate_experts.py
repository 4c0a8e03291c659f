"""Experts stored apart: ops take one tensor for each expert, and join them for as long as a kernel reads them.

Where an argument of an op is a list of weights or biases, with E experts on the first axis, it may also be E tensors of
one expert each; for gate and up 2 E, gates first. Autograd keeps these, the parameters or views of them, and the joined
tensor ends with the op that asked for it. Gradients are taken joined, and handed out as views.

On a CPU nothing is joined: experts are read one by one. On a GPU tensors that lie one after another in memory (see
``packing``) are joined as a view of it. Ops alone do that, inside: in a graph a result that is memory of the arguments
would have to be planned for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_LISTS = ("w_up", "b_up", "w_down", "b_down", "like")
"""Arguments that may hold experts apart; of ``like`` only shapes and strides are read."""

_ALIGNMENT = 16
"""Bytes to which kernels, TMA among them, expect the first element to be aligned."""

_library = torch.library.Library("moeblaze_storage", "FRAGMENT")


class OneByOne:
    """E tensors ``[1, ...]`` in place of one ``[E, ...]``, for who reads the experts one by one."""

    def __init__(self, pieces: Sequence[Tensor]):
        self._pieces = pieces
        self.shape = torch.Size((len(pieces), *pieces[0].shape[1:]))
        self.dtype, self.device = pieces[0].dtype, pieces[0].device

    def dim(self) -> int:
        return len(self.shape)

    def unbind(self, axis: int) -> Sequence[Any]:
        """Slices along an axis: tensors along that of the experts."""
        if axis == 0:
            return [piece.squeeze(0) for piece in self._pieces]
        return [OneByOne(slices) for slices in zip(*(piece.unbind(axis) for piece in self._pieces), strict=True)]


def with_experts_joined(
    op: torch._ops.OpOverload, function: Callable, join: Callable[[Sequence[Tensor]], Any], check: bool = True
) -> Callable:
    """``function`` of the arguments of ``op``, for experts that are stored apart too.

    Args:
        op: has an argument ``offsets_E1`` or ``num_experts`` if it has lists of weights or biases.
        function: takes the experts of every list joined; of ``like`` a tensor on the meta device.
        join: ``joined``, ``copied``, ``empty_joined`` or ``OneByOne``.
        check: look at the experts that are apart; False where that was done for these sizes.

    Raises:
        ValueError, TypeError: experts that are apart are not E, or 2 E, or differ in shape, dtype or device.
    """
    names, lists = _lists(op)
    if not lists:
        return function

    def run(*args: Any) -> Any:
        num_experts = _num_experts(op.overloadpacket.__name__, names, args)
        whole = list(args)
        for i in lists:
            if are_apart(args[i], num_experts):
                if check:
                    _check(op.overloadpacket.__name__, names[i], args[i], num_experts)
                join_all = _shape_joined if names[i] == "like" else join
                whole[i] = [join_all(pieces) for pieces in _groups(args[i], num_experts)]
        return function(*whole)

    return run


def with_shapes_joined(op: torch._ops.OpOverload, flops: Callable) -> Callable:
    """A flop formula, which takes shapes in place of tensors, for experts that are stored apart too."""
    names, lists = _lists(op)

    def run(*args: Any, **kwargs: Any) -> int:
        whole = list(args)
        for i in lists:
            num_experts = _num_experts(op.overloadpacket.__name__, names, args)
            if num_experts > 1 and args[i] and args[i][0][0] == 1:
                whole[i] = [(num_experts, *shape[1:]) for shape in args[i][::num_experts]]
        return flops(*whole, **kwargs)

    return run


def separate_weights(op: torch._ops.OpOverload, args: Sequence[Any]) -> list[list[Sequence[Tensor]]]:
    """Weights and biases that a call of ``op`` has expert by expert: of each such argument one group of E, or gates and ups."""
    names, lists = _lists(op)
    read = [args[i] for i in lists if names[i] != "like"]
    num_experts = _num_experts(op.overloadpacket.__name__, names, args) if read else 0
    return [_groups(tensors, num_experts) for tensors in read if are_apart(tensors, num_experts)]


def reads_in_place(op: torch._ops.OpOverload, args: Sequence[Any]) -> bool:
    """True if ``op`` reads experts that are apart and lie one after another in memory, as far as storages of fakes tell."""
    return any(all(map(are_in_a_row, groups)) for groups in separate_weights(op, args))


def _num_experts(op: str, names: Sequence[str], args: Sequence[Any]) -> int:
    """E, from the arguments of an op or, for a flop formula, from shapes in place of its tensors."""
    if "num_experts" in names:
        return args[names.index("num_experts")]
    offsets_E1 = args[names.index("offsets_E1")]
    if isinstance(offsets_E1, Tensor) and offsets_E1.dim() != 1:
        raise ValueError(f"{op}: offsets_E1 must have 1 dimension, got shape {list(offsets_E1.shape)}")
    return (offsets_E1.shape if isinstance(offsets_E1, Tensor) else offsets_E1)[0] - 1


def are_apart(tensors: Sequence[Tensor], num_experts: int) -> bool:
    """True if the tensors hold one expert each, of several."""
    return num_experts > 1 and len(tensors) > 0 and tensors[0].dim() > 0 and tensors[0].shape[0] == 1


def are_in_a_row(pieces: Sequence[Tensor]) -> bool:
    """True if tensors of one size, real or fake, follow each other in one storage."""
    first, step, storage = pieces[0].storage_offset(), pieces[0].numel(), pieces[0].untyped_storage()._cdata
    return all(
        piece.storage_offset() == first + position * step and piece.untyped_storage()._cdata == storage
        for position, piece in enumerate(pieces)
    )


def num_joined(tensors: Sequence[Tensor], num_experts: int) -> int:
    """How many tensors a list has once its experts are joined."""
    return len(tensors) // num_experts if are_apart(tensors, num_experts) else len(tensors)


def split_as_given(gradients: list[Tensor], count: int) -> list[Tensor]:
    """Gradients of joined tensors as views for each of the ``count`` tensors that were given."""
    return gradients if len(gradients) == count else [view for whole in gradients for view in whole.split(1)]


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """One tensor ``[E, ...]`` of E tensors ``[1, ...]``: a view where they lie one after another in memory, else a copy.

    Strides are those of the first piece, with the experts outermost.
    """
    view = _in_place(pieces)
    return _copied(pieces) if view is None else view


def empty_joined(pieces: Sequence[Tensor], device: str | None = None) -> Tensor:
    """An uninitialised tensor with the shape and strides of ``joined``, on the device of the pieces or another."""
    lead, order = pieces[0], _storage_order(pieces[0])
    sizes = [len(pieces), *(lead.shape[axis] for axis in order[1:])]
    return lead.new_empty(sizes, device=device or lead.device).permute(_inverse(order))


def _shape_joined(pieces: Sequence[Tensor]) -> Tensor:
    return empty_joined(pieces, "meta")


def _lists(op: torch._ops.OpOverload) -> tuple[list[str], list[int]]:
    """Names of the arguments, and positions of those that may hold experts apart."""
    names = [argument.name for argument in op._schema.arguments]
    return names, [i for i, name in enumerate(names) if name in _LISTS]


def _groups(tensors: Sequence[Tensor], num_experts: int) -> list[Sequence[Tensor]]:
    return [tensors[start : start + num_experts] for start in range(0, len(tensors), num_experts)]


def _check(op: str, name: str, tensors: Sequence[Tensor], num_experts: int) -> None:
    lead = tensors[0]
    allowed = (num_experts,) if name in ("w_down", "b_down") else (num_experts, 2 * num_experts)
    if len(tensors) not in allowed:
        rule = f"hold {' or '.join(map(str, allowed))} tensors where each is of one expert"
        raise ValueError(f"{op}: {name} must {rule}, got {len(tensors)}")
    for tensor in tensors:
        if tensor.shape != lead.shape or tensor.device != lead.device:
            rule = f"hold tensors of one shape and device, {list(lead.shape)} on {lead.device}"
            raise ValueError(f"{op}: {name} must {rule}, got {list(tensor.shape)} on {tensor.device}")
        if tensor.dtype != lead.dtype:
            raise TypeError(f"{op}: {name} must hold tensors of one dtype, {lead.dtype}, got {tensor.dtype}")


def _in_place(pieces: Sequence[Tensor]) -> Tensor | None:
    lead = pieces[0]
    start, step = lead.data_ptr(), lead.numel() * lead.element_size()
    # All memory between the first and the last piece is a part of their storage only if they have the same one.
    if step == 0 or start % _ALIGNMENT or lead.untyped_storage().data_ptr() != pieces[-1].untyped_storage().data_ptr():
        return None
    if [piece.data_ptr() for piece in pieces] != list(range(start, start + step * len(pieces), step)):
        return None
    layout, strides = lead.stride(), _joined_strides(lead)
    if any(lead.shape[axis] > 1 and layout[axis] != strides[axis] for axis in range(1, lead.dim())):
        return None
    if any(piece.stride() != layout for piece in pieces):
        return None
    return lead.as_strided((len(pieces), *lead.shape[1:]), strides)


def _copied(pieces: Sequence[Tensor]) -> Tensor:
    order = _storage_order(pieces[0])
    flat = torch.cat([piece.permute(order).reshape(-1) for piece in pieces])
    return flat.view([len(pieces), *(pieces[0].shape[axis] for axis in order[1:])]).permute(_inverse(order))


def _storage_order(piece: Tensor) -> list[int]:
    """Axes from the outermost in memory to the innermost, that of the experts first."""
    return [0, *sorted(range(1, piece.dim()), key=piece.stride, reverse=True)]


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _joined_strides(piece: Tensor) -> list[int]:
    strides, step = [0] * piece.dim(), 1
    for axis in reversed(_storage_order(piece)):
        strides[axis], step = step, step * piece.shape[axis]
    return strides


_library.define("join(Tensor[] pieces) -> Tensor", tags=(torch.Tag.needs_exact_strides,))
for _device in ("CPU", "CUDA"):
    _library.impl("join", _copied, _device)
torch.library.register_fake("moeblaze_storage::join", empty_joined, lib=_library)

copied = torch.ops.moeblaze_storage.join.default
"""``joined``, but always a copy: an op for graphs."""
