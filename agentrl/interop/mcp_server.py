"""An episode's tools as an MCP server: one server, one episode, and no tool that grades.

    agentrl serve ENV --protocol mcp          # over stdin and stdout, for any MCP client

The prompt is the server's `instructions`. Grading stays on this side: when the client goes away the episode is cut off
and graded, and the score is printed to stderr. It needs the package mcp.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentrl import envs
from agentrl.envs.play import Played, message_of, stage
from agentrl.envs.stepped import SteppedEpisode
from agentrl.errors import UserError
from agentrl.types import Split, ToolCall

OVER = "the episode is over"


def server_of(playing: SteppedEpisode, prompt: str) -> Any:
    """Return an MCP server over the tools of a started episode. Parallel calls are made one after the other."""
    import mcp_types as types
    from mcp.server.lowlevel import Server

    lock = asyncio.Lock()

    async def list_tools(context: Any, params: Any) -> Any:
        parts = [schema["function"] for schema in playing.episode.schemas]
        return types.ListToolsResult(
            tools=[
                types.Tool(name=part["name"], description=part["description"], input_schema=part["parameters"])
                for part in parts
            ]
        )

    async def call_tool(context: Any, params: Any) -> Any:
        async with lock:
            if playing.played is not None:
                return reply(OVER, error=True)
            shown = await playing.act(message_of(ToolCall(name=params.name, arguments=params.arguments or {})))
        if isinstance(shown, Played):
            return reply(OVER)
        step = playing.episode.step
        wrong = bool(step and any(observation.error for observation in step.observations))
        return reply("\n".join(message.content for message in shown), error=wrong)

    def reply(text: str, *, error: bool = False) -> Any:
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=error)

    return Server("agentrl", instructions=prompt, on_list_tools=list_tools, on_call_tool=call_tool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which episode is served."""

    split: Split
    level: int | None
    """None: the easiest."""
    index: int
    seed: int


def serve(name: str, place: Place, *, sandbox: str, options: Mapping[str, Any]) -> int:
    """Serve one episode over stdin and stdout, then grade it."""
    from mcp.server.stdio import stdio_server

    chosen = dict(options)
    kind = envs.load(name, chosen)
    level = kind.levels[0] if place.level is None else place.level
    if place.split not in kind.splits or level not in kind.levels:
        raise UserError(
            f"{name} has the splits {', '.join(kind.splits)} and the levels {kind.levels[0]} to {kind.levels[-1]}"
        )

    async def main() -> None:
        task = kind(**chosen).task(place.split, level, place.index)
        async with stage(sandbox, limit=4) as where:
            playing = SteppedEpisode(partial(kind, **chosen), task, where, seed=place.seed)
            try:
                opening = await playing.start()
                server = server_of(playing, f"{opening[0].content}\n\n{opening[1].content}")
                async with stdio_server() as (read, write):
                    await server.run(read, write, server.create_initialization_options())
                played = await playing.settle()
                row = {"task": task.id, "score": played.score, "ending": played.outcome.ending}
                print(json.dumps(row), file=sys.stderr, flush=True)
            finally:
                await playing.close()

    asyncio.run(main())
    return 0
