"""One small training step on each kernel path, for compute-sanitizer: ``make sanitize`` on a machine with a GPU."""

import torch

import moeblaze_ops
from moeblaze_ops import config

T, D, F, E, K = 333, 128, 136, 5, 2


def step(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": dtype}
    x = torch.randn(T, D, **options, requires_grad=True)
    logits = torch.randn(T, E, **options, requires_grad=True)
    w_up = torch.randn(E, 2 * F, D, **options, requires_grad=True)
    b_up = torch.randn(E, 2 * F, **options, requires_grad=True)
    w_down = torch.randn(E, D, F, **options, requires_grad=True)
    b_down = torch.randn(E, D, **options, requires_grad=True)
    weights, experts = moeblaze_ops.route(logits, K, renormalize=True)
    experts = experts.masked_fill(experts == 3, -1)  # an expert without tokens, and unused slots
    for keep in ("preactivation", "input"):
        out = moeblaze_ops.moe(x, weights, experts, w_up, w_down, b_up=b_up, b_down=b_down, keep=keep)
        check(out, [x, logits, w_up, b_up, w_down, b_down])
    # In three ranges of rows or more.
    parameters = [[w_up.unflatten(1, (2, F))], [b_up.unflatten(1, (2, F))], [w_down.transpose(1, 2)], [b_down]]
    routed = (weights, *torch.ops.moeblaze.dispatch(experts, E), "swiglu", False, 60_000 * dtype.itemsize)
    check(torch.ops.moeblaze.expert_mlp_ranged(x, *parameters, *routed), [x, logits, w_up, b_up, w_down, b_down])


def check(out: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    gradients = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert all(t.isfinite().all() for t in (out, *gradients))


def main() -> None:
    for path in ("off", "auto"):
        config.hopper = path
        for dtype in (torch.bfloat16, torch.float32):
            step(dtype)
            print(f"hopper={path} {dtype}: done", flush=True)


if __name__ == "__main__":
    main()
