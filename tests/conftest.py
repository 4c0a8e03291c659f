import pytest
import torch

from moeblaze_ops import config


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    """Errors of the rewrite itself fail the test."""
    monkeypatch.setattr(config, "strict", True)


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


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
