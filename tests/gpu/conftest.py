import pytest


@pytest.fixture(autouse=True)
def few_rows_on_hopper(monkeypatch):
    """Experts of tests have few rows, which the portable kernels would take; those are tested apart."""
    select = pytest.importorskip("moeblaze_ops.kernels.select")
    monkeypatch.setattr(select, "_FEW_ROWS", 0)
