"""What the benchmarks of real runs report, from metrics files alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agentrl import envs
from agentrl import recipe as recipes
from agentrl.catalogue import CHECKOUT
from agentrl.curriculum import learnability
from agentrl.curriculum.sampler import Sampler, Source
from agentrl.recipe import LearnabilityCurriculum
from benchmarks import (
    _lacking,
    _runs,
    ablations,
    curriculum_levels,
    curriculum_real,
    curriculum_words,
    frontier,
    quickstart,
)


def write(
    out: Path, name: str, evals: list[tuple[int, str, float]], tokens: float = 100.0, seconds: float = 1.0
) -> None:
    """A run's metrics: 100 tokens and a second each step, evaluations of ten tasks; the last line is torn."""
    rows = []
    last = 0
    for step, stage, share in evals:
        rows += [
            {"kind": "step", "step": n, "rollout/tokens": tokens, "rollout/informative": 1.0 / n, "seconds": seconds}
            | {"rollout/groups_kept": 1, "rollout/groups_dropped": n - 1}
            for n in range(last + 1, step + 1)
        ]
        last = max(last, step)
        passes = {f"task {n}": float(n < 10 * share) for n in range(10)}
        value = {"value": share, "low": share, "high": share}
        figures = {"eval/files/pass@1": value, "eval/files/passes": passes, "eval/files/levels": {"1": share}}
        rows.append({"kind": "eval", "step": step, "stage": stage, **figures})
    path = _runs.log_of(out, name)
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "st')


def test_curves_start_at_the_warm_start(tmp_path: Path) -> None:
    write(tmp_path, "a", [(0, "start", 0.0), (0, "sft", 0.2), (5, "rl", 0.4), (10, "end", 0.8)])
    assert curriculum_real.curve(_runs.log_of(tmp_path, "a")) == [(0.0, 0.2), (500.0, 0.4), (1000.0, 0.8)]


def test_unequal_and_missing_runs_are_compared_as_far_as_they_go(tmp_path: Path) -> None:
    """Seed 0 was stopped at 500 tokens under uniform, seed 1 lacks it altogether."""
    start: list[tuple[int, str, float]] = [(0, "start", 0.0), (0, "sft", 0.2)]
    write(tmp_path, "curriculum-learnability-0", [*start, (5, "rl", 0.6), (10, "end", 0.8)])
    write(tmp_path, "curriculum-uniform-0", [*start, (5, "rl", 0.4)])
    write(tmp_path, "curriculum-learnability-1", [*start, (10, "end", 0.9)])
    curves = curriculum_real.gather(tmp_path, 3)
    assert {kind: list(runs) for kind, runs in curves.items()} == {"learnability": [0], "uniform": [0]}
    found = curriculum_real.summarise(curves)
    assert (found["tokens"], found["level"]) == (500.0, pytest.approx(0.6))
    assert found["difference"]["value"] == pytest.approx(0.2)
    assert found["difference_on_the_way"]["value"] == pytest.approx(0.1)
    assert found["learnability"]["tokens_to_level"] == [pytest.approx(500.0)]
    assert found["uniform"]["tokens_to_level"] == [None]
    assert curriculum_real.table(found).count("\n") == 4
    assert _runs.finished(tmp_path, "curriculum-learnability-0")
    assert not _runs.finished(tmp_path, "curriculum-uniform-0")


def test_arms_are_compared_at_equal_tokens_over_the_seeds_that_ours_has_too(tmp_path: Path) -> None:
    """Ours reaches after 500 tokens what the others have after 1000: they need twice the tokens."""
    for seed in range(2):
        write(tmp_path, f"files-learnability-{seed}", [(0, "start", 0.2), (5, "rl", 0.4), (10, "end", 0.6)])
        write(tmp_path, f"files-dynamic-{seed}", [(0, "start", 0.2), (10, "end", 0.4)], seconds=0.5)
    write(tmp_path, "files-learnability-2", [(0, "start", 0.2), (10, "end", 0.9)])
    report = curriculum_levels.summarise(tmp_path, "files", 3)
    assert report is not None
    assert (report["spent"], list(report["arms"])) == (1000.0, ["learnability", "dynamic"])
    dynamic = report["arms"]["dynamic"]
    assert (report["arms"]["learnability"]["seeds"], dynamic["seeds"]) == ([0, 1, 2], [0, 1])
    assert dynamic["success_less_than_ours"]["value"] == pytest.approx(0.2)
    assert dynamic["times_ours"] == pytest.approx({"value": 2.0, "low": 2.0, "high": 2.0})
    assert dynamic["area_less_than_ours"]["value"] == pytest.approx(0.1)
    assert dynamic["informative"] == pytest.approx(10 / 55, abs=1e-3)  # of all groups, not of steps
    assert curriculum_levels.table(report).count("\n") == 3
    ours = list(curriculum_levels.gather(tmp_path, "files", 2)["learnability"].values())
    theirs = list(curriculum_levels.gather(tmp_path, "files", 2)["dynamic"].values())
    assert curriculum_levels.times_needed(ours, ours, 1000.0)["value"] == 1.0
    assert curriculum_levels.times_needed(theirs, ours, 1000.0)["value"] == pytest.approx(0.5)  # it can lose
    steep = [[(0.0, 0.2), (800.0, 0.9), (1000.0, 0.9)]]  # above the others from 230 tokens on, known to be at 800
    assert curriculum_levels.times_needed(steep, theirs[:1], 1000.0)["value"] == pytest.approx(1.25)
    turned = curriculum_levels.summarise(tmp_path, "files", 3, ours="dynamic")
    assert turned is not None
    assert turned["arms"]["learnability"]["times_ours"]["value"] == pytest.approx(0.5)
    assert (turned["ours"], turned["arms"]["learnability"]["seeds"]) == ("dynamic", [0, 1])
    assert "dynamic less this one" in curriculum_levels.table(turned)
    timed = curriculum_levels.summarise(tmp_path, "files", 2, by="seconds")
    assert timed is not None and timed["spent"] == 5.0
    assert timed["arms"]["dynamic"]["times_ours"]["value"] == pytest.approx(1.0)  # theirs take half the time
    assert timed["arms"]["learnability"]["levels"] == {"1": 0.4}  # then, not at the end of the run
    assert "success after 5 seconds" in curriculum_levels.table(timed)
    curriculum_levels.draw_figure([timed], tmp_path / "timed.png")
    assert (tmp_path / "timed.png").stat().st_size > 10_000
    assert curriculum_levels.summarise(tmp_path, "sql", 3) is None
    assert curriculum_levels.summarise(tmp_path, "files", 3, spent=2000.0) is None  # nothing was evaluated that late


def test_what_begins_with_a_run_follows_it_and_only_then_do_its_checkpoints_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def train(command: Sequence[str], log: Path, *rest: Any, **more: Any) -> int:
        name = log.stem
        order.append(name)
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        if name == "stopped":
            return 3
        _runs.log_of(tmp_path, name).write_text('{"kind": "eval", "step": 1, "stage": "end"}\n')
        return 0

    def then(name: str) -> dict[str, list[str]]:
        assert (tmp_path / name / "checkpoints").is_dir()
        if name == "b":
            raise subprocess.CalledProcessError(1, "export")
        return {"a, on": [], "a, again": []} if name == "a" else {}

    monkeypatch.setattr(_runs, "_run", train)
    runs: dict[str, list[str]] = {"a": [], "stopped": [], "b": []}
    _runs.play(Path("recipe.yaml"), runs, tmp_path, at_once=1, minutes=None, then=then, keep=False)
    assert order == ["a", "a, on", "a, again", "stopped", "b"]
    left = {name for name in order if (tmp_path / name / "checkpoints").is_dir()}
    assert left == {"stopped", "b"}  # to go on with, and what could not be handed on


def test_demonstrations_are_compared_with_the_run_that_had_none(tmp_path: Path) -> None:
    for seed, gain in enumerate((0.1, 0.3)):
        write(tmp_path, f"files-learnability-{seed}", [(0, "start", 0.2), (10, "end", 0.4)])
        write(tmp_path, f"files-on-{seed}", [(0, "start", 0.4), (10, "end", 0.4)])
        write(tmp_path, f"files-again-{seed}", [(0, "start", 0.4), (0, "sft", 0.2), (20, "end", 0.6 + 2 * gain)])
    report = frontier.summarise(tmp_path, 3)
    assert report is not None
    assert (report["tokens"], list(report["arms"])) == (1000.0, ["learnability", "on", "again"])
    again = report["arms"]["again"]
    assert again["begins"] == {"1": 0.2}  # after the demonstrations
    assert again["each"] == {"0": 0.5, "1": 0.7}
    assert (again["more_than"], again["more"]["value"]) == ("on", pytest.approx(0.2))
    assert frontier.table(report).count("\n") == 4
    assert frontier.summarise(tmp_path, 3, tokens=5000.0) is None
    assert again["more"]["low"] < 0.2 < again["more"]["high"]
    write(tmp_path / "one", "files-on-0", [(0, "start", 0.4), (10, "end", 0.5)])
    alone = frontier.summarise(tmp_path / "one", 3)
    assert alone is not None
    assert alone["arms"]["on"]["success"] == {"value": 0.5}  # an interval of one seed would be endless


def test_what_follows_begins_with_the_policy_that_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **options: exported.append(command))
    assert not any(
        frontier.second(name, tmp_path, 10) for name in ("files-extra-0", "learnability-0", "sql-learnability-0")
    )
    runs = frontier.second("files-learnability-1", tmp_path, 10)
    assert exported[0][-2:] == [str(tmp_path / "files-learnability-1"), str(tmp_path / "files-end-1")]
    assert list(runs) == ["files-on-1", "files-again-1", "files-all-1"]
    assert all(f"model.path={tmp_path / 'files-end-1'}" in chosen for chosen in runs.values())
    warm = [next(s for s in reversed(chosen) if s.startswith("warm_start=")) for chosen in runs.values()]
    assert warm == ["warm_start=null", frontier.HARD, frontier.ALL]  # the last of equal settings counts
    (tmp_path / "files-end-1").mkdir()
    (tmp_path / "files-end-1" / "config.json").touch()
    assert frontier.second("files-learnability-1", tmp_path, 10) == runs
    assert len(exported) == 1


def test_variants_of_a_recipe_are_compared_with_it_over_the_seeds_that_both_have(tmp_path: Path) -> None:
    """A variant that learns half as much loses a quarter on the way; one that was stopped is not counted."""
    names = {variant: [ablations.name_of(variant, seed) for seed in range(3)] for variant in ablations.SETTINGS}
    assert len({name for three in names.values() for name in three}) == 3 * len(names)
    grpo, gspo = list(ablations.VARIANTS["algorithm"])[:2]
    for seed in range(2):
        write(tmp_path, names[ablations.BASE][seed], [(0, "start", 0.0), (10, "end", 1.0)])
    for seed in range(3):
        write(tmp_path, names[grpo][seed], [(0, "start", 0.0), (10, "end", 0.5)])
    write(tmp_path, names[gspo][0], [(0, "start", 0.0), (5, "rl", 0.4)])
    curves = ablations.gather(tmp_path, 3)
    assert {variant: list(runs) for variant, runs in curves.items()} == {ablations.BASE: [0, 1], grpo: [0, 1, 2]}
    report = ablations.summarise(curves)
    assert (report[grpo]["seeds"], report[grpo]["end"], report[grpo]["lowest"]) == ([0, 1], 0.5, 0.5)
    assert report[grpo]["difference"] == pytest.approx({"value": -0.25, "low": -0.25, "high": -0.25})
    assert "| -25 points [-25, -25] |" in ablations.table(report)
    assert list(ablations.summarise({**curves, gspo: {2: [(0.0, 0.0), (100.0, 0.1)]}})) == [ablations.BASE, grpo]


def test_arms_that_roll_out_ahead_are_else_as_those_that_do_not(tmp_path: Path) -> None:
    for arm in ("two", "dynamic two"):
        here, ahead = (
            recipes.load(curriculum_levels.RECIPE, curriculum_levels.settings("search", name, 1, tmp_path, 100))
            for name in (arm, f"{arm} ahead")
        )
        assert not here.asynchronous.enabled and ahead.asynchronous.enabled
        assert ahead.model_copy(update={"asynchronous": here.asynchronous}) == here


def test_an_arm_lacks_the_parts_that_it_names(tmp_path: Path) -> None:
    made = {
        arm: recipes.load(curriculum_levels.RECIPE, curriculum_levels.settings("search", arm, 1, tmp_path, 100))
        for arm in ("two", *curriculum_levels.LACKING)
    }
    whole = made["two"].curriculum
    assert made["untagged two"] == made["two"]  # its sampler differs
    assert (made["two"].group_filter.probe, made["unprobed two"].group_filter.probe) == (0.2, 0.0)
    assert made["plain two"].curriculum == whole.model_copy(update={"floor": 0.0, "band": (0.01, 0.99)})

    def strata(parts: Sequence[str]) -> Any:
        with _lacking.lacking(parts):
            sampler = Sampler(whole, [Source(name="search", environment=envs.load("search")(), levels=(1, 2))], 0)
        return sampler.metrics()["curriculum/search/strata"]

    assert strata(("tags", "the guard of levels")) == 2.0
    assert strata(curriculum_levels.LACKING["plain two"]) > 2.0
    before = learnability.PREFER_STRATUM
    with _lacking.lacking(curriculum_levels.LACKING["mild two"]):
        assert learnability.PREFER_STRATUM == 2.0
    assert learnability.PREFER_STRATUM == before > 2.0


def test_words_are_split_by_their_letters_and_its_expert_is_right() -> None:
    environment = envs.load(str(curriculum_words.WHERE))()
    tasks = {
        split: [environment.task(split, level, index) for level in environment.levels for index in range(60)]
        for split in ("train", "heldout")
    }
    for task in tasks["train"][::20]:
        assert environment.expert(task) == [words_answer(environment, task.prompt)]
        names, letters = (part.split() for part in task.prompt.split(" : "))
        assert task.tags == tuple(names)
        assert len(letters) == len(task.secret["answer"].split())
    words = {split: {task.prompt.split(" : ")[1] for task in drawn} for split, drawn in tasks.items()}
    assert not words["train"] & words["heldout"]
    assert words_answer(environment, "turn roll : a b c") == "b a c"
    assert words_answer(environment, "sort next : p a") == "b a"


def words_answer(environment: Any, prompt: str) -> str:
    """Return what the operations of a prompt make of its letters, by the environment's own."""
    names, letters = (part.split() for part in prompt.split(" : "))
    for name in names:
        letters = sys.modules[type(environment).__module__].OPERATIONS[name](letters)
    return " ".join(letters)


def test_runs_of_words_differ_in_their_arm_alone(tmp_path: Path) -> None:
    made = {
        arm: recipes.load(curriculum_words.RECIPE, curriculum_words.settings(arm, 1, tmp_path, 100))
        for arm in curriculum_words.ARMS
    }
    whole = made[curriculum_words.OURS]
    same = [arm for arm, recipe in made.items() if recipe == whole]
    assert same == ["two", "mild two"]  # their samplers differ
    bare = made["bare two"].curriculum
    assert isinstance(bare, LearnabilityCurriculum)
    assert bare.candidates == bare.repeats == 1
    uniform = whole.model_copy(update={name: getattr(made["dynamic two"], name) for name in ("curriculum", "eval")})
    assert uniform == made["dynamic two"]
    assert recipes.load(curriculum_words.RECIPE, curriculum_words.BEGIN).envs == whole.envs


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="two minutes; set AGENTRL_FULL")
def test_a_policy_is_trained_on_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = [*curriculum_words.BEGIN, "warm_start={demonstrations: 256, epochs: 1, lr: 5.0e-3, batch: 32}"]
    monkeypatch.setattr(curriculum_words, "BEGIN", begin)
    chosen = ["--seeds", "1", "--jobs", "2", "--arms", "two,bare two", "--tokens", "20000", "--set", "run.steps=3"]
    monkeypatch.setattr(sys, "argv", ["curriculum_words", *chosen, "--set", "eval.every=1", "--out", str(tmp_path)])
    curriculum_words.main()
    said = capfd.readouterr()
    assert "bare two" in said.out
    assert "not finished" not in said.err


def test_the_page_shows_what_the_curricula_and_the_demonstrations_did() -> None:
    assert CHECKOUT is not None
    evidence = CHECKOUT / "docs" / "evidence"
    page = (CHECKOUT / "docs" / "notes" / "curriculum.md").read_text(encoding="utf-8")
    for env in ("countdown", "search"):
        small = partial(curriculum_levels.summarise, evidence / "curriculum-levels-small", env, 12, ours="two")
        for report in (
            curriculum_levels.summarise(evidence / "curriculum-levels", env, 6),
            small(),
            small(by="seconds"),
        ):
            assert report is not None and curriculum_levels.table(report) in page
    words = json.loads((evidence / "curriculum-words.json").read_text(encoding="utf-8"))
    assert curriculum_levels.table(words) in page
    for folder, tokens in (("frontier-demonstrations", 200_000), ("frontier-demonstrations-earlier", 139_000)):
        found = frontier.summarise(evidence / folder, 4, tokens)
        assert found is not None and frontier.table(found) in page


def test_the_page_shows_what_the_ablations_say() -> None:
    assert CHECKOUT is not None
    report = ablations.summarise(ablations.gather(CHECKOUT / "docs" / "evidence" / "ablations", 6))
    assert list(report) == list(ablations.SETTINGS)
    assert ablations.table(report) in (CHECKOUT / "docs" / "algorithms.md").read_text(encoding="utf-8")


def test_the_interval_over_seeds_is_students() -> None:
    assert ablations.mean_of([0.1, 0.2, 0.3]) == pytest.approx({"value": 0.2, "low": -0.0483, "high": 0.4483}, abs=1e-3)
    assert ablations.mean_of([0.1])["high"] == float("inf")


def test_the_quickstart_says_whether_it_holds(tmp_path: Path) -> None:
    start: list[tuple[int, str, float]] = [(0, "start", 0.0), (0, "sft", 0.3)]
    for seed in range(2):
        write(tmp_path, f"seed-{seed}", [*start, (40, "end", 0.8)])
    partial = quickstart.summarise(tmp_path, quickstart.names(2), {})
    assert partial["missing"] == ["control-0"]
    assert set(partial["holds"].values()) == {None}
    write(tmp_path, "control-0", [*start, (40, "end", 0.1)])
    found = quickstart.summarise(tmp_path, quickstart.names(2), {"seed-0": 12.0})
    assert [(row["name"], row["seconds"]) for row in found["runs"]] == [
        ("seed-0", 12.0), ("seed-1", None), ("control-0", None)
    ]  # fmt: skip
    assert found["holds"] == {"gain_at_least": True, "warm_start_between": True, "control_gains_nothing": True}
    assert found["missing"] == []
