"""verifiers in both directions, with the real package in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl import envs, metrics
from agentrl.errors import UserError
from agentrl.interop import export
from agentrl.rollout import store
from tests.interop.peer_processes import FOLDER, ROOT, free_port, interpreter, server


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="twenty seconds of vf-eval; AGENTRL_FULL=1")
def test_an_exported_environment_is_run_by_vf_eval(tmp_path: Path) -> None:
    """The package that `env export` writes is loaded by `vf-eval`, whose own loop plays an expert behind a chat
    endpoint: every rollout scores 1, graded by our verifier; no secret of a task is on any trace."""
    python = interpreter("verifiers")
    export.verifiers("files", tmp_path / "package", {}, split="train", level=1)
    port = free_port()
    with server([python, FOLDER / "expert_endpoint.py", "files", "1", str(port)], port, "/v1/models") as url:
        command = [
            python.parent / "vf-eval",
            "agentrl-files",
            "-n",
            "2",
            "-r",
            "1",
            "--model",
            "expert",
            "--client.base-url",
            f"{url}/v1",
            "--no-push",
            "--no-rich",
            "--output-dir",
            tmp_path / "out",
        ]
        variables = {**os.environ, "PYTHONPATH": f"{tmp_path / 'package'}:{ROOT}", "OPENAI_API_KEY": "none"}
        result = subprocess.run([str(w) for w in command], env=variables, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-2000:]
    (traces,) = (tmp_path / "out").glob("*/traces.jsonl")
    episodes = [json.loads(line) for line in traces.read_text().splitlines()]
    assert [[trace["rewards"]["verdict"]["score"] for trace in e["traces"]] for e in episodes] == [[1.0], [1.0]]
    assert [e["errors"] for e in episodes] == [[], []]
    assert "secret" not in json.dumps([trace["task"] for e in episodes for trace in e["traces"]])


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    """A folder with something in it is refused; so is a split that the environment does not have."""
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not an empty folder"):
        export.verifiers("files", tmp_path, {}, split="train", level=None)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_taskset_is_played_checked_and_attacked() -> None:
    """A taskset of verifiers' own: its tools, its reward of trust `reported`, the checks that need an expert named,
    and the red team, which finds what a lenient reward pays for."""
    variables = {**os.environ, "PYTHONPATH": f"{FOLDER / 'tasksets'}:{ROOT}"}
    command = [str(interpreter("verifiers")), str(FOLDER / "verifiers_play.py")]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    seen = json.loads(result.stdout.splitlines()[-1])
    (tool,) = seen["tools"]
    assert (tool["name"].endswith("lookup"), list(tool["parameters"]["properties"])) == (True, ["word"])
    assert (seen["size"], seen["scores"], seen["trust"]) == (4, [1.0, 0.0, 0.0], "reported")
    assert seen["shown"] == ["<out>meaning0</out>"]
    assert seen["refused"].startswith("error:")
    assert {name: ok for name, (ok, _) in seen["checks"].items()} == {
        "task_contract": True, "oracle_max": False, "canary_floor": True,
    }  # fmt: skip
    assert seen["checks"]["oracle_max"][1].startswith("this check needs an expert")
    assert "rewards are reported by the verifiers taskset agentrl-glossary" in seen["rewards"]
    assert seen["controls"][0] == ["oracle", 1.0] and "I.denied" in seen["breaches"]
    assert any("reported by the verifiers taskset" in note for note in seen["notes"])
    assert "the taskset no-such-taskset cannot be loaded" in seen["missing"]


def test_an_exported_package_is_loaded_by_verifiers(tmp_path: Path) -> None:
    """verifiers finds the taskset, its settings and its rows; a row holds the prompt, and no secret."""
    export.verifiers("files", tmp_path, {}, split="heldout", level=2)
    script = (
        "import json, verifiers.v1 as vf; c = vf.taskset_config_type('agentrl-files').model_validate("
        "{'id': 'agentrl-files', 'count': 3}); rows = list(vf.load_taskset(c)); "
        "print(json.dumps([r.data.model_dump(mode='json') for r in rows]))"
    )
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [str(interpreter("verifiers")), "-c", script]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    rows = json.loads(result.stdout.splitlines()[-1])
    tasks = [envs.load("files")().task("heldout", 2, index) for index in range(3)]
    assert [(row["prompt"], row["level"], row["split"]) for row in rows] == [(t.prompt, 2, "heldout") for t in tasks]
    assert all("secret" not in row for row in rows)


def recipe_for(tmp_path: Path, options: dict[str, Any]) -> Path:
    """Write a recipe that trains a tiny policy on a taskset."""
    data = {
        "run": {"name": "tiny", "seed": 3, "steps": 2, "threads": 1, "out": str(tmp_path / "runs")},
        "model": {"type": "scratch", "layers": 1, "width": 32, "heads": 2, "vocabulary": 300, "context": 320},
        "envs": [{"name": "verifiers", "options": options, "sandbox": "process", "unsafe": True}],
        "rollout": {"group_size": 2, "max_turns": 2, "max_tokens": 24},
        "group_filter": {"dynamic_sampling": False},
        "algorithm": {"entropy_bonus": 0.01},
        "learner": {"lr": 0.003, "groups_per_step": 2},
        "eval": None,
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="twenty seconds of training; AGENTRL_FULL=1")
def test_a_taskset_is_trained_on_in_its_own_environment(tmp_path: Path) -> None:
    """`agentrl train` and `eval` go on where verifiers is, with torch from here: every verdict is `reported`."""
    interpreter("verifiers")
    path = recipe_for(tmp_path, {"id": "agentrl-glossary"})
    variables = {**os.environ, "PYTHONPATH": f"{FOLDER / 'tasksets'}:{ROOT}"}
    command = [sys.executable, "-m", "agentrl", "train", str(path)]
    result = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    run = tmp_path / "runs" / "tiny"
    steps = [row for row in metrics.read(run / "metrics.jsonl") if row["kind"] == "step"]
    assert [(row["rollout/ungraded"], row["rollout/reported"]) for row in steps] == [(0, 1.0), (0, 1.0)]
    assert all(row["learn/grad_norm"] > 0 for row in steps)
    trajectories = [sample.trajectory for sample in store.read(run / "trajectories")]
    assert {t.verdict.trust for t in trajectories if t.verdict} == {"reported"} and len(trajectories) == 8
    command = [sys.executable, "-m", "agentrl", "eval", str(run), "--tasks", "2", "--json"]
    result = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    (policy,) = json.loads(result.stdout)["policies"]
    assert policy["environments"]["verifiers"]["tasks"] == 2


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="half a minute of hanging; AGENTRL_FULL=1")
def test_a_taskset_that_misbehaves_is_named_and_scores_nothing() -> None:
    """Rewards that are no numbers, raise or hang, and tools that hang or change: no score, and the taskset is named.
    Where it is well for everybody else, the policy caused it: 0, with an alarm. Nothing waits for it for ever."""
    variables = {**os.environ, "PYTHONPATH": f"{FOLDER / 'tasksets'}:{ROOT}"}
    command = [str(interpreter("verifiers")), str(FOLDER / "verifiers_trouble.py")]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    seen = json.loads(result.stdout.splitlines()[-1])
    results: dict[str, list[Any]] = seen["results"]
    assert {trouble: (score, grade, alarm) for trouble, (score, grade, alarm, _) in results.items()} == {
        "": (1.0, "graded", False),
        "nan": (None, "infra_error", False),
        "nan for one": (0.0, "graded", True),
        "large": (0.0, "graded", True),
        "raises": (None, "verifier_error", False),
        "waits": (None, "infra_error", False),
        "blocks": (None, "infra_error", False),
        "tool waits": (None, "raised", False),
        "tool waits for one": (0.0, "graded", True),
        "tool blocks": (None, "raised", False),
        "tools change": (None, "raised", False),
    }
    assert all("the verifiers taskset agentrl-trouble" in cause for name, (*_, cause) in results.items() if name)
    assert "is no finite number: 'nan'" in results["nan"][3] and "the reward is broken" in results["raises"][3]


@pytest.mark.skipif(not os.environ.get("AGENTRL_FULL"), reason="twenty seconds of training; AGENTRL_FULL=1")
def test_nothing_is_learnt_from_a_taskset_whose_rewards_are_no_numbers(tmp_path: Path) -> None:
    """A run on NaN rewards: every episode is ungraded and none reaches the learner; the taskset is named."""
    interpreter("verifiers")
    path = recipe_for(tmp_path, {"id": "agentrl-trouble", "config": {"task": {"trouble": "nan"}}})
    variables = {**os.environ, "PYTHONPATH": f"{FOLDER / 'tasksets'}:{ROOT}"}
    command = [sys.executable, "-m", "agentrl", "train", str(path)]
    result = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=300)
    run = tmp_path / "runs" / "tiny"
    trajectories = [sample.trajectory for sample in store.read(run / "trajectories")]
    assert trajectories and {t.outcome.score for t in trajectories} == {None}
    steps = [row for row in metrics.read(run / "metrics.jsonl") if row["kind"] == "step"]
    assert all(row.get("learn/grad_norm", 0.0) == 0.0 for row in steps), steps
    causes = {t.outcome.fault.cause for t in trajectories if t.outcome.fault}
    assert causes == {
        "InfraError: the verifiers taskset agentrl-trouble reported a reward that is no finite number: 'nan'"
    }, result.stderr[-2000:]
