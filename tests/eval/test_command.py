"""`agentrl eval` on endpoints, hub ids and earlier evaluations: protocol, resuming, comparing, suites, files."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from agentrl import recipe as recipes
from agentrl import serving
from agentrl.audit.command import audit, text
from agentrl.cli import main
from agentrl.errors import Halted, RecipeError, UserError
from agentrl.eval import command as eval_command
from agentrl.eval import folder as eval_folder
from agentrl.eval import suite as eval_suite
from agentrl.eval import targets as eval_targets
from agentrl.evaluation import EVAL_GROUP, Problem, problems_of
from agentrl.recipe import EvalSection
from agentrl.report import curve
from agentrl.rollout import store
from tests.chat_endpoint import Body, Reply, expert, said, serve

TASKS = 6


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe whose tasks endpoints are tried on; nothing of its model is ever loaded."""
    path = tmp_path / "recipe.yaml"
    data = {
        "run": {"name": "r", "out": str(tmp_path / "runs")},
        "model": {"type": "pretrained", "path": str(tmp_path / "no-such-model")},
        "envs": [{"name": "countdown", "levels": [1, 2], "sandbox": "process", "unsafe": True}],
        "rollout": {"max_tokens": 200, "concurrency": 2},
        "eval": {"tasks": TASKS},
    }
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture(scope="module")
def tasks() -> list[Problem]:
    recipe = recipes.build(
        {
            "run": {"name": "r"},
            "model": {"type": "scratch"},
            "envs": [{"name": "countdown", "sandbox": "process", "unsafe": True}],
        }
    )
    with serving.runtimes(recipe) as runtimes:
        return problems_of(recipe, EvalSection(tasks=TASKS, levels=[1, 2]), runtimes)


@pytest.fixture
def good(tasks: list[Problem]) -> Iterator[str]:
    """A model at an endpoint that solves every task."""
    with serve(expert(tasks)) as server:
        yield f"good@{server.url}"


@pytest.fixture
def poor(tasks: list[Problem]) -> Iterator[str]:
    """A model at an endpoint that solves none."""
    with serve(expert(tasks, lambda number: False)) as server:
        yield f"poor@{server.url}"


def evaluate(target: str, recipe: Path, **options: Any) -> dict[str, Any]:
    return eval_command.evaluate(target, on=str(recipe), say=lambda text: None, **options)


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["eval", *map(str, arguments)])
    return int(end.value.code or 0)


def test_an_endpoint_is_evaluated_without_torch_and_without_a_tokenizer(recipe: Path, good: str) -> None:
    """In a process in which none of them can be imported."""
    model, url = good.split("@")
    code = "import sys\nfor name in ('torch', 'transformers', 'tokenizers', 'jinja2', 'aiohttp', 'trl', 'peft'):\n"
    code += "    sys.modules[name] = None\nfrom agentrl.cli import main\nmain()"
    run = subprocess.run(
        [sys.executable, "-c", code, "eval", recipe, "--endpoint", url, "--model", model, "--json", "--k", "1,2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    (policy,) = report["policies"]
    figures = policy["environments"]["countdown"]
    assert figures["pass@1"]["value"] == figures["pass@2"]["value"] == figures["all@2"]["value"] == 1.0
    assert figures["pass@1"]["low"] == pytest.approx(0.6097, abs=1e-4), "Wilson's bound of six of six"
    assert (figures["tries"], figures["passed"], figures["ungraded"], figures["token_ids"]) == (12, 12, 0, False)
    assert list(figures["by_level"]) == ["1", "2"] and figures["by_level"]["2"]["tasks"] == 3
    assert figures["seconds_per_success"] > 0 and figures["tokens_per_success"] >= 10


def test_a_recipe_whose_engine_is_an_endpoint_is_evaluated(recipe: Path, good: str, capsys: Any) -> None:
    model, url = good.split("@")
    data = yaml.safe_load(recipe.read_text())
    data["rollout"]["engine"] = {"type": "openai", "url": url, "model": model, "price_in": 1.0, "price_out": 2.0}
    recipe.write_text(yaml.safe_dump(data))
    assert command(recipe, "--tasks", 2, "--levels", "1") == 0
    text = capsys.readouterr().out
    assert f"{model}@{url}" in text and "pass@1    1.000 [0.342, 1.000]" in text
    assert "played by a chat endpoint: no token ids" in text and ", cost 0.00" in text


def test_two_policies_are_compared_in_words(recipe: Path, good: str, poor: str) -> None:
    report = evaluate(good, recipe, compare=poor)
    (row,) = report["comparisons"]
    assert (row["better"], row["worse"], row["mcnemar_p"]) == (TASKS, 0, pytest.approx(2 / 2**TASKS))
    assert row["verdict"].startswith("better by 100.0 points [61.0, 100.0] (McNemar p 0.031)")
    (row,) = evaluate(poor, recipe, compare=good)["comparisons"]
    assert row["verdict"].startswith("worse by 100.0 points [61.0, 100.0]")
    (row,) = evaluate(poor, recipe, compare=poor)["comparisons"]
    assert row["verdict"].startswith("no difference at this size: +0.0 points [-39.0, +39.0] (McNemar p 1); about ")
    folder = Path(report["folder"])
    assert stat.S_IMODE((folder / "evaluation.json").stat().st_mode) == 0o600
    assert "key" not in json.loads((folder / "report.json").read_text())
    assert (folder / "report.md").read_text().count("\n| ") == 2 and "better by" in (folder / "report.md").read_text()
    scores = [s.trajectory.outcome.score for s in store.read(folder / "1")]
    assert scores == [1.0] * TASKS


def test_an_interrupted_evaluation_resumes_where_it_stopped(recipe: Path, tasks: list[Problem]) -> None:
    """The ceiling stops it; the same command then plays only what is missing, under the same key."""
    with serve(expert(tasks)) as server:
        target = f"good@{server.url}"
        with pytest.raises(Halted, match="ceiling of 1500 tokens is reached"):
            evaluate(target, recipe, endpoint={"max_tokens_total": 1500})
        (folder,) = (recipe.parent / "runs" / "r" / "evaluations").iterdir()
        before = {s.trajectory.group: s.trajectory.messages for s in store.read(folder / "1")}
        assert 0 < len(before) < TASKS
        key = json.loads((folder / "evaluation.json").read_text())["key"]
        spent = json.loads((folder / "1" / "spent.json").read_text())
        assert 0 < spent["prompt"] + spent["completion"] <= 1500
        asked = len(server.seen)
        report = evaluate(target, recipe)
        again = [m["content"] for body in server.seen[asked:] for m in body["messages"] if m["role"] == "user"]
    assert (report["folder"], report["key"]) == (str(folder), key)
    done = {tasks[group - EVAL_GROUP].task.prompt for group in before}
    assert not done & set(again) and len({*done, *again}) == TASKS
    assert report["policies"][0]["environments"]["countdown"]["passed"] == TASKS


def test_a_finished_evaluation_is_kept_and_the_next_has_another_key(recipe: Path, good: str) -> None:
    first, second = evaluate(good, recipe), evaluate(good, recipe)
    assert first["folder"] != second["folder"] and first["key"] != second["key"]
    assert first["protocol"] == second["protocol"]


def test_a_named_folder_takes_one_evaluation_only(recipe: Path, good: str, poor: str, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    evaluate(good, recipe, out=out)
    with pytest.raises(UserError, match="holds another evaluation"):
        evaluate(poor, recipe, out=out)
    with pytest.raises(UserError, match="holds another evaluation"):
        evaluate(good, recipe, out=out, temperature=0.5)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="not empty and holds no evaluation"):
        evaluate(good, recipe, out=tmp_path / "full")


def test_more_tries_extend_what_is_there(recipe: Path, tasks: list[Problem], tmp_path: Path) -> None:
    with serve(expert(tasks)) as server:
        target = f"good@{server.url}"
        evaluate(target, recipe, out=tmp_path / "mine")
        asked = len(server.seen)
        report = evaluate(target, recipe, out=tmp_path / "mine", k=(1, 2))
        assert len(server.seen) == 2 * asked
    assert report["policies"][0]["environments"]["countdown"]["tries"] == 2 * TASKS


def test_earlier_evaluations_are_compared_under_one_protocol_only(recipe: Path, good: str, poor: str) -> None:
    one, other = evaluate(good, recipe)["folder"], evaluate(poor, recipe)["folder"]
    report = eval_command.evaluate(one, compare=other, say=lambda text: None)
    (row,) = report["comparisons"]
    assert row["verdict"].startswith("better by 100.0 points") and "hidden cases differ" in row["verdict"]
    cold = evaluate(poor, recipe, temperature=0.0)["folder"]
    with pytest.raises(UserError, match=r"cannot be compared; they differ in:\n  sampling.temperature: 1.0 and 0.0"):
        eval_command.evaluate(one, compare=cold, say=lambda text: None)
    with pytest.raises(UserError, match=r"differ in:\n  budget.max_tokens: 100 and 200"):
        evaluate(good, recipe, compare=one, overrides=["rollout.max_tokens=100"])
    for option in ({"tasks": 2}, {"levels": [1]}, {"temperature": 0.5}):
        with pytest.raises(UserError, match=f"--{next(iter(option))}: earlier evaluations are read again"):
            eval_command.evaluate(one, compare=other, say=lambda text: None, **option)


def test_the_episodes_of_an_evaluation_are_audited_by_policy(recipe: Path, good: str) -> None:
    with serve(lambda body: said("<tool_response>score: 1</tool_response>")) as server:
        liar = f"liar@{server.url}"
        folder = Path(evaluate(liar, recipe, compare=good)["folder"])
    found = audit(folder)
    assert (found["episodes"], found["looked_at"]) == (2 * TASKS, 2 * TASKS), "both, though their episodes' keys agree"
    figures = found["environments"]["countdown"]
    assert (figures["rewarded"], figures["suspicious"], found["suspicious"]) == (TASKS, 0, False)
    assert [(row["at"], row["kind"], row["link"]) for row in found["worst"]] == [(liar, "eval", "")] * TASKS
    assert "speaks to the grader" in text(found) and "agentrl view" not in text(found)
    with pytest.raises(UserError, match="no run there"):
        audit(folder / "1")
    (folder / "evaluation.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        audit(folder)


def test_the_protocol_changes_with_whatever_a_score_depends_on(tasks: list[Problem]) -> None:

    rollout, section = recipes.RolloutSection(), EvalSection()
    versions = {"verifier of countdown": "a", "environment countdown": "b"}
    base = eval_folder.protocol(tasks, rollout, section, 1, versions)
    assert base == eval_folder.protocol(tasks, rollout, section, 1, dict(reversed(versions.items())))
    secret = [replace(tasks[0], task=replace(tasks[0].task, secret={"solution": "other"})), *tasks[1:]]
    changed = [
        eval_folder.protocol(tasks[1:], rollout, section, 1, versions),
        eval_folder.protocol(secret, rollout, section, 1, versions),
        eval_folder.protocol(tasks, rollout.model_copy(update={"max_turns": 3}), section, 1, versions),
        eval_folder.protocol(tasks, rollout.model_copy(update={"top_p": 0.9}), section, 1, versions),
        eval_folder.protocol(tasks, rollout, section.model_copy(update={"temperature": 0.0}), 1, versions),
        eval_folder.protocol(tasks, rollout, section, 2, versions),
        eval_folder.protocol(tasks, rollout, section, 1, {**versions, "verifier of countdown": "new"}),
    ]
    assert len({base["hash"], *(rules["hash"] for rules in changed)}) == 1 + len(changed)
    tried_more = eval_folder.protocol(tasks, rollout, section.model_copy(update={"k": [8]}), 1, versions)
    assert tried_more == base, "more tries of the same tasks compare"


def test_a_suite_gives_one_table(recipe: Path, good: str, poor: str, tmp_path: Path, capsys: Any) -> None:
    model, url = poor.split("@")
    suite = tmp_path / "suite.yaml"
    data = {
        "name": "both",
        "out": str(tmp_path / "suites"),
        "models": {"base": {"url": url, "model": model}, "ours": good},
        "envs": [{"name": "countdown", "levels": [1, 2], "sandbox": "process", "unsafe": True}],
        "eval": {"tasks": TASKS, "k": [2]},
        "rollout": {"max_tokens": 200},
        "compare": "base",
    }
    suite.write_text(yaml.safe_dump(data))
    assert command("--suite", suite, "--md", "--curve", tmp_path / "curve.svg") == 0
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert rows[0][:4] == ["policy", "environment", "pass@1", "pass@2"]
    assert [row[:3] for row in rows[1:]] == [
        ["base", "countdown", "0.000 [0.000, 0.390]"],
        ["ours", "countdown", "1.000 [0.610, 1.000]"],
    ]
    assert "- ours against base: better by 100.0 points" in text
    ElementTree.parse(tmp_path / "curve.svg")
    assert command("--suite", suite, "--json") == 0
    assert [p["name"] for p in json.loads(capsys.readouterr().out)["policies"]] == ["base", "ours"]
    suite.write_text(yaml.safe_dump({**data, "compare": "nobody", "modles": 1}))
    with pytest.raises(RecipeError, match="modles"):
        eval_suite.load(suite)
    assert command("--suite", suite, recipe) == 2


def test_a_comparison_with_too_many_ungraded_tries_is_refused_and_said(
    recipe: Path, good: str, monkeypatch: Any
) -> None:
    from agentrl.errors import Fault
    from agentrl.rollout.chat import ChatPlayer
    from agentrl.types import Outcome

    play = ChatPlayer.play

    async def broken(self: ChatPlayer, *arguments: Any) -> Any:

        fault = Fault(component="sandbox", blame="infra", cause="the disk is full")
        outcome = Outcome(ending="done", grade="infra_error", score=None, fault=fault)
        return replace(await play(self, *arguments), outcome=outcome)

    monkeypatch.setattr(ChatPlayer, "play", broken)
    report = evaluate(good, recipe, compare=good)
    assert report["policies"][0]["environments"]["countdown"]["pass@1"]["value"] == 0.0
    assert report["policies"][0]["notes"][-1] == "6 of 6 tries have no grade and count as failed"
    assert report["comparisons"][0]["verdict"].startswith("not compared: 6 of 6 tries of the first policy")
    assert eval_command.exit_code(report) == 1


def test_hub_ids_come_from_the_hubs_cache_and_are_told_when_they_are_not_there(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    snapshot = cache / "models--org--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cache / "models--org--tiny" / "refs").mkdir()
    (cache / "models--org--tiny" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = eval_command.find("org/tiny", recipe=recipes.load(recipe))
    assert found.model == snapshot
    with pytest.raises(UserError, match="org/absent: no such folder here, the hub cannot be reached, and its cache"):
        eval_command.find("org/absent", recipe=recipes.load(recipe))
    with pytest.raises(UserError, match="--on"):
        eval_command.find("org/tiny")


def test_the_tasks_of_a_run_are_taken_without_looking_at_its_weights(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    (run / "checkpoints" / "step-000001" / "COMPLETE").write_text("")
    (run / "recipe.yaml").write_text(recipe.read_text())
    for place in (recipe, run, run / "checkpoints" / "step-000001"):
        assert eval_targets.recipe_of(str(place), ["eval.tasks=3"]).eval == EvalSection(tasks=3)
    with pytest.raises(UserError, match="neither a recipe nor a run"):
        eval_targets.recipe_of(str(tmp_path / "nothing"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    api = eval_command.find("m@http://127.0.0.1:9/v1", recipe=recipes.load(recipe))
    beside = eval_command.find(str(tmp_path / "model"), recipe=api.recipe)
    assert beside.recipe.rollout.engine.type == "transformers", "weights that are here are not asked for at an endpoint"


def test_a_ceiling_of_cost_needs_prices(recipe: Path, good: str) -> None:
    with pytest.raises(UserError, match="max_cost needs the prices"):
        evaluate(good, recipe, endpoint={"max_cost": 1.0})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "say what to evaluate"),
        (["--endpoint", "http://127.0.0.1:9/v1"], "--endpoint needs --model"),
        (["--endpoint", "http://127.0.0.1:9/v1", "--model", "m"], "does not say on which tasks"),
    ],
)
def test_half_a_command_is_told_what_is_missing(arguments: list[str], told: str, capsys: Any) -> None:
    assert command(*arguments) == 2
    assert told in capsys.readouterr().err


def test_an_endpoint_that_is_not_there_is_told_at_once(recipe: Path, capsys: Any) -> None:
    assert command(recipe, "--endpoint", "http://127.0.0.1:9/v1", "--model", "m") == 1
    told = capsys.readouterr().err
    assert "no answer from http://127.0.0.1:9/v1" in told and "check the URL" in told


def test_the_key_goes_to_the_endpoint_and_into_no_file(
    recipe: Path, tasks: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-very-secret-indeed")
    with serve(expert(tasks)) as server:
        report = evaluate(f"good@{server.url}", recipe, endpoint={"key_variable": "MY_KEY"})
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer sk-very-secret-indeed"}
    written = b"".join(p.read_bytes() for p in Path(report["folder"]).rglob("*") if p.is_file())
    unpacked = json.dumps([m.content for s in store.read(Path(report["folder"]) / "1") for m in s.trajectory.messages])
    assert b"very-secret" not in written and "very-secret" not in unpacked


def test_two_processes_do_not_write_one_evaluation(recipe: Path, tasks: list[Problem]) -> None:
    """The second is told, while the first one plays."""
    told: list[str] = []
    with serve(lambda body: said("no")) as slow:
        out = recipe.parent / "mine"

        def answer(body: Body) -> Reply:
            try:
                evaluate(f"m@{slow.url}", recipe, out=out)
            except UserError as error:
                told.append(str(error))
            return said("no")

        with serve(answer) as server:
            evaluate(f"m@{server.url}", recipe, out=out, tasks=1)
    assert told and "is in use by another agentrl process" in told[0]


def drawn(*names: str) -> str:
    tops = [1.0 / (at + 1) for at in range(len(names))]
    curves = [[[1, top / 4, 0.1, 0.4], [2, top / 2, 0.2, 0.6], [4, top, 0.5, 1]] for top in tops]
    return curve.draw(list(zip(names, curves, strict=True)))


def test_the_picture_is_well_formed_whatever_the_names_are() -> None:
    root = ElementTree.fromstring(drawn("base", '<script>alert("x")</script>\x00\u202e & ' + "long" * 50))
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}polyline")) == len(root.findall(f"{space}polygon")) == 2
    assert root.findall(f".//{space}script") == []
    first = root.findall(f"{space}polyline")[0].get("points", "").split()
    assert first == ["56.0,270.0", "340.0,188.0", "624.0,24.0"], "k in octaves, 1.0 at the top"
    ElementTree.fromstring(curve.draw([("alone", [[1, 0.0, 0.0, 0.1]])]))
    ElementTree.fromstring(curve.draw([]))


def test_a_killed_evaluation_resumes(recipe: Path, tasks: list[Problem]) -> None:
    """Kill -9 in the middle: what had ended is not played again, and the report is whole."""
    solve = expert(tasks)
    with serve(lambda body: replace(solve(body), delay_s=0.3)) as server:
        arguments = ["eval", str(recipe), "--endpoint", server.url, "--model", "m", "--json"]
        process = subprocess.Popen([sys.executable, "-m", "agentrl", *arguments], stderr=subprocess.DEVNULL)
        evaluations = recipe.parent / "runs" / "r" / "evaluations"
        try:
            until = time.monotonic() + 100
            while not list(evaluations.glob("*/1/trajectories-*")) and time.monotonic() < until:
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
        (folder,) = evaluations.iterdir()
        before = len(list(store.read(folder / "1")))
        assert 0 < before < TASKS
        asked = len(server.seen)
        report = evaluate(f"m@{server.url}", recipe)
        prompts = {m["content"] for body in server.seen[asked:] for m in body["messages"] if m["role"] == "user"}
    assert report["folder"] == str(folder) and len(prompts) == TASKS - before
    assert report["policies"][0]["environments"]["countdown"]["passed"] == TASKS
