"""moeblaze: plain Mixture-of-Experts layers in, fused index-only kernels out, through ``torch.compile``.

Letters used in every tensor name of the project (``x_TD`` is a tensor of shape ``[T, D]``):

    T  tokens
    K  experts per token (``top_k``)
    N  routed slots, ``T * K``; also the rows of everything in expert order
    E  experts
    D  model width
    F  expert hidden width
    G  2 for a gated expert (gate, up), 1 for an ungated one
    B  rows of the block schedule, ``N // 128 + E + 1``

A *slot* is ``t * K + k``: token ``t``'s k-th choice. A *row* is a position in expert order: rows
``offsets_E1[e]`` to ``offsets_E1[e + 1]`` belong to expert ``e``.
"""

from importlib import import_module
from pathlib import Path

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file():
    # In a checkout `kernels/` and `lowering/` are siblings of this package, not children.
    __path__.append(str(_checkout))
del _checkout, Path

__version__ = "0.1.0"

from moeblaze_ops import sources as _sources  # noqa: E402

_sources.DIGEST = _sources.digest(__path__)  # before what it is a digest of

from moeblaze_ops.explain import explain  # noqa: E402
from moeblaze_ops.functional import moe  # noqa: E402

# A graph from a compiler's cache calls these ops without anything having traced or lowered them.
from moeblaze_ops.kernels.hopper import ops as _hopper_ops  # noqa: E402, F401
from moeblaze_ops.memory.estimate import memory_estimate  # noqa: E402
from moeblaze_ops.module import MoE  # noqa: E402
from moeblaze_ops.ops.accumulation import accumulate_grad  # noqa: E402
from moeblaze_ops.ops.route import route  # noqa: E402
from moeblaze_ops.ops.router_products import router_logits as _router_logits  # noqa: E402, F401
from moeblaze_ops.packing import pack_experts  # noqa: E402

__all__ = ["MoE", "accumulate_grad", "disable", "enable", "enabled", "explain", "memory_estimate", "moe", "pack_experts", "route"]


def __getattr__(name: str):
    # The switch imports torch.compile, which a program that only calls the ops does not pay for.
    if name in ("disable", "enable", "enabled"):
        return getattr(import_module("moeblaze_ops.compile"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
