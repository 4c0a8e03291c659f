"""Two hosts on one machine: namespaces of Linux with names, memory and a network of their own, and a wire between them."""

import os
import subprocess
from collections.abc import Callable, Sequence

RATE = "1gbit"

_HOST = """
export GLOO_SOCKET_IFNAME=wire MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_RANK=$1
hostname "host$1"
mount -t tmpfs none /dev/shm
ip link set lo up
until ip link show wire >/dev/null 2>&1; do sleep 0.05; done
ip address add "10.0.0.$(($1 + 1))/24" dev wire
ip link set wire up
tc qdisc add dev wire root tbf rate RATE burst 256kb latency 50ms
shift
"$@"
""".replace("RATE", RATE)

_BOTH = """
unshare -nmu sh -c 'touch "$FOLDER/unshared"; sh -c "$HOST" host 1 "$@"; touch "$FOLDER/ended"; sleep infinity' second "$@" &
until [ -e "$FOLDER/unshared" ]; do sleep 0.05; done
ip link add wire type veth peer name wire netns $!
sh -c "$HOST" host 0 "$@"
until [ -e "$FOLDER/ended" ]; do sleep 0.05; done
"""


def two_hosts_are_possible() -> bool:
    """True if this process may make namespaces and shape their network."""
    tried = "ip link add wire type veth peer name other && tc qdisc add dev wire root tbf rate 1gbit burst 256kb latency 50ms"
    try:
        return subprocess.run(["unshare", "-Urnmupf", "sh", "-c", tried], capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def run_on_two_hosts(program: Sequence[str], folder: str, timeout_s: float) -> None:
    """Run a program on each of two hosts, with the environment of its ``torchrun`` for a host of two ranks, until both end.

    A host that has ended keeps its network until the other has: with it the wire would go, and the other's address.
    """
    settings = {**os.environ, "FOLDER": folder, "HOST": _HOST}
    command = ["unshare", "-Urnmupf", "--kill-child", "sh", "-c", _BOTH, "first", *program]
    subprocess.run(command, env=settings, timeout=timeout_s, check=True)


def fork_ranks(work: Callable[[int], None]) -> None:
    """Run ``work`` of each rank of this host, in a process of its own."""
    count = int(os.environ["LOCAL_WORLD_SIZE"])
    for rank in range(int(os.environ["GROUP_RANK"]) * count, (int(os.environ["GROUP_RANK"]) + 1) * count):
        if os.fork() == 0:
            os.environ["RANK"] = str(rank)
            try:
                work(rank)
            finally:
                os._exit(0)  # a group that has lost a rank does not end in order
    for _ in range(count):
        os.wait()
