"""Looks after the node of this process: without its raylet nothing goes on, and calls to it may never return.

watched() ── every few seconds: is our node alive? ── no ──> whoever asked is told, so that the run ends in order;
             (a thread: a call to Ray may hold up         and if it has not ended within a minute, the process does
             everything else)
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

LOOK_S = 5.0
"""How often the node is looked at."""
LEAVE_S = 60.0
"""How long a run may take to end in order once the node is marked dead."""
SHUTDOWN_S = 180.0
"""How long Ray may take to let go of this process. A raylet that stands still never does, and may not be marked dead
yet; a busy machine takes some seconds."""
SAY_S = 2.0
"""How long the last words may take: whoever should read them may be stuck as well."""
LOST = "Ray's raylet on the machine of `agentrl train` was ended, or did not answer for too long"

told: set[Callable[[str], None]] = set()
"""Called, in the watching thread, with the reason why nothing can go on."""
_watching = threading.Lock()
_looking = threading.Lock()
"""Held while Ray is asked, and while it shuts down: not both at once."""


@contextmanager
def watched() -> Iterator[None]:
    """Watch during the block, which is where this process is connected; inside another such block, do nothing more."""
    if not _watching.acquire(blocking=False):
        yield
        return
    ended = threading.Event()
    threading.Thread(target=_watch, args=(ended,), name="agentrl-own-node", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        _watching.release()


def _watch(ended: threading.Event) -> None:
    while not ended.wait(LOOK_S):
        if _looking.acquire(blocking=False):
            try:
                dead = _is_dead()
            finally:
                _looking.release()
            if dead:
                break
    if ended.is_set():
        return
    for tell in list(told):
        tell(LOST)
    if not ended.wait(LEAVE_S):
        leave(f"{LOST}; --resume goes on from the last checkpoint")


def _is_dead() -> bool:
    import ray

    untyped: Any = ray
    if not untyped.is_initialized():  # Ray would connect to anything
        return False
    with suppress(Exception):  # whatever it is, the next look is soon, and nobody would hear of it here
        here = untyped.get_runtime_context().get_node_id()
        return any(node["NodeID"] == here and not node["Alive"] for node in untyped.nodes())
    return False


def shut_down(ray: Any) -> None:
    """Leave Ray. Where it does not let go, end this process."""
    still = _looking.acquire(timeout=LOOK_S)
    stuck = threading.Timer(SHUTDOWN_S, leave, ["Ray's raylet on this machine does not answer, and holds it up"])
    stuck.daemon = True
    stuck.start()
    try:
        ray.shutdown()
    finally:
        stuck.cancel()
        if still:
            _looking.release()


def leave(why: str) -> None:
    """End this process at once, whatever it waits for."""
    words = f"agentrl: this process is ended: {why}"
    last = threading.Thread(target=print, args=(words,), kwargs={"file": sys.stderr, "flush": True}, daemon=True)
    last.start()
    last.join(SAY_S)
    os._exit(1)
