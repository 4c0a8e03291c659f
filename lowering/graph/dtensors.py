"""Calls of DTensor's methods in a graph that Dynamo captured."""

from typing import Any

from torch import fx


def dtensor_call(node: fx.Node) -> tuple[str, dict[str, Any]] | None:
    """Which of ``redistribute`` and ``to_local`` of a DTensor a node calls, and its keywords; None for another node.

    torch 2.11 puts a function in the graph that closes over the arguments.
    """
    source = node.args[0] if len(node.args) == 1 else None
    if not isinstance(source, fx.Node) or not hasattr(source.meta.get("example_value"), "placements"):
        return None
    methods = ("redistribute", "to_local")
    if node.op == "call_method":
        return (node.target, dict(node.kwargs)) if node.target in methods else None
    function: Any = node.target
    cells = getattr(function, "__closure__", None) if node.op == "call_function" else None
    if not cells:
        return None
    closed = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    if closed.keys() != {"args_as_value", "kwargs_as_value"} or closed["args_as_value"]:
        return None
    name = next((name for name in methods if f".method_{name}." in function.__qualname__), None)
    return None if name is None else (name, dict(closed["kwargs_as_value"]))
