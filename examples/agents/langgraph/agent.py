"""A file agent written with LangGraph; the prompt comes on standard input."""

import os
import subprocess
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def run(command: str) -> str:
    """Run a shell command."""
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, errors="replace")
    return (done.stdout + done.stderr)[:4000]


model = ChatOpenAI(model=os.environ.get("AGENTRL_MODEL", "policy"), timeout=600)
agent = create_agent(model, tools=[run], system_prompt="Do the task with the shell, then say done.")
state = agent.invoke({"messages": [("user", sys.stdin.read())]})
print(state["messages"][-1].content)
