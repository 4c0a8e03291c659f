"""What the rewriter makes of each graph that tests and random programs give it: written to a file, and two files compared.

    python -m tests.corpus.match_replay write before.json --seeds 0:100 tests/rewrite tests/capture tests/hf
    python -m tests.corpus.match_replay compare before.json after.json

A change of the rewriter that is to change nothing gives the same file. Of declined layers the reasons may differ: these are told,
and are no difference of what is rewritten.
"""

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import fx

from moeblaze_ops.lowering.rewrite import rewrite

Graphs = dict[str, dict]
"""By a digest of each graph as it was: its layers and attempts in order, its code afterwards where layers were replaced, and the
test that gave it."""


def digest_of(gm: fx.GraphModule) -> str:
    """All of a graph that decides what becomes of it: its code, the tensors that it is given, and what is on around it."""
    fakes = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    tensors = [(str(f.shape), str(f.stride()), f.dtype, f.requires_grad) for f in fakes if isinstance(f, torch.Tensor)]
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    around = torch.is_grad_enabled(), autocast, torch.get_default_dtype()
    return hashlib.sha256(f"{gm.code}{tensors}{around}".encode()).hexdigest()[:16]


def _said_of(c: rewrite.Candidate) -> str:
    sizes = f"T={c.T} K={c.K} E={c.E} D={c.D} F={c.F}, {c.dtype}, {c.copied_bytes} bytes copied"
    return f"{c.reason}: {c.detail}" if c.reason else f"{c.spelling}, {c.activation}, {sizes}"


@contextmanager
def recording() -> Iterator[Graphs]:
    """A context in which what becomes of graphs is written down."""
    graphs: Graphs = {}
    original = rewrite._rewrite_one

    def recorded(gm: fx.GraphModule, report: rewrite.RewriteReport) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        own = graphs[digest_of(gm)] = {"test": test, "layers": ["an error is raised"], "code": ""}
        known = len(report.candidates)
        original(gm, report)
        candidates = report.candidates[known:]
        own.update(layers=list(map(_said_of, candidates)), code="" if all(c.reason for c in candidates) else gm.code)

    with mock.patch.object(rewrite, "_rewrite_one", recorded):
        yield graphs


def differences(before: Graphs, after: Graphs) -> tuple[Counter, list[str]]:
    """How many graphs of both files differ, in what is rewritten or in reasons alone, and a text of each."""
    kinds: Counter = Counter({"graphs of both": len(before.keys() & after.keys())})
    kinds["graphs of one alone"] = len(before.keys() ^ after.keys())
    texts = []
    for key in sorted(before.keys() & after.keys()):
        old, new = before[key], after[key]
        if (old["layers"], old["code"]) != (new["layers"], new["code"]):
            kind = "other reasons" if old["code"] == new["code"] else "other layers"
            kinds[kind] += 1
            lines = [f"{sign} {line}" for sign, own in (("-", old), ("+", new)) for line in own["layers"]]
            texts.append("\n  ".join([f"{old['test'] or key}, {kind}", *lines]))
    return kinds, texts


def _write(file: Path, seeds: range, arguments: list[str]) -> None:
    from tests.corpus.fuzz.run import case_of, outcome_of

    with recording() as graphs:
        if arguments:
            pytest.main(["-q", "-p", "no:cacheprovider", *arguments])
        for seed in seeds:
            outcome_of(case_of(seed))
    file.write_text(json.dumps(graphs, indent=1, sort_keys=True))
    print(f"{len(graphs)} graphs, {sum(bool(own['code']) for own in graphs.values())} of them rewritten")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", default="0:0", help="of random programs, FIRST:END (default: none)")
    options, rest = parser.parse_known_args()
    if options.command == "write":
        _write(options.file, range(*map(int, options.seeds.split(":"))), rest)
        return 0
    kinds, texts = differences(*(json.loads(Path(file).read_text()) for file in (options.file, *rest)))
    print(*texts, ", ".join(f"{count} {kind}" for kind, count in kinds.items()), sep="\n")
    return int(kinds["other layers"] > 0)


if __name__ == "__main__":
    sys.exit(main())
