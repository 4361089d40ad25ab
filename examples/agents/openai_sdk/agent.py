"""A file agent written with the OpenAI SDK and nothing else: the prompt comes on standard input.

OPENAI_BASE_URL and OPENAI_API_KEY say where the model is, as for any other program that uses the SDK.
"""

import json
import os
import subprocess
import sys

from openai import OpenAI

SYSTEM = "Do the task with the shell, then say done."
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string", "description": "what to run"}}}
FUNCTION = {"name": "run", "description": "Run a shell command.", "parameters": {**PARAMETERS, "required": ["command"]}}


def run(command: str = "", **_: object) -> str:
    """Run a shell command and return what a person would see."""
    done = subprocess.run(["sh", "-c", str(command)], capture_output=True, text=True, timeout=60, errors="replace")
    return (done.stdout + done.stderr)[:4000]


client = OpenAI()
talk = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.stdin.read()}]
while True:
    said = (
        client.chat.completions.create(
            model=os.environ.get("AGENTRL_MODEL", "policy"),
            messages=talk,
            tools=[{"type": "function", "function": FUNCTION}],
        )
        .choices[0]
        .message
    )
    talk.append(said.model_dump(exclude_none=True))
    if not said.tool_calls:
        break
    for call in said.tool_calls:
        known = call.function.name == "run"
        result = run(**json.loads(call.function.arguments)) if known else "error: there is only the tool run"
        talk.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(said.content)
