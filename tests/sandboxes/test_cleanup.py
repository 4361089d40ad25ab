"""Nothing is left behind: no process, mount, cgroup, temporary folder or descriptor, however the parent ends."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from agentrl.sandboxes import Backend, Sandbox, SandboxSpec
from tests.processes import process_family, within

PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background ignores it
from agentrl import sandboxes
from agentrl.sandboxes import SandboxSpec
from agentrl.sandboxes.pool import Pool
backend = sandboxes.load("namespace")()
pool = Pool(backend, limit=8, ahead=2)
spec = SandboxSpec(files={"a": "b"})
taken = [pool.take(spec) for _ in range(3)]
boxes = [one.__enter__() for one in taken]
for box in boxes:
    box.exec(["sh", "-c", "(setsid sleep 98765 &); sleep 98765 & echo x > /dev/shm/x"])
print(backend.zygote()._process.pid, flush=True)
END
"""
ENDINGS = {
    "kill -9": ("boxes[0].exec(['sleep', '60'], timeout=60)", signal.SIGKILL),
    "Ctrl-C": ("boxes[0].exec(['sleep', '60'], timeout=60)", signal.SIGINT),
    "an exception": ("raise ValueError('on purpose')", None),
    "os._exit": ("import os; os._exit(3)", None),
}


def cgroups(zygote: int) -> list[str]:
    """Return a zygote's groups, wherever a controller is mounted; other tests' groups come and go meanwhile."""
    listing = subprocess.run(
        ["find", "/sys/fs/cgroup", "-maxdepth", "6", "-name", f"agentrl-*-{zygote}-*"], capture_output=True, text=True
    )
    return listing.stdout.split()


def mounts() -> list[str]:
    """Return the machine's mounts, without those of a Docker daemon that other tests may be running meanwhile."""
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if "docker" not in line]


def gone(pids: set[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_outlives_the_parent(namespace: Backend, ending: str, tmp_path: Path) -> None:
    last, number = ENDINGS[ending]
    before = mounts()
    program = PROGRAM.replace("END", last)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as parent:
        assert parent.stdout is not None
        zygote = int(parent.stdout.readline())
        family = process_family(zygote)
        if number is not None:
            assert len(family) >= 1 + 3 * 3  # the zygote; in each of three boxes an init and two sleepers
            parent.send_signal(number)
        parent.wait(30)
    assert within(10, lambda: gone(family)), f"still there: {[pid for pid in family if not gone({pid})]}"
    assert within(5, lambda: cgroups(zygote) == [])
    assert mounts() == before
    assert list(tmp_path.iterdir()) == []


def test_a_killed_zygote_takes_its_boxes_along_and_is_replaced(namespace: Backend) -> None:
    from agentrl.errors import SandboxError
    from agentrl.sandboxes.namespace import NamespaceBackend

    backend = NamespaceBackend()
    box = backend.create(SandboxSpec())
    zygote = backend.zygote()._process.pid
    family = process_family(zygote)
    os.kill(zygote, signal.SIGKILL)
    with pytest.raises(SandboxError):
        for _ in range(1000):
            box.exec(["true"])
    backend.zygote()._process.poll()
    assert within(5, lambda: gone(family - {zygote}))
    with backend.create(SandboxSpec()) as second:  # a new zygote, which sweeps what the dead one left
        assert second.exec(["echo", "again"]).stdout == b"again\n"
        assert cgroups(zygote) == []
    box.close()
    backend.close()


def test_several_zygotes_make_the_same_boxes_and_all_of_them_end(namespace: Backend) -> None:
    """Who made a box cannot be told from inside; one that dies takes only its own boxes along."""
    from agentrl.sandboxes.namespace import NamespaceBackend

    backend = NamespaceBackend(zygotes=3)
    spec = SandboxSpec(files={"a": "b"})
    look = "import os; print(set('words in some order'), os.getpid(), os.getuid(), open('/proc/self/cgroup').read())"
    owners: dict[int, list[Sandbox]] = {}
    with ExitStack() as busy:
        for _ in range(3):  # each is started because those before it are busy
            owners[backend.zygote()._process.pid] = [backend.create(spec), backend.create(spec)]
            busy.enter_context(backend.zygote()._lock)
        assert backend.zygote()._process.pid in owners  # and no fourth
    zygotes, boxes = list(owners), [box for pair in owners.values() for box in pair]
    assert len(zygotes) == 3
    assert len({(box.digest(), box.python(look).stdout) for box in boxes}) == 1
    os.kill(zygotes[0], signal.SIGKILL)
    assert all(box.exec(["true"]).ok for pid in zygotes[1:] for box in owners[pid])
    families = set[int]().union(*map(process_family, zygotes[1:]))
    for box in boxes:
        box.close()
    with backend.create(spec) as box:
        assert box.exec(["true"]).ok
    backend.close()
    assert within(10, lambda: gone(families | {zygotes[0]}))
    assert not [group for pid in zygotes[1:] for group in cgroups(pid)]


def test_closing_a_box_waits_for_no_box_that_is_being_made(namespace: Backend) -> None:
    """A zygote that makes a sandbox for somebody else holds up nobody who only gives one back."""
    from agentrl.sandboxes.namespace import NamespaceBackend

    backend = NamespaceBackend(zygotes=1)
    box = backend.create(SandboxSpec())
    zygote = backend.zygote()
    closing = threading.Thread(target=box.close, daemon=True)
    with zygote._lock:  # as while another thread waits for the zygote's answer
        closing.start()
        closing.join(5.0)
        assert not closing.is_alive()
    with backend.create(SandboxSpec()) as second:  # answers are not mixed up
        assert second.exec(["echo", "next"]).stdout == b"next\n"
    assert len(process_family(zygote._process.pid)) <= 2
    backend.close()


def test_boxes_leave_no_descriptors_processes_or_groups(namespace: Backend) -> None:
    zygote = namespace.zygote()._process.pid  # type: ignore[attr-defined]

    def left() -> tuple[int, int, list[str]]:
        """Beside one box: before it is made, the zygote has cleared away all that were closed."""
        with namespace.create(SandboxSpec()) as box:
            box.exec(["true"])
            return len(os.listdir("/proc/self/fd")), len(os.listdir(f"/proc/{zygote}/fd")), cgroups(zygote)

    before = left()
    for n in range(40):
        with namespace.create(SandboxSpec(files={"a": str(n)})) as box:
            shell = box.shell()
            shell.run("sleep 1000 &")
            box.python("print(1)")
            if n % 2:
                shell.close()
            else:
                box.kill_all()
    del shell, box
    assert within(5, lambda: process_family(zygote) == {zygote})
    assert left() == before
