"""A file agent written with the OpenAI Agents SDK; the prompt comes on standard input."""

import os
import subprocess
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def run(command: str) -> str:
    """Run a shell command.

    Args:
        command: what to run
    """
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, errors="replace")
    return (done.stdout + done.stderr)[:4000]


set_tracing_disabled(True)
model = OpenAIChatCompletionsModel(
    model=os.environ.get("AGENTRL_MODEL", "policy"), openai_client=AsyncOpenAI(timeout=600)
)
agent = Agent(name="files", instructions="Do the task with the shell, then say done.", model=model, tools=[run])
print(Runner.run_sync(agent, sys.stdin.read(), max_turns=20).final_output)
