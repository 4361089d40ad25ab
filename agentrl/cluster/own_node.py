"""Looks after the node of this process: without its raylet nothing goes on, and calls to it may never return.

watched() ── every few seconds: is our node alive? ── no ──> the players are told, so that the run ends in order;
             (a thread: a call to Ray may hold up         and if it has not ended within a minute, the process does
             everything else)
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

SAY_S = 2.0
"""How long the last words may take: their reader may be stuck as well."""
LOST = "Ray's raylet on the machine of `agentrl train` was ended, or did not answer for too long"


def is_dead(ray: Any = None) -> bool:
    """Return whether Ray (the module, unless another is given) has marked the node of this process as dead."""
    ray = ray or import_module("ray")
    if not ray.is_initialized():  # asked all the same, it would connect to whatever it finds
        return False
    with suppress(Exception):  # whatever it is, the next look is soon, and nobody would hear of it here
        here = ray.get_runtime_context().get_node_id()
        return any(node["NodeID"] == here and not node["Alive"] for node in ray.nodes())
    return False


def leave(why: str) -> None:
    """End this process at once, whatever it waits for."""
    words = f"agentrl: this process is ended: {why}"
    last = threading.Thread(target=print, args=(words,), kwargs={"file": sys.stderr, "flush": True}, daemon=True)
    last.start()
    last.join(SAY_S)
    os._exit(1)


@dataclass(eq=False)
class OwnNode:
    """The node of this process, while it is connected to Ray."""

    look_s: float = 5.0
    """How often it is looked at."""
    leave_s: float = 60.0
    """How long a run may take to end in order once the node is marked dead."""
    shutdown_s: float = 180.0
    """How long Ray may take to let go of this process. A raylet that stands still never does, and may not be marked
    dead yet; a busy machine takes some seconds."""
    is_dead: Callable[[], bool] = is_dead
    leave: Callable[[str], None] = leave
    told: set[Callable[[str], None]] = field(default_factory=set)
    """Called, in the watching thread, with the reason why nothing can go on."""
    _watching: threading.Lock = field(default_factory=threading.Lock)
    _looking: threading.Lock = field(default_factory=threading.Lock)
    """Held while Ray is asked, and while it shuts down: not both at once."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch during the block, which is where this process is connected; inside another such block, do nothing
        more."""
        if not self._watching.acquire(blocking=False):
            yield
            return
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(ended,), name="agentrl-own-node", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            self._watching.release()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(self.look_s):
            if self._looking.acquire(blocking=False):
                try:
                    dead = self.is_dead()
                finally:
                    self._looking.release()
                if dead:
                    break
        if ended.is_set():
            return
        for tell in list(self.told):
            tell(LOST)
        if not ended.wait(self.leave_s):
            self.leave(f"{LOST}; --resume goes on from the last checkpoint")

    def shut_down(self, ray: Any) -> None:
        """Leave Ray. Where it does not let go, end this process."""
        still = self._looking.acquire(timeout=self.look_s)
        why = "Ray's raylet on this machine does not answer, and holds it up"
        stuck = threading.Timer(self.shutdown_s, self.leave, [why])
        stuck.daemon = True
        stuck.start()
        try:
            ray.shutdown()
        finally:
            stuck.cancel()
            if still:
                self._looking.release()


OWN_NODE = OwnNode()
"""A process is connected to one cluster."""
