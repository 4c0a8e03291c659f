"""True if a trace is looking; knows nothing of Triton, which a machine without a GPU may lack."""

from torch._library.triton import is_wrap_triton_enabled


def is_traceable() -> bool:
    """True if what is launched has to be visible to a trace; the eager implementations of the ops switch that off."""
    return is_wrap_triton_enabled()
