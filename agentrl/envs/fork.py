"""Forks an episode at the border between two turns: its sandbox, its environment's own state, and what was said.

    border(episode) ── Fork: proof (a hash of the state), files, a copy of the environment, transcript, counters
                         └── ForkedEpisode: a second sandbox and environment; start() goes on from there

A fork must begin in exactly the state that the border was in. Both hash the sandbox (paths, kinds, modes, owners,
times, contents), the environment's `state()` and the last observations; where the hashes differ, the fork is void.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from agentrl import hashing
from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode, Step, run
from agentrl.envs.timed_box import TimedBox
from agentrl.errors import AgentError, AuthoringError, InfraError
from agentrl.sandboxes.base import Sandbox
from agentrl.types import Message, Task
from agentrl.verifiers.base import Boxes

SHARED = ("_box", "given", "judge", "verifier")
"""Attributes of an environment that a fork gets elsewhere: its sandbox, the task, the judge and what grades it."""
MOST_BYTES = 16 << 20
"""Bytes of memory that the forks of one episode may hold until they are played."""
WAITS_S = (0.01, 0.05, 0.2)
"""Pauses after which the processes of a sandbox are counted again: the last of a command may just be ending."""


class ForkingBoxes(Boxes, Protocol):
    """Sandboxes that can be forked; a `Pool` has them."""

    def fork(self, origin: Sandbox, snapshot: str) -> AbstractAsyncContextManager[Sandbox]: ...


class Unforkable(Exception):
    """An episode that cannot be forked here; the text says why."""


class ForkVoid(InfraError):
    """A fork that did not begin in the state of its border."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """The state of an episode between two turns; as many episodes as wanted can go on from it."""

    proof: str
    """Hash of the state, taken before the copy."""
    sandbox: tuple[Sandbox, str] | None
    """The episode's own sandbox with the id of a snapshot; None without one."""
    attributes: Mapping[str, Any]
    """A copy of the environment's attributes, its random source included."""
    transcript: tuple[Message, ...]
    step: Step | None
    seconds: Mapping[str, float]
    """Wall time of each part so far: budgets go on from there."""
    counts: Mapping[str, Any]
    answer: str = ""
    """The answer that was sent back, where one was."""
    sent_back: int = 0

    @property
    def bytes(self) -> int:
        """About how much memory its files take."""
        return self.sandbox[0].snapshot_bytes(self.sandbox[1]) if self.sandbox else 0

    def forget(self) -> None:
        """Release the files."""
        if self.sandbox is not None:
            self.sandbox[0].forget(self.sandbox[1])


async def proof_of(episode: Episode) -> str:
    """Hash where an episode stands, the times of its files included."""
    seen = [(o.role, o.name, o.content) for o in episode.step.observations] if episode.step else []
    return hashing.digest([await episode.digest(), await run(episode.environment.state), seen])


async def processes(episode: Episode) -> int:
    """Count the processes in the sandbox, the one that counts among them; 0 without a sandbox."""
    if episode.box is None:
        return 0
    return sum(name.isdecimal() for name in await episode.box.aio.list("/proc"))


async def border(episode: Episode, idle: int, *, room: int = MOST_BYTES) -> Fork:
    """Keep an episode's state between two turns. Raise Unforkable where a fork would lack a part of it.

    `idle` is how many processes its sandbox had before the first turn, `room` how many bytes the files may take.
    """
    attributes = copied(episode.environment)
    try:
        await _at_rest(episode, idle)
        proof = await proof_of(episode)
        saved = None
        if episode.box is not None:
            origin = episode.box.inner
            saved = (origin, await origin.aio.snapshot())
    except (AgentError, OSError) as error:  # a file is being replaced, or the sandbox is dead
        raise Unforkable(f"its state cannot be read: {error}") from error
    fork = Fork(
        proof=proof,
        sandbox=saved,
        attributes=attributes,
        transcript=tuple(episode.transcript),
        step=episode.step,
        seconds=dict(episode.seconds),
        counts=episode.ledger,
        answer=episode.answer,
        sent_back=episode.sent_back,
    )
    if fork.bytes > room:
        fork.forget()
        raise Unforkable(f"its files take more than the {MOST_BYTES >> 20} MiB that an episode may keep for branches")
    return fork


async def _at_rest(episode: Episode, idle: int) -> None:
    """Raise Unforkable while programs run in the sandbox: a snapshot holds files, not processes."""
    for wait in (*WAITS_S, None):
        more = await processes(episode) - idle
        if more <= 0:
            return
        if wait is not None:
            await asyncio.sleep(wait)
    raise Unforkable("programs that the episode started are still running in its sandbox")


def copied(environment: Environment) -> dict[str, Any]:
    """Return a deep copy of an environment's own attributes; raise Unforkable, naming the first that has none."""
    attributes: dict[str, Any] = {}
    memo: dict[int, Any] = {}
    for name, value in vars(environment).items():
        if name in SHARED:
            continue
        try:
            attributes[name] = copy.deepcopy(value, memo)
        except Exception as error:
            raise Unforkable(
                f"{type(environment).__name__}.{name} ({type(value).__name__}) cannot be copied: {error}"
            ) from error
    return attributes


def check_forkable(episode: Episode) -> None:
    """Refuse an environment whose state on the host's side cannot be forked. Called once it has started."""
    try:
        copied(episode.environment)
    except Unforkable as error:
        raise AuthoringError(
            f"algorithm.credit: branch forks episodes, but {error}. Give that object a __deepcopy__, or use another "
            "credit, for example type: gigpo"
        ) from error
    if episode.box is not None and not hasattr(episode.boxes, "fork"):
        raise AuthoringError("algorithm.credit: branch needs sandboxes that can be forked, those of a pool")


class ForkedEpisode(Episode):
    """An episode that begins where another one stood."""

    def __init__(self, environment: Environment, task: Task, origin: Fork, *, seed: int, boxes: Boxes) -> None:
        super().__init__(environment, task, seed=seed, boxes=boxes)
        self.origin = origin

    async def start(self) -> tuple[Message, ...]:
        """Fork sandbox and environment; raise ForkVoid unless the state is that of the border."""
        env, origin = self.environment, self.origin
        kept = {name: value for name, value in vars(env).items() if name in SHARED}
        vars(env).clear()
        vars(env).update(copy.deepcopy(dict(origin.attributes)) | kept)
        env.given = self.task.public()
        if origin.sandbox is not None:
            forking = cast(ForkingBoxes, self.boxes).fork(*origin.sandbox)
            self.box = TimedBox(await self._stack.enter_async_context(forking))
            self.root = self.box.root
            env._box = cast(Sandbox, self.box)
        self._started = self._whole = True
        self.transcript, self.step = list(origin.transcript), origin.step
        self.answer, self.sent_back = origin.answer, origin.sent_back
        self.seconds.update(origin.seconds)
        for name, value in origin.counts.items():
            if name in self._counts:
                self._counts[name] = value
        self._denied, self._dry_runs = list(origin.counts["denied"]), list(origin.counts["dry_runs"])
        try:
            proof = await proof_of(self)
        except (AgentError, OSError) as error:
            raise ForkVoid(f"the state of a branch of {self.task.id} cannot be read: {error}") from error
        if proof != origin.proof:
            raise ForkVoid(
                f"a branch of {self.task.id} began in another state than the turn that it was taken from: the hashes "
                "of sandbox, state() and last observations differ"
            )
        return tuple(self.transcript)
