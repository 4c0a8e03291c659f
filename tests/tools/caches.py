"""Graphs that are compiled anew, of kernels that are built once."""

import contextlib
from collections.abc import Iterator

import torch._functorch.config
import torch._inductor.config


@contextlib.contextmanager
def graphs_compiled_anew() -> Iterator[None]:
    """A context in which no compiled graph comes out of a cache: one that does is not rewritten again.

    ``force_disable_caches`` would have g++ build each kernel again as well, which takes longer than all else. They are kept by
    their source.
    """
    with (
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
