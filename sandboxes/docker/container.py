"""One container of the Docker daemon: what the daemon knows about its end, and its removal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.errors import SandboxError
from agentrl.sandboxes.docker.line import Line


def sdk_errors() -> tuple[type[Exception], ...]:
    """Return what the SDK raises when the daemon refuses or cannot be reached (imported late: it is an extra)."""
    from requests.exceptions import RequestException

    from docker.errors import DockerException

    return DockerException, RequestException


@dataclass(frozen=True, slots=True)
class Fate:
    """What the daemon knows about a container's end."""

    reachable: bool
    """Whether the daemon answered at all."""
    out_of_memory: int = 0
    killed: bool = False
    """Somebody told the daemon to end it."""
    exit_code: int | None = None

    def ended(self) -> bool:
        return self.exit_code is not None

    def explained(self) -> bool:
        """Whether it has ended, and not by a SIGKILL of unknown cause: the event of exhausted memory comes last."""
        return self.ended() and (self.exit_code != 137 or self.killed or self.out_of_memory > 0)


class Container:
    """One of our containers, and the line to its agent."""

    def __init__(self, client: Any, identity: str, line: Line, now: Callable[[], float]) -> None:
        """`now` returns the daemon's time."""
        self._client, self._id, self.line, self._now = client, identity, line, now
        self._removed = False

    def fate(self, settled: Callable[[Fate], bool], wait: float) -> Fate:
        """Ask the daemon; wait up to so many seconds until it knows enough."""
        deadline = time.monotonic() + wait
        unreachable: tuple[type[Exception], ...] = (*sdk_errors(), ValueError)
        while True:
            try:
                events = self._events()
            except unreachable:
                return Fate(reachable=False)
            codes = [int(event["Actor"]["Attributes"].get("exitCode", -1)) for event in events["die"]]
            killed = bool(events["kill"] or events["stop"])
            fate = Fate(True, len(events["oom"]), killed, codes[0] if codes else None)
            if settled(fate) or time.monotonic() > deadline:
                return fate
            time.sleep(0.02)

    def _events(self) -> dict[str, list[dict[str, Any]]]:
        by_action: dict[str, list[dict[str, Any]]] = {name: [] for name in ("oom", "die", "kill", "stop")}
        filters = {"container": self._id}
        for event in self._client.api.events(since=0, until=self._now(), filters=filters, decode=True):
            by_action.setdefault(event.get("Action", ""), []).append(event)
        return by_action

    def remove(self) -> None:
        """Destroy it. Safe to call twice."""
        from docker.errors import APIError, NotFound

        if self._removed:
            return
        self._removed = True
        try:
            for _ in range(200):
                try:
                    self._client.api.remove_container(self._id, force=True, v=True)
                    return
                except NotFound:
                    return
                except APIError:  # it is being removed already, since its first process ended
                    time.sleep(0.05)
            raise SandboxError(f"container {self._id[:12]} does not go away")
        except sdk_errors() as error:
            raise SandboxError(f"a container could not be removed, the Docker daemon said: {error}") from error
        finally:
            self.line.close()
