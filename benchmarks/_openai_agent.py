"""An agent written with the OpenAI SDK and nothing of agentrl's, for `benchmarks.agent_learning`.

It begins with the environment's own messages and uses its tools, both of which the endpoint tells at `/tools`. It runs
as a program in a sandbox (`python _openai_agent.py`) and as a coroutine function on this machine.
"""

import asyncio
import json
import os
from typing import Any

from openai import APIStatusError, AsyncOpenAI


async def solve(model: AsyncOpenAI) -> None:
    """Ask for turns and carry out their calls until the policy says something else."""
    opening: Any = await model.get("/tools", cast_to=object)
    talk: list[Any] = list(opening["messages"])
    while True:
        try:
            answer = await model.chat.completions.create(
                model=os.environ.get("AGENTRL_MODEL", "policy"), messages=talk, tools=opening["tools"]
            )
        except APIStatusError as error:
            if error.status_code in (400, 403):  # the conversation is too long, or the turns are used up
                return
            raise
        said = answer.choices[0].message
        talk.append(said.model_dump(exclude_none=True))
        if not said.tool_calls or answer.choices[0].finish_reason == "length":
            return
        for call in said.tool_calls:
            wish = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
            result: Any = await model.post("/tools", cast_to=object, body=wish)
            talk.append({"role": "tool", "tool_call_id": call.id, "content": result["content"]})


async def agent(task: Any, client: Any, box: Any) -> None:
    """Run on this machine, as `function: benchmarks/_openai_agent.py:agent`."""
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as model:
        await solve(model)


if __name__ == "__main__":
    asyncio.run(solve(AsyncOpenAI(max_retries=0)))
