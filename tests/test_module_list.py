"""Experts in an ``nn.ModuleList``: their weights are joined only while a kernel reads them, or not at all once packed."""

import copy
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

import moeblaze_ops
from moeblaze_ops import compile as moeblaze_compile
from moeblaze_ops import cpu, joining, pack_experts
from moeblaze_ops.explain import Candidate
from moeblaze_ops.lowering.rewrite import rewrite_graph
from tests import fakecuda
from tests.layers import make_layer
from tests.rewrite_harness import check_against_eager, rewrite_of

D, H, E, K, T = 16, 24, 4, 2, 40


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Experts(nn.Module):
    """Masked experts that read ``weight(name, e)``."""

    def __init__(self, storage="linear", bias=False):
        super().__init__()
        self.router = nn.Linear(D, E, bias=False)
        self.storage, self.bias = storage, bias
        self.make({"gate": (H, D), "up": (H, D), "down": (D, H)} if storage != "packed" else {"up": (2 * H, D), "down": (D, H)})

    def linear(self, name, e, x):
        weight, bias = self.weight(name, e), self.weight(f"{name}_bias", e) if self.bias else None
        if self.storage == "transposed":
            return x @ weight if bias is None else x @ weight + bias
        return F.linear(x, weight, bias)

    def expert(self, e, x):
        if self.storage == "packed":
            gate, up = self.linear("up", e, x).chunk(2, dim=-1)
        else:
            gate, up = self.linear("gate", e, x), self.linear("up", e, x)
        return self.linear("down", e, F.silu(gate) * up)

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + self.expert(e, x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out

    def make(self, shapes):
        for name, (outputs, inputs) in shapes.items():
            shape = (inputs, outputs) if self.storage == "transposed" else (outputs, inputs)
            self.add(name, torch.randn(E, *shape) / inputs**0.5)
            if self.bias:
                self.add(f"{name}_bias", torch.randn(E, outputs))


class Apart(Experts):
    def add(self, name, values):
        setattr(self, name, nn.ParameterList(nn.Parameter(value.clone()) for value in values))

    def weight(self, name, e):
        return getattr(self, name)[e]


class Stacked(Experts):
    def add(self, name, values):
        setattr(self, name, nn.Parameter(values))

    def weight(self, name, e):
        return getattr(self, name)[e]


def stacked_twin(apart):
    twin = Stacked(apart.storage, apart.bias).to(apart.router.weight.dtype)
    twin.router.load_state_dict(apart.router.state_dict())
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if "router" not in name:
                parameter.copy_(torch.stack(list(getattr(apart, name))))
    return twin


SPELLINGS = [("linear", False), ("linear", True), ("transposed", False), ("transposed", True), ("packed", True)]
spellings = pytest.mark.parametrize(("storage", "bias"), SPELLINGS, ids=lambda value: str(value))


class Graphs:
    """AOTAutograd with the partitioner of Inductor, after the rewrite; keeps the graphs."""

    def __init__(self):
        self.forward = self.backward = None

    def __call__(self, gm, inputs):
        assert [candidate.reason for candidate in rewrite_graph(gm).candidates] == [None]
        return aot_autograd(
            fw_compiler=self._keep("forward"),
            bw_compiler=self._keep("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )(gm, inputs)

    def _keep(self, name):
        def compile_graph(gm, inputs):
            setattr(self, name, gm.graph)
            return make_boxed_func(gm.forward)

        return compile_graph

    def kept(self):
        """Shapes and dtypes of what forward leaves for backward in memory of its own."""
        (outputs,) = (node.args[0] for node in self.forward.nodes if node.op == "output")
        values = [node.meta["val"] for node in outputs[1:] if isinstance(node, torch.fx.Node)]
        given = {_storage(node.meta["val"]) for node in self.forward.nodes if node.op == "placeholder"}
        return sorted((tuple(value.shape), str(value.dtype)) for value in values if _storage(value) not in given)


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def compiled(layer):
    torch._dynamo.reset()
    graphs = Graphs()
    return torch.compile(layer, backend=graphs, fullgraph=True), graphs


def gradients(layer):
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def train(run, x):
    run(x).square().sum().backward()


@spellings
@pytest.mark.parametrize("packed", [False, True])
def test_module_list_matches_eager(storage, bias, packed, fp64):
    layer = Apart(storage, bias)
    assert (pack_experts(layer) > 0) or not packed
    backend = check_against_eager(layer, torch.randn(T, D))
    assert [candidate.became for candidate in backend.rewritten] == ["expert_up(swiglu) -> expert_down"]
    assert "stack" not in backend.operators()


@spellings
def test_kept_bytes_are_those_of_stacked_parameters(storage, bias):
    apart, x = Apart(storage, bias), torch.randn(T, D, requires_grad=True)
    kept = []
    for layer in (apart, stacked_twin(apart)):
        run, graphs = compiled(layer)
        train(run, x)
        kept.append(graphs.kept())
    assert kept[0] == kept[1]
    assert ((T * K, 2, H), "torch.float32") in kept[0]


@spellings
def test_gradients_are_views_of_one_tensor(storage, bias):
    """What backward gives to AccumulateGrad is taken as it is: its layout is that of the parameter."""
    layer = Apart(storage, bias)
    run, _ = compiled(layer)
    train(run, torch.randn(T, D))
    for parameters in (module for module in layer.children() if isinstance(module, nn.ParameterList)):
        given = [parameter.grad for parameter in parameters]
        assert len({grad.untyped_storage().data_ptr() for grad in given}) == 1
        assert [grad.stride() for grad in given] == [parameter.stride() for parameter in parameters]


@pytest.mark.parametrize("keep", ["preactivation", "input"])
def test_both_points_of_the_dial(keep, fp64, monkeypatch):
    monkeypatch.setattr(moeblaze_ops.config, "keep", keep)
    backend = check_against_eager(Apart(bias=True), torch.randn(T, D))
    assert ("expert_mlp" in backend.rewritten[0].became) == (keep == "input")


def test_training_steps(fp64):
    x = torch.randn(T, D)
    layers = [Apart(bias=True)]
    layers.append(copy.deepcopy(layers[0]))
    run, _ = compiled(layers[0])
    for layer, step in ((layers[0], run), (layers[1], layers[1])):
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            train(step, x)
            optimizer.step()
    torch.testing.assert_close(dict(layers[0].named_parameters()), dict(layers[1].named_parameters()))


def backward_ops(graphs):
    return [node.target.__name__ for node in graphs.backward.nodes if node.op == "call_function"]


@pytest.mark.parametrize("packed", [False, True])
def test_frozen_experts(fp64, packed):
    layer, x = Apart(bias=True), torch.randn(T, D, requires_grad=True)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("router" in name)
    if packed:
        pack_experts(layer)
    run, graphs = compiled(layer)
    train(run, x)
    assert not any("weight_grad" in op or "bias_grad" in op for op in backward_ops(graphs))
    check_against_eager(layer, torch.randn(T, D))


def test_partly_frozen_experts(fp64):
    layer = Apart(bias=True)
    frozen = {f"{name}.{e}" for name, e in (("gate", 0), ("up", 1), ("down", 3), ("down_bias", 2))}
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)
    check_against_eager(layer, torch.randn(T, D))
    assert {name for name, grad in gradients(layer).items() if grad is None} == frozen


@pytest.mark.parametrize("names", [("gate", "up", "down"), ("down",)], ids="+".join)
def test_tied_experts(fp64, names):
    layer = Apart()
    for name in names:
        getattr(layer, name)[2] = getattr(layer, name)[0]
    assert check_against_eager(layer, torch.randn(T, D)).reasons == []


def test_all_experts_tied(fp64):
    layer = Apart()
    for name in ("gate", "up", "down"):
        for e in range(1, E):
            getattr(layer, name)[e] = getattr(layer, name)[0]
    assert check_against_eager(layer, torch.randn(T, D)).reasons == []


def test_experts_that_read_a_part_of_their_tensor_are_left_alone(fp64):
    class Part(Apart):
        def weight(self, name, e):
            return super().weight(name, e)[: D if name == "down" else H]

    layer = Part()
    for name in ("gate", "up"):
        getattr(layer, name)[3] = nn.Parameter(torch.randn(2 * H, D))
    assert check_against_eager(layer, torch.randn(T, D)).reasons == ["WEIGHT_LAYOUT"]


def test_autocast_keeps_one_cast_copy_like_stacked_parameters():
    apart, x = Apart(), torch.randn(T, D)
    kept = []
    for layer in (apart, stacked_twin(apart)):

        class Cast(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                with torch.autocast("cpu", torch.bfloat16):
                    return self.inner(x)

        torch._dynamo.reset()
        graphs = Graphs()
        train(torch.compile(Cast(layer), backend=graphs, fullgraph=True), x)
        kept.append([entry for entry in graphs.kept() if entry[0][0] == E])
    assert sorted(torch.Size(shape).numel() for shape, _ in kept[0]) == sorted(torch.Size(s).numel() for s, _ in kept[1])


# The code for CUDA.


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


@pytest.mark.parametrize("bias", [False, True])
def test_joined_weights_end_with_the_kernel_that_reads_them(bias):
    apart, x = Apart(bias=bias), torch.randn(T, D, requires_grad=True)
    forward, backward = training_code(apart, x)
    twin_forward, twin_backward = training_code(stacked_twin(apart), x)
    assert len(returned(forward)) == len(returned(twin_forward))
    assert len(set(returned(backward))) == len(set(returned(twin_backward)))
    for code in (forward, backward):
        joined = re.findall(r"(buf\d+) = torch\.ops\.moeblaze_storage\.join", code)
        lists = 3 + 3 * bias if code is forward else 3 + bias
        assert len(joined) == lists
        for name in joined:
            (alias,) = re.findall(rf"(buf\d+) = {name}$", code, flags=re.MULTILINE)
            assert re.search(rf"del {alias}\b", code) and alias not in returned(code)
    assert "moeblaze_storage" not in twin_forward + twin_backward


def test_one_projection_at_a_time():
    """The gate and up weights are gone before those of the down projection are joined."""
    forward, _ = training_code(Apart(), torch.randn(T, D))
    lines = [line.strip() for line in forward.splitlines()]
    joins = [i for i, line in enumerate(lines) if "= torch.ops.moeblaze_storage.join" in line]
    assert len(joins) == 3
    for i in joins[:2]:
        alias = lines[i + 1].split(" = ")[0]
        (freed,) = (at for at, line in enumerate(lines) if re.match(rf"del {alias}\b", line))
        assert freed < joins[2]


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


# The ops on experts that are apart.


def apart(tensors):
    return [piece for tensor in tensors for piece in tensor.split(1)]


@pytest.mark.parametrize("stored_as", ["packed", "interleaved", "transposed", "split", "split_transposed"])
@pytest.mark.parametrize("mlp", [False, True])
def test_ops_take_experts_apart(stored_as, mlp):
    """Same numbers, and the same gradients, as for whole tensors."""
    layer = make_layer(stored_as=stored_as, bias=True)

    def run(form):
        lists = [form(tensors) for tensors in (layer.w_up, layer.b_up, layer.w_down, layer.b_down)]
        if mlp:
            ops = torch.ops.moeblaze
            return ops.expert_mlp(layer.x_TD, *lists, layer.weights_TK, *layer.routing, layer.activation, False)
        w_up, b_up, w_down, b_down = lists
        h, a = torch.ops.moeblaze.expert_up(layer.x_TD, w_up, b_up, None, *layer.routing, layer.activation)
        return torch.ops.moeblaze.expert_down(h, a, w_down, b_down, layer.weights_TK, *layer.routing, layer.activation)

    expected, actual = run(list), run(apart)
    assert torch.equal(actual, expected)
    grad = torch.randn_like(actual)
    for actual_grad, expected_grad in zip(
        torch.autograd.grad(actual, layer.leaves, grad), torch.autograd.grad(expected, layer.leaves, grad), strict=True
    ):
        assert torch.equal(actual_grad, expected_grad)


@torch.no_grad()
@pytest.mark.parametrize("join", [joining.joined, joining.copied, joining.OneByOne], ids=["joined", "copied", "one_by_one"])
@pytest.mark.parametrize("stored_as", ["packed", "split_transposed"])
def test_every_way_to_join_gives_the_same(join, stored_as):
    layer = make_layer(stored_as=stored_as, bias=True, requires_grad=False)
    up = joining.with_experts_joined(torch.ops.moeblaze.expert_up.default, cpu.expert_up, join)
    down = joining.with_experts_joined(torch.ops.moeblaze.expert_down.default, cpu.expert_down, join)
    h, a = up(layer.x_TD, apart(layer.w_up), apart(layer.b_up), None, *layer.routing, "swiglu")
    out = down(h, a, apart(layer.w_down), apart(layer.b_down), layer.weights_TK, *layer.routing, "swiglu")
    assert torch.equal(out, layer.run())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_of_experts_apart(requires_grad):
    layer = make_layer(stored_as="split_transposed", bias=True, requires_grad=requires_grad)
    ops = torch.ops.moeblaze
    w_up, b_up, w_down, b_down = map(apart, (layer.w_up, layer.b_up, layer.w_down, layer.b_down))
    torch.library.opcheck(ops.expert_up.default, (layer.x_TD, w_up, b_up, None, *layer.routing, "swiglu"))
    h, a = ops.expert_up(layer.x_TD, w_up, b_up, None, *layer.routing, "swiglu")
    h = h.detach().requires_grad_(requires_grad)
    arguments = (h, a.detach(), w_down, b_down, layer.weights_TK, *layer.routing, "swiglu")
    torch.library.opcheck(ops.expert_down.default, arguments)


def test_flops_are_those_of_whole_tensors():
    layer = make_layer(stored_as="split")
    counts = []
    for form in (list, apart):
        with FlopCounterMode(display=False) as counter:
            w_up, w_down = form(layer.w_up), form(layer.w_down)
            h, a = torch.ops.moeblaze.expert_up(layer.x_TD, w_up, [], None, *layer.routing, "swiglu")
            out = torch.ops.moeblaze.expert_down(h, a, w_down, [], layer.weights_TK, *layer.routing, "swiglu")
            out.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_expert_up_rejects_too_few_experts():
    layer = make_layer(stored_as="packed")
    w_up = apart(layer.w_up)[:-1]
    with pytest.raises(ValueError, match="expert_up: w_up must hold 5 or 10 tensors where each is of one expert, got 4"):
        torch.ops.moeblaze.expert_up(layer.x_TD, w_up, [], None, *layer.routing, "swiglu")


def test_expert_up_rejects_experts_of_several_shapes():
    layer = make_layer(stored_as="packed")
    w_up = apart(layer.w_up)
    w_up[2] = w_up[2][..., 1:]
    with pytest.raises(ValueError, match="expert_up: w_up must hold tensors of one shape and device"):
        torch.ops.moeblaze.expert_up(layer.x_TD, w_up, [], None, *layer.routing, "swiglu")


def test_expert_down_rejects_experts_of_several_dtypes():
    layer = make_layer(stored_as="packed")
    w_down = apart(layer.w_down)
    w_down[1] = w_down[1].float()
    h = torch.zeros(layer.routing[0].shape[0], 2, 12, dtype=torch.float64)
    with pytest.raises(TypeError, match="expert_down: w_down must hold tensors of one dtype, torch.float64, got torch.float32"):
        torch.ops.moeblaze.expert_down(h, None, w_down, [], None, *layer.routing, "swiglu")


# Joining.


def pieces_of(block):
    return [piece.unsqueeze(0) for piece in block]


@pytest.mark.parametrize("transposed", [False, True])
def test_joined_in_place(transposed):
    block = torch.randn(5, 4, 8)
    wanted = block.transpose(1, 2) if transposed else block
    whole = joining.joined(pieces_of(wanted))
    assert torch.equal(whole, wanted)
    assert (whole.data_ptr(), whole.stride()) == (block.data_ptr(), wanted.stride())
    assert joining.empty_joined(pieces_of(wanted)).stride() == whole.stride()


NOT_SIDE_BY_SIDE = {
    "reversed": lambda: pieces_of(torch.randn(5, 4, 8).flip(0).clone())[::-1],
    "one_twice": lambda: pieces_of(torch.randn(5, 4, 8)[[0, 1, 1, 2, 3]])[:2] * 2,
    "gaps": lambda: pieces_of(torch.randn(5, 2, 4, 8)[:, 0]),
    "misaligned": lambda: pieces_of(torch.randn(5 * 32 + 1)[1:].view(5, 4, 8)),
    "own_storages": lambda: pieces_of([torch.randn(4, 8) for _ in range(5)]),
    "not_dense": lambda: pieces_of(torch.randn(5, 4, 16)[:, :, ::2]),
    "one_transposed": lambda: [piece.mT if i == 2 else piece for i, piece in enumerate(pieces_of(torch.randn(5, 4, 4)))],
    "all_tied": lambda: pieces_of([torch.randn(4, 8)] * 5),
}


@pytest.mark.parametrize("case", NOT_SIDE_BY_SIDE)
def test_joined_by_a_copy(case):
    pieces = NOT_SIDE_BY_SIDE[case]()
    whole = joining.joined(pieces)
    assert torch.equal(whole, torch.cat(pieces))
    assert whole.untyped_storage().data_ptr() != pieces[0].untyped_storage().data_ptr()
    assert joining.empty_joined(pieces).stride() == whole.stride()


# Packing.


class SwiGLU(nn.Module):
    def __init__(self, hidden=H):
        super().__init__()
        self.gate, self.up = nn.Linear(D, hidden), nn.Linear(D, hidden)
        self.down = nn.Linear(hidden, D)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ModuleListMoE(nn.Module):
    def __init__(self, num_experts=E):
        super().__init__()
        self.router = nn.Linear(D, num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU() for _ in range(num_experts))

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


def is_packed(parameters):
    return joining.are_in_a_row(list(parameters))


def test_packing_moves_memory_and_nothing_else():
    model = ModuleListMoE()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, torch.randn(T, D))
    objects = [(id(p), p.grad) for p in model.parameters()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    moved = pack_experts(model)
    assert moved == 4 * sum(p.numel() for p in model.experts.parameters())
    assert [(id(p), p.grad) for p in model.parameters()] == objects
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {key for key, _ in objects}
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])
    assert is_packed(expert.up.weight for expert in model.experts)
    assert is_packed(expert.down.bias for expert in model.experts)
    assert pack_experts(model) == 0
    model.load_state_dict(values)
    assert pack_experts(model) == 0


@pytest.mark.parametrize("packed", [False, True])
def test_weights_are_never_copied_on_cpu(packed, monkeypatch):
    """Side by side or not: experts are read one by one."""

    def refuse(pieces):
        raise AssertionError("copied")

    monkeypatch.setattr(joining, "_copied", refuse)
    model, x = ModuleListMoE(), torch.randn(T, D, requires_grad=True)
    assert (pack_experts(model) > 0) or not packed
    run, _ = compiled(model)
    train(run, x)


def test_ops_see_whether_weights_are_packed():
    """At every call: a conversion gives each parameter its own memory again."""
    model = ModuleListMoE()

    def joined_in_place(name):
        pieces = [getattr(expert, name).weight.detach().unsqueeze(0) for expert in model.experts]
        return joining.joined(pieces).data_ptr() == pieces[0].data_ptr()

    assert [joined_in_place(name) for name in ("gate", "up", "down")] == [False] * 3
    pack_experts(model)
    assert [joined_in_place(name) for name in ("gate", "up", "down")] == [True] * 3
    model.double()
    assert [joined_in_place(name) for name in ("gate", "up", "down")] == [False] * 3


def test_optimizer_steps_on_packed_parameters(fp64):
    x = torch.randn(T, D)
    packed = ModuleListMoE()
    plain = copy.deepcopy(packed)
    pack_experts(packed)
    run, _ = compiled(packed)
    for layer, step in ((packed, run), (plain, plain)):
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            train(step, x)
            optimizer.step()
    torch.testing.assert_close(dict(packed.named_parameters()), dict(plain.named_parameters()))
    assert pack_experts(packed) == 0


def test_state_dict_of_a_packed_model_survives_saving(tmp_path):
    model = ModuleListMoE()
    pack_experts(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = ModuleListMoE()
    loaded.load_state_dict(torch.load(tmp_path / "model.pt"))
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())


def test_packing_leaves_other_lists_alone():
    tied = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(3))
    tied[2].weight = tied[0].weight
    several = nn.ModuleList([nn.Linear(D, D, bias=False), nn.Linear(D, H, bias=False)])
    strided = nn.ParameterList(nn.Parameter(torch.randn(D, 2 * H)[:, ::2]) for _ in range(3))
    alone = nn.ModuleList([nn.Linear(D, D)])
    assert pack_experts(nn.ModuleDict({"a": tied, "b": several, "c": strided, "d": alone})) == 0
    blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(D), "moe": ModuleListMoE()}) for _ in range(2))
    pack_experts(blocks)
    assert not is_packed(block["norm"].weight for block in blocks)
    assert is_packed(expert.gate.weight for expert in blocks[1]["moe"].experts)


def test_explain_says_what_is_copied():
    plain = Candidate("moe", "masked experts", "expert_up", None, 2048, 1024)
    assert str(plain) == "moe: masked experts -> expert_up; kept for backward: 2.0 KiB before, 1.0 KiB after"
    assert str(replace(plain, copied=3 << 20)) == f"{plain}; separate weights joined by a copy in each pass: 3.0 MiB"
    assert [candidate.copied for candidate in moeblaze_ops.explain(ModuleListMoE(), torch.randn(T, D)).candidates] == [0]


def test_rewrite_of_two_experts_is_not_taken_for_gate_and_up(fp64):
    """Two tensors of one expert each could be read as the gates and the ups of one expert."""
    model = ModuleListMoE(num_experts=2)
    assert check_against_eager(model, torch.randn(T, D)).reasons == []
    assert rewrite_of(model, torch.randn(T, D)).rewritten[0].E == 2
