"""Three machines made of namespaces: one loses its power or its network, and the rollouts are the same.

Each host has a network, mount, process and host-name namespace, its own /dev/shm, /tmp/ray and loopback, and a cable
(veth) into a bridge that is in a namespace of its own too. The machine's own network is not touched.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cluster.connect import HEALTH_CHECKS
from tests.cluster.rollouts import PATIENT

NET = "10.77.0."
RAY = str(Path(sys.executable).parent / "ray")
PREFIX = f"agr{os.getpid() % 100_000}"
HOSTS = [f"{PREFIX}h{number}" for number in range(3)]
SWITCH = f"{PREFIX}sw"
DRIVER = Path(__file__).with_name("host_driver.py")
FULL = bool(os.environ.get("AGENTRL_FULL"))
STORE = "--object-store-memory=83886080"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="hosts of namespaces need root and iproute2"
)


def sh(text: str, *, check: bool = True) -> None:
    done = subprocess.run(text, shell=True, check=False, capture_output=True, text=True)
    assert not check or done.returncode == 0, f"{text}: {done.stderr}"


@pytest.fixture
def network() -> Iterator[None]:
    try:
        sh(f"ip netns add {SWITCH} && ip -n {SWITCH} link add br0 type bridge && ip -n {SWITCH} link set br0 up")
        for i, name in enumerate(HOSTS):
            sh(f"ip netns add {name} && ip link add v{i} netns {name} type veth peer name p{i} netns {SWITCH}")
            sh(f"ip -n {SWITCH} link set p{i} master br0 up && ip -n {name} link set lo up")
            sh(f"ip -n {name} addr add {NET}{i + 1}/24 dev v{i} && ip -n {name} link set v{i} up")
        yield
    finally:
        for name in (*HOSTS, SWITCH):
            sh(f"ip netns del {name}", check=False)


def host(number: int, command: str, log: Path, token: str) -> subprocess.Popen[bytes]:
    """Start a host whose first process is `command`; when that ends, so does everything on it."""
    inside = (
        "mount -t tmpfs -o size=300m tmpfs /dev/shm; mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray; "
        f"hostname {HOSTS[number]}; {command}"
    )
    line = ["ip", "netns", "exec", HOSTS[number], "unshare", "-m", "-u", "-p", "-f", "--mount-proc", "--kill-child"]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, **PATIENT}
    variables["RAY_TMPDIR"] = "/tmp"  # whatever TMPDIR says: the host's own
    return subprocess.Popen(
        [*line, "bash", "-c", inside],
        stdout=log.open("wb"),
        stderr=subprocess.STDOUT,
        env={**variables, "RAY_ADDRESS": f"{NET}1:6379"},
        start_new_session=True,
    )


@pytest.mark.timeout(540)  # below what ends all of tests/cluster
@pytest.mark.parametrize(
    "fault", ["link", pytest.param("power", marks=pytest.mark.skipif(not FULL, reason="a minute; set AGENTRL_FULL"))]
)
def test_a_cut_link_and_a_host_without_power(fault: str, network: None, alone: str, tmp_path: Path) -> None:
    token, driver = secrets.token_hex(32), f"{sys.executable} {DRIVER} {tmp_path}"
    checks = shlex.quote(json.dumps(HEALTH_CHECKS))
    first = (
        f"--head --node-ip-address={NET}1 --port=6379 --num-cpus=2 {STORE} --include-dashboard=false --no-monitor "
        f"--system-config={checks}"
    )
    head = (
        f"{driver} > {tmp_path}/out & "  # it has much to import meanwhile
        f"export RAY_ADDRESS=; {started(first, f'touch {tmp_path}/head')}; wait $!"
    )
    hosts = [host(0, head, tmp_path / "log0", token)]
    try:
        wait_for(tmp_path / "head", hosts[0], tmp_path / "log0")
        for i in (1, 2):
            join = f"--address={NET}1:6379 --node-ip-address={NET}{i + 1} --num-cpus=2 {STORE}"
            then = started(join, f"touch {tmp_path}/joined{i}")
            hosts.append(host(i, f"{then}; sleep infinity", tmp_path / f"log{i}", token))
            wait_for(tmp_path / f"joined{i}", hosts[0], tmp_path / f"log{i}")  # both at once may take too long for Ray
        wait_for(tmp_path / "fault", hosts[0], tmp_path / "log1")
        if fault == "link":
            sh(f"ip -n {SWITCH} link set p2 down")
        else:
            os.killpg(hosts[2].pid, signal.SIGKILL)  # with the namespace's first process all others end at once
        assert hosts[0].wait(300) == 0, (tmp_path / "log0").read_text()
    finally:
        for one in hosts:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
    report: dict[str, Any] = json.loads((tmp_path / "out").read_text().splitlines()[-1])
    assert report["digest"] == alone, report["said"]
    assert report["hosts"] == [f"{name} ({NET}{i + 1})" for i, name in enumerate(HOSTS)]
    assert report["counts"]["players_lost"] == 1
    assert report["counts"]["rollouts_lost"] == report["counts"]["rollouts_repeated"] > 0
    assert report["seconds"] < 10.0, report["said"]


def started(options: str, then: str) -> str:
    """Return what starts Ray and then does something. On a busy machine an agent of Ray's may not report in time; its
    raylet then gives up, and `ray start` waits for what is gone."""
    failed = f"head -50 /tmp/ray/session_2*/logs/raylet.err; {RAY} stop --force"
    return f"for try in 1 2 3; do timeout 60 {RAY} start {options} && {then} && break; {failed}; done"


def wait_for(path: Path, process: subprocess.Popen[bytes], log: Path, seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
