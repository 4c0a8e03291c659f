"""Draws the first picture of README: one layer's step and memory beside other libraries, of the committed data.

    python benchmarks/picture.py > docs/beside_peers.svg

A test holds the picture to what this prints.
"""

import json

from tables import RESULTS, SHAPES

SHAPE = "fine"
NAMES = {
    "moeblaze": "moeblaze",
    "SonicMoE": "SonicMoE",
    "grouped_mm+compile": "grouped_mm + compile",
    "ScatterMoE": "ScatterMoE",
    "Liger-Kernel": "Liger-Kernel",
}
STYLE = """
  text { font: 14px Helvetica, Arial, sans-serif; fill: #1f2933 }
  .title { font-weight: bold } .small { font-size: 12px; fill: #616e7c } .end { text-anchor: end }
  rect { fill: #9aa5b1 } .ours { fill: #d9480f }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb } .small { fill: #9aa5b1 } rect { fill: #616e7c } .ours { fill: #f76707 }
  }
"""


def bars(left: int, width: int, title: str, unit: str, values: dict[str, float | None]) -> list[str]:
    """One bar a contender, as long as its value; a line of text where nothing was measured."""
    scale, lines = width / max(filter(None, values.values())), [f'<text x="{left}" y="22" class="title">{title}</text>']
    for number, (name, value) in enumerate(values.items()):
        top, ours = 38 + 30 * number, ' class="ours"' if name == "moeblaze" else ""
        if value is None:
            lines.append(f'<text x="{left}" y="{top + 16}" class="small">not recorded</text>')
            continue
        lines.append(f'<rect x="{left}" y="{top}" width="{scale * value:.0f}" height="22" rx="2"{ours}/>')
        lines.append(
            f'<text x="{left + scale * value + 8:.0f}" y="{top + 16}">{value:,.{1 if unit == "ms" else 0}f} {unit}</text>'
        )
    return lines


def picture() -> str:
    peers = json.loads((RESULTS / "beside_peers_h100.json").read_text())
    rows = {row["contender"]: row for row in peers["measurements"] if row["shape"] == SHAPE}
    h200 = json.loads((RESULTS / "layer_h200.json").read_text())["measurements"]
    peak = {row["contender"]: row["peak_mib"] for row in h200 if row["shape"] == SHAPE}
    peaks = {name: rows[name]["peak_mib"] or peak.get(name) for name in NAMES}
    names = [f'<text x="190" y="{54 + 30 * i}" class="end">{label}</text>' for i, label in enumerate(NAMES.values())]
    versions = ", ".join(f"{name} {peers['versions'][name].split()[0]}" for name in ("SonicMoE", "ScatterMoE", "Liger-Kernel"))
    sizes = ", ".join(f"{letter} {size}" for letter, size in zip("TDFEK", SHAPES[SHAPE], strict=True))
    below = [
        f"{sizes}; bf16; {peers['device']}, torch {peers['torch']}, {peers['date']}; all in one run.",
        f"{versions}.",
        "The memory of grouped_mm is of a run on an H200, in which moeblaze's was the same.",
    ]
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 256" role="img" aria-label="One layer: a step and its memory">',
        f"<style>{STYLE}</style>",
        *names,
        *bars(202, 250, "forward + backward", "ms", {name: rows[name]["step_ms"] for name in NAMES}),
        *bars(570, 240, "peak memory of a step", "MiB", peaks),
        *(f'<text x="20" y="{210 + 18 * i}" class="small">{line}</text>' for i, line in enumerate(below)),
        "</svg>",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(picture())
