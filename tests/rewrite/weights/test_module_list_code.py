"""The code for CUDA of experts that are apart: their weights are joined only while a kernel reads them, or not at all."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import moeblaze_ops
from moeblaze_ops import compile as moeblaze_compile
from moeblaze_ops.lowering.rewrite.rewrite import rewrite_graph
from tests.corpus.module_lists import Apart, D, H, K, T, stacked_twin, train
from tests.tools import fakecuda


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def training_code(layer, x):
    """What Inductor generates for forward and for backward."""
    sources = []
    lower = fakecuda.shadow_backend(sources)

    def backend(gm, inputs):
        assert [candidate.reason for candidate in rewrite_graph(gm).candidates] == [None]
        return lower(gm, inputs)

    torch._dynamo.reset()
    train(torch.compile(layer, backend=backend, fullgraph=True), x)
    return sources


def returned(code):
    """The buffers of its own that the code returns, with repetitions."""
    (line,) = re.findall(r"^ *return \((.*), \)$", code, flags=re.MULTILINE)
    return re.findall(r"\b(buf\d+|\w*empty\w*)\b", line)


def joined(code):
    """The buffers of joined experts, each under its last name: in torch 2.11 and 2.13 the result of a call has two."""
    names = re.findall(r"(buf\d+) = torch\.ops\.moeblaze_storage\.join", code)
    renamed = {name: later for later, name in re.findall(r"(buf\d+) = (buf\d+)$", code, flags=re.MULTILINE)}
    return [renamed.get(name, name) for name in names]


def test_joined_weights_end_with_the_kernel_that_reads_them():
    apart, x = Apart(bias=True), torch.randn(T, D, requires_grad=True)
    forward, backward = training_code(apart, x)
    twin_forward, twin_backward = training_code(stacked_twin(apart), x)
    assert len(returned(forward)) == len(returned(twin_forward))
    assert len(set(returned(backward))) == len(set(returned(twin_backward)))
    for code in (forward, backward):
        assert len(joined(code)) == (6 if code is forward else 4)
        for name in joined(code):
            assert re.search(rf"del {name}\b", code) and name not in returned(code)
    assert "moeblaze_storage" not in twin_forward + twin_backward


def test_one_projection_at_a_time():
    """The gate and up weights are gone before those of the down projection are joined."""
    forward, _ = training_code(Apart(), torch.randn(T, D))
    gate, up, _ = joined(forward)
    *_, down = re.finditer(r"= torch\.ops\.moeblaze_storage\.join", forward)
    for name in (gate, up):
        (freed,) = re.finditer(rf"del {name}\b", forward)
        assert freed.start() < down.start()


def masked_experts(x, router, gate, up, down):
    weights, ids = (x @ router).softmax(-1).topk(K, dim=-1)
    out = torch.zeros_like(x)
    for e in range(len(gate)):
        y = F.linear(F.silu(F.linear(x, gate[e])) * F.linear(x, up[e]), down[e])
        out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def cuda_inputs(side_by_side):
    def experts(*shape):
        values = torch.randn(8, *shape, device="cuda")
        return list(values.unbind(0)) if side_by_side else [torch.empty_like(value) for value in values]

    with FakeTensorMode(shape_env=ShapeEnv()):
        router = torch.randn(T, D, device="cuda"), torch.randn(D, 8, device="cuda")
        return *router, experts(H, D), experts(H, D), experts(D, H)


@pytest.mark.parametrize("side_by_side", [False, True])
def test_weights_side_by_side_need_no_copy(side_by_side):
    """What is known at compile time decides between kernels on a copy and the ops, which look again at every call."""
    with moeblaze_ops.enabled(), moeblaze_compile.recording() as records:
        code = fakecuda.generated_code(masked_experts, cuda_inputs(side_by_side))
    rewritten = next(record.report.rewritten for record in records if isinstance(record, moeblaze_compile.GraphRecord))
    assert rewritten[0].copied_bytes == (0 if side_by_side else 4 * 8 * 3 * D * H)
    assert ("torch.ops.moeblaze_storage.join" in code) != side_by_side
    assert ("torch.ops.moeblaze.expert_up" in code) == side_by_side
