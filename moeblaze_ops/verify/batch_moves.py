"""Whose bits depend on the batch: a model compiled with ``config.batch_invariant``, on its inputs in other batches."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from moeblaze_ops import config
from moeblaze_ops.unchanged import unchanged


@dataclass(frozen=True, repr=False)
class BatchMoves:
    """Modules in the order in which they are called, each with the batches in which its output has other bits.

    ``by_themselves``: the innermost modules whose inputs have the same bits there. ``experts``: those of them with MoE layers.
    """

    moved: dict[str, tuple[str, ...]]
    by_themselves: tuple[str, ...]
    experts: tuple[str, ...]

    def __str__(self) -> str:
        if not self.moved:
            return "no bit depends on the batch: permuted, padded and split"
        first, *others = self.by_themselves or tuple(self.moved)
        lines = [f"bits depend on the batch, first those of {first} ({', '.join(self.moved[first])})"]
        lines += [f"  and of others whose inputs do not: {', '.join(others)}"] if others and self.by_themselves else []
        return "\n".join([*lines, f"  MoE layers among these: {', '.join(self.experts) or 'none'}"])

    __repr__ = __str__


@contextlib.contextmanager
def _bits_of_no_batch() -> Iterator[None]:
    """A context in which ``config.batch_invariant`` holds for what is compiled."""
    before, config.batch_invariant = config.batch_invariant, True
    try:
        yield
    finally:
        config.batch_invariant = before


def batch_moves(model: nn.Module, layers: Sequence[str], inputs: Sequence[Any], keywords: dict[str, Any]) -> BatchMoves:
    """Run ``model`` compiled, with ``config.batch_invariant``, on the batch and on others of its inputs, and compare bits.

    Args:
        layers: names of modules that hold MoE layers; what is inside is not looked at, which would keep it from being rewritten.
        inputs, keywords: what the model is called with. Tensors with as many rows as the first one are the batch.
    """
    number = next((leaf.shape[0] for leaf in tree_leaves((inputs, keywords)) if isinstance(leaf, Tensor) and leaf.dim()), 0)
    watched = dict(_outside(model, layers))
    everything = torch.arange(number)
    batches = {
        "permuted": [everything.flip(0)],
        "padded": [torch.cat([everything, everything.flip(0)])],
        "split": [everything[: number // 2], everything[number // 2 :]] if number > 1 else [],
    }
    moved: dict[str, tuple[str, ...]] = {}
    alone: list[str] = []
    with _bits_of_no_batch(), unchanged(model), torch.no_grad():
        torch.compiler.reset()
        expected = _run(model, watched, inputs, keywords, number)
        for kind, parts in batches.items():
            for rows in parts:
                here, named = tree_map(lambda leaf, rows=rows: _rows_of(leaf, rows, number), (tuple(inputs), keywords))
                _compare(kind, expected, _run(model, watched, here, named, len(rows)), rows, number, moved, alone)
        torch.compiler.reset()
    alone = [name for name in expected if name in alone and not any(name in _above(other) for other in alone)]
    holds = [name for name in alone if name in layers or any(own.dim() == 3 for own in watched[name].parameters(recurse=False))]
    named = {name: name or type(model).__name__ for name in watched}
    ordered = {named[name]: moved[name] for name in expected if name in moved}
    return BatchMoves(ordered, *(tuple(named[name] for name in names) for names in (alone, holds)))


def _outside(model: nn.Module, layers: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are in no MoE layer, those that hold one among them."""
    for name, module in model.named_modules():
        if not any(layer in _above(name) for layer in layers):
            yield name, module


def _above(name: str) -> Iterator[str]:
    """The modules that hold one, the model itself last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _run(
    model: nn.Module, watched: dict[str, nn.Module], inputs: Sequence[Any], keywords: dict[str, Any], number: int
) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """What each call of a module read and gave, as tensors with a row for each input; the first call of each module."""
    seen: dict[str, tuple[Any, Any]] = {}

    def note(name: str) -> Callable:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if name not in seen:
                seen[name] = args, output

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in watched.items()]
    try:
        torch.compile(model, backend="moeblaze", dynamic=False)(*inputs, **keywords)
    finally:
        for handle in handles:
            handle.remove()
    return {name: (_by_input(args, number), _by_input(output, number)) for name, (args, output) in seen.items()}


def _by_input(values: Any, number: int) -> list[Tensor]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim()]
    return [tensor.reshape(number, -1) for tensor in tensors if number and tensor.shape[0] % number == 0]


def _rows_of(leaf: Any, rows: Tensor, number: int) -> Any:
    is_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == number
    return leaf.index_select(0, rows.to(leaf.device)) if is_batch else leaf


def _compare(
    kind: str,
    expected: dict[str, tuple[list[Tensor], list[Tensor]]],
    got: dict[str, tuple[list[Tensor], list[Tensor]]],
    rows: Tensor,
    number: int,
    moved: dict[str, tuple[str, ...]],
    alone: list[str],
) -> None:
    for name in expected.keys() & got.keys():
        read, gave = (
            all(_same(_rows_of(one, rows, number), other) for one, other in zip(*pair, strict=False))
            for pair in zip(expected[name], got[name], strict=True)
        )
        if not gave:
            moved[name] = tuple(dict.fromkeys((*moved.get(name, ()), kind)))
            if read and name not in alone:
                alone.append(name)


def _same(one: Tensor, other: Tensor) -> bool:
    bits, others = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    return torch.equal(bits, others)
