"""Plays `agentrl serve files --protocol mcp` with the MCP SDK's own client over stdio; prints what came."""

import asyncio
import json
import sys

from mcp import Client, StdioServerParameters

CALLS = json.loads(sys.argv[1])


async def main():
    arguments = ["-m", "agentrl", "serve", "files", "--protocol", "mcp", "--levels", "1", "--index", "2"]
    async with Client(StdioServerParameters(command=sys.executable, args=arguments)) as client:
        tools = [tool.name for tool in (await client.list_tools()).tools]
        results = []
        for name, call in CALLS:
            result = await client.call_tool(name, call)
            results.append([result.content[0].text, bool(result.is_error)])
        print(json.dumps({"instructions": client.instructions, "tools": tools, "results": results}))


asyncio.run(main())
