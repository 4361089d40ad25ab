"""An agent written with the OpenAI SDK and nothing of agentrl's, for `benchmarks.agent_learning`.

The endpoint tells the environment's own messages and tools at `/tools`, and carries a turn out at `/step`. It runs as a
program in a sandbox (`python _openai_agent.py`) and as a coroutine function on this machine.
"""

import asyncio
import os
from typing import Any

from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient


async def solve(model: AsyncOpenAI) -> None:
    """Ask for turns and have them carried out until the environment says that it is over."""
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
        said = answer.choices[0].message.model_dump(exclude_none=True)
        step: Any = await model.post("/step", cast_to=object, body={"message": said})
        if step["done"]:
            return
        talk += [said, *step["messages"]]


async def agent(task: Any, client: Any, box: Any) -> None:
    """Run on this machine, as `function: benchmarks/_openai_agent.py:agent`."""
    # Reading the certificates, which nobody needs here, would cost 60 ms per episode.
    plain = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, http_client=plain) as model:
        await solve(model)


if __name__ == "__main__":
    asyncio.run(solve(AsyncOpenAI(http_client=DefaultAsyncHttpxClient(verify=False))))
