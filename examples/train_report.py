"""What train_moe_lm.py shows at its end: one table, the numbers as JSON, and a plot."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class Result:
    """One way of training: times in seconds, memory in bytes; `peak_bytes` is None on a CPU."""

    way: str
    label: str
    losses: list[float]
    step_seconds: float
    first_step_seconds: float
    kept_bytes: int
    peak_bytes: int | None
    rewritten: str


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """Returns the largest absolute difference between two loss curves of one length."""
    return max(abs(a - b) for a, b in zip(losses, reference, strict=True))


def format_table(results: list[Result]) -> str:
    """Returns a text table, one row per way; ratios and differences are against the first row."""
    first = results[0]
    header = ["", "step", "first step", "kept for backward", "peak memory", "last loss", "loss differs by", "rewritten"]
    rows = [
        [
            result.label,
            f"{result.step_seconds * 1e3:.1f} ms",
            f"{result.first_step_seconds:.1f} s",
            f"{result.kept_bytes / MIB:.1f} MiB",
            "-" if result.peak_bytes is None else f"{result.peak_bytes / MIB:.0f} MiB",
            f"{result.losses[-1]:.4f}",
            "-" if result is first else f"{largest_difference(result.losses, first.losses):.1e}",
            result.rewritten,
        ]
        for result in results
    ]
    if all(result.peak_bytes is None for result in results):
        column = header.index("peak memory")
        header, *rows = ([cell for i, cell in enumerate(row) if i != column] for row in [header, *rows])
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in [header, *rows]]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def save_numbers(results: list[Result], title: str, folder: Path) -> Path:
    """Writes everything that was measured as JSON, and returns its path."""
    path = folder / "train_moe_lm.json"
    path.write_text(json.dumps({"title": title, "results": [asdict(result) for result in results]}, indent=1) + "\n")
    return path


def save_plot(results: list[Result], title: str, folder: Path) -> Path | str:
    """Draws the loss curves and the memory, and returns the path of the PNG, or why there is none."""
    try:
        import matplotlib
    except ImportError:
        return "none, matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (loss_axes, memory_axes) = pyplot.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 2))
    for i, result in enumerate(results):
        # The curves coincide: the later ones are thinner, so that each can be seen.
        loss_axes.plot(result.losses, label=result.label, linewidth=7 / (1 + 2 * i), alpha=0.8)
    loss_axes.set(xlabel="step", ylabel="loss (nats per byte)", title="training loss")
    loss_axes.legend()

    labels = [result.label.replace(" + ", "\n+ ") for result in results]
    bars = memory_axes.bar(labels, [result.kept_bytes / MIB for result in results], color=[f"C{i}" for i in range(len(results))])
    memory_axes.bar_label(bars, fmt="%.0f")
    memory_axes.set(ylabel="MiB", title="kept for backward, without parameters")
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    path = folder / "train_moe_lm.png"
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
