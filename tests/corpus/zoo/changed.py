"""Functions with pieces of their text replaced: what a near miss changes stands there alone."""

import inspect
import linecache
from collections.abc import Callable


def changed(function: Callable, *changes: tuple[str, str], name: str = "") -> Callable:
    """``function`` with the new text of each change in place of the old one, which stands there once; ``name`` is its own."""
    source, name = inspect.getsource(function), name or function.__name__
    for old, new in changes:
        assert source.count(old) == 1, f"{name}: {source.count(old)} times {old!r}"
        source = source.replace(old, new)
    file = f"<{name}, a twin of {function.__module__}.{function.__name__}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # errors and `explain` show its lines
    names: dict = {}
    exec(compile(source, file, "exec"), function.__globals__, names)
    made = names[function.__name__]
    made.__name__ = name
    return made


def all_changed(table: dict[str, tuple]) -> dict[str, Callable]:
    """The functions of a table of names, each with the function that is changed, and its changes."""
    return {name: changed(function, *changes, name=name) for name, (function, *changes) in table.items()}
