"""What becomes of a graph is the same in every process, whatever the order of its sets: caches on disk are asked by it."""

import json
import os
import subprocess
import sys

import torch

from tests.corpus import lookalikes, twins
from tests.corpus.changed_matches import without_proofs
from tests.corpus.match_replay import Graphs, differences, recording
from tests.corpus.zoo import catalogue as zoo
from tests.tools.rewrite_harness import rewrite_of

_PROGRAM = "import json; from tests.rewrite.test_hash_seeds import become; print(json.dumps(become()))"


def become() -> Graphs:
    torch.set_default_dtype(torch.float64)
    # Addresses differ as well: they are what nodes, values and expressions are hashed by.
    addresses = [bytearray(hash(str(i)) % 4096) for i in range(10000)]
    with recording() as graphs:
        for name in ("masked_sum", "loop_dense_scores", "loop_joined_slots", "joined_slots", "sorted_llama4"):
            layer = zoo.stacked(name) if name in zoo.BY_NAME else zoo.ModuleListMoE(getattr(zoo, name))
            rewrite_of(layer, torch.randn(10, zoo.D))
        for name in ("random_numbers_times_zero", "rounded_hidden", "hidden_read"):
            rewrite_of(lookalikes.build(name), torch.randn(10, zoo.D))
        with without_proofs():  # more than one operand may be left to choose from
            for name in ("masked_addcmul", "loop_slots", "dense_buffer"):
                rewrite_of(twins.build(name), torch.randn(10, zoo.D))
    del addresses
    return graphs


def test_processes_rewrite_a_graph_alike(fp64):
    """This one, whose seed is any number, and another."""
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    one, other = json.loads(done.stdout), become()
    assert sum(bool(own["code"]) for own in one.values()) >= 5
    kinds, texts = differences(one, other)
    assert kinds["graphs of one alone"] == 0 and not texts
