"""What other libraries are told of us without a call of the user's.

``experts_implementation="moeblaze"`` and ``ep_implementation="moeblaze"`` of transformers, and an operator of torchtitan's.
Each is registered as soon as the library has the module in question: now where it was imported before, and when it is imported
otherwise. Nothing here imports one.
"""

import importlib.util
import logging
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

_REGISTRIES = {
    "transformers.integrations.moe": ("moeblaze_ops.integrations.transformers", "experts_implementation"),
    "transformers.distributed.expert_parallel": ("moeblaze_ops.integrations.expert_parallel", "ep_implementation"),
    "torchtitan.ops.scatter_add": ("moeblaze_ops.compile.torchtitan", "deterministic_scatter_add"),
}
"""The module of a library, the one of ours that registers there, and the argument or the operator that is registered."""


def register_when_imported() -> None:
    """Add "moeblaze" to transformers' registries, now or when they are imported."""
    for registry in _REGISTRIES:
        if registry in sys.modules:
            _register(registry)
        else:
            sys.meta_path.insert(0, _Finder(registry))


class _Finder(MetaPathFinder):
    """Finds a registry by the finders that are there, and registers when the module has run."""

    def __init__(self, registry: str) -> None:
        self._registry = registry

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._registry:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register(fullname)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register(registry: str) -> None:
    ours, argument = _REGISTRIES[registry]
    try:
        import_module(ours)  # which registers, at its end where it is what imports the registry
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # a version that we do not know must not fail to import
        log.warning("%s is not registered: %s", argument, error)
