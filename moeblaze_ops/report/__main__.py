"""``python -m moeblaze_ops.report``: runs a script unchanged with rewriting on, and says at its end what was rewritten.

    python -m moeblaze_ops.report train.py --steps 10
    python -m moeblaze_ops.report -m package.train --steps 10
    torchrun --nproc-per-node 2 -m moeblaze_ops.report train.py    # the first rank says it

The report goes to the standard error, so that what the script prints stays what it is. So does its exit status.
"""

import os
import runpy
import sys
from collections.abc import Sequence

from moeblaze_ops.report import report

USAGE = "usage: python -m moeblaze_ops.report (SCRIPT | -m MODULE) [ARGUMENT ...]"


def main(arguments: Sequence[str]) -> None:
    as_module = arguments[:1] == ["-m"]
    command = list(arguments[as_module:])
    if command in (["-h"], ["--help"]):
        print(f"{USAGE}\n\n{__doc__}")
        return
    if not command or command[0].startswith("-"):
        sys.exit(USAGE)
    if not as_module and not os.path.exists(command[0]):
        sys.exit(f"{USAGE}\nSCRIPT must be a file that is there, got {command[0]}")
    from moeblaze_ops.compile import enable

    enable()
    sys.argv = command
    # As Python itself has it: the folder of a script, that in which one is for a module.
    sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.abspath(command[0]))
    try:
        if as_module:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
    finally:
        if os.environ.get("RANK", "0") == "0":
            sys.stdout.flush()
            print(report(), file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
