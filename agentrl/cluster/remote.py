"""One player as the driver sees it: what it was asked, what it answered, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from agentrl.errors import AgentRLError, EngineError, Fault, InfraError
from agentrl.rollout.rollout import RolloutId
from agentrl.types import Outcome, Segment, Task, Trajectory

DIRECT_S = 60.0


class PlayerLost(InfraError):
    """The process or the node that played a rollout is gone, or did not answer in time."""


@dataclass(eq=False, slots=True)
class Remote:
    """One player's process, from its start to its loss."""

    slot: int
    """Its place among the recipe's players; a replacement has the same."""
    actor: Any
    node: str = "a node"
    node_id: str = ""
    """Ray's name of the node."""
    pid: int = 0
    load: int = 0
    """Rollouts under way."""
    finished: int = 0
    lost: str = ""
    """Why it is not used any more."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    watch: asyncio.Task[None] | None = None
    urls: tuple[str, ...] = ()
    """The SGLang servers that it was told to ask; empty: those of its start."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is lost: nobody waits for it any longer."""

    @property
    def name(self) -> str:
        return f"player {self.slot} on {self.node}"


@dataclass(eq=False, frozen=True, slots=True)
class Call:
    """A rollout in the hands of a player."""

    player: Remote
    ref: Any
    task: asyncio.Task[Trajectory]


async def direct(player: Remote, urls: tuple[str, ...]) -> None:
    """Have a player ask these SGLang servers from now on. One that is lost meanwhile is left to those who watch it."""
    player.urls = urls
    with suppress(PlayerLost, EngineError, TimeoutError):
        async with asyncio.timeout(DIRECT_S):
            await answer(player, player.actor.use_servers.remote(urls))


async def answer(player: Remote, ref: Any, late: Callable[[], None] = lambda: None) -> Any:
    """Wait for a call for as long as its player is not lost. What the player raised is raised; whatever else goes wrong
    is PlayerLost. `late` is called where an answer comes after all."""
    result, gone = asyncio.ensure_future(_result(player, ref)), asyncio.ensure_future(player.gone.wait())
    try:
        await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        result.cancel()
        raise
    finally:
        gone.cancel()
    if result.done():
        return result.result()
    result.add_done_callback(lambda done: None if done.cancelled() or done.exception() else late())
    raise PlayerLost(player.lost)


async def _result(player: Remote, ref: Any) -> Any:
    try:
        return await ref
    except TaskCancelledError:
        raise PlayerLost("the call was cancelled") from None
    except RayTaskError as error:
        cause = error.cause
        if not isinstance(cause, Exception) or isinstance(cause, RayError):
            raise PlayerLost(" ".join(str(error).split())[-300:]) from None
        if isinstance(cause, AgentRLError) and len(cause.args) == 1:
            cause.args = (f"{cause} ({player.name})",)
        else:
            cause.add_note(f"on {player.name}")
        raise cause from None
    except RayError as error:
        lines = str(error).strip().splitlines()
        raise PlayerLost(f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}") from None


def given_up(task: Task, rollout_id: RolloutId, losses: list[str]) -> Trajectory:
    """Return a rollout that lost every player it was given: ungraded, with the reasons."""
    cause = f"the rollout was lost {len(losses)} times: {'; '.join(losses)}"
    outcome = Outcome(ending="timeout", grade="infra_error", score=None, fault=Fault("player", "infra", cause))
    return Trajectory(
        task=task.public(),
        group=rollout_id.group,
        index=rollout_id.index,
        seed=rollout_id.reset(task),
        segments=(),
        messages=(),
        outcome=outcome,
    )


def owned(trajectory: Trajectory) -> Trajectory:
    """Copy arrays that lie in Ray's shared memory, which is small and must not fill up with what a round holds."""
    if all(segment.token_ids.flags.owndata for segment in trajectory.segments):
        return trajectory
    copied = (
        Segment(s.token_ids.copy(), s.logprobs.copy(), s.versions.copy(), s.sources.copy()) for s in trajectory.segments
    )
    return replace(trajectory, segments=tuple(copied))
