"""Lowerings, read in the code that Inductor generates for a CUDA device; no device is needed."""

import re

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import moeblaze_ops
from moeblaze_ops import config
from moeblaze_ops.kernels import configs
from tests.tools import fakecuda

T, K, E, D, F = 96, 2, 4, 64, 128  # more slots than one kernel groups
CALL = "torch.ops.moeblaze."
FORWARD_KERNELS = ["_count_kernel", "_scan_kernel", "_place_kernel", "_expert_up_kernel", "_expert_down_kernel"]


@pytest.fixture(scope="module", autouse=True)
def fake_cuda():
    fakecuda.require_fake_cuda()


def layer(x, weights, experts, w_up, w_down):
    return torch.relu(moeblaze_ops.moe(x * 2, weights, experts, w_up, w_down)) + 1


def layer_inputs(device: str, num_tokens: int = T, **keywords) -> tuple:
    """Tokens, routing weights, expert ids, packed up weights and down weights; ``keywords`` are for the float ones."""
    experts_TK = torch.arange(num_tokens * K, device=device).view(num_tokens, K) % E
    return (
        torch.randn(num_tokens, D, device=device, **keywords),
        torch.rand(num_tokens, K, device=device, **keywords),
        experts_TK,
        torch.randn(E, 2 * F, D, device=device, **keywords),
        torch.randn(E, D, F, device=device, **keywords),
    )


def fake_layer_inputs() -> tuple:
    with FakeTensorMode():
        return layer_inputs("cuda")


def assert_in_order(names: list[str], kernels: list[str]) -> None:
    found = [name for name in kernels if name in names]
    assert found == names, kernels


@pytest.mark.parametrize("dynamic", [False, True])
def test_forward_is_inlined(dynamic):
    code = fakecuda.generated_code(layer, fake_layer_inputs(), dynamic=dynamic)
    assert CALL not in code
    kernels = fakecuda.launches(code)
    assert_in_order([*FORWARD_KERNELS, "_combine_kernel"], kernels)
    assert "relu" in kernels[-1], "the pointwise consumer is a kernel of Inductor's that reads our output"
    assert "clone" not in code


def plain_loop(x, router, w_gate, w_up, w_down):
    weights, experts = torch.topk(torch.softmax(x @ router, -1), K, dim=-1)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(experts == e)
        rows = x[token]
        hidden = torch.nn.functional.silu(rows @ w_gate[e].T) * (rows @ w_up[e].T)
        out.index_add_(0, token, (hidden @ w_down[e].T) * weights[token, slot, None])
    return out


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=str)
def test_formula_is_a_constant_of_the_kernels(capability):
    """It needs no code of its own: the kernels are those of any activation, compiled for the steps of this one."""

    def step(x, weights, experts, w_up, w_down):
        return moeblaze_ops.moe(x, weights, experts, w_up, w_down, activation=lambda g, u: torch.tanh(g) * u)

    code = fakecuda.generated_code(step, fake_layer_inputs(), capability=capability)
    assert CALL not in code and "_expert_up_kernel" in str(fakecuda.launches(code))
    assert "'tanh 0;mul 3 1|4'" in code and "def _apply(" in code


def code_of_plain_loop(capability: tuple[int, int]) -> str:
    """All the way from a loop over experts, which Dynamo does not even capture by default."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        inputs = [torch.randn(*shape, device="cuda") for shape in ((T, D), (D, E), (E, F, D), (E, F, D), (E, D, F))]
    with moeblaze_ops.enabled():
        return fakecuda.generated_code(plain_loop, tuple(inputs), capability=capability)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)], ids=str)
def test_plain_layer_becomes_kernels(capability):
    code = code_of_plain_loop(capability)
    assert CALL not in code
    assert_in_order([*FORWARD_KERNELS, "_combine_kernel"], fakecuda.launches(code))


@pytest.mark.parametrize(
    "capability, hip, why", [((7, 5), None, "8.0 or newer, cuda:0 has 7.5"), ((9, 4), "6.4", "this torch is built for ROCm")]
)
def test_plain_layer_of_a_gpu_without_kernels_is_left(monkeypatch, caplog, capability, hip, why):
    monkeypatch.setattr(torch.version, "hip", hip)
    with caplog.at_level("INFO", logger="moeblaze_ops"), pytest.raises(AssertionError, match="no graph was compiled"):
        code_of_plain_loop(capability)
    assert "left alone, OPERANDS" in caplog.text and why in caplog.text


@pytest.mark.parametrize("dynamic", [False, True])
def test_training_is_inlined(dynamic):
    sources: list[str] = []
    compiled = torch.compile(layer, backend=fakecuda.shadow_backend(sources), dynamic=dynamic)
    torch._dynamo.reset()
    for num_tokens in (24, 40, 72) if dynamic else (72,):
        compiled(*layer_inputs("cpu", num_tokens, requires_grad=True)[:2], *training_tail(num_tokens)).sum().backward()
    assert len(sources) == 2, "one forward and one backward graph"
    forward, backward = sources
    assert CALL not in forward and CALL not in backward
    assert_in_order(FORWARD_KERNELS, fakecuda.launches(forward))
    kernels = fakecuda.launches(backward)
    assert kernels.count("_expert_weight_grad_kernel") == 2
    assert_in_order(["_expert_down_backward_kernel", "_expert_up_backward_kernel"], kernels)


def training_tail(num_tokens: int) -> tuple:
    _, _, experts_TK, w_up, w_down = layer_inputs("cpu", num_tokens)
    return experts_TK, w_up.requires_grad_(), w_down.requires_grad_()


@pytest.mark.parametrize("capability, hopper", [((8, 0), False), ((9, 0), True)], ids=["ampere", "hopper"])
def test_kernels_follow_the_device(capability, hopper):
    """Gluon kernels cannot be inlined: there the code calls ops that write into buffers of Inductor's."""
    with FakeTensorMode():
        inputs = layer_inputs("cuda", dtype=torch.bfloat16)
    code = fakecuda.generated_code(layer, inputs, capability=capability)
    assert CALL not in code
    assert ("torch.ops.moeblaze_hopper." in code) == hopper
    called = re.findall(r"^\s+torch\.ops\.moeblaze_hopper\.\w+\.default(.*?)\(", code, re.MULTILINE)
    assert set(called) == ({".implementation"} if hopper else set())
    assert ("_expert_up_kernel" in fakecuda.launches(code)) == (not hopper)
    assert "clone" not in code and ".copy_(" not in code


@pytest.mark.parametrize(("num_tokens", "few"), [(32, True), (33, False)])
def test_projections_of_few_rows_an_expert_are_portable(num_tokens, few):
    """With 16 rows an expert on average, and with 17."""
    with FakeTensorMode():
        inputs = layer_inputs("cuda", num_tokens, dtype=torch.bfloat16)
    code = fakecuda.generated_code(layer, inputs, capability=(9, 0))
    names = {"_expert_up_kernel", "_expert_down_kernel"} & set(fakecuda.launches(code))
    assert names == ({"_expert_up_kernel", "_expert_down_kernel"} if few else set())
    assert ("torch.ops.moeblaze_hopper." in code) == (not few)


@pytest.mark.parametrize(
    ("capability", "dynamic"),
    [((8, 0), True), ((9, 0), True), ((9, 0), False)],
    ids=["ampere-dynamic", "hopper-dynamic", "hopper"],
)
def test_ranges_of_columns_share_a_buffer(capability, dynamic, monkeypatch):
    """One buffer for the rows of a projection, written and summed in turns; other numbers of tokens use the same graph."""
    num_tokens = 48
    monkeypatch.setattr(configs, "COLUMN_UNIT", 16)
    monkeypatch.setattr(config, "max_transient_bytes", num_tokens * K * 2 * 32)

    def ours(x, weights, experts, w_up, w_down):
        return moeblaze_ops.moe(x, weights, experts, w_up, w_down)

    sources: list[str] = []
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend=fakecuda.shadow_backend(sources, capability))
    for tokens in (num_tokens, 24, 500) if dynamic else (num_tokens,):
        inputs = _ragged_inputs(tokens)
        for tensor in inputs[:3] if dynamic else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        compiled(*inputs).sum().backward()
    assert len(sources) == 2, "one forward and one backward graph"
    for code, gemm in zip(sources, ("down_rows", "up_backward_rows"), strict=True):
        gemm = f"moeblaze_hopper.{gemm}" if capability == (9, 0) else f"_expert_{gemm.removesuffix('_rows')}_kernel"
        # The widths of the ranges and of the last one: 72 columns are 32 + 32 + 8.
        rows = re.findall(r"(\w+) = empty_strided_cuda\(\([^()]*, 32\), \(32, 1\)", code)
        assert len(rows) == 1
        lines = [line for line in code.splitlines() if re.search(rf"\b{rows[0]}\b", line)]
        assert "del" in lines.pop()
        steps = [re.search(rf"empty_strided|{gemm}|_combine_kernel", line).group() for line in lines]
        assert steps == ["empty_strided", *[gemm, "_combine_kernel"] * 3]
        first, last = code.index(lines[1]), code.index(lines[-1])
        assert "empty_strided" not in code[first:last], "nothing is allocated between the ranges"
        assert "clone" not in code and ".copy_(" not in code


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["ampere", "hopper"])
def test_low_rank_columns_are_part_of_the_products(capability):
    """Of frozen weights nothing has the size in generated code: they are arguments, and have no gradient."""
    num_tokens, rank = 96, 8

    def ours(x, weights, experts, w_up, w_down, up_a, up_b, down_a, down_b):
        lora = {"lora_up": (up_a, up_b, 2.0), "lora_down": (down_a, down_b, 2.0)}
        return moeblaze_ops.moe(x, weights, experts, w_up, w_down, **lora)

    x, weights, experts, w_up, w_down = _ragged_inputs(num_tokens)
    E, outputs, D = w_up.shape
    shapes = (E, rank, D), (E, outputs, rank), (E, rank, outputs // 2), (E, D, rank)
    factors = [torch.randn(shape, dtype=x.dtype, requires_grad=True) for shape in shapes]
    sources: list[str] = []
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend=fakecuda.shadow_backend(sources, capability))
    compiled(x, weights, experts, w_up.detach(), w_down.detach(), *factors).sum().backward()
    assert len(sources) == 2, "one forward and one backward graph"
    F = outputs // 2
    whole = (f"({E}, {outputs}, {D})", f"({E}, {D}, {F})", f"({E}, {F}, {D})", f"({E}, 2, {F}, {D})")
    for code in sources:
        assert CALL not in code
        assert not any(f"empty_strided_cuda({shape}" in code for shape in whole)
    forward, backward = sources
    # B with its scale, as products read it, is made once in either graph, and not kept. Gate and up are one row of columns: the
    # pass over their gradient has no tile that reaches over an edge between them.
    assert len([name for name in fakecuda.launches(backward) if "_clone_" in name and "_mul_" in name]) >= 2
    for shape in (rf"\({E}, 2, {F}, {rank}\), \({2 * F * rank}, {F}, 1, {2 * F}\)", rf"\({E}, {rank}, {D}\), \(\d+, {D}, 1\)"):
        made = re.findall(rf"(buf\d+) = empty_strided_cuda\({shape}", forward)
        assert len(made) == 1 and re.search(rf"\bdel {made[0]}\b", forward)
    assert backward.count(f"empty_strided_cuda((1, {num_tokens * K}, {rank})") == 2
    if capability == (9, 0):
        assert forward.count("moeblaze_hopper.expert_up") >= 2 and "moeblaze_hopper.down_rows" in forward
    else:
        assert fakecuda.launches(forward).count("_expert_up_kernel") == 2
        assert fakecuda.launches(backward).count("_expert_weight_grad_kernel") == 2
    assert fakecuda.launches(backward).count("_low_rank_backward_kernel") == 2


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["ampere", "hopper"])
@pytest.mark.parametrize("donated", [True, False])
def test_gradient_of_h_is_written_over_h(capability, donated):
    """What forward saved for this backward alone takes its gradient, unless backward may run twice."""

    def ours(x, weights, experts, w_up, w_down):
        return moeblaze_ops.moe(x, weights, experts, w_up, w_down)

    sources: list[str] = []
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=donated):
        compiled = torch.compile(ours, backend=fakecuda.shadow_backend(sources, capability))
        compiled(*_ragged_inputs(48)).sum().backward()
    made = re.findall(rf"= empty_strided_cuda\(\({48 * K}, 2, {F}\)", sources[1])
    assert len(made) == (0 if donated else 1)
    assert "clone" not in sources[1] and ".copy_(" not in sources[1]


def _ragged_inputs(num_tokens: int) -> tuple:
    keywords = {"dtype": torch.bfloat16, "requires_grad": True}
    return (
        torch.randn(num_tokens, 72, **keywords),
        torch.rand(num_tokens, K, requires_grad=True),
        torch.arange(num_tokens * K).view(num_tokens, K) % E,
        torch.randn(E, 2 * F, 72, **keywords),
        torch.randn(E, 72, F, **keywords),
    )


def test_op_is_called_on_cpu():
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    inputs = layer_inputs("cpu")
    output, codes = run_and_get_code(torch.compile(layer), *inputs)
    torch.testing.assert_close(output, layer(*inputs))
    assert CALL in fakecuda.without_comments(codes[0])


def test_checking_expert_ids_calls_dispatch(monkeypatch):
    monkeypatch.setattr(config, "check_expert_ids", True)
    code = fakecuda.generated_code(layer, fake_layer_inputs())
    assert f"{CALL}dispatch" in code
    assert f"{CALL}expert_up" not in code
    assert "_expert_up_kernel" in fakecuda.launches(code)


CALLED = {
    "expert_mlp_chunked", "expert_mlp_chunked_backward", "expert_mlp_ranged_backward", "expert_mlp_ranged_backward_add",
    "expert_weight_grad_add", "expert_bias_grad_add", "expert_weight_grad_or_add",
}  # fmt: skip
"""Ops with a loop whose length only the running program knows, and ops that write into an argument or may."""
ACROSS_RANKS = {
    "any_number", "apart", "arrived", "experts_over_ranks_backward", "first_of_rank", "gather_rows", "meet", "met", "most_tokens",
    "row_numbers", "settled", "sized", "sum_parts", "used_slots", "with_rows",
    "expert_mlp_by_rank", "expert_down_backward_by_rank", "expert_up_backward_by_rank",
}  # fmt: skip
"""Ops of several processes, which are called too; they are registered with the first `shard_experts`."""


def test_every_other_op_has_a_lowering():
    from torch._inductor.lowering import lowerings

    fakecuda.generated_code(layer, fake_layer_inputs())
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("moeblaze::")]
    names = {name.partition("::")[2] for name in names}
    assert names > CALLED | {"expert_weight_grad"}
    ops = [getattr(torch.ops.moeblaze, name).default for name in names - CALLED - ACROSS_RANKS]
    assert [op for op in ops if op not in lowerings or not lowerings[op].__name__.startswith("lower_")] == []


def test_weights_are_read_in_place():
    """Transposed storage reaches the kernels with its own strides: no copy of a weight in any form."""

    def transposed(x, weights, experts, w_up, w_down):
        return moeblaze_ops.moe(x, weights, experts, w_up, w_down, transposed=True)

    with FakeTensorMode():
        x, weights, experts, w_up, w_down = layer_inputs("cuda")
        w_up, w_down = w_up.transpose(1, 2).contiguous(), w_down.transpose(1, 2).contiguous()
    code = fakecuda.generated_code(transposed, (x, weights, experts, w_up, w_down))
    assert fakecuda.launches(code) == [*FORWARD_KERNELS, "_combine_kernel"]


def test_a_part_of_a_tensor_is_read_in_place():
    """The experts of two layers in one tensor, where those of the second are not aligned to 16 bytes."""

    def two_layers(x, router, w_up, w_down):
        for up, down in zip(w_up, w_down, strict=True):
            weights, experts = torch.topk(torch.softmax(x @ router, -1), K, dim=-1)
            y = (torch.relu(x @ up[e].T) @ down[e].T for e in range(5))
            x = x + sum((weights * (experts == e)).sum(-1, keepdim=True) * rows for e, rows in enumerate(y))
        return x

    with FakeTensorMode(shape_env=ShapeEnv()):
        inputs = [torch.randn(*shape, device="cuda") for shape in ((T, 15), (15, 5), (2, 5, 9, 15), (2, 5, 15, 9))]
    with moeblaze_ops.enabled():
        code = fakecuda.generated_code(two_layers, tuple(inputs), shape_padding=False)
    assert_in_order([*FORWARD_KERNELS, "_combine_kernel"] * 2, fakecuda.launches(code))
    assert "clone" not in code and ".copy_(" not in code
    assert [code.count(f"(5, 9, 15), (135, 15, 1), {start})") for start in (0, 5 * 135)] == [2, 2]
    first, second = re.findall(r"'gate_ptr'.*?'configs': (.*)", code)
    assert "(1,): [['tt.divisibility', 16]]" in first and "(1,): [['tt.divisibility', 16]]" not in second


@pytest.fixture(scope="module")
def toy():
    """An op whose launcher mixes a mutating custom op, as the Hopper kernels come, and a Triton kernel."""
    triton = pytest.importorskip("triton")
    from moeblaze_ops.lowering.inductor.lower_ops import register_traced_lowering
    from tests.kernels import toy_kernels

    library = torch.library.Library("moeblaze_tests", "FRAGMENT")
    tags = (torch.Tag.needs_exact_strides,)
    library.define("fill(Tensor x, Tensor[] ws, Tensor(a!) out, Tensor(b!) scratch, SymInt n) -> ()", tags=tags)
    library.define("mixed(Tensor x, Tensor[] ws, Tensor? bias, SymInt n) -> (Tensor, Tensor[])", tags=tags)
    torch.library.register_fake("moeblaze_tests::fill", lambda *args: None, lib=library)
    torch.library.register_fake(
        "moeblaze_tests::mixed", lambda x, ws, bias, n: (torch.empty_like(x), [torch.empty_like(x)]), lib=library
    )
    strides = []

    def launch(x, ws, bias, n):
        assert bias is None
        strides.append([tuple(w.stride()) for w in ws])
        out, scratch, total, last = (torch.empty_like(x) for _ in range(4))
        torch.ops.moeblaze_tests.fill(x, ws, out, scratch, n)
        grid = (triton.cdiv(x.numel(), 128),)
        torch.library.wrap_triton(toy_kernels.add_kernel)[grid](out, scratch, total, x.numel(), 128)
        torch.ops.moeblaze_tests.fill(total, ws, last, scratch, n)
        return total, [last]

    register_traced_lowering(torch.ops.moeblaze_tests.mixed.default, lambda: launch, lambda op, args: False)
    yield strides
    library._destroy()


def test_launcher_with_mutating_op(toy):
    def function(x, w):
        total, (last,) = torch.ops.moeblaze_tests.mixed(x * 2, [w.t(), w.t() * 3], None, x.shape[0])
        return torch.relu(total) + last

    with FakeTensorMode():
        inputs = torch.empty(64, 32, device="cuda"), torch.empty(32, 64, device="cuda")
    code = fakecuda.generated_code(function, inputs)
    steps = re.findall(r"moeblaze_tests\.fill\.default\(|add_kernel_0\.run\(|triton_poi\w+\.run\(", code)
    assert [step.partition("_")[0] for step in steps] == ["triton", "triton", "moeblaze", "add", "moeblaze", "triton"], (
        "writes happen in the launcher's order"
    )
    assert "clone" not in code and ".copy_(" not in code, "buffers are written in place"
    assert code.count("# reuse") >= 2, "buffers of the launcher take part in memory planning"


def test_arguments_keep_their_strides(toy):
    """The second weight is computed: its layout is Inductor's choice, unless the op's tag is respected."""

    def function(x, w):
        total, (last,) = torch.ops.moeblaze_tests.mixed(x, [w.t(), (w.t() + 1) * 2], None, x.shape[0])
        return total + last

    toy.clear()
    with FakeTensorMode():
        inputs = torch.empty(64, 32, device="cuda"), torch.empty(32, 64, device="cuda")
    code = fakecuda.generated_code(function, inputs)
    assert toy == [[(1, 64), (1, 64)]]
    assert "empty_strided_cuda((64, 32), (1, 64)" in code


def test_symbolic_sizes_reach_the_launcher(toy):
    def function(x, w):
        total, (last,) = torch.ops.moeblaze_tests.mixed(x, [w], None, x.shape[0] + 1)
        return total + last

    with FakeTensorMode():
        inputs = torch.empty(64, 32, device="cuda"), torch.empty(32, 64, device="cuda")
    code = fakecuda.generated_code(function, inputs, dynamic=True)
    calls = [line for line in code.splitlines() if "moeblaze_tests.fill.default(" in line]
    assert len(calls) == 2
    assert all("1 + s" in line for line in calls), calls
