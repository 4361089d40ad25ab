"""For the tests of an environment: play a scripted policy against it, from plain synchronous code.

from agentrl.envs.testing import scripted_policy  # a pytest fixture

def test_expert(scripted_policy):
    assert scripted_policy("files", level=1).score == 1.0
    assert scripted_policy("files", ["done"], level=1).score == 0.0
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

import pytest

from agentrl.envs import load
from agentrl.envs.base import Environment
from agentrl.envs.script import Action, Played, play, stage
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
    **options: Any,
) -> Played:
    """Play the actions, or the expert's, and have the end graded."""
    kind = load(environment) if isinstance(environment, str) else environment

    async def run() -> Played:
        instance = kind(**options)
        task = instance.task(split, kind.levels[0] if level is None else level, index)
        script = instance.expert(task) if actions is None else actions
        async with stage(sandbox, limit=4) as where:
            return await play(instance, task, script, where, seed=seed, max_turns=max_turns, digests=True)

    return asyncio.run(run())


@pytest.fixture
def scripted_policy() -> ScriptedPolicy:
    """Plays a list of tool calls and messages against an environment, and returns the whole episode."""
    return play_script
