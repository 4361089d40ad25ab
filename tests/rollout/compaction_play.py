"""What the tests of compaction play with: an environment, an engine that says given turns, and the proof of a log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentrl.envs import tool
from agentrl.recipe import DropCompaction, SubagentCompaction, SummaryCompaction
from agentrl.rollout.compaction import Compacting, compacted_rollout
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.types import Message, ToolCall, Trajectory
from tests.rollout.conftest import Echo, Puppet

BUDGET = Budget(context=2000, tokens=2000)
SUMMARY = Compacting(section=SummaryCompaction(type="summary"), threshold=1000, summary_tokens=60)
DROP = Compacting(section=DropCompaction(type="drop"), threshold=1000, summary_tokens=1)
SUBAGENT = Compacting(section=SubagentCompaction(type="subagent"), threshold=2000, summary_tokens=1)
KINDS = {"summary": SUMMARY, "drop": DROP, "subagent": SUBAGENT}
SYSTEM, TASK = Message(role="system", content="Use the tools."), Message(role="user", content="Do 0.")


class Lister(Echo):
    """Answers a short call with a long text."""

    @tool
    def many(self, count: int) -> str:
        """Say a word many times.

        Args:
            count: how often
        """
        return "far " * count


def call(name: str, **arguments: Any) -> Message:
    return Message(role="assistant", content="", tool_calls=(ToolCall(name=name, arguments=arguments),))


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


def result(text: str, name: str = "many") -> Message:
    return Message(role="tool", content=text, name=name)


def engine_of(renderer: Renderer, *turns: Message | Sequence[int]) -> Puppet:
    """An engine that says these turns, the last of them for ever."""
    tokens = [renderer.write(turn) if isinstance(turn, Message) else tuple(turn) for turn in turns]
    count = iter(range(1_000_000))
    return Puppet(lambda *_: tokens[min(next(count), len(tokens) - 1)], renderer.stop_token_ids)


def play(
    compacting: Compacting | None, engine: Any, renderer: Renderer, world: EnvRuntime, budget: Budget = BUDGET
) -> Trajectory:
    where = RolloutId(seed=1, group=2, index=3, secret=b"k")
    task = world.make().task("train", 1, 0)
    return asyncio.run(compacted_rollout(compacting, engine, renderer, world, task, rollout_id=where, budget=budget))


def proved(trajectory: Trajectory, calls: Sequence[Any]) -> None:
    """Every request of the engine, prompt and answer, is the beginning of one segment, and nothing else is sampled."""
    left = {place: segment.token_ids.tolist() for place, segment in enumerate(trajectory.segments)}
    ends: dict[int, int] = dict.fromkeys(left, 0)
    sampled = {place: np.zeros(len(tokens), bool) for place, tokens in left.items()}
    for _, prompt, _, completion in calls:
        whole = [*prompt, *completion.token_ids]
        place = next(p for p, tokens in left.items() if tokens[: len(whole)] == whole and ends[p] < len(whole))
        ends[place] = len(whole)
        sampled[place][len(prompt) : len(whole)] = True
    for place, segment in enumerate(trajectory.segments):
        assert segment.loss_mask.tolist() == sampled[place].tolist()
        assert ends[place] == len(segment) or not trajectory.sampled_tokens
    assert len(trajectory.segments) >= len(trajectory.conversations)


def told(trajectory: Trajectory) -> list[tuple[str, int]]:
    return [(part.kind, part.turns) for part in trajectory.conversations]
