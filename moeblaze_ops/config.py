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

batch_invariant: bool = False
"""The bits of a token's output, and of the gradients of its ``x`` and its routing weights, depend on no other token, nor on how
many there are: those of a step of generation are those of training. ``docs/batch_invariance.md`` says what rounds where, and what
it costs: between ranks weights move, never tokens, and layers that keep x go through backward as a whole."""

check_expert_ids: bool = False
"""Raise for expert ids other than -1 outside [0, E) on every device, at the price of a host sync in ``dispatch``; ``moe`` does on
a CPU either way."""

collective_multiprocessors: int | None = None
"""Multiprocessors that our persistent kernels leave to a collective that runs beside them, in backward of a layer whose tokens
move by NCCL: as many as it takes (``NCCL_MAX_CTAS``). None: not one; programs of such a kernel may have to wait then."""

exchange: Literal["auto", "all_gather", "all_to_all"] = "auto"
"""How tokens reach the experts of other ranks and come back: ``all_gather`` brings each to every rank, and a reduce-scatter sums;
``all_to_all`` brings each once to every rank that has an expert of it, after a host read of how many go where. ``auto``: once to
each host that has one, and on from there, where ranks are of several hosts; else the all-to-all where there are more ranks than
experts per token, which is fewer bytes then. ``auto`` keeps the all-gather where ``arrived_rows`` is ``bound``, which promises no
host read, or copy engines move tokens (``transport``). The same on every rank."""

experts_move: Literal["auto", "tokens", "weights"] = "auto"
"""What moves between ranks that share the experts of a proven layer (``shard_experts``): its tokens, its weights, or of the two
what is fewer bytes for ``tokens_per_rank``: tokens where that is None. The same on every rank."""

hopper: Literal["auto", "off"] = "auto"
"""Which kernels run on Hopper GPUs: ``auto`` takes the Gluon kernels where they cover the shapes, ``off`` never does."""

idle_expert_grads: Literal["zeros", "none"] = "zeros"
"""What compiled layers give the parameters of an expert that no token chose, where the program as written leaves ``.grad``
None: experts are modules of their own, and the loop skips those without tokens (``if idx.numel() == 0: continue``).

``zeros``: a gradient of zeros, since a compiled graph has the same outputs in every step; hooks on the gradient run. An
optimizer steps on zeros and skips None. In 10 idle steps at lr 1e-3 and weight decay 0.1, after 100 steps with gradients,
AdamW decays the weight by 0.1%, moves each element by 2.2 lr on average with the momentum that is left, shrinks the momentum to
35% and the second moment to 99%; with None all of that stays as it is. An expert that never had a token only decays.

``none``: such loops are left as written, and ``explain`` says so. Experts stacked in one parameter have zeros there in plain
PyTorch too, and are rewritten either way."""

keep: Literal["preactivation", "h8", "input", "auto"] = "preactivation"
"""What an expert layer keeps for backward where the call does not say; the values are those of ``moe(keep=...)``. A layer that is
rewritten and has no activation has its h in forward, and keeps it as it is with ``h8``."""

layers_in_flight: int = 1
"""Expert layers whose kept tensors exist at the same time, 1 or more: ``keep="auto"`` makes that many fit the free memory."""

max_layer_transient_bytes: int | None = None
"""Bytes, 1 or more, that a layer with ``keep="input"`` or without gradients may allocate besides its results.

Its weight gradients count as well. With more tokens than that allows, backward goes through ranges of rows, see
``row_ranges`` and ``range_plan``. If up to 16 ranges would not do, and without gradients, the layer goes through chunks of
tokens (1024 at least), and sums weight gradients in fp32 over them, which comes on top. None: a sixteenth of the memory of
a GPU, no limit on CPU."""

max_transient_bytes: int | None = 512 << 20
"""Bytes, 1 or more, of the rows, one per routed slot, from which the output and the gradient of x are summed: they are computed
for ranges of columns, in turns and in one buffer, of this size unless 256 columns take more. None: all columns at once. The
value changes no bit of a result, but for the gradient of routing weights on an expert's input: a sum over all columns."""

quiet: bool = False
"""Say nothing when a model is first compiled. A line is logged otherwise, at warning level where a layer was left as written."""

strict: bool = False
"""Raise errors of the rewrite itself, instead of compiling the graph as it is with a warning."""

tokens_per_rank: int | None = None
"""No rank has more tokens than that in a call of a layer whose tokens move: 1 or more, the same on every rank. Each sends so
many rows; one with more raises, alone. None: the hosts tell each other before tokens move how many they have, and each sends
as many rows as the largest number."""

transport: Literal["auto", "nccl", "copies"] = "auto"
"""What moves tokens between ranks that share experts: collectives of the process group (``nccl``; gloo on CPUs), or copy engines
of GPUs that see each other's memory (``copies``). ``auto``: copies where the ranks are the processes of one host with NVLink
between any two GPUs. An all-to-all (``exchange``) is a collective whatever this is. The same on every rank."""

verify: Literal["off", "first"] = "off"
"""``first``: the first run of each graph with rewritten layers is compared with the graph as it was, outputs and gradients;
results that differ raise ``comparison.VerificationError``, and what is needed to repeat it is written to disk. The graph runs
four times then, in three dtypes at most. What comes out of PyTorch's caches on disk is compared as well."""


def snapshot() -> dict[str, object]:
    """The value of every knob that decides what is compiled, by name."""
    return {name: globals()[name] for name in sorted(__annotations__) if name != "quiet"}


class _Config(types.ModuleType):
    """This module, with every assignment checked against the knob's annotation."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__"):
            _check(name, value)
            _check_together({**snapshot(), name: value})
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


def _check_together(values: dict[str, object]) -> None:
    if values["batch_invariant"] and values["experts_move"] == "tokens":
        raise ValueError("config: experts_move must not be tokens with batch_invariant: ranks round parts of a token's sum")


_KNOBS = get_type_hints(sys.modules[__name__])
sys.modules[__name__].__class__ = _Config
