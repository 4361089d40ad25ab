"""A file agent written with smolagents; the prompt comes on standard input.

smolagents writes calls and results of its history as text, so every turn is a conversation of its own to the policy.
The rule `lineage`, which is the default, trains on all of them.
"""

import os
import subprocess
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def run(command: str) -> str:
    """Run a shell command.

    Args:
        command: what to run
    """
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, errors="replace")
    return (done.stdout + done.stderr)[:4000]


model = OpenAIServerModel(
    os.environ.get("AGENTRL_MODEL", "policy"),
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = ToolCallingAgent(tools=[run], model=model, max_steps=6, verbosity_level=0)
print(agent.run(sys.stdin.read()))
