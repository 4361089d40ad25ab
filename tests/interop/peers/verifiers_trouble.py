"""Plays a taskset that misbehaves, in verifiers' own environment; prints how each kind of trouble ended."""

import asyncio
import json
import os
import sys
import time

import agentrl_trouble

from agentrl import ToolCall, envs
from agentrl.envs.play import Played, stage
from agentrl.envs.stepped import SteppedEpisode
from agentrl.errors import InfraError
from agentrl.types import Message

KINDS = {
    "": "reward", "nan": "reward", "nan for one": "reward", "large": "reward", "raises": "reward", "waits": "reward",
    "blocks": "reward", "tool waits": "tool", "tool waits for one": "tool", "tool blocks": "tool",
    "tools change": "tool",
}  # fmt: skip


async def ended(trouble: str) -> list:
    """Play a tool call and the right answer; return the score, the grade, and what was wrong."""
    agentrl_trouble.Tools.made = 0
    where = "task" if KINDS[trouble] == "reward" else "tools"
    options = {"id": "agentrl-trouble", "config": {where: {"trouble": trouble}}, "timeout_s": 1.5}
    kind = envs.load("verifiers", options)
    (name,) = envs.tools_of(kind)
    calls = [ToolCall(name=name, arguments={"word": "word0"})]
    if trouble == "tool waits for one":
        async with stage("process", limit=2) as stage_:
            await finished(kind, stage_, calls, "word0")
        calls = [ToolCall(name=name, arguments={"word": "spell"})]
    async with stage("process", limit=2, grading_s=20.0) as stage_:
        return await finished(kind, stage_, calls, "word0 spell")


async def finished(kind, stage_, calls, words) -> list:
    episode = SteppedEpisode(kind, kind().task("train", 1, 0), stage_)
    try:
        await episode.start()
        shown = await episode.act(Message(role="assistant", content="", tool_calls=tuple(calls)))
        played = shown if isinstance(shown, Played) else await episode.settle(words)
        fault = played.outcome.fault.cause if played.outcome.fault else ""
        return [played.outcome.score, played.outcome.grade, played.outcome.alarm, fault]
    except InfraError as error:
        return [None, "raised", False, str(error)]
    finally:
        await episode.close()


began = time.monotonic()
results = {trouble: asyncio.run(ended(trouble)) for trouble in sys.argv[1:] or KINDS}
print(json.dumps({"results": results, "seconds": time.monotonic() - began}), flush=True)
os._exit(0)  # what hangs in threads of the taskset holds nothing else up
