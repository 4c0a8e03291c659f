"""Errors of the rewrite itself: a compile goes on without it, unless ``config.strict``."""

import logging
import traceback

from moeblaze_ops import config

log = logging.getLogger(__name__)

_reported: set[tuple[str, int | None]] = set()


def tolerate(error: Exception) -> str:
    """The text of an error that leaves a graph or a layer as it was.

    The first from each place in the code is logged as a warning, with its traceback.

    Raises:
        Exception: ``error`` itself, where ``config.strict`` is set.
    """
    if config.strict:
        raise error
    text = f"{type(error).__name__}: {error}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = (frame.filename, frame.lineno)
    if place not in _reported:
        _reported.add(place)
        log.warning("an error in the rewrite, which leaves the code as it is: %s", text, exc_info=error)
    return text
