"""The state before each turn: equal for episodes that stand at the same place, whatever they did on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from agentrl import codec, sandboxes
from agentrl.envs import Environment, tool
from agentrl.errors import AgentError
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.rollout import rollout
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.sandboxes.base import SandboxSpec
from agentrl.sandboxes.pool import Pool
from agentrl.types import Split, Task, ToolCall, Trajectory, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier


class Nothing(Verifier):
    """Every answer scores 1."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        return Verdict(score=1.0)


class Shelf(Environment):
    """A folder that the policy writes to, and a counter on the host's side."""

    levels = range(1, 2)
    verifier = Nothing()
    max_turns = 8

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(id=f"shelf/{split}/{level}/{index}", split=split, level=level, prompt="Write.")

    def prepare(self, task: Task, rng: Any) -> SandboxSpec:
        return SandboxSpec(files={"a.txt": "a"})

    def start(self) -> None:
        self.rung = 0

    def state(self) -> dict[str, int]:
        return {"rung": self.rung}

    @tool
    def write(self, path: str, text: str) -> str:
        """Write a file.

        Args:
            path: where
            text: what
        """
        self.box.write(path, text.encode())
        return "ok"

    @tool
    def ring(self) -> str:
        """Ring the bell."""
        self.rung += 1
        return "ok"

    @tool
    def look(self) -> str:
        """Look at the names."""
        return " ".join(self.box.list())


@pytest.fixture(scope="module")
def boxes() -> Iterator[Pool]:
    backend = sandboxes.load("namespace")()
    pool = Pool(backend if backend.available().works else sandboxes.load("process")(), limit=4)
    yield pool
    pool.close()


def call(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def played(renderer: Renderer, runtime: EnvRuntime, *actions: ToolCall | str, budget: Budget | None = None) -> Any:
    task = runtime.make().task("train", 1, 0)
    rollout_id = RolloutId(seed=1, group=0, index=0, secret=b"k")
    budget = budget or Budget(context=4000, tokens=2000)
    engine = ScriptedEngine(renderer, actions)
    return asyncio.run(rollout(engine, renderer, runtime, task, rollout_id=rollout_id, budget=budget))


@pytest.fixture
def shelf(boxes: Pool) -> EnvRuntime:
    return EnvRuntime(name="shelf", make=Shelf, boxes=boxes, states=True)


@pytest.fixture
def chat(renderers: dict[str, Renderer]) -> Renderer:
    return renderers["qwen3"]


def test_other_ways_lead_to_equal_states(chat: Renderer, shelf: EnvRuntime) -> None:
    """Two files are written in one order and in the other, at different times: in the end the states are equal."""
    one = played(chat, shelf, call("write", path="x", text="1"), call("write", path="y", text="2"), "done")
    time.sleep(0.02)
    two = played(chat, shelf, call("write", path="y", text="2"), call("write", path="x", text="1"), "done")
    assert (len(one.states), len(set(one.states)), len(two.states)) == (3, 3, 3)
    assert [a == b for a, b in zip(one.states, two.states, strict=True)] == [True, False, True]


def test_files_the_hosts_side_and_what_was_seen_tell_states_apart(chat: Renderer, shelf: EnvRuntime) -> None:
    start, after_writing = played(chat, shelf, call("write", path="x", text="1"), "done").states
    other = {
        "another content": call("write", path="x", text="2"),
        "a counter of the environment": call("ring"),
        "another observation": call("look"),
    }
    seen = {name: played(chat, shelf, action, "done").states for name, action in other.items()}
    assert {name: states[0] == start for name, states in seen.items()} == dict.fromkeys(other, True)
    assert len({start, after_writing, *(states[1] for states in seen.values())}) == 5


def test_a_visit_to_the_same_state_is_recognised(chat: Renderer, shelf: EnvRuntime) -> None:
    states = played(chat, shelf, call("look"), call("look"), "done").states
    assert (states[0] == states[1], states[1] == states[2]) == (False, True)


def test_a_turn_without_tokens_has_no_state(chat: Renderer, shelf: EnvRuntime) -> None:
    """The episode's time runs out while its second turn is being sampled."""

    class Slow(ScriptedEngine):
        async def generate(self, *arguments: Any, **options: Any) -> Any:
            self.asked = getattr(self, "asked", 0) + 1
            await asyncio.sleep(5.0 if self.asked == 2 else 0.0)
            return await super().generate(*arguments, **options)

    task = shelf.make().task("train", 1, 0)
    engine = Slow(chat, [call("look"), "done"])
    budget = Budget(context=4000, tokens=2000, wall_seconds=0.7)
    rollout_id = RolloutId(seed=1, group=0, index=0, secret=b"k")
    trajectory = asyncio.run(rollout(engine, chat, shelf, task, rollout_id=rollout_id, budget=budget))
    assert (trajectory.outcome.ending, len(trajectory.states)) == ("timeout", 1)


def test_states_are_stored_and_cost_nothing_where_they_are_not_wanted(chat: Renderer, shelf: EnvRuntime) -> None:
    trajectory: Trajectory = played(chat, shelf, call("look"), "done")
    assert codec.from_row(codec.to_row(trajectory, "shelf")).trajectory.states == trajectory.states
    assert "state" in trajectory.timings
    without = played(chat, replace(shelf, states=False), call("look"), "done")
    assert (without.states, "state" in without.timings) == ((), False)


@pytest.mark.parametrize("broken", [PermissionError("no"), AgentError("nests too deep")])
def test_a_state_that_cannot_be_told_breaks_nothing(
    chat: Renderer, shelf: EnvRuntime, monkeypatch: pytest.MonkeyPatch, broken: Exception
) -> None:
    async def fails(self: Any, *, times: bool = True) -> str:
        raise broken

    monkeypatch.setattr("agentrl.envs.episode.Episode.digest", fails)
    trajectory = played(chat, shelf, call("look"), "done")
    assert (trajectory.outcome.score, trajectory.states) == (1.0, ("", ""))
