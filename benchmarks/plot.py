"""Charts of the committed layer measurements, for README: time against the cuBLAS bound, and memory.

python benchmarks/plot.py benchmarks/results/layer_h200.json benchmarks/results/layer_h200.png
"""

import argparse
import json

NAMES = {"grouped_mm": "grouped_mm, eager", "grouped_mm+compile": "grouped_mm + torch.compile", "moeblaze": "moeblaze"}
COLORS = {"grouped_mm": "#b9c0c9", "grouped_mm+compile": "#7b8794", "moeblaze": "#d9480f"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="measurements that bench_layer.py wrote")
    parser.add_argument("target", help="the PNG file to write")
    arguments = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with open(arguments.source) as file:
        report = json.load(file)
    rows = {(row["shape"], row["contender"]): row for row in report["measurements"] if not row["failure"]}
    shapes = list(dict.fromkeys(shape for shape, contender in rows if contender == "bound"))
    figure, (time_axis, memory_axis) = plt.subplots(1, 2, figsize=(11, 3.8))
    width = 0.8 / len(NAMES)
    for i, (contender, label) in enumerate(NAMES.items()):
        at = [j + (i - 1) * width for j in range(len(shapes))]
        ratios = [rows[s, "bound"]["step_ms"] / rows[s, contender]["step_ms"] for s in shapes]
        kept = [rows[s, contender]["kept_mib"] / 1024 for s in shapes]
        peaks = [rows[s, contender]["peak_mib"] / 1024 for s in shapes]
        bars = time_axis.bar(at, ratios, width, label=label, color=COLORS[contender])
        time_axis.bar_label(bars, fmt="%.2f", fontsize=7)
        memory_axis.bar(at, peaks, width, color=COLORS[contender], alpha=0.45)
        memory_axis.bar(at, kept, width, color=COLORS[contender])
    time_axis.axhline(1, color="black", linewidth=0.8, linestyle=":")
    time_axis.set_title("forward + backward: speed relative to six balanced torch.bmm", fontsize=9)
    memory_axis.set_title("GiB kept for backward (solid) and at the peak (pale)", fontsize=9)
    for axis in (time_axis, memory_axis):
        axis.set_xticks(range(len(shapes)), shapes)
        axis.spines[["top", "right"]].set_visible(False)
    time_axis.set_ylim(0, 1.2)
    time_axis.legend(fontsize=7, loc="upper center", ncols=3, frameon=False)
    figure.suptitle(f"{report['device']}, torch {report['torch']}, triton {report['triton']}, {report['date']}", fontsize=8)
    figure.tight_layout()
    figure.savefig(arguments.target, dpi=130)


if __name__ == "__main__":
    main()
