"""`agentrl serve ENV`: any environment behind OpenEnv's protocol, many sessions at once.

    client ── WebSocket /ws: reset(split, level, index, seed) ──> SteppedEpisode.start    one session = one episode
           ── call_tool(name, arguments) ───────────────────────> SteppedEpisode.act      reward only at the end
           ── call_tool("message", {text}) ─────────────────────> the final message

It is imported only where the openenv package is, by `serve`. OpenEnv has no final message, so the tool `message`, which
is not listed, stands for it. What could not be graded is an EXECUTION_ERROR, never a reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment as OpenEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation, ListToolsAction, ListToolsObservation
from openenv.core.env_server.mcp_types import Tool as OpenTool
from openenv.core.env_server.types import Observation, State

from agentrl import envs, sandboxes
from agentrl.envs import Environment
from agentrl.envs.play import Played, Stage, message_of
from agentrl.envs.stepped import SteppedEpisode
from agentrl.envs.tools import tools_of
from agentrl.errors import InfraError, UserError
from agentrl.sandboxes.pool import Pool
from agentrl.types import Message, ToolCall

FINAL = "message"
"""The tool that stands for a final message."""


class Opening(Observation):  # type: ignore[misc]
    """What `reset` gives: the conversation so far, the tools, and the tool for the final message."""

    system: str
    prompt: str
    task_id: str
    tools: list[dict[str, Any]]
    final_tool: str = FINAL


class Session(OpenEnvironment):  # type: ignore[misc]
    """One client's episodes, one after another."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, kind: type[Environment], options: Mapping[str, Any], stage: Stage) -> None:
        super().__init__()
        self.kind, self.options, self.stage = kind, options, stage
        self._playing: SteppedEpisode | None = None
        self._turn = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str | None = None,
        level: int | None = None,
        index: int = 0,
        **_: Any,
    ) -> Any:
        """Start an episode: split, level and index choose the task, the seed its sandbox."""
        await self._end()
        self._loop, self._turn = asyncio.get_running_loop(), 0
        where = split or self.kind.splits[0]
        if where not in self.kind.splits or (level is not None and level not in self.kind.levels):
            raise ValueError(
                f"splits: {', '.join(self.kind.splits)}; levels: {self.kind.levels[0]} to {self.kind.levels[-1]}"
            )
        environment = self.kind(**self.options)
        task = environment.task(where, self.kind.levels[0] if level is None else level, int(index))
        playing = SteppedEpisode(partial(self.kind, **self.options), task, self.stage, seed=seed or 0)
        opening = await playing.start()
        self._playing = playing
        return Opening(
            system=opening[0].content,
            prompt=opening[1].content,
            task_id=task.id,
            tools=[schema["function"] for schema in playing.episode.schemas],
        )

    async def step_async(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        """Call a tool, or give the final message."""
        if isinstance(action, ListToolsAction):
            parts = [tool.schema()["function"] for tool in tools_of(self.kind).values()]
            tools = [
                OpenTool(name=p["name"], description=p["description"], input_schema=p["parameters"]) for p in parts
            ]
            return ListToolsObservation(tools=tools)
        if self._playing is None:  # MCP knows no reset: the first call begins the first task
            await self.reset_async()
        assert self._playing is not None
        if self._playing.played is not None:
            raise RuntimeError("the episode is over; call reset for another")
        self._turn += 1
        shown = await self._playing.act(_message(action.tool_name, action.arguments))
        if not isinstance(shown, Played):
            text = "\n".join(message.content for message in shown)
            return CallToolObservation(tool_name=action.tool_name, result=text, done=False)
        if shown.score is None:
            cause = shown.outcome.fault.cause if shown.outcome.fault else "no cause given"
            raise InfraError(f"the episode could not be graded: {cause}")
        step = self._playing.episode.step
        text = "\n".join(o.content for o in step.observations) if step else ""
        return CallToolObservation(
            tool_name=action.tool_name,
            result=text,
            done=True,
            reward=shown.score,
            metadata={"ending": shown.outcome.ending, "trust": shown.verdict.trust if shown.verdict else ""},
        )

    async def _end(self) -> None:
        playing, self._playing = self._playing, None
        if playing is not None:
            await playing.close()

    def reset(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError("sessions are asynchronous")

    step = reset

    @property
    def state(self) -> Any:
        return State(episode_id=self._playing.task.id if self._playing else None, step_count=self._turn)

    def close(self) -> None:  # called in a thread of the session's own, while the event loop waits for it
        if self._loop is not None and self._playing is not None:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)

    def list_splits(self) -> list[str]:
        return list(self.kind.splits)

    def num_tasks(self, split: str) -> int:
        environment: Any = self.kind(**self.options)
        sizes = [environment.size_of(split, level) for level in self.kind.levels]
        return sum(1_000_000 if size is None else int(size) for size in sizes)

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        level, at = self.kind.levels[index % len(self.kind.levels)], index // len(self.kind.levels)
        task = self.kind(**self.options).task(split, level, at)  # type: ignore[arg-type]
        return {"id": task.id, "split": split, "level": level, "index": at, "prompt": task.prompt}


def application(
    name: str, *, sandbox: str = "namespace", options: Mapping[str, Any] | None = None, sessions: int = 64
) -> Any:
    """Return the web application that serves an environment."""
    chosen = dict(options or {})
    kind = envs.load(name, chosen)
    if FINAL in tools_of(kind):
        raise UserError(f"{name} has a tool {FINAL!r}, which OpenEnv clients need for the final message; rename it")
    boxes = Pool(sandboxes.load(sandbox)(), limit=sessions + 1)  # a grading may need two
    session = partial(Session, kind, chosen, Stage(boxes=boxes))
    app = create_fastapi_app(
        session,
        CallToolAction,
        CallToolObservation,
        sessions,
        env_name=kind.name,
        reset_observation_cls=Opening,
    )
    app.router.on_shutdown.append(boxes.close)
    return app


def _message(tool: str, arguments: Mapping[str, Any]) -> Message:
    if tool == FINAL:
        return Message(role="assistant", content=str(arguments.get("text", "")))
    return message_of(ToolCall(name=tool, arguments=arguments))


def serve(name: str, *, host: str, port: int, sandbox: str, options: Mapping[str, Any], sessions: int) -> int:
    """Serve an environment until Ctrl-C."""
    app = application(name, sandbox=sandbox, options=options, sessions=sessions)
    print(f"serving {name} at http://{host}:{port} (WebSocket /ws, MCP /mcp); stop with Ctrl-C", flush=True)
    uvicorn.run(app, host=host, port=port, log_level="warning", ws_max_size=16 << 20)
    return 0
