"""The options of train_moe_lm.py. Nothing here imports torch, which takes seconds: a wrong option is said at once."""

import argparse
from collections.abc import Callable
from pathlib import Path

PRESET_NAMES = ["cpu", "gpu", "tiny"]
DEFAULT_MINUTES = 6.0

WAYS = {
    "eager": "eager",
    "compile": "compile",
    "moeblaze": "moeblaze",
    "every": "compile, all",
}
"""`every` runs all experts on all tokens, the others each expert on those that chose it."""


def positive(kind: type) -> Callable[[str], int | float]:
    """Returns a parser of numbers of this kind above zero, for argparse."""

    def parse(text: str) -> int | float:
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not 0 < number < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
        return number

    return parse


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda when there is a GPU")
    parser.add_argument("--preset", choices=PRESET_NAMES, help="size of the model and batch; default: cpu or gpu, by device")
    parser.add_argument("--steps", type=positive(int), help="training steps of each way")
    parser.add_argument(
        "--minutes",
        type=positive(float),
        default=DEFAULT_MINUTES,
        help=f"time for training, shared by the ways: one that has used its share stops early; default: {DEFAULT_MINUTES:g}",
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="folder of the plot and the numbers")
    return parser
