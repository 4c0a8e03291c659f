"""The names of Triton's Gluon dialect that the Hopper kernels use, the same for Triton 3.6 to 3.9.

Gluon is experimental and renames things: this is the only file that touches a name which drifts. Importing it
raises ImportError or AttributeError where Gluon is missing or too different; ``kernels/select.py`` turns that into a reason.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "PropagateNan",
    "TensorDescriptor",
    "aggregate",
    "copy_rows",
    "copy_rows_arrive",
    "copy_rows_commit",
    "copy_rows_wait",
    "fence_async_shared",
    "gdc_launch_dependents",
    "gdc_wait",
    "gl",
    "gluon",
    "mbarrier",
    "reinterpret",
    "shared_memory_descriptor",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


def _newest(owner, *names):
    """The first of ``names`` that ``owner`` has: 3.9 keeps old names that raise when called."""
    return next(getattr(owner, name) for name in (*names[:-1], names[-1]) if hasattr(owner, name))


tma_load = _newest(tma, "async_load", "async_copy_global_to_shared")
tma_store = _newest(tma, "async_store", "async_copy_shared_to_global")
tma_store_wait = tma.store_wait
copy_rows = _newest(async_copy, "async_load", "async_copy_global_to_shared")
copy_rows_arrive = async_copy.mbarrier_arrive
copy_rows_commit = async_copy.commit_group
copy_rows_wait = async_copy.wait_group
reinterpret = _newest(shared_memory_descriptor, "reinterpret", "_reinterpret")
