"""Tests of the docker backend alone: containers that end with their owner, images, a missing daemon."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import AuthoringError, SandboxDied, SandboxError
from agentrl.sandboxes import Backend, Entry, Limits, Sandbox, SandboxSpec
from agentrl.sandboxes.pool import Pool
from tests.processes import within

SPEC = SandboxSpec(
    files={
        "src/main.py": "print('hi')\n",
        "bin/tool": Entry(content=b"#!/bin/sh\necho tool\n", mode=0o755),
        "empty": Entry("dir", mode=0o700),
        "latest": Entry("link", b"src/main.py"),
        "ünïcode": "x",
    }
)
HOSTILE = r"""
for i in 1 2 3 4 5 6 7 8; do (setsid sleep 1000 >/dev/null 2>&1 &); done
(chattr +i src/main.py; setfattr -n user.x -v y src/main.py) 2>/dev/null
chmod 000 src bin/tool; chmod 7777 empty; ln src/main.py l1; mkfifo f; (cat f &)
echo x > /dev/shm/x; echo y > /tmp/y; echo z > ~/.bashrc; mkdir -p -- '-rf' '...' ' '; printf x > "$(printf 'bad\377')"
hostname evil 2>/dev/null; mount --bind /tmp src 2>/dev/null; rm -rf empty latest
i=0; while [ $i -lt 500 ]; do : > m$i; i=$((i+1)); done; dd if=/dev/zero of=fill bs=1M 2>/dev/null; true
"""


@pytest.fixture
def sdk(docker: Backend) -> Any:
    return docker.client()  # type: ignore[attr-defined]


@pytest.fixture
def box(docker: Backend) -> Iterator[Sandbox]:
    with docker.create(SPEC) as box:
        yield box


def containers(sdk: Any) -> set[str]:
    return {container["Id"] for container in sdk.api.containers(all=True, filters={"label": "agentrl.owner"})}


def test_it_is_told_everything_that_closes_a_container(box: Sandbox, sdk: Any) -> None:
    details = sdk.api.inspect_container(box._container._id)  # type: ignore[attr-defined]
    host, config = details["HostConfig"], details["Config"]
    assert {key: host[key] for key in ("NetworkMode", "ReadonlyRootfs", "CapDrop", "SecurityOpt", "Privileged")} == {
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "Privileged": False,
    }
    limits = box.spec.limits
    assert (host["Memory"], host["MemorySwap"]) == (limits.memory_mb << 20, limits.memory_mb << 20)
    assert (host["PidsLimit"], host["NanoCpus"]) == (limits.processes + 1, int(limits.cpus * 1e9))
    assert (config["User"], config["Hostname"], host["Binds"], details["Mounts"]) == ("1000:1000", "box", None, [])


def test_after_a_hostile_episode_the_next_box_is_the_same(docker: Backend) -> None:
    with docker.create(SPEC) as first:
        before = first.digest()
        first.exec(["bash", "-c", HOSTILE], timeout=30)
        first.kill_all()
        assert first.digest() != before and first.ledger()["created_count"] > 500
    with docker.create(SPEC) as second:
        seen = second.exec(["sh", "-c", "uname -n; ls -A /tmp /dev/shm ~ | grep -v :; echo $A $$"]).stdout
        assert (second.digest(), seen.split()) == (before, [b"box", b"32"])


def test_many_at_once_are_all_alike(docker: Backend) -> None:
    def one(_: int) -> tuple[str, bytes, str]:
        with docker.create(SPEC) as box:
            out = box.exec(["sh", "-c", "echo $$; date +%Z; env | sort; stat -c '%Y %a %u %g %n' src/* . bin/*"]).stdout
            return box.digest(), out, box.root

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(one, range(8)))) == 1


def test_a_snapshot_holds_every_writable_folder(docker: Backend, box: Sandbox) -> None:
    box.exec(["sh", "-c", "echo t > /tmp/t; echo h > ~/h; echo s > /dev/shm/s; head -c 9000000 /dev/urandom > big"])
    name, digest = box.snapshot(), box.digest()
    box.kill_all()
    with box.fork(name) as twin:
        assert twin.digest() == digest
        assert twin.exec(["sh", "-c", "cat /tmp/t ~/h /dev/shm/s"]).stdout == b"t\nh\ns\n"


def test_the_agent_survives_what_its_own_user_does_to_it(box: Sandbox) -> None:
    source = """
import os, resource, signal
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
tried = []
for path in ("/proc/1/fd/0", "/proc/1/fd/1", "/proc/1/mem", "/proc/1/oom_score_adj", "/proc/1/environ", "/proc/1/maps"):
    try: os.close(os.open(path, os.O_RDWR if "fd" in path or "mem" in path else os.O_RDONLY)); tried.append(path)
    except OSError: pass
try: resource.prlimit(1, resource.RLIMIT_NOFILE, (1, 1)); tried.append("prlimit")
except OSError: pass
resource.setrlimit(resource.RLIMIT_CPU, (100, 100))
for number in range(3, 4096):
    try: os.write(number, b"x" * 4096)
    except OSError: pass
print(tried)
"""
    before = box.digest()
    assert box.python(source).stdout in (b"['/proc/1/oom_score_adj']\n", b"[]\n")
    assert box.exec(["echo", "well"]).stdout == b"well\n"
    assert box.digest() == before


def test_streams_do_not_hold_each_other_up(box: Sandbox) -> None:
    shell = box.shell()
    shell.run("(yes | head -c 3000000; echo done > /tmp/flag) &")  # nobody reads this between two calls
    assert box.exec(["cat"], stdin=b"y" * 900_000).stdout == b"y" * 900_000
    assert box.exec(["true"], stdin=b"x" * 900_000).ok  # a command that never reads its input
    assert len(shell.run("wait; cat /tmp/flag", timeout=60).stdout) == box.spec.limits.output_bytes
    shell.close()


def test_an_end_from_outside_and_one_from_inside_are_told_apart(docker: Backend, sdk: Any) -> None:
    with docker.create(SPEC) as victim:
        sdk.api.kill(victim._container._id)  # type: ignore[attr-defined]
        with pytest.raises(SandboxError, match="from outside"):
            for _ in range(100):
                victim.exec(["true"])
    with (
        docker.create(SandboxSpec(limits=Limits(memory_mb=48))) as starved,
        pytest.raises(SandboxDied, match="memory"),
    ):
        starved.python("#" * (40 << 20))  # the agent itself has to hold this


def test_out_of_memory_is_counted(docker: Backend) -> None:
    with docker.create(SandboxSpec(limits=Limits(memory_mb=48))) as box:
        assert box.python("x = [bytearray(1 << 20) for _ in range(500)]").exit_code == -9
        box.kill_all()
        assert box.ledger()["out_of_memory"] == 1


def test_a_pool_hands_out_prepared_containers(docker: Backend, sdk: Any) -> None:
    before = containers(sdk)
    with Pool(type(docker)(), limit=4, ahead=2) as pool:
        with pool.take(SPEC):
            pass
        assert within(30, lambda: pool._prepared() == 2)
        start = time.perf_counter()
        with pool.take(SPEC) as box:
            took = time.perf_counter() - start
            assert box.exec(["sh", "bin/tool"]).stdout == b"tool\n"
    assert took < 0.5, f"{took:.3f} s from the pool"  # 6 ms on a quiet machine; a fresh one takes longer than this
    assert within(20, lambda: containers(sdk) <= before)


PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background ignores it
from agentrl import sandboxes
from agentrl.sandboxes import SandboxSpec
backend = sandboxes.load("docker")()
boxes = [backend.create(SandboxSpec()) for _ in range(2)]
for box in boxes:
    box.exec(["sh", "-c", "(setsid sleep 98765 &); sleep 98765 &"])
print(*(box._container._id for box in boxes), flush=True)
END
"""


@pytest.mark.parametrize(
    ("last", "number"),
    [
        ("boxes[0].exec(['sleep', '60'], timeout=60)", signal.SIGKILL),
        ("boxes[0].exec(['sleep', '60'], timeout=60)", signal.SIGINT),
        ("raise ValueError('on purpose')", None),
    ],
    ids=["kill -9", "Ctrl-C", "an exception"],
)
def test_nothing_outlives_the_parent(docker: Backend, sdk: Any, last: str, number: int | None, tmp_path: Path) -> None:
    program = PROGRAM.replace("END", last)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as parent:
        assert parent.stdout is not None
        ids = set(parent.stdout.readline().decode().split())
        assert len(ids) == 2
        if number is not None:
            parent.send_signal(number)
        parent.wait(60)
    assert within(30, lambda: not ids & containers(sdk)), "containers stayed"
    assert within(10, lambda: not left_of(ids)), left_of(ids)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("agentrl-")] == []


def left_of(ids: set[str]) -> list[str]:
    """Return mounts, control groups and processes in whose names a container's id appears."""
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    leftovers = [line for line in mounts if any(name in line for name in ids)]
    for name in ids:
        groups = subprocess.run(["find", "/sys/fs/cgroup", "-name", f"*{name}*"], capture_output=True, text=True)
        leftovers += groups.stdout.split()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text()
            except OSError:
                continue
            leftovers += [words for name in ids if name in words]
    return leftovers


def test_what_a_dead_owner_left_is_swept(docker: Backend, sdk: Any) -> None:
    from agentrl.sandboxes.docker.backend import LABEL, DockerBackend, _owner

    with docker.create(SPEC) as box:
        image = sdk.api.inspect_container(box._container._id)["Config"]["Image"]  # type: ignore[attr-defined]
        boot, space, _, _ = _owner().split(":")
        left = sdk.api.create_container(image, ["true"], labels={LABEL: f"{boot}:{space}:1:12345"})["Id"]
        others = sdk.api.create_container(image, ["true"], labels={LABEL: f"another-machine:{space}:1:12345"})["Id"]
        fresh = DockerBackend()
        fresh.client()
        fresh.close()
        assert left not in containers(sdk) and others in containers(sdk)
        sdk.api.remove_container(others)
        assert box.exec(["true"]).ok


def test_containers_leave_no_descriptor_or_thread(docker: Backend) -> None:
    import threading

    with docker.create(SPEC) as box:
        box.exec(["true"])
    gc.collect()  # what other tests left is not to be counted
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for turn in range(3):
        with docker.create(SPEC) as box:
            shell = box.shell()
            shell.run("sleep 1000 &")
            box.python("print(1)")
            if turn % 2:
                shell.close()
            else:
                box.kill_all()
            del shell
    del box
    gc.collect()
    after = len(os.listdir("/proc/self/fd")), threading.active_count()
    assert after[0] <= before[0] + 2 and after[1] <= before[1]  # a connection or two to the daemon may be kept


def test_an_episode_is_played_and_graded_as_in_a_namespace_box(docker: Backend, namespace: Backend) -> None:
    from agentrl.envs.testing import play_script

    here, there = (play_script("files", sandbox=name, level=1) for name in ("docker", "namespace"))
    assert (here.score, here.digests[0]) == (1.0, there.digests[0])


# images


def test_a_described_image_is_built_on_another(
    docker: Backend, sdk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.sandboxes.docker import images

    base = images.describe("base")
    assert base is not None
    folder = tmp_path / "sandboxes" / "docker" / "images" / "greeting"
    folder.mkdir(parents=True)
    (folder / "image.toml").write_text(f'from = "{base.tag}"\ncommands = ["echo hello > /opt/greeting"]\n')
    monkeypatch.setenv("AGENTRL_PATH", str(tmp_path))
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(images, "way", lambda _: "build")
    monkeypatch.setattr(images, "NEEDED", ())
    described = images.describe("greeting")
    assert described is not None and images.dockerfile(described).splitlines() == [
        f"FROM {base.tag}",
        'RUN ["sh", "-c", "echo hello > /opt/greeting"]',
    ]
    try:
        with docker.create(SandboxSpec(image="greeting")) as box, docker.create(SandboxSpec()) as plain:
            assert box.exec(["cat", "/opt/greeting"]).stdout == b"hello\n"
            assert box.digest() == plain.digest() and box.root != plain.root
    finally:
        sdk.images.remove(described.tag, force=True)


def test_wrong_images_are_named(docker: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AuthoringError, match="neither 'host'"):
        docker.create(SandboxSpec(image="no-such-image"))
    with pytest.raises(AuthoringError, match="user 0"):
        docker.create(SandboxSpec(user=0))
    folder = tmp_path / "sandboxes" / "docker" / "images" / "wrong"
    folder.mkdir(parents=True)
    (folder / "image.toml").write_text('package = ["x"]\n')
    monkeypatch.setenv("AGENTRL_PATH", str(tmp_path))
    with pytest.raises(AuthoringError, match=r"package = \['x'\] cannot be used; allowed: suite"):
        docker.create(SandboxSpec(image="wrong"))


def test_the_groups_of_an_own_daemon_go_wherever_they_lie() -> None:
    """Below another group, as where this process itself is in one."""
    from agentrl.sandboxes.docker.daemon import _remove_groups

    root = Path("/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").is_dir() else "/sys/fs/cgroup")
    if not os.access(root, os.W_OK):
        pytest.skip("control groups can only be made by root")
    name = f"agentrl-daemon-{os.getpid()}"
    outer = root / f"agentrl-above-{os.getpid()}"
    (outer / name / "container").mkdir(parents=True)
    try:
        _remove_groups(name)
        assert [path.name for path in outer.iterdir() if path.is_dir()] == []
    finally:
        _remove_groups(outer.name)


# a daemon that is missing, closed or of another kind


def test_it_says_what_is_missing(daemon: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.sandboxes.docker import DockerBackend

    other = DockerBackend(runtime="runsc-nowhere").available()
    assert not other.works and "no runtime 'runsc-nowhere'" in other.missing[0]
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    monkeypatch.setattr("agentrl.sandboxes.docker.backend.in_container", lambda: False)
    gone = DockerBackend().available()
    assert not gone.works and gone.missing[0].startswith(f"no Docker daemon answers at unix://{tmp_path}/none")
    assert "dockerd" in gone.fix
    with socket.socket(socket.AF_UNIX) as closed:
        closed.bind(f"{tmp_path}/closed")
        os.chmod(f"{tmp_path}/closed", 0)
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/closed")
        program = (
            "import os, docker, requests, agentrl.sandboxes.docker as d\nif os.geteuid() == 0: os.seteuid(65534)\n"
            "seen = d.DockerBackend().available(); print(seen.works, seen.fix)"
        )
        os.chmod(tmp_path, 0o755)
        for above in tmp_path.parents[:2]:
            os.chmod(above, 0o755)
        told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.stdout.strip() == "False usermod -aG docker $USER, then log in again (or run as root)", told
