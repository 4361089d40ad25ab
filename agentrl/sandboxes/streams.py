"""Writes and reads the pipes of one running command, with a deadline and a limit on the output that is kept."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

GRACE = 10.0
"""Seconds within which a killed command must end."""


@dataclass(slots=True)
class Output:
    """The output of one pipe, up to its limit."""

    limit: int
    data: bytearray = field(default_factory=bytearray)
    dropped: int = 0

    def add(self, part: bytes) -> None:
        room = max(self.limit - len(self.data), 0)
        self.data += part[:room]
        self.dropped += max(len(part) - room, 0)


@dataclass(frozen=True, slots=True)
class Pumped:
    """How `pump` ended."""

    timed_out: bool
    finished: bool
    """False: even after the kill, the command did not report its end."""
    wall_s: float


def pump(
    done: int,
    inputs: Mapping[int, bytes],
    outputs: Mapping[int, Output],
    timeout: float,
    kill: Callable[[], None],
    grace: float = GRACE,
) -> Pumped:
    """Write `inputs` and read `outputs` until `done` is readable. At the deadline, call `kill` and wait for `grace`.

    A process that holds an output open after the command has ended is not waited for: its output so far is kept. Input
    descriptors are closed here; the others belong to the caller.
    """
    if any(isinstance(data, str) for data in inputs.values()):
        for descriptor in inputs:
            os.close(descriptor)
        raise TypeError("what is written to a sandbox or a command must be bytes, got str: use text.encode()")
    start = time.monotonic()
    deadline, timed_out, finished = start + timeout, False, False
    left = {descriptor: memoryview(data) for descriptor, data in inputs.items() if data}
    for descriptor in inputs:
        if descriptor not in left:
            os.close(descriptor)
    poll = select.poll()
    poll.register(done, select.POLLIN)
    for descriptor in left:
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLOUT)
    for descriptor in outputs:
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.POLLIN)
    try:
        while not finished:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                if timed_out:
                    break
                timed_out, deadline = True, time.monotonic() + grace
                kill()
                continue
            for descriptor, _ in poll.poll(remaining * 1000 + 1):
                if descriptor == done:
                    finished = True
                elif descriptor in left:
                    if not _feed(descriptor, left):
                        poll.unregister(descriptor)
                        os.close(descriptor)
                elif not _drain(descriptor, outputs[descriptor], once=True):
                    poll.unregister(descriptor)
        for descriptor, output in outputs.items():
            _drain(descriptor, output, once=False)
    finally:
        for descriptor in left:
            os.close(descriptor)
    return Pumped(timed_out, finished, time.monotonic() - start)


def _feed(descriptor: int, left: dict[int, memoryview]) -> bool:
    """Write what the pipe accepts; return False when everything is written or nobody reads."""
    try:
        left[descriptor] = left[descriptor][os.write(descriptor, left[descriptor][: 1 << 16]) :]
    except BlockingIOError:
        return True
    except OSError:
        left[descriptor] = memoryview(b"")
    if left[descriptor]:
        return True
    del left[descriptor]
    return False


def _drain(descriptor: int, output: Output, *, once: bool) -> bool:
    """Read what is available, at most what a pipe can hold; return False at the end of the stream."""
    for _ in range(1 if once else 17):
        try:
            part = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not part:
            return False
        output.add(part)
    return True
