"""The ops on a GPU, both kernel paths: every activation, storage and dtype against the fp64 oracle, forward and backward."""

import pytest
import torch

import moeblaze_ops
from moeblaze_ops import config
from moeblaze_ops.arguments.activations import ACTIVATIONS
from tests.corpus import reference
from tests.corpus.layers import ROUTINGS, STORAGES, make_layer

pytestmark = pytest.mark.gpu

ops = torch.ops.moeblaze
EVEN, RAGGED = (6, 2, 256, 128), (6, 2, 200, 72)


@pytest.fixture(params=["hopper", "portable"], autouse=True)
def path(request, monkeypatch):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    monkeypatch.setattr(config, "hopper", "auto" if request.param == "hopper" else "off")
    return request.param


@pytest.fixture(autouse=True)
def poisoned_buffers():
    """Fill every uninitialised buffer with NaN, so that an element that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def step(run, leaves, dout):
    out = run()
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def assert_no_worse_than_eager(layer, weight_on="output"):
    """Output and every gradient against fp64, with the error of eager in the layer's dtype as the measure."""
    exact = layer.to(torch.float64)
    dout = torch.randn_like(exact.x_TD)
    truth = step(lambda: exact.oracle(weight_on), exact.leaves, dout)
    eager = step(lambda: oracle_in_own_dtype(layer, weight_on), layer.leaves, dout)
    ours = step(lambda: layer.run(weight_on), layer.leaves, dout)
    again = step(lambda: layer.run(weight_on), layer.leaves, dout)
    for index, (got, plain, want, repeat) in enumerate(zip(ours, eager, truth, again, strict=True)):
        scale = want.norm() + torch.finfo(torch.float32).tiny
        error, eager_error = (got.double() - want).norm() / scale, (plain.double() - want).norm() / scale
        # Ours rounds where eager does or later. On top, fp32 sums are taken in another order than cuBLAS takes them,
        # which half precision does not see; eps/4 covers half results whose eager error happens to vanish.
        eps = torch.finfo(layer.x_TD.dtype).eps
        slack = 4 * eps if layer.x_TD.dtype == torch.float32 else eps / 4
        assert error <= 1.5 * eager_error + slack, (index, float(error), float(eager_error))
        assert torch.equal(got, repeat), f"result {index} differs between two runs"


def oracle_in_own_dtype(layer, weight_on):
    return reference.moe(
        layer.x_TD, layer.weights_TK.to(layer.x_TD.dtype), layer.experts_TK, layer.w_up, layer.w_down, layer.b_up,
        layer.b_down, layer.activation, weight_on,
    )  # fmt: skip


def gpu_layer(dtype=torch.bfloat16, sizes=EVEN, **options):
    return make_layer(**options, sizes=sizes).to(dtype, "cuda")


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("sizes", [EVEN, RAGGED], ids=["even", "ragged"])
def test_every_routing(case, sizes):
    torch.manual_seed(0)
    assert_no_worse_than_eager(gpu_layer(case=case, bias=True, sizes=sizes))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "identity"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_activation_and_dtype(activation, dtype):
    torch.manual_seed(1)
    assert_no_worse_than_eager(gpu_layer(dtype, activation=activation, bias=True))


@pytest.mark.parametrize("stored_as", STORAGES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [EVEN, RAGGED], ids=["even", "ragged"])
def test_every_storage(stored_as, bias, sizes):
    torch.manual_seed(2)
    assert_no_worse_than_eager(gpu_layer(stored_as=stored_as, bias=bias, sizes=sizes))


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_weights_on_the_input(activation):
    torch.manual_seed(3)
    assert_no_worse_than_eager(gpu_layer(activation=activation, bias=True, case="unused_slots"), "input")


@pytest.mark.parametrize("sizes", [(128, 8, 128, 64), (1, 1, 64, 64), (8, 8, 64, 32), (300, 3, 64, 64)], ids=str)
def test_many_few_and_all_experts(sizes):
    torch.manual_seed(4)
    assert_no_worse_than_eager(gpu_layer(sizes=sizes, case="empty_expert" if sizes[0] > 8 else "ragged_tail"))


def test_gradients_keep_the_strides_of_the_weights():
    torch.manual_seed(5)
    for stored_as in STORAGES:
        layer = gpu_layer(stored_as=stored_as)
        layer.run().sum().backward()
        for stored in layer.stored:
            assert stored.grad.stride() == stored.stride()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_stays_alone(bad):
    torch.manual_seed(6)
    layer = gpu_layer()
    layer.x_TD.data[7] = bad
    out = layer.run()
    assert not out[7].isfinite().all()
    others = torch.arange(len(out), device="cuda") != 7
    assert out[others].isfinite().all()
    (dx,) = torch.autograd.grad(out[others].sum(), layer.x_TD)
    assert dx[others].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_weights_of_one_expert_stay_with_its_tokens(bad):
    torch.manual_seed(7)
    layer = gpu_layer()
    expert = 2
    for stored in layer.stored:
        stored.data[expert] = bad
    touched = (layer.experts_TK == expert).any(1)
    out = layer.run()
    assert out[~touched].isfinite().all()
    dx, *dw = torch.autograd.grad(out[~touched].sum(), [layer.x_TD, *layer.stored])
    assert dx[~touched].isfinite().all()
    others = torch.arange(layer.w_down[0].shape[0], device="cuda") != expert
    assert all(gradient[others].isfinite().all() for gradient in dw)


def test_a_bad_token_gradient_stays_with_its_experts():
    torch.manual_seed(8)
    layer = gpu_layer()
    out = layer.run()
    dout = torch.randn_like(out)
    dout[7] = float("nan")
    dw_up, dw_down = torch.autograd.grad(out, layer.stored, dout)
    chosen = layer.experts_TK[7].tolist()
    others = [e for e in range(layer.w_down[0].shape[0]) if e not in chosen]
    assert dw_up[others].isfinite().all() and dw_down[others].isfinite().all()


def test_dispatch_matches_reference_on_many_slots(path):
    if path == "hopper":
        pytest.skip("dispatch has one path")
    torch.manual_seed(9)
    for num_tokens, top_k, num_experts in ((4099, 8, 128), (1000, 32, 4096), (70001, 2, 8), (513, 1, 1), (0, 4, 64)):
        ids = torch.randint(-1, num_experts, (num_tokens, top_k), device="cuda")
        expected = torch.ops.moeblaze.dispatch(ids.cpu(), num_experts)
        for got, want in zip(ops.dispatch(ids, num_experts), expected, strict=True):
            assert torch.equal(got.cpu(), want)


def test_a_step_can_be_captured_in_a_cuda_graph():
    torch.manual_seed(10)
    torch.use_deterministic_algorithms(False)
    layer = gpu_layer()
    dout = torch.randn_like(layer.x_TD)
    expected = step(lambda: layer.run(), layer.leaves, dout)
    # Backward runs on the stream where a leaf was first used: leaves and views of them have to be new.
    leaves = [leaf.detach().clone().requires_grad_() for leaf in layer.leaves]

    def run():
        x, weights, w_up, w_down = leaves
        return moeblaze_ops.moe(x, weights, layer.experts_TK, w_up, w_down)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(run, leaves, dout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step(run, leaves, dout)
    for result in captured:
        result.fill_(float("nan"))
    graph.replay()
    for got, want in zip(captured, expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("width", "hidden"), [(64, 2048), (2048, 64)], ids=["h", "y"])
def test_more_than_two_to_the_31_elements(width, hidden):
    """h [N, 2, F] or the down rows [N, D] with N = 2^20 + 192 rows exceed int32 offsets."""
    torch.manual_seed(11)
    torch.use_deterministic_algorithms(False)
    num_tokens = 2**20 + 192
    experts_TK = torch.randint(0, 4, (num_tokens, 1), device="cuda")
    x = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w_up = torch.randn(4, 2, hidden, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w_down = torch.randn(4, hidden, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(num_tokens, 1, device="cuda")
    with torch.no_grad():
        w_up *= width**-0.5
        w_down *= hidden**-0.5
    routing = ops.dispatch(experts_TK, 4)
    h, a = ops.expert_up(x, [w_up], [], None, *routing, "swiglu")
    out = ops.expert_down(h, a, [w_down], [], weights, *routing, "swiglu")
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    last = torch.arange(num_tokens - 300, num_tokens, device="cuda")
    sample = x.detach()[last].float().requires_grad_()
    expected = reference.moe(sample, weights[last], experts_TK[last], [w_up.float()], [w_down.float()])
    (expected_dx,) = torch.autograd.grad(expected.sum(), sample)
    for got, want in ((out[last], expected), (dx[last], expected_dx)):
        assert (got.float() - want).norm() / want.norm() < 2e-2  # bf16 rounds h, a and y once each: 3 * 2^-9, and sums
