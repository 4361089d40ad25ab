"""The folders of examples/agents: every recipe loads, and the agents do what they are there for."""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import recipe as recipes
from agentrl.rollout.request import RolloutId

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "agents"


def test_every_example_has_a_recipe_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    names = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
    assert names == ["langgraph", "openai_agents", "openai_sdk", "shell", "smolagents"]
    for name in names:
        agent = recipes.load(FOLDER / name / "recipe.yaml").envs[0].agent
        assert agent is not None and agent.command is not None and agent.files is not None
        program = agent.command[1].replace("{files}", str(agent.files))
        assert Path(program).is_file()


def test_the_shell_script_is_an_agent(opened: Any, says_expert: Callable[[str], str]) -> None:
    """It calls, sees the result and answers, in one exact segment."""

    def says(prompt: str) -> str:
        return "done" if "tool_response" in prompt.rsplit("user", 1)[1] else says_expert(prompt)

    async def main() -> None:
        agent = {"command": ["sh", "{files}/agent.sh", "{prompt}"], "files": FOLDER / "shell"}
        async with opened(agent, says, answer="stdout") as stage:
            trajectory = await stage.play(2)
            assert (trajectory.outcome.ending, trajectory.outcome.score) == ("done", 1.0)
            assert trajectory.ledger["agent"]["output"] == "done"
            (segment,) = trajectory.segments
            assert segment.token_ids.tolist() == [*stage.engine.calls[1][0], *stage.engine.calls[1][2].token_ids]

    asyncio.run(main())


def test_the_agent_on_the_page_plays_as_the_built_in_loop_does(opened: Any, says_expert: Callable[[str], str]) -> None:
    page = (FOLDER.parents[1] / "docs" / "agents.md").read_text(encoding="utf-8")
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if '"/step"' in code]
    made: dict[str, Any] = {}
    model = "    model = openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)"
    head = f"import openai\nasync def agent(task, client, box):\n{model}\n"
    exec(head + textwrap.indent(block, "    "), made)

    async def main() -> None:
        async with opened(made["agent"], says_expert) as stage:
            task, rollout_id = stage.task(3), RolloutId(seed=1, group=4, index=2)
            theirs = await stage.player.play("word", task, rollout_id)
            ours = await stage.player.inner.play("word", task, rollout_id)
            assert (theirs.segments, theirs.outcome) == (ours.segments, ours.outcome)
            assert theirs.outcome.score == 1.0

    asyncio.run(main())
