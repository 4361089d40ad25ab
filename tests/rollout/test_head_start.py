"""Head starts: the expert plays first, the policy goes on, and only what the policy sampled is trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from agentrl.engines.base import Sampling
from agentrl.envs import Environment, tool
from agentrl.envs.play import message_of
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime, RolloutId
from agentrl.rollout.rollout import rollout
from agentrl.rollout.turns import head_start
from agentrl.types import Completion, Source, Split, Task, ToolCall, Trajectory, Verdict
from agentrl.verifiers.base import Context, Submission, Verifier


class Climbed(Verifier):
    """1 when the answer says how high the policy stands, and that is the top."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        return Verdict(score=float(submission.answer == "at 3" and dict(submission.state) == {"height": 3}))


class Stairs(Environment):
    """Three steps up, then say so."""

    levels = range(1, 2)
    verifier = Climbed()
    max_turns = 6

    def task(self, split: Split, level: int, index: int) -> Task:
        return Task(id=f"stairs/{split}/{level}/{index}", split=split, level=level, prompt="Climb three steps.")

    def start(self) -> None:
        self.height = 0

    def state(self) -> dict[str, int]:
        return {"height": self.height}

    def expert(self, task: Task) -> Sequence[ToolCall | str]:
        return [UP, UP, UP, "at 3"]

    @tool
    def up(self) -> str:
        """Go up one step."""
        self.height += 1
        return f"at {self.height}"


UP = ToolCall(name="up", arguments={})


class Follows:
    """An engine that goes up until it reads that it stands at 3; it notes its prompts."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer, self.prompts = renderer, list[str]()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        self.prompts.append(self.renderer.decode(token_ids))
        action = "at 3" if "at 3" in self.prompts[-1] else UP
        tokens = self.renderer.write(message_of(action))
        return Completion(token_ids=tokens, logprobs=(-0.5,) * len(tokens), versions=(7,) * len(tokens), finish="stop")


@pytest.fixture
def stairs(echo: EnvRuntime) -> EnvRuntime:
    return EnvRuntime(name="stairs", make=Stairs, boxes=echo.boxes)


def play(engine: Follows, runtime: EnvRuntime, share: float, context: int = 4000) -> Trajectory:
    rollout_id = RolloutId(seed=1, group=3, index=5, secret=b"k", head_start=share)
    task, budget = runtime.make().task("train", 1, 0), Budget(context=context, tokens=2000, retries=0)
    return asyncio.run(rollout(engine, engine.renderer, runtime, task, rollout_id=rollout_id, budget=budget))


@pytest.mark.parametrize(("share", "own"), [(0.0, 4), (0.25, 3), (0.5, 2), (0.75, 1)])
def test_the_policy_goes_on_where_the_expert_stopped(
    chat: Renderer, stairs: EnvRuntime, share: float, own: int
) -> None:
    engine = Follows(chat)
    trajectory = play(engine, stairs, share)
    assert trajectory.outcome.score == 1.0
    assert (len(engine.prompts), trajectory.turns) == (own, own)
    assert [m.role for m in trajectory.messages].count("assistant") == 4  # the expert's turns are told too
    whole = play(Follows(chat), stairs, 0.0)
    (segment,), (all_own,) = trajectory.segments, whole.segments
    assert np.array_equal(segment.token_ids, all_own.token_ids)  # the same conversation, token for token
    sampled = segment.sources == Source.SAMPLED
    assert chat.decode(segment.token_ids[sampled]) == "".join(
        chat.decode(chat.write(message_of(action))) for action in [UP, UP, UP, "at 3"][4 - own :]
    )
    assert set(segment.versions[~sampled].tolist()) == {-1} and set(segment.versions[sampled].tolist()) == {7}


def test_the_expert_never_plays_everything(chat: Renderer, stairs: EnvRuntime) -> None:
    task = stairs.make().task("train", 1, 0)
    assert [len(head_start(chat, stairs, task, share)) for share in (0.0, 0.01, 0.5, 0.99, 1.0)] == [0, 1, 2, 3, 3]
    assert len(head_start(chat, stairs, task, 0.75, turns=2)) == 1  # the policy has one turn left


def test_a_head_start_that_fills_the_context_ends_the_episode(chat: Renderer, stairs: EnvRuntime) -> None:
    engine = Follows(chat)
    length = len(chat.prompt(play(engine, stairs, 0.0).messages[:2], ()).token_ids)
    trajectory = play(Follows(chat), stairs, 0.75, context=length + 60)
    assert (trajectory.outcome.ending, trajectory.outcome.score, trajectory.turns) == ("max_tokens", 0.0, 0)
