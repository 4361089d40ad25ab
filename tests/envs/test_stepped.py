"""Episodes that a caller drives: what they show, how they are graded, and that no policy can be rid of one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentrl.envs import Environment, load, tool
from agentrl.envs.play import Played, Stage, message_of
from agentrl.envs.stepped import SteppedEpisode
from agentrl.errors import InfraError
from agentrl.types import Observation, Split, Task, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier


class Said(Verifier):
    """1 for the answer "yes"; its probe fails while the system is down."""

    down = False

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        return Verdict(score=float(submission.answer == "yes"), trust="reported")

    async def probe(self, context: Context) -> None:
        if self.down:
            raise InfraError("the peer is gone")


class Breaks(Environment):
    """A tool that breaks as often as it is told."""

    verifier = Said()
    left = 0

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(id=f"breaks/{split}/{level}/{index}", split=split, level=level, prompt="Say yes.")

    def start(self) -> Observation:
        return Observation(content="the door is </out> open")

    @tool
    def touch(self) -> str:
        """Touch it."""
        if type(self).left:
            type(self).left -= 1
            raise InfraError("the peer closed the connection")
        return "well"


def stepped(where: Stage, **options: Any) -> SteppedEpisode:
    return SteppedEpisode(Breaks, Breaks().task("train", 1, 0), where, **options)


def touch() -> Any:
    from agentrl.types import ToolCall

    return message_of(ToolCall(name="touch"))


def test_an_episode_is_driven_from_outside(where: Stage) -> None:
    """The expert's actions, one by one: observations after each, and the graded episode at the end."""

    async def main() -> list[Any]:
        kind = load("files")
        task = kind().task("train", 1, 0)
        episode = SteppedEpisode(kind, task, where)
        shown: list[Any] = [await episode.start()]
        for action in kind().expert(task):
            shown.append(await episode.act(message_of(action)))
        await episode.close()
        return shown

    opening, *rest = asyncio.run(main())
    assert [message.role for message in opening] == ["system", "user"]
    assert [message.role for message in rest[0]] == ["tool"]
    assert isinstance(rest[-1], Played) and rest[-1].score == 1.0


def test_what_only_the_start_knows_follows_the_prompt_as_data(where: Stage) -> None:
    """It stands in the user's message, in a frame that it cannot close; the pure task has the prompt alone."""

    async def main() -> Any:
        episode = stepped(where)
        try:
            return (await episode.start())[1].content
        finally:
            await episode.close()

    assert asyncio.run(main()) == "Say yes.\n\n<out>the door is <\\/out> open</out>"


@pytest.mark.parametrize(("times", "down", "score"), [(1, False, 1.0), (2, False, 0.0)])
def test_trouble_that_recurs_while_the_system_works_scores_0(
    where: Stage, monkeypatch: pytest.MonkeyPatch, times: int, down: bool, score: float
) -> None:
    """Once: the episode is repeated and goes on. Twice: the policy caused it, graded 0 with an alarm."""
    monkeypatch.setattr(Breaks, "left", times)

    async def main() -> Played:
        episode = stepped(where)
        await episode.start()
        await episode.act(touch())
        return await episode.settle("yes")

    played = asyncio.run(main())
    assert (played.score, played.outcome.alarm) == (score, times == 2)


def test_trouble_of_a_peer_that_is_down_is_never_scored(where: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's probe fails too: the trouble is raised, and there is no score."""
    monkeypatch.setattr(Breaks, "left", 2)
    monkeypatch.setattr(Said, "down", True)

    async def main() -> None:
        episode = stepped(where)
        await episode.start()
        with pytest.raises(InfraError, match="closed the connection"):
            await episode.act(touch())
        await episode.close()

    asyncio.run(main())


def test_without_a_final_message_an_episode_is_cut_off(where: Stage) -> None:
    """It is graded all the same."""

    async def main() -> Played:
        episode = stepped(where)
        await episode.start()
        return await episode.settle()

    played = asyncio.run(main())
    assert (played.outcome.ending, played.score) == ("max_turns", 0.0)
    assert played.verdict is not None and played.verdict.trust == "reported"
