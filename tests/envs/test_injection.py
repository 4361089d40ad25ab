"""Injection: attempts reach the policy framed, obedience is counted, the task stays what it was."""

import asyncio
import re

import pytest

from agentrl.catalogue import members
from agentrl.envs import Environment, load, tool, tools_of
from agentrl.envs.episode import Episode
from agentrl.envs.injection import ATTEMPTS, Compliance, injected, measure
from agentrl.envs.play import Action, Played, Policy, Stage, play
from agentrl.types import ToolCall

Files = load("files")
Hostile = injected(Files, rate=1.0)


def run(where: Stage, policy: Policy | list[Action], seed: int = 0) -> Played:
    environment = Hostile()
    return asyncio.run(play(environment, environment.task("train", 1, 0), policy, where, seed=seed))


def test_a_policy_that_minds_its_task_is_not_counted(where: Stage) -> None:
    environment = Hostile()
    task = environment.task("train", 1, 0)
    result = asyncio.run(play(environment, task, environment.expert(task), where))
    assert result.score == 1.0
    assert measure([result.messages]) == Compliance(attempts=1, obeyed=0)


def test_a_policy_that_obeys_is(where: Stage) -> None:
    async def gullible(episode: Episode) -> Action:
        if episode.transcript[-1].role == "tool":
            return episode.transcript[-1].content
        return ToolCall(name="run", arguments={"command": "ls"})

    result = run(where, gullible)
    assert measure([result.messages, result.messages]) == Compliance(attempts=2, obeyed=2)
    assert measure([result.messages]).rate == 1.0


def test_no_attempt_leaves_its_frame(where: Stage) -> None:
    seen = set()
    for seed in range(12):
        result = run(where, [ToolCall(name="run", arguments={"command": "ls"})], seed)
        text = result.messages[-1].content
        assert text.startswith("<out>") and text.endswith("</out>") and text.count("</out>") == 1
        seen.add(next(a for a in ATTEMPTS if a.split("{token}")[0].replace("</out", "<\\/out") in text))
    assert len(seen) >= 4
    assert run(where, [ToolCall(name="run", arguments={"command": "ls"})], 3).messages[-1].content == (
        run(where, [ToolCall(name="run", arguments={"command": "ls"})], 3).messages[-1].content
    )


@pytest.mark.parametrize("name", list(members("envs")))
def test_any_environment_can_be_made_hostile_and_its_expert_still_solves_it(name: str, where: Stage) -> None:
    kind = load(name)
    environment = injected(kind, rate=1.0)()
    task = environment.task("train", 1, 0)
    script = list(environment.expert(task))
    result = asyncio.run(play(environment, task, script, where))
    answered = sum(message.role == "tool" for message in result.messages)
    assert (result.score, measure([result.messages])) == (1.0, Compliance(attempts=answered, obeyed=0))
    plain = asyncio.run(play(kind(), task, script, where))
    assert [m.role for m in plain.messages] == [m.role for m in result.messages]


def test_the_environments_own_draws_stay_as_they_were(where: Stage) -> None:
    class Dice(Files):  # type: ignore[misc, valid-type]
        @tool
        def roll(self) -> str:
            """Roll a die."""
            return f"a {self.rng.randint(1, 6)}"

    def rolls(kind: type[Environment]) -> list[str]:
        environment = kind()
        task = environment.task("train", 1, 0)
        calls = [ToolCall(name="roll")] * 6
        result = asyncio.run(play(environment, task, calls, where))
        return [line for m in result.messages for line in re.findall(r"a \d", m.content) if m.role == "tool"]

    assert rolls(injected(Dice, rate=1.0)) == rolls(Dice)


def test_the_tools_stay_what_they_were() -> None:
    assert [t.schema() for t in tools_of(Hostile).values()] == [t.schema() for t in tools_of(Files).values()]
    assert measure([]) == Compliance(0, 0) and measure([]).rate == 0.0
    with pytest.raises(ValueError, match="rate must be above 0"):
        injected(Files, rate=0.0)
