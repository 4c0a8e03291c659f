"""Parameters that get a gradient of zeros where the program as written leaves None: of experts without tokens, and no others.

``if idx.numel() == 0: continue`` keeps an idle expert out of the graph of autograd, so its parameters get no gradient:

    y = self.experts[e](x[idx])        # parameters of one expert each: None as written, zeros in the fused operators
    y = x[idx] @ self.w_up[e]          # one parameter of all experts: a gradient of zeros for e, either way
"""

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from moeblaze_ops.lowering.graph.fake_values import needs_gradient
from moeblaze_ops.lowering.graph.functional_view import written_nodes
from moeblaze_ops.lowering.obligations.check import all_nodes
from moeblaze_ops.lowering.torch_internals.callers import module_path_of

_PARAMETERS = ("w_up", "b_up", "w_down", "b_down")


@dataclass(frozen=True)
class IdleExperts:
    """The graph's inputs that hold the parameters of one expert each, of a layer in a module."""

    module_path: str
    inputs: tuple[str, ...]


def guarded_inputs(gm: fx.GraphModule, work: Collection[fx.Node]) -> dict[fx.Node, None]:
    """The inputs of ``gm`` that only ``work`` reads, which runs for experts with tokens only."""
    inputs = (node for node in all_nodes(gm) if node.op in ("placeholder", "get_attr"))
    return {node: None for node in inputs if node.users and all(user in work for user in node.users)}


def gains_gradient(before: fx.Node | int, after: fx.Node | int) -> bool:
    """True if a gradient flows through a tensor that a branch leaves, and through none that the program has without it.

        bonus = torch.zeros(D)
        if mask.any():
            bonus = bonus + scale * x.sum(0)
    """
    return isinstance(before, fx.Node) and isinstance(after, fx.Node) and needs_gradient(after) and not needs_gradient(before)


def gives_gradient(write: fx.Node, target: fx.Node) -> bool:
    """True if a tensor that no gradient flows through is written to with one: ``bonus += scale`` of zeros."""
    made_of = target.all_input_nodes or [target]
    return any(map(needs_gradient, (write, *write.all_input_nodes))) and not any(map(needs_gradient, made_of))


def gradient_beside_layers(starts: Collection[fx.Node]) -> fx.Node | None:
    """The first of ``starts`` through which a gradient flows to an output of the rewritten graph past all fused operators.

    Experts without tokens get zeros, as is documented; what a program has beside them is to have what it has as written.
    """
    for start in starts:
        stack = [start, *written_nodes(start)] if not start._erased else []
        seen = set(stack)
        while stack:
            for user in stack.pop().users:
                if user.op == "output":
                    return start
                if _is_fused(user.target):
                    continue
                for reached in (user, *written_nodes(user)):
                    if reached not in seen and (reached is not user or needs_gradient(user)):
                        seen.add(reached)
                        stack.append(reached)
    return None


def idle_experts(gm: fx.GraphModule, guarded: Collection[fx.Node]) -> list[IdleExperts]:
    """The layers of a rewritten graph whose operators read experts apart, from inputs that were ``guarded``."""
    layers: dict[str, dict[str, None]] = {}
    for node in all_nodes(gm):
        if getattr(node.target, "namespace", None) != "moeblaze":
            continue
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            for tensor in value if argument.name in _PARAMETERS and len(value) > 1 else ():
                if (source := _source(tensor)) in guarded:
                    layers.setdefault(module_path_of(node), {})[source.name] = None
    return [IdleExperts(path, tuple(inputs)) for path, inputs in layers.items()]


def _source(node: fx.Node) -> fx.Node:
    """The input that ``node`` is a view of, or made of alone."""
    while node.op not in ("placeholder", "get_attr") and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def _is_fused(target: object) -> bool:
    """True if a node is a layer that was put in: an operator, or a function where its experts are on several ranks."""
    return getattr(target, "namespace", None) == "moeblaze" or getattr(target, "__module__", "").startswith("moeblaze_ops.")
