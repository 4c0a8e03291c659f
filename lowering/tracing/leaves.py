"""Zeros that a program makes with a gradient of their own, to which it adds what has one anyway.

    zeros = torch.zeros(T, D, requires_grad=True)           Dynamo makes no such tensor: its gradient would be lost
    out = zeros.index_add(0, token, y)                      out has the gradient of y, and nobody asks for that of the zeros

They are traced without, and `obligations.check` looks at who reads them.
"""

from typing import Any

import torch
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy

from moeblaze_ops.lowering.obligations.markers import LEAF


def handled(tx: Any, function: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> VariableTracker | None:
    """Zeros without the gradient that they are asked for with; None for any other call."""
    asked = kwargs.get("requires_grad")
    if function not in (torch.zeros, torch.zeros_like) or not isinstance(asked, ConstantVariable) or asked.value is not True:
        return None
    others = {name: value for name, value in kwargs.items() if value is not asked}
    proxy = tx.output.create_proxy("call_function", function, *proxy_args_kwargs(args, others))
    proxy.node.meta[LEAF] = torch.is_grad_enabled()
    return wrap_fx_proxy(tx, proxy)
