"""``routing_stats``: how evenly the routers of a model use their experts, counted on the device."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeblaze_ops.routing.choice import Choice
from moeblaze_ops.routing.record import watching


@dataclass(frozen=True)
class LayerStats:
    """Counts of one layer: slots by expert, and tokens. Reading anything but the tensors waits for the device.

    ``counts_E`` and ``dropped`` (slots without an expert, whose id is negative) are int64, ``num_tokens`` an int.
    """

    counts_E: Tensor
    dropped: Tensor
    num_tokens: int

    @property
    def load_E(self) -> Tensor:
        """The share of slots of each expert, fp32; zeros where nothing was chosen."""
        return self.counts_E / self.counts_E.sum().clamp(min=1)

    @property
    def max_over_mean(self) -> float:
        """The largest load over the mean: 1 where the load is even."""
        return (self.load_E.max() * self.load_E.numel()).item()

    @property
    def entropy(self) -> float:
        """Of the load, in units of that of an even one: 1 where the load is even, 0 where one expert has all."""
        if self.counts_E.numel() == 1:
            return 1.0
        return (torch.special.entr(self.load_E).sum() / torch.tensor(self.load_E.numel()).log()).item()

    @property
    def dead(self) -> int:
        """Experts that were never chosen."""
        return int((self.counts_E == 0).sum())

    def __str__(self) -> str:
        return f"{self.num_tokens:8} {self.max_over_mean:9.2f} {self.entropy:8.3f} {self.dead:5} {int(self.dropped):8}"


class RoutingStats:
    """``LayerStats`` by the name of the module that chooses."""

    def __init__(self) -> None:
        self._layers: dict[str, LayerStats] = {}

    def __getitem__(self, name: str) -> LayerStats:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def add(self, name: str, choice: Choice) -> None:
        ids = choice.ids_TK.long().reshape(-1)
        used = ids >= 0
        counts_E = ids.new_zeros(choice.width).index_add(0, ids.clamp(min=0), used.long())
        dropped, num_tokens = (~used).sum(), choice.ids_TK.shape[0]
        if (before := self._layers.get(name)) is not None:
            counts_E, dropped = before.counts_E + counts_E, before.dropped + dropped
            num_tokens += before.num_tokens
        self._layers[name] = LayerStats(counts_E, dropped, num_tokens)

    def __str__(self) -> str:
        width = max(32, *map(len, self._layers), 0)
        head = f"{'layer':{width}} {'tokens':>8} {'max/mean':>9} {'entropy':>8} {'dead':>5} {'dropped':>8}"
        return "\n".join([head, *(f"{name:{width}} {layer}" for name, layer in self._layers.items())])

    __repr__ = __str__


@contextlib.contextmanager
def routing_stats(model: nn.Module, *, layers: Callable[[str, nn.Module], bool] | None = None) -> Iterator[RoutingStats]:
    """Count what the routers of ``model`` choose while the context is open, without waiting for the device.

        with moeblaze_ops.routing_stats(model) as stats, torch.no_grad():
            model(tokens)
        print(stats)

    What is a choice, ``layers`` and errors are as for ``record_routing``. Whatever is compiled runs as written in the meantime:
    open it for a step now and then.
    """
    stats = RoutingStats()
    with watching("routing_stats", model, layers, stats.add):
        yield stats
