"""For the tests of an environment: play a scripted policy against it, from plain synchronous code.

from agentrl.envs.testing import scripted_policy  # a pytest fixture

def test_expert(scripted_policy):
    assert scripted_policy("files", level=1).score == 1.0
    assert scripted_policy("files", ["done"], level=1).score == 0.0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import pytest

from agentrl import event_loop, sandboxes
from agentrl.envs import load
from agentrl.envs.base import Environment
from agentrl.envs.play import Action, Played, Stage, play, stage
from agentrl.sandboxes.pool import Pool
from agentrl.types import Split


class ScriptedPolicy(Protocol):
    """What the fixture hands out."""

    def __call__(
        self,
        environment: str | type[Environment],
        actions: Iterable[Action] | None = None,
        *,
        split: Split = "train",
        level: int | None = None,
        index: int = 0,
        seed: int = 0,
        sandbox: str = "namespace",
        max_turns: int | None = None,
        **options: Any,
    ) -> Played: ...


def play_script(
    environment: str | type[Environment],
    actions: Iterable[Action] | None = None,
    *,
    split: Split = "train",
    level: int | None = None,
    index: int = 0,
    seed: int = 0,
    sandbox: str = "namespace",
    max_turns: int | None = None,
    where: Stage | None = None,
    **options: Any,
) -> Played:
    """Play the actions, or the expert's, and have the end graded; on a stage of its own where none is given."""
    kind = load(environment, options) if isinstance(environment, str) else environment

    async def run(on: Stage) -> Played:
        instance = kind(**options)
        task = instance.task(split, kind.levels[0] if level is None else level, index)
        script = instance.expert(task) if actions is None else actions
        return await play(instance, task, script, on, seed=seed, max_turns=max_turns, digests=True)

    async def alone() -> Played:
        async with stage(sandbox, limit=4) as on:
            return await run(on)

    return event_loop.run(run(where) if where is not None else alone())


@pytest.fixture(scope="session")
def scripted_policy() -> Iterator[ScriptedPolicy]:
    """Plays a list of tool calls and messages against an environment, and returns the whole episode."""
    pools: dict[str, Pool] = {}

    def run(*args: Any, sandbox: str = "namespace", **options: Any) -> Played:
        if sandbox not in pools:
            pools[sandbox] = Pool(sandboxes.load(sandbox)(), limit=4)
        return play_script(*args, where=Stage(boxes=pools[sandbox]), **options)

    yield run
    for pool in pools.values():
        pool.close()
