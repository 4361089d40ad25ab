"""Notes the files of a sandbox at an episode's end, for environments that declare no artifacts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from agentrl.envs.base import Environment
from agentrl.errors import AgentRLError
from agentrl.sandboxes.base import off_loop
from agentrl.sandboxes.tree import bytecode


class WatchedState(dict[str, Any]):
    """What `state()` returned, with the files that the workspace held then."""

    workspace: dict[str, bytes]


def watching(make: Callable[[], Environment]) -> Callable[[], Environment]:
    """Make environments whose `state()` also notes the workspace; a verifier sees the same mapping as ever."""

    return lambda: watched(make())


def watched(environment: Environment) -> Environment:
    """Let an environment's `state()` also note the workspace; return the environment."""
    state = environment.state

    @functools.wraps(state)
    async def watched_state() -> Mapping[str, Any]:
        value = await state() if inspect.iscoroutinefunction(state) else await off_loop(state)
        if type(value) is not dict or environment._box is None:
            return value
        noted = WatchedState(value)
        noted.workspace = {}
        with suppress(AgentRLError, OSError):  # more than may be collected: no file of it is compared
            tree = await environment._box.aio.collect()
            noted.workspace = {path: e.content for path, e in tree.items() if e.kind == "file" and not bytecode(path)}
        return noted

    environment.state = watched_state  # type: ignore[method-assign, assignment]
    return environment
