"""What a measurement ran on, and the file that it goes to."""

import argparse
import datetime
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
import triton


def describe() -> dict[str, str]:
    """Device, versions and date, for the head of a results file."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def command_line(description: str | None) -> argparse.ArgumentParser:
    """What takes a script's arguments, of which ``--json`` is one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write measurements, device and versions to this file")
    return parser


def device(name: str) -> str:
    """The argument ``--device``: a GPU has to be there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no GPU here, take --device cpu")
    return name


def command(arguments: argparse.Namespace) -> dict[str, object]:
    """What was asked for; not where the results went."""
    return {name: value for name, value in vars(arguments).items() if name not in ("json", "plot", "trace")}


def save(arguments: argparse.Namespace, measurements: Iterable[object], **more: object) -> None:
    """Writes dataclasses of measurements, what they ran on and what was asked for to the file of ``--json``, if there is one."""
    if arguments.json:
        rows = [asdict(row) for row in measurements]
        report = {**describe(), **more, "command": command(arguments), "measurements": rows}
        Path(arguments.json).write_text(json.dumps(report, indent=1))
