"""The norm of gradients where some are sharded on one mesh, some on another and some on none."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients in place so that their norm is at most ``max_norm``; every rank of the model's meshes calls this.

    ``torch.nn.utils.clip_grad_norm_`` for a model with sharded experts: it takes no plain tensors beside DTensors, nor DTensors
    of several meshes. Gradients of parameters that are no DTensors must be the same on every rank.

    Args:
        parameters: those without a gradient are passed over.
        max_norm, norm_type, error_if_nonfinite: as for torch's.

    Returns:
        The norm over all ranks, before scaling: a plain scalar, the same on every rank.
    """
    with_gradient = [p for p in parameters if p.grad is not None]
    by_mesh: dict[object, list[Tensor]] = {}
    for p in with_gradient:
        by_mesh.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
    norms = []
    for held in by_mesh.values():
        norm = nn.utils.get_total_norm([p.grad for p in held], norm_type)
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    total = nn.utils.get_total_norm(norms, norm_type, error_if_nonfinite)
    for held in by_mesh.values():
        nn.utils.clip_grads_with_norm_(held, max_norm, total)
    return total
