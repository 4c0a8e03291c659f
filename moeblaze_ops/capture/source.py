"""The syntax tree behind a code object, and a code object for a changed tree."""

import ast
import copy
import inspect
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType


class NoSource(Exception):
    """There is no tree that gives this code."""


def tree_of(code: CodeType) -> ast.FunctionDef:
    """A copy of the function definition that stands where ``code`` is from, with its line numbers.

    Raises:
        NoSource: the file cannot be read, or has no such definition.
    """
    return copy.deepcopy(_parsed(code)[1])


def compile_changed(function: ast.FunctionDef, code: CodeType) -> CodeType:
    """``function``, a changed tree of ``code``, compiled where ``code`` was: with its file, its closure, its class.

    Raises:
        NoSource: as it is, the file gives other code than ``code``, so it has changed or something has transformed it.
    """
    module, original = _parsed(code)
    if not _same(_compiled(module, code), code):
        raise NoSource("the file gives other code")
    body = original.body
    try:
        original.body = function.body
        return _compiled(module, code)
    finally:
        original.body = body


def same_frame(a: CodeType, b: CodeType) -> bool:
    """Whether two code objects take the same arguments and share the same cells."""
    parts = "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags", "co_freevars", "co_cellvars"
    starred = bool(a.co_flags & inspect.CO_VARARGS) + bool(a.co_flags & inspect.CO_VARKEYWORDS)
    arguments = a.co_argcount + a.co_kwonlyargcount + starred
    return _equal(a, b, parts) and a.co_varnames[:arguments] == b.co_varnames[:arguments]


def _parsed(code: CodeType) -> tuple[ast.Module, ast.FunctionDef]:
    """The tree of the file that ``code`` is from, and the definition in it."""
    module, definitions = _file("".join(linecache.getlines(code.co_filename)))
    found = definitions.get((code.co_name, code.co_firstlineno), [])
    if len(found) != 1:
        raise NoSource(f"{len(found)} definitions of {code.co_name} at line {code.co_firstlineno}")
    return module, found[0]


@lru_cache(maxsize=64)
def _file(source: str) -> tuple[ast.Module, dict[tuple[str, int], list[ast.FunctionDef]]]:
    """A file's tree, and its functions by name and first line."""
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        raise NoSource(str(error)) from error
    definitions: dict[tuple[str, int], list[ast.FunctionDef]] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            definitions.setdefault((node.name, first), []).append(node)
    return module, definitions


def _compiled(module: ast.Module, code: CodeType) -> CodeType:
    compiled = compile(module, code.co_filename, "exec", dont_inherit=True)
    place = code.co_name, code.co_firstlineno
    return next(inner for inner in _inner(compiled) if (inner.co_name, inner.co_firstlineno) == place)


def _inner(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inner(constant)


def _same(a: CodeType, b: CodeType) -> bool:
    parts = "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_argcount", "co_name"
    return (
        _equal(a, b, parts)
        and [line for *_, line in a.co_lines()] == [line for *_, line in b.co_lines()]
        and len(a.co_consts) == len(b.co_consts)
        and all(map(_same_constant, a.co_consts, b.co_consts))
    )


def _same_constant(a: object, b: object) -> bool:
    if isinstance(a, CodeType) and isinstance(b, CodeType):
        return _same(a, b)
    return type(a) is type(b) and repr(a) == repr(b)


def _equal(a: CodeType, b: CodeType, parts: tuple[str, ...]) -> bool:
    return all(getattr(a, part) == getattr(b, part) for part in parts)
