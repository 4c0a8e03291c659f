import pytest
import torch

from moeblaze_ops import config


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    """Errors of the rewrite itself fail the test."""
    monkeypatch.setattr(config, "strict", True)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
