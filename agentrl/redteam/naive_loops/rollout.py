"""An ordinary rollout loop: it tokenises the conversation again for each turn, parses calls with a regular expression
and `json.loads`, runs tools in one small pool of threads, and drops a sample in which anything went wrong."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from agentrl.engines.base import Sampling
from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.tools import tools_of
from agentrl.redteam.loops import Policy, Stand
from agentrl.types import Done, Message, Task
from agentrl.verifiers.base import Context, Submission

POOL = ThreadPoolExecutor(2, thread_name_prefix="naive-tools")
CONTEXT, TURNS, ATTEMPTS = 400_000, 16, 3
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
BOXED = re.compile(r"\\boxed\{(([^{}]+|\{[^{}]*\})*)\}")
FORMAT = re.compile(r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", re.DOTALL | re.MULTILINE)


async def rollout(
    policy: Policy, stand: Stand, task: Task, secret: bytes, name: str, episode: Episode | None = None
) -> float | None:
    """Play one episode and return its score; None when it failed: such samples are skipped."""
    for _ in range(ATTEMPTS):
        try:
            return await _attempt(policy, stand, task, secret, name, episode)
        except Exception:  # broken samples must not stop the run
            continue
    return None


async def _attempt(
    policy: Policy, stand: Stand, task: Task, secret: bytes, name: str, shared: Episode | None
) -> float | None:
    runtime = stand.runtime
    episode = shared or Episode(runtime.make(), task, seed=0, boxes=runtime.boxes)
    try:
        if not episode.transcript:
            await episode.start()
        env = episode.environment
        messages = [{"role": m.role, "content": m.content} for m in episode.transcript[:2]]
        answer = await _turns(policy, stand, env, messages, episode.schemas, name)
        if answer is None:
            return None  # too long: overlong samples are filtered out
        submission = await _submission(env, task, answer, messages)
    finally:
        if shared is None:
            await episode.close()
    context = Context(secret=secret, boxes=runtime.boxes, judge=runtime.judge)
    return (await env.verifier.verify(submission, context)).score


async def _turns(
    policy: Policy, stand: Stand, env: Environment, messages: list[dict[str, Any]], tools: Sequence[Any], name: str
) -> str | None:
    """Play turn by turn; return the final answer, None when there was no room for one."""
    tokenizer = stand.renderer.tokenizer
    seen: list[int] = []
    for turn in range(TURNS):
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        if ids[: len(seen)] != seen:
            raise ValueError("the tokens before this turn changed: its loss mask would be wrong")
        if len(ids) > CONTEXT:
            return None
        reply = await policy.generate(ids, Sampling(max_tokens=CONTEXT - len(ids)), request_id=f"{name}-{turn}-0")
        if reply.finish == "length":
            return None
        seen = [*ids, *reply.token_ids]
        said = stand.renderer.decode([i for i in reply.token_ids if i != stand.renderer.end_of_turn])
        FORMAT.search(said)  # a bonus for the right format, and the answer as the log shows it
        BOXED.search(said)
        calls = calls_of(said)
        messages.append({"role": "assistant", "content": said})
        if not calls:
            done = env.on_message(said)
            done = await done if inspect.isawaitable(done) else done
            if isinstance(done, Done):
                return done.answer
            messages.append({"role": "user", "content": done.content})
        for call in calls:
            result = await _call(env, call)
            if isinstance(result, Done) or tools_of(env)[call["name"]].terminal:
                return result.answer if isinstance(result, Done) else str(result)
            messages.append({"role": "tool", "content": str(result), "tool_call_id": call.get("id", "call00000")})
    return None


async def _submission(env: Environment, task: Task, answer: str, messages: list[dict[str, Any]]) -> Submission:
    """Collect what is graded, while whatever the policy started still runs."""
    artifacts: dict[str, Any] = {}
    for artifact in env.verifier.artifacts if env._box is not None else ():
        try:
            artifacts[artifact.path] = await env.box.aio.collect(artifact.path, max_files=artifact.max_files)
        except (FileNotFoundError, NotADirectoryError):
            artifacts[artifact.path] = {}
    state: Any = env.state()
    return Submission(
        task=task,
        artifacts=artifacts,
        answer=answer,
        transcript=tuple(Message(role=m["role"], content=m["content"]) for m in messages),
        state=await state if inspect.isawaitable(state) else state,
    )


def calls_of(said: str) -> list[dict[str, Any]]:
    """Read the calls of a turn, in either format."""
    if "[TOOL_CALLS]" in said:
        return list(json.loads(said.split("[TOOL_CALLS]")[1]))
    return [json.loads(block) for block in CALL.findall(said)]


async def _call(env: Environment, call: dict[str, Any]) -> Any:
    method = getattr(env, call["name"])
    if inspect.iscoroutinefunction(method):
        return await method(**call["arguments"])
    return await asyncio.get_running_loop().run_in_executor(POOL, partial(method, **call["arguments"]))
