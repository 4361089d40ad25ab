"""Tells whether all processors were busy, in which case late work may only have waited for one."""

from __future__ import annotations

FREE = 0.1
"""With more than this share of the processors' time unused, nothing had to wait for a processor."""


class ProcessorWatch:
    """Observes the whole machine from its creation on."""

    def __init__(self) -> None:
        self._start = processor_time()

    def busy(self) -> bool:
        """Return whether all processors were at work nearly all of the time since then."""
        unused, total = (after - before for after, before in zip(processor_time(), self._start, strict=True))
        return unused < FREE * total


def processor_time() -> tuple[int, int]:
    """Return the ticks of all processors since the machine started: unused, and in total."""
    with open("/proc/stat", "rb") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
