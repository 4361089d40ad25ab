"""What tests ask of processes and terminals."""

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path


def interrupted_at_its_prompt(*arguments: str) -> tuple[int, str]:
    """Start `agentrl ...` in a real terminal, press Ctrl-C at its prompt; return the exit status and what was shown."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as a shell does; what runs in the background ignores it
        os.execv(sys.executable, [sys.executable, "-m", "agentrl", *arguments])
    shown = b""
    end = time.monotonic() + 120
    sent = 0.0
    while time.monotonic() < end:
        ready, _, _ = select.select([terminal], [], [], 0.5)
        try:
            shown += os.read(terminal, 4096) if ready else b""
        except OSError:  # the other side is closed
            break
        # Not before it waits, and again where nothing came of it: readline misses a signal that arrives while it shows
        # the prompt.
        if not ready and shown.rstrip(b" ").endswith(b">") and time.monotonic() - sent > 20:
            os.write(terminal, b"\x03")
            sent = time.monotonic()
    else:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), shown.decode(errors="replace")


def process_family(pid: int) -> set[int]:
    """Return a process and all that descend from it: a zygote's sandboxes and all that runs in them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Wait until a condition holds; return whether it came to hold in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
