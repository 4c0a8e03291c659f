"""What a program asserts of numbers on the host is still asserted, or is known to hold, once its layer is rewritten."""

import pytest
import torch

from moeblaze_ops.compile import GraphRecord, recording
from tests.capture.test_branches import D, Layer, T
from tests.corpus.loops.asserted import ASSERTED, KNOWN, at_most, infer
from tests.tools.rewrite_harness import rewriting_backend, rewritten_in

pytestmark = pytest.mark.usefixtures("scratch")


def crowded(layer):
    """All tokens choose experts 0 and 1, each half of the rows."""
    layer.penalty[:2] = 100.0
    return layer


@pytest.mark.parametrize("says", ASSERTED, ids=lambda says: says.__name__)
def test_what_the_program_asserts_is_asserted(says):
    """``says`` fails where one expert has all tokens."""
    torch.manual_seed(0)
    layer = crowded(Layer(infer(says)))
    x = torch.randn(T, D)
    with pytest.raises(Exception):  # noqa: B017
        layer(x)
    with rewriting_backend() as backend, pytest.raises(Exception):  # noqa: B017
        torch.compile(layer, backend=backend)(x)


def test_the_reason_is_given():
    with rewriting_backend() as backend, recording() as records:
        torch.compile(Layer(infer(at_most)), backend=backend)(torch.randn(T, D))
    dropped = [record.dropped or "" for record in records if isinstance(record, GraphRecord)]
    assert any("what is asserted of it may fail" in reason for reason in dropped)


@pytest.mark.parametrize("features", [-1, D])
def test_rows_whose_features_are_not_told(features):
    """Of no rows ``view(0, -1)`` is an error, and ``view(0, D)`` is none."""

    def combine(self, x, weights, ids):
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            y = expert(x[token]) * weights[token, slot, None]
            out.index_add_(0, token, y.view(len(y), 1, D).view(len(y), features))
        return out

    with rewriting_backend() as backend, recording() as records:
        torch.compile(Layer(combine), backend=backend)(torch.randn(T, D))
    dropped = [record.dropped or "" for record in records if isinstance(record, GraphRecord)]
    told = any("write the number of features in place of -1" in reason for reason in dropped)
    assert (told, len(rewritten_in(records))) == ((True, 0) if features == -1 else (False, 1))


@pytest.mark.parametrize("says", KNOWN, ids=lambda says: says.__name__)
def test_what_is_known_to_hold_keeps_no_layer(says):
    torch.manual_seed(0)
    layer = Layer(infer(says))
    x = torch.randn(T, D)
    with rewriting_backend() as backend, recording() as records:
        out = torch.compile(layer, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(out, layer(x))
    assert len(rewritten_in(records)) == 1
