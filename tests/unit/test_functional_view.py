"""What nodes of a mutating graph hold, and when, and what they depend on."""

import torch
from torch import fx

import moeblaze_ops.lowering.forms.indexing
import moeblaze_ops.lowering.forms.products  # noqa: F401
from moeblaze_ops.lowering.evaluate.evaluator import Evaluator
from moeblaze_ops.lowering.forms.views import TABLE
from moeblaze_ops.lowering.graph.dependencies import dependencies, own_dependencies
from moeblaze_ops.lowering.graph.functional_view import GraphView
from moeblaze_ops.lowering.match.matcher import reached

END = 10**9


def _capture(fn, *args) -> tuple[GraphView, dict[str, fx.Node]]:
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    (graph,) = graphs
    return GraphView(graph, TABLE), {node.name: node for node in graph.nodes}


def test_equal_computations_are_one_value():
    def fn(x):
        return x.view(2, 6).reshape(12) + 1, x.flatten() + 1

    view, nodes = _capture(fn, torch.randn(3, 4))
    first, second = nodes["output"].args[0]
    assert view.value(first) is view.value(second)


def test_write_reaches_aliases_and_no_others():
    def fn(x):
        out = torch.zeros_like(x)
        flat, row, other = out.view(-1), out[0], torch.zeros_like(x)
        out.add_(x)
        return out, flat, row, other

    view, nodes = _capture(fn, torch.randn(3, 4))
    out, flat, row, other = nodes["output"].args[0]
    before = view.position[nodes["add_"]] - 1
    written = view.value_at(out, END)
    assert written.op == "pointwise" and view.value_at(out, before).op == "full"
    assert view.value_at(flat, END).op == "reshape" and view.value_at(flat, END).args == (written,)
    assert view.value_at(row, END).op == "opaque"  # part of the buffer: nothing is claimed about it
    assert view.value_at(other, END) is view.value_at(other, before)


def test_write_to_an_input_may_reach_every_input():
    def fn(x, y):
        before = x * 2
        y.add_(1)
        return before, x * 2

    view, nodes = _capture(fn, torch.randn(3), torch.randn(3))
    before, after = nodes["output"].args[0]
    assert view.value(before) is not view.value(after)


def test_in_place_activation_is_a_write():
    def fn(x):
        h = x + 1
        return torch.nn.functional.relu(h, inplace=True), h

    view, nodes = _capture(fn, torch.randn(3))
    relu, h = nodes["output"].args[0]
    assert view.value_at(h, END) is view.value_at(relu, END) is not view.value(h)


def test_numbers_without_gradient_are_other_numbers():
    def fn(x):
        with torch.no_grad():
            detached = x * 2
        return detached, x * 2

    view, nodes = _capture(fn, torch.randn(3, requires_grad=True))
    detached, attached = nodes["output"].args[0]
    assert view.value(detached) is not view.value(attached)


def test_write_in_a_checkpointed_body_reaches_its_arguments():
    def body(buffer, x):
        return buffer.add_(x) * 2

    def fn(x):
        buffer = torch.zeros_like(x)
        y = torch.utils.checkpoint.checkpoint(body, buffer, x, use_reentrant=False)
        return buffer, y

    view, nodes = _capture(fn, torch.randn(3))
    buffer = nodes["output"].args[0][0]
    assert view.value_at(buffer, END) is not view.value(buffer)


def test_write_in_a_list_or_by_an_operator_without_overload_reaches_all():
    def fn(x, y):
        a, b, c = x * 2, x * 3, x * 4
        torch._foreach_add_([a, b], 1.0)
        torch.ops.aten.max.default(c)
        torch.ops.aten.add_(c, y)
        return a, b, c

    view, nodes = _capture(fn, torch.randn(3), torch.randn(3))
    assert all(view.value_at(node, END) is not view.value(node) for node in nodes["output"].args[0])


def test_number_in_a_subscript_of_tensors_selects_first():
    def fn(x, index):
        return x[0, :, index]

    view, nodes = _capture(fn, torch.randn(2, 3, 4), torch.tensor([2, 1]))
    (taken,) = nodes["output"].args[0]
    x, indices, first = view.value(taken).args
    assert (x.op, len(indices), first) == ("select", 2, 1)


def test_modes_end_on_their_own():
    def fn(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.set_grad_enabled(False)
        doubled = x * 2
        torch.set_grad_enabled(True)
        return doubled, x * 2

    view, nodes = _capture(fn, torch.randn(3, requires_grad=True))
    detached, attached = nodes["output"].args[0]
    assert view.is_without_gradient(detached) and not view.is_without_gradient(attached)


def test_no_inference_mode_is_gradients():
    def fn(x):
        with torch.no_grad():
            with torch.inference_mode(False):
                attached = x * 2
            return attached, x * 2

    view, nodes = _capture(fn, torch.randn(3, requires_grad=True))
    attached, detached = nodes["output"].args[0]
    assert view.is_gradient_off(detached) and not view.is_gradient_off(attached)


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

    view, nodes = _capture(function, torch.rand(3))
    assert _names(dependencies(view, nodes["b"])) == ["b", "a"]
    assert _names(dependencies(view, nodes["c"])) == ["c", "add_", "a"]


def test_writes_by_another_alias():
    def function(x):
        a = x.clone()
        a.view(-1)[0] = 1
        return a.exp()

    view, nodes = _capture(function, torch.rand(3, 2))
    assert _names(dependencies(view, nodes["exp"])) == ["exp", "setitem", "view", "a"]


def _layer(x):
    h = x.exp() + 1
    operand = h.sin()
    return (operand.cos() * h).log() + torch.arange(3)


def test_what_operands_depend_on_is_not_own():
    view, nodes = _capture(_layer, torch.rand(3))
    (root,) = nodes["output"].args[0]
    own = own_dependencies(view, [root], {nodes["operand"]}, without=view.inputs)
    assert {node.name for node in own} == {root.name, "log", "mul", "cos", "arange"}  # and h is no own one


def test_a_walk_ends_where_nothing_own_is_left(monkeypatch):
    def function(x):
        for _ in range(50):
            x = x.exp()
        y = x.sin()
        return y.cos().log()

    view, nodes = _capture(function, torch.rand(3))
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

    view, nodes = _capture(function, torch.rand(3))
    bits = reached(view, [nodes["a"], nodes["b"]])
    both, second = nodes["output"].args[0]
    assert (bits[both], bits[second], bits[nodes["a"]]) == (0b11, 0b10, 0b01)


def test_sums_over_parts_of_what_was_stacked():
    """All rows of two parts are those of each; of fewer, no number of parts has as many."""
    view, nodes = _capture(_sums_of_stacked, torch.randn(3), torch.randn(3))
    evaluator = Evaluator()
    whole, cut, first, both = (evaluator.element(view.value(node), ()) for node in nodes["output"].args[0])
    assert whole is both
    assert cut not in (whole, first)


def _sums_of_stacked(a, b):
    rows = torch.stack((a, b)).reshape(-1)
    return rows.sum(), rows[:5].sum(), a.sum(), a.sum() + b.sum()
