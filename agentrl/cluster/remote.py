"""One player as the driver sees it: what it was asked, what it answered, whether it is still there, what ended it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from agentrl.catalogue import for_children
from agentrl.cluster.kit import EXACT
from agentrl.errors import AgentRLError, EngineError, Fault, InfraError, UserError
from agentrl.recipe import Recipe
from agentrl.rollout.request import RolloutId
from agentrl.types import Outcome, Segment, Task, Trajectory

DIRECT_S = 60.0
SUSPECT = 2
"""Players that may be lost under a rollout before it is played alone."""
ALONE = 2
"""Players that are lost while they play a rollout alone before it is to blame: one may be chance."""

Say = Callable[[str], None]
Key = tuple[int, int]
"""A rollout's group and index: what the table of rollouts is kept by."""


class PlayerLost(InfraError):
    """The process or the node that played a rollout is gone, stands still, or did not answer in time."""


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
    began: int = 0
    """How many rollouts all players had finished when it came up."""
    reserved: bool = False
    """Whether it is kept for a single rollout, which plays alone."""
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
    alone: bool = False
    """Whether the player plays nothing else."""


@dataclass(slots=True)
class Losses:
    """What became of the players that one rollout was given."""

    reasons: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """The calls that never came back: their player ended, was killed for its memory, fell silent, or let the deadline
    pass. An episode can cause each of these. A player that is unfit is not among them: its node is to blame."""

    def add(self, call: Call, error: Exception) -> None:
        """Note that a player was lost under the rollout."""
        if call in self.calls:  # it had let the deadline pass before
            return
        self.reasons.append(f"{call.player.name}: {error}")
        if isinstance(error, PlayerLost):
            self.calls.append(call)

    @property
    def suspect(self) -> bool:
        """Whether it may be the rollout that stops players: it then plays alone, and cannot take others with it."""
        return len(self.calls) >= SUSPECT

    def guilty(self, alive: set[str]) -> bool:
        """Tell whether players were lost because of the rollout, again and again while they played nothing else.
        `alive`: the nodes that are; a player that was lost with its node says nothing."""
        return len({call.player for call in self.calls if call.alone and call.player.node_id in alive}) >= ALONE


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
        why = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
        raise PlayerLost(why) from None


def actor_options(cpus: float) -> dict[str, Any]:
    """Return how Ray is to run a player: once, wherever there is room, never again by itself."""
    options: dict[str, Any] = {"num_cpus": cpus, "scheduling_strategy": "SPREAD"}
    options |= {"max_concurrency": 100_000, "max_restarts": 0, "max_task_retries": 0}
    if variables := for_children():  # where the user's own environments are, on every node
        options["runtime_env"] = {"env_vars": variables}
    return options


def no_room(slot: int, seconds: float, cpus: float) -> str:
    """Say that a player found no place, and what to do."""
    untyped: Any = ray
    total = f"{untyped.cluster_resources().get('CPU', 0.0):g} CPU cores in all"
    return (
        f"player {slot} did not start within {seconds:.0f} s; it needs {cpus:g} CPU cores of a node, and the cluster "
        f"has {total}: lower cluster.players or cluster.cpus, or add nodes"
    )


def key_of(rollout_id: RolloutId) -> Key:
    """Return what names a rollout within its run."""
    return rollout_id.group, rollout_id.index


def given_up(task: Task, rollout_id: RolloutId, losses: Losses, *, guilty: bool) -> Trajectory:
    """Return a rollout that lost every player it was given, with the reasons: ungraded; or, where it stopped them
    itself, graded 0 with an alarm, since otherwise a policy could make its own episode vanish. Its tokens are gone with
    the players."""
    cause = f"the rollout was lost {len(losses.reasons)} times: {'; '.join(losses.reasons)}"
    outcome = Outcome(ending="timeout", grade="infra_error", score=None, fault=Fault("player", "infra", cause))
    if guilty:
        cause = f"the episode stopped every player that played it, the last two alone: {'; '.join(losses.reasons)}"
        fault = Fault("player", "agent", cause)
        outcome = Outcome(ending="agent_error", grade="graded", score=0.0, fault=fault, alarm=True)
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
    names = [part.name for part in fields(Segment)]
    copied = [
        Segment(**{name: array.copy() for name in names if (array := getattr(segment, name)) is not None})
        for segment in trajectory.segments
    ]
    return replace(trajectory, segments=tuple(copied))


def differences(
    recipe: Recipe, player: Remote, sources: Mapping[str, str], here: Mapping[str, Any], there: Mapping[str, Any]
) -> list[str]:
    """Return how a node differs from this one. Refuse one with other environments; where a run must repeat to the bit,
    also one of another kind."""
    other = [name for name, version in sources.items() if there["sources"].get(name) != version]
    if other:
        raise UserError(
            f"{player.name}: the source of {', '.join(other)} differs from the one here; install the same version "
            "of agentrl and of your environments on every node"
        )
    differing = [f"{name} {there[name]}, here {here[name]}" for name in EXACT if there[name] != here[name]]
    if differing and recipe.rollout.engine.type == "transformers" and recipe.run.deterministic:
        raise UserError(
            f"{player.name} cannot repeat to the bit what is computed here ({'; '.join(differing)}): use nodes of "
            "one kind, or set run.deterministic: false"
        )
    if there["agentrl"] != here["agentrl"]:
        differing.insert(0, f"agentrl {there['agentrl']}, here {here['agentrl']}")
    return differing


@dataclass(frozen=True, slots=True)
class TemperedPlayers:
    """Players that sample with a temperature of their own."""

    players: Any
    """A `RayPlayers`."""
    temperature: float

    async def play(self, env: str, task: Task, rollout_id: RolloutId) -> Trajectory:
        """Have one task played to its end and graded."""
        trajectory: Trajectory = await self.players.play(env, task, rollout_id, temperature=self.temperature)
        return trajectory

    def at(self, temperature: float) -> TemperedPlayers:
        """Return the same players with another temperature."""
        return replace(self, temperature=temperature)
