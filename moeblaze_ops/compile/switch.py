"""The switch: ``torch.compile`` rewrites MoE layers to the fused ops, by ``enable()`` or by ``backend="moeblaze"``.

Both run one pass on the graph that Dynamo captured, before autograd. Importing this module registers the backend and a
hook around the compilation of a frame; neither does anything until it is asked for, and ``import moeblaze_ops`` alone
imports nothing of ``torch.compile``.

A frame is first compiled in ways that only rewriting justifies (``attempts``), and as it is written where they fail.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import fx

from moeblaze_ops import config, sources
from moeblaze_ops.compile.attempts import compiled_by_attempts, rewrite
from moeblaze_ops.compile.records import FrameRecord, are_kept_apart, keep
from moeblaze_ops.lowering import torch_internals
from moeblaze_ops.lowering.tracing.watch import install

NAME = "moeblaze"
_STAMP = "torch.ops.moeblaze"

_enabled = False


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
    gm: fx.GraphModule, example_inputs: list, *, mode: str | None = None, options: dict | None = None, **keywords: Any
) -> Callable:
    """Inductor with rewriting, whether or not ``enable()`` was called: ``torch.compile(model, backend="moeblaze")``.

    Args:
        gm, example_inputs: the captured graph.
        mode, options: as for Inductor.

    Raises:
        ValueError: a setting keeps the rewriting pass from running.
    """
    backend: Any = torch_internals.inductor_backend(mode, options, **keywords)
    _install_pass()
    backend.config = _with_pass(backend.config)
    if reason := torch_internals.why_passes_do_not_run(NAME, backend.config):
        raise ValueError(f"backend moeblaze: settings must let pre-grad passes run, got: {reason}")
    return backend(gm, example_inputs)


def on_trace() -> None:
    """What has to happen before a compiler caches or lowers an op; the ops' fake implementations call it.

    They run while Dynamo traces, which is before any cache is looked up, and again while AOTAutograd traces, which is
    before anything is lowered. So explicit calls of the ops need no ``enable()`` for a cache key that changes with our
    sources, nor for the lowerings.
    """
    torch_internals.stamp_cache_key(_STAMP, cache_key())
    if torch_internals.inductor_is_loaded():
        install_lowerings()


def cache_key() -> str:
    """A digest of all that decides what is compiled: our sources, the versions of torch and Triton, the knobs."""
    versions = f"{torch.__version__} {_triton_version()}"
    return hashlib.sha256(f"{sources.DIGEST} {versions} {config.snapshot()}".encode()).hexdigest()


@contextlib.contextmanager
def rewriting(backend: Callable) -> Iterator[None]:
    """A context in which frames are compiled for ``backend`` as for one that rewrites: it calls ``rewrite`` on its graphs."""
    _rewriting_backends.append(backend)
    try:
        yield
    finally:
        _rewriting_backends.remove(backend)


def why_switch_has_no_effect() -> str | None:
    """The setting of torch.compile that keeps ``enable()`` from rewriting anything, or None."""
    _install_pass()
    return torch_internals.why_passes_do_not_run(NAME, _with_pass({}))


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


@cache
def _install_pass() -> None:
    torch_internals.register_pre_grad_pass(NAME, lambda gm: len(rewrite(gm).rewritten))


@cache
def install_lowerings() -> None:
    """Give Inductor the lowerings of the ops, once."""
    from moeblaze_ops.lowering.inductor.lower_ops import register_lowerings

    register_lowerings()


def _option() -> dict[str, str]:
    return {"version": cache_key()}


def _with_pass(patches: dict[str, Any]) -> dict[str, Any]:
    """Inductor configuration patches with our pass among the ones they ask for."""
    key = torch_internals.FUSION_OPTIONS
    options = patches.get(key, getattr(torch_internals.inductor_config, key))
    return {**patches, key: {**options, NAME: _option()}}


def _verifying(backend: Callable, asked_for: Callable) -> Callable:
    """``backend``, or with ``config.verify`` one whose rewritten graphs are compared with what they were in their first run."""
    if config.verify == "off" or are_kept_apart() or not _rewrites(asked_for):
        return backend

    def compile_graph(gm: fx.GraphModule, example_inputs: list) -> Callable:
        from moeblaze_ops.comparison import verified_at_first
        from moeblaze_ops.lowering.obligations.branches import always_taken

        captured, before = always_taken(gm), torch_internals.counters["moeblaze"]["rewritten"]
        compiled = backend(gm, example_inputs)
        return compiled if torch_internals.counters["moeblaze"]["rewritten"] == before else verified_at_first(captured, compiled)

    return compile_graph


def _follow_switch() -> None:
    """Bring the calling thread's configuration in line with the switch."""
    if _enabled:
        _install_pass()
        torch_internals.stamp_cache_key(_STAMP, cache_key())
    torch_internals.set_fusion_option(NAME, _option() if _enabled else None)


def _compile_frame(compile_frame: Callable[[CodeType], Any], frame: torch_internals.Frame) -> Any:
    """Compile a frame: first with what rewriting may remove from its graph, if that is asked for."""
    _follow_switch()
    compiled, failure = compiled_by_attempts(compile_frame, frame) if _may_capture(frame) else (None, None)
    if compiled is not None:
        return compiled
    try:
        return compile_frame(frame.code)
    except Exception as error:
        # What stops Dynamo where it may capture more is nearer to the cause than what it never captures.
        cause = failure or error
        without_ops, in_loop = torch_internals.says_no_ops(error), "loop" in str(error).lower()
        keep(FrameRecord(frame.where, str(cause), without_ops, torch_internals.place_of(cause), in_loop))
        raise


def _may_capture(frame: torch_internals.Frame) -> bool:
    return not frame.export and not torch_internals.captures_dynamic_shapes() and _rewrites(frame.backend)


def _rewrites(backend: Callable) -> bool:
    compiler = torch_internals.compiler_of(backend)
    if any(compiler is rewriting for rewriting in _rewriting_backends):
        return True
    patches = torch_internals.inductor_patches(backend) if _enabled else None
    return patches is not None and torch_internals.why_passes_do_not_run(NAME, patches) is None


def _rewrite_before_cut(gm: fx.GraphModule, backend: Callable) -> None:
    if _rewrites(backend):
        rewrite(gm)


_rewriting_backends: list[Callable] = [moeblaze_backend]
install()
torch_internals.install_frame_hook(_compile_frame, _verifying)
torch_internals.install_cut_hook(_rewrite_before_cut)
torch_internals.register_backend(moeblaze_backend, NAME)
