"""Time limits on a busy machine: a run that was given no processor was not slow.

A limit counts seconds on the wall, since a candidate that sleeps must end too. Where a run passes it having used little
processor time itself, while no processor of the machine was free, it may have waited in line: it gets one more run, in
a fresh box, with a longer limit. On a machine with time to spare nothing changes; a second delay is the candidate's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from agentrl.sandboxes.base import ExecResult

PATIENCE = 4.0
"""How many times the limit the second run has."""
WAITED = 0.5
"""A run that used more than this part of its limit in processor time was slow by itself."""
FREE = 0.1
"""With more than this part of the machine's processor time unused, nobody had to wait for it."""


async def patiently(run: Callable[[float], Awaitable[ExecResult]], seconds: float) -> ExecResult:
    """`run(limit)`, in a box of its own each time; a second time where the first may have been starved."""
    before = processor_time()
    done = await run(seconds)
    if done.timed_out and done.usage.cpu_s < WAITED * seconds and _was_full(before, processor_time()):
        done = await run(PATIENCE * seconds)
    return done


def processor_time() -> tuple[int, int]:
    """Ticks of all processors since the machine started: those unused, and all."""
    first = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0]
    ticks = [int(word) for word in first.split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def _was_full(before: tuple[int, int], after: tuple[int, int]) -> bool:
    return after[0] - before[0] < FREE * (after[1] - before[1])
