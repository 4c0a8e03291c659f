"""``verify``: a model as written beside the same model rewritten, forward and backward, both against a more precise run.

And, where that is asked for, the rewritten model on other batches of the same inputs: whose bits move.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from moeblaze_ops.comparison import Comparison, bits_of_no_batch, compare, results_of, rounding_of, widened, wider
from moeblaze_ops.explain import checked_model, explained
from moeblaze_ops.explanation import Explanation
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


@dataclass(frozen=True, repr=False)
class Verification:
    """What came of ``verify``; its text says it.

    ``reference`` is the dtype of the precise run, None where there was none, and ``no_reference`` says why then.
    """

    explanation: Explanation
    comparisons: tuple[Comparison, ...]
    reference: torch.dtype | None
    no_reference: str = ""
    batch: BatchMoves | None = None

    @property
    def agrees(self) -> bool:
        """True if a layer was rewritten, a result compared, every result is within its bound, and no MoE layer's bits moved."""
        rewritten = any(candidate.became for candidate in self.explanation.candidates)
        moved = self.batch is not None and bool(self.batch.experts)
        return rewritten and bool(self.comparisons) and all(comparison.agrees for comparison in self.comparisons) and not moved

    def __str__(self) -> str:
        return self._of_results() if self.batch is None else f"{self._of_results()}\n{self.batch}"

    def _of_results(self) -> str:
        wrong = sum(not comparison.agrees for comparison in self.comparisons)
        verdict = f"{wrong} of {len(self.comparisons)} results differ" if wrong else f"{len(self.comparisons)} results agree"
        if not any(candidate.became for candidate in self.explanation.candidates):
            return f"{self.explanation}\nnothing was rewritten, so there is nothing to compare"
        if not self.comparisons:
            return f"{self.explanation}\nnothing was compared: no output is a floating-point tensor"
        without = f"relative distances, no precise run: {self.no_reference}"
        against = f"relative errors against {self.reference}" if self.reference else without
        return "\n".join([str(self.explanation), f"{verdict}; {against}:", *(f"  {line}" for line in self.comparisons)])

    __repr__ = __str__


def verify(
    model: Callable, *inputs: Any, tolerance: float | None = None, batch_invariant: bool = False, **keywords: Any
) -> Verification:
    """Run ``model(*inputs, **keywords)`` as written and rewritten, forward and backward, and compare.

    The rewritten run takes the graphs that a compile would rewrite, operator by operator. Where memory allows, both are
    measured against the model in fp64, or in fp32 for half precision. Gradients are those of a random weighting of all
    floating outputs, for the parameters and for inputs that require gradients. Parameters, their ``.grad``, buffers and random
    number generators stay as they are; hooks of modules run, hooks on gradients of parameters do not.

    A model whose router scores two experts alike may choose the other one in another precision: all errors are large
    then, and alike.

    Args:
        model: a module, or a function (of which the parameters are not known).
        inputs, keywords: what it is called with.
        tolerance: the relative error that the rewritten results may have; None: four times that of the model as written,
            and four roundings of the coarsest dtype in it (32 where there is no precise run).
        batch_invariant: also compile the module with ``config.batch_invariant`` and run its inputs in other batches: in reverse
            order, twice as many, and in two halves. The report says which module's bits move first; those of attention and norms
            may, those of an MoE layer whose inputs have the same bits do not agree.

    Returns:
        A report: print it, or ask for ``agrees``.
    """
    model = checked_model("verify", model)
    parameters = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    wanted = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    with unchanged(model):
        written = results_of(model(*inputs, **keywords), inputs, keywords, wanted)
    with unchanged(model):
        explanation, outputs = explained(model, inputs, keywords)
        rewritten = results_of(outputs, inputs, keywords, wanted)
    batch = None
    if batch_invariant:
        if not isinstance(model, nn.Module):
            raise TypeError(f"verify: model must be a module with batch_invariant=True, got a {type(model).__name__}")
        names = [candidate.where.partition(" (")[0] for candidate in explanation.candidates]
        batch = _batch_moves(model, [name for name in names if name in dict(model.named_modules())], inputs, keywords)
    dtype, precise, reason = _precise_results(model, inputs, keywords, list(wanted))
    rounding = rounding_of([*parameters.values(), *tree_leaves((inputs, keywords)), *written.values()])
    return Verification(explanation, compare(written, rewritten, precise, rounding, tolerance), dtype, reason, batch)


def _precise_results(
    model: Callable, inputs: Sequence[Any], keywords: dict[str, Any], names: list[str]
) -> tuple[torch.dtype | None, dict[str, Tensor | None] | None, str]:
    """The results of the model in the most precise dtype that there is memory for and that it runs in, or why there are none."""
    if not isinstance(model, nn.Module):
        return None, None, "the parameters of a function are not known"
    reason = "no dtype is more precise, or there is no memory for one"
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for dtype in wider([*tensors.values(), *tree_leaves((inputs, keywords))]):
        wide = {name: widened(tensor, dtype) for name, tensor in tensors.items()}
        wide_inputs, wide_keywords = tree_map(lambda leaf, dtype=dtype: widened(leaf, dtype), (tuple(inputs), keywords))
        try:
            with unchanged(model), torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
                output = torch.func.functional_call(model, wide, wide_inputs, wide_keywords)
                return dtype, results_of(output, wide_inputs, wide_keywords, {name: wide[name] for name in names}), ""
        except Exception as error:  # the model asks for a dtype by name, or its layers are no plain tensors
            reason = f"in {dtype} the model raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None, None, reason


def _batch_moves(model: nn.Module, layers: Sequence[str], inputs: Sequence[Any], keywords: dict[str, Any]) -> BatchMoves:
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
    with bits_of_no_batch(), unchanged(model), torch.no_grad():
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
