"""The rewritten graph itself: which operators with which operands, what its nodes say of themselves, and what is logged."""

import logging

import torch
from expecttest import assert_expected_inline
from torch import fx
from torch._dynamo.utils import counters

from moeblaze_ops.lowering.rewrite.rewrite import rewrite_graph
from tests.corpus.zoo import catalogue as zoo
from tests.corpus.zoo.catalogue import stacked
from tests.tools.rewrite_harness import rewrite_of


def test_second_rewrite_finds_nothing(fp64):
    backend = rewrite_of(zoo.ModuleListMoE(zoo.loop_mixtral, zoo.GluMLP), torch.randn(10, zoo.D))
    (gm,) = backend.modules
    before = str(gm.graph)
    assert rewrite_graph(gm).candidates == [] and str(gm.graph) == before


def test_inserted_nodes_carry_meta(fp64):
    (gm,) = rewrite_of(stacked("dense_bmm"), torch.randn(10, zoo.D)).modules
    inserted = [n for n in gm.graph.nodes if "moeblaze" in str(n.target)]
    assert len(inserted) == 3
    for node in inserted:
        assert "batched.py" in node.meta["stack_trace"] and "example_value" in node.meta
    assert inserted[-1].meta["example_value"].shape == (10, zoo.D)


def test_outcomes_are_counted_and_logged(fp64, caplog):
    counters["moeblaze"].clear()
    with caplog.at_level(logging.DEBUG, logger="moeblaze_ops"):
        rewrite_of(zoo.ModuleListMoE(zoo.masked_sum), torch.randn(10, zoo.D))
    assert counters["moeblaze"] == {"rewritten": 1}
    assert "expert_up(relu) -> expert_down" in caplog.text


def _text(spelling: str) -> str:
    """Operators of a rewritten spelling and their operands; ids and weights are inputs of the graph."""
    layer, (function, *_) = stacked(spelling), zoo.BY_NAME[spelling]
    weights, ids = torch.rand(10, zoo.K), torch.randint(0, zoo.E, (10, zoo.K))
    (gm,) = rewrite_of(lambda x, weights, ids: function(layer, x, weights, ids), torch.randn(10, zoo.D), weights, ids).modules
    lines = []
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            arguments = fx.node.map_arg(node.args, lambda n: n.name.replace("l_layer_parameters_", "").rstrip("_"))
            lines.append(f"{node.name} = {target}{arguments}")
    return "\n".join(lines)


def test_graph_of_a_packed_loop():
    assert_expected_inline(_text("packed_loop"), """\
x = reshape('l_x', -1, 16)
weights = reshape('l_weights', -1, 2)
ids = reshape('l_ids', -1, 2)
reshape_4 = reshape('gate_up', (4, 16, 2, 24))
permute = permute('reshape_4', (0, 2, 3, 1))
dispatch_default = dispatch.default('ids', 4)
getitem_36 = getitem('dispatch_default', 0)
getitem_37 = getitem('dispatch_default', 1)
getitem_38 = getitem('dispatch_default', 2)
getitem_39 = getitem('dispatch_default', 3)
expert_up_default = expert_up.default('x', ['permute'], [], None, 'getitem_36', 'getitem_37', 'getitem_38', 'getitem_39', 'swiglu')
getitem_40 = getitem('expert_up_default', 0)
getitem_41 = getitem('expert_up_default', 1)
expert_down_default = expert_down.default('getitem_40', 'getitem_41', ['down'], [], 'weights', 'getitem_36', 'getitem_37', 'getitem_38', 'getitem_39', 'swiglu')
reshape_3 = reshape('expert_down_default', (10, 16))""")  # noqa: E501


def test_graph_of_gathered_linear_weights():
    assert_expected_inline(_text("gathered_einsum"), """\
x = reshape('l_x', -1, 16)
weights = reshape('l_weights', -1, 2)
ids = reshape('l_ids', -1, 2)
arange = arange(4,)
getitem_3 = getitem('arange', 'ids')
reshape_3 = reshape('w1', (4, 1, 24, 16))
reshape_4 = reshape('w3', (4, 1, 24, 16))
permute = permute('w2', (0, 2, 1))
dispatch_default = dispatch.default('getitem_3', 4)
getitem_4 = getitem('dispatch_default', 0)
getitem_5 = getitem('dispatch_default', 1)
getitem_6 = getitem('dispatch_default', 2)
getitem_7 = getitem('dispatch_default', 3)
expert_up_default = expert_up.default('x', ['reshape_3', 'reshape_4'], [], None, 'getitem_4', 'getitem_5', 'getitem_6', 'getitem_7', 'swiglu')
getitem_8 = getitem('expert_up_default', 0)
getitem_9 = getitem('expert_up_default', 1)
expert_down_default = expert_down.default('getitem_8', 'getitem_9', ['permute'], [], 'weights', 'getitem_4', 'getitem_5', 'getitem_6', 'getitem_7', 'swiglu')
view = view('expert_down_default', (10, 16))""")  # noqa: E501
