"""With ``config.batch_invariant`` the bits of a token's results are those in any other batch, on a CPU."""

import re
import runpy
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import moeblaze_ops
import moeblaze_ops.compile  # registers the backend
from moeblaze_ops import config
from moeblaze_ops.cpu import row_pieces
from moeblaze_ops.memory.row_ranges import choose_parts
from tests.batch.cases import Layer, Pool, Sizes, WrittenLayer, contract_program, different_bits, draw, run
from tests.corpus.zoo.blocks import Dense

SIZES = {
    "gated": Sizes(64, 96, 6, 2),
    "one_expert_ungated": Sizes(72, 40, 4, 1, "silu"),
    "biases": Sizes(64, 48, 6, 2, bias=True),
    "weights_on_input": Sizes(64, 48, 6, 2, "geglu", weight_on="input"),
    "odd_widths": Sizes(33, 17, 5, 3, "gelu_tanh"),
    "wide": Sizes(40, 700, 3, 2, "relu2"),
    "one_expert_in_all": Sizes(48, 40, 1, 1),
}


@pytest.fixture(autouse=True)
def _invariant(monkeypatch):
    monkeypatch.setattr(config, "batch_invariant", True)
    torch.manual_seed(0)


def count(sizes: Sizes, dtype: torch.dtype, keep: str | None = None, cases: int = 25) -> int:
    """The rows of results with another bit, over random cases."""
    layer = Layer(sizes, dtype, "cpu")
    pool = Pool(layer, sizes, dtype, "cpu", 150)

    def run_batch(x, dout):
        return run(lambda x, delta: layer(x, delta, keep), x, dout, sizes.K)

    drawn = draw(cases, 150, 400, torch.Generator().manual_seed(1))
    return sum(different_bits(pool, case, run_batch) for case in drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_no_bit_depends_on_the_batch(sizes, dtype):
    assert count(sizes, dtype) == 0


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_nor_on_what_is_kept(sizes):
    assert count(sizes, torch.float32, "input", 10) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nor_with_adapters_a_learned_activation_and_a_residual(dtype):
    sizes = Sizes(64, 48, 6, 2)
    learned = {"activation": lambda g, u, beta: g * torch.sigmoid(beta * g) * u, "activation_parameters": [0.8]}
    layer = moeblaze_ops.MoE(D=64, F=48, E=6, K=2, bias=True, dtype=dtype, **learned)
    for factor in layer.add_adapter("tuned", 3).parameters():
        nn.init.normal_(factor, std=0.2)

    def forward(x, delta=None):
        return x + layer(x) if delta is None else x + layer(x) + 0 * delta.sum()

    pool = Pool(forward, sizes, dtype, "cpu", 150)
    drawn = draw(15, 150, 300, torch.Generator().manual_seed(1))
    assert sum(different_bits(pool, case, lambda x, dout: run(forward, x, dout, None)) for case in drawn) == 0


def test_no_tokens():
    x = torch.randn(0, 16, requires_grad=True)
    moeblaze_ops.MoE(D=16, F=8, E=4, K=2)(x).sum().backward()
    assert x.grad.shape == (0, 16)


def test_nor_on_threads_that_share_a_function():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert count(Sizes(64, 1200, 4, 2), torch.float32, cases=10) == 0
    finally:
        torch.set_num_threads(before)


def test_bits_depend_on_it_otherwise(monkeypatch):
    monkeypatch.setattr(config, "batch_invariant", False)
    assert count(SIZES["gated"], torch.float32) > 0


def test_another_product_for_few_rows_is_caught(monkeypatch):
    whole = row_pieces.product_of_rows

    def product(rows, matrix, out):
        return torch.mm(rows, matrix, out=out) if len(rows) < 8 else whole(rows, matrix, out)

    monkeypatch.setattr("moeblaze_ops.cpu.rows.product_of_rows", product)
    assert count(SIZES["gated"], torch.float32) > 0


def test_rewritten_code_gives_the_bits_of_the_operators():
    """Of any spelling: here sorted rows and grouped products, with a number of tokens that is a symbol."""
    sizes, dtype = SIZES["gated"], torch.bfloat16
    layer, written = Layer(sizes, dtype, "cpu"), WrittenLayer(sizes, dtype, "cpu")
    written.load_state_dict(layer.state_dict())
    pool = Pool(layer, sizes, dtype, "cpu", 150)
    torch._dynamo.reset()
    compiled = torch.compile(written, backend="moeblaze", dynamic=True)
    drawn = draw(15, 150, 300, torch.Generator().manual_seed(1))
    assert sum(different_bits(pool, case, lambda x, dout: run(compiled, x, dout, None)) for case in drawn) == 0
    torch._dynamo.reset()


@pytest.mark.parametrize("bias", [False, True])
def test_router_logits_are_computed_by_products_of_fixed_rows(bias):
    """In compiled code, of a router with and without a bias, in fp32 and not."""
    router = nn.Linear(64, 20, bias=bias)
    layer = Layer(Sizes(64, 32, 20, 2), torch.float32, "cpu")

    def forward(x):
        weights, experts = moeblaze_ops.route(router(x), 2)
        return moeblaze_ops.moe(x, weights, experts, layer.w_up, layer.w_down)

    x = torch.randn(130, 64)
    compiled = torch.compile(forward, backend="moeblaze", dynamic=True)
    whole = compiled(x)
    for part in (slice(0, 2), slice(5, 22)):
        assert torch.equal(compiled(x[part]), whole[part])
    torch._dynamo.reset()


def test_gradients_are_taken_as_a_whole(monkeypatch):
    monkeypatch.setattr(config, "max_layer_transient_bytes", 1 << 20)
    sizes = 100_000, 64, 256, 8, 2, torch.bfloat16, True, torch.device("cpu")
    assert choose_parts(*sizes) == ("whole", 0)
    with torch.no_grad():
        assert choose_parts(*sizes)[0] == "chunks"


def test_weight_gradients_do_not_depend_on_limits(monkeypatch):
    layer = Layer(SIZES["gated"], torch.bfloat16, "cpu")
    x, dout, delta = torch.randn(3000, 64).bfloat16(), torch.randn(3000, 64).bfloat16(), torch.zeros(3000, 2)
    gradients = []
    for keep, limit in ((None, None), ("input", None), ("input", 1 << 16)):
        monkeypatch.setattr(config, "max_layer_transient_bytes", limit)
        gradients.append(torch.autograd.grad(layer(x, delta, keep), list(layer.parameters()), dout))
    assert all(map(torch.equal, gradients[0], gradients[1])) and all(map(torch.equal, gradients[0], gradients[2]))


PROGRAM = contract_program()
PLACES = [found.start() for found in re.finditer(r"(?<!def )rounded\(", PROGRAM)]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: PROGRAM[place:].partition(")")[0])
def test_each_rounding_of_the_contract_is_seen(place, capsys):
    """The page shows that the operators round where its program does; here, that they do not where it leaves one out."""
    page = {"torch": torch, "moeblaze_ops": moeblaze_ops}
    exec(f"{PROGRAM[:place]}({PROGRAM[place + len('rounded('):]}", page)
    never_inexact = PROGRAM[place:].startswith("rounded(h.relu())")
    assert ("False" in capsys.readouterr().out) != never_inexact


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.moe, self.norm = nn.Linear(16, 16), Dense(), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.moe(self.mix(x)))


@pytest.mark.parametrize("X, Y", [(33, 17), (16, 1), (7, 32)])
def test_products_are_of_whole_vectors(X, Y, monkeypatch):
    """On some CPUs libraries add in an order that depends on where among others a row stands that is no whole vector."""
    rows, matrix, before = torch.randn(70, X).double(), torch.randn(Y, X).double().t(), torch.randn(70, Y).double()
    with mock.patch.object(torch, "mm", wraps=torch.mm) as mm, mock.patch.object(torch, "addmm", wraps=torch.addmm) as addmm:
        product = row_pieces.product_of_rows(rows, matrix)
        row_pieces.add_product_of_rows(total := before.clone(), rows, matrix)
    torch.testing.assert_close(product, rows @ matrix)
    torch.testing.assert_close(total, before + product)
    widths = [size for call in (*mm.mock_calls, *addmm.mock_calls) for factor in call.args[-2:] for size in factor.shape]
    assert len(widths) == 16 and not any(width % 16 for width in widths)


def test_verify_says_whose_bits_move_first():
    verification = moeblaze_ops.verify(Model(), torch.randn(3, 16), batch_invariant=True)
    assert verification.agrees and config.batch_invariant
    assert verification.batch.by_themselves == ("mix",) and verification.batch.experts == ()
    assert re.search(r"first those of mix \((padded, )?split\)", str(verification))


def test_verify_finds_a_layer_whose_bits_move(monkeypatch):
    whole = row_pieces.product_of_rows

    def product(rows, matrix, out=None):
        return whole(rows, matrix, out).add_(1e-3 * len(rows) * config.batch_invariant)

    monkeypatch.setattr("moeblaze_ops.ops.router_products.product_of_rows", product)
    monkeypatch.setattr("moeblaze_ops.cpu.rows.product_of_rows", product)
    model = Model()
    model.mix = nn.Identity()
    verification = moeblaze_ops.verify(model, torch.randn(3, 16), batch_invariant=True)
    assert not verification.agrees and verification.batch.experts == ("moe",)


def test_verify_takes_modules():
    with pytest.raises(TypeError, match="verify: model must be a module with batch_invariant=True"):
        moeblaze_ops.verify(lambda x: x, torch.randn(3), batch_invariant=True)


def test_rollout_and_training_agree():
    path = Path(__file__).parents[2] / "examples" / "rollout_and_train.py"
    if not path.is_file():
        pytest.skip("runs in a checkout only")
    example = runpy.run_path(str(path))
    torch.manual_seed(0)
    model = example["Model"]()
    assert example["different"](model, False)[0] > 0
    assert example["different"](model, True)[0] == 0
