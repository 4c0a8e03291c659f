"""Balancing losses: equal to transformers' and to their definition, gradients included, and no tensor above [T, E]."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import moeblaze_ops

T, E, K = 30, 6, 2


def definition(layers, top_k, ids=None, mask=None):
    logits = torch.cat([layer.reshape(-1, E) for layer in layers]).float()
    share = torch.ones(len(logits)) if mask is None else (mask.reshape(-1) != 0).float().repeat(len(layers))
    chosen = logits.topk(top_k).indices if ids is None else torch.cat([i.reshape(-1, top_k) for i in ids])
    one_hot = F.one_hot(chosen.clamp(min=0).long(), E) * (chosen >= 0).unsqueeze(-1)
    fraction = (one_hot.float().sum(1) * share[:, None]).sum(0) / share.sum()
    return E * (fraction * (logits.softmax(-1) * share[:, None]).sum(0) / share.sum()).sum()


def gradients(loss, layers):
    return [loss.detach(), *torch.autograd.grad(loss, layers)]


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return [torch.randn(2, T // 2, E, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_equals_transformers(layers, masked):
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    mask = (torch.arange(T).view(2, -1) % 4 > 0).long() if masked else None
    flat = tuple(layer.reshape(-1, E) for layer in layers)
    wanted = gradients(mixtral.load_balancing_loss_func(flat, E, K, mask), layers)
    torch.testing.assert_close(gradients(moeblaze_ops.load_balancing_loss(layers, K, mask=mask), layers), wanted)
    assert wanted[1].abs().sum() > 0


@pytest.mark.parametrize("one", [False, True])
def test_z_loss_equals_transformers(layers, one):
    switch = pytest.importorskip("transformers.models.switch_transformers.modeling_switch_transformers")
    layers = layers[:1] if one else layers
    wanted = gradients(switch.router_z_loss_func(torch.cat(layers)), layers)
    given = layers[0] if one else layers
    torch.testing.assert_close(gradients(moeblaze_ops.router_z_loss(given), layers), wanted)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_given_ids_and_unused_slots(layers, dtype):
    ids = [torch.randint(-1, E, (2, T // 2, K)).to(dtype) for _ in layers]
    mask = torch.rand(2, T // 2) > 0.3
    wanted = gradients(definition(layers, K, ids, mask), layers)
    torch.testing.assert_close(gradients(moeblaze_ops.load_balancing_loss(layers, K, ids=ids, mask=mask), layers), wanted)


def test_masked_z_loss(layers):
    mask = torch.rand(2, T // 2) > 0.3
    wanted = torch.stack([layer.logsumexp(-1).square()[mask].mean() for layer in layers]).mean()
    torch.testing.assert_close(moeblaze_ops.router_z_loss(layers, mask=mask), wanted)


def test_low_precision_is_summed_in_fp32(layers):
    low = [layer.detach().bfloat16().requires_grad_() for layer in layers]
    loss = moeblaze_ops.load_balancing_loss(low, K)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(gradients(loss, low), gradients(definition(low, K), low))


def test_even_load_costs_top_k():
    logits = torch.zeros(E, E, requires_grad=True)
    ids = torch.stack([torch.arange(E), (torch.arange(E) + 1) % E], 1)
    torch.testing.assert_close(moeblaze_ops.load_balancing_loss(logits, K, ids=ids), torch.tensor(float(K)))


class Largest(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_nothing_is_larger_than_the_logits(layers):
    with Largest() as seen:
        gradients(moeblaze_ops.load_balancing_loss(layers, K) + moeblaze_ops.router_z_loss(layers), layers)
    assert seen.numel == T * E


def test_losses_compile_whole(layers):
    torch._dynamo.reset()

    def loss(*layers):
        return moeblaze_ops.load_balancing_loss(layers, K) + moeblaze_ops.router_z_loss(layers)

    run = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(run(*layers), layers), gradients(loss(*layers), layers))


balance, z_loss = moeblaze_ops.load_balancing_loss, moeblaze_ops.router_z_loss


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: balance([], K), TypeError, "load_balancing_loss: logits must be a tensor, or a list of those of each layer"),
        (lambda x: balance(3, K), TypeError, "load_balancing_loss: logits must be a tensor, or a list"),
        (lambda x: balance([x, None], K), TypeError, "load_balancing_loss: logits must be a tensor, got None"),
        (
            lambda x: balance([x, x[:1]], K),
            ValueError,
            "load_balancing_loss: logits must have one shape [..., E], got [[2, 15, 6]",
        ),
        (lambda x: balance(x.long(), K), TypeError, "load_balancing_loss: logits must be bfloat16, float16"),
        (lambda x: balance(x, 0), ValueError, "load_balancing_loss: top_k must be between 1 and 6, the experts, got 0"),
        (lambda x: balance(x, 7), ValueError, "load_balancing_loss: top_k must be between 1 and 6, the experts, got 7"),
        (lambda x: balance(x, 2.0), TypeError, "load_balancing_loss: top_k must be an int, got 2.0"),
        (
            lambda x: balance(x, K, ids=x[..., :K]),
            TypeError,
            "load_balancing_loss: ids must be int32 or int64, got torch.float32",
        ),
        (lambda x: balance(x, K, ids=[]), ValueError, "load_balancing_loss: ids must be those of 1 layers, got 0"),
        (
            lambda x: balance(x, K, ids=torch.zeros(T, 3, dtype=torch.int64)),
            ValueError,
            "load_balancing_loss: ids must have shape [..., 2], a row for each token, got [30, 3]",
        ),
        (
            lambda x: balance(x, K, mask=x),
            ValueError,
            "load_balancing_loss: mask must have an element for each of 30 tokens, got",
        ),
        (lambda x: balance(x, K, mask=[1]), TypeError, "load_balancing_loss: mask must be a tensor, got a list"),
        (lambda x: z_loss(None), TypeError, "router_z_loss: logits must be a tensor, or a list of those of each layer, got None"),
        (lambda x: z_loss(x.to_sparse()), TypeError, "router_z_loss: logits must be dense"),
        (lambda x: z_loss(x, mask=torch.ones(3)), ValueError, "router_z_loss: mask must have an element for each of 30 tokens"),
    ],
)
def test_bad_calls(layers, call, error, message):
    with pytest.raises(error) as raised:
        call(layers[0].detach())
    assert str(raised.value).startswith(message)


def test_ids_of_no_expert_are_refused():
    with pytest.raises(ValueError, match="load_balancing_loss: ids must be below 4, the experts, got 4"):
        moeblaze_ops.load_balancing_loss(torch.randn(3, 4), 2, ids=torch.tensor([[0, 1], [2, 4], [-1, 3]]))
