"""Results of a program as written beside those of the program rewritten: how far both are from a more precise run."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from moeblaze_ops import config
from moeblaze_ops.explanation import size_text
from moeblaze_ops.unchanged import as_it_is

_FACTOR = 4
"""The rewritten run may be so many times as far from the precise one as the run as written, and this many roundings more."""

_SMALL = 64 << 20
"""Bytes of inputs, parameters among them, that a reproduction holds."""


class VerificationError(RuntimeError):
    """What was compiled gives other results than the program as written."""


@dataclass(frozen=True)
class Comparison:
    """One result: an output, or the gradient of an input or a parameter.

    ``as_written`` and ``rewritten`` are the relative errors of the two runs, ``||result - precise|| / ||precise||``; without a
    precise run ``as_written`` is None, and the other is the distance of the two. ``note`` says where a gradient is None.
    """

    name: str
    num_bytes: int
    as_written: float | None
    rewritten: float
    allowed: float
    note: str = ""

    @property
    def agrees(self) -> bool:
        return self.rewritten <= self.allowed

    def __str__(self) -> str:
        written = "" if self.as_written is None else f"as written {self.as_written:.1e}, "
        verdict = "" if self.agrees else f"  <-- more than {self.allowed:.1e}"
        note = f"  ({self.note})" if self.note else ""
        return f"{self.name}: {written}rewritten {self.rewritten:.1e}, {size_text(self.num_bytes)}{note}{verdict}"


def verified_at_first(captured: fx.GraphModule, compiled: Callable) -> Callable:
    """``compiled``, which in its first run is compared with the graph that it was made of.

    Raises (in that run):
        VerificationError: a result differs; the text names the results and the folder with a reproduction.
    """
    is_verified = False

    def run(*args: Any) -> Any:
        nonlocal is_verified
        if not is_verified:
            comparisons, dtype = _compare_graph(captured, compiled, args)
            is_verified = True
            if wrong := [comparison for comparison in comparisons if not comparison.agrees]:
                folder = _write_reproduction(captured, args, comparisons, dtype)
                lines = "\n".join(f"  {comparison}" for comparison in wrong)
                text = f"a rewritten graph differs from the program as written:\n{lines}\nreproduction: {folder}"
                raise VerificationError(text)
        return compiled(*args)

    return run


def _compare_graph(
    captured: fx.GraphModule, compiled: Callable, args: Sequence[Any]
) -> tuple[tuple[Comparison, ...], torch.dtype | None]:
    names = [node.name for node in captured.graph.find_nodes(op="placeholder")]
    wanted = {name: arg for name, arg in zip(names, args, strict=True) if _is_floating(arg) and arg.requires_grad}
    with as_it_is(args):
        written = results_of(captured(*args), (), {}, wanted)
    with as_it_is(args):
        rewritten = results_of(compiled(*args), (), {}, wanted)
    rounding = rounding_of(tree_leaves([node.meta.get("example_value") for node in captured.graph.nodes]))
    for dtype in wider(args):
        wide = [widened(arg, dtype) for arg in args]
        try:
            with as_it_is([]):
                leaves = {name: wide[names.index(name)] for name in wanted}
                return compare(written, rewritten, results_of(captured(*wide), (), {}, leaves), rounding), dtype
        except Exception:  # as in ``verify``; what differs is seen without a precise run, too
            continue
    return compare(written, rewritten, None, rounding), None


def _write_reproduction(
    captured: fx.GraphModule, args: Sequence[Any], comparisons: Sequence[Comparison], dtype: torch.dtype | None
) -> str:
    """A new folder with the graph, the code that it came from, its inputs unless they are large, and the versions."""
    folder = Path(tempfile.mkdtemp(prefix="moeblaze-verify-"))
    lines = [f"torch {torch.__version__}, Python {sys.version}", f"settings {config.snapshot()}", f"against {dtype}"]
    (folder / "report.txt").write_text("\n".join([*lines, *map(str, comparisons)]) + "\n")
    (folder / "graph.py").write_text(captured.print_readable(print_output=False))
    stacks = dict.fromkeys(node.meta.get("stack_trace") or "" for node in captured.graph.nodes)
    (folder / "code.txt").write_text("\n".join(stacks))
    if sum(arg.numel() * arg.element_size() for arg in args if isinstance(arg, Tensor)) <= _SMALL:
        torch.save([arg.detach() if isinstance(arg, Tensor) else arg for arg in args], folder / "inputs.pt")
    return str(folder)


def compare(
    written: dict[str, Tensor | None],
    rewritten: dict[str, Tensor | None],
    precise: dict[str, Tensor | None] | None,
    rounding: float,
    tolerance: float | None = None,
) -> tuple[Comparison, ...]:
    """Each result of two runs, and how far they are from a third; ``rounding`` is that of the coarsest dtype in them."""
    return tuple(
        _comparison(name, written[name], rewritten[name], precise[name] if precise else None, rounding, tolerance)
        for name in written
    )


def _comparison(
    name: str,
    written: Tensor | None,
    rewritten: Tensor | None,
    precise: Tensor | None,
    rounding: float,
    tolerance: float | None,
) -> Comparison:
    present = [result for result in (written, rewritten) if result is not None]
    if not present:
        return Comparison(name, 0, None, 0.0, 0.0, "no gradient")
    note = ""
    if len(present) == 1:
        note = "None as written" if written is None else "None where it was rewritten"
        written, rewritten = (torch.zeros_like(present[0]) if result is None else result for result in (written, rewritten))
    num_bytes = rewritten.numel() * rewritten.element_size()
    if precise is None:
        distance = _relative(rewritten, written)
        return Comparison(name, num_bytes, None, distance, 32 * rounding if tolerance is None else tolerance, note)
    as_written = _relative(written, precise)
    allowed = _FACTOR * (as_written + rounding) if tolerance is None else tolerance
    return Comparison(name, num_bytes, as_written, _relative(rewritten, precise), allowed, note)


def _relative(result: Tensor, expected: Tensor) -> float:
    """The norm of the difference, over that of what is expected; two results with the same NaNs and infinities are alike."""
    result, expected = result.double(), expected.double()
    same = (result == expected) | (result.isnan() & expected.isnan())
    difference = torch.where(same, 0, result - expected).norm()
    return float(difference / expected.norm()) if float(expected.norm()) > 0 else float(difference)


def results_of(
    output: Any, inputs: Sequence[Any], keywords: dict[str, Any], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """The floating outputs of a run and the gradients of their random weighting, each by a name."""
    outputs = [leaf for leaf in tree_leaves(output) if _is_floating(leaf)]
    leaves = [leaf for leaf in tree_leaves((inputs, keywords)) if _is_floating(leaf) and leaf.requires_grad]
    named = {f"input {i}": leaf for i, leaf in enumerate(leaves)} | dict(parameters)
    labels = [f"output {i}" for i in range(len(outputs))] if len(outputs) > 1 else ["output"]
    results: dict[str, Tensor | None] = {label: output.detach() for label, output in zip(labels, outputs, strict=False)}
    differentiable = [output for output in outputs if output.requires_grad]
    if not named or not differentiable:
        return results
    weightings = [_weighting(output, i) for i, output in enumerate(differentiable)]
    gradients = torch.autograd.grad(differentiable, list(named.values()), weightings, allow_unused=True)
    return results | {f"gradient of {name}": gradient for name, gradient in zip(named, gradients, strict=True)}


def _weighting(output: Tensor, seed: int) -> Tensor:
    """The same numbers in every run, whatever the dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(output.shape, generator=generator).to(device=output.device, dtype=output.dtype)


def wider(values: Sequence[Any]) -> Iterator[torch.dtype]:
    """The dtypes that are more precise than some of the tensors and that there is memory for, the most precise first."""
    held = [value for value in values if _is_floating(value)]
    for dtype in (torch.float64, torch.float32):
        # The tensors and their gradients in this dtype, and as much again for what is kept for backward.
        needed = sum(3 * tensor.numel() * dtype.itemsize for tensor in held)
        if any(tensor.dtype.itemsize < dtype.itemsize for tensor in held) and needed <= _free_bytes(held):
            yield dtype


def rounding_of(values: Sequence[Any]) -> float:
    """That of the coarsest dtype among tensors, or of autocast where that is on."""
    dtypes = {value.dtype for value in values if _is_floating(value)}
    dtypes |= {torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def widened(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.detach().to(dtype, copy=True).requires_grad_(leaf.requires_grad) if _is_floating(leaf) else leaf


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _free_bytes(tensors: Sequence[Tensor]) -> int:
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
