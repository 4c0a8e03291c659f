"""What every test in Triton's interpreter begins with."""

from pathlib import Path

import pytest
import torch

from tests.tools.kernel_helpers import interpreted, mend_interpreter


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(interpreted)


@pytest.fixture(autouse=True)
def _mended_and_seeded():
    mend_interpreter()
    torch.manual_seed(0)
