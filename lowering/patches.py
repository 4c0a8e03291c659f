"""What of torch.compile is replaced: each function by its dotted name, why, and by which arguments it is known.

A part of them is replaced as a whole or not at all. Where torch lacks a function, or calls it in another way, the part stays off,
and a warning says what is lost. The table in DESIGN.md is made of what stands here.
"""

import functools
import importlib
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)

LOST = {
    "attempts": "layers that select tokens by where(mask), skip experts without tokens or count on the host stay as they are "
    "written; all others are rewritten",
    "cacheable": "graphs with sharded experts are differentiated anew in each process; Inductor's own cache is used",
    "cuts": "layers that cut the tokens of an expert by `rows[:C]` stay as they are in torch 2.11; all others are rewritten",
    "frames": "explain and config.verify do nothing; layers that select tokens by where(mask), skip experts without tokens or "
    "count on the host stay as they are written; all others are rewritten",
    "graphs": "layers in graphs of a backend of one's own, or exported ones, stay as they are; all others are rewritten",
    "keys": "compiled code is not kept in caches, as by TORCHINDUCTOR_FORCE_DISABLE_CACHES=1",
    "launches": "a rank that sends no token to any expert may raise",
    "order": "ranks with different numbers of tokens may wait for each other",
    "kept": "layers that select tokens by where(mask) take longer to compile",
    "repeats": "where compiled code repeats activations in backward, a router with noise may choose other experts there, and "
    "ranks with different numbers of tokens may wait for each other",
}
"""What does not work without the functions of a part."""


@dataclass(frozen=True)
class Patch:
    """Why a function is replaced, the names of its parameters (where ``...`` stands, any), and as a member of which part."""

    why: str
    takes: str
    part: str = "attempts"
    in_subclasses: bool = False  # and in each subclass that has one of its own


_JUMPS = "jumps on data are seen where Dynamo traces them, and what an instruction takes"
_MOVED = "an iterator that the work of a branch moves on gives the attempt up"
_WRITES = "a write to a list or a dictionary inside a branch that is traced on trust gives the attempt up"
_CALLS = "calls give numbers and lists of experts, on the host; what asks them anything else gives the attempt up"
_IDENTITY = "questions which tensor one is, or how it was made, behind a branch on data give the attempt up"
_NUMBERS = "an attempt notes that it asked for a number of an element, which is a difference to the next one"
_SIZES = "an attempt notes that it asked for a size that only the data tell: if none does, Dynamo would end as it did"

# Where a function has had several names, torch must have one of them; what it has is replaced.
PATCHES = {
    "torch._dynamo.convert_frame.compile_frame": Patch(
        "a frame is first traced with data-dependent sizes in its graph and without branches on data, and again as it is written "
        "if that is not justified; in between without branches and numbers, if these made a difference. No public hook knows a "
        "frame before it is traced",
        "code, globals, locals, builtins, closure, compiler_fn, one_graph, restart_reasons, export, ...",
        "frames",
    ),
    "torch._inductor.compile_fx._compile_fx_main": Patch(
        "graphs that come to Inductor from a backend of the user's, or exported, are rewritten before they are looked up; "
        "`enable()` replaces it",
        "model_, example_inputs_, ...",
        "graphs",
    ),
    "torch._inductor.codecache.FxGraphHashDetails.__init__": Patch(
        "a digest of our sources and of what is asked of a GPU is in the keys of the FX and AOTAutograd caches",
        "self, gm, example_inputs, ...",
        "keys",
    ),
    "torch._functorch._aot_autograd.autograd_cache.check_node_safe": Patch(
        "AOTAutograd keeps graphs with our functions in its cache: the digest of our sources is in the key", "node", "cacheable"
    ),
    "torch._inductor.runtime.triton_heuristics.Grid2DWithYZOverflow.generate": Patch(
        "a kernel over two axes is launched for 0 rows of a number that follows from data", "self, meta, ...", "launches"
    ),
    "torch._inductor.graph.GraphLowering._update_scheduler": Patch(
        "ranks talk in the order of the graph", "self", "order"
    ),
    "torch._functorch.partitioners.classify_nodes": Patch(
        "routing, and what comes back from other ranks, is kept for backward and not repeated",
        "joint_module, static_lifetime_input_indices, num_fwd_outputs",
        "repeats",
    ),
    "torch._subclasses.fake_impls._compute_slice_index": Patch(
        "in attempts, `rows[:C]` are as many as the smaller of two numbers, which torch 2.11 does not know where data tell one",
        "size, index",
        "cuts",
    ),
    "torch._subclasses.fake_tensor._CacheKeyState.convert_sym_int": Patch(
        "attempts keep no results for sizes that only the data tell, of which each expert has its own: torch makes them twice",
        "self, result, arg",
        "kept",
    ),
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase.step": Patch(_JUMPS, "self"),
    "torch._dynamo.variables.base.VariableTracker.__init__": Patch(
        "it is known what is older than a branch: lists, objects, iterators, generators", "self, ..."
    ),
    "torch._dynamo.variables.iter.IteratorVariable.next_variable|tp_iternext_impl": Patch(
        _MOVED, "self, tx", in_subclasses=True
    ),
    "torch._dynamo.side_effects.SideEffects.mutation": Patch(_WRITES, "self, var"),
    "torch._dynamo.variables.builtin.BuiltinVariable.call_function": Patch(_CALLS, "self, tx, args, kwargs"),
    "torch._dynamo.symbolic_convert.InstructionTranslatorBase.call_function": Patch(_CALLS, "self, fn, args, kwargs"),
    "torch._dynamo.variables.tensor.TensorVariable.call_method": Patch(_CALLS, "self, tx, name, args, kwargs"),
    "torch._dynamo.variables.tensor.TensorVariable.get_python_hash|hash_impl": Patch(_IDENTITY, "self, ..."),
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.allow_scalar_outputs": Patch(_NUMBERS, "self"),
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.allow_dynamic_output_shape_ops": Patch(_SIZES, "self"),
}

Replacement = Callable[..., Any]
"""What is called in the place of a function: with the function, and then its arguments."""


def short(name: str) -> str:
    """The last two parts of a dotted name."""
    return ".".join(name.split(".")[-2:])


def install(part: str, replacements: Mapping[str, Replacement]) -> None:
    """Replace all functions of a part, which are given by their short names, or none of them: then it is off."""
    of_part = {name: patch for name, patch in PATCHES.items() if patch.part == part}
    assert replacements.keys() == set(map(short, of_part)), replacements.keys() ^ set(map(short, of_part))
    undo: list[Callable[[], None]] = []
    try:
        found = {name: list(_functions(name, patch)) for name, patch in of_part.items()}
        for name, functions in found.items():
            for owner, attribute, function in functions:
                _replace(owner, attribute, _in_place_of(function, replacements[short(name)]), undo)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        for step in reversed(undo):
            step()
        leave_off(part, str(error))


def _in_place_of(original: Callable, replacement: Replacement) -> Callable:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return function


def leave_off(part: str, why: str) -> None:
    """Do without a part from now on, and say once what is lost."""
    if part not in _off:
        _off[part] = f"torch {torch.__version__} is not as it is known: {why}"
        log.warning("moeblaze: %s", why_off(part))


def why_off(part: str) -> str | None:
    """What of this torch keeps a part from working, and what is lost by that; None where it works."""
    return f"{_off[part]}: {LOST[part]}" if part in _off else None


_off: dict[str, str] = {}


def _functions(name: str, patch: Patch) -> Iterator[tuple[Any, str, Callable]]:
    """Where a function is kept, under which attribute, and the function; raises where it is not as it is known."""
    owner, attributes = owner_of(name)
    there = [attribute for attribute in attributes if hasattr(owner, attribute)]
    if not there:
        raise AttributeError(f"{name} is missing")
    known = patch.takes.split(", ")
    for attribute, cls in itertools.product(there, _subclasses(owner) if patch.in_subclasses else [owner]):
        kept = inspect.getattr_static(cls, attribute)
        function = kept.fget if isinstance(kept, property) else getattr(cls, attribute)
        parameters = inspect.signature(function).parameters.values()
        takes = [str(parameter).partition(":")[0].partition("=")[0].strip() for parameter in parameters]
        if takes != known and (known[-1] != "..." or takes[: len(known) - 1] != known[:-1]):
            raise AttributeError(f"{name} takes ({', '.join(takes)}) in {cls.__name__}, not ({patch.takes})")
        if attribute in vars(cls) or not patch.in_subclasses:
            yield cls, attribute, function


def owner_of(name: str) -> tuple[Any, list[str]]:
    """The module or the class that a dotted name leads to, and what its last part may be."""
    *path, attributes = name.split(".")
    modules = next(end for end in range(len(path), 0, -1) if path[end - 1].islower())
    owner: Any = importlib.import_module(".".join(path[:modules]))
    for part in path[modules:]:
        owner = getattr(owner, part)
    return owner, attributes.split("|")


def _subclasses(cls: type) -> Iterator[type]:
    inner: type
    yield cls
    for inner in cls.__subclasses__():
        yield from _subclasses(inner)


def _replace(owner: Any, attribute: str, replacement: Callable, undo: list[Callable[[], None]]) -> None:
    """Put a function where torch finds it, in a module or in a class."""
    kept, is_own = inspect.getattr_static(owner, attribute), attribute in vars(owner)
    setattr(owner, attribute, property(replacement) if isinstance(kept, property) else replacement)
    undo.append(functools.partial(setattr, owner, attribute, kept) if is_own else functools.partial(delattr, owner, attribute))
