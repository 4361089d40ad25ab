"""Sandboxes inside an ordinary container: what works there, what the doctor says, and one episode of `files`.

The containers have no capability, no new privileges, an ordinary user and a read-only root: what a strict cluster
allows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.sandboxes import Backend
from agentrl.sandboxes.docker import images

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from agentrl import doctor, sandboxes
from agentrl.envs.testing import play_script
from agentrl.sandboxes import SandboxSpec
name = sys.argv[1]
findings = {finding.name: finding for finding in doctor.sandboxes()}
out = {each: [found.works, list(found.missing), found.fix] for each, found in findings.items()}
out["status"] = [line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapBnd", "NoNewPrivs"))]
if findings[name].works:
    out["played"] = [play_script("files", level=1, sandbox=name).score, play_script("files", ["x"], sandbox=name).score]
    backend = sandboxes.load(name)()
    with backend.create(SandboxSpec()) as box:
        secret = box.exec(["grep", "-c", "KEY=hidden", f"/proc/{os.getpid()}/environ"])
        out["reads_the_player"] = secret.stdout.decode().strip() == "1"
        out["sees"] = box.exec(["sh", "-c", "test -e /agentrl && echo host"]).stdout.decode().strip()
    backend.close()
print(json.dumps(out))
"""


def in_container(daemon: str, sandbox: str, *options: str) -> dict[str, Any]:
    """Run the program in an unprivileged container, with this checkout and its packages mounted read-only."""
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    image = images.describe("base")
    assert image is not None
    command = ["docker", "--host", daemon, "run", "--rm", "--network=none", "--user=1000:1000", "--cap-drop=ALL"]
    command += ["--security-opt=no-new-privileges", "--read-only", "--tmpfs=/tmp", "--memory=1g", "--pids-limit=200"]
    command += [f"--volume={ROOT}:/agentrl:ro", f"--volume={packages}:/packages:ro", "--env=PYTHONDONTWRITEBYTECODE=1"]
    command += ["--env=PYTHONPATH=/agentrl:/packages", "--env=HOME=/tmp", "--env=KEY=hidden", *options]
    done = subprocess.run(
        [*command, image.tag, "python3", "-c", PROGRAM, sandbox], capture_output=True, text=True, timeout=300
    )
    if "ModuleNotFoundError" in done.stderr or "SyntaxError" in done.stderr:
        pytest.skip(f"the image's Python cannot use this one's packages: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["status"] == ["0000000000000000", "1"]
    return report


def test_the_process_backend_plays_in_an_ordinary_container(docker: Backend, daemon: str) -> None:
    """It is the only one that works there, and it keeps nothing from the policy."""
    report = in_container(daemon, "process")
    assert report["played"] == [1.0, 0.0]
    assert (report["reads_the_player"], report["sees"]) == (True, "host")
    assert [report[name][0] for name in ("process", "namespace", "docker")] == [True, False, False]
    assert report["process"][1] == [
        "every isolation of its own: commands can do whatever this container may, and read this process"
    ]
    assert report["namespace"][2].startswith("this container's seccomp profile allows no user namespaces: docker run")
    assert report["docker"][2].startswith("set DOCKER_HOST")


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="long; set AGENTRL_FULL")
def test_the_namespace_backend_needs_proc_unmasked(docker: Backend, daemon: str) -> None:
    report = in_container(daemon, "namespace", "--security-opt=seccomp=unconfined")
    assert not report["namespace"][0]
    assert report["namespace"][2].startswith("this container hides parts of /proc")


def test_the_namespace_backend_isolates_in_a_container_that_allows_it(docker: Backend, daemon: str) -> None:
    """Without a capability: two settings are enough."""
    allow = ("--security-opt=seccomp=unconfined", "--security-opt=systempaths=unconfined")
    report = in_container(daemon, "namespace", *allow)
    assert report["namespace"][0], report["namespace"]
    assert report["played"] == [1.0, 0.0]
    assert (report["reads_the_player"], report["sees"]) == (False, "")
    assert (
        report["namespace"][2] == "limit the container as a whole (--memory, --pids-limit; resources.limits of a pod)"
    )
