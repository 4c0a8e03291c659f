"""With ``config.batch_invariant`` the bits of a token's results are those in any other batch, on a GPU."""

import pytest
import torch
from torch import Tensor

import moeblaze_ops
import moeblaze_ops.compile  # registers the backend
from moeblaze_ops import config
from tests.batch.cases import Layer, Pool, Results, Sizes, WrittenLayer, contract_program, different_bits, draw, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = {
    "fine": Sizes(2048, 768, 128, 8),
    "finest": Sizes(1536, 256, 64, 8),
    "coarse": Sizes(1024, 3584, 8, 2),
    "one_expert": Sizes(512, 1024, 4, 1),
    "ungated": Sizes(256, 512, 16, 4, "silu"),
    "ragged": Sizes(328, 200, 12, 3),
}
GRAPHED = (1, 3, 16, 64, 300)
CASES = 500


@pytest.fixture(autouse=True)
def _invariant(monkeypatch):
    monkeypatch.setattr(config, "batch_invariant", True)
    torch.manual_seed(0)


def graphed(layer: Layer, T: int, K: int):
    """Runs of T tokens as replays of one CUDA graph."""
    x, dout = (torch.randn(T, layer.sizes.D, device="cuda").to(layer.w_up.dtype) for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(layer, x, dout, K)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(layer, x, dout, K)

    def replay(new_x: Tensor, new_dout: Tensor) -> Results:
        x.copy_(new_x), dout.copy_(new_dout)
        graph.replay()
        return results

    return replay


def count(sizes: Sizes, dtype: torch.dtype, mode: str, cases: int = CASES, most: int = 65536) -> int:
    """The rows of results with another bit, over all cases; of wide layers with less than ``most`` tokens, which take long."""
    most = min(most, (1 << 27) // (sizes.K * max(sizes.D, 2 * sizes.F)))
    layer = Layer(sizes, dtype, "cuda")
    pool = Pool(layer, sizes, dtype, "cuda", 2000)
    generator = torch.Generator().manual_seed(1)
    if mode == "graphs":
        runs = {T: graphed(layer, T, sizes.K) for T in GRAPHED}
        drawn = draw(cases, len(pool.x), most, generator, GRAPHED)
        return sum(different_bits(pool, case, lambda x, dout: runs[len(x)](x, dout)) for case in drawn)
    run_layer, K = layer, sizes.K
    if mode == "compiled":
        run_layer = layer
        if dtype == torch.bfloat16:  # the only one that grouped products of torch take
            run_layer, K = WrittenLayer(sizes, dtype, "cuda"), None
            run_layer.load_state_dict(layer.state_dict())
        torch._dynamo.reset()
        run_layer = torch.compile(run_layer, backend="moeblaze", dynamic=True)
    elif mode == "keeps x":
        run_layer = lambda x, delta: layer(x, delta, "input")  # noqa: E731
    drawn = draw(cases, len(pool.x), most, generator)
    return sum(different_bits(pool, case, lambda x, dout: run(run_layer, x, dout, K)) for case in drawn)


@pytest.mark.parametrize("mode", ["eager", "compiled", "graphs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_no_bit_depends_on_the_batch(sizes, dtype, mode):
    assert count(sizes, dtype, mode) == 0


OTHERS = {
    "biases": Sizes(512, 256, 16, 4, "swiglu", bias=True),
    "weights on the input": Sizes(512, 256, 16, 2, "geglu", weight_on="input"),
}


@pytest.mark.parametrize("mode", ["eager", "keeps x"])
@pytest.mark.parametrize("sizes", OTHERS.values(), ids=OTHERS)
def test_nor_of_other_layers(sizes, mode):
    assert count(sizes, torch.bfloat16, mode, 50) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nor_with_portable_kernels(monkeypatch, dtype):
    monkeypatch.setattr(config, "hopper", "off")
    assert count(SIZES["ragged"], dtype, "eager", 50, 4096) == 0


@pytest.mark.parametrize("K", [1, 3])
def test_parts_of_a_batch_may_begin_anywhere(K):
    """Views of x, of the weights and of the gradient, of which some are not aligned to 16 bytes."""
    layer = Layer(Sizes(256, 128, 8, K), torch.bfloat16, "cuda")
    x, dout = (torch.randn(301, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weights, experts = torch.rand(301, K, device="cuda"), torch.rand(301, 8, device="cuda").topk(K).indices

    def results(first: int, end: int) -> list[Tensor]:
        leaves = [x[first:end].detach().requires_grad_(), weights[first:end].detach().requires_grad_()]
        out = moeblaze_ops.moe(*leaves, experts[first:end], layer.w_up, layer.w_down)
        return [out, *torch.autograd.grad(out, leaves, dout[first:end])]

    whole = results(0, 301)
    for _ in range(3):
        parts = zip(*(results(first, end) for first, end in ((0, 7), (7, 8), (8, 145), (145, 301))), strict=True)
        assert all(map(torch.equal, map(torch.cat, parts), whole))


def test_the_contract_holds():
    """The program of the page, with numbers whose sums are exact."""
    page = {"torch": torch, "moeblaze_ops": moeblaze_ops}
    exec(contract_program(), page)
    x, weights, experts, w_up, w_down, dout = (operand.cuda() for operand in page["operands"])
    leaves = [leaf.requires_grad_() for leaf in (x.bfloat16(), weights, w_up.bfloat16(), w_down.bfloat16())]
    out = moeblaze_ops.moe(leaves[0], leaves[1], experts, *leaves[2:], activation="relu")
    gradients = torch.autograd.grad(out, leaves, dout.bfloat16())
    for got, wanted in zip((out, *gradients), page["contract"](*page["operands"]), strict=True):
        assert torch.equal(got.float().cpu(), wanted)


def test_another_order_for_few_tokens_is_caught(monkeypatch):
    from moeblaze_ops.kernels.hopper import ops

    down_rows = ops.down_rows

    def in_halves(a_NF, w_down, b_down, offsets_E1, blocks_B2, y_ND, *rest):
        if len(a_NF) > 64:
            return down_rows(a_NF, w_down, b_down, offsets_E1, blocks_B2, y_ND, *rest)
        first, second = torch.empty_like(y_ND), torch.empty_like(y_ND)
        for half, y in enumerate((first, second)):
            a, w = a_NF.chunk(2, 1)[half].contiguous(), w_down[0].chunk(2, 1)[half].contiguous()
            down_rows(a, [w], b_down, offsets_E1, blocks_B2, y, *rest)
        y_ND.copy_(first + second)

    monkeypatch.setattr(ops, "down_rows", in_halves)
    # Sizes of its own: where a launch of other tests is known, it is repeated, and nobody calls what launches it.
    assert count(Sizes(256, 512, 14, 4, "silu"), torch.bfloat16, "eager", 20) > 0


def test_weight_gradients_are_the_same_in_every_run():
    sizes = SIZES["ungated"]
    layer = Layer(sizes, torch.bfloat16, "cuda")
    x, dout = (torch.randn(3000, sizes.D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    delta, first = torch.zeros(3000, sizes.K, device="cuda"), None
    for keep, limit in ((None, None), ("input", None), ("input", 1 << 20)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(config, "max_layer_transient_bytes", limit)
            gradients = torch.autograd.grad(layer(x, delta, keep), list(layer.parameters()), dout)
        first = first or gradients
        assert all(map(torch.equal, gradients, first)), (keep, limit)
