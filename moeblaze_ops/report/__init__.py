"""``report``: what was compiled with rewriting. ``python -m moeblaze_ops.report`` runs a script and prints it.

A folder, since Python warns of a module that is imported already when ``-m`` runs it.
"""

from dataclasses import replace

from moeblaze_ops.explain import candidate_of, direct_layers, notes_of
from moeblaze_ops.explanation import Explanation


def report() -> Explanation:
    """What this process compiled with rewriting so far, in the words of ``explain``: the latest graphs, oldest first.

    A layer is listed once, however often it was compiled, and once for each mode where there are several (training, evaluation).
    A graph that runs for several layers of equal code is listed for the first of them. The logger ``moeblaze_ops`` says the same
    while it happens, at info level: ``TORCH_LOGS="moeblaze"``.
    """
    from moeblaze_ops import compile as switch

    records = switch.recent_records()
    notes = dict.fromkeys(notes_of(records, [], True, switch))
    if not records:
        notes["nothing was compiled with rewriting; enable() compiles nothing itself, torch.compile does"] = None
    listed = ((record.setting.module, candidate_of(entry, record)) for entry, record in switch.outcomes(records))
    candidates = [candidate for _, candidate in dict.fromkeys(listed)]
    if len({candidate.mode for candidate in candidates}) == 1:
        candidates = [replace(candidate, mode="") for candidate in candidates]
    return Explanation(tuple(candidates), tuple(notes), direct_layers(records, switch))
