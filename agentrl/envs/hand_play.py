"""`env play`: a person in the policy's seat."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from agentrl.envs.base import Environment
from agentrl.envs.episode import Episode
from agentrl.envs.play import Action, Played, Stage, Stop, play
from agentrl.envs.tools import Tool, tools_of
from agentrl.types import Task, ToolCall

Say = Callable[[str], None]
Ask = Callable[[str], str]
"""Puts a prompt and returns a line; raises EOFError at the end of input."""

HELP = "a line is your message; /TOOL ARGUMENT or /TOOL {json} calls a tool; /tools lists them; /quit gives up"


async def play_by_hand(
    environment: Environment, task: Task, where: Stage, *, seed: int, say: Say, ask: Ask, max_turns: int | None = None
) -> Played:
    """Play a task at a terminal, or from any other source of lines."""
    tools = tools_of(environment)
    shown = 0

    async def person(episode: Episode) -> Action | Stop:
        nonlocal shown
        for message in episode.transcript[shown:]:
            if message.role != "assistant":
                say(f"[{message.role}] {message.content}")
        shown = len(episode.transcript)
        while True:
            try:
                line = await _read(ask)
            except EOFError:
                return Stop()
            if line.strip() in ("/quit", "/q"):
                return Stop()
            if line.strip() in ("/tools", "/help"):
                say(HELP)
                for tool in tools.values():
                    say(usage(tool))
                continue
            try:
                return parse(line, tools)
            except ValueError as error:
                say(f"{error}; {HELP}")

    say(HELP)
    played = await play(environment, task, person, where, seed=seed, max_turns=max_turns)
    score = "not graded" if played.score is None else f"score {played.score:g}"
    say(f"[end] {played.outcome.ending}, {score}")
    for line in played.verdict.evidence if played.verdict else ():
        say(f"  {line}")
    return played


async def _read(ask: Ask) -> str:
    """Wait for a line in a thread that nobody waits for at the end: Ctrl-C at the prompt ends the program."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()

    def tell(answer: str | None, error: BaseException | None) -> None:
        if line.done():
            return
        if error is not None:
            line.set_exception(error)
        else:
            line.set_result(answer or "")

    def read() -> None:
        answer, trouble = None, None
        try:
            answer = ask("> ")
        except BaseException as error:
            trouble = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits for the line any more
            loop.call_soon_threadsafe(tell, answer, trouble)

    threading.Thread(target=read, name="agentrl-line", daemon=True).start()
    return await line


def parse(line: str, tools: Mapping[str, Tool]) -> Action:
    """A line as an action. A tool with one text argument takes the rest of the line as it is."""
    if not line.startswith("/"):
        return line
    name, _, rest = line[1:].partition(" ")
    if name not in tools:
        raise ValueError(f"there is no tool {name!r}")
    fields: dict[str, Any] = tools[name].schema()["function"]["parameters"].get("properties", {})
    rest = rest.strip()
    if not rest:
        return ToolCall(name=name)
    if rest.startswith("{"):
        try:
            arguments = json.loads(rest)
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            return ToolCall(name=name, arguments=arguments)
    only = next(iter(fields)) if len(fields) == 1 else None
    if only is None or fields[only].get("type") != "string":
        raise ValueError(f"{name} takes its arguments as JSON: {usage(tools[name])}")
    return ToolCall(name=name, arguments={only: rest})


def usage(tool: Tool) -> str:
    """A tool in one line."""
    fields = tool.schema()["function"]["parameters"].get("properties", {})
    words = ", ".join(f"{name}: {part.get('type', 'any')}" for name, part in fields.items())
    flag = " (irreversible)" if tool.irreversible else ""
    return f"/{tool.name} ({words}): {tool.description.splitlines()[0]}{flag}"
