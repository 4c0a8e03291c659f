"""Programs of writes to views of one buffer, and reads in between, give the same with its parts held as with none."""

import random

import pytest
import torch
from torch import nn

from moeblaze_ops import compile as moeblaze_compile
from moeblaze_ops.lowering.graph.fake_values import storage_of
from moeblaze_ops.lowering.match.matcher import view_of
from moeblaze_ops.lowering.rewrite.parts import has_parts, hold_parts
from moeblaze_ops.lowering.undoable_edits import Edits
from tests.capture.test_capture import kept, rewriting_backend

VIEWS = [
    lambda out: out, lambda out: out[0], lambda out: out[-1], lambda out: out[:2], lambda out: out[1:], lambda out: out[:, 1],
    lambda out: out[:, :2], lambda out: out[:, 2:], lambda out: out[..., :3], lambda out: out[..., 3:], lambda out: out[::2],
    lambda out: out[1::2], lambda out: out.view(12, 6)[2:7], lambda out: out.view(-1)[5:40], lambda out: out.transpose(0, 1)[1],
    lambda out: out[0].t()[2], lambda out: out[1].unsqueeze(0), lambda out: out[1, 1:3], lambda out: out.view(3, 24)[1],
]  # fmt: skip
ROWS = torch.tensor([0, 2])
SUBSCRIPTS = [0, slice(2), (slice(None), 1), (0, 2), (..., slice(3)), [1], (1, ROWS), (slice(None), ROWS)]


def program(seed):
    draw = random.Random(seed)
    views, start = draw.sample(VIEWS, draw.choice([2, 3, 4])), draw.choice([torch.zeros_like, torch.Tensor.clone])
    steps = [(draw.randrange(7), draw.choice(views), draw.choice(SUBSCRIPTS), n) for n in range(draw.randint(2, 9))]

    def run(x, y):
        out, seen = start(x * 2), []
        for kind, view, subscript, n in steps:
            if kind == 0:
                out[subscript] = y.sum() * n
            elif kind == 1:
                out[subscript] += y.sum() * n
            elif kind == 2:
                seen.append((view(out) * n).sum())
            elif kind == 3:
                view(out).copy_(view(out) * 3)
            elif kind == 4:
                with torch.no_grad():
                    seen.append(view(out).sum())
            else:
                view(out).add_(y.sum() * n)
        return out, view(out) * 1, *seen

    return run


def trained(run, x, y):
    x, y = (tensor.clone().requires_grad_() for tensor in (x, y))
    results = run(x, y)
    total = sum((each * torch.arange(1.0, each.numel() + 1).view(each.shape)).sum() for each in results)
    if total.requires_grad:
        total.backward()
    return results, [each.stride() for each in results], x.grad, y.grad


@pytest.mark.parametrize("seeds", [range(start, start + 10) for start in range(0, 40, 10)], ids=str)
def test_programs(seeds):
    held = []

    def backend(graph_module, example_inputs):
        edits, view = Edits(graph_module.graph), view_of(graph_module.graph)
        before = str(graph_module.graph)
        buffers = {storage_of(target): target for _, target in view.all_writes() if has_parts(view, target)}
        for _ in range(2):
            edits.undo()
            assert str(graph_module.graph) == before
            held.extend(hold_parts(edits, buffers))
        graph_module.recompile()
        return graph_module.forward

    x, y = torch.randn(3, 4, 6, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    for seed in seeds:
        torch._dynamo.reset()
        run = program(seed)
        torch.testing.assert_close(trained(torch.compile(run, backend=backend, fullgraph=True), x, y), trained(run, x, y))
    assert held


@torch._dynamo.config.patch(capture_scalar_outputs=True)
@pytest.mark.parametrize("reduce", [torch.amin, torch.sum])
def test_buffers_of_as_many_rows_as_the_data_tell(reduce):
    """On torch 2.11 a copy between two of them asks for their number of rows."""
    experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)) for _ in range(3))

    def combine(x, scores):
        weights, ids = scores.softmax(-1).topk(2)
        order = ids.flatten().argsort()
        groups = x[order // 2].split(ids.flatten().bincount(minlength=3).tolist())
        rows = torch.cat([expert(group) for expert, group in zip(experts, groups, strict=True)])
        out = torch.empty_like(rows)
        out[order] = rows * weights.flatten()[order, None]
        return reduce(out.view(-1, 2, 4), 1)

    x, scores = torch.randn(5, 4), torch.randn(5, 3)
    with rewriting_backend() as backend, moeblaze_compile.recording() as records:
        torch.testing.assert_close(torch.compile(combine, backend=backend)(x, scores), combine(x, scores))
    assert len(kept(records, moeblaze_compile.GraphRecord)[0].report.rewritten) == (reduce is torch.sum)
