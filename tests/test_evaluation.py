"""Evaluation with scripted policies whose success is known beforehand, in real episodes."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from agentrl import codec, envs, initial_policy, metrics, serving
from agentrl import recipe as recipes
from agentrl.cli import main
from agentrl.engines.base import Sampling
from agentrl.errors import Fault, UserError
from agentrl.eval import command as eval_command
from agentrl.eval.report import compare, curve, figures
from agentrl.evaluation import (
    EVAL_GROUP,
    Evaluation,
    Evaluator,
    Problem,
    evaluate,
    overlap,
    problems,
    problems_of,
    seen_hashes,
)
from agentrl.recipe import EvalSection
from agentrl.rollout.player import LocalPlayer
from agentrl.rollout.render import Renderer
from agentrl.rollout.request import Budget, EnvRuntime
from agentrl.rollout.scripted import ScriptedEngine
from agentrl.types import Completion, Ending, Outcome, Task, Trajectory

RECIPE = {
    "run": {"name": "r", "threads": 1},
    "model": {"type": "scratch", "layers": 1, "width": 32, "heads": 2, "vocabulary": 300, "context": 2048},
    "envs": [{"name": "countdown", "levels": [1, 2]}],
    "rollout": {"max_turns": 2, "max_tokens": 24},
    "eval": {"tasks": 4},
}


class Expert(ScriptedEngine):
    """Solves the tasks whose numbers are in `solved`; says "no" to all others."""

    def __init__(self, renderer: Renderer, tasks: Sequence[Problem], solved: set[int]) -> None:
        self._scripts: dict[str, ScriptedEngine] = {}
        self._renderer, self._tasks, self._solved = renderer, tasks, solved

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str = "") -> Completion:
        group, index = request_id.split("-")[:2]
        number, key = int(group) - EVAL_GROUP, f"{group}-{index}"
        if key not in self._scripts:
            problem = self._tasks[number]
            environment = envs.load(problem.env)()
            no = ["no"] * (1 + environment.objections)
            actions = environment.expert(problem.task) if number in self._solved else no
            self._scripts[key] = ScriptedEngine(self._renderer, actions)
        return await self._scripts[key].generate(token_ids, sampling)


@pytest.fixture(scope="module")
def found() -> tuple[list[Problem], Renderer, EnvRuntime]:
    recipe = recipes.build(RECIPE)
    with serving.runtimes(recipe) as runtimes:
        renderer = initial_policy.load_policy(recipe, runtimes, say=lambda text: None).renderer
        return problems(runtimes["countdown"], "heldout", [1, 2], 6), renderer, runtimes["countdown"]


def tried(found: tuple[list[Problem], Renderer, EnvRuntime], solved: set[int], samples: int = 2) -> Evaluation:
    tasks, renderer, runtime = found
    player = LocalPlayer(
        engine=Expert(renderer, tasks, solved),
        renderer=renderer,
        runtimes={"countdown": runtime},
        budget=Budget(context=2048, tokens=512),
    )
    return asyncio.run(evaluate(player, tasks, samples=samples, seed=1, key=b"k"))


def test_success_is_counted_task_by_task(found: tuple[list[Problem], Renderer, EnvRuntime]) -> None:
    result = tried(found, {0, 1, 2})
    assert list(result.passes.values()) == [(True, True)] * 3 + [(False, False)] * 3
    summary = result.summary([1, 2])
    assert (summary["pass@1"]["value"], summary["pass@2"]["value"]) == (0.5, 0.5)
    assert (summary["tasks"], summary["tries"], summary["ungraded"]) == (6, 12, 0)
    assert summary["levels"] == {"1": pytest.approx(2 / 3), "2": pytest.approx(1 / 3)}


def test_what_a_budget_ended_is_cut_off_and_nothing_else(found: tuple[list[Problem], Renderer, EnvRuntime]) -> None:
    result = tried(found, set(), 1)
    endings: list[Ending] = ["done", "agent_error", "max_tokens", "max_turns", "timeout", "done"]
    ended = tuple(
        replace(t, outcome=replace(t.outcome, ending=ending))
        for t, ending in zip(result.trajectories, endings, strict=True)
    )
    assert result.summary([1])["truncated"] == 0
    assert replace(result, trajectories=ended).summary([1])["truncated"] == 0.5


def test_what_could_not_be_graded_counts_as_failed(found: tuple[list[Problem], Renderer, EnvRuntime]) -> None:
    """A policy that breaks its failures does not look better for it, and is not compared."""
    result = tried(found, {0, 1}, 1)
    fault = Fault(component="environment", blame="infra", cause="gone")
    vanished = tuple(
        t
        if t.outcome.score
        else replace(t, outcome=Outcome(ending="done", grade="infra_error", score=None, fault=fault))
        for t in result.trajectories
    )
    broken = replace(result, trajectories=vanished)
    assert [side.pass_at(1).value for side in (result, broken)] == [pytest.approx(1 / 3)] * 2
    assert (broken.ungraded, broken.summary([1])["ungraded"], broken.summary([1])["levels"]) == (
        4,
        4,
        {"1": 1 / 3, "2": 1 / 3},
    )
    with pytest.raises(UserError, match="4 of 6 tries of the second policy could not be graded"):
        compare(broken, result)
    assert compare(result, result)["difference"]["value"] == 0.0


def test_every_environment_is_evaluated_whatever_the_number_of_tasks() -> None:
    """Fewer tasks than environments, and tasks of two environments with the same ids."""
    recipe = recipes.build({**RECIPE, "envs": [{"name": "countdown", "levels": [1]}, {"name": "files", "levels": [1]}]})
    with serving.runtimes(recipe) as runtimes:
        chosen = problems_of(recipe, EvalSection(tasks=1), runtimes)
        assert [problem.env for problem in chosen] == ["countdown", "files"]
        assert len(problems_of(recipe, EvalSection(tasks=5), runtimes)) == 5
    twins = [Problem(env, replace(chosen[0].task, id="1")) for env in ("a", "b")]
    assert [problem.key for problem in twins] == ["a/1", "b/1"]


def test_two_policies_are_compared_on_the_same_tasks(found: tuple[list[Problem], Renderer, EnvRuntime]) -> None:
    weak, strong = tried(found, {0}, 1), tried(found, {0, 1, 2, 3, 4}, 1)
    assert compare(weak, strong)["difference"]["value"] == pytest.approx(4 / 6)
    assert (compare(weak, strong)["better"], compare(weak, strong)["worse"]) == (4, 0)
    assert compare(weak, strong)["verdict"].startswith("no difference at this size: +66.7 points"), "p is 0.125"
    assert compare(weak, weak)["difference"] == {"value": 0.0, "low": pytest.approx(-0.39, abs=0.01),
                                                 "high": pytest.approx(0.39, abs=0.01)}  # fmt: skip


def test_intervals_draw_families(found: tuple[list[Problem], Renderer, EnvRuntime]) -> None:
    one_family = [replace(p, task=replace(p.task, family="all alike")) for p in found[0]]
    apart, alike = tried(found, {0, 1, 2}), tried((one_family, *found[1:]), {0, 1, 2})
    assert apart.summary([1])["families"] == 6 and apart.family == {}
    assert alike.summary([1])["families"] == 1
    assert apart.pass_at(1).low < 0.2
    assert alike.pass_at(1).low < apart.pass_at(1).low, "one family alone tells next to nothing"
    nothing, none_alike = tried(found, set()), tried((one_family, *found[1:]), set())
    wide, narrow = compare(none_alike, alike)["difference"], compare(nothing, apart)["difference"]
    assert wide["value"] == narrow["value"] == 0.5 and wide["low"] < narrow["low"]


def test_every_figure_is_told_per_environment_and_level(found: tuple[list[Problem], Renderer, EnvRuntime]) -> None:
    told = figures(tried(found, {0, 1, 2}), [1, 2])
    assert (told["pass@2"]["value"], told["all@2"]["value"], told["best@2"]["value"]) == (0.5, 0.5, 0.5)
    assert (told["variance_share_between"], told["variance_within"], told["passed"]) == (1.0, 0.0, 6)
    levels = told["by_level"]
    assert [levels[level]["pass@1"]["value"] for level in ("1", "2")] == pytest.approx([2 / 3, 1 / 3])
    assert [levels[level]["tasks"] for level in ("1", "2")] == [3, 3]
    assert told["token_ids"] and told["seconds_per_success"] > 0
    assert [[k, value] for k, value, *_ in curve(tried(found, {0, 1, 2}, 3))] == [[1, 0.5], [2, 0.5], [3, 0.5]]


def test_overlap_is_found_by_content_not_by_name(found: tuple[list[Problem], Renderer, EnvRuntime]) -> None:
    tasks = [problem.task for problem in found[0]]
    train = [problem.task for problem in problems(found[2], "train", [1, 2], 50)]
    assert overlap(tasks, seen_hashes(train)) == (0, 0)
    assert overlap(tasks, seen_hashes([tasks[0].public()])) == (1, 0)
    reordered = replace(tasks[1], prompt=" ".join(reversed(tasks[1].prompt.split())))
    assert overlap(tasks, seen_hashes([reordered])) == (0, 1)


def test_overlap_is_found_in_a_file_of_trajectories() -> None:
    """There bytes are text and keys are strings: the task must still be recognised."""
    task = Task(
        id="a", split="heldout", level=1, prompt="Sort it.", setup={"files": {"a.txt": b"x\xff"}, "rows": {1: 2}}
    )
    demonstration = Trajectory(
        task=task,
        group=0,
        index=0,
        seed=0,
        segments=(),
        messages=(),
        outcome=Outcome(ending="done", grade="infra_error", score=None, fault=Fault("a", "infra", "x")),
    )
    read = codec.from_row(json.loads(codec.line(codec.to_row(demonstration, "e")))).trajectory.task
    assert read.setup != task.setup
    assert overlap([task], seen_hashes([read])) == overlap([read], seen_hashes([task])) == (1, 0)


def test_targets_are_recognised(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    assert eval_command.find(str(path)).model is None
    with pytest.raises(UserError, match="--on"):
        eval_command.find("http://127.0.0.1:1")
    with pytest.raises(UserError, match="neither a recipe"):
        eval_command.find(str(tmp_path / "nothing"))
    empty = tmp_path / "runs" / "r"
    (empty / "checkpoints").mkdir(parents=True)
    (empty / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    with pytest.raises(UserError, match="no checkpoint yet"):
        eval_command.find(str(empty))


def test_the_command_evaluates_an_untrained_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    with pytest.raises(SystemExit) as end:
        main(["eval", str(path), "--k", "1,2", "--compare", str(path)])
    assert end.value.code in (0, None)
    said = capsys.readouterr().out
    assert "pass@2" in said and "no difference at this size" in said
    with pytest.raises(SystemExit) as end:
        main(["eval", str(path), "--k", "0"])
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("step", "lines"),
    [
        (
            3,
            [
                "  before            ",
                "  after warm start  ",
                "  after RL          ",
                "after RL against the warm start: ",
            ],
        ),
        (0, ["  before            ", "  after warm start  ", "  at the end        ", "at the end against before: "]),
    ],
)
def test_without_rl_nothing_is_said_to_come_after_it(step: int, lines: list[str]) -> None:
    """`run.steps: 0` evaluates and warm-starts only."""
    part = {"value": 0.5, "low": 0.1, "high": 0.9}
    figures = {"pass@1": part, "tasks": 2, "families": 2, "passes": {"a": 0.5, "b": 0.5}}
    rows = [
        {**metrics.eval_row(stage, "heldout", 1.0, {"files": figures}), "kind": "eval", "step": at}
        for stage, at in (("start", 0), ("sft", 0), ("end", step))
    ]
    held: Any = SimpleNamespace(rows=lambda: rows, tasks=[], results={})
    said = Evaluator.conclusion(held, set())[1:5]
    assert [line[: len(wanted)] for line, wanted in zip(said, lines, strict=True)] == lines
