"""`agentrl eval` with an agent program against a chat endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl import recipe as recipes
from agentrl import serving
from agentrl.eval import command as eval_command
from agentrl.evaluation import problems_of
from agentrl.interop.policies import paired
from agentrl.recipe import EvalSection
from agentrl.rollout import store
from agentrl.types import Message, ToolCall
from tests.chat_endpoint import expert, serve

AGENT = """
import json, os, subprocess, sys, urllib.request
def post(body):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "run", "description": "Run.", "parameters": parameters}}]
talk = [{"role": "user", "content": sys.argv[1]}]
while True:
    talk.append(post({"model": "x", "messages": talk, "tools": tools}))
    if not talk[-1].get("tool_calls"):
        break
    for call in talk[-1]["tool_calls"]:
        out = subprocess.run(json.loads(call["function"]["arguments"])["command"], shell=True, capture_output=True)
        talk.append({"role": "tool", "tool_call_id": call["id"], "content": out.stdout.decode()})
"""


def test_endpoints_get_results_of_unreadable_calls_as_a_users_words() -> None:
    """An endpoint refuses a result without its call, and the call came back as text."""
    said = Message(role="assistant", content="", tool_calls=(ToolCall(name="run", arguments={}, id="a"),))
    known = Message(role="tool", content="out", tool_call_id="a")
    orphan = Message(role="tool", content="error: unreadable", tool_call_id="b", name="run")
    told = Message(role="user", content="error: unreadable")
    assert paired([said, known, orphan]) == [said, known, told]


@pytest.mark.parametrize("solves", [True, False])
def test_an_agent_is_evaluated_on_any_endpoint(tmp_path: Path, solves: bool) -> None:
    """The agent runs in the sandbox as it does in training; the endpoint's model answers, at the recipe's budgets."""
    data: dict[str, Any] = {
        "run": {"name": "r", "out": str(tmp_path / "runs")},
        "model": {"type": "pretrained", "path": str(tmp_path / "no-such-model")},
        "envs": [{"name": "files", "levels": [1], "agent": {"command": ["python3", "-c", AGENT, "{prompt}"]}}],
        "rollout": {"max_tokens": 200, "concurrency": 2},
        "eval": {"tasks": 3},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(data))
    recipe = recipes.load(path)
    with serving.runtimes(recipe) as runtimes:
        problems = problems_of(recipe, EvalSection(tasks=3, levels=[1]), runtimes)
    with serve(expert(problems, lambda number: solves)) as server:
        report = eval_command.evaluate(f"m@{server.url}", on=str(path), say=lambda text: None)
        assert {body["model"] for body in server.seen} == {"m"}
        assert all(0 < body["max_tokens"] <= 200 for body in server.seen)
    figures = report["policies"][0]["environments"]["files"]
    assert (figures["tries"], figures["passed"], figures["ungraded"]) == (3, 3 if solves else 0, 0)
    tries = [stored.trajectory for stored in store.read(Path(report["folder"]) / "1")]
    turns = 2 if solves else 1
    assert [t.ledger["agent"]["turns"] for t in tries] == [turns] * 3
    assert [t.usage for t in tries] == [{"prompt": 100 * turns, "completion": 10 * turns}] * 3
    assert json.dumps(tries[0].messages[0].content) == json.dumps(tries[0].task.prompt)
