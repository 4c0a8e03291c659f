"""Programs in processes of their own, forks of one that has imported PyTorch's compiler: that takes longer than most of them do.

What is about that import, or about a setting of Python's, is run by ``subprocess`` instead.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

_SERVER = """
import json, os, runpy, sys, traceback
import torch._functorch.config
import torch._inductor.compile_fx
import torch.distributed.run as torchrun

def launch(arguments):
    # torchrun itself, but for ranks that are forks of this process. CUDA can't be used in one.
    start = torchrun.elastic_launch
    def start_forks(config, entrypoint):
        config.start_method = "fork"
        return start(config, run_rank)
    if not torch.cuda.is_available():
        torchrun.elastic_launch = start_forks
    torchrun.main(arguments)

def run_rank(unbuffered, script, *arguments):
    # Each rank would have g++ build the loops that Inductor writes, or one of them what another has in a cache by then.
    torch._inductor.config.fallback_by_default = True
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
    run(script, *arguments)
    sys.stdout.flush()

def run(first, *arguments):
    if first == "torchrun":
        launch([*arguments])
    elif first == "-c":
        code, *sys.argv[1:] = arguments
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = [*arguments]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *arguments], os.path.dirname(os.path.abspath(first))
        runpy.run_path(first, run_name="__main__")

for line in sys.stdin:
    folder, streams, variables, arguments = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(folder)
    os.environ.update(variables)
    sys.path[0] = folder
    sys.stdin.close()
    for stream, name in enumerate(streams, start=1):
        os.dup2(os.open(name, os.O_WRONLY), stream)
    try:
        run(*arguments)
    except Exception:
        traceback.print_exc()
        os._exit(1)
    sys.exit()
"""


@functools.cache
def _server() -> subprocess.Popen:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Runs what Python runs with these arguments, or ``torchrun`` with its own; ``variables`` are of the environment."""
    server = _server()
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
        command = [str(folder), [output.name, errors.name], variables, [*map(str, arguments)]]
        print(json.dumps(command), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, output.read(), errors.read())


def printed_by(*arguments: str, folder: Path, **variables: str) -> str:
    done = run(*arguments, folder=folder, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
