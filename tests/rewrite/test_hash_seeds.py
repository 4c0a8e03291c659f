"""What becomes of a graph is the same in every process, whatever the order of its sets: caches on disk are asked by it."""

import json
import os
import subprocess
import sys

from tests.corpus.match_replay import differences

# Addresses differ as well: they are what nodes, values and expressions are hashed by.
_PROGRAM = """
import json, sys, torch
from tests.corpus import lookalikes, twins
from tests.corpus.zoo import catalogue as zoo
from tests.rewrite.test_statement import layer_of, proven
from tests.corpus.match_replay import recording
from tests.tools.rewrite_harness import rewrite_of

torch.set_default_dtype(torch.float64)
addresses = [bytearray(hash(str(i)) % 4096) for i in range(10000)]
with recording() as graphs:
    for name in ("masked_sum", "loop_dense_scores", "loop_joined_slots", "joined_slots", "sorted_llama4"):
        rewrite_of(layer_of(name), torch.randn(10, zoo.D))
    for name in ("random_numbers_times_zero", "rounded_hidden", "hidden_read"):
        rewrite_of(lookalikes.build(name), torch.randn(10, zoo.D))
    # Without proofs more than one operand may be left to choose from.
    for name, module in [*sys.modules.items()]:
        if name.startswith("moeblaze_ops.lowering.match") and hasattr(module, "prove"):
            module.prove = proven
    for name in ("masked_addcmul", "loop_slots", "dense_buffer"):
        rewrite_of(twins.build(name), torch.randn(10, zoo.D))
print(json.dumps(graphs))
"""


def _rewritten_with(seed: int) -> dict:
    environment = os.environ | {"PYTHONHASHSEED": str(seed)}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_processes_rewrite_a_graph_alike():
    one, other = _rewritten_with(1), _rewritten_with(3)
    assert sum(bool(own["code"]) for own in one.values()) >= 5
    kinds, texts = differences(one, other)
    assert kinds["graphs of one alone"] == 0 and not texts
