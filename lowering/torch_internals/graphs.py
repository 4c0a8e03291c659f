"""Graphs on their way from Dynamo to Inductor: the hook before one is looked up, keys of caches, what backward finds."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from moeblaze_ops.lowering import patches


def overload_of(op: Any) -> torch._ops.OpOverload | None:
    """The overload of an operator that has one, also of what ``torch.library.custom_op`` gave; None for anything else."""
    if isinstance(op, torch.library.CustomOpDef):
        op = op._opoverload
    if isinstance(op, torch._ops.OpOverloadPacket) and len(op.overloads()) == 1:
        op = getattr(op, *op.overloads())
    return op if isinstance(op, torch._ops.OpOverload) else None


def install_key_hook(stamp: Callable[[Iterable[torch.device]], str]) -> None:
    """Make ``stamp(devices)`` part of the keys of the FX and AOTAutograd caches of graphs with inputs on these devices.

    AOTAutograd's details of a graph are a subclass of Inductor's, and all of their attributes are in the key. No setting of
    torch would do: one that the user replaces by ``options=``, or that backward is compiled without in a thread of autograd,
    is lost.
    """

    def __init__(original, self, gm, example_inputs, *args, **kwargs):
        original(self, gm, example_inputs, *args, **kwargs)
        self.moeblaze = stamp({tensor.device for tensor in example_inputs if isinstance(tensor, torch.Tensor)})

    patches.install("keys", {"FxGraphHashDetails.__init__": __init__})
    if patches.why_off("keys"):
        # As its environment variable does, in all threads.
        torch.compiler.config._config["force_disable_caches"].env_value_force = True


def keep_graphs_with_functions_of(package: str) -> None:
    """Let AOTAutograd's cache take graphs that call Python functions of a package whose sources are in the keys.

    ``unsafe_marked_cacheable_functions`` is lost like any setting.
    """

    def check_node_safe(original, node):
        is_ours = node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith(f"{package}.")
        if not is_ours:
            original(node)

    patches.install("cacheable", {"autograd_cache.check_node_safe": check_node_safe})


@functools.cache
def install_graph_hook(prepare: Callable[[fx.GraphModule], None]) -> None:
    """Call ``prepare(gm)`` for each graph that reaches Inductor, before it is looked up in a cache, from now on."""

    def compile_fx_main(original, model, *args, **kwargs):
        if isinstance(model, fx.GraphModule):
            prepare(model)
        return original(model, *args, **kwargs)

    patches.install("graphs", {"compile_fx._compile_fx_main": compile_fx_main})


def before_partition(visit: Callable[[fx.Graph, list[fx.Node]], None]) -> None:
    """Show ``visit`` each graph of forward and backward, whatever its backend, before what backward finds is chosen.

    And what forward returns.
    """

    def classify(original: Callable, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        graph = given["joint_module"].graph
        returned = tree_leaves(graph.output_node().args)[: given["num_fwd_outputs"]]
        visit(graph, [node for node in returned if isinstance(node, fx.Node)])
        return original(*args, **kwargs)

    patches.install("repeats", {"partitioners.classify_nodes": classify})


def is_in_order(graph: fx.Graph) -> bool:
    """True if each node stands behind those that it reads; Dynamo of torch 2.11 puts what a tensor hook reads behind the hook."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    return all(places[read] < place for node, place in places.items() for read in node.all_input_nodes)


def made_of(nodes: Iterable[fx.Node], reads: Callable[[fx.Node, fx.Node], bool]) -> Iterator[fx.Node]:
    """The nodes, and what they are made of: what each reads, as far as ``reads(node, source)``, and so on."""
    left = list(nodes)
    seen = set(left)
    while left:
        node = left.pop()
        yield node
        sources = [source for source in node.all_input_nodes if source not in seen and reads(node, source)]
        seen.update(sources)
        left += sources


def may_be_repeated(node: fx.Node) -> bool:
    """True if the partitioner may compute a node of forward again in backward, although it is dear."""
    settings = torch._functorch.config
    return is_marked(node) or settings.activation_memory_budget < 1 or settings.aggressive_recomputation


def is_marked(node: fx.Node) -> bool:
    """True if a node is in a region of checkpointing, or is told to be kept or repeated in another way."""
    return node.meta.get("recompute") is not None


def is_repeated(node: fx.Node) -> bool:
    """True if a node of forward is computed once more in backward: checkpointed code does, but for what its policy saves."""
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def keep_for_backward(node: fx.Node) -> None:
    """Let the partitioner save what backward needs of a node, and never compute it again."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def repeat_in_backward(node: fx.Node) -> None:
    """Let the partitioner compute a node of forward again for backward, and keep nothing of it; a user's own policy stays."""
    if node.meta.get("recompute") is None:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = _LAST_REGION

_LAST_REGION = 1 << 30
"""The partitioner keeps what a region of checkpointing hands to a later one: no region is later than this."""


def saved_tensors_hooks_are_disabled() -> bool:
    """True if ``torch.autograd.graph.disable_saved_tensors_hooks`` is in force."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
