"""Print the tables of README.md and of pages in docs/ from the files in benchmarks/results.

    python benchmarks/tables.py

A test holds the pages to what this prints.
"""

import json
import math
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

SHAPES = {
    "fine": (32768, 2048, 768, 128, 8),
    "finest": (24576, 1536, 256, 128, 8),
    "wide": (32768, 4096, 1024, 128, 8),
    "mid": (32768, 2048, 1024, 64, 8),
    "coarse": (16384, 4096, 14336, 8, 2),
}
"""T tokens, D model width, F expert width, E experts, K experts a token, as in ``bench_layer.py``."""


def read(file: str) -> Any:
    return json.loads((RESULTS / file).read_text())


def measured(file: str) -> dict[tuple[str, str], dict]:
    """The measurements of one file, by shape (or model) and contender."""
    rows = read(file)["measurements"]
    return {(row.get("shape", row.get("model")), row["contender"]): row for row in rows}


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cells(row: dict, *forms: str) -> list[str]:
    """Numbers of a measurement by their names, as "{step_ms:.2f} ms"."""
    return [form.format_map(row) for form in forms]


def short_table() -> str:
    """One layer, compiled: a step in milliseconds, and the memory of it in MiB."""
    rows = measured("layer_h200.json")
    header = ["T, D, F, E, K", "grouped_mm", "moeblaze", "faster", "kept (peak), grouped_mm", "kept (peak), moeblaze"]
    lines = []
    for name, sizes in SHAPES.items():
        theirs, ours = rows[name, "grouped_mm+compile"], rows[name, "moeblaze"]
        (their_time, their_memory), (our_time, our_memory) = (
            cells(row, "{step_ms:.1f} ms", "{kept_mib:.0f} ({peak_mib:.0f}) MiB") for row in (theirs, ours)
        )
        faster = f"{theirs['step_ms'] / ours['step_ms']:.2f}x"
        lines.append([", ".join(map(str, sizes)), their_time, our_time, faster, their_memory, our_memory])
    return markdown(header, lines)


def layer_table() -> str:
    """One layer beside the bound of six ``torch.bmm``: bound / time of forward and backward, and of forward alone."""
    rows = measured("layer_h200.json")
    header = ["shape (T, D, F, E, K)", "bound", "grouped_mm", "grouped_mm + compile", "moeblaze", "moeblaze, forward alone"]
    lines = []
    for name, sizes in SHAPES.items():
        bound = rows[name, "bound"]
        ratios = [bound["step_ms"] / rows[name, way]["step_ms"] for way in ("grouped_mm", "grouped_mm+compile", "moeblaze")]
        ratios.append(bound["forward_ms"] / rows[name, "moeblaze"]["forward_ms"])
        sizes = ", ".join(map(str, sizes))
        lines.append([f"{name} ({sizes})", f"{bound['step_ms']:.2f} ms", *(f"{ratio:.2f}" for ratio in ratios)])
    return markdown(header, lines)


def configuration_table() -> str:
    """The seven configurations of the MoEBlaze paper: a step, and bound / time."""
    rows = measured("conf_h200.json")
    lines = []
    for number in range(1, 8):
        ours, bound = rows[f"conf{number}", "moeblaze"], rows[f"conf{number}", "bound"]
        step, *memory = cells(ours, "{step_ms:.2f} ms", "{kept_mib:.0f} MiB", "{peak_mib:.0f} MiB")
        lines.append([str(number), step, f"{bound['step_ms'] / ours['step_ms']:.2f}", *memory])
    return markdown(["configuration", "step", "bound / time", "kept", "peak"], lines)


def dial_table() -> str:
    """``keep="input"``, and the same held to 240 MiB, beside a step that keeps the pre-activations."""
    rows = measured("memory_limited_wide_finest_h200.json") | measured("memory_limited_h200.json")
    lines = []
    for name in SHAPES:
        base, dropped, limited = (rows[name, f"{way}+compile"] for way in ("preactivation", "input", "limited"))
        kept = [f"{row['kept_mib']:.0f} MiB" for row in (base, dropped)]
        times = [f"+{row['step_ms'] / base['step_ms'] - 1:.0%}" for row in (dropped, limited)]
        lines.append([name, *kept, *times, f"{limited['beyond_results_mib']:.0f} MiB"])
    header = ["shape", "kept", 'kept, keep="input"', "its time", "its time within 240 MiB", "allocated beyond results"]
    return markdown(header, lines)


def models_table() -> str:
    """Four layers of two models of transformers, unmodified, attention included."""
    rows = measured("hf_h200.json")
    lines = []
    for model, label in (("qwen3_moe", "Qwen3-MoE"), ("mixtral", "Mixtral")):
        theirs, ours = rows[model, "compile"], rows[model, "compile+moeblaze"]
        times = [f"{row['step_ms']:.1f} ms" for row in (theirs, ours)]
        kept = [f"{row['moe_kept_mib']:.0f} MiB" for row in (theirs, ours)]
        lines.append([label, *times, f"{theirs['step_ms'] / ours['step_ms']:.2f}x", *kept])
    return markdown(["model", "compile", "compile + moeblaze", "faster", "kept by a MoE block", "with moeblaze"], lines)


def tokens_table() -> str:
    """The layer of MoEBlaze's scaling table (D 512, F 2048, 4 experts, top-1) over tokens."""
    graphs, plain = measured("conf1_graphs_h200.json"), measured("conf1_h200.json")
    lines = []
    shapes = {8192: "conf1_8k", 32768: "conf1_32k", 131072: "conf1_128k", 524288: "conf1_512k", 2097152: "conf1_2m"}
    for tokens, shape in shapes.items():
        row = graphs.get((shape, "moeblaze-graphs")) or plain[shape, "moeblaze"]
        mode = "with CUDA graphs" if row["contender"].endswith("graphs") else ""
        numbers = cells(row, "{step_ms:.2f} ms", "{kept_mib:.0f} MiB", "{peak_mib:.0f} MiB")
        lines.append([f"{tokens} {mode}".strip(), *numbers])
    return markdown(["tokens", "step", "kept", "peak"], lines)


def adapters_table() -> str:
    """A layer whose frozen experts have adapters of rank 16: a step, and memory beside the weights."""
    rows = {row["contender"]: row for row in read("lora_h200.json")["rows"]}
    labels = {
        "peft+grouped_mm": "sums of weights as PEFT makes them, grouped_mm + compile",
        "rewritten": "the same, rewritten",
        "op": "`moe(..., lora_up=, lora_down=)`",
        "frozen": "without adapters",
    }
    forms = "{ms:.2f} ms", "{kept_mib:.0f} MiB", "{peak_mib:.0f} MiB"
    lines = [[label, *cells(rows[way], *forms)] for way, label in labels.items()]
    return markdown(["layer", "step", "kept", "peak"], lines)


def activations_table() -> str:
    """A step with each activation, over that of SwiGLU (of SiLU where there is no gate), at three shapes."""
    wide_coarse = "activations_wide_coarse_h200.json"
    shapes = {"fine": "activations_fine_h200.json", "coarse": wide_coarse, "wide": wide_coarse}
    rows_of = {shape: read(file)["rows"] for shape, file in shapes.items()}
    rows = [row for shape in shapes for row in rows_of[shape] if row["shape"] == shape]
    ratios = {(row["shape"], row["activation"]): f"{row['ratio']:.2f}" for row in rows}
    names = [name for _, name in sorted((row["ratio"], row["activation"]) for row in rows if row["shape"] == "fine")]
    return markdown(["activation", *shapes], [[name, *(ratios[shape, name] for shape in shapes)] for name in names])


def dropout_table() -> str:
    """A step with dropout inside of its experts, over one without."""
    rows = {way: row for (_, way), row in measured("dropout_h100.json").items()}
    labels = {
        "moeblaze": "none",
        "moeblaze-dropout-activation": "between the projections",
        "moeblaze-dropout-output": "behind the last one",
        "moeblaze-dropout": "both",
        "grouped_mm-dropout+compile": "both, grouped_mm + compile",
    }
    plain = rows["moeblaze"]["step_ms"]
    lines = [
        [label, f"{step:.2f} ms", f"{step / plain:.2f}", f"{rows[way]['kept_mib']:.0f} MiB", f"{rows[way]['peak_mib']:.0f} MiB"]
        for way, label in labels.items()
        for step in (rows[way]["step_ms"],)
    ]
    return markdown(["dropout", "step", "over none", "kept", "peak"], lines)


def routing_table() -> str:
    """What a way to route costs beside plain top-k in the same run."""
    many_slots = "routing_many_slots_h200.json"
    files = {"fine": "routing_h200.json", "shaped": many_slots, "sparse_256": many_slots}
    sizes = {"fine": SHAPES["fine"], "shaped": (32768, 2048, 768, 32, 4), "sparse_256": (16384, 4096, 1024, 256, 8)}
    rows_of = {question: read(file)["measurements"] for question, file in files.items()}
    lines = []
    for row in (row for question in files for row in rows_of[question] if row["question"] == question):
        step = f"{row['step_ms']:.2f} ms", f"{row['ratio']:.2f}", f"{row['peak_mib']:.0f} MiB"
        lines.append([", ".join(map(str, sizes[row["question"]])), row["contender"], *step])
    return markdown(["T, D, F, E, K", "routing", "step", "over top-k", "peak"], lines)


def fsdp_table() -> str:
    """Four layers of Qwen3-MoE under FSDP2 on two GPUs: forward and backward, that and AdamW, and memory, a GPU."""
    labels = {
        "one": "moeblaze, FSDP2 over one GPU",
        "ours": "moeblaze, FSDP2",
        "ep2": "moeblaze, FSDP2, experts over the two GPUs",
        "grouped": "grouped_mm + compile, FSDP2",
    }
    forms = "{gradients_ms:.1f} ms", "{step_ms:.1f} ms", "{rate:.0f}k", "{peak_mib} MiB"
    lines = []
    for file in ("fsdp_2gpus_8k_h200.json", "fsdp_2gpus_h200.json"):
        rows = read(file)["measurements"]
        first = {row["side"]: row for row in reversed(rows)}
        for row in (first[side] for side in labels if side in first):
            numbers = cells({**row, "rate": row["tokens_per_s"] / 1000}, *forms)
            lines.append([f"{row['tokens']}: {labels[row['side']]}", *numbers])
    return markdown(["tokens a GPU", "forward and backward", "with AdamW", "tokens/s a GPU", "peak"], lines)


def experts_over_four_table() -> str:
    """Qwen3's layer with its experts over four GPUs, forward and backward, TFLOP/s of a GPU."""
    labels = {"local": "no communication", "ours": "copy engines", "captured": "copies, in a CUDA graph", "nccl": "NCCL"}
    labels["titan"] = "torchtitan's flow"
    files = ("many_ep4_by_rank_h100.json", "many_ep4_h100.json")
    rows = [row for file in files for row in read(file) if "tflops" in row]
    found = {(row["T"], row["side"]): f"{row['tflops']:.0f}" for row in reversed(rows)}
    lines = [[str(T), *(found[T, side] for side in labels)] for T in (8192, 32768)]
    return markdown(["tokens a GPU", *labels.values()], lines)


NVLINK, NIC = 360e9, 50e9
"""Bytes a second of a GPU: measured of copies between two GPUs, see NOTES.md; assumed of a network of 400 Gbit/s for each GPU."""


def hosts_table() -> str:
    """Predicted: Qwen3's layer with 512 experts, 8192 tokens a GPU, on hosts of 8 GPUs; nothing is hidden behind products."""
    rows = read("many_ep4_h100.json")
    local = min(row["step_ms"] for row in rows if (row.get("T"), row.get("side")) == (8192, "local"))
    tokens, width, experts, top_k, per_host, legs = 8192, 2048, 512, 8, 8, 5
    row = 2 * width * tokens
    lines = []
    for hosts in (2, 4, 8, 16, 32, 64):
        ranks = hosts * per_host

        def reached(places: int) -> float:
            return 1 - math.comb(experts - experts // places, top_k) / math.comb(experts, top_k)

        # Bytes that a GPU gets for each leg from other hosts, and from others of its own host.
        ways = {
            "gather": ((hosts - 1) * row, (ranks - 1) * row),
            "all to all": ((ranks - per_host) * reached(ranks) * row, (per_host - 1) * reached(ranks) * row),
            "hosts": ((hosts - 1) * reached(hosts) * row, ranks * reached(ranks) * row * (per_host - 1) / per_host),
        }
        between = [f"{legs * crossing / 2**30:.2f} GiB" for crossing, _ in ways.values()]
        times = [f"{legs * (crossing / NIC + within / NVLINK) * 1e3:.1f} ms" for crossing, within in ways.values()]
        lines.append([f"{hosts} ({ranks})", *between, *times])
    labels = ["all-gather", "all-to-all", "once a host"]
    header = ["hosts (GPUs)", *(f"between hosts, {label}" for label in labels), *(f"time, {label}" for label in labels)]
    return markdown(header, lines) + f"\n\nThe experts alone take {local:.1f} ms, measured on one GPU."


def skew_table() -> str:
    """The same at 32768 tokens where one rank gets several times the rows of another: the slowest time, the highest peak."""
    rows = read("many_ep4_skew_h200.json")
    found = {(row["skew"], row["side"]): row for row in rows if "step_ms" in row}
    lines = []
    for skew in dict.fromkeys(skew for skew, _ in found):
        ours, theirs = found[skew, "ours"], found[skew, "titan"]
        times = [f"{row['step_ms']:.1f} ms" for row in (ours, theirs)]
        lines.append([f"{skew:.0f}x", *times, *(f"{row['kept_mib']} ({row['peak_mib']}) MiB" for row in (ours, theirs))])
    header = ["rows of one rank", "moeblaze", "torchtitan's flow", "kept (peak), moeblaze", "kept (peak), torchtitan's flow"]
    return markdown(header, lines)


def whole_model_table() -> str:
    """Qwen3-30B-A3B, all 48 layers, on four GPUs: a step with AdamW."""
    files = ("model_4gpus_h100.json", "model_4gpus_transformers_h100.json")
    rows = [row for file in files for row in read(file)["measurements"]]
    forms = "{checkpointed}", "{step_ms:.0f} ms", "{rate:.1f}k", "{tflops:.0f}", "{peak_mib} MiB"
    lines = []
    for row in rows:
        numbers = cells({**row, "rate": row["tokens_per_s"] / 1000}, *forms)
        lines.append([row["side"].replace("+", " + "), *numbers])
    return markdown(["", "layers checkpointed", "step", "tokens/s a GPU", "TFLOP/s a GPU", "peak"], lines)


def four_layers_table() -> str:
    """Four layers of it on two GPUs, forward and backward, whole and without attention: time, and peak beyond the weights."""
    files = ("model_2gpus_h200.json", "model_2gpus_experts_h200.json")
    whole, experts = ({row["side"]: row for row in read(file)["measurements"]} for file in files)
    lines = []
    for side in sorted(whole, key=lambda side: whole[side]["step_ms"]):
        cells = []
        for row in (whole[side], experts.get(side)):
            cells += [f"{row['step_ms']:.1f} ms", f"{row['peak_mib'] - row['weights_mib']} MiB"] if row else ["-", "-"]
        lines.append([side.replace("+", " + "), *cells])
    return markdown(["", "four layers", "peak", "without attention", "its peak"], lines)


def few_tokens_table() -> str:
    """A layer of few tokens without gradients: microseconds on the device, and how fast the weights are read."""
    rows = read("small_h100.json")["measurements"]
    found = {(row["tokens"], row["contender"]): row for row in rows}
    lines = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        theirs, ours = found[tokens, "grouped_mm+compile"], found[tokens, "moeblaze"]
        times = [f"{1e3 * row['device_ms']:.0f} us" for row in (theirs, ours)]
        rate = ours["weights_mib"] * 2**20 / ours["device_ms"] / 1e9
        lines.append([str(tokens), f"{ours['weights_mib']:.0f} MiB", *times, f"{rate:.2f} TB/s"])
    return markdown(["tokens", "weights of the experts chosen", "grouped_mm + compile", "moeblaze", "weights read"], lines)


def one_thread_table() -> str:
    """A step that waits for the host, with backward on autograd's thread and on the caller's."""
    two, one = measured("conf1_8k_h100.json"), measured("conf1_8k_one_thread_h100.json")
    labels = {
        "grouped_mm": "grouped_mm",
        "grouped_mm+compile": "grouped_mm + compile",
        "moeblaze-eager": "`torch.ops.moeblaze.*`, eager",
        "moeblaze": "moeblaze",
    }
    lines = [[label, *(f"{rows['conf1_8k', name]['step_ms']:.2f} ms" for rows in (two, one))] for name, label in labels.items()]
    return markdown(["", "autograd's thread", "one thread"], lines)


def compile_table() -> str:
    """Compile time of 24 layers with attention on two busy CPU cores, forward and backward, without any cache."""
    rows = {(row["style"], row["contender"]): row for row in read("compile_cpu.json")["measurements"]}
    lines = []
    for style, label in (("dense", "all experts on all tokens"), ("grouped_mm", "grouped_mm"), ("loop", "loop over hit experts")):
        plain, ours = rows[style, "plain"], rows[style, "rewritten"]
        share = ours["ours_seconds"] / ours["seconds"]
        graphs = f"{plain['graphs']}, {ours['graphs']}"
        lines.append([label, f"{plain['seconds']:.0f} s", f"{ours['seconds']:.0f} s", f"{share:.1%}", graphs])
    return markdown(["layers", "compile", "with rewriting", "of that our passes", "graphs before, after"], lines)


def demo_table() -> str:
    """The example's steps, and what it keeps for backward, parameters not counted."""
    results = read("demo_cpu.json")["results"]
    lines = [
        [result["label"], f"{1e3 * result['step_seconds']:.0f} ms", f"{result['kept_bytes'] / 2**20:.1f} MiB"]
        for result in results
    ]
    return markdown(["", "step", "kept for backward"], lines)


PEERS = ("moeblaze", "SonicMoE", "grouped_mm+compile", "ScatterMoE", "Liger-Kernel")


def peers_table() -> str:
    """One layer beside other libraries: a step in milliseconds."""
    rows = measured("beside_peers_h100.json")
    steps = {key: f"{row['step_ms']:.2f}" for key, row in rows.items()}
    lines = [
        [f"{name} ({', '.join(map(str, sizes))})", *(steps.get((name, way), "-") for way in ("bound", *PEERS))]
        for name, sizes in SHAPES.items()
    ]
    return markdown(["shape (T, D, F, E, K)", "bound", *(way.replace("+", " + ") for way in PEERS)], lines)


def peaks_table() -> str:
    """The memory of these steps, in MiB."""
    peaks = {key: str(row["peak_mib"]) for key, row in measured("beside_peers_h100.json").items()}
    lines = [[name, *(peaks.get((name, way), "-") for way in PEERS)] for name in SHAPES]
    return markdown(["shape", *(way.replace("+", " + ") for way in PEERS)], lines)


def families_table() -> str:
    """Families of transformers: sizes by default, and how many layers of a small model are rewritten, by the way of experts."""
    lines = []
    for name, family in surveyed().items():
        sizes = " ".join(f"{letter} {family['sizes'][letter]}" for letter in "DFEK" if letter in family["sizes"])
        lines.append([f"`{name}`", sizes, *(_of(family.get(way)) for way in ("grouped_mm", "eager"))])
    return markdown(["family", "sizes by default", "`grouped_mm`", "`eager`"], lines)


def surveyed() -> dict[str, dict]:
    return read("models.json")["families"]


def _of(found: dict | None) -> str:
    if found is None:
        return "-"
    left = f": {', '.join(f'`{reason}`' for reason in found['left'])}" if found["left"] else ""
    return f"{found['rewritten']} of {found['layers']}{left}" if found["layers"] else "none found"


def families_sentence() -> str:
    """What the table of families comes to."""
    data = read("models.json")
    found = [family[way] for family in data["families"].values() for way in ("grouped_mm", "eager") if way in family]
    rewritten, layers = sum(way["rewritten"] for way in found), sum(way["layers"] for way in found)
    versions = f"transformers {data['transformers']}, torch {data['torch']}"
    return f"{versions}: {rewritten} of {layers} layers of {len(data['families'])} families"


TABLES = {
    "docs/howto/many_gpus.md": (hosts_table,),
    "docs/models.md": (families_table, families_sentence),
    "README.md": (short_table,),
    "docs/which_one_when.md": (peers_table, peaks_table),
    "docs/numbers.md": (
        layer_table,
        short_table,
        configuration_table,
        tokens_table,
        few_tokens_table,
        one_thread_table,
        dial_table,
        adapters_table,
        activations_table,
        dropout_table,
        routing_table,
        models_table,
        fsdp_table,
        experts_over_four_table,
        skew_table,
        whole_model_table,
        four_layers_table,
        compile_table,
        demo_table,
    ),
}

if __name__ == "__main__":
    for page, tables in TABLES.items():
        for table in tables:
            print(f"{page}: {table.__doc__.splitlines()[0]}\n\n{table()}\n")
