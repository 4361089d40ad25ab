"""Plays the environments of OpenEnv servers: one WebSocket session per episode, without the openenv package.

    envs: [{name: openenv, options: {url: "http://127.0.0.1:8000", instruction: "Reach the goal."}}]

    GET /schema ──> tools: those that the server lists (MCP), or one tool `act` with the action's schema
    /ws: reset ──> what it shows follows the prompt        step ──> observation, reward, done

Rewards are the server's own word, of trust `reported`. A server that hangs, closes, floods, changes its tools or sends
what no protocol allows gives an InfraError with its name: the episode is repeated, and never scored while the server
itself is unwell. See docs/bridges.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import httpx
from pydantic import BaseModel, ConfigDict, Field

from agentrl.envs import Environment
from agentrl.envs.gym_adapter import wait
from agentrl.envs.schema_tools import SchemaTool, attach, foreign_tool
from agentrl.errors import AuthoringError, InfraError
from agentrl.hashing import short
from agentrl.interop.bridge import Bridge, checked
from agentrl.interop.reported import Reported, ScoreRule, finite
from agentrl.types import SPLITS, Done, Observation, Split, Task, ToolCall

BY_NAME = ("Action", "CallToolAction", "ListToolsAction")
"""Titles of action schemas whose server has tools with names."""
MAX_FRAME = 4 << 20
"""Bytes of the longest message that is read from a server."""
MAX_TOOLS = 128
FULL_S = 120.0
"""How long is waited for a server that takes no more sessions."""


class Full(InfraError):
    """A server that takes no more sessions at the moment."""


class Options(BaseModel):
    """The options of the environment `openenv`."""

    model_config = ConfigDict(extra="forbid")

    url: str
    """Where the server listens, such as http://127.0.0.1:8000."""
    instruction: str = ""
    """What the policy is told; what the server shows after a reset follows it."""
    score: ScoreRule = Field(default_factory=ScoreRule)
    """How the server's rewards become a score: `{of: last|sum|max, low: ..., high: ...}`."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the server's reset."""
    tasks: int = Field(default=1000, ge=1)
    """How many tasks each split has: each is a seed of its own."""
    turns: int = Field(default=16, ge=1)
    """The most turns of an episode."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How long is waited for an answer of the server."""
    final: str = ""
    """A tool that is called with the final message (its argument `text`), where the server has one."""
    expert: str = ""
    """A JSON file with a solution: a list of actions, or {task id: list}; an action is a text or {name, arguments}."""


class OpenEnv(Bridge):
    """Act in the environment of an OpenEnv server."""

    options: ClassVar[Options]
    peer: ClassVar[str] = ""
    tool_names: ClassVar[Mapping[str, str]] = {}
    """The server's name of each tool; empty for a server with one typed action."""
    pinned: ClassVar[str] = ""
    """Hash of the tools that the server announced when the class was made."""
    system = "Act with the tools, one step at a time."

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._wire: Any = None
        self._rewards: list[float] = []
        self._final = self.options.final

    @classmethod
    def made_from(cls, options: Mapping[str, Any]) -> type[Environment]:
        return _class(_checked(options))

    def task(self, split: Split, level: int, index: int) -> Task:
        seed = len(SPLITS) * index + SPLITS.index(split)  # a seed belongs to one split
        prompt = self.options.instruction or f"Task {seed}. Reach the goal of the environment."
        id = f"{self.name or 'openenv'}/{split}/{level}/{index}"
        return Task(id=id, split=split, level=level, prompt=prompt, setup={"seed": seed})

    def start(self) -> Observation:
        return wait(self._begun())  # all sessions share an event loop of their own: no server holds up the trainer's

    async def _begun(self) -> Observation:
        deadline = asyncio.get_running_loop().time() + FULL_S
        while True:
            self._wire = await _connected(self.options)
            try:
                if self.tool_names:
                    await _same_tools(self._wire, self.peer, self.pinned)
                answer = await self._wire.ask("reset", {"seed": self.given.setup["seed"], **self.options.reset})
                break
            except Full:  # the server takes no more sessions: wait until another episode has ended
                await self._wire.close()
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.2)
        finite(answer.get("reward"), self.peer)
        shown = _observation(answer, self.peer)
        named = shown.get("final_tool")
        self._final = self._final or (named if isinstance(named, str) else "")
        return Observation(content=text_of({k: v for k, v in shown.items() if k not in ("tools", "final_tool")}))

    def call(self, name: str, arguments: Mapping[str, Any]) -> str | Done:
        """Take one step on the server."""
        return wait(self._step(name, arguments))

    async def _step(self, name: str, arguments: Mapping[str, Any]) -> str | Done:
        data = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)} if name else dict(arguments)
        answer = await self._wire.ask("step", data)
        reward = finite(answer.get("reward"), self.peer)
        if reward is not None:
            self._rewards.append(reward)
        text = text_of(_observation(answer, self.peer))
        return Done(text) if answer.get("done") is True else text

    def on_message(self, text: str) -> Observation | Done:
        if self._final:
            self.call(self._final, {"text": text})
        return Done(text)

    def state(self) -> Mapping[str, Any]:
        return {"rewards": list(self._rewards)}

    def stop(self) -> None:
        if self._wire is not None:
            wait(self._wire.close())

    def expert(self, task: Task) -> Sequence[ToolCall | str]:
        if not self.options.expert:
            raise NotImplementedError(f"{self.peer} offers no solution; name one with the option `expert`")
        return solution(Path(self.options.expert), task)


def solution(path: Path, task: Task) -> list[ToolCall | str]:
    """Read a solution of a task from a JSON file."""
    try:
        content = json.loads(path.expanduser().read_text(encoding="utf-8"))
        actions: Any = content.get(task.id, content.get("*")) if isinstance(content, dict) else content
        return [
            a if isinstance(a, str) else ToolCall(name=a["name"], arguments=a.get("arguments", {})) for a in actions
        ]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise AuthoringError(
            f"{path} must hold a list of actions, or {{task id: list}}, each a text or {{name, arguments}}: {error}"
        ) from None


class Wire:
    """One session with a server. A server that does not keep to the protocol gives an InfraError that names it."""

    def __init__(self, socket: Any, peer: str, timeout_s: float) -> None:
        self._socket, self._peer, self._timeout_s = socket, peer, timeout_s

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send one message and return the data of the answer."""
        from websockets.exceptions import ConnectionClosed, WebSocketException

        message = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            async with asyncio.timeout(self._timeout_s):
                with suppress(ConnectionClosed):  # why it was closed may have been said already
                    await self._socket.send(json.dumps(message))
                raw = await self._socket.recv()
        except TimeoutError:
            raise InfraError(f"{self._peer} did not answer a {kind} within {self._timeout_s:g} s") from None
        except (WebSocketException, OSError) as error:
            raise InfraError(f"{self._peer} closed the session during a {kind}: {str(error)[:200]}") from None
        try:
            frame = json.loads(raw)
            content = frame["data"]
            if not isinstance(content, dict):
                raise ValueError("its data is no object")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise InfraError(f"{self._peer} answered a {kind} with what is no message: {str(error)[:200]}") from None
        if frame.get("type") == "error":
            code, text = str(content.get("code"))[:40], str(content.get("message"))[:300]
            kind_of_error = Full if code == "CAPACITY_REACHED" else InfraError
            raise kind_of_error(f"{self._peer} answered a {kind} with the error {code}: {text}")
        return content

    async def close(self) -> None:
        """End the session; a server that does not answer is not waited for."""
        try:
            async with asyncio.timeout(2.0):
                await self._socket.close()
        except Exception:
            self._socket.transport.abort()


async def _connected(options: Options) -> Wire:
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException

    address = "ws" + options.url.rstrip("/").removeprefix("http") + "/ws"
    try:
        async with asyncio.timeout(options.timeout_s):
            socket = await connect(address, max_size=MAX_FRAME, proxy=None, open_timeout=None, ping_interval=None)
    except (TimeoutError, OSError, WebSocketException) as error:
        what = str(error)[:200] or f"no answer within {options.timeout_s:g} s"
        raise InfraError(f"{_peer(options)} cannot be reached: {what}") from None
    return Wire(socket, _peer(options), options.timeout_s)


def _peer(options: Options) -> str:
    return f"the OpenEnv server {options.url}"


def _observation(answer: Mapping[str, Any], peer: str) -> dict[str, Any]:
    shown = answer.get("observation")
    if not isinstance(shown, dict):
        raise InfraError(f"{peer} sent an answer without an observation")
    return shown


def text_of(observation: Mapping[str, Any]) -> str:
    """Return what the policy is shown of an observation: its result alone where it has one."""
    kept = {k: v for k, v in observation.items() if k not in ("done", "reward", "metadata") and v not in (None, {}, "")}
    result = kept.get("result")
    if isinstance(result, dict) and "data" in result:  # as FastMCP wraps it
        result = result["data"]
    if isinstance(result, str) and not kept.get("error"):
        return result
    return json.dumps(kept if result is None or kept.get("error") else result, ensure_ascii=False, sort_keys=True)


async def _listed(wire: Wire, peer: str) -> list[dict[str, Any]]:
    """Return the tools that a server lists."""
    answer = await wire.ask("step", {"type": "list_tools"})
    finite(answer.get("reward"), peer)
    tools = _observation(answer, peer).get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InfraError(f"{peer} lists its tools as {type(tools).__name__}, not as objects")
    if not 0 < len(tools) <= MAX_TOOLS:
        raise InfraError(f"{peer} lists {len(tools)} tools; between 1 and {MAX_TOOLS} can be played")
    keys = ("name", "description", "input_schema")
    return [{key: tool.get(key, tool.get("inputSchema")) for key in keys} for tool in tools]


async def _same_tools(wire: Wire, peer: str, pinned: str) -> None:
    if short(await _listed(wire, peer)) != pinned:
        raise InfraError(f"{peer} announces other tools than when it was first looked at; start this run again")


def _checked(options: Mapping[str, Any]) -> Options:
    result = checked("openenv", Options, options)
    if not result.url.startswith(("http://", "https://")):
        raise AuthoringError(f"openenv: url must begin with http:// or https://, got {result.url!r}")
    return result


def _class(options: Options) -> type[OpenEnv]:
    """Look at a server, and make the environment class with its tools."""
    from agentrl import event_loop

    return event_loop.run(_looked_at(options))


async def _looked_at(options: Options) -> type[OpenEnv]:
    peer = _peer(options)
    action = await _action_schema(options)
    tools: list[tuple[str, Any, Any]]
    pinned = ""
    if action.get("title") in BY_NAME:
        wire = await _connected(options)
        try:
            listed = await _listed(wire, peer)
        finally:
            await wire.close()
        pinned = short(listed)
        tools = [(tool["name"], tool["description"] or "", tool["input_schema"] or {}) for tool in listed]
    else:
        kept = {k: v for k, v in action.items() if k in ("properties", "required", "$defs")}
        properties = kept.get("properties")
        if isinstance(properties, dict):
            kept["properties"] = {name: part for name, part in properties.items() if name != "metadata"}
        tools = [("act", str(action.get("description") or "Act."), {"type": "object", **kept})]
    body: dict[str, Any] = {
        "__doc__": f"Act in the environment of {peer}.",
        "__module__": __name__,
        "options": options,
        "peer": peer,
        "pinned": pinned,
        "max_turns": options.turns,
        "size": options.tasks,
        "verifier": Reported(peer, options.score, _alive(options, pinned)),
    }
    names: dict[str, str] = {}
    for name, description, schema in tools:
        offered = foreign_tool(name, description, schema, peer=peer, timeout_s=options.timeout_s + 5.0)
        own = f"{name}_" if hasattr(OpenEnv, name) else name  # a name that the SDK needs itself
        if own in names:
            raise AuthoringError(f"{peer} announces two tools called {name!r}")
        names[own] = name if pinned else ""
        renamed = SchemaTool(**{f: getattr(offered, f) for f in offered.__dataclass_fields__} | {"name": own})
        attach(body, renamed, _method(names[own]))
    body["tool_names"] = names if pinned else {}
    return type("OpenEnv", (OpenEnv,), body)


def _method(name: str) -> Any:
    def method(self: OpenEnv, **arguments: Any) -> str | Done:
        return self.call(name, arguments)

    return method


def _alive(options: Options, pinned: str) -> Any:
    """Return what looks whether the server works, with nothing of a policy's."""

    async def alive() -> None:
        wire = await _connected(options)
        try:
            if pinned:
                await _same_tools(wire, _peer(options), pinned)
            answer = await wire.ask("reset", {"seed": 0, **options.reset})
            finite(answer.get("reward"), _peer(options))
            _observation(answer, _peer(options))
        finally:
            await wire.close()

    return alive


async def _action_schema(options: Options) -> dict[str, Any]:
    peer = _peer(options)
    try:
        async with (
            asyncio.timeout(options.timeout_s),
            httpx.AsyncClient(trust_env=False, timeout=options.timeout_s) as client,
            client.stream("GET", f"{options.url.rstrip('/')}/schema") as response,
        ):
            response.raise_for_status()
            content = b""
            async for part in response.aiter_bytes():
                content += part
                if len(content) > MAX_FRAME:
                    raise AuthoringError(f"{peer} describes itself in more than {MAX_FRAME} bytes")
        action = json.loads(content)["action"]
        if not isinstance(action, dict):
            raise TypeError("no object")
        return action
    except (TimeoutError, httpx.HTTPError) as error:
        raise InfraError(f"{peer} cannot be reached: {type(error).__name__} {str(error)[:200]}") from None
    except (ValueError, LookupError, TypeError) as error:
        if isinstance(error, AuthoringError):
            raise
        raise AuthoringError(f"{peer} describes no action at /schema: {str(error)[:100]}") from None
