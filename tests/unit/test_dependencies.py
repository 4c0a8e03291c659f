"""What nodes depend on, in graphs that write to tensors."""

import torch
from torch import fx

from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.dependencies import dependencies, own_dependencies, reached
from moeblaze_ops.lowering.graph.functional_view import GraphView


def _captured(function, *args) -> tuple[GraphView, dict[str, fx.Node]]:
    graphs = []
    torch._dynamo.reset()
    torch.compile(function, backend=lambda gm, inputs: graphs.append(gm.graph) or gm.forward, fullgraph=True)(*args)
    return GraphView(graphs[0], TABLE), {node.name: node for node in graphs[0].nodes}


def _names(nodes) -> list[str]:
    return [node.name for node in nodes if node.op != "placeholder"]


def test_writes_before_a_reader_and_none_behind_it():
    def function(x):
        a = x.clone()
        b = a.exp()
        a.add_(1)
        c = a.log()
        a.mul_(2)
        return b, c

    view, nodes = _captured(function, torch.rand(3))
    assert _names(dependencies(view, nodes["b"])) == ["b", "a"]
    assert _names(dependencies(view, nodes["c"])) == ["c", "add_", "a"]


def test_writes_by_another_alias():
    def function(x):
        a = x.clone()
        a.view(-1)[0] = 1
        return a.exp()

    view, nodes = _captured(function, torch.rand(3, 2))
    assert _names(dependencies(view, nodes["exp"])) == ["exp", "setitem", "view", "a"]


def _layer(x):
    h = x.exp() + 1
    operand = h.sin()
    return (operand.cos() * h).log() + torch.arange(3)


def test_what_operands_depend_on_is_not_own():
    view, nodes = _captured(_layer, torch.rand(3))
    (root,) = nodes["output"].args[0]
    own = own_dependencies(view, [root], {nodes["operand"]}, without=view.inputs)
    assert {node.name for node in own} == {root.name, "log", "mul", "cos", "arange"}  # and h is no own one


def test_a_walk_ends_where_nothing_own_is_left(monkeypatch):
    def function(x):
        for _ in range(50):
            x = x.exp()
        y = x.sin()
        return y.cos().log()

    view, nodes = _captured(function, torch.rand(3))
    (root,) = nodes["output"].args[0]
    looked_at = []

    class Reads(dict):
        def __getitem__(self, node):
            looked_at.append(node)
            return super().__getitem__(node)

    monkeypatch.setattr(view, "reads", Reads(view.reads))
    assert len(own_dependencies(view, [root], {nodes["y"]}, without=view.inputs)) == 2
    assert len(looked_at) < 5


def test_targets_that_each_node_depends_on():
    def function(x):
        a, b = x.exp(), x.sin()
        return a + b, b.cos()

    view, nodes = _captured(function, torch.rand(3))
    bits = reached(view, [nodes["a"], nodes["b"]])
    both, second = nodes["output"].args[0]
    assert (bits[both], bits[second], bits[nodes["a"]]) == (0b11, 0b10, 0b01)
