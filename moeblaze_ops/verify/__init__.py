"""``verify``: a model as written beside the same model rewritten, forward and backward, both against a more precise run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from moeblaze_ops.comparison import Comparison, compare, results_of, rounding_of, widened, wider
from moeblaze_ops.explain import checked_model, explained
from moeblaze_ops.explanation import Explanation, folded, name_pattern
from moeblaze_ops.unchanged import unchanged
from moeblaze_ops.verify.batch_moves import BatchMoves, batch_moves


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
        return "\n".join([str(self.explanation), f"{verdict}; {against}:", *(f"  {line}" for line in _folded(self.comparisons))])

    __repr__ = __str__


def _folded(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Those whose names differ in numbers alone as one, with their largest errors and all bytes; what differs by itself."""
    alike: dict[object, list[Comparison]] = {}
    for comparison in comparisons:
        key = (name_pattern(comparison.name), comparison.note) if comparison.agrees else comparison
        alike.setdefault(key, []).append(comparison)
    return [_largest(group) if len(group) > 1 else group[0] for group in alike.values()]


def _largest(group: list[Comparison]) -> Comparison:
    (name,) = folded(comparison.name for comparison in group)
    written = [comparison.as_written for comparison in group if comparison.as_written is not None]
    return replace(
        max(group, key=lambda comparison: comparison.rewritten),
        name=f"{name} (largest of {len(group)})",
        num_bytes=sum(comparison.num_bytes for comparison in group),
        as_written=max(written, default=None),
    )


def verify(
    model: Callable, *inputs: Any, tolerance: float | None = None, batch_invariant: bool = False, **keywords: Any
) -> Verification:
    """Run ``model(*inputs, **keywords)`` as written and rewritten, forward and backward, and compare.

    The rewritten run takes the graphs that a compile would rewrite, operator by operator. Where memory allows, both are
    measured against the model in fp64, or in fp32 for half precision. Gradients are those of a random weighting of all
    floating outputs, for the parameters and for inputs that require gradients. Parameters, their ``.grad``, buffers and random
    number generators stay as they are; hooks of modules run, hooks on gradients of parameters do not.

    Experts with dropout stay as written here, since numbers are drawn in another order: compare them in ``model.eval()``.

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
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in (*parameters.values(), *tree_leaves((inputs, keywords)))):
        raise ValueError("verify: model must have numbers, as its inputs (explain does without), got tensors on the meta device")
    with unchanged(model):
        written = results_of(model(*inputs, **keywords), inputs, keywords, wanted)
    with unchanged(model):
        explanation, outputs = explained(model, inputs, keywords, eager_numbers=True)
        rewritten = results_of(outputs, inputs, keywords, wanted)
    batch = None
    if batch_invariant:
        if not isinstance(model, nn.Module):
            raise TypeError(f"verify: model must be a module with batch_invariant=True, got a {type(model).__name__}")
        names = [candidate.where.partition(" (")[0] for candidate in explanation.candidates]
        batch = batch_moves(model, [name for name in names if name in dict(model.named_modules())], inputs, keywords)
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
