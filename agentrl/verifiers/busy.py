"""Whether the machine had processor time to spare: who was given none was not slow."""

from __future__ import annotations

FREE = 0.1
"""With more than this part of the processors' time unused, nobody had to wait for them."""


class Watch:
    """Looks at the whole machine from its making on."""

    def __init__(self) -> None:
        self._began = processor_time()

    def full(self) -> bool:
        """Whether all processors were at work nearly all of the time since."""
        unused, all_ = (after - before for after, before in zip(processor_time(), self._began, strict=True))
        return unused < FREE * all_


def processor_time() -> tuple[int, int]:
    """Ticks of all processors since the machine started: those unused, and all."""
    with open("/proc/stat", "rb") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
