"""What ``explain`` and ``report`` return: what became of each MoE layer, and how that is said to its author."""

import linecache
import os
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, replace

_REMEDIES = {
    "OTHER_TERMS": "begin with torch.zeros_like(x), add outputs of experts alone; buffers of a fixed capacity stay as they are; "
    "say by `moeblaze_ops.declare` what a library's operator computes",
    "ROUTING": "multiply each expert's output by the score with which the token chose it, found by comparing expert ids",
    "SLOT_WEIGHTS": "sort and gather the routing weights like the tokens that they belong to",
    "NOT_TWO_PROJECTIONS": "write an expert as down(act(up(x))) or down(act(gate(x)) * up(x)), without a norm or dropout of an "
    "adapter inside",
    "ACTIVATION": "use a pointwise function of the projections, of numbers, and of four learned ones at most",
    "PROJECTION_WEIGHTS": "give every expert its own weights, stacked [E, ...] or as one module each",
    "SAME_PERMUTATION": "bring the outputs back by the order that the tokens were sorted in",
    "DIFFERENT_INPUTS": "let every expert read the same x",
    "DIFFERENT_ACTIVATIONS": "use one activation for all experts",
    "EXPERT_COVERAGE": "use experts 0 to E-1 once each",
    "WEIGHT_LAYOUT": "keep each projection in one tensor [E, F, D], or its experts apart",
    "DISTINCT_EXPERTS": "take ids from a topk in the same graph, or add what is stored (out[t] += y, scatter_add)",
    "DTYPE_PATH": "compute the experts in the dtype of x, or under autocast",
    "OPERAND_CHANGED": "write to the operand after the layer, not inside of it",
    "BUFFER_ALIASED": "write to a buffer that nothing else reads meanwhile",
    "EXTRA_USER": "do not read results from inside the layer (hooks that save activations do)",
    "EFFECT": "draw random numbers, and call operators that are not torch's, outside of the layer",
    "CONTEXT": "enter and leave autocast and no_grad around the layer, not inside of it",
    "ALL_EXPERTS": "nothing; on a GPU it is rewritten",
    "STATEMENT": "compare the layer with `moeblaze_ops.moe`: what is one expert's or one slot's is used for another",
    "INTERNAL": "this is a defect of ours: please report it with this output (config.strict = True raises it)",
}
"""What its author can change where a layer is left alone, by the name of the reason."""
_OF_PLACES = (
    "give every token of an expert a place of its own, the one_hot of a running count, cumsum(one_hot(ids)) - 1, "
    "with no graph break in between"
)


@dataclass(frozen=True)
class Candidate:
    """A layer that looks like a Mixture-of-Experts.

    ``where`` is the module's path in the model, and the line of its code. ``kept_before`` and ``kept_after`` are the bytes
    that autograd keeps for it until backward, without parameters and the model's inputs: measured on the captured graph
    as eager mode runs it, and on the rewritten one; None where that is unknown. ``copied`` bytes of separate expert
    weights are joined by a copy in forward, and again in backward. ``zeros`` are parameters that get a gradient of
    zeros where the program as written leaves None: those of experts without tokens. ``mode`` says whether it was compiled for
    training or for evaluation.
    """

    where: str
    spelling: str
    became: str | None = None
    reason: str | None = None
    kept_before: int | None = None
    kept_after: int | None = None
    copied: int = 0
    remedy: str | None = None
    code: str | None = None
    zeros: tuple[str, ...] = ()
    mode: str = ""

    def __str__(self) -> str:
        where = f"{self.where}, {self.mode}" if self.mode else self.where
        if self.became is None:
            lines = [f"{where}: {self.spelling}, left alone: {self.reason}"]
            lines += [f"code: {self.code}"] if self.code else []
            lines += [f"what would help: {self.remedy}"] if self.remedy else []
            return "\n    ".join(lines)
        lines = [f"{where}: {self.spelling} -> {self.became}"]
        if self.kept_before is not None and self.kept_after is not None:
            kept = f"{size_text(self.kept_before)} before, {size_text(self.kept_after)} after"
            uncounted = "not counted, the layer is checkpointed or runs without gradients"
            lines.append(f"kept for backward: {kept if self.kept_before or self.kept_after else uncounted}")
        if self.copied:
            lines.append(f"separate weights joined by a copy in each pass: {size_text(self.copied)}")
        if self.zeros:
            lines.append(f"gradients of zeros instead of None for experts without tokens: {', '.join(folded(self.zeros))}")
        return "\n    ".join(lines)


@dataclass(frozen=True, repr=False)
class Explanation:
    """What a compile with rewriting makes, or made, of a model. Its text is what a prompt shows and ``print`` prints."""

    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]
    direct: int = 0
    """Layers that call the operators themselves."""

    def __str__(self) -> str:
        alike: dict[str, list[Candidate]] = {}
        for candidate in self.candidates:
            alike.setdefault(_pattern_of(candidate), []).append(candidate)
        lines = [f"  {f'{len(group)} times ' if len(group) > 1 else ''}{_joined(group)}" for group in alike.values()]
        return "\n".join([f"moeblaze: {self._head()}", *lines, *(f"  note: {line}" for line in self.notes)])

    __repr__ = __str__

    def _head(self) -> str:
        calls = f"{self.direct} {'layer calls' if self.direct == 1 else 'layers call'} the operators already"
        if not self.candidates:
            return calls if self.direct else "no MoE layer was found"
        counts: list[str] = []
        for mode in dict.fromkeys(candidate.mode for candidate in self.candidates):
            became = [candidate.became for candidate in self.candidates if candidate.mode == mode]
            layers = "" if counts else "MoE layers rewritten"
            counts.append(" ".join(filter(None, (f"{len(became) - became.count(None)} of {len(became)}", layers, mode))))
        return ", ".join([*counts, calls] if self.direct else counts)


def _pattern_of(candidate: Candidate) -> str:
    """The text of a candidate without the numbers in names: layers of one pattern are shown as one."""
    name, place = _name_and_place(candidate.where)
    zeros = tuple(dict.fromkeys(map(name_pattern, candidate.zeros)))
    text = str(replace(candidate, where=name_pattern(name) + place, zeros=zeros))
    return re.sub(r"[A-Za-z_]\w*(\.\w+)+", lambda dotted: name_pattern(dotted[0]), text)


def _joined(group: list[Candidate]) -> Candidate:
    names, places = zip(*(_name_and_place(candidate.where) for candidate in group), strict=True)
    zeros = tuple(name for candidate in group for name in candidate.zeros)
    return replace(group[0], where=folded(names)[0] + places[0], zeros=zeros)


def _name_and_place(where: str) -> tuple[str, str]:
    name, bracket, place = where.rpartition(" (")
    return name, bracket + place


def name_pattern(name: str) -> str:
    """``name`` with a star for each number in it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def folded(names: Iterable[str]) -> list[str]:
    """Names that differ in numbers alone as one: ``layers.*.mlp``, ``up.*.weight``."""
    alike: dict[str, list[list[str]]] = {}
    for name in names:
        alike.setdefault(name_pattern(name), []).append(name.split("."))
    return [".".join(part[0] if len(set(part)) == 1 else "*" for part in zip(*group, strict=True)) for group in alike.values()]


_UNSAID = ("", "__self__", "__dict__", "func", "_modules", "_orig_mod", "_checkpoint_wrapped_module")
"""Parts of paths that their authors did not write: how Dynamo reached a module, and what torch wraps around one."""


def module_name(path: str) -> str:
    """``path`` without Dynamo's words for where it found it: ``G['m'].mlp[0]`` is ``m.mlp.0``, ``L['self'].mlp`` is ``mlp``.

    So is ``L['___stack0'].mlp``. Where weights are given to ``torch.func.functional_call``, ``getattr(L['self'].layers, '0')`` is
    ``layers.0``.
    """
    while (named := re.sub(r"getattr\(([^()]*), '(\w+)'\)", r"\1.\2", path)) != path:
        path = named
    path = re.sub(r"^L\['(self|fn|___stack\d+)'\]", "", path)
    path = re.sub(r"^[LG]\['(\w+)'\]", r"\1", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    return ".".join(part for part in path.split(".") if part not in _UNSAID)


def frame_name(where: str) -> str:
    """``function (file:line)``; what follows a graph break is a function of Dynamo's own, with a name that says so."""
    function, _, place = where.removesuffix(")").rpartition(" (")
    rest = re.fullmatch(r"torch_dynamo_resume_in_(\w+)_at_(\d+)", function)
    if rest is None:
        return f"{function} ({short_place(place)})"
    return f"{rest[1]} ({short_place(place).rpartition(':')[0]}) from line {rest[2]} on"


def with_code(text: str) -> str:
    """``function (file:line): ..., at function (file:line)`` as ``file:line "code": ..., at file:line "code"``."""
    return re.sub(r"(?:^|(?<=, at ))\S+ \(([^()]+:\d+)\)(?=: |$)", lambda place: _with_code(place[1]), text)


def _with_code(place: str) -> str:
    code = (code_at(place) or "").partition("  #")[0].removesuffix(":")
    return short_place(place) + (f' "{code}"' if code else "")


def left_alone(where: str, spelling: str, source: str, reason: str, meaning: str, detail: str, mode: str = "") -> Candidate:
    """A layer that was left alone, in words of who wrote it."""
    why = f"{reason}, {meaning}{f' ({detail})' if detail else ''}"
    remedy = _OF_PLACES if "places [E, C]" in detail else _REMEDIES.get(reason)
    return Candidate(where, spelling, reason=why, remedy=remedy, code=code_at(source), mode=mode)


def code_at(source: str) -> str | None:
    """The line of code at ``file:line``, if it can be read."""
    file, _, line = source.rpartition(":")
    return linecache.getline(file, int(line)).strip() or None if line.isdigit() else None


def short_place(source: str) -> str:
    """``file:line`` with the file as seen from the working directory, or from where packages are installed."""
    for folder in (sysconfig.get_paths()["purelib"], os.getcwd()):
        if source.startswith(folder + os.sep):
            return source[len(folder) + 1 :]
    return source


def size_text(num_bytes: int) -> str:
    """A number of bytes in KiB or MiB."""
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"
