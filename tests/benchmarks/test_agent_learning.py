"""The comparison of an agent with the built-in loop: what sets the arms apart, and what the page tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl import recipe as recipes
from benchmarks import agent_learning


def point(step: int, tokens: int, value: float) -> dict[str, Any]:
    score = {"value": value, "low": value - 0.1, "high": value + 0.1}
    return {"stage": "rl", "step": step, "tokens": tokens, "pass@1": score}


RESULTS = {
    "about": "A machine.",
    "runs": [
        {"name": "built-in-0", "points": [point(0, 0, 0.2), point(5, 1200, 0.6)]},
        {"name": "function-0", "points": [point(0, 0, 0.2)]},
    ],
    "compared": [
        {
            "runs": ["built-in-0", "function-0"],
            "tasks": 9,
            "prompts_that_differ": 0,
            "episodes": 80,
            "equal_to_the_bit": 70,
            "equal_before_the_first_difference": 60,
        }
    ],
}
LINES = [
    "| seed | step | built-in: tokens | pass@1 | function: tokens | pass@1 |",
    "|---|---|---|---|---|---|",
    "| 0 | 0 | 0 | 0.200 (0.100 to 0.300) | 0 | 0.200 (0.100 to 0.300) |",
    "| 0 | 5 | 1,200 | 0.600 (0.500 to 0.700) | – | – |",
    "",
    "built-in-0 and function-0: 0 of 9 prompts differ; 70 of 80 episodes are equal to the bit, the first 60 without "
    "exception.",
]


def test_arms_differ_by_the_agent_alone(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/usr/bin/python3")
    loaded = {
        arm: recipes.load(agent_learning.RECIPE, agent_learning.settings(f"{arm}-3", [], tmp_path)).model_dump()
        for arm in agent_learning.ARMS
    }
    agents = {arm: data["envs"][0].pop("agent") for arm, data in loaded.items()}
    assert loaded["function"] == loaded["program"] == loaded["built-in"]
    assert loaded["built-in"]["run"]["seed"] == 3
    assert (agents["built-in"], agents["function"]["function"]) == (None, f"{agent_learning.AGENT}:agent")
    assert agents["program"]["command"] == ["python", "{files}/_openai_agent.py"]
    assert (agents["program"]["files"], agents["program"]["venv"]) == (agent_learning.AGENT, tmp_path)


def test_curves_stand_side_by_side() -> None:
    assert agent_learning.table(RESULTS) == LINES


def test_the_page_tells_what_was_measured() -> None:
    """`python -m benchmarks.agent_learning page` writes it again."""
    page = agent_learning.PAGE.read_text(encoding="utf-8")
    assert agent_learning.filled(page, agent_learning.ROOT / "docs" / "evidence") == page
