"""The section `judge` in use: by train, eval, check and the red team, over HTTP and with the policy itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl import metrics, preflight
from agentrl import recipe as recipes
from agentrl.cli import main

TINY: dict[str, Any] = {
    "run": {"name": "tiny", "seed": 3, "steps": 2, "threads": 1},
    "model": {"type": "scratch", "layers": 1, "width": 32, "heads": 2, "vocabulary": 400, "context": 320},
    "warm_start": {"demonstrations": 8, "epochs": 1, "lr": 0.003, "batch": 8},
    "rollout": {"group_size": 2, "max_turns": 1, "max_tokens": 16},
    "group_filter": {"dynamic_sampling": False},
    "algorithm": {"entropy_bonus": 0.01},
    "learner": {"groups_per_step": 2},
    "eval": None,
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def recipe(name: str, judge: dict[str, Any] | None, **sections: Any) -> Path:
        data = {**TINY, "run": {**TINY["run"], "out": str(tmp_path / "runs")}, "envs": [{"name": name}], **sections}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({**data, "judge": judge} if judge is not None else data))
        return path

    return recipe


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return end.value.code if isinstance(end.value.code, int) else 0


def test_training_asks_the_judge_and_keeps_what_it_said(
    planets: Callable[..., str], endpoint: Any, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = planets("planets_train")
    path = write(name, {"engine": endpoint.section, "calibration": {"tasks": 2}})
    assert run("train", str(path)) == 0
    folder = tmp_path / "runs" / "tiny"
    rows = list(metrics.read(folder / "metrics.jsonl"))
    assert [metrics.undeclared(row) for row in rows] == [[]] * len(rows)
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["rollout/ungraded"] == 0 and row["judge/failures"] == 0 for row in steps)
    kept = json.loads((folder / "judge.json").read_text())
    assert {key: kept[key] for key in ("judge", "calls", "failures")} == {
        "judge": f"judge at {endpoint.url}",
        "calls": len(endpoint.asked),
        "failures": 0,
    }
    assert [(row["source"], row["balanced"], row["count"]) for row in kept["calibration"]] == [
        ("gold", 1.0, 2),
        ("expert", 1.0, 4),
    ]
    said = " ".join(capsys.readouterr().err.split())
    assert f"judge (judge at {endpoint.url}) in {name}: balanced agreement 1.00 with 4 labels (expert)" in said
    assert "warm start: 8 of 8 demonstrations solve their task" in said


def test_a_spent_budget_stops_training_with_a_checkpoint_and_more_lets_it_resume(
    planets: Callable[..., str], endpoint: Any, write: Write, tmp_path: Path
) -> None:
    """4 questions measure the judge and 16 grade the demonstrations; the first episode of RL finds nothing left."""
    name = planets("planets_budget")
    judge = {"engine": endpoint.section, "calibration": {"tasks": 0}, "budget": {"calls": 20}}
    path = write(name, judge)
    assert run("train", str(path)) == 3
    folder = tmp_path / "runs" / "tiny"
    alarms = [
        row for row in metrics.read(folder / "metrics.jsonl") if row["kind"] == "alarm" and row["name"] == "judge"
    ]
    text = "the judge's budget is spent: 20 of 20 calls; nothing more can be scored, so raise judge.budget.calls"
    assert [row["text"] for row in alarms] == [text]
    assert json.loads((folder / "judge.json").read_text())["calls"] == 20
    assert (folder / "checkpoints").is_dir() and any((folder / "checkpoints").iterdir())
    assert run("train", str(path), "--resume") == 2, "nothing is left of the same budget"
    more = ["--set", "judge.budget.calls=100000", "--set", "run.steps=1"]
    assert run("train", str(path), *more, "--resume") == 0
    assert json.loads((folder / "judge.json").read_text())["calls"] > 20


def test_the_policy_judges_itself_frozen(
    talks: Callable[[str], str], write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = talks("planets_policy")
    path = write(name, {"engine": {"type": "policy"}, "calibration": {"tasks": 1}}, warm_start=None)
    assert run("train", str(path), "--set", "run.steps=1") == 0
    assert run("train", str(path), "--set", "run.steps=2", "--resume") == 0
    folder = tmp_path / "runs" / "tiny"
    kept = json.loads((folder / "judge.json").read_text())
    agreement = {"env": name, "source": "expert", "count": 2, "required": 0.8}
    shares = {"sensitivity": 1.0, "specificity": 1.0, "balanced": 1.0}
    assert kept["calibration"] == [{**agreement, **shares}]
    assert kept["judge"] == "the policy as it was before the run, frozen" and kept["tokens"] > 0
    steps = [row for row in metrics.read(folder / "metrics.jsonl") if row["kind"] == "step"]
    assert [(row["rollout/ungraded"], row["judge/calls"], row["judge/failures"]) for row in steps] == [(0, 4, 0)] * 2
    capsys.readouterr()
    assert run("eval", str(folder), "--tasks", "2", "--json") == 0
    report = json.loads(capsys.readouterr().out)["judge"]
    assert (report["judge"], report["calls"], report["calibration"]) == (kept["judge"], 4, kept["calibration"])


def test_a_frozen_judge_answers_the_same_before_and_after_training(planets: Callable[..., str], write: Write) -> None:
    import asyncio

    from agentrl import judges, serving
    from agentrl.types import Message

    path = write(planets("planets_frozen"), {"engine": {"type": "policy"}})
    question = [Message(role="user", content="Which planet?")]

    def answers() -> list[str]:
        async def ask() -> list[str]:
            judge = judges.judge_of(runtimes)
            assert judge is not None
            async with judges.closing(judge):
                return [await judge.ask(question, seed=seed, max_tokens=12) for seed in (1, 2)]

        with serving.runtimes(recipes.load(path)) as runtimes:
            return asyncio.run(ask())

    first = answers()
    assert first[0] == first[1] != "" and answers() == first


def test_a_recipe_without_the_judge_it_needs_is_refused_before_anything_starts(
    planets: Callable[..., str], write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(planets("planets_none"), None)
    assert run("train", str(path)) == 2
    said = capsys.readouterr().err
    assert (
        "the verifier of planets_none asks a judge, and the recipe names none; add\n  judge:\n    engine: {type:"
        in said
    )
    assert not (tmp_path / "runs").exists()
    assert run("train", str(path), "--dry-run") == 1
    assert "failed   the verifier of planets_none asks a judge" in capsys.readouterr().out
    assert run("eval", str(path)) == 2


def test_a_judge_that_nothing_asks_is_warned_about(write: Write, endpoint: Any) -> None:
    lines: list[str] = []
    path = write("files", {"engine": endpoint.section}, envs=[{"name": "files", "levels": [1]}])
    assert preflight.preflight(recipes.load(path), lines.append) == 0
    (said,) = [line for line in lines if " judge: " in line]
    assert said.startswith("ok       judge: warning: judge: no verifier of this recipe's environments asks a judge")
    assert endpoint.asked == []


def test_preflight_measures_the_judge_and_plays_with_it(
    planets: Callable[..., str], write: Write, endpoint: Any
) -> None:
    lines: list[str] = []
    path = write(planets("planets_preflight"), {"engine": endpoint.section})
    assert preflight.preflight(recipes.load(path), lines.append) == 0
    assert any("balanced agreement 1.00 with 8 labels (expert)" in line for line in lines)
    assert any("episode in planets_preflight: the expert scores 1" in line for line in lines)


def test_an_evaluation_says_which_judge_it_asked_and_fails_when_that_may_not_answer(
    planets: Callable[..., str], write: Write, endpoint: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = {"engine": endpoint.section, "calibration": {"tasks": 0}}
    path = write(planets("planets_eval"), judge)
    assert run("eval", str(path), "--tasks", "8", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["judge"]["judge"] == f"judge at {endpoint.url}"
    assert report["judge"]["calls"] == len(endpoint.asked) > 4
    path = write("planets_eval", {**judge, "budget": {"calls": 5}})
    assert run("eval", str(path), "--tasks", "8") == 2
    assert "the judge's budget is spent: 5 of 5 calls" in capsys.readouterr().err


def test_check_and_red_team_ask_the_judge_they_are_given(
    planets: Callable[..., str], endpoint: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name, judge = planets("planets_check"), f"{endpoint.url}#judge"
    assert run("env", "check", name, "--only", "oracle_max", "--judge", judge) == 0
    said = capsys.readouterr().out
    assert f"judge (judge at {endpoint.url}) in {name}: balanced agreement 1.00 with 8 labels (expert)" in said
    assert run("env", "check", name, "--only", "oracle_max") == 2
    assert f"the verifier of {name} asks a judge; name one with --judge" in capsys.readouterr().err
    assert run("env", "check", "files", "--only", "oracle_max", "--judge", judge) == 2
    assert "the verifier of files asks no judge" in capsys.readouterr().err
    before = len(endpoint.asked)
    run("redteam", name, "--family", "J", "--judge", judge, "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["notes"] == [f"judge: judge at {endpoint.url}"]
    assert len(endpoint.asked) > before
    run("redteam", name, "--attack", "J.flattery", "--json")
    assert json.loads(capsys.readouterr().out)["notes"][0].startswith("judge: the scripted examiner")


def test_the_fragment_in_the_documentation_is_a_judge() -> None:
    page = (Path(__file__).parents[2] / "docs" / "verifiers.md").read_text(encoding="utf-8")
    fragments = [block.split("```")[0] for block in page.split("```yaml\n")[1:] if block.startswith("judge:")]
    alone, rewarding = map(yaml.safe_load, fragments)
    section = recipes.JudgeSection.model_validate(alone["judge"])
    assert (section.engine.type, section.budget.calls, section.calibration.tasks) == ("openai", 200_000, 8)
    assert recipes.JudgeSection.model_validate(rewarding["judge"]).calibration.tasks == 8
    judged = recipes.RewardsSection.model_validate(rewarding["rewards"]).judged
    assert isinstance(judged, recipes.RubricReward) and [one.name for one in judged.criteria] == ["tidy", "short"]
