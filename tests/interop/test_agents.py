"""Agents of somebody else's making are played, graded and trained on, token for token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from agentrl.rollout.rollout import RolloutId
from agentrl.types import Source, Task


async def loop(task: Task, client: Any, box: Any) -> str:
    """The simplest agent there is: ask, run the calls, ask again."""
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": "Use the tools."},
        {"role": "user", "content": task.prompt},
    ]
    while True:
        said = await client.chat(talk, tools=list(client.tools))
        talk.append(said)
        if not said.get("tool_calls"):
            return str(said["content"])
        for call in said["tool_calls"]:
            result = await client.call(call["function"]["name"], json.loads(call["function"]["arguments"]))
            talk.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def test_an_agent_gives_one_exact_segment(opened: Any, says_expert: Callable[[str], str]) -> None:
    """The trajectory holds what the engine saw and said, token for token, though its spelling is no tokenizer's."""

    async def main() -> None:
        async with opened(loop, says_expert) as stage:
            trajectory = await stage.play()
            assert (trajectory.outcome.ending, trajectory.outcome.score) == ("done", 1.0)
            (segment,) = trajectory.segments
            (first, _, said), (second, _, answer) = stage.engine.calls
            assert segment.token_ids.tolist() == [*second, *answer.token_ids]
            assert second[: len(first) + len(said.token_ids)] == (*first, *said.token_ids)
            bridge = len(second) - len(first) - len(said.token_ids)
            mask = [0] * len(first) + [1] * len(said.token_ids) + [0] * bridge + [1] * len(answer.token_ids)
            assert segment.loss_mask.astype(int).tolist() == mask
            assert segment.logprobs[segment.loss_mask].tolist() == [*said.logprobs, *answer.logprobs]
            assert set(segment.versions[segment.loss_mask].tolist()) == {7}
            assert {Source.TEMPLATE, Source.OBSERVATION, Source.SAMPLED} == set(segment.sources.tolist())
            again = stage.engine.renderer.encoder.encode(stage.engine.renderer.decode(second))
            assert again != list(second)  # to tokenise history again would have changed it
            assert [m.role for m in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant"]

    asyncio.run(main())


def test_an_agent_that_does_as_the_built_in_loop_does_gives_the_same_tokens(
    opened: Any, says_expert: Callable[[str], str]
) -> None:
    async def main() -> None:
        async with opened(loop, says_expert) as stage:
            task = stage.task(3)
            rollout_id = RolloutId(seed=1, group=4, index=2)
            ours = await stage.player.inner.play("word", task, rollout_id)
            theirs = await stage.player.play("word", task, rollout_id)
            assert ours.segments == theirs.segments
            assert [sampling.seed for _, sampling, _ in stage.engine.calls[:2]] == [
                sampling.seed for _, sampling, _ in stage.engine.calls[2:]
            ]
            assert (ours.outcome, ours.messages[:4]) == (theirs.outcome, theirs.messages[:4])

    asyncio.run(main())
