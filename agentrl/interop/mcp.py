"""Tools from an MCP server that runs inside the sandbox, over stdin and stdout; no package of MCP is needed.

    Notes = with_server(NotesBase, ["python3", "server.py"])     # NotesBase: task, prepare, verifier

The server's tools are listed once, in a sandbox of their own, when the class is made: names, descriptions and schemas
are pinned, and a server that lists others later is an error. Server and agent share the sandbox, so nothing that the
server says may be graded: the verifier sees artifacts and the final message, as everywhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl import event_loop, sandboxes
from agentrl.envs import Environment
from agentrl.envs.schema_tools import SchemaTool, attach, foreign_tool
from agentrl.errors import AgentError, AuthoringError, SandboxError
from agentrl.hashing import short
from agentrl.sandboxes.pool import Pool
from agentrl.sandboxes.stdio import StdioProcess
from agentrl.types import Observation

PROTOCOL = "2025-06-18"
"""The protocol's version with a handshake, which every server speaks over a pipe."""
MAX_SKIPPED = 1_000
"""Notifications and log lines that may come before an answer."""
MAX_TOOLS = 128


class BoxedServer:
    """The client of a server in a sandbox: one JSON line out, one in."""

    def __init__(self, process: StdioProcess, timeout_s: float) -> None:
        self._process, self._timeout_s = process, timeout_s
        self._next = 0

    @classmethod
    async def start(cls, box: Any, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> BoxedServer:
        """Start the server and shake hands. What fails here happens before the agent has done anything."""
        try:
            server = cls(await StdioProcess.start(box, argv, env=env), timeout_s)
            about = {"name": "agentrl", "version": "1"}
            await server.ask("initialize", {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": about})
            await server._tell({"method": "notifications/initialized"})
            return server
        except AgentError as error:
            raise SandboxError(f"the MCP server `{' '.join(argv)}` does not start in its sandbox: {error}") from error

    async def _tell(self, message: Mapping[str, Any]) -> None:
        await self._process.write(json.dumps({"jsonrpc": "2.0", **message}).encode(), timeout=self._timeout_s)

    async def ask(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Ask one question and return the result. AgentError for a server that is gone or says what is no answer."""
        self._next += 1
        await self._tell({"method": method, "params": dict(params), "id": self._next})
        for _ in range(MAX_SKIPPED):
            line = await self._process.read(timeout=self._timeout_s)
            try:
                frame = json.loads(line)
            except (ValueError, RecursionError):
                raise AgentError(f"the MCP server in the sandbox wrote what is no JSON: {line[:100]!r}") from None
            if not isinstance(frame, dict) or frame.get("id") != self._next:
                continue
            if isinstance(frame.get("error"), dict):
                raise ValueError(str(frame["error"].get("message"))[:500])
            if isinstance(frame.get("result"), dict):
                result: dict[str, Any] = frame["result"]
                return result
            break
        raise AgentError(f"the MCP server in the sandbox did not answer {method}")

    async def tools(self) -> list[dict[str, Any]]:
        """Return what the server lists: names, descriptions and schemas."""
        listed = (await self.ask("tools/list", {})).get("tools")
        if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
            raise AgentError("the MCP server in the sandbox lists no tools")
        return [{key: tool.get(key) for key in ("name", "description", "inputSchema")} for tool in listed]

    async def close(self) -> None:
        await self._process.close()


def with_server(
    base: type[Environment],
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    sandbox: str = "namespace",
    timeout_s: float = 20.0,
    **options: Any,
) -> type[Environment]:
    """Return the environment with the tools of a server that runs in its sandbox.

    Args:
        base: an environment whose `prepare` returns the sandbox, with the server's files in it.
        argv: the command that starts the server.
        env: environment variables of the server.
        sandbox: the backend in which the tools are listed.
        timeout_s: how long is waited for an answer of the server.
        options: for the environment's constructor, where the tools are listed.
    """
    command, variables = list(argv), dict(env or {})
    peer = f"the MCP server `{' '.join(command)}`"
    listed = event_loop.run(_listed(base, command, variables, sandbox, timeout_s, options))
    if not 0 < len(listed) <= MAX_TOOLS:
        raise AuthoringError(f"{peer} lists {len(listed)} tools; between 1 and {MAX_TOOLS} can be played")
    pinned = short(listed)

    async def start(self: Any) -> Observation | None:
        self._mcp_server = await BoxedServer.start(self.box, command, env=variables, timeout_s=timeout_s)
        try:
            now = short(await self._mcp_server.tools())
        except (AgentError, ValueError) as error:
            raise SandboxError(f"{peer} does not list its tools: {error}") from error
        if now != pinned:
            raise SandboxError(f"{peer} lists other tools than when the environment was made")
        begun: Any = base.start(self)
        opening: Observation | None = await begun if hasattr(begun, "__await__") else begun
        return opening

    async def stop(self: Any) -> None:
        if getattr(self, "_mcp_server", None) is not None:
            await self._mcp_server.close()
        ended: Any = base.stop(self)
        if hasattr(ended, "__await__"):
            await ended

    body: dict[str, Any] = {"__doc__": base.__doc__, "__module__": base.__module__, "start": start, "stop": stop}
    for tool in listed:
        offered = foreign_tool(
            tool["name"], tool["description"] or "", tool["inputSchema"] or {}, peer=peer, timeout_s=timeout_s + 5.0
        )
        if offered.name in body or hasattr(base, offered.name):
            raise AuthoringError(f"{peer} announces a tool {offered.name!r}, a name that is taken; rename it")
        attach(body, offered, _method(offered))
    return type(base.__name__, (base,), body)


def _method(tool: SchemaTool) -> Any:
    async def method(self: Any, **arguments: Any) -> str:
        result = await self._mcp_server.ask("tools/call", {"name": tool.name, "arguments": arguments})
        content = result.get("content")
        parts = [str(part.get("text", "")) for part in content if isinstance(part, dict)] if content else []
        if result.get("isError"):
            raise ValueError("\n".join(parts))
        return "\n".join(parts)

    return method


async def _listed(
    base: type[Environment],
    argv: Sequence[str],
    env: Mapping[str, str],
    sandbox: str,
    timeout_s: float,
    options: Mapping[str, Any],
) -> list[dict[str, Any]]:
    environment = base(**options)
    task = environment.task(base.splits[0], base.levels[0], 0)
    spec = environment.prepare(task.public(), random.Random(0))
    if spec is None:
        raise AuthoringError(f"{base.__name__}.prepare() returns no SandboxSpec, in which the MCP server could run")
    pool = Pool(sandboxes.load(sandbox)(), limit=1)
    try:
        async with pool.box(spec) as box:
            server = await BoxedServer.start(box, argv, env=env, timeout_s=timeout_s)
            try:
                return await server.tools()
            finally:
                await server.close()
    finally:
        pool.close()
