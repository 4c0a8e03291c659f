import functools
import gc
import logging
import os
from pathlib import Path

gc.disable()  # until all is imported, of which nothing is garbage

# Inductor builds five programs in every process to learn which vectors the CPU has, beside what the CPU says.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import moeblaze_ops
from moeblaze_ops import config
from moeblaze_ops.lowering.torch_internals.room import call_with_room
from tests.tools.compiling import compile_quickly, keep_what_is_imported

TESTS = Path(__file__).parent

# The tier of a test is that of the longest path which it lies below. `make check` runs what is fast, or below no path.
TIERS = {
    "batch": "slow",
    "batch/test_ranks.py": "ranks",
    "capture": "capture",
    "distributed": "ranks",
    "door": "door",
    "gpu": "gpu",
    "hf": "hf",
    "interpreter": "interpreter",
    "kernels": "offline",
    "ops": "ops",
    "ops/test_dispatch.py": "fast",
    "ops/test_moe.py": "fast",
    "ops/test_packing.py": "fast",
    "ops/test_route.py": "fast",
    "ops/sharded": "ranks",
    "ops/test_separate_experts.py": "fast",
    "project/test_commands.py": "slow",
    "project/test_demo.py": "slow",
    "project/test_design.py": "slow",
    "project/test_docs.py": "slow",
    "project/test_packaging.py": "slow",
    "project/test_patches.py": "slow",
    "project/test_readme.py": "slow",
    "project/test_ranks.py": "ranks",
    "rewrite": "rewrite",
    "rewrite/layers/test_keywords.py": "fast",
    "rewrite/results/test_rewritten_graph.py": "fast",
    "rewrite/routing": "operands",
    "rewrite/shaped": "operands",
    "rewrite/weights": "operands",
    "system": "slow",
    "system/test_distributed.py": "ranks",
    "system/test_export.py": "export",
    "system/reported/test_known_failures_of_ranks.py": "ranks",
}


def tier_of(file: Path) -> str:
    below = [path for path in TIERS if file.is_relative_to(TESTS / path)]
    return TIERS[max(below, key=len)] if below else "fast"


def pytest_addoption(parser):
    parser.addoption("--tier", choices=sorted({*TIERS.values(), "fast"}), help="import and run the tests of this tier alone")


def pytest_ignore_collect(collection_path, config):
    """Corpora and compilers that only other tiers need are not even imported."""
    tier = config.getoption("tier")
    return True if tier and collection_path.suffix == ".py" and tier_of(collection_path) != tier else None


compile_quickly()
# pytest listens to each logger that hands nothing on to others. To that one Dynamo gives every step that it takes, as JSON and
# with the stack, once somebody listens: a tenth of the time of a test that compiles.
_trace = logging.getLogger("torch.__trace")
_trace.propagate = True
_trace.handlers.clear()


def pytest_collection_finish():
    keep_what_is_imported()


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    """Errors of the rewrite itself fail the test."""
    monkeypatch.setattr(config, "strict", True)


@pytest.fixture
def scratch():
    """Nothing compiled or counted before, the same random numbers in every run, and the switch off afterwards."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    yield
    moeblaze_ops.disable()
    torch._dynamo.reset()


@pytest.fixture
def fp64():
    """Numbers of which the last bits are no matter, the same in every run."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def fused_routers(monkeypatch):
    """Routers are fused on a CPU as on a GPU: for tests in which no two scores are equal."""
    from moeblaze_ops.lowering.router import match_router

    monkeypatch.setattr(match_router, "breaks_ties_as_topk", lambda device: True)


@pytest.fixture
def mixtures_of_all(monkeypatch):
    """Layers in which every expert takes every token are rewritten on a CPU as on a GPU."""
    from moeblaze_ops.lowering.match import layer_proof

    monkeypatch.setattr(layer_proof, "gains_without_choices", lambda device: True)


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(tier_of(item.path))
        item.runtest = functools.partial(call_with_room, item.runtest)
    alone = pytest.mark.skip(reason="needs torch.distributed with gloo")
    for item in items:
        if "ranks" in item.keywords and not (dist.is_available() and dist.is_gloo_available()):
            item.add_marker(alone)
    few = pytest.mark.skip(reason="needs several CUDA devices")
    for item in items:
        if "multigpu" in item.keywords and torch.cuda.device_count() < 2:
            item.add_marker(few)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
