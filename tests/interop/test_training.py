"""`agentrl train` with an agent of somebody else's making."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl import metrics
from agentrl.cli import main
from agentrl.rollout import store

TINY: dict[str, Any] = {
    "run": {"name": "tiny", "seed": 3, "steps": 1, "threads": 1},
    "model": {"type": "scratch", "layers": 1, "width": 32, "heads": 2, "vocabulary": 300, "context": 320},
    "envs": [{"name": "files", "levels": [1]}],
    "rollout": {"group_size": 2, "max_turns": 2, "max_tokens": 24},
    "group_filter": {"dynamic_sampling": False},
    "algorithm": {"entropy_bonus": 0.01},
    "learner": {"lr": 0.003, "groups_per_step": 2},
    "eval": None,
}
AGENT = Path(__file__).resolve().parents[2] / "benchmarks" / "_openai_agent.py"
"""Written with the OpenAI SDK; it begins with the environment's messages and uses its tools."""


def train(tmp_path: Path, name: str, agent: dict[str, Any] | None, **changes: Any) -> Path:
    data = {**TINY, **changes, "run": {**TINY["run"], "name": name, "out": str(tmp_path / "runs")}}
    if agent is not None:
        data["envs"] = [{**data["envs"][0], "agent": agent}]
    recipe = tmp_path / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump(data))
    with pytest.raises(SystemExit) as end:
        main(["train", str(recipe)])
    assert end.value.code in (None, 0)
    return tmp_path / "runs" / name


def test_an_agent_is_trained_as_the_built_in_loop_is(tmp_path: Path) -> None:
    """An agent that does what the built-in loop does gives the same trajectories, and so the same step to the bit."""
    theirs = train(tmp_path, "theirs", {"function": f"{AGENT}:agent"})
    ours = train(tmp_path, "ours", None)
    rows = {run: [r for r in metrics.read(run / "metrics.jsonl") if r["kind"] == "step"] for run in (theirs, ours)}
    assert rows[theirs][0]["learn/grad_norm"] > 0
    for key in ("learn/loss", "learn/grad_norm", "learn/mismatch_mean", "rollout/tokens"):
        assert rows[theirs][0][key] == rows[ours][0][key], key
    played = {
        run: {(s.trajectory.group, s.trajectory.index): s.trajectory for s in store.read(run / "trajectories")}
        for run in (theirs, ours)
    }
    told = {
        run: {place: (t.segments, t.outcome.ending, t.outcome.score) for place, t in played[run].items()}
        for run in (theirs, ours)
    }
    assert told[theirs] == told[ours]
    assert "max_tokens" in {ending for _, ending, _ in told[ours].values()}
    assert all(t.ledger["agent"]["turns"] >= 1 for t in played[theirs].values())
