"""Methods of Dynamo's variables, replaced where Dynamo finds them: in their class and, from torch 2.14 on, in a table of it."""

from collections.abc import Callable


def replace_method(cls: type, name: str, replacement: Callable) -> None:
    """Let Dynamo call ``replacement`` in place of the method ``name`` of a class.

        x.item()        `TensorVariable.method_item`, or what `TensorVariable.tp_methods["item"]` holds
    """
    original = getattr(cls, name)
    setattr(cls, name, replacement)
    for entry in getattr(cls, "tp_methods", {}).values():
        if entry.handler is original:
            entry.handler = replacement
