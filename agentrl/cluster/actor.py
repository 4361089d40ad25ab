"""The far side of a player: a process on some node that plays rollouts with sandboxes and verifiers of its own."""

from __future__ import annotations

import asyncio
import io
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.cluster.judge import RemoteJudge, asking_for
from agentrl.cluster.kit import Kit, facts, unpack
from agentrl.engines.base import Engine, Weights
from agentrl.errors import AgentRLError, RecipeError, UserError
from agentrl.interop.agents import AgentPlayer, with_agents
from agentrl.interop.gateway import Gateway
from agentrl.judges import needs_judge, with_rewards
from agentrl.recipe import Recipe
from agentrl.rollout.player import LocalPlayer, RequestGate, make_player
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import EnvRuntime, RolloutId
from agentrl.rollout.runtimes import runtimes, source_versions
from agentrl.sandboxes.base import SandboxSpec, off_loop
from agentrl.sandboxes.pool import Pool
from agentrl.types import Split, Trajectory

LEAST_DISK = 64 << 20
"""Free bytes in the folder for temporary files below which a player plays no more."""
PROBE_S = 30.0
"""A sandbox that is not there after this many seconds does not work."""


class PlayerUnfit(AgentRLError):
    """A player cannot play: its sandboxes do not work, or its disk is full. Other players may."""


class PlayerActor:
    """Runs in a Ray worker. `start` comes first; `play` may run many times at once; `close` ends it."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._stack = AsyncExitStack()
        self._held: AsyncExitStack | None = None
        self._runtimes: Mapping[str, EnvRuntime] = {}
        self._engine: Engine | None = None
        self._gate: RequestGate | None = None
        self._player: AgentPlayer | LocalPlayer | None = None

    async def start(self) -> dict[str, Any]:
        """Build everything that rollouts need; return the node's facts, and hashes of its environments' sources."""
        kit = self._kit
        with tempfile.TemporaryDirectory(prefix="agentrl-player-") as folder:  # gone before anything can kill a player
            recipe, tokenizer, engine = await asyncio.to_thread(unpack, kit, Path(folder))
        bounded = recipe.model_copy(update={"sandboxes": recipe.sandboxes.model_copy(update={"boxes": kit.boxes})})
        try:
            judge = RemoteJudge(kit.judge) if kit.judge is not None else None
            judged = recipe.rewards.judged is not None
            opened = self._stack.enter_context(
                runtimes(bounded, judge=lambda _, environment: judge if judged or needs_judge(environment) else None)
            )
            self._runtimes = with_rewards(recipe.rewards, opened)
        except RecipeError as error:
            if "does not work here" in str(error):
                raise PlayerUnfit(str(error)) from error
            raise
        await self._fit()
        self._stack.push_async_callback(engine.close)
        await engine.start()
        if kit.urls and not getattr(engine, "reports_versions", False):
            raise RecipeError(
                f"rollout.engine: the SGLang servers at {', '.join(kit.urls)} do not report which weights sampled a "
                "token, which players need; update SGLang, or leave out `cluster`"
            )
        self._engine, self._gate = engine, RequestGate(engine)
        player = make_player(recipe, self._gate, Renderer(tokenizer), kit.context, self._runtimes)
        self._player = await self._with_agents(recipe, player)
        self._kit = replace(kit, files={}, agents={})
        import ray

        untyped: Any = ray
        node = untyped.get_runtime_context().get_node_id()
        place = {"ip": untyped.util.get_node_ip_address(), "node": node, "version": engine.version}
        return {**facts(kit.threads), **place, "sources": source_versions(self._runtimes)}

    async def _with_agents(self, recipe: Recipe, player: LocalPlayer) -> AgentPlayer | LocalPlayer:
        """Let agents play where the recipe says so: sessions and their keys never leave this process."""
        gateway = Gateway()
        self._stack.push_async_callback(gateway.close)
        try:
            acting = with_agents(recipe, player, gateway, self._kit.agents)
            if isinstance(acting, AgentPlayer):
                await gateway.start()
        except UserError as error:  # its packages, its virtual environment or its function are not on this node
            raise PlayerUnfit(f"the agent cannot run on this node: {error}") from error
        return acting

    async def play(
        self, env: str, split: Split, level: int, rollout_id: RolloutId, temperature: float | None
    ) -> Trajectory:
        """Build the task where it is played, and play it. The trajectory comes without the task's setup."""
        assert self._player is not None
        self._check_disk()
        player = self._player if temperature is None else self._player.at(temperature)
        asking_for.set((rollout_id.group, rollout_id.index))
        task = self._runtimes[env].make().task(split, level, rollout_id.task_index)
        trajectory = await player.play(env, task, rollout_id)
        if trajectory.outcome.grade != "graded" or trajectory.outcome.alarm:
            await self._fit()  # is it this node? Then another one plays it
        bare = replace(trajectory.task, setup={})
        return replace(trajectory, task=bare, branches=tuple(replace(b, task=bare) for b in trajectory.branches))

    async def check(self) -> None:
        """Raise PlayerUnfit unless this player's disk and sandboxes are well."""
        await self._fit()

    async def publish(self, version: int, tensors: Any, checksum: str) -> int:
        """Take new weights; `tensors` is what torch.save wrote of them."""
        import torch

        assert self._engine is not None
        state = await asyncio.to_thread(torch.load, io.BytesIO(tensors), weights_only=True)
        await self._engine.publish(Weights(version=version, tensors=state, checksum=checksum))
        return self._engine.version

    async def use_servers(self, urls: tuple[str, ...]) -> None:
        """Ask these SGLang servers from now on; requests of one that is gone are sent to another."""
        assert self._engine is not None
        await self._engine.use(urls)  # type: ignore[attr-defined]

    async def hold(self) -> None:
        """Let no request begin, and wait until those under way have ended."""
        assert self._gate is not None
        if self._held is None:
            self._held = AsyncExitStack()
            await self._held.enter_async_context(self._gate.closed())

    async def release(self) -> None:
        """End `hold`."""
        held, self._held = self._held, None
        if held is not None:
            await held.aclose()

    async def beat(self) -> dict[str, float]:
        """Show that the player lives; return its engine's counters."""
        return dict(self._engine.statistics()) if self._engine is not None else {}

    async def sandboxes_held(self) -> int:
        """Return how many sandboxes episodes and grading hold now."""
        pools: dict[int, Any] = {id(runtime.boxes): runtime.boxes for runtime in self._runtimes.values()}
        return sum(pool.held for pool in pools.values())

    async def close(self) -> None:
        """Close the sandboxes and the engine."""
        await self._stack.aclose()

    def _check_disk(self) -> None:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if free < LEAST_DISK:
            raise PlayerUnfit(f"only {free >> 20} MiB are free in {folder}; a player needs {LEAST_DISK >> 20}")

    async def _fit(self) -> None:
        """Raise PlayerUnfit where this node, not an episode, is to blame: no disk, or no sandbox."""
        self._check_disk()
        for name, runtime in self._runtimes.items():
            try:
                async with asyncio.timeout(PROBE_S):
                    code = await off_loop(_probe, runtime.boxes)
            except Exception as error:
                cause = " ".join(str(error).split()) or type(error).__name__
                raise PlayerUnfit(f"the sandboxes of {name} do not work: {cause}") from error
            if code:
                raise PlayerUnfit(f"the sandboxes of {name} do not work: `true` ended with exit code {code}")


def _probe(boxes: Any) -> int:
    """Run `true` in a sandbox beside the pool's places, which may all be taken."""
    assert isinstance(boxes, Pool)
    box = boxes.backend.create(SandboxSpec())
    try:
        return box.exec(["true"]).exit_code
    finally:
        box.close()
