"""Draws the first picture of README: one layer's step and memory beside other libraries, of the committed data.

    python benchmarks/picture.py > docs/beside_peers.svg

A test holds the picture to what this prints.
"""

import json

from moeblaze_ops.bench import picture as draw
from tables import RESULTS, SHAPES

SHAPE = "fine"
NAMES = {
    "moeblaze": "moeblaze",
    "SonicMoE": "SonicMoE",
    "grouped_mm+compile": "grouped_mm + compile",
    "ScatterMoE": "ScatterMoE",
    "Liger-Kernel": "Liger-Kernel",
}


def picture() -> str:
    peers = json.loads((RESULTS / "beside_peers_h100.json").read_text())
    rows = {row["contender"]: row for row in peers["measurements"] if row["shape"] == SHAPE}
    versions = ", ".join(f"{name} {peers['versions'][name].split()[0]}" for name in ("SonicMoE", "ScatterMoE", "Liger-Kernel"))
    sizes = ", ".join(f"{letter} {size}" for letter, size in zip("TDFEK", SHAPES[SHAPE], strict=True))
    below = [
        f"{sizes}; bf16; {peers['device']}, torch {peers['torch']}, {peers['date']}; all in one run.",
        f"{versions}.",
    ]
    times = {label: rows[name]["step_ms"] for name, label in NAMES.items()}
    return draw(times, "peak memory of a step", {label: rows[name]["peak_mib"] for name, label in NAMES.items()}, below)


if __name__ == "__main__":
    print(picture())
