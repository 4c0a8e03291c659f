"""The switch: ``torch.compile`` rewrites MoE layers to the fused ops, by ``enable()`` or by ``backend="moeblaze"``.

Both run one pass on the graph that Dynamo captured, before autograd. Importing this module registers the backend and a
hook around the compilation of a frame; neither does anything until it is asked for, and ``import moeblaze_ops`` alone
imports nothing of ``torch.compile``.

Loops over experts that select tokens with ``torch.where(mask)`` break Dynamo's graph by default, and with it the whole
frame. So a frame is first traced with such ops allowed in the graph. Unless rewriting removes every one of them, and
whenever anything goes wrong, what that gave is dropped and the frame is compiled as it would have been.
"""

import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from moeblaze_ops import config
from moeblaze_ops.lowering import inductor_api

log = logging.getLogger(__name__)

NAME = "moeblaze"
_STAMP = "torch.ops.moeblaze"
_SOURCES = ("moeblaze_ops", "moeblaze_ops/kernels", "moeblaze_ops/lowering", "kernels", "lowering")

_enabled = False
_undecided: ContextVar[bool] = ContextVar("moeblaze_undecided", default=False)
"""Whether the frame being compiled was traced with ops in the graph that only a rewrite can justify."""


@dataclass(frozen=True)
class GraphRecord:
    """What became of one graph: the report of the rewrite, and why the frame was compiled without it, if it was."""

    report: Any
    dropped: str | None = None


_records: deque[GraphRecord] = deque(maxlen=64)


class DynamicShapesLeft(RuntimeError):
    """A graph still holds ops whose output shape depends on data after rewriting."""


def enable() -> None:
    """Rewrite MoE layers in everything that ``torch.compile`` compiles with Inductor from now on, in every thread.

    What is already compiled stays as it is. Needs ``torch._inductor.config.pattern_matcher``; a user's own
    ``pre_grad_custom_pass``, ``mode`` and ``options`` keep their meaning.
    """
    global _enabled
    _enabled = True
    _follow_switch()


def disable() -> None:
    """Undo ``enable``: plain ``torch.compile`` leaves MoE layers alone again."""
    global _enabled
    _enabled = False
    _follow_switch()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """A context in which ``torch.compile`` rewrites; a model compiles at its first call, which has to be inside."""
    before = _enabled
    enable()
    try:
        yield
    finally:
        if not before:
            disable()


def moeblaze_backend(
    gm: fx.GraphModule, example_inputs: list, *, mode: str | None = None, options: dict | None = None, **keywords
) -> Callable:
    """Inductor with rewriting, whether or not ``enable()`` was called: ``torch.compile(model, backend="moeblaze")``.

    Args:
        gm, example_inputs: the captured graph.
        mode, options: as for Inductor.

    Raises:
        ValueError: a setting keeps the rewriting pass from running.
    """
    backend = inductor_api.inductor_backend(mode, options, **keywords)
    _install_pass()
    backend.config = _with_pass(backend.config)
    if reason := inductor_api.why_passes_do_not_run(NAME, backend.config):
        raise ValueError(f"backend moeblaze: settings must let pre-grad passes run, got: {reason}")
    return backend(gm, example_inputs)


def on_trace() -> None:
    """Called by the ops' fake implementations while a compiler traces them.

    That is before any cache is looked up and before anything is lowered, and explicit calls of the ops need both
    without ``enable()``: a cache key that changes with the sources of the ops, and the lowerings.
    """
    inductor_api.stamp_cache_key(_STAMP, cache_key())
    if inductor_api.inductor_is_loaded():
        _register_lowerings()


def cache_key() -> str:
    """A digest of all that decides what is compiled: our sources, the versions of torch and Triton, the knobs."""
    return hashlib.sha256(f"{_sources_digest()} {config.snapshot()}".encode()).hexdigest()


def recent_records() -> list[GraphRecord]:
    """Records of the graphs that went through rewriting most recently, oldest first."""
    return list(_records)


@contextlib.contextmanager
def recording() -> Iterator[list[GraphRecord]]:
    """A context that collects the records of the graphs compiled inside."""
    global _records
    kept, _records = _records, deque()
    collected: list[GraphRecord] = []
    try:
        yield collected
    finally:
        collected.extend(_records)
        _records = kept


@cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for folder in _SOURCES:
        for file in sorted((root / folder).glob("*.py")):
            digest.update(f"{folder}/{file.name}\0".encode())
            digest.update(file.read_bytes())
    digest.update(torch.__version__.encode())
    digest.update(_triton_version().encode())
    return digest.hexdigest()


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


@cache
def _install_pass() -> None:
    inductor_api.register_pre_grad_pass(NAME, _rewrite)


@cache
def _register_lowerings() -> None:
    from moeblaze_ops.lowering.inductor import register_lowerings

    register_lowerings()


def _option() -> dict[str, str]:
    return {"version": cache_key()}


def _with_pass(patches: dict[str, Any]) -> dict[str, Any]:
    """Inductor configuration patches with our pass among the ones they ask for."""
    key = inductor_api.FUSION_OPTIONS
    options = patches.get(key, getattr(inductor_api.inductor_config, key))
    return {**patches, key: {**options, NAME: _option()}}


def _follow_switch() -> None:
    """Bring the calling thread's configuration in line with the switch."""
    if _enabled:
        _install_pass()
        inductor_api.stamp_cache_key(_STAMP, cache_key())
    inductor_api.set_fusion_option(NAME, _option() if _enabled else None)


def _compile_frame(compile_frame: Callable[[], Any], backend: Callable, export: bool) -> Any:
    """Compile a frame: first with data-dependent shapes in the graph where rewriting may remove them."""
    _follow_switch()
    if not export and not inductor_api.capture_of_dynamic_shapes() and _rewrites(backend):
        token = _undecided.set(True)
        first_record = len(_records)
        try:
            with inductor_api.capturing_dynamic_shapes():
                return compile_frame()
        except Exception as error:
            log.debug("compiling without data-dependent shapes in the graph: %s", error)
            _drop_records(first_record, str(error))
        finally:
            _undecided.reset(token)
    return compile_frame()


def _rewrites(backend: Callable) -> bool:
    """Whether graphs of this backend go through our pass."""
    if inductor_api.compiler_of(backend) is moeblaze_backend:
        return True
    patches = inductor_api.inductor_patches(backend) if _enabled else None
    return patches is not None and inductor_api.why_passes_do_not_run(NAME, patches) is None


def _rewrite(gm: fx.GraphModule) -> int:
    """The pass: rewrite ``gm`` in place and return how many layers were rewritten."""
    from moeblaze_ops.lowering.rewrite import rewrite_graph

    _register_lowerings()
    report = rewrite_graph(gm)
    _records.append(GraphRecord(report))
    if _undecided.get() and (left := _data_dependent_nodes(gm.graph)):
        raise DynamicShapesLeft(f"{', '.join(left)} would stay in the graph")
    return len(report.rewritten)
