"""An episode that its caller drives action by action, over the one driver: gymnasium, TRL and servers are such callers.

    caller ── act(message) ──> queue ──> drive(episode) ── observations ──> queue ──> caller
                                             └── over ──> Played: closed, graded

What breaks an episode after the policy has acted is repeated once with the same actions. If it recurs while the system
works, the policy caused it: graded 0, with an alarm. So no caller has to tell infrastructure trouble from a policy that
wants to be rid of its episode, and what is raised here (or has no score) is never the policy's doing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.play import Played, Stage, Stop, drive, system_works
from agentrl.errors import InfraError, fault_of
from agentrl.types import Message, Outcome, Task


class SteppedEpisode:
    """One episode; `start`, then `act` until it returns a `Played`, then or at any time `close`."""

    def __init__(
        self,
        make: Callable[[], Environment],
        task: Task,
        where: Stage,
        *,
        seed: int = 0,
        turns: int | None = None,
        group: int = 0,
        repeat: bool = True,
    ) -> None:
        """`turns`: by default the environment's own limit. `repeat`: whether what breaks is tried again."""
        self.task = task
        self._make, self._where, self._seed, self._turns = make, where, seed, turns
        self._context = where.context(task.id, group)
        self._repeat = repeat
        self._said: list[Message | Stop] = []
        self._actions: asyncio.Queue[Message | Stop]
        self._observations: asyncio.Queue[Sequence[Message]]
        self._playing: asyncio.Task[Played] | None = None
        self.episode: Episode
        self.played: Played | None = None
        """The whole episode, once it is over."""

    async def start(self) -> Sequence[Message]:
        """Start the episode and return its opening messages, the system message first."""
        self._begin()
        opening = await self._next()
        assert not isinstance(opening, Played)
        return opening

    async def act(self, message: Message | Stop) -> Sequence[Message] | Played:
        """Carry out one message; return what it brought, or the whole episode once it is over."""
        if self.played is not None:
            return self.played
        self._said.append(message)
        self._actions.put_nowait(message)
        try:
            shown = await self._next()
        except Exception:
            if not self._repeat:
                raise
            self._repeat = False
            shown = await self._again()
        if isinstance(shown, Played):
            self.played = shown
        return shown

    async def settle(self, final: str | None = None) -> Played:
        """End the episode and return it, graded: with a final message, or cut off where there is none."""
        while self.played is None:
            await self.act(Stop() if final is None else Message(role="assistant", content=final))
            final = None  # an environment may answer a message; then the episode is cut off
        return self.played

    async def close(self) -> None:
        """Give the episode up if it is under way, and wait until its sandbox is closed."""
        if self._playing is not None:
            self._playing.cancel()
            await asyncio.gather(self._playing, return_exceptions=True)
            self._playing = None

    def _begin(self) -> None:
        environment = self._make()
        where = self._where
        self.episode = Episode(
            environment, self.task, seed=self._seed, boxes=where.boxes, permissions=where.permissions
        )
        self._actions, self._observations = asyncio.Queue(), asyncio.Queue()
        turns = self._turns or environment.max_turns
        self._playing = asyncio.create_task(drive(self.episode, self._policy, self._context, turns=turns))

    async def _policy(self, episode: Episode) -> Message | Stop:
        """The policy of the episode: show what came of the last action, then wait for the caller's next one."""
        observed = [o.message() for o in episode.step.observations] if episode.step else episode.transcript
        self._observations.put_nowait(tuple(observed))
        return await self._actions.get()

    async def _next(self) -> Sequence[Message] | Played:
        """Wait until the episode shows something, or is over."""
        assert self._playing is not None
        shown = asyncio.ensure_future(self._observations.get())
        try:
            await asyncio.wait({shown, self._playing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = not shown.done() and shown.cancel()
        return self._playing.result() if ended else shown.result()

    async def _again(self) -> Sequence[Message] | Played:
        """Repeat the episode up to where it broke."""
        try:
            self._begin()
            shown = await self._next()
            for message in self._said:
                if isinstance(shown, Played):
                    return shown
                self._actions.put_nowait(message)
                shown = await self._next()
            return shown
        except Exception as error:
            infra = isinstance(error, InfraError)
            if not await system_works(infra, self.episode.environment.verifier, self._context):
                raise
            fault = replace(fault_of(error, self.episode.stage), blame="agent")
            outcome = Outcome(ending="agent_error", grade="graded", score=0.0, fault=fault, alarm=True)
            return Played(
                task=self.task.public(),
                messages=tuple(self.episode.transcript),
                outcome=outcome,
                ledger=self.episode.ledger,
                root=self.episode.root,
            )
