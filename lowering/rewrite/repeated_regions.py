"""Regions that are compiled once (``torch.compiler.nested_compile_region``): the body that one call was traced for serves all."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import fx


def renamed_by_calls(modules: Sequence[fx.GraphModule], body: fx.GraphModule) -> Iterator[Callable[[str], str]]:
    """For each call of ``body`` with the weights of other modules: the path of a module there, for its path in the body.

    region(blocks[0], x); region(blocks[1], x)      L['self'].blocks.0.moe is L['self'].blocks.1.moe in the second
    """
    own = body.graph.find_nodes(op="placeholder")
    for module in modules:
        for call in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
            region, _, *operands = call.args
            if module.get_submodule(region.target) is body:
                pairs = [(_names(a), _names(b)) for a, b in zip(own, operands, strict=True) if isinstance(b, fx.Node)]
                if any(a != b for a, b in pairs if len(a) == len(b) > 1):
                    yield partial(_renamed, pairs=pairs)


def _names(node: fx.Node) -> list[str]:
    """Those of modules in what Dynamo calls a parameter: ``l_self_modules_blocks_modules_0_parameters_w_``."""
    return re.split(r"_+(?:modules|parameters|buffers)_+", node.name)


def _renamed(path: str, pairs: Sequence[tuple[list[str], list[str]]]) -> str:
    """``path`` in another call, by the first of the operands that is a parameter inside of that module."""
    root, bracket, inside = path.partition("]")
    names = re.findall(r"\w+", inside)
    for a, b in pairs:
        if len(a) == len(b) > len(names) and a[1 : len(names) + 1] == [name.lower() for name in names]:
            changed = zip(names, a[1:], b[1:], strict=False)
            return ".".join([root + bracket, *(name if one == other else other for name, one, other in changed)])
    return path
