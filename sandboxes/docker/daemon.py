"""Starts a private Docker daemon if none answers: for tests and benchmarks on a machine without one."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.errors import UserError

INSTALL = "apt-get install docker.io debootstrap"
PATIENCE = 60.0


def answers() -> bool:
    """Whether the daemon of DOCKER_HOST, or else the default one, answers."""
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=10)
        try:
            return bool(client.ping())
        finally:
            client.close()
    except DockerException:
        return False


@contextmanager
def running() -> Iterator[str]:
    """Yield the address of a daemon that answers; DOCKER_HOST holds it for the length of the block."""
    if answers():
        yield os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        return
    folders = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/usr/local/bin"  # not on everybody's PATH
    dockerd = shutil.which("dockerd", path=folders)
    if dockerd is None:
        raise UserError(f"Docker is not installed: {INSTALL}")
    if os.geteuid() != 0:
        raise UserError("no Docker daemon answers, and only root can start one: systemctl start docker")
    folder = tempfile.mkdtemp(prefix="agentrl-dockerd-")
    address, before = f"unix://{folder}/socket", os.environ.get("DOCKER_HOST")
    process = _start(dockerd, folder, address)
    os.environ["DOCKER_HOST"] = address
    try:
        _wait(process, folder)
        yield address
    finally:
        if before is None:
            os.environ.pop("DOCKER_HOST", None)
        else:
            os.environ["DOCKER_HOST"] = before
        _stop(process, folder)


def _start(dockerd: str, folder: str, address: str) -> subprocess.Popen[bytes]:
    """Start it without bridge and firewall rules: our containers have no network, and the machine's is left alone."""
    options = [f"--host={address}", f"--data-root={folder}/data", f"--exec-root={folder}/exec"]
    options += [f"--pidfile={folder}/pid", f"--cgroup-parent={os.path.basename(folder)}", "--bridge=none"]
    options += ["--iptables=false", "--ip-forward=false", "--ip-masq=false"]
    # if the parent dies without stopping it, the daemon gets a signal and ends with everything it started
    leash = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    with open(f"{folder}/log", "wb") as log:
        return subprocess.Popen(
            [*leash, dockerd, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _wait(process: subprocess.Popen[bytes], folder: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not answers():
        if process.poll() is not None or time.monotonic() > deadline:
            said = Path(folder, "log").read_text(errors="replace").splitlines()[-5:]
            raise UserError("a Docker daemon could not be started here; it said: " + " | ".join(said))
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes], folder: str) -> None:
    """End it, its containerd and its containers, and remove its mounts, control groups and files."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for mount in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        mount_point = mount.split()[1]
        if mount_point.startswith(folder + "/"):
            subprocess.run(["umount", "-l", mount_point], capture_output=True)
    _remove_groups(os.path.basename(folder))
    shutil.rmtree(folder, ignore_errors=True)


def _remove_groups(name: str) -> None:
    """Remove control groups of that name with everything below: a daemon makes them below its own groups."""
    for group in sorted(glob.glob(f"/sys/fs/cgroup/**/{name}/**/", recursive=True), key=len, reverse=True):
        with suppress(OSError):
            os.rmdir(group)
