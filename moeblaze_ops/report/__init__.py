"""``report``: what was compiled with rewriting. ``python -m moeblaze_ops.report`` runs a script and prints it.

A folder, since Python warns of a module that is imported already when ``-m`` runs it.
"""

from dataclasses import replace

from moeblaze_ops.explain import candidate_of, direct_layers, notes_of
from moeblaze_ops.explanation import Candidate, Explanation


def report() -> Explanation:
    """What this process compiled with rewriting so far, in the words of ``explain``: the latest graphs, oldest first.

    A layer is listed once, as it was compiled last, and once for each mode where there are several (training, evaluation). One
    that is left in some compiles alone, as for some lengths of sequences, has a line for these and one for the others.
    Where blocks of equal code share a graph, so are the layers of each that it has run for. Names are those in the outermost
    module that calls. The logger ``moeblaze_ops`` says the same while it happens, at info level: ``TORCH_LOGS="moeblaze"``.
    """
    from moeblaze_ops import compile as switch

    records = switch.recent_records()
    notes = dict.fromkeys(notes_of(records, [], True, switch))
    if not records:
        notes["nothing was compiled with rewriting; enable() compiles nothing itself, torch.compile does"] = None
    listed: dict[tuple, dict[bool, dict[int, Candidate]]] = {}  # of each layer: whether it is left, and in which graphs
    for entry, record, place, _ in switch.outcomes(records):
        candidate = candidate_of(entry, record, place.name_of(entry.module_path), record.mode)
        zeros = tuple(".".join(filter(None, (place.inside, name))) for name in candidate.zeros)
        candidate = replace(candidate, zeros=zeros)
        sizes = () if place.kind else (entry.K, entry.E, entry.D, entry.F)  # a function may be called with other weights
        of_layer = listed.setdefault((place.model, sizes, candidate.where, candidate.mode), {})
        of_layer.setdefault(candidate.became is None, {})[id(record.report)] = candidate
    several, candidates = len({mode for *_, mode in listed}) > 1, []
    for (*_, mode), of_layer in listed.items():
        compiles = len(set().union(*of_layer.values()))
        for own in of_layer.values():
            often = f"in {len(own)} of {compiles} compiles" if len(of_layer) > 1 else ""
            candidates.append(replace([*own.values()][-1], mode=", ".join(filter(None, (mode if several else "", often)))))
    return Explanation(tuple(candidates), tuple(notes), direct_layers(records, switch))
