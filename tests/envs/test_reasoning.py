"""Reasoning: only scorers that hold, right answers that count, and a clear word where the package is missing."""

import asyncio
import decimal
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs import load
from agentrl.envs.play import Stage, play
from agentrl.envs.reasoning import datasets
from agentrl.envs.reasoning.datasets import allowed, entry, knob
from agentrl.envs.reasoning.scorers import CHOSEN, OURS, Reasoned, full_marks
from agentrl.errors import AuthoringError, CatalogueError
from agentrl.types import SPLITS, Task, ToolCall
from agentrl.verifiers.base import Context, Submission
from benchmarks.reasoning_vet import RARE, TOO_SLOW, attacks, vet

Reasoning = load("reasoning")
FIT = sorted(name for name, found in allowed().items() if "refused" not in found)
MIX = sorted(name for name in FIT if allowed()[name]["mix"])
EXECUTES = {
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
}  # fmt: skip
NOTHING: Any = None


def score(task: Task, answer: str) -> float:
    context = Context(secret=b"s", boxes=NOTHING)
    return float(asyncio.run(Reasoned().verify(Submission(task=task, answer=answer), context)).score)


def gold(task: Task) -> str:
    return str(task.secret["gold"])


def given(scorer: str, answer: str, **secret: Any) -> Task:
    secret = {"scorer": scorer, "gold": answer, **secret}
    return Task(id="x", split="train", level=1, prompt="", secret=secret)


def test_no_scorer_that_executes_the_answer_is_ever_called() -> None:
    used = {name for name in FIT if allowed()[name]["scorer"] == "package"}
    assert not used & EXECUTES
    code = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")
    from reasoning_gym.factory import DATASETS

    runs = {name for name in DATASETS if code.search(inspect.getsource(DATASETS[name][0].score_answer))}
    assert runs == EXECUTES | {"number_sorting"}  # which runs eval on its own answer only; it gets a scorer of ours
    assert not used & runs


def test_the_list_names_every_dataset_and_a_scorer_or_a_reason() -> None:
    from reasoning_gym.factory import DATASETS

    assert sorted(allowed()) == sorted(set(DATASETS) - {"composite"})
    for name, found in allowed().items():
        if "refused" in found:
            assert name not in CHOSEN and set(found) == {"refused"}
        else:
            assert found["scorer"] == CHOSEN.get(name, found["scorer"]) and found["scorer"] in {*OURS, "package"}
            assert 1 <= found["levels"] <= 5 and isinstance(found["mix"], bool)


def test_examining_again_gives_the_same_list() -> None:
    """A few of each kind here; all of them with AGENTRL_FULL=1 (some minutes)."""
    some = ["ab", "complex_arithmetic", "string_insertion"]
    everything = [name for name, found in allowed().items() if found.get("refused") != TOO_SLOW]  # not worth the wait
    names = everything if os.environ.get("AGENTRL_FULL") else some
    found = vet(names, allowed())
    fit = [name for name in names if "refused" not in allowed()[name]]
    assert {name: found[name] for name in fit} == {name: allowed()[name] for name in fit}
    # Why one is refused may depend on how many levels were tried, hence on the machine, and what shows only in many
    # entries may not show on a slow one.
    passed = [name for name in names if "refused" not in found[name] and name not in fit]
    assert [name for name in passed if allowed()[name]["refused"] not in RARE] == []


@pytest.mark.parametrize("name", FIT if os.environ.get("AGENTRL_FULL") else sorted({*MIX, *CHOSEN, "gsm_symbolic"}))
def test_right_answers_count_and_attacks_do_not(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what an executed payload would write
    environment = Reasoning(datasets=[name])
    first, second = environment.task("train", 1, 0), environment.task("train", 1, 1)
    wrong = gold(second) if gold(second) != gold(first) else "wrong"
    assert score(first, gold(first)) == 1.0
    tried = [text for _, text in attacks(gold(first), wrong, first.prompt) if text.strip() != gold(first).strip()]
    assert [text[:80] for text in tried if score(first, text) != 0.0] == []
    assert list(tmp_path.iterdir()) == []


def test_levels_splits_and_purity() -> None:
    environment = Reasoning()
    homes: dict[str, str] = {}
    for split in SPLITS:
        for level in (1, 5):
            for index in range(len(MIX)):
                task = environment.task(split, level, index)
                assert homes.setdefault(task.prompt, split) == split
                assert task.tags == (MIX[index],) and task.setup == {}
    again = Reasoning()
    for index in (17, 3):
        assert again.task("heldout", 5, index) == environment.task("heldout", 5, index)
    turned = Counter(knob(name, 5) for name in MIX)
    assert turned[5] > len(MIX) // 2


def test_an_episode_ends_with_the_answer(where: Stage) -> None:
    environment = Reasoning()
    task = environment.task("train", 1, 2)
    twice = ToolCall(name="submit", arguments={"answer": f"{gold(task)} {gold(task)}x"})
    scripts: list[Any] = [environment.expert(task), [gold(task)], [twice], [f"The answer is {gold(task)}"]]
    assert [asyncio.run(play(Reasoning(), task, script, where)).score for script in scripts] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "right"),
    [("x**2/2 + C", 1.0), ("C + 0.5*x*x", 1.0), ("x**2/2", 0.0), ("x**2/2 + C + 1", 0.0), ("integrate(x)", 0.0)],
)
def test_integrals_keep_their_constant(answer: str, right: float) -> None:
    assert score(given("integral", "x**2/2 + C"), answer) == right


def test_24_must_be_made_of_the_given_numbers() -> None:
    """The package's own scorer takes any four numbers in range."""
    number = 7
    found = entry("puzzle24", 1, number)
    task = given("make 24", found["answer"], dataset="puzzle24", number=number)
    digits = "+".join(str(n) for n in found["metadata"]["numbers"])
    for cheat in ("6*4*1*1", "24", "6*4+1-1", digits, f"{found['answer']} + 0", "8*3*1**1"):
        if sorted(map(int, re.findall(r"\d+", cheat))) != sorted(found["metadata"]["numbers"]) or cheat == digits:
            assert score(task, cheat) == float(cheat == digits and sum(found["metadata"]["numbers"]) == 24)
    assert score(task, found["answer"]) == 1.0


def test_letters_are_mapped_once() -> None:
    """The package lets the last of two values for a letter win."""
    task = Reasoning(datasets=["cryptarithm"]).task("train", 1, 0)
    letter, digit = gold(task)[0], gold(task)[2]
    other = f"{letter}={(int(digit) + 1) % 10}"
    assert score(task, gold(task)) == 1.0
    assert [score(task, f"{other},{gold(task)}"), score(task, f"{gold(task)},{gold(task)}")] == [0.0, 0.0]
    assert full_marks(
        datasets.dataset("cryptarithm", 1).score_answer,
        f"{other},{gold(task)}",
        entry("cryptarithm", 1, task.secret["number"]),
    )  # the reason for a scorer of ours


def test_one_generator_does_not_change_another() -> None:
    """decimal_arithmetic sets the precision of the thread's decimal context."""
    before = entry("decimal_chain_sum", 5, 11)
    prec = decimal.getcontext().prec
    entry("decimal_arithmetic", 1, 3)
    assert (decimal.getcontext().prec, entry("decimal_chain_sum", 5, 11)) == (prec, before)


def test_full_marks_alone_count_and_only_for_plain_text() -> None:
    one = {"answer": "3"}
    table: list[tuple[Any, str, bool]] = [
        (1.0, "3", True), (1, "3", True), (0.99, "3", False), (float("nan"), "3", False), (2.0, "3", False),
        (None, "3", False), (1.0, "٣", False), (1.0, "", False), (1.0, "3\u200b", False), (1.0, "9" * 5000, False),
    ]  # fmt: skip
    assert [full_marks(lambda a, e, r=result: r, text, one) for result, text, _ in table] == [r for *_, r in table]

    def trips(answer: str, given: dict[str, Any]) -> float:
        raise RecursionError

    assert full_marks(trips, "3", one) is False


def test_names_that_do_not_work_are_told() -> None:
    with pytest.raises(AuthoringError, match="no dataset 'chess'; there are: ab, "):
        Reasoning(datasets=["chess"])
    with pytest.raises(AuthoringError, match="n_queens cannot be trained on: its scorer runs eval"):
        Reasoning(datasets=["n_queens"])


def test_without_the_package_it_imports_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    order = "import sys; sys.modules['reasoning_gym'] = None; from agentrl import envs; print(envs.load('reasoning'))"
    done = subprocess.run([sys.executable, "-c", order], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "<class 'agentrl.envs.reasoning.Reasoning'>"

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(datasets.metadata, "version", missing)
    with pytest.raises(CatalogueError, match=r"needs reasoning-gym 0.1.25, found none: pip install 'agentrl\[reason"):
        Reasoning()
    monkeypatch.setattr(datasets.metadata, "version", lambda name: "0.2.0")
    with pytest.raises(CatalogueError, match="found 0.2.0"):
        Reasoning()
