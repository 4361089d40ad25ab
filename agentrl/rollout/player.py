"""Plays single rollouts. Schedulers and evaluations ask a player; they know nothing of its engine, or where it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from agentrl.engines.base import Sampling
from agentrl.recipe import Recipe
from agentrl.rollout.compaction import Compacting, compacted_rollout, compaction_of
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.sampling import SamplingParams, TokenGenerator
from agentrl.rollout.thinking import think_budget
from agentrl.types import Completion, Task, Trajectory


class Player(Protocol):
    """Plays rollouts: in this process, or elsewhere (agentrl/cluster/players.py)."""

    async def play(self, env: str, task: Task, rollout_id: RolloutId) -> Trajectory:
        """Play one task to its end and have it graded."""
        ...

    def at(self, temperature: float) -> Player:
        """Return the same player with another temperature."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlayer:
    """Everything that one rollout needs besides its task and its id."""

    engine: TokenGenerator
    renderer: Renderer
    runtimes: Mapping[str, EnvRuntime]
    """The environments, by name."""
    budget: Budget
    sampling: SamplingParams = SamplingParams()
    compacting: Compacting | None = None
    """How conversations that get too long are compacted; None: not at all."""

    async def play(self, env: str, task: Task, rollout_id: RolloutId) -> Trajectory:
        """Play one task to its end and have it graded."""
        return await compacted_rollout(
            self.compacting,
            self.engine,
            self.renderer,
            self.runtimes[env],
            task,
            rollout_id=rollout_id,
            budget=self.budget,
            sampling=self.sampling,
        )

    def at(self, temperature: float) -> LocalPlayer:
        """Return the same player with another temperature."""
        return replace(self, sampling=replace(self.sampling, temperature=temperature))


def make_player(
    recipe: Recipe,
    engine: TokenGenerator,
    renderer: Renderer,
    context: int,
    environments: Mapping[str, EnvRuntime],
) -> LocalPlayer:
    """Make the player of a recipe's rollouts. `context` is the model's longest sequence."""
    budget = budget_of(recipe, context)
    think_budget(recipe.rollout.think_tokens, renderer)  # refuses a format without thinking
    return LocalPlayer(
        engine=engine,
        renderer=renderer,
        runtimes=environments,
        budget=budget,
        sampling=sampling_of(recipe),
        compacting=compaction_of(recipe, budget.context),
    )


def budget_of(recipe: Recipe, context: int) -> Budget:
    """Return what one episode may use. `context` is the model's longest sequence."""
    section = recipe.rollout
    return Budget(
        context=min(section.max_context or context, context),
        tokens=section.max_tokens,
        turn_tokens=section.max_turn_tokens,
        think_tokens=section.think_tokens,
        turns=section.max_turns,
        tool_seconds=section.tool_seconds,
        wall_seconds=section.episode_seconds,
        verify_seconds=section.verify_seconds,
        retries=section.retries,
    )


def sampling_of(recipe: Recipe) -> SamplingParams:
    """Return how turns are sampled."""
    section = recipe.rollout
    return SamplingParams(temperature=section.temperature, top_p=section.top_p, top_k=section.top_k)


class Gate(Protocol):
    """Holds requests to engines back."""

    def closed(self) -> AbstractAsyncContextManager[None]:
        """Wait until the requests under way have ended; others wait until the block is over."""
        ...


class RequestGate:
    """An engine whose requests can be held back: inside `closed` none is under way and none begins."""

    def __init__(self, engine: TokenGenerator) -> None:
        self.engine = engine
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        """Ask the engine, once the gate is open."""
        while not self._open.is_set():
            await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            return await self.engine.generate(token_ids, sampling, request_id=request_id)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Wait until the requests under way have ended; others wait until the block is over."""
        self._open.clear()
        try:
            await self._idle.wait()
            yield
        finally:
            self._open.set()
