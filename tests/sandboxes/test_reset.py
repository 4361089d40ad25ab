"""The same spec gives the same digest: in another process, side by side, and after whatever an episode did."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentrl.sandboxes import Backend, Entry, Sandbox, SandboxSpec

Make = Callable[..., Sandbox]
SPEC = SandboxSpec(
    files={
        "src/main.py": "print('hi')\n",
        "data/blob": bytes(range(256)) * 50,
        "bin/tool": Entry(content=b"#!/bin/sh\necho tool\n", mode=0o755),
        "empty": Entry("dir", mode=0o700),
        "latest": Entry("link", b"src/main.py"),
        "ünïcode": "x",
    }
)
HOSTILE = {
    "daemons": "for i in 1 2 3 4 5 6 7 8; do (setsid sleep 1000 >/dev/null 2>&1 &); done",
    "modes": "chmod 000 src data bin/tool; chmod 7777 empty",
    "hard links": "for i in 1 2 3 4 5; do ln data/blob l$i; done; ln src/main.py /tmp/kept",
    "fifos": "mkfifo f; rm src/main.py; mkfifo src/main.py; (cat f &)",
    "deleted folders": "rm -rf /box/* /box/.[!.]*; rmdir /box 2>/dev/null; true",
    "filled disk": "dd if=/dev/zero of=fill bs=1M 2>/dev/null; true",
    "attributes": "(chattr +i src/main.py; setfattr -n user.x -v y src/main.py) 2>/dev/null; true",
    "bind mounts": "mount --bind /tmp src 2>/dev/null; unshare -Ur true 2>/dev/null; true",
    "many files": "i=0; while [ $i -lt 3000 ]; do : > m$i; i=$((i+1)); done",
    "clock and names": "date -s 2001-01-01 2>/dev/null; hostname evil 2>/dev/null; touch -d 1999-01-01 src/main.py",
    "shared memory": "echo x > /dev/shm/x; echo y > /tmp/y; echo z > ~/.bashrc; echo 'export A=1' > ~/.profile",
    "odd names": "printf x > $'new\\nline'; printf x > \"$(printf 'bad\\377')\"; mkdir -p -- '-rf' '...' ' '",
}


def test_the_digest_is_what_it_was(namespace: Backend) -> None:
    """Written down once: a change of the digest's definition must be seen, since it goes with every trajectory."""
    with namespace.create(SandboxSpec(files={"a": "b"})) as box:
        assert box.digest() == "812c11cb3572e5c8d78329695240cab8114ada8c8643b989bcd8d899da841076"


@pytest.mark.parametrize("episode", HOSTILE)
def test_after_a_hostile_episode(namespace: Backend, episode: str) -> None:
    with namespace.create(SPEC) as first:
        before = first.digest()
        first.exec(["bash", "-c", HOSTILE[episode]], timeout=30)
        hostname = first.exec(["uname", "-n"]).stdout
        first.kill_all()
        first.digest()
        first.ledger()
    with namespace.create(SPEC) as second:
        assert second.digest() == before
        seen = second.exec(["sh", "-c", "uname -n; ls -A /tmp /dev/shm ~ | grep -v :; echo $A $$"]).stdout
        assert (hostname, seen.split()) == (b"box\n", [b"box", b"2"])


def test_64_at_once_are_all_alike(namespace: Backend) -> None:
    def one(_: int) -> tuple[str, bytes]:
        with namespace.create(SPEC) as box:
            out = box.exec(["sh", "-c", "echo $$; date +%Z; env | sort; stat -c '%Y %a %u %g %n' src/* . bin/*"]).stdout
            return box.digest(), out

    with ThreadPoolExecutor(64) as threads:
        assert len(set(threads.map(one, range(64)))) == 1


def test_in_another_process(namespace: Backend) -> None:
    program = (
        "from agentrl import sandboxes\nfrom agentrl.sandboxes import SandboxSpec\n"
        "backend = sandboxes.load('namespace')()\n"
        "with backend.create(SandboxSpec(files={'a/b': 'c'})) as box: print(box.digest(), box.root)\nbackend.close()"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    with namespace.create(SandboxSpec(files={"a/b": "c"})) as box:
        assert [box.digest(), box.root] == other


def test_after_snapshot_and_restore(namespace: Backend) -> None:
    with namespace.create(SPEC) as box, box.fork(box.snapshot()) as twin:
        assert twin.digest() == box.digest()
        assert twin.exec(["sh", "bin/tool"]).stdout == b"tool\n"


def test_every_kind_of_change_shows(box: Make) -> None:
    changes = {
        "content": "printf B > a",
        "mode": "chmod 600 a",
        "mtime": "touch -d 2001-01-01 a",
        "link": "ln -sfT /x l",
        "new": ": > n",
        "type": "rm a; mkfifo a",
        "folder's mode": "chmod 700 d",
        "workspace's mode": "chmod 700 .",
    }
    files = {"a": "A", "l": Entry("link", b"/"), "d": Entry("dir", mode=0o755)}
    seen = [box(files=files).digest()]
    for command in changes.values():
        changed = box(files=files)
        assert changed.exec(["sh", "-c", command]).ok
        seen.append(changed.digest())
    assert len(set(seen)) == len(changes) + 1


@pytest.mark.skipif("AGENTRL_FULL" not in os.environ, reason="10,000 resets take minutes: make test-full")
def test_ten_thousand_resets(namespace: Backend) -> None:
    zygote = namespace.zygote()._process.pid  # type: ignore[attr-defined]

    def left() -> tuple[int, int, int, int]:
        """Descriptors here and in the zygote, how many children it has, and the mounts of the host, beside one box."""
        with (
            namespace.create(SPEC),  # before this one is made, all that were closed have been cleared away
            open(f"/proc/{zygote}/task/{zygote}/children") as children,
            open("/proc/self/mounts") as mounts,
        ):
            counts = [len(os.listdir(f"/proc/{who}/fd")) for who in ("self", zygote)]
            return counts[0], counts[1], len(children.read().split()), sum("docker" not in line for line in mounts)

    before = left()
    digests = set()
    for _ in range(10_000):
        with namespace.create(SPEC) as box:
            digests.add(box.digest())
    assert len(digests) == 1
    assert left() == before


@pytest.mark.skipif("AGENTRL_FULL" not in os.environ, reason="a million files take minutes: make test-full")
def test_a_million_files(namespace: Backend) -> None:
    from agentrl.sandboxes import Limits

    limits = Limits(files=1_100_000, disk_mb=2048, memory_mb=4096, seconds=300)
    spec = SandboxSpec(files=SPEC.files, limits=limits)
    with namespace.create(spec) as first:
        before = first.digest()
        source = "import os\nfor i in range(1_000_000): os.close(os.open(f'/tmp/{i}', os.O_CREAT))\nprint(i)"
        assert first.python(source).stdout == b"999999\n"
    with namespace.create(spec) as second:
        assert second.digest() == before
