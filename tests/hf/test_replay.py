"""Routing of transformers' models, recorded and replayed: as they are, through the registry, and rewritten."""

import copy

import pytest
import torch

import moeblaze_ops
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytest.importorskip("transformers")

from tests.hf.test_models import make_model

ROUTER = "model.layers.{}.mlp.gate"


def step(model, tokens, run=None):
    model.zero_grad()
    logits = (model if run is None else run)(tokens).logits
    logits.float().square().mean().backward()
    return {"logits": logits.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("run", ["as it is", "registry", "rewritten"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_two_layers(name, run):
    torch.manual_seed(0)
    if run == "registry":
        from moeblaze_ops.integrations import transformers as integration

        integration.register()
    model = make_model(name, layers=2, experts="moeblaze" if run == "registry" else None).train()
    tokens = torch.randint(3, 64, (2, 7))
    with moeblaze_ops.record_routing(model) as record, torch.no_grad():
        model(tokens)
    assert sorted(record.ids) == [ROUTER.format(layer) for layer in range(2)]
    assert all(ids.shape == (14, 2) for ids in record.ids.values())

    other = copy.deepcopy(model)
    with torch.no_grad():
        for path, parameter in other.named_parameters():
            if "mlp.gate." in path:
                parameter.copy_(torch.randn_like(parameter))
    torch._dynamo.reset()
    with rewriting_backend() as backend, moeblaze_ops.compile.recording() as records:
        called = torch.compile(other, backend=backend) if run == "rewritten" else other
        with moeblaze_ops.replay_routing(other, record):
            got = step(other, tokens, called)
    assert run != "rewritten" or len(rewritten_in(records)) == 2
    with moeblaze_ops.record_routing(other) as own:
        before = other(tokens).logits
    assert any(not torch.equal(own.ids[layer], record.ids[layer]) for layer in record.ids)
    assert not torch.allclose(before, got["logits"])
    # The oracle: scores so far apart that the router chooses as it was told to.
    torch.testing.assert_close(got, forced(other, record, tokens), atol=1e-5, rtol=1e-4)
    assert all(got[f"{path}.weight"].abs().sum() > 0 for path in gates(other))


def gates(model):
    return [name for name, _ in model.named_modules() if name.endswith("mlp.gate")]


def forced(model, record, tokens):
    """A step in which ``torch.topk`` itself is another function for the calls that choose experts."""
    topk, order = torch.topk, iter(record.ids[name] for name in sorted(record.ids))
    width = record.widths[next(iter(record.ids))]

    def told(scores, k, dim=-1, largest=True, sorted=True):
        if k != 2 or scores.shape[-1] != width:
            return topk(scores, k, dim, largest, sorted)
        ids = next(order).reshape(*scores.shape[:-1], k)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", told)
        patch.setattr(torch.Tensor, "topk", told)
        return step(model, tokens)
