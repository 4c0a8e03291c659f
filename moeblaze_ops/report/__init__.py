"""``report``: what was compiled with rewriting. ``python -m moeblaze_ops.report`` runs a script and prints it.

A folder, since Python warns of a module that is imported already when ``-m`` runs it.
"""

from dataclasses import replace

from moeblaze_ops.explain import candidate_of, direct_layers, notes_of
from moeblaze_ops.explanation import Explanation


def report() -> Explanation:
    """What this process compiled with rewriting so far, in the words of ``explain``: the latest graphs, oldest first.

    A layer is listed once, as it was compiled last, and once for each mode where there are several (training, evaluation).
    Where blocks of equal code share a graph, so are the layers of each that it has run for. Names are those in the outermost
    module that calls. The logger ``moeblaze_ops`` says the same while it happens, at info level: ``TORCH_LOGS="moeblaze"``.
    """
    from moeblaze_ops import compile as switch

    records = switch.recent_records()
    notes = dict.fromkeys(notes_of(records, [], True, switch))
    if not records:
        notes["nothing was compiled with rewriting; enable() compiles nothing itself, torch.compile does"] = None
    listed = {}
    for entry, record, place, _ in switch.outcomes(records):
        candidate = candidate_of(entry, record, place.name_of(entry.module_path), record.mode)
        zeros = tuple(".".join(filter(None, (place.inside, name))) for name in candidate.zeros)
        candidate = replace(candidate, zeros=zeros)
        sizes = () if place.kind else (entry.K, entry.E, entry.D, entry.F)  # a function may be called with other weights
        listed[place.model, sizes, candidate.where, candidate.mode] = candidate
    candidates = list(listed.values())
    if len({candidate.mode for candidate in candidates}) == 1:
        candidates = [replace(candidate, mode="") for candidate in candidates]
    return Explanation(tuple(candidates), tuple(notes), direct_layers(records, switch))
