"""The order of the products of an einsum, for which torch asks opt_einsum where it is installed: by sizes, which it compares."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.backends import opt_einsum
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols


class _LeftToRight:
    """The library, which is not asked about sizes that only the data tell."""

    def __init__(self, library: Any):
        self._library = library

    def contract_path(self, equation: str, *operands: Tensor, **options: Any) -> tuple[Any, Any]:
        """The pairs of operands to contract, each result last among the rest, and what the library says of them."""
        if any(map(free_unbacked_symbols, operands)):
            return [(0, 1)] * (len(operands) - 1), None
        return self._library.contract_path(equation, *operands, **options)


@contextmanager
def paths_of_any_sizes() -> Iterator[None]:
    """A context in which einsums of three operands or more are traced where a size is one that only the data tell."""
    get = opt_einsum.get_opt_einsum
    library = get()
    try:
        if library is not None:
            opt_einsum.get_opt_einsum = lambda: _LeftToRight(library)
        yield
    finally:
        opt_einsum.get_opt_einsum = get
