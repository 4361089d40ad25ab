"""Hostile submissions in a row leave nothing behind. AGENTRL_FULL=1: ten thousand of them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentrl.verifiers.base import Boxes, Context
from agentrl.verifiers.grade import grade
from agentrl.verifiers.hidden_tests import HiddenTests, example

COUNT = 10_000 if os.environ.get("AGENTRL_FULL") else 24
HOSTILE = [
    "import os, time\nfor _ in range(5):\n  if os.fork() == 0:\n    os.setsid(); time.sleep(600)\nsolve = abs",
    "import os\nfor i in range(200): open(f'/tmp/{i}', 'w').write('x')\nos.symlink('/', '/tmp/r')\nsolve = abs",
    "import socket\nkeep = [socket.socket() for _ in range(100)]\ndef solve(n): return n",
    "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)",
    "import os\nos.write(4, b'{' * 100000)\nos._exit(0)",
    "import threading, time\nfor _ in range(20): threading.Thread(target=time.sleep, args=(9,)).start()\nsolve = abs",
    "def solve(n): return 'x' * (1 << 31)",
    "import ctypes\nctypes.string_at(0)",
]  # fmt: skip


def left_behind() -> dict[str, int]:
    """Descendants of this process, its descriptors, and what lies in the folder for temporary files."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = 0, [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += len(below)
        queue += below
    ours = [name for name in os.listdir(tempfile.gettempdir()) if "agentrl" in name]
    return {"processes": found, "descriptors": len(os.listdir("/proc/self/fd")), "temporary": len(ours)}


@pytest.mark.timeout(3 * 3600)
def test_hostile_submissions_leave_nothing_behind(boxes: Boxes, submit: Any) -> None:
    verifier = HiddenTests(lambda task, rng: [example("solve", 1, expect=99)], memory_mb=64, seconds=1.0)

    async def run(count: int) -> Counter[Any]:
        context = Context(secret=b"s", boxes=boxes)
        found: Counter[Any] = Counter()
        for at in range(count):
            submission = submit(files={"": HOSTILE[at % len(HOSTILE)]}, at="solution.py")
            outcome, _ = await grade(verifier, submission, context)
            found[outcome.grade, outcome.score, outcome.alarm] += 1
        await asyncio.sleep(1.0)  # the pool prepares a few boxes ahead: let it come to rest
        return found

    asyncio.run(run(len(HOSTILE)))
    before = left_behind()
    assert asyncio.run(run(COUNT)) == {("graded", 0.0, False): COUNT}
    after = left_behind()
    assert after["temporary"] <= before["temporary"]
    assert after["processes"] <= before["processes"] + 4
    assert after["descriptors"] <= before["descriptors"] + 16
