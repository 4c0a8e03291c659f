"""``TORCH_LOGS="moeblaze"``: the loggers below ``moeblaze_ops`` at the level and with the handlers of torch's own.

torch reads the variable while it is imported, and refuses a name that is neither a log of its own nor a module. So there is a
package of that name (``torch_logs``, as it is installed), whose logger torch sets up; this package, imported later, takes over
what it finds there.
"""

import logging

from torch._logging._internal import register_log

NAME = "moeblaze"


def follow_torch_logs() -> None:
    """Register the log ``moeblaze`` with torch, and give our loggers what ``TORCH_LOGS`` asked for under this name."""
    asked, own = logging.getLogger(NAME), logging.getLogger("moeblaze_ops")
    register_log(NAME, own.name)
    if asked.level != logging.NOTSET:
        own.setLevel(asked.level)
        for handler in asked.handlers:
            own.addHandler(handler)
        own.propagate = asked.propagate
