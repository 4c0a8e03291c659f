"""Knobs refuse what they cannot be, where it is set; what they are is seen by code that is compiled already."""

import ast
import inspect
from pathlib import Path

import pytest
import torch

from moeblaze_ops import config

RIGHT = {
    "arrived_rows": ["exact", "bound"],
    "batch_invariant": [True, False],
    "check_expert_ids": [True, False],
    "collective_multiprocessors": [None, 1, 16],
    "exchange": ["auto", "all_gather", "all_to_all"],
    "experts_move": ["auto", "tokens", "weights"],
    "hopper": ["auto", "off"],
    "idle_expert_grads": ["zeros", "none"],
    "keep": ["preactivation", "h8", "input", "auto"],
    "layers_in_flight": [1, 48],
    "max_layer_transient_bytes": [None, 1, 1 << 30],
    "max_transient_bytes": [None, 1, 1 << 30],
    "quiet": [True, False],
    "strict": [True, False],
    "tokens_per_rank": [None, 1, 8192],
    "transport": ["auto", "nccl", "copies"],
    "verify": ["off", "first"],
}
WRONG = [
    ("check_expert_ids", 1, TypeError, "True or False, got 1"),
    ("check_expert_ids", None, TypeError, "True or False, got None"),
    ("batch_invariant", "on", TypeError, "True or False, got 'on'"),
    ("hopper", "on", ValueError, "one of auto, off, got 'on'"),
    ("hopper", True, TypeError, "one of auto, off, got True"),
    ("idle_expert_grads", None, TypeError, "one of zeros, none, got None"),
    ("exchange", "gather", ValueError, "one of auto, all_gather, all_to_all, got 'gather'"),
    ("transport", "gloo", ValueError, "one of auto, nccl, copies, got 'gloo'"),
    ("verify", "always", ValueError, "one of off, first, got 'always'"),
    ("keep", "all", ValueError, "one of preactivation, h8, input, auto, got 'all'"),
    ("keep", None, TypeError, "one of preactivation, h8, input, auto, got None"),
    ("keep", ["input"], TypeError, "one of preactivation, h8, input, auto, got ['input']"),
    ("layers_in_flight", 0, ValueError, "an int of 1 or more, got 0"),
    ("layers_in_flight", 1.0, TypeError, "an int of 1 or more, got 1.0"),
    ("layers_in_flight", None, TypeError, "an int of 1 or more, got None"),
    ("layers_in_flight", True, TypeError, "an int of 1 or more, got True"),
    ("max_layer_transient_bytes", -1, ValueError, "an int of 1 or more, or None, got -1"),
    ("max_layer_transient_bytes", "1 GiB", TypeError, "an int of 1 or more, or None, got '1 GiB'"),
    ("max_transient_bytes", 0, ValueError, "an int of 1 or more, or None, got 0"),
    ("max_transient_bytes", 512e6, TypeError, "an int of 1 or more, or None, got 512000000.0"),
    ("tokens_per_rank", 0, ValueError, "an int of 1 or more, or None, got 0"),
    ("strict", "yes", TypeError, "True or False, got 'yes'"),
    ("kept", "input", AttributeError, "one of the knobs arrived_rows, "),
    ("snapshot", None, AttributeError, "one of the knobs arrived_rows, "),
]


def test_every_knob_is_here():
    assert [knob for knob in RIGHT if knob != "quiet"] == list(config.snapshot())


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in RIGHT.items() for value in values])
def test_right_values(monkeypatch, name, value):
    monkeypatch.setattr(config, name, value)
    assert getattr(config, name) == value
    assert config.snapshot().get(name) == (None if name == "quiet" else value), "it decides nothing of what is compiled"


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG)
def test_wrong_values(name, value, error, message):
    before = config.snapshot()
    with pytest.raises(error) as raised:
        setattr(config, name, value)
    assert type(raised.value) is error
    assert str(raised.value).startswith(f"config: {name} must be {message}")
    assert config.snapshot() == before


def test_tokens_do_not_move_where_bits_stay(monkeypatch):
    both = ("batch_invariant", True), ("experts_move", "tokens")
    for first, second in (both, both[::-1]):
        with monkeypatch.context() as patch:
            patch.setattr(config, *first)
            with pytest.raises(ValueError, match="config: experts_move must not be tokens with batch_invariant"):
                setattr(config, *second)


def test_a_knob_is_documented_and_read():
    """Each has a text behind it, and a reader."""
    body = ast.parse(inspect.getsource(config)).body
    documented = [
        statement.target.id
        for statement, text in zip(body, body[1:], strict=False)
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    ]
    assert documented == list(RIGHT)
    root = Path(config.__file__).resolve().parent
    folders = [folder for folder in (root, root.parent / "kernels", root.parent / "lowering") if folder.is_dir()]
    sources = "".join(file.read_text() for folder in folders for file in folder.rglob("*.py") if file.name != "config.py")
    assert not [name for name in RIGHT if f"config.{name}" not in sources]


def test_compiled_code_sees_a_change(monkeypatch):
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    def read(x):
        return x + (1 if config.keep == "input" else 2)

    torch._dynamo.reset()
    run = torch.compile(read, backend=backend, fullgraph=True)
    assert run(torch.zeros(())) == 2
    monkeypatch.setattr(config, "keep", "input")
    assert run(torch.zeros(())) == 1
    assert len(graphs) == 2


def test_a_knob_is_set_while_compiling():
    """As a function that is compiled may do it, which is left to Python."""

    def wrong(x):
        config.keep = "all"
        return x + 1

    torch._dynamo.reset()
    with pytest.raises(ValueError, match="config: keep must be one of preactivation, h8, input, auto, got 'all'"):
        torch.compile(wrong, backend="eager")(torch.zeros(()))
    assert config.keep == "preactivation"
