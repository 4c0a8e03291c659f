"""Numbers that are never negative, and let no gradient through where they are zero: products of such with zeros and ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from moeblaze_ops.lowering.forms.table import TABLE
from moeblaze_ops.lowering.graph.functional_view import GraphView

FADING = "probs * mask", "probs * (1 - mask)", "(1 - F.one_hot(ids, 4)) * probs", "probs * flags", "probs * probs * mask"
OTHERS = (
    "probs * (0.5 - mask)", "probs * (mask - 1)", "probs * x", "x * mask", "probs + mask", "mask * mask", "probs * (1 - x)",
    "1 - probs", "probs * (1 - mask * 2)", "probs * ids[:, None]", "probs.half() * mask",
)  # fmt: skip


@pytest.mark.parametrize("line", [*FADING, *OTHERS])
def test_products_of_marks_fade(line):
    names = {"F": F, "torch": torch}
    made = "probs, mask, flags = x.softmax(-1), F.one_hot(ids, 4).float(), ids[:, None] > torch.arange(4)"
    exec(f"def run(x, ids):\n    {made}\n    return {line}", names)
    graphs = []
    torch._dynamo.reset()
    run = torch.compile(names["run"], backend=lambda gm, inputs: graphs.append(gm) or gm.forward)
    run(torch.rand(3, 4), torch.tensor([0, 2, 3]))
    view = GraphView(graphs[0].graph, TABLE)
    (last,) = graphs[0].graph.output_node().args[0]
    assert isinstance(last, fx.Node) and view.value(last).fades == (line in FADING)
