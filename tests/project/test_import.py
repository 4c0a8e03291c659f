"""A cold import, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import moeblaze_ops

_PROGRAM = """
import sys, time
import torch

def settings():
    return {
        "default dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "random state": torch.get_rng_state().sum().item(),
    }

# torch's registry of flop formulas, which the ops add theirs to, imports Triton where it is installed.
import torch.utils.flop_counter

loaded, before = set(sys.modules), settings()
start = time.perf_counter()
import moeblaze_ops
seconds = time.perf_counter() - start
changed = {name: value for name, value in settings().items() if before[name] != value}
assert not changed, changed
heavy = {"torch._dynamo", "torch._inductor", "torch._functorch", "triton"} & (set(sys.modules) - loaded)
assert not heavy, heavy
assert callable(moeblaze_ops.enable) and callable(moeblaze_ops.explain)
print(seconds)
"""


def test_cold_import():
    """It changes no setting, imports neither the compiler nor Triton, and takes a fraction of what torch takes."""
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    # Tens of milliseconds on an idle machine; the bound allows for a busy one.
    assert float(result.stdout) < 3


def test_sharding_registers_what_cached_graphs_call():
    ops = ("experts_over_ranks_backward", "row_numbers", "sum_rows", "used_slots", "most_tokens", "expert_mlp_by_rank")
    program = f"import torch, moeblaze_ops.distributed\n[getattr(torch.ops.moeblaze, name) for name in {ops}]"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_cpu_needs_no_triton():
    program = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch, moeblaze_ops\n"
        "x, w_up, w_down = torch.randn(6, 16), torch.randn(4, 16, 16), torch.randn(4, 16, 8)\n"
        "moeblaze_ops.moe(x, torch.rand(6, 2), torch.randint(0, 4, (6, 2)), w_up, w_down)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_switch_needs_no_numpy():
    """Torch does not ask for it, and neither do we."""
    program = "import sys\nsys.modules['numpy'] = None\nimport moeblaze_ops\nmoeblaze_ops.enable()\n"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_switch_changes_no_compiler_setting_by_import():
    program = (
        "import torch, torch._dynamo, torch._inductor.config as inductor, torch._dynamo.config as dynamo\n"
        "before = inductor.save_config_portable(), dynamo.save_config_portable()\n"
        "import moeblaze_ops.compile\n"
        "assert (inductor.save_config_portable(), dynamo.save_config_portable()) == before\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_explain_stays_a_function():
    """``moeblaze_ops.explain`` is a function although a module has the same name, whatever was imported first."""
    program = "import moeblaze_ops.explain, moeblaze_ops\nassert callable(moeblaze_ops.explain)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_tools_see_what_is_public():
    assert set(dir(moeblaze_ops)) == {*moeblaze_ops.__all__, "__version__", "config", "distributed", "integrations"}
    assert all(hasattr(moeblaze_ops, name) for name in dir(moeblaze_ops))


@pytest.mark.parametrize(
    ("asked", "said"), [("moeblaze", {"info", "warning"}), ("+moeblaze", {"debug", "info", "warning"}), ("-moeblaze", set())]
)
def test_torch_logs(asked, said, tmp_path):
    """torch reads the variable before this package is there, and finds ``moeblaze`` where it is installed."""
    (tmp_path / "moeblaze").symlink_to(Path(moeblaze_ops.__file__).parent / "torch_logs")
    program = (
        "import torch, logging, moeblaze_ops\n"
        "[getattr(logging.getLogger('moeblaze_ops.compile'), level)(f'said {level}') for level in ('debug', 'info', 'warning')]\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TORCH_LOGS": asked, "PYTHONPATH": path}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert {level for level in ("debug", "info", "warning") if f"said {level}" in result.stderr} == said
    assert result.stderr.count("said warning") <= 1
