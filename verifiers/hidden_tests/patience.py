"""Time limits on a busy machine: a run that was given no processor was not slow.

A limit counts seconds on the wall, since a candidate that sleeps must end too. Where a run passes it having used little
processor time itself, while no processor of the machine was free, it may have waited in line: it gets one more run, in
a fresh box, with a longer limit. On a machine with time to spare nothing changes; a second delay is the candidate's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from agentrl.sandboxes.base import ExecResult
from agentrl.verifiers.busy import Watch

PATIENCE = 4.0
"""How many times the limit the second run has."""
WAITED = 0.5
"""A run that used more than this part of its limit in processor time was slow by itself."""


async def patiently(run: Callable[[float], Awaitable[ExecResult]], seconds: float) -> ExecResult:
    """`run(limit)`, in a box of its own each time; a second time where the first may have been starved."""
    machine = Watch()
    done = await run(seconds)
    if done.timed_out and done.usage.cpu_s < WAITED * seconds and machine.full():
        done = await run(PATIENCE * seconds)
    return done
