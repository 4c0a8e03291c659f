"""moeblaze: plain Mixture-of-Experts layers in, fused index-only kernels out, through ``torch.compile``.

Letters used in every tensor name of the project (``x_TD`` is a tensor of shape ``[T, D]``):

    T  tokens
    K  experts per token (``top_k``)
    N  routed slots, ``T * K``; also the rows of everything in expert order
    E  experts
    D  model width
    F  expert hidden width
    G  2 for a gated expert (gate, up), 1 for an ungated one
    P  parameters of an activation, its p0, p1 and so on
    B  rows of the block schedule, ``N // 128 + E + 1``

A *slot* is ``t * K + k``: token ``t``'s k-th choice. A *row* is a position in expert order: rows
``offsets_E1[e]`` to ``offsets_E1[e + 1]`` belong to expert ``e``.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file():
    # In a checkout `kernels/` and `lowering/` are siblings of this package, not children.
    __path__.append(str(_checkout))
del _checkout

__version__ = "0.2.0.dev0"

from moeblaze_ops import sources as _sources  # noqa: E402

_sources.DIGEST = _sources.digest(__path__, __version__)  # before what it is a digest of

from moeblaze_ops import config as _config  # noqa: E402
from moeblaze_ops.explain import explain  # noqa: E402
from moeblaze_ops.functional import moe  # noqa: E402
from moeblaze_ops.integrations.registration import register_when_imported as _register_when_imported  # noqa: E402

# A graph from a compiler's cache calls these ops without anything having traced or lowered them.
from moeblaze_ops.kernels.hopper import ops as _hopper_ops  # noqa: E402, F401
from moeblaze_ops.kernels.settings import set_settings as _set_settings  # noqa: E402
from moeblaze_ops.logs import follow_torch_logs as _follow_torch_logs  # noqa: E402
from moeblaze_ops.memory.estimate import memory_estimate  # noqa: E402
from moeblaze_ops.module import MoE  # noqa: E402
from moeblaze_ops.ops import register as _register  # noqa: E402
from moeblaze_ops.ops.accumulation import accumulate_grad  # noqa: E402
from moeblaze_ops.ops.route import route  # noqa: E402
from moeblaze_ops.ops.router_products import router_logits as _router_logits  # noqa: E402, F401
from moeblaze_ops.ops.router_sums import router_sums as _router_sums  # noqa: E402, F401
from moeblaze_ops.ops.sum_dropped import sum_dropped as _sum_dropped  # noqa: E402, F401
from moeblaze_ops.packing import pack_experts  # noqa: E402
from moeblaze_ops.report import report  # noqa: E402
from moeblaze_ops.routing.losses import load_balancing_loss, router_z_loss  # noqa: E402
from moeblaze_ops.routing.record import record_routing  # noqa: E402
from moeblaze_ops.routing.replay import replay_routing  # noqa: E402
from moeblaze_ops.routing.rounding import round_routing  # noqa: E402
from moeblaze_ops.routing.stats import routing_stats  # noqa: E402
from moeblaze_ops.verify import verify  # noqa: E402

if TYPE_CHECKING:
    from moeblaze_ops import config as config
    from moeblaze_ops import distributed as distributed
    from moeblaze_ops.compile import disable, enable, enabled
    from moeblaze_ops.compile.declare import declare
    from moeblaze_ops.distributed.shard_experts import shard_experts

__all__ = [
    "MoE", "accumulate_grad", "declare", "disable", "enable", "enabled", "explain", "load_balancing_loss", "memory_estimate",
    "moe", "pack_experts", "record_routing", "replay_routing", "report", "round_routing", "route", "router_z_loss",
    "routing_stats", "shard_experts", "verify",
]  # fmt: skip

_MODULES = ("config", "distributed", "integrations")

_follow_torch_logs()
_register_when_imported()
_set_settings(_config)

# Ops called without the switch, too, need its cache key and its lowerings.
_register.on_trace(
    lambda: import_module("moeblaze_ops.compile").on_trace(), lambda: import_module("moeblaze_ops.compile").follow_functions()
)


if not TYPE_CHECKING:  # to a type checker it would mean that any name is there

    def __getattr__(name: str):
        # The switch imports torch.compile, which a program that only calls the ops does not pay for.
        if name in ("disable", "enable", "enabled"):
            return getattr(import_module("moeblaze_ops.compile"), name)
        if name == "declare":
            return import_module("moeblaze_ops.compile.declare").declare
        if name == "shard_experts":
            import_module("moeblaze_ops.compile")  # which lets its layers start as written where Dynamo cannot capture them whole
            return import_module("moeblaze_ops.distributed").shard_experts
        if name in _MODULES:
            return import_module(f"moeblaze_ops.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
