"""Exhausting a box is the agent's doing: its command ends or its box dies, while host and neighbours go on."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from agentrl.errors import AgentError, SandboxDied, SandboxError
from agentrl.sandboxes import Backend, ExecResult, Limits, Sandbox

Make = Callable[..., Sandbox]
SMALL = Limits(memory_mb=64, processes=16, disk_mb=8, files=200, open_files=64, output_bytes=10_000, seconds=5, cpus=1)


@pytest.fixture
def small(isolated: Make) -> Iterator[Sandbox]:
    """A small box to exhaust, beside one that must stay well."""
    neighbour = isolated(files={"a": "b"})
    yield isolated(limits=SMALL)
    assert neighbour.exec(["cat", "a"]).stdout == b"b"
    assert neighbour.python("print(1)").stdout == b"1\n"


def run(box: Sandbox, source: str, **options: float) -> ExecResult | SandboxDied:
    """How a hungry program ended: in a result, or with its box."""
    try:
        return box.python(source, **options)  # type: ignore[arg-type]
    except SandboxDied as died:
        return died


def test_memory(small: Sandbox) -> None:
    ended = run(small, "x = bytearray(500 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nprint('got it all')")
    assert isinstance(ended, SandboxDied) or (not ended.ok and ended.stdout == b"" and not ended.timed_out)


def test_memory_over_many_processes(small: Sandbox) -> None:
    source = """
import os
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(40 << 20)
        for i in range(0, len(x), 4096): x[i] = 1
        os.write(1, b"x"); os._exit(0)
while True:
    try: os.wait()
    except ChildProcessError: break
"""
    ended = run(small, source)
    assert isinstance(ended, SandboxDied) or len(ended.stdout) < 8


def test_processes(small: Sandbox) -> None:
    source = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0: time.sleep(3); os._exit(0)
        n += 1
except OSError as error:
    print(type(error).__name__, n < 20)
"""
    ended = run(small, source)
    assert isinstance(ended, SandboxDied) or ended.stdout == b"BlockingIOError True\n"


def test_a_fork_bomb_ends_with_its_box(isolated: Make) -> None:
    bomb, neighbour = isolated(limits=SMALL), isolated()
    with suppress(SandboxDied):
        bomb.exec(["sh", "-c", "b() { b | b & }; b; sleep 1"], timeout=2)
    assert neighbour.exec(["true"]).ok
    start = time.monotonic()
    bomb.kill_all()
    assert time.monotonic() - start < 10


def test_a_box_without_room_for_another_process_says_so(isolated: Make) -> None:
    full = isolated(limits=SMALL)
    greedy = """
import os, time
if os.fork() == 0:
    os.setsid()
    while True:
        try:
            if os.fork() == 0: time.sleep(100)
        except OSError: time.sleep(0.001)
"""
    full.python(greedy)
    with pytest.raises(SandboxDied, match="at its limits"):
        for _ in range(100):  # until it is full
            full.exec(["true"])
            time.sleep(0.1)


def test_disk(small: Sandbox) -> None:
    source = """
import os
def fill(path):
    try:
        with open(path, "wb") as file:
            for _ in range(64): file.write(b"x" * (1 << 18)); file.flush()
    except OSError as error: return os.strerror(error.errno)
    return "all written"
print([fill(p) for p in ("/box/a", "/tmp/b", "/dev/shm/c", os.path.expanduser("~/d"))])
"""
    ended = small.python(source)
    assert ended.stdout.decode().strip() in (
        str(["No space left on device"] * 4),
        str(["File too large"] + ["No space left on device"] * 3),
        str(["File too large"] * 4),  # docker: each of the four has that much room
    )
    with pytest.raises(OSError, match="No space left"):
        small.write("more", b"x" * (1 << 20))
    assert small.exec(["rm", "/box/a"]).ok


def test_all_that_is_written_counts_as_memory(isolated: Make, isolating: Backend) -> None:
    """No writable folder takes more than the disk limit, and together they never take more than the memory limit."""
    full, neighbour = isolated(limits=Limits(memory_mb=96, disk_mb=32, processes=16)), isolated()
    source = """
import os
for number, folder in enumerate(("/box", "/tmp", "/dev/shm", os.path.expanduser("~"))):
    for part in range(64):
        try:
            with open(f"{folder}/{part}", "wb") as file: file.write(b"x" * (1 << 20))
        except OSError: break
        os.write(1, b"%d " % number)
"""
    ended = run(full, source)
    written = (
        [0, 0, 0, 0] if isinstance(ended, SandboxDied) else [ended.stdout.split().count(b"%d" % n) for n in range(4)]
    )
    assert max(written) <= 32 and sum(written) < (96 if isolating.name == "docker" else 33), written
    assert written[0] >= 30 or isinstance(ended, SandboxDied)
    assert neighbour.exec(["true"]).ok


def test_inodes(small: Sandbox) -> None:
    source = """
import os
try:
    for n in range(10_000): open(f"/box/{n}", "w").close()
except OSError as error: print(os.strerror(error.errno), n <= 264)
"""
    assert small.python(source).stdout == b"No space left on device True\n"


def test_open_files(small: Sandbox) -> None:
    source = (
        "f = []\ntry:\n    while True: f.append(open('/dev/null'))\nexcept OSError as e: print(e.errno, len(f) < 64)"
    )
    assert small.python(source).stdout == b"24 True\n"


def test_output(small: Sandbox) -> None:
    result = small.exec(["sh", "-c", "yes | head -c 20000000; yes | head -c 20000000 >&2"])
    assert (len(result.stdout), len(result.stderr), result.truncated) == (10_000, 10_000, True)


def test_time_and_a_command_that_ignores_signals(small: Sandbox) -> None:
    source = (
        "import signal, time\nfor s in range(1, 30):\n  try: signal.signal(s, signal.SIG_IGN)\n  except OSError: pass\n"
    )
    result = small.python(source + "print('on', flush=True)\nwhile True: pass", timeout=1)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, -9, b"on\n")


def test_a_stopped_command_times_out(small: Sandbox) -> None:
    result = small.python("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", timeout=0.5)
    assert (result.timed_out, result.exit_code) == (True, -9)


def test_cpu_of_a_background_burner_leaves_the_neighbour_its_share(small: Sandbox) -> None:
    small.exec(["sh", "-c", "for i in 1 2 3 4; do (while :; do :; done) & done; true"])
    assert small.exec(["true"]).ok


def test_big_reads_are_the_agents_failure(isolated: Make) -> None:
    vessel = isolated(limits=SMALL)
    vessel.exec(["sh", "-c", "truncate -s 7M big; mkfifo pipe"])
    assert len(vessel.read("big")) == 7 << 20
    with pytest.raises(OSError, match="Invalid argument"):
        vessel.read("pipe")


def test_deep_folders_are_the_agents_failure(isolated: Make) -> None:
    vessel = isolated()
    vessel.python("import os\nfor _ in range(600): os.mkdir('d'); os.chdir('d')")
    with pytest.raises(AgentError, match="deeper"):
        vessel.digest()
    with pytest.raises(AgentError, match="deeper"):
        vessel.collect()


def test_death_from_inside_and_from_outside_are_told_apart(box: Make, namespace: Backend) -> None:
    victim = box()
    pid = _init_of(victim)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxError, match="from outside"):
        for _ in range(100):
            victim.exec(["true"])
    starved = box(limits=Limits(memory_mb=32))
    ended = run(starved, "m = [bytearray(1 << 20) for _ in range(900)]")
    assert isinstance(ended, SandboxDied) or not ended.ok
    starved.kill_all()
    if "memory" in namespace.zygote().facts["cgroups"]:  # type: ignore[attr-defined]
        assert starved.ledger()["out_of_memory"] > 0


def test_what_one_box_used_up_is_not_missing_in_the_next(box: Make, namespace: Backend) -> None:
    """Control groups take turns: neither what was counted nor what was held may go over from box to box."""
    limits = Limits(memory_mb=100, disk_mb=90, processes=16)
    for _ in range(3):
        first = box(limits=limits)
        assert first.exec(["sh", "-c", "head -c 80000000 /dev/zero > /tmp/fill; (setsid sleep 1000 &)"]).ok
        run(first, "x = [bytearray(1 << 20) for _ in range(900)]")
        first.kill_all()
        counted = first.ledger()["out_of_memory"]
        first.close()
        second = box(limits=limits)
        whole = "x = bytearray(80 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nprint(len(x))"
        assert second.python(whole).stdout == b"83886080\n"
        second.kill_all()
        assert second.ledger()["out_of_memory"] == 0
        second.close()
        if "memory" in namespace.zygote().facts["cgroups"]:  # type: ignore[attr-defined]
            assert counted > 0


def _init_of(box: Sandbox) -> int:
    """The host's pid of a box's process 1, from its pidfd."""
    descriptor = box._pidfd  # type: ignore[attr-defined]
    with open(f"/proc/self/fdinfo/{descriptor}") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))
