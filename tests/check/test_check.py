"""`env check` passes a sound environment, and each check finds the fault it is there for."""

import asyncio
import json
from collections.abc import Callable

import pytest

from agentrl.check import verdicts
from agentrl.check.leaks import distinctive
from agentrl.check.run import ALL, Report, Result, check
from agentrl.errors import UserError
from agentrl.types import Task

SOUND = '''\
import os, random, time
from agentrl import Environment, SandboxSpec, Task, ToolCall, Verdict, Verifier, seeds, tool
from agentrl.envs.splits import draw

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Backwards(Verifier):
    async def verify(self, submission, context):
        right = submission.task.secret["word"]
        score = 1.0 if submission.answer == right else 0.0
        return Verdict(score=score)


class Reverse(Environment):
    """Say a word backwards."""

    levels = range(1, 3)
    verifier = Backwards()

    def task(self, split, level, index):
        def make(rng):
            return "".join(rng.choice(LETTERS) for _ in range(8 * level))

        word = draw(split, level, index, env="reverse", make=make, content=str)
        return Task(
            id=f"reverse/{split}/{level}/{index}",
            split=split,
            level=level,
            prompt=f"Say {word} backwards.",
            setup={"word": word},
            secret={"word": word[::-1]},
        )

    def prepare(self, task, rng):
        return None

    @tool
    def peek(self, place: int) -> str:
        """See one letter.

        Args:
            place: its place
        """
        return self.given.setup["word"][place]

    def expert(self, task):
        return [ToolCall(name="peek", arguments={"place": 0}), task.secret["word"]]


EXPORT = Reverse
'''

FAULTS = {
    "task_contract": ('id=f"reverse/{split}/{level}/{index}"', 'id="reverse"'),
    "task_purity": ('prompt=f"Say', 'prompt=f"{random.random()} Say'),
    "splits_disjoint": (
        'draw(split, level, index, env="reverse", make=make, content=str)',
        'make(seeds.generator(0, "reverse", level, index))',
    ),
    "near_duplicates": ("rng.choice(LETTERS) for _ in range(8 * level)", 'rng.choice("ab") for _ in range(6)'),
    "seed_control": ("draw(split, level, index,", "draw(split, level, 0,"),
    "episode_determinism": ('self.given.setup["word"][place]', "str(list({self.given.id, 'a', 'b', 'c', 'd', 'e'}))"),
    "episode_isolation": (
        '        return self.given.setup["word"][place]',
        "        type(self).count = getattr(type(self), 'count', 0) + 1\n        return str(type(self).count)",
    ),
    "replayability": ('self.given.setup["word"][place]', "os.urandom(8).hex()"),
    "verifier_contract": ("return Verdict(score=score)", "return score"),
    "oracle_max": ('"place": 0}), task.secret["word"]]', '"place": 0}), "no"]'),
    "floor_gap": ("submission.answer == right", 'submission.answer == right or submission.ending == "max_turns"'),
    "canary_floor": ("submission.answer == right", 'submission.answer in (right, "yes")'),
    "reward_range": (
        "score = 1.0 if",
        'if "\\0" in submission.answer: raise RuntimeError("odd")\n        score = 1.0 if',
    ),
    "no_solution_leakage": (
        "        return None",
        "        word = self.task(task.split, task.level, int(task.id.rsplit('/')[-1])).secret['word']\n"
        '        return SandboxSpec(files={"notes/old.txt": word})',
    ),
    "bad_calls": (
        '        return self.given.setup["word"][place]',
        '        if place < 0:\n            raise RuntimeError("negative")\n        return "x"',
    ),
    "verifier_determinism": ("1.0 if submission.answer == right", "time.time_ns() % 9973 / 9973 if right"),
    "red_team": ("submission.answer == right", "right.startswith(submission.answer)"),
    "speed": (
        "        def make(rng):",
        "        sum(number * number for number in range(150_000))\n\n        def make(rng):",
    ),
}


def examined(name: str, only: list[str] | None = None, **options: object) -> Report:
    return asyncio.run(check(name, only=only, per_level=2, **options))  # type: ignore[arg-type]


def test_a_sound_environment_passes(member: Callable[[str, str], str]) -> None:
    told: list[Result] = []
    name = member("sound_reverse", SOUND)
    report = asyncio.run(check(name, progress=told.append))
    assert [(result.name, result.evidence) for result in report.results if not result.ok] == []
    assert [result.name for result in told] == list(ALL)
    found = json.loads(report.json())
    assert (found["ok"], found["env"], found["levels"]) == (True, name, [1, 2])
    assert set(found["results"][0]) == {"name", "ok", "evidence", "fix", "seconds"}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found(name: str, member: Callable[[str, str], str]) -> None:
    old, new = FAULTS[name]
    assert SOUND.count(old) == 1
    report = examined(member(f"bad_{name}", SOUND.replace(old, new)), [name])
    (result,) = report.results
    assert (result.name, result.ok, report.ok) == (name, False, False)
    assert result.evidence and result.fix


def test_an_environment_that_looks_at_the_date_is_found(member: Callable[[str, str], str]) -> None:
    dated = SOUND.replace("import os,", "import datetime, os,").replace(
        'return self.given.setup["word"][place]', "return str(datetime.date.today())"
    )
    (result,) = examined(member("dated", dated), ["episode_determinism"]).results
    assert not result.ok
    assert "played in another process on another day: talk differ" in result.evidence


def test_a_secret_that_episodes_get_to_see_is_found(
    member: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Task, "public", lambda task: task)
    (result,) = examined(member("leaky_public", SOUND), ["oracle_containment"]).results
    assert not result.ok
    assert result.evidence.endswith("a value of the secret reaches the task as episodes get it")


def test_names_of_the_secrets_parts_are_no_secret() -> None:
    task = Task(
        id="t", split="train", level=1, prompt="p", secret={"modules": {"months.py": "return a + b"}, "n": 4711}
    )
    assert distinctive(task) == ("months.py", "return a + b")


def test_a_sandbox_that_isolates_nothing_is_found() -> None:
    (result,) = asyncio.run(check("files", levels=[1], sandbox="process", only=["sealed_root"])).results
    assert not result.ok
    assert "agentrl can be read inside" in result.evidence


def test_a_tool_that_holds_an_episode_is_found(
    member: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "CUT_OFF_S", 0.2)
    (result,) = examined(member("held", SOUND), ["timeouts"]).results
    assert not result.ok
    assert "a tool with timeout_s=0.3 held the episode for" in result.evidence


def test_a_long_verdict_is_not_a_held_episode(
    member: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden tests of a real package take seconds; the check of tools is not about them."""
    monkeypatch.setattr(verdicts, "CUT_OFF_S", 4.0)
    verdict = "        right = submission.task.secret"
    slow = SOUND.replace(verdict, f"        time.sleep(4.1)\n{verdict}").replace(
        "return None", "return SandboxSpec()", 1
    )
    (result,) = examined(member("slow_verdict", slow), ["timeouts"]).results
    assert result.ok, result.evidence


def test_every_check_is_known_to_fail() -> None:
    """Each has an environment above, or beside, that it turns down."""
    beside = {"oracle_containment", "sealed_root", "timeouts"}
    assert {*FAULTS, *beside} == set(ALL)


def test_a_missing_expert_is_said(member: Callable[[str, str], str]) -> None:
    name = member("no_expert", SOUND.replace("def expert(", "def other("))
    (result,) = examined(name, ["oracle_max"]).results
    assert (result.ok, result.evidence) == (False, "expert(task) is not written")


def test_an_exception_is_a_finding_with_its_place(member: Callable[[str, str], str]) -> None:
    name = member("raises", SOUND.replace("        def make(rng):", "        1 / 0\n\n        def make(rng):"))
    (result,) = examined(name, ["task_contract"]).results
    assert not result.ok
    assert (
        result.evidence.startswith("ZeroDivisionError: division by zero (") and "raises/__init__.py:" in result.evidence
    )


def test_wrong_names_and_levels_are_refused() -> None:
    with pytest.raises(UserError, match="no check nonsense; there are: task_contract"):
        examined("countdown", ["nonsense"])
    with pytest.raises(UserError, match=r"countdown has the levels 1 to 6, not \[9\]"):
        examined("countdown", levels=[9])


def test_the_fields_names_are_there() -> None:
    wanted = "seed_control episode_determinism episode_isolation oracle_containment oracle_max floor_gap canary_floor "
    wanted += "no_solution_leakage verifier_determinism replayability"
    assert set(wanted.split()) <= set(ALL)
