"""The one episode core: training, `env check`, `env play` and the gymnasium face all run it.

start() ── messages ──> policy ── act(message) ── observations ──> policy ── ... ── finish() ── Submission
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from agentrl import seeds
from agentrl.envs.base import Environment
from agentrl.envs.tools import Tool, tools_of
from agentrl.errors import AgentRLError
from agentrl.sandboxes.base import off_loop
from agentrl.types import Done, Ending, Message, Observation, Task, ToolCall
from agentrl.verifiers.base import Boxes, Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What came of one assistant message."""

    observations: tuple[Observation, ...] = ()
    done: bool = False
    seconds: float = 0.0
    """Wall time the tools took."""
    info: Mapping[str, Any] = field(default_factory=dict)


class Episode:
    """One run of one task: owns the environment instance and its box from start to close."""

    def __init__(self, environment: Environment, task: Task, *, seed: int, boxes: Boxes) -> None:
        self.environment = environment
        self.task = task
        self.seed = seed
        self.tools: dict[str, Tool] = tools_of(environment)
        self.transcript: list[Message] = []
        self.answer = ""
        self.root = ""
        self._boxes = boxes
        self._stack = AsyncExitStack()

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, for the chat template."""
        return [tool.schema() for tool in self.tools.values()]

    async def start(self) -> tuple[Message, ...]:
        """Build the box and return the opening messages."""
        env = self.environment
        env.given = self.task.public()
        env.rng = seeds.generator(self.seed, "episode", self.task.id)
        spec = env.prepare(env.given, seeds.generator(self.seed, "prepare", self.task.id))
        if spec is not None:
            env._box = await self._stack.enter_async_context(self._boxes.box(spec))
            self.root = env._box.root
        await off_loop(env.start)
        self.transcript = [Message(role="system", content=env.system), Message(role="user", content=self.task.prompt)]
        return tuple(self.transcript)

    async def act(self, message: Message) -> Step:
        """Carry out one assistant message."""
        self.transcript.append(message)
        observations: list[Observation] = []
        done = False
        clock = asyncio.get_running_loop().time
        began = clock()
        if message.tool_calls:
            for call in message.tool_calls:
                result = await self._call(call)
                if isinstance(result, Done):
                    self.answer, done = result.answer, True
                    break
                observations.append(result)
        else:
            reply = await off_loop(self.environment.on_message, message.content)
            if isinstance(reply, Done):
                self.answer, done = reply.answer, True
            else:
                observations.append(reply)
        self.transcript.extend(o.message() for o in observations)
        return Step(observations=tuple(observations), done=done, seconds=clock() - began)

    async def _call(self, call: ToolCall) -> Observation | Done:
        def refuse(text: str) -> Observation:
            return Observation(content=f"error: {text}", name=call.name, call_id=call.id, error=True)

        if call.error is not None:
            return refuse(call.error)
        tool = self.tools.get(call.name)
        if tool is None:
            return refuse(f"there is no tool {call.name!r}; the tools are {', '.join(self.tools)}")
        try:
            arguments = tool.arguments.model_validate(dict(call.arguments))
        except ValidationError as error:
            first = error.errors()[0]
            return refuse(f"{call.name}: {'.'.join(map(str, first['loc']))}: {first['msg']}")
        values = {name: getattr(arguments, name) for name in type(arguments).model_fields}
        method = getattr(self.environment, call.name)
        try:
            result = await (method(**values) if inspect.iscoroutinefunction(method) else off_loop(method, **values))
        except AgentRLError:
            raise
        except Exception as error:
            return refuse(f"{call.name}: {error}")
        if tool.terminal or isinstance(result, Done):
            return result if isinstance(result, Done) else Done(str(result))
        text = str(result)
        cut = len(text) > tool.output_limit
        if cut:
            text = text[: tool.output_limit] + f"\n[cut at {tool.output_limit} characters]"
        return Observation(content=text, name=call.name, call_id=call.id, truncated=cut)

    async def finish(self, ending: Ending = "done") -> Submission:
        """End the agent's world and hand over what it declared."""
        env = self.environment
        artifacts = {}
        ledger: dict[str, Any] = {}
        if env._box is not None:
            await env._box.aio.kill_all()
            ledger = await off_loop(env._box.ledger)
            for artifact in env.verifier.artifacts:
                artifacts[artifact.path] = await env._box.aio.collect(
                    artifact.path, max_bytes=artifact.max_bytes, max_files=artifact.max_files
                )
        return Submission(
            task=self.task,
            artifacts=artifacts,
            answer=self.answer,
            transcript=tuple(self.transcript),
            ledger=ledger,
            ending=ending,
            state=await off_loop(env.state),
        )

    async def close(self) -> None:
        """Let go of the box and of what the environment took."""
        try:
            await off_loop(self.environment.stop)
        finally:
            await self._stack.aclose()
