"""What train_moe_lm.py shows at its end: one table, the numbers as JSON, and a plot."""

import datetime
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

MIB = 2**20


@dataclass(frozen=True)
class Result:
    """One way of training: times in seconds, memory in bytes; `peak_bytes` is None on a CPU.

    `loads` has for each step at which it was counted the share of the tokens' slots that each expert had, by layer; only the
    eager way counts, which changes neither its time nor its memory.
    """

    way: str
    label: str
    losses: list[float]
    step_seconds: float
    first_step_seconds: float
    kept_bytes: int
    peak_bytes: int | None
    rewritten: str
    loads: dict[int, dict[str, list[float]]] = field(default_factory=dict)


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """Returns the largest absolute difference between two loss curves, over the steps that both have."""
    return max(abs(a - b) for a, b in zip(losses, reference, strict=False))


def format_table(results: list[Result]) -> str:
    """Returns a text table, one column per way; ratios and differences are against the first."""
    first = results[0]
    rows = {
        "step": lambda result: f"{result.step_seconds * 1e3:.1f} ms",
        "faster": lambda result: "-" if result is first else f"{first.step_seconds / result.step_seconds:.2f}x",
        "first step": lambda result: f"{result.first_step_seconds:.1f} s",
        "kept for backward": lambda result: f"{result.kept_bytes / MIB:.1f} MiB",
        "less": lambda result: "-" if result is first else f"{first.kept_bytes / result.kept_bytes:.2f}x",
        "peak memory": lambda result: f"{result.peak_bytes / MIB:.0f} MiB",
        "steps": lambda result: str(len(result.losses)),
        "last loss": lambda result: f"{result.losses[-1]:.4f}",
        "loss differs by": lambda result: "-" if result is first else f"{largest_difference(result.losses, first.losses):.1e}",
        "rewritten": lambda result: result.rewritten,
    }
    if any(result.peak_bytes is None for result in results):
        del rows["peak memory"]
    table = [["", *(result.label for result in results)]]
    table += [[name, *(show(result) for result in results)] for name, show in rows.items()]
    widths = [max(len(row[i]) for row in table) for i in range(len(results) + 1)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def save_numbers(results: list[Result], title: str, folder: Path) -> Path:
    """Writes everything that was measured as JSON, and returns its path."""
    path = folder / "train_moe_lm.json"
    numbers = {"title": title, "date": datetime.date.today().isoformat(), "results": [asdict(result) for result in results]}
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    return path


def draw_loads(axes, loads: dict[int, dict[str, list[float]]]) -> None:
    """Draws a heat map: a row for each expert of each layer, a column for each step, 1 where the load is even."""
    layers = next(iter(loads.values()))
    shares = [[share * len(shares) for shares in layers.values() for share in shares] for layers in loads.values()]
    image = axes.imshow(list(zip(*shares, strict=True)), aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    axes.set_xticks(range(len(loads)), labels=[str(step) for step in loads])
    starts = [sum(len(shares) for shares in list(layers.values())[:number]) for number in range(len(layers))]
    axes.set_yticks(starts, labels=[f"{name}, expert 0" for name in layers])
    axes.set(xlabel="step")
    axes.set_title("load of each expert over the mean", fontsize=10)
    axes.figure.colorbar(image, ax=axes, extend="max", fraction=0.02, pad=0.01)


def save_plot(results: list[Result], title: str, folder: Path) -> Path | str:
    """Draws loss curves, times, memory and the experts' loads, and returns the path of the PNG, or why there is none."""
    try:
        import matplotlib
    except ImportError:
        return "none, matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    loads = next((result.loads for result in results if result.loads), None)
    rows = [["loss", "time", "memory"], *([["load"] * 3] if loads else [])]
    figure, panels = pyplot.subplot_mosaic(rows, figsize=(14, 4.5 * len(rows)), width_ratios=(3, 2, 2))
    loss_axes, time_axes, memory_axes = (panels[name] for name in rows[0])
    if loads:
        draw_loads(panels["load"], loads)
    for i, result in enumerate(results):
        # The curves coincide: the later ones are thinner, so that each can be seen.
        loss_axes.plot(result.losses, label=result.label, linewidth=7 / (1 + 2 * i), alpha=0.8)
    loss_axes.set(xlabel="step", ylabel="loss (nats per byte)")
    loss_axes.set_title("training loss", fontsize=10)
    loss_axes.legend()

    labels = [result.label for result in results]
    times = [result.step_seconds * 1e3 for result in results]
    kept = [result.kept_bytes / MIB for result in results]
    for axes, values, unit, title_of_axes in (
        (time_axes, times, "ms", "step, median"),
        (memory_axes, kept, "MiB", "kept for backward, without parameters"),
    ):
        bars = axes.bar(labels, values, color=[f"C{i}" for i in range(len(results))])
        axes.bar_label(bars, fmt="%.1f" if max(values) < 100 else "%.0f")
        axes.set(ylabel=unit, ylim=(0, 1.12 * max(values)))
        axes.set_title(title_of_axes, fontsize=10)
        axes.tick_params(axis="x", labelsize=8)
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    path = folder / "train_moe_lm.png"
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
