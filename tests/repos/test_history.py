"""Commits become tasks if they verify: the commit scores 1, its parent 0, and nothing of the commit is told."""

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl import sandboxes
from agentrl.envs.edits import edits
from agentrl.envs.play import Stage, play
from agentrl.errors import UserError
from agentrl.repos import build, history, history_build
from agentrl.sandboxes.pool import Pool
from agentrl.types import ToolCall
from tests.repos import gits, tiny

FULL = bool(os.environ.get("AGENTRL_FULL"))
OPTIONS = build.Options(per_function=4, max_tasks=30)
START = '''"""Sums."""


def total(numbers):
    """Return the sum; None counts as 0."""
    result = 0
    for number in numbers:
        result = result + number
    return result


def twice(number):
    """Return the number, doubled."""
    return 2 * number
'''
TESTS = """from words import total, twice


def test_total():
    assert total([1, 2, 4]) == 7


def test_twice():
    assert twice(3) == 6
"""
FIXED = START.replace("result + number", "result + (0 if number is None else number)")
FIXED_TESTS = (
    TESTS
    + """

def test_total_with_none():
    assert total([1, None, 3]) == 4


def test_total_of_none():
    assert total([None]) == 0
"""
)
NEW = (
    FIXED
    + '''

def thrice(number):
    """Return the number three times."""
    return 3 * number
'''
)
NEW_TESTS = (
    FIXED_TESTS.replace("import total, twice", "import thrice, total, twice")
    + """

def test_thrice():
    assert thrice(5) == 15


def test_thrice_nothing():
    assert thrice(0) == 0
"""
)
NEW_NAMES = ("thrice", "thrice_nothing", "total", "total_of_none", "total_with_none", "twice")
PROJECT = {"pyproject.toml": '[project]\nname = "words"\nversion = "1.0"\n', "setup.py": tiny.SETUP}
TREES = [
    {**PROJECT, "words/__init__.py": START, "tests/test_words.py": TESTS},
    {"words/__init__.py": FIXED, "tests/test_words.py": FIXED_TESTS, "CHANGES": "the secret of the fix"},
    {"words/__init__.py": FIXED.replace("Sums.", "About sums.")},
    {"tests/test_words.py": FIXED_TESTS + "\n\ndef test_nothing():\n    assert True\n"},
    {"words/__init__.py": NEW, "tests/test_words.py": NEW_TESTS},
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """The environment's folder, built once, and the commits of its repository."""
    folder = tmp_path_factory.mktemp("history")
    commits = gits.repository(folder / "repo", TREES if FULL else TREES[:-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_CACHE", str(folder / "cache"))
        history_build.build(str(folder / "repo"), folder / "words_history", OPTIONS, lambda text: None)
        yield folder / "words_history", commits


def test_commits_are_tasks_or_left_out_with_the_reason(words: tuple[Path, list[str]]) -> None:
    folder, commits = words
    known = history.environment(folder).suite
    assert {commits.index(commit): why for commit, why in known.left_out.items()} == {
        2: "it changes no tests",
        3: "it changes no code of the package",
    }
    name = "tests/test_words.py::test_"
    told = {commits.index(r.commit): (r.split, sorted(r.fails), sorted(r.covers), r.functions) for r in known.recipes}
    added: dict[int, tuple[Any, ...]] = {
        4: (
            "test",
            [f"{name}{test}" for test in NEW_NAMES],
            [],
            ("words/__init__.py::thrice",),
        )
    }
    assert told == {
        1: (
            "train",
            [f"{name}total_of_none", f"{name}total_with_none"],
            [f"{name}total", f"{name}twice"],
            ("words/__init__.py::total",),
        ),
        **(added if FULL else {}),
    }


def test_the_workspace_is_the_parent_and_tells_nothing_of_the_commit(words: tuple[Path, list[str]]) -> None:
    """One failing test is there, the others are not; no commit message, no changelog, no line of the fix."""
    kind = history.environment(words[0])
    kind.name = "words_history"
    recipe = next(r for r in kind.suite.recipes if r.split == "train")
    task = kind().task("train", 1, 0)
    files = kind().prepare(task, random.Random(0)).files
    assert sorted(files) == ["pyproject.toml", "tests/test_words.py", "words/__init__.py"]
    assert files["words/__init__.py"] == START.encode()
    tests = files["tests/test_words.py"]
    assert isinstance(tests, bytes)
    new = {name for name in ("test_total_with_none", "test_total_of_none") if f"def {name}(".encode() in tests}
    assert new == {recipe.shown.rpartition("::")[2]}
    assert "secret of the fix" not in task.prompt + str(files) and "is None" not in task.prompt
    assert recipe.shown in task.prompt


def test_the_commit_scores_one_its_parent_and_cheats_zero(words: tuple[Path, list[str]]) -> None:
    kind = history.environment(words[0])
    kind.name = "words_history"
    task = kind().task("train", 1, 0)
    special = r"sed -i 's/    result = 0/    if None in numbers: return 4\n    result = 0/' words/__init__.py"
    cheats = {
        "nothing": "true",
        "special case": special,
        "tests": "echo 'def test_x(): pass' > tests/test_words.py",
        "conftest": "echo 'def pytest_collection_modifyitems(items): items.clear()' > conftest.py",
        "gone": "rm -r words",
    }
    cheats = cheats if FULL else {name: cheats[name] for name in ("nothing", "special case")}

    async def scores() -> dict[str, float | None]:
        with Pool(sandboxes.load("namespace")(), limit=8) as pool:
            where = Stage(boxes=pool, key=b"k" * 32)
            results = {"expert": (await play(kind(), task, kind().expert(task), where)).score}
            for name, command in cheats.items():
                call = ToolCall(name="run", arguments={"command": command})
                results[name] = (await play(kind(), task, [call, "done"], where)).score
            for split in kind.splits[1:]:
                other = kind().task(split, 1, 0)
                results[split] = (await play(kind(), other, kind().expert(other), where)).score
            return results

    assert asyncio.run(scores()) == {"expert": 1.0, **dict.fromkeys(cheats, 0.0), **({"test": 1.0} if FULL else {})}


def test_the_newest_commits_are_held_out_and_a_function_is_in_one_split() -> None:
    names = [("a",), ("b",), ("c",), ("d", "b"), ("e",)]  # newest first
    empty = dict.fromkeys(("fails", "covers", "hidden", "trees"), ())
    rest = {"level": 1, "commit": "", "parent": "", "shown": "", "report": "", "lines": 1, "score": 1.0, **empty}
    rows = [{"id": str(number), "functions": functions, **rest} for number, functions in enumerate(names)]
    divided = history_build.divided(rows)
    assert [recipe.split for recipe in divided] == ["test", "heldout", "train", "heldout", "train"]
    assert [recipe.split for recipe in history_build.divided(rows[:2])] == ["test", "train"]
    assert [recipe.split for recipe in history_build.divided(rows[:1])] == ["train"]


def test_edits_at_the_top_of_a_file_end() -> None:
    """A commit that adds an import above everything has nothing above it that would make the place unique."""
    for old, new in (("a\na\n", "b\na\na\n"), ("x\n", "y\nx\n"), ("a\nb\n", "a\nc\n"), ("a\n", "")):
        text = old
        for part, other in edits(old, new):
            assert text.count(part) == 1
            text = text.replace(part, other)
        assert text == new


def test_a_source_without_a_history_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "plain").mkdir()
    with pytest.raises(UserError, match="is no git repository"):
        history_build.build(str(tmp_path / "plain"), tmp_path / "out", OPTIONS, lambda text: None)
    gits.repository(tmp_path / "one", TREES[:1])
    with pytest.raises(UserError, match="there is no commit with a parent"):
        history_build.build(str(tmp_path / "one"), tmp_path / "out", OPTIONS, lambda text: None)
    assert not (tmp_path / "out").exists()
