"""Settings of torch with which tests compile in less time, and graphs that are compiled anew of kernels that are built once."""

import contextlib
import gc
from collections.abc import Iterator
from traceback import StackSummary

import torch._dynamo.config
import torch._dynamo.exc
import torch._dynamo.guards
import torch._dynamo.utils
import torch._functorch.config
import torch._inductor.config
from torch._subclasses import fake_tensor


class _StateOfNumbers(fake_tensor._CacheKeyState):
    """What operators give for sizes that are symbols is not kept: a loop over experts has other symbols in each pass.

    To keep it, each output is made twice, which is a quarter of what a test of such loops takes. Pages keep it.
    """

    def convert_sym_int(self, result, arg):
        raise fake_tensor._BypassDispatchCache("symbolic size")


def compile_quickly() -> None:
    """For the rest of this process; what is compiled stays the same."""
    fake_tensor._CacheKeyState = _StateOfNumbers
    # Dynamo flushes the CPU's caches and measures the guards of every frame that it compiled, for a log that nothing here reads.
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0
    # So are the metrics of every frame, with all settings of torch, and who called the compiler where a graph breaks: pytest.
    torch._dynamo.utils.record_compilation_metrics = lambda *args: None
    torch._dynamo.exc._extract_stack_with_positions = StackSummary
    # Graphs are small here, and there are thousands: no garbage is collected after each of them.
    torch._dynamo.config.run_gc_after_compile = False


def keep_what_is_imported() -> None:
    """What torch and the tests themselves consist of is no garbage: the collector need not go through it again and again.

    Nor through what a compile is about to drop: most of it has gone by itself when this many objects have come.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000, 20, 20)


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
