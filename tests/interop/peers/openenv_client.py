"""Plays a served environment with openenv's own clients: python openenv_client.py URL SCRIPTS; prints what came."""

import asyncio
import json
import sys

import httpx
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient

URL, SCRIPTS = sys.argv[1], json.loads(sys.argv[2])


async def play(place, script):
    async with MCPToolClient(base_url=URL) as env:
        await env.reset(seed=0, **place)
        tools = [tool.name for tool in await env.list_tools()]
        rewards = []
        for name, arguments in script:
            result = await env.step(CallToolAction(tool_name=name, arguments=arguments))
            rewards.append((result.reward, result.done))
        try:
            await env.step(CallToolAction(tool_name="message", arguments={"text": "again"}))
            rewards.append("more")
        except Exception as error:
            rewards.append(str(error)[:200])
        return tools, rewards


async def main():
    together = await asyncio.gather(*(play(place, script) for place, script in SCRIPTS))
    async with GenericEnvClient(base_url=URL) as env:
        opening = (await env.reset(split="train", index=0)).observation
        wrong = (await env.step({"type": "call_tool", "tool_name": "nosuch", "arguments": {}})).observation
    ask = lambda method, **params: {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}  # noqa: E731
    async with httpx.AsyncClient(base_url=URL, timeout=30) as http:
        listed = (await http.post("/mcp", json=ask("tools/list"))).json()["result"]["tools"]
        session = (await http.post("/mcp", json=ask("openenv/session/create"))).json()["result"]["session_id"]
        call = ask("tools/call", name="run", arguments={"command": "ls"}, session_id=session)
        called = (await http.post("/mcp", json=call)).json()
        await http.post("/mcp", json=ask("openenv/session/close", session_id=session))
    print(json.dumps({"together": together, "opening": opening, "wrong": wrong, "listed": listed, "called": called}))


asyncio.run(main())
