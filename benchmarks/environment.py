"""What a measurement ran on."""

import argparse
import datetime
import platform

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


def command(arguments: argparse.Namespace) -> dict[str, object]:
    """What was asked for; not where the results went."""
    return {name: value for name, value in vars(arguments).items() if name not in ("json", "plot")}
