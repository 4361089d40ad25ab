"""MCP in both directions: an episode's tools for the SDK's own client, and a server inside a sandbox as tools."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from typing import Any

import pytest

from agentrl import envs
from agentrl.envs import Environment
from agentrl.envs.play import Played, play, stage
from agentrl.errors import AgentRLError, SandboxError
from agentrl.interop import mcp
from agentrl.sandboxes.base import SandboxSpec
from agentrl.types import Split, Task, ToolCall, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier
from tests.interop.peer_processes import FOLDER, ROOT, interpreter


def test_the_sdks_own_client_plays_an_episode() -> None:
    """The prompt is the server's instructions; the expert's calls solve the task; a bad call is an error; no tool
    grades, and the score is printed once the client has gone."""
    kind = envs.load("files")
    task = kind().task("train", 1, 2)
    calls = [(a.name, dict(a.arguments)) for a in kind().expert(task) if not isinstance(a, str)]
    command = [str(interpreter("mcp")), str(FOLDER / "mcp_client.py"), json.dumps([*calls, ("run", {"comand": "ls"})])]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stderr[-2000:]
    seen = json.loads(result.stdout)
    assert seen["instructions"] == f"{kind.system}\n\n{task.prompt}"
    assert seen["tools"] == ["run"]
    assert [error for _, error in seen["results"]] == [False] * len(calls) + [True]
    score = json.loads(next(line for line in result.stderr.splitlines() if line.startswith('{"task"')))
    assert score == {"task": task.id, "score": 1.0, "ending": "max_turns"}


# A server inside the sandbox --------------------------------------------------------------------------------------

SERVER = """
import json, os, sys
TOOLS = [{"name": "note", "description": "Write a note.", "inputSchema": {"type": "object",
    "properties": {"text": {"type": "string"}}, "required": ["text"]}}]
notes = []
for line in sys.stdin:
    ask = json.loads(line)
    if "id" not in ask:
        continue
    print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}), flush=True)
    if ask["method"] == "tools/list":
        result = {"tools": TOOLS}
    elif ask["method"] == "tools/call":
        text = ask["params"]["arguments"]["text"]
        BEHAVIOUR
        notes.append(text)
        open("notes.txt", "w").write("\\n".join(notes))
        result = {"content": [{"type": "text", "text": f"{len(notes)} notes"}]}
    else:
        result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "notes", "version": "1"}}
    print(json.dumps({"jsonrpc": "2.0", "id": ask["id"], "result": result}), flush=True)
"""


class Wrote(Verifier):
    """1 when notes.txt holds the word: what the server says counts for nothing."""

    artifacts = (Artifact(path="notes.txt"),)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        files = submission.artifacts["notes.txt"]
        return Verdict(score=float("" in files and files[""].content == b"hello\nworld"))


def base(behaviour: str = "pass", server: str = SERVER) -> type[Environment]:
    class Notes(Environment):
        """Write notes."""

        verifier = Wrote()

        def task(self, split: Split, level: int, index: int) -> Task:
            return Task(id=f"notes/{split}/{level}/{index}", split=split, level=level, prompt="Note hello, then world.")

        def prepare(self, task: Task, rng: random.Random) -> SandboxSpec:
            return SandboxSpec(files={"server.py": server.replace("BEHAVIOUR", behaviour)})

    return Notes


def played(kind: type[Environment], *texts: Any) -> Played:
    async def main() -> Played:
        async with stage("namespace", limit=2) as where:
            calls = [ToolCall(name="note", arguments={"text": text}) for text in texts]
            return await play(kind(), kind().task("train", 1, 0), [*calls, "done"], where)

    return asyncio.run(main())


def test_a_server_in_the_sandbox_gives_the_tools() -> None:
    """Its schema is the tool's; state lasts over calls; calls that do not fit never reach it."""
    kind = mcp.with_server(base(), ["python3", "server.py"])
    (tool,) = envs.tools_of(kind).values()
    assert (tool.name, tool.description, list(tool.schema()["function"]["parameters"]["properties"])) == (
        "note", "Write a note.", ["text"],
    )  # fmt: skip
    seen = played(kind, "hello", 7, "world")
    assert seen.score == 1.0
    assert [m.content for m in seen.messages if m.role == "tool"] == [
        "<out>1 notes</out>", "error: note: text: 7 is not of type 'string'", "<out>2 notes</out>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("behaviour", "score", "message"),
    [
        ("os._exit(1)", 0.0, "has ended"),
        ("print('no json', flush=True)", 0.0, "no JSON"),
        ("sys.stdout.write('x' * (8 << 20))", 0.0, "a line of more than"),
        ("raise SystemExit(text)", 0.0, "has ended"),
    ],
)
def test_a_server_that_breaks_after_the_start_breaks_the_agents_sandbox(
    behaviour: str, score: float, message: str
) -> None:
    """Server and agent share the sandbox: what happens in it is the agent's doing, graded 0."""
    seen = played(mcp.with_server(base(behaviour), ["python3", "server.py"]), "hello", "world")
    assert (seen.score, seen.outcome.ending) == (score, "agent_error")
    assert seen.outcome.fault is not None and message in seen.outcome.fault.cause


def test_a_server_that_hangs_is_not_waited_for() -> None:
    kind = mcp.with_server(base("import time; time.sleep(60)"), ["python3", "server.py"], timeout_s=3.0)
    assert played(kind, "hello").outcome.ending == "agent_error"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("TOOLS = [{", "TOOLS = [] and [{"), "lists 0 tools"),
        (('"name": "note"', '"name": "box"'), "announces a tool 'box', a name that is taken"),
        (('"type": "string"', '"type": "nonsense"'), "is no JSON schema"),
        (("import json", "raise SystemExit('broken')\nimport json"), "does not start in its sandbox.*broken"),
    ],
)
def test_a_server_that_cannot_be_used_is_named(change: tuple[str, str], message: str) -> None:
    with pytest.raises(AgentRLError, match=f"the MCP server `python3 server.py`.*{message}"):
        mcp.with_server(base(server=SERVER.replace(*change)), ["python3", "server.py"])


def test_tools_are_pinned() -> None:
    """A server that lists other tools in an episode than when the class was made is infrastructure trouble."""
    counting = SERVER.replace("notes = []", "notes = []\nTOOLS[0]['description'] += str(random.random())")
    kind = mcp.with_server(
        base(server=counting.replace("import json", "import random, json")), ["python3", "server.py"]
    )
    with pytest.raises(SandboxError, match="lists other tools than when the environment was made"):
        played(kind, "hello")
