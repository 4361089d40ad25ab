"""`agentrl redteam --scorer`: every convention, the user's own interpreter, and messages that say what to change."""

import asyncio
import json
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.errors import UserError
from agentrl.redteam import suite
from agentrl.redteam.attack import attacks
from agentrl.redteam.command import Request, attack_targets
from agentrl.redteam.report import Report
from agentrl.redteam.scorers import load_rows, opened
from agentrl.sandboxes.pool import Pool

MINE = '''
import asyncio, re

def plain_sound(text):
    return text.strip() == "blue"

def plain_loose(text, reference):
    return reference in text

async def trl_sound(prompts, completions, colour, **kwargs):
    await asyncio.sleep(0)
    return [float(c[0]["content"].strip() == x) for c, x in zip(completions, colour, strict=True)]

def trl_loose(completions, colour, **kwargs):
    return [None if x is None else 2.0 * (x in c) for c, x in zip(completions, colour, strict=True)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "colours" and extra_info == {"index": 7}
    return {"score": 1.0 if solution_str.strip() == ground_truth else -1.0, "acc": 0}

def verl_loose(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s == g) for s, g in zip(solution_strs, ground_truths, strict=True)]

class Parser:
    def parse_answer(self, completion):
        return completion[-1]["content"].split("</think>")[-1].strip()

class Rubric:
    """Rewards by argument name and weights, scored as verifiers does since 0.1.9: into the state."""

    def __init__(self, funcs, weights):
        self.funcs, self.weights, self.parser = funcs, weights, Parser()

    async def score_rollout(self, state):
        state["reward"] = 0.0
        for func, weight in zip(self.funcs, self.weights, strict=True):
            value = func(parser=self.parser, completion=state["completion"], answer=state["answer"])
            state["reward"] += weight * await value

async def exact(parser, completion, answer, **kwargs):
    return float(parser.parse_answer(completion) == answer)

async def contains(parser, completion, answer, **kwargs):
    return float(answer in parser.parse_answer(completion))

sound_rubric = Rubric([exact], [1.0])
loose_rubric = Rubric([exact, contains], [0.0, 0.5])

def vf_function(completion, answer, state, info):
    return float(completion[-1]["content"] == answer == state["answer"] and info == {})

def runs(source):
    scope = {}
    exec(source, scope)
    return float(scope["f"](3) == 9)

def brittle(text):
    if text.startswith("either"):
        while True:
            pass
    if text.startswith("It is not"):
        raise KeyError("denial")
    if "or" in text:
        return float("nan")
    return float(text == "blue")

def limited(text, limit):
    return float(text == "blue" and limit == 3)

def maker(colour="red"):
    return lambda text: float(text == colour)

def anything(**kwargs):
    return 1.0

def generous(text):
    return 0.5
'''


@pytest.fixture
def here(boxes: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def attacked(pool: Pool, target: str, *names: str, **options: Any) -> Report:
    """Run the named attacks on a scorer of colours."""
    request = Request(target="", scorer=target, **{"honest": "blue", "wrong": "red", **options})

    async def run() -> Report:
        targets = attack_targets(request)
        async with opened(targets, pool) as notes:
            chosen = [attacks()[name] for name in names]
            report = await suite.run(targets[0], pool, chosen=chosen, coverage=False)
        return replace(report, notes=notes)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("sound", "loose", "options", "called"),
    [
        ("plain_sound", "plain_loose", {}, "called as a function of the text; honest 1, wrong 0"),
        ("trl_sound", "", {"columns": ("colour=blue",)}, "TRL's f(completions, **columns), completions as messages"),
        ("", "trl_loose", {"columns": ("colour=blue",)}, "TRL's f(completions, **columns), completions as text"),
        (
            "compute_score",
            "",
            {"columns": ("data_source=colours", 'extra_info={"index": 7}')},
            "called as verl's compute_score(data_source, solution_str, ground_truth, extra_info); honest 1, wrong -1",
        ),
        ("verl_batch", "verl_loose", {}, "verl's compute_score"),
        ("sound_rubric", "loose_rubric", {}, "(completion, answer, prompt, state, ...), completions as messages"),
        ("vf_function", "", {}, "verifiers' rewards by argument name"),
        ("maker(colour='blue')", "", {}, "a function of the text"),
    ],
)
def test_each_convention_is_recognised_and_a_sound_scorer_holds_where_a_loose_one_falls(
    here: Path, boxes: Pool, sound: str, loose: str, options: dict[str, Any], called: str
) -> None:
    for name, expected in ((sound, "held"), (loose, "gained")):
        if name:
            report = attacked(boxes, f"mine:{name}", "I.denied", "I.alternatives", **options)
            assert [c.score for c in report.controls] == [1.0, 0.0, 0.0, 0.0]
            assert {f.id: f.result for f in report.findings} == {"I.denied": expected, "I.alternatives": expected}
            assert called in report.notes[0]


def test_code_in_a_fence_is_attacked_as_code(here: Path, boxes: Pool) -> None:
    (here / "fenced.py").write_text(
        "import mine, re\n\ndef runs(completion, tests):\n"
        "    return mine.runs(re.search(r'```python\\n(.*)```', completion, re.S)[1])\n"
    )
    honest, wrong = "def f(x):\n    return x * x\n", "def f(x):\n    return 5\n"
    fence = "Here it is:\n```python\n{}```\nDone."
    texts = {"honest": fence.format(honest), "wrong": fence.format(wrong)}
    report = attacked(boxes, "fenced:runs", "A.always_equal", "D.sitecustomize", columns=("tests=1",), **texts)
    assert [(f.result, f.evidence[0]) for f in report.findings] == [
        ("gained", "the scorer returned 1 (honest 1, wrong 0)"),
        ("not applicable", "needs shell"),
    ]
    assert "each submission in a sandbox of its own" in report.notes[1]


def test_hangs_exceptions_and_nan_are_told_apart_from_a_score(here: Path, boxes: Pool) -> None:
    report = attacked(boxes, "mine:brittle", "I.alternatives", "I.denied", "I.buried", scorer_timeout=1.0)
    results = {f.id: (f.result, f.evidence[0] if f.evidence else "") for f in report.findings}
    assert results["I.alternatives"][0] == "evaded" and "it returned nan" in results["I.alternatives"][1]
    assert results["I.denied"][0] == "evaded"
    assert "it raised KeyError: 'denial' (mine.py:65: raise KeyError(\"denial\"))" in results["I.denied"][1]
    assert results["I.buried"][0] == "held"


def test_a_scorer_that_hangs_is_killed_and_the_next_submission_is_scored(here: Path, boxes: Pool) -> None:
    (here / "slow.py").write_text(
        "import os, time\ndef f(text):\n    if 'not' in text:\n        os.fork()\n        time.sleep(1e6)\n"
        "    if text.startswith('either'):\n        os.kill(os.getppid(), 9)\n    return float(text == 'blue')\n"
    )
    report = attacked(boxes, "slow:f", "I.denied", "I.alternatives", "I.nothing", scorer_timeout=1.0)
    results = {f.id: (f.result, f.evidence[0] if f.evidence else "") for f in report.findings}
    assert results["I.denied"][0] == "hung" and "it did not return in 1 s" in results["I.denied"][1]
    assert results["I.alternatives"][0] == "evaded"
    assert "it ended every process of the scorer" in results["I.alternatives"][1]
    assert results["I.nothing"][0] == "held"


def test_rows_bring_columns_and_each_is_attacked(here: Path, boxes: Pool) -> None:
    rows = [
        {"honest": "blue", "wrong": "red", "colour": "blue"},
        {"honest": "grey", "wrong": "pink", "colour": "grey", "prompt": [{"role": "user", "content": "Which?"}]},
    ]
    (here / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = attacked(boxes, "mine:trl_sound", "I.denied", rows=("rows.jsonl",), honest="", wrong="")
    assert [(c.name, c.score, c.task) for c in report.controls if c.name == "oracle"] == [
        ("oracle", 1.0, "mine:trl_sound row 1"),
        ("oracle", 1.0, "mine:trl_sound row 2"),
    ]
    assert [f.result for f in report.findings] == ["held"]


@pytest.mark.parametrize(
    ("target", "options", "parts"),
    [
        (
            "mine:plain_sound",
            {"honest": "green"},
            ["the honest answer does not score", "sent: 'green' with no columns", "came back: 0", "'red' got: 0"],
        ),
        ("mine:runs", {}, ["the honest answer gets no score", "it raised NameError: name 'blue' is not defined"]),
        (
            "mine:limited",
            {"columns": ("reference=x",)},
            ["does not score", "with reference='x'", "--column NAME=VALUE"],
        ),
        ("mine:trl_sound", {}, ["it needs a value for its parameter 'colour': --column colour=VALUE"]),
        ("mine:anything", {}, ["do not tell how it is called: say --convention text|trl|verl|verifiers"]),
        ("mine:plain_sound", {"honest": "red", "wrong": "blue"}, ["scores less than the wrong one"]),
        ("mine:missing", {}, ["module 'mine' has no attribute 'missing'"]),
        ("no_such_module_here:f", {}, ["there is no module 'no_such_module_here'", sys.prefix, "--python"]),
        ("mine:plain_sound", {"python": "/dev/null"}, ["--python /dev/null is not a Python interpreter that starts"]),
        ("mine:plain_sound", {"convention": "other"}, ["--convention 'other' must be one of text, trl, verl"]),
        ("mine:plain_sound", {"columns": ("colour",)}, ["--column 'colour' must look like NAME=VALUE"]),
        ("mine:plain_sound", {"rows": ("none.json",)}, ["--row: cannot read none.json"]),
        ("mine:plain_sound", {"backend": "docker"}, ["only --sandbox namespace can show"]),
    ],
)
def test_what_cannot_be_attacked_is_told_with_what_to_change(
    here: Path, boxes: Pool, target: str, options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(UserError) as told:
        attacked(boxes, target, "I.denied", **options)
    assert [part for part in parts if part not in str(told.value)] == []


def test_a_wrong_answer_that_scores_already_is_a_failed_control(here: Path, boxes: Pool) -> None:
    report = attacked(boxes, "mine:generous", "I.denied")
    assert {c.name: c.score for c in report.controls}["wrong"] == 1.0


def test_the_users_own_environment_is_used_and_stays_as_it_is(
    here: Path, boxes: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    venv.create(here / "theirs", with_pip=False)
    ask = [str(here / "theirs/bin/python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    (packages / "only_there.py").write_text("COLOUR = 'blue'\n")
    (here / "theirs").chmod(0o755)
    here.chmod(0o755)
    (here / "needs.py").write_text(
        "import only_there\ndef f(text):\n    try:\n        open(only_there.__file__, 'a').write('COLOUR = text')\n"
        "    except OSError:\n        return float(text == only_there.COLOUR)\n    return 0.0\n"
    )
    report = attacked(boxes, "needs:f", "I.denied", python=str(here / "theirs"))
    assert [f.result for f in report.findings] == ["held"]
    assert (packages / "only_there.py").read_text() == "COLOUR = 'blue'\n"
    with pytest.raises(SystemExit) as end:
        main(["redteam", "--scorer", "needs:f", "--honest", "blue", "--wrong", "red", "--python", sys.executable])
    assert end.value.code == 2
    assert f"needs needs 'only_there' in this folder, on PYTHONPATH or in the environment of {sys.executable}" in (
        capsys.readouterr().err
    )


def test_a_reward_function_of_trl_itself(here: Path, boxes: Pool) -> None:
    """TRL's check of the format is sound for what it claims, and says nothing about the answer."""
    report = attacked(
        boxes,
        "trl.rewards:think_format_reward",
        "I.denied",
        "I.nothing",
        honest="<think>\nIt is the sky.\n</think>\nblue",
        wrong="It is the sky: red",
        python=sys.executable,
    )
    assert "TRL's f(completions, **columns), completions as messages; honest 1, wrong 0" in report.notes[0]
    assert [c.score for c in report.controls] == [1.0, 0.0, 0.0, 0.0]
    assert {f.id: f.result for f in report.findings}["I.nothing"] == "held"


def test_rows_of_the_command_line_and_of_a_file_are_read_alike(tmp_path: Path) -> None:
    (tmp_path / "row.json").write_text(json.dumps({"honest": "a", "wrong": "b", "n": 3, "s": "x"}))
    read = load_rows([str(tmp_path / "row.json")], ["n=4", "t=text"], "", "")
    assert [(r.honest, r.wrong, dict(r.columns)) for r in read] == [("a", "b", {"n": 3, "t": "text", "s": "x"})]
    given = load_rows([], ["n=4", "t=text"], "a", "b")
    assert [(r.honest, r.wrong, dict(r.columns)) for r in given] == [("a", "b", {"n": "4", "t": "text"})]
