"""Tests that show nothing of the rewriter that others of the same run do not: a plugin of pytest.

    python -m pytest -p tests.corpus.branches tests/rewrite/layers tests/rewrite/routing -q

It notes for each test how each condition, comparison and return in ``lowering/`` came out, and names the tests without an outcome
of their own, the slowest first. Such a test may still be worth its time: an outcome says nothing of numbers. It is a reason to
look for the test that says the same. What a cache keeps is seen by the first test alone.
"""

import ast
import builtins
import importlib.machinery
import time
from collections import Counter
from pathlib import Path

import pytest

LOWERING = Path(__file__).resolve().parents[2] / "lowering"
_seen: set[tuple] = set()
_tests: dict[str, tuple[float, frozenset]] = {}


def _note(place: tuple, value):
    """``value``, of which it is remembered whether it is None, true, false or something else."""
    _seen.add((*place, value if value is None or value is True or value is False else ""))
    return value


def _note_condition(place: tuple, value):
    _seen.add((*place, bool(value)))
    return value


class _Noting(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self.file = file

    def _call(self, function, node: ast.expr) -> ast.Call:
        place = ast.Constant((self.file, node.lineno, node.col_offset))
        return ast.copy_location(ast.Call(ast.Name(function.__name__, ast.Load()), [place, node], []), node)

    def _condition(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.BoolOp):
            node.values = [self._condition(value) for value in node.values]
            return node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            node.operand = self._condition(node.operand)
            return node
        return self._call(_note_condition, node)

    def visit_If(self, node):
        self.generic_visit(node)
        node.test = self._condition(node.test)
        return node

    visit_While = visit_IfExp = visit_If

    def visit_comprehension(self, node):
        self.generic_visit(node)
        node.ifs = [self._condition(test) for test in node.ifs]
        return node

    def visit_Compare(self, node):
        return self._call(_note, self.generic_visit(node))

    def visit_Return(self, node):
        self.generic_visit(node)
        if node.value is not None:
            node.value = self._call(_note, node.value)
        return node


def _get_code(loader, name: str, original=importlib.machinery.SourceFileLoader.get_code):
    if not Path(loader.path).is_relative_to(LOWERING) or Path(loader.path).name == "canary.py":  # Dynamo traces its program
        return original(loader, name)
    tree = _Noting(str(Path(loader.path).relative_to(LOWERING))).visit(ast.parse(Path(loader.path).read_text()))
    return compile(ast.fix_missing_locations(tree), loader.path, "exec", dont_inherit=True)


for _function in (_note, _note_condition):
    setattr(builtins, _function.__name__, _function)
importlib.machinery.SourceFileLoader.get_code = _get_code


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    _seen.clear()
    start = time.process_time()
    result = yield
    _tests[item.nodeid] = time.process_time() - start, frozenset(_seen)
    return result


def pytest_terminal_summary(terminalreporter):
    counts = Counter(outcome for _, outcomes in _tests.values() for outcome in outcomes)
    for test, (seconds, outcomes) in sorted(_tests.items(), key=lambda entry: -entry[1][0]):
        if all(counts[outcome] > 1 for outcome in outcomes):
            counts.subtract(outcomes)
            terminalreporter.write_line(f"{seconds:5.1f} s, no outcome of its own: {test}")
