"""Trees of code objects, and code of changed trees."""

import ast
import linecache

import pytest
import torch
import torch.nn.functional as F

from moeblaze_ops.capture.functions import captured
from moeblaze_ops.capture.source import NoSource, compile_changed, same_frame, tree_of
from tests.corpus.loops import guarded


def test_unchanged_trees_give_the_same_code():
    for function in (*guarded.GUARDED, *guarded.NEAR_MISSES):
        code = function.__code__
        assert compile_changed(tree_of(code), code).co_code == code.co_code


def test_closures_classes_and_decorators():
    offset = 3

    def decorated(function):
        return function

    class Private:
        __hidden = 1

        @decorated
        def method(self, x, *rest, scale=1, **options):
            return self.__hidden * x + offset * scale

        def with_super(self):
            return super().__repr__()

    for method in (Private.method, Private.with_super):
        tree = tree_of(method.__code__)
        changed = compile_changed(tree, method.__code__)
        assert same_frame(changed, method.__code__)
        assert changed.co_names == method.__code__.co_names and changed.co_freevars == method.__code__.co_freevars


def test_lines_stay():
    code = guarded.if_any.__code__
    tree = tree_of(code)
    loop = next(node for node in tree.body if isinstance(node, ast.For))
    branch = loop.body[1]
    loop.body[1:2] = branch.body
    changed = compile_changed(tree, code)
    before, after = ({line for *_, line in c.co_lines() if line} for c in (code, changed))
    assert after == before - {branch.lineno}


def test_code_without_a_file():
    scope = {"torch": torch, "F": F}
    exec("def layer(self, x):\n    for e in x:\n        if e.any():\n            x[e] += 1\n    return x\n", scope)
    code = scope["layer"].__code__
    with pytest.raises(NoSource):
        tree_of(code)
    assert captured(code, scope).code is None


def test_file_that_has_changed(monkeypatch):
    code = guarded.if_any.__code__
    assert captured(code, vars(guarded)).code is not None
    lines = linecache.getlines(code.co_filename)
    changed = [line.replace("out = torch.zeros_like(x)", "out = torch.ones_like(x)") for line in lines]
    monkeypatch.setattr(linecache, "getlines", lambda filename, module_globals=None: changed)
    with pytest.raises(NoSource, match="the file gives other code"):
        compile_changed(tree_of(code), code)
    result = captured(code, vars(guarded))
    assert result.code is None and "the file gives other code" in result.left[0]


@pytest.mark.parametrize("name", ["torch", "range"])
def test_names_that_are_not_what_they_seem(name):
    """What `torch.where` means is looked up, not read off the name."""
    function = guarded.if_any if name == "torch" else guarded.hit_rows
    assert captured(function.__code__, {**vars(guarded), name: object()}).code is None


def test_a_mask_that_is_one_hot_by_name_only_is_checked():
    code = guarded.hit_rows.__code__
    known = captured(code, vars(guarded)).code
    unknown = captured(code, {**vars(guarded), "F": object()}).code
    assert ["masked_numbers" in str(c.co_consts + c.co_names) for c in (known, unknown)] == [False, True]


@pytest.mark.parametrize("function", guarded.NEAR_MISSES, ids=lambda f: f.__name__)
def test_syntax_alone_refuses_near_misses(function):
    result = captured(function.__code__, vars(guarded))
    assert result.code is None
