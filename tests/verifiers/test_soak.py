"""Hostile submissions in a row leave nothing behind, and cost no more than their limits.

AGENTRL_FULL=1: ten thousand of them, and every expensive kind on its own; records go to docs/evidence/.
"""

from __future__ import annotations

import asyncio
import glob
import os
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl import sandboxes
from agentrl.sandboxes.base import Entry
from agentrl.sandboxes.pool import Pool
from agentrl.verifiers.base import Context, Submission, Verifier
from agentrl.verifiers.final_state import DatabaseState, FinalState
from agentrl.verifiers.grade import grade
from agentrl.verifiers.hidden_tests import HiddenTests, ProgramTests, example, run

FULL = os.environ.get("AGENTRL_FULL") == "1"
COUNT = 10_000 if FULL else 24
HOSTILE = [
    "import os, time\nfor _ in range(5):\n  if os.fork() == 0:\n    os.setsid(); time.sleep(600)\nsolve = abs",
    "import os\nfor i in range(200): open(f'/tmp/{i}', 'w').write('x')\nos.symlink('/', '/tmp/r')\nsolve = abs",
    "import socket\nkeep = [socket.socket() for _ in range(100)]\ndef solve(n): return n",
    "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)",
    "import os\nos.write(4, b'{' * 100000)\nos._exit(0)",
    "import threading, time\nfor _ in range(20): threading.Thread(target=time.sleep, args=(9,)).start()\nsolve = abs",
    "def solve(n): return 'x' * (1 << 31)",
    "import ctypes\nctypes.string_at(0)",
    "import os, signal\nfor s in range(1, 32):\n  try: signal.signal(s, signal.SIG_IGN)\n  except OSError: pass\n"
    "if os.fork(): os._exit(0)\nos.setsid()\nwhile True: signal.pause()",
    "import ctypes\nlibc = ctypes.CDLL(None)\nfor i in range(20): libc.shmget(i + 1, 4096, 0o1600)\n"
    "for i in range(20): libc.msgget(i + 1, 0o1600)\nsolve = abs",
    "import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.unshare(0x10000000 | 0x20000)\n"
    "libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0)\nos._exit(0)",
    "import socket\nfor i in range(50):\n  s = socket.socket(socket.AF_UNIX); s.bind('\\0soak%d' % i); s.listen()\n"
    "solve = abs",
    "import os\npath = '/box/' + 'd/' * 500\nos.makedirs(path)\nos.mkfifo(path + 'fifo')\nsolve = abs",
    "import sys\nsys.stdout.write('x' * (8 << 20))\nsys.stderr.write('y' * (8 << 20))\nsolve = abs",
    "keep = []\nwhile True: keep.append(bytes(1 << 20))",
    "import os\ntry:\n  while True: os.fork()\nexcept OSError: os._exit(0)",
]  # fmt: skip
EXPENSIVE = {
    "hangs": "def solve(n):\n  while True: pass",
    "sleeps": "import time\ndef solve(n): time.sleep(600)",
    "fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "memory bomb": "keep = []\nwhile True: keep.append(bytes(1 << 20))",
    "floods stdout": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "floods the reply": "import os\nwhile True: os.write(4, b'x' * 65536)",
    "fills the disk": "import os\nn = 0\nwhile True:\n  try: open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 20))\n"
    "  except OSError: pass\n  n += 1",
    "thread bomb": "import threading, time\nwhile True:\n"
    "  try: threading.Thread(target=time.sleep, args=(60,)).start()\n  except RuntimeError: pass",
    "huge number": "def solve(n): return 9 ** 9 ** 9",
    "ignores its end": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()",
}  # fmt: skip


@pytest.fixture
def own_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A pool and a temporary folder of one's own, so that nothing else that runs changes the counts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    backend = sandboxes.load("namespace")()
    if not backend.available().works:
        pytest.skip("hostile code runs here, and this machine has no working namespace sandbox")
    pool = Pool(backend, limit=16)
    yield pool
    pool.close()


def descendants() -> list[int]:
    """Every process below this one."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        queue += (below := children.get(queue.pop(), []))
        found += below
    return found


def memory_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)


def left_behind() -> dict[str, int]:
    """What this process and its boxes hold of the machine at this moment."""
    below = descendants()
    folders = glob.glob("/sys/fs/cgroup/**/agentrl*", recursive=True)  # pathlib's fails when a group goes meanwhile
    return {
        "processes": len(below),
        "mounts": sum("docker" not in line for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": sum(_of(name, below) for name in set(map(os.path.basename, folders))),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "temporary": len(os.listdir(tempfile.gettempdir())),
        "memory_kb": memory_kb(os.getpid()),
        "zygote_kb": max((memory_kb(pid) for pid in below), default=0),
    }


def at_rest() -> dict[str, int]:
    """What is held once it changes no more: the pool prepares a few boxes ahead, and the last ones used come down."""
    held = left_behind()
    for _ in range(60):
        time.sleep(0.5)
        before, held = held, left_behind()
        if all(held[what] == before[what] for what in ("processes", "cgroups", "descriptors")):
            break
    return held


def _of(name: str, pids: list[int]) -> bool:
    """Whether a cgroup is named after one of these processes: other runs have groups of their own."""
    parts = name.split("-")
    return len(parts) > 2 and parts[2] in map(str, pids)


def broken_database() -> bytes:
    """A SQLite file with its middle overwritten."""
    with tempfile.NamedTemporaryFile() as file:
        with sqlite3.connect(file.name) as base:
            base.execute("create table t (a text)")
            base.executemany("insert into t values (?)", [("x" * 50,)] * 200)
        data = bytearray(Path(file.name).read_bytes())
    data[4096:6000] = b"\xff" * 1904
    return bytes(data)


def row() -> Callable[[int], tuple[Verifier, Submission]]:
    """Which verifier gets which hostile submission at each place in the row."""
    from agentrl.types import Task

    task = Task(id="soak/1", split="train", level=1, prompt="")
    functions = HiddenTests(lambda task, rng: [example("solve", 1, expect=99)], memory_mb=64, seconds=1.0)
    programs = ProgramTests(
        lambda task, rng: [run("python3", "solution.py", stdout="99\n")],
        artifact="solution.py",
        memory_mb=64,
        seconds=1.0,
    )
    database = DatabaseState(lambda task: {"t": [("y",)]}, path="shop.db")
    files = FinalState(lambda task: {"a": "1"})
    links = {f"d/{i}": Entry("link", b"../" * 40 + b"etc/passwd") for i in range(50)}
    broken = broken_database()

    def at(place: int) -> tuple[Verifier, Submission]:
        source = {"solution.py": {"": Entry(content=HOSTILE[place % len(HOSTILE)].encode())}}
        match place // len(HOSTILE) % 8:
            case 5:
                return programs, Submission(task=task, artifacts=source)
            case 6 if place % 2:
                return database, Submission(task=task, artifacts={"shop.db": {"": Entry(content=broken)}})
            case 6:
                return files, Submission(task=task, artifacts={"": links})
        return functions, Submission(task=task, artifacts=source)

    return at


@pytest.mark.timeout(3 * 3600)
def test_hostile_submissions_leave_nothing_behind(own_boxes: Pool, evidence: Callable[[str, Any], None]) -> None:
    hostile = row()
    context = Context(secret=b"s", boxes=own_boxes)

    async def play(places: range) -> Counter[Any]:
        found: Counter[Any] = Counter()
        line = iter(places)

        async def work() -> None:
            for place in line:
                outcome, _ = await grade(*hostile(place), context)
                found[outcome.grade, outcome.score, outcome.alarm] += 1

        await asyncio.gather(*(work() for _ in range(4)))
        return found

    began = time.monotonic()
    asyncio.run(play(range(8 * len(HOSTILE) if FULL else len(HOSTILE))))
    before = at_rest()
    found: Counter[Any] = Counter()
    growth: list[int] = []
    for start in range(0, COUNT, 1000):
        found += asyncio.run(play(range(start, min(start + 1000, COUNT))))
        growth.append(memory_kb(os.getpid()))
    after = at_rest()
    if FULL:
        outcomes = {" ".join(map(str, kind)): number for kind, number in found.items()}
        record = {"submissions": COUNT, "kinds": len(HOSTILE), "outcomes": outcomes, "before": before, "after": after}
        evidence("soak", {**record, "memory_kb": growth, "seconds": round(time.monotonic() - began)})
    assert found == {("graded", 0.0, False): COUNT}
    assert after["mounts"] == before["mounts"]
    assert after["temporary"] <= before["temporary"]
    assert after["processes"] <= before["processes"] + 4
    assert after["cgroups"] <= before["cgroups"] + 12  # empty ones wait for boxes to come: as many as were open at once
    assert after["descriptors"] <= before["descriptors"] + 16
    assert after["memory_kb"] <= before["memory_kb"] + 32_000
    assert after["zygote_kb"] <= before["zygote_kb"] + 8_000


@pytest.mark.skipif(not FULL, reason="hanging, bombing and flooding candidates are timed with AGENTRL_FULL=1")
@pytest.mark.timeout(3600)
def test_expensive_candidates_cost_their_limit(own_boxes: Pool, evidence: Callable[[str, Any], None]) -> None:
    """20 cases of one second each: such a candidate is given up after three time-outs, not after twenty."""
    cases = [example("solve", n, expect=99) for n in range(20)]
    context = Context(secret=b"s", boxes=own_boxes)
    task = row()(0)[1].task
    found: dict[str, dict[str, float]] = {}
    for name, source in EXPENSIVE.items():
        for score in ("all", "fraction"):
            verifier = HiddenTests(lambda task, rng: cases, memory_mb=64, seconds=1.0, score=score, concurrency=2)
            submission = Submission(task=task, artifacts={"solution.py": {"": Entry(content=source.encode())}})
            began = time.monotonic()
            outcome, _ = asyncio.run(grade(verifier, submission, context))
            found.setdefault(name, {})[score] = round(time.monotonic() - began, 2)
            assert (outcome.grade, outcome.score, outcome.alarm) == ("graded", 0.0, False), (name, outcome)
    evidence("soak-limits", {"limit_s": 1.0, "cases": len(cases), "at_once": 2, "seconds": found})
    assert all(took < 8.0 for times in found.values() for took in times.values()), found
