"""`agentrl redteam`: exit codes, JSON, files for other tools, scoring functions, Harbor folders, the pytest plugin."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from agentrl.cli import main
from agentrl.sandboxes.pool import Pool


def redteam(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["redteam", *arguments])
    return int(end.value.code or 0)


def test_a_sound_environment_exits_with_0(boxes: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    assert redteam("countdown", "--level", "1", "--family", "I", "--family", "J", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["target"], data["backend"], data["succeeded"]) == ("countdown", "namespace", 0)
    assert {name: c["score"] for name, c in data["controls"].items()} == {
        "oracle": 1.0,
        "no-op": 0.0,
        "empty": 0.0,
        "garbage": 0.0,
    }
    assert data["tried"] == sum(a["result"] == "held" for a in data["attacks"]) > 15
    assert {"id", "family", "succeeded", "score", "evidence"} <= set(data["attacks"][0])


def test_a_naive_grader_exits_with_1_and_every_format_says_so(
    boxes: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("html", "junit", "sarif")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    assert redteam("substring", "--attack", "I.denied", "--attack", "I.nothing", *options) == 1
    shown = capsys.readouterr().out
    assert "1 succeeded" in shown and "I.denied" in shown and "fix: Demand exactly one answer" in shown
    suite = ElementTree.fromstring(files["junit"].read_text())
    assert (suite.get("tests"), suite.get("failures")) == ("6", "1")
    results = json.loads(files["sarif"].read_text())["runs"][0]["results"]
    assert [r["ruleId"] for r in results] == ["I.denied"]
    page = files["html"].read_text()
    assert "<h1>Red team: substring</h1>" in page and "1 of 2 attacks succeeded, every control is right" in page


def test_accepted_findings_do_not_fail(boxes: Pool, tmp_path: Path) -> None:
    baseline = str(tmp_path / "accepted.json")
    assert redteam("substring", "--attack", "I.denied", "--baseline", baseline, "--update-baseline") == 0
    assert json.loads(Path(baseline).read_text()) == {"substring": ["I.denied"]}
    assert redteam("substring", "--attack", "I.denied", "--baseline", baseline) == 0
    assert redteam("substring", "--attack", "I.listed_all", "--baseline", baseline) == 1


def test_a_wrong_name_is_told_with_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert redteam("countdwn") == 2
    assert "did you mean 'countdown'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["countdown", "--family", "Z"], "no family 'Z'; the families are A, B, C"),
        (["countdown", "--attack", "none"], "no attack 'none'"),
        (["countdown", "--level", "99"], "countdown has no level 99; its levels are 1 to 6"),
        (["countdown", "--html", "nowhere/page.html"], "cannot be written: there is no folder"),
        (["countdown", "--update-baseline"], "--update-baseline needs --baseline FILE"),
        (["countdown", "--baseline", "missing.json"], "there is no baseline missing.json; --update-baseline writes it"),
        (["countdown", "--baseline", "broken.json"], "the baseline broken.json cannot be read"),
        (["countdown", "--baseline", "list.json"], "must look like"),
        (["countdown", "--search", "-1"], "--search"),
        (["folder"], "folder is a folder, but not a Harbor task: there is no task.toml in it"),
        (["--scorer", "json"], "must look like module:function"),
        (["--scorer", "json:dumps"], "--scorer needs --honest and --wrong"),
        ([], "say what to attack"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    assert redteam(*arguments) == 2
    assert said in capsys.readouterr().err


def test_a_verifier_with_several_testbeds_gives_one_report_of_the_same_form(
    boxes: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert redteam("final_state", "--attack", "A.json_types", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["target"], data["backend"], data["ok"], data["succeeded"]) == ("final_state", "namespace", True, 0)
    assert {name: c["score"] for name, c in data["controls"].items()}["oracle"] == 1.0
    assert [a["id"] for a in data["attacks"]] == ["A.json_types"]
    assert [t["target"] for t in data["targets"]] == [
        "final_state/trees",
        "final_state/documents",
        "final_state/databases",
        "final_state/gits",
        "final_state/means",
    ]


def test_a_scoring_function_is_attacked_in_a_sandbox(
    boxes: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_scorer.py").write_text(
        "def loose(answer, expected):\n    return expected in answer\n\n\n"
        "def strict(answer, expected):\n    return answer == expected\n\n\n"
        "def any_number(answer, expected):\n    return answer.strip().isdigit()\n\n\n"
        "def runs(source):\n    scope = {}\n    exec(source, scope)\n    return float(scope['f'](3) == 9)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("--honest", "blue", "--wrong", "red", "--family", "I", "--json")
    assert redteam("--scorer", "my_scorer:loose", *words) == 1
    assert json.loads(capsys.readouterr().out)["succeeded"] >= 8
    assert redteam("--scorer", "my_scorer:strict", *words) == 0
    code = ("--honest", "def f(x):\n    return x * x\n", "--wrong", "def f(x):\n    return 5\n")
    capsys.readouterr()
    assert redteam("--scorer", "my_scorer:runs", *code, "--attack", "A.always_equal", "--json") == 1
    assert redteam("--scorer", "no_such_module_here:f", *words) == 2
    numbers = ("--honest", "7", "--wrong", "8", "--attack", "I.denied", "--json")
    capsys.readouterr()
    assert redteam("--scorer", "my_scorer:any_number", *numbers) == 1
    wrong = json.loads(capsys.readouterr().out)["controls"]["wrong"]
    assert wrong == {"expected": 0.0, "score": 1.0, "ok": False, "tasks": 1}


def test_a_harbor_folder_is_attacked(boxes: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tmp_path / "greet"
    for name, text in {
        "task.toml": "version = '1.0'\n",
        "environment/Dockerfile": "FROM debian\n",
        "environment/start.txt": "hello\n",
        "solution/solve.sh": "tr a-z A-Z < /app/start.txt > /app/out.txt\n",
        "tests/test.sh": (
            'if [ "$(cat /app/out.txt)" = HELLO ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'
        ),
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    assert redteam(str(task), "--attack", "B.reward_json", "--attack", "E.daemon_rewrites_reward", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["controls"]["oracle"]["ok"] and data["controls"]["no-op"]["ok"]
    assert [a["id"] for a in data["attacks"] if a["succeeded"]] == ["B.reward_json", "E.daemon_rewrites_reward"]
    assert redteam(str(task), "--attack", "B.reward_json") == 1
    assert "graded as Harbor does by default, in the agent's own container" in " ".join(capsys.readouterr().out.split())


def harbor_task(folder: Path, solution: str, *, config: str = "version = '1.0'\n", **files: str) -> None:
    """Write a Harbor task: HELLO must stand in out.txt."""
    for name, text in {
        "task.toml": config,
        "environment/Dockerfile": "FROM debian\n",
        "environment/start.txt": "hello\n",
        "solution/solve.sh": solution,
        "tests/test.sh": (
            'if [ "$(cat /app/out.txt)" = HELLO ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'
        ),
        **files,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_a_whole_folder_of_harbor_tasks_ends_in_a_table(
    boxes: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each task: its controls, what was tried, and what succeeded."""
    harbor_task(tmp_path / "loud", "tr a-z A-Z < /app/start.txt > /app/out.txt\n")
    harbor_task(tmp_path / "unsolved", "true\n")
    assert redteam(str(tmp_path), "--attack", "B.reward_json") == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["target", "controls", "tried", "succeeded", "which"] in lines
    assert [line[:5] for line in lines if line[:1] in (["loud"], ["unsolved"])][-2:] == [
        ["loud", "4", "of", "4", "1"],
        ["unsolved", "3", "of", "4", "1"],
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"config": "[[steps]]\nname = 'a'\n"}, "a Harbor task of several steps"),
        ({"environment/docker-compose.yaml": "services: {}\n"}, "several containers (docker-compose.yaml)"),
        ({"environment/compose.yml": "services: {}\n"}, "several containers (compose.yml)"),
        ({"steps/one/instruction.md": "x"}, "a Harbor task of several steps"),
        ({"config": "[verifier]\nenvironment_mode = 'separate'\n"}, "agentrl redteam harbor --option path="),
        ({"config": "[environment]\ngpus = 1\n"}, "MCP servers or GPUs"),
        ({"config": "not toml ="}, "cannot be read"),
    ],
)
def test_harbor_tasks_that_are_not_played_are_named(
    change: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harbor_task(tmp_path / "odd", "true\n", **change)
    assert redteam(str(tmp_path / "odd")) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def pytest_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_plugin_gives_one_test_for_each_control_and_attack(boxes: Pool, tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_never_collected(): assert False\n")
    done = pytest_run(tmp_path, "--agentrl-env", "substring", "--agentrl-family", "J")
    assert done.returncode == 0, done.stdout
    assert "control oracle" in done.stdout and "J.format_only" in done.stdout and "test_other" not in done.stdout
    done = pytest_run(tmp_path, "--agentrl-env", "substring", "-k", "I.denied or oracle")
    assert done.returncode == 1
    assert "FAILED" in done.stdout and "Demand exactly one answer" in done.stdout and "1 passed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--agentrl-env", "countdwn"], "did you mean 'countdown'?"),
        (["--agentrl-env", "countdown", "--agentrl-family", "Z"], "no family 'Z'"),
    ],
)
def test_the_plugin_tells_mistakes_once(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = pytest_run(tmp_path, *arguments)
    assert (done.returncode, done.stderr.count(said)) == (4, 1), done.stdout + done.stderr
    assert "INTERNALERROR" not in done.stdout


def test_the_plugin_costs_other_projects_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text(
        "import sys\n\ndef test_plain():\n"
        "    assert 'agentrl.redteam.plugin' in sys.modules\n"
        "    assert not {'torch', 'numpy', 'pydantic', 'agentrl.verifiers.base'} & set(sys.modules)\n"
    )
    done = pytest_run(tmp_path, "-p", "no:hypothesispytest", "-p", "no:anyio")
    assert done.returncode == 0, done.stdout
