"""With a torch that lacks a function that is replaced, or calls it in another way: that is said, and what can work works."""

import json
import subprocess
import sys

import pytest

from moeblaze_ops.lowering.patches import LOST, PATCHES

# Each line is done by a fork of one process that has imported torch, but not the switch.
PROGRAM = """
import contextlib, functools, inspect, json, logging, os, sys
import torch, torch._dynamo, torch._inductor.compile_fx
from moeblaze_ops.lowering import patches
from moeblaze_ops.lowering.torch_internals.room import call_with_room
from tests.tools.compiling import compile_quickly

compile_quickly()
said = []

class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

patches.log.addHandler(Said())

def functions(name):
    owner, attributes = patches.owner_of(name)
    for attribute in attributes:
        for cls in inspect.getmro(owner) if inspect.isclass(owner) else [owner]:
            if attribute in vars(cls):
                yield cls, attribute, inspect.getattr_static(cls, attribute)
                break

def change(name, how):
    for owner, attribute, _ in functions(name):
        if how == "missing":
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, lambda *arguments: None)

def restore(kept):
    for owner, attribute, function in kept:
        setattr(owner, attribute, function)

def layer_of(spelling):
    from tests.corpus.zoo import catalogue as zoo
    return zoo.stacked(spelling) if spelling in zoo.BY_NAME else zoo.ModuleListMoE(getattr(zoo, spelling), zoo.GluMLP)

def is_rewritten(spelling, with_inductor):
    from moeblaze_ops import compile as switch
    from tests.tools.rewrite_harness import rewriting_backend, rewritten_in
    torch._dynamo.reset()
    layer, x = layer_of(spelling), torch.randn(5, 16)
    context = contextlib.nullcontext("inductor") if with_inductor else rewriting_backend()
    with context as backend, switch.recording() as records, torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend=backend)(x), layer(x))
    return len(rewritten_in(records)) > 0

def try_without(name, how, *spellings, with_inductor=False):
    kept, before = list(functions(name)), {name: list(functions(name)) for name in patches.PATCHES}
    change(name, how)
    gone = not any(hasattr(patches.owner_of(name)[0], attribute) for attribute in patches.owner_of(name)[1])
    import moeblaze_ops
    moeblaze_ops.enable()
    if patches.PATCHES[name].part == "launches":
        from moeblaze_ops.lowering.torch_internals.inductor import launch_nothing_for_no_rows
        launch_nothing_for_no_rows()
    if patches.PATCHES[name].part == "order":
        from moeblaze_ops.lowering.torch_internals.inductor import keep_order_of_talk
        keep_order_of_talk(())
    if patches.PATCHES[name].part == "repeats":
        from moeblaze_ops.lowering.inductor.pinned_routing import pin_before_partition
        pin_before_partition()
    restore(kept)
    replaced = [name for name in before if list(functions(name)) != before[name]]
    rewritten = [spelling for spelling in spellings if is_rewritten(spelling, with_inductor)]
    cached = not torch.compiler.config.force_disable_caches
    print(json.dumps({"gone": gone, "cached": cached, "said": said, "replaced": replaced, "rewritten": rewritten}), flush=True)

for line in sys.stdin:
    if not os.fork():
        arguments, keywords = json.loads(line)
        call_with_room(functools.partial(try_without, *arguments, **keywords))
        os._exit(0)
    assert os.wait()[1] == 0
"""

NEED_NO_ATTEMPT = ["masked_sum", "gathered_bmm", "sorted_transformers"]


@pytest.fixture(scope="module")
def try_without():
    program = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(*arguments: str, **keywords: bool) -> dict:
        print(json.dumps([arguments, keywords]), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())

    yield run
    process.stdin.close()
    assert process.wait() == 0


def assert_off(found: dict, name: str, what: str) -> None:
    """Nothing of the function's part is replaced, and one warning says so."""
    (warning,) = found["said"]
    part = PATCHES[name].part
    assert f"{name} {what}" in warning and warning.endswith(LOST[part])
    assert not {other for other in PATCHES if PATCHES[other].part == part} & set(found["replaced"])


@pytest.mark.parametrize("name", PATCHES)
def test_a_function_is_missing(try_without, name):
    """Another one may have its place: that of a base class, or none from some version on."""
    found = try_without(name, "missing", *NEED_NO_ATTEMPT)
    assert found["rewritten"] == NEED_NO_ATTEMPT
    assert found["cached"] is (PATCHES[name].part != "keys")
    if found["gone"]:
        assert_off(found, name, "is missing")


@pytest.mark.parametrize("name", ["convert_frame.compile_frame", "side_effects.SideEffects.mutation"])
def test_a_function_is_called_in_another_way(try_without, name):
    name = f"torch._dynamo.{name}"
    found = try_without(name, "called otherwise", *NEED_NO_ATTEMPT)
    assert found["rewritten"] == NEED_NO_ATTEMPT
    assert_off(found, name, "takes (*arguments)")


@pytest.mark.parametrize("name", ["torch._dynamo.convert_frame.compile_frame", "torch._inductor.compile_fx._compile_fx_main"])
def test_one_of_two_ways_is_enough(try_without, name):
    """With Inductor itself: graphs are rewritten where a frame is compiled, and else where they reach it."""
    assert try_without(name, "called otherwise", "masked_sum", with_inductor=True)["rewritten"] == ["masked_sum"]


def test_all_spellings_that_need_no_attempt(try_without):
    """Half of every third of the zoo; and the others give what they give in eager mode."""
    from tests.corpus.zoo import catalogue as zoo

    loops = ["loop_mistral", "loop_nonzero"]
    spellings = [*loops, *[*zoo.BY_NAME, *(spelling.__name__ for spelling in zoo.SEPARATE)][::3]]
    name = "torch._dynamo.side_effects.SideEffects.mutation"
    found = try_without(name, "missing", *spellings)
    assert len(found["rewritten"]) >= len(spellings) / 2
    assert not set(found["rewritten"]) & set(loops)
