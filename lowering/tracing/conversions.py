"""Conversions that change nothing: what they give is the tensor itself, as Python says.

    self.router = self.router.to(torch.float32)     of a module whose parameters are in fp32 does p.data = p.to(torch.float32)

Dynamo takes it for another tensor, which is written to the parameter; that of torch 2.11 breaks the graph there.
"""

from typing import Any

import torch
from torch import fx
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import CallFunctionNoArgsSource
from torch._dynamo.variables import ConstantVariable, TensorVariable

from moeblaze_ops.lowering.graph.functional_view import target_name
from moeblaze_ops.lowering.obligations.check import all_nodes
from moeblaze_ops.lowering.tracing.host_numbers import fake_value


def is_itself(x: TensorVariable, name: str, found: Any) -> bool:
    """True if ``x.to(...)``, or another conversion, has given ``x``."""
    return name in ("to", "float", "double", "half", "bfloat16") and fake_value(found) is fake_value(x)


def overwrites(called: Any) -> ConstantVariable | None:
    """Whether conversions give modules new parameters, on the condition that it stays so."""
    if called.value is not torch.__future__.get_overwrite_module_params_on_conversion:
        return None
    install_guard(CallFunctionNoArgsSource(called.source).make_guard(GuardBuilder.EQUALS_MATCH))
    return ConstantVariable.create(called.value())


def drop_writes_of_itself(gm: fx.GraphModule) -> None:
    """Take ``p.data = p`` out of a graph, with what makes up for its count of writes, which Dynamo up to 2.13 has behind it."""
    for node in all_nodes(gm):
        makes_up = [getattr(user.target, "__name__", "") == "_lower_version_count_by_1" for user in node.users]
        name = target_name(node)
        if name in ("set_", "shallow_copy_data_") and node.args[:1] == node.args[1:] and all(makes_up or [name != "set_"]):
            for part in [*node.users, node]:
                part.graph.erase_node(part)
