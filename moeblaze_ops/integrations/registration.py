"""``experts_implementation="moeblaze"`` without a call of ``register``: it is registered as soon as transformers has a registry.

That is now where transformers was imported before, and when it is imported otherwise. Nothing here imports it.
"""

import importlib.util
import logging
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

_REGISTRY = "transformers.integrations.moe"


def register_when_imported() -> None:
    """Add "moeblaze" to transformers' experts implementations, now or when its registry is imported."""
    if _REGISTRY in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the registry by the finders that are there, and registers when the module has run."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    try:
        from moeblaze_ops.integrations.transformers import register
    except ImportError as error:  # a version of transformers that we do not know must not fail to import
        log.warning("experts_implementation='moeblaze' is not registered: %s", error)
    else:
        register()
