"""The lines of code in DESIGN.md: those that it calls accepted are rewritten, and those that it calls refused are not."""

import importlib.util
import textwrap

import pytest
import torch

from moeblaze_ops import compile as switch
from tests.tools.documents import blocks, replaced_functions
from tests.tools.programs import ROOT
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

DESIGN = ROOT / "DESIGN.md"

if not DESIGN.is_file():
    pytest.skip("runs in a checkout only", allow_module_level=True)

MODULE = """
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, dim=24, hidden=40, num_experts=4):
        super().__init__()
        self.E = num_experts
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.w_up = nn.Parameter(torch.randn(num_experts, hidden, dim) / dim**0.5)
        self.w_down = nn.Parameter(torch.randn(num_experts, dim, hidden) / hidden**0.5)

"""

CODE = [block for block in blocks(DESIGN) if block.language == "python"]
FORWARD, *LINES = CODE


def test_what_is_replaced_is_what_is_said():
    assert replaced_functions() in DESIGN.read_text(), "python tests/tools/documents.py DESIGN.md writes the table"


def test_lines_come_in_pairs():
    assert FORWARD.title == "layer.py"
    assert [block.title for block in LINES] == ["accepted", "refused"] * (len(LINES) // 2)
    assert len(LINES) == 20


@pytest.mark.parametrize("number", range(len(LINES)), ids=[f"{n // 2 + 1}-{block.title}" for n, block in enumerate(LINES)])
def test_lines(number, tmp_path):
    lines = textwrap.indent(LINES[number].content, "    ")
    forward = FORWARD.content.replace("    ...  # the lines\n", lines)
    assert forward != FORWARD.content
    file = tmp_path / "layer.py"
    file.write_text(MODULE + textwrap.indent(forward, "    "))
    spec = importlib.util.spec_from_file_location("layer", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = module.Layer(), torch.randn(31, 24)
    with rewriting_backend() as backend, switch.recording() as records:
        out = torch.compile(model, backend=backend)(x)
    assert len(rewritten_in(records)) == (LINES[number].title == "accepted")
    torch.testing.assert_close(out, model(x))
