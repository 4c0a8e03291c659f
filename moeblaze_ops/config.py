"""Every knob of the package, with its default. Set them before the first call that they should affect.

A value of the wrong type, one that is out of range and a name that is no knob raise where they are set.

A graph that ``torch.compile`` has compiled keeps the values it was compiled with; the values are part of the key of
the caches on disk, so another value never gets code that was compiled for this one.
"""

import sys
import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

arrived_rows: Literal["exact", "bound"] = "exact"
"""How long h is where tokens move to sharded experts. ``exact``: as many rows as arrived, which the host reads once a layer.
``bound``: room for every slot of every rank, and no host sync."""

check_expert_ids: bool = False
"""Raise for expert ids other than -1 outside [0, E), at the price of a host sync in ``dispatch``."""

check_tokens_per_rank: bool = True
"""Before tokens move, the ranks tell each other on the host how many they have, and raise where they differ. False: the caller
promises that they are as many on every rank."""

collective_multiprocessors: int | None = None
"""Multiprocessors that our persistent kernels leave to a collective that runs beside them, in backward of a layer whose tokens
move: as many as NCCL takes (``NCCL_MAX_CTAS``). None: not one; programs of such a kernel may have to wait for theirs then."""

experts_move: Literal["auto", "tokens", "weights"] = "auto"
"""What moves between ranks that share the experts of a proven layer (``shard_experts``): its tokens, its weights, or of the two
what is fewer bytes. Tokens must be as many on every rank to move; weights move for any number."""

hopper: Literal["auto", "off"] = "auto"
"""Which kernels run on Hopper GPUs: ``auto`` takes the Gluon kernels where they cover the shapes, ``off`` never does."""

idle_expert_grads: Literal["zeros", "none"] = "zeros"
"""What the parameters of an expert get that no token chose, where experts are modules of their own and the loop over them
skips it (``if idx.numel() == 0: continue``). Plain PyTorch leaves ``.grad`` None; a compiled graph has the same outputs every
time, and fills in zeros. AdamW skips a parameter whose gradient is None. With zeros it decays the weight, moves it on by the
momentum that it has, and lets both moments shrink: see ``docs`` of ``explain``. ``none``: such loops are left as written, and
``explain`` says so; experts stacked in one parameter have zeros there in plain PyTorch too, and are not concerned."""

keep: Literal["preactivation", "input", "auto"] = "preactivation"
"""What an expert layer keeps for backward where the call does not say; the values are those of ``moe(keep=...)``."""

layers_in_flight: int = 1
"""Expert layers whose kept tensors exist at the same time, 1 or more: ``keep="auto"`` makes that many fit the free memory."""

max_layer_transient_bytes: int | None = None
"""Bytes, 1 or more, that a layer with ``keep="input"`` or without gradients may allocate besides its results, weight gradients
among them. With more tokens than that allows, backward goes through ranges of rows, see ``row_ranges`` and ``range_plan``; if up to
16 would not do, and without gradients, the layer goes through chunks of tokens (1024 at least), and sums weight gradients in fp32
over them, which comes on top. None: a sixteenth of the memory of a GPU, no limit on CPU."""

max_transient_bytes: int | None = 512 << 20
"""Bytes, 1 or more, of the rows, one per routed slot, from which the output and the gradient of x are summed: they are computed
for ranges of columns, in turns and in one buffer, of this size unless 256 columns take more. None: all columns at once. The
value changes no bit of a result, but for the gradient of routing weights on an expert's input: a sum over all columns."""

strict: bool = False
"""Raise errors of the rewrite itself, instead of compiling the graph as it is with a warning."""


def snapshot() -> dict[str, object]:
    """The value of every knob, by name."""
    return {name: globals()[name] for name in sorted(__annotations__)}


class _Config(types.ModuleType):
    """This module, with every assignment checked against the knob's annotation."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__"):
            _check(name, value)
        super().__setattr__(name, value)


def _check(name: str, value: Any) -> None:
    if name not in _KNOBS:
        raise AttributeError(f"config: {name} must be one of the knobs {', '.join(_KNOBS)}, got a new name")
    kind = _KNOBS[name]
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value not in choices:
            error = ValueError if isinstance(value, str) else TypeError
            raise error(f"config: {name} must be one of {', '.join(choices)}, got {value!r}")
    elif kind is bool:
        if not isinstance(value, bool):
            raise TypeError(f"config: {name} must be True or False, got {value!r}")
    elif value is not None or type(None) not in get_args(kind):
        rule = "an int of 1 or more" + (", or None" if type(None) in get_args(kind) else "")
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"config: {name} must be {rule}, got {value!r}")
        if value < 1:
            raise ValueError(f"config: {name} must be {rule}, got {value}")


_KNOBS = get_type_hints(sys.modules[__name__])
sys.modules[__name__].__class__ = _Config
