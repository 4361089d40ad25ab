"""A model card claims what was measured of the very policy, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.report import model_card

RECIPE: dict[str, Any] = {
    "run": {"name": "quick", "seed": 7, "steps": 4, "out": "/home/somebody/runs"},
    "model": {"type": "pretrained", "path": "/home/somebody/models/smol"},
    "envs": [{"name": "files", "levels": [1, 2], "sandbox": "namespace"}],
    "warm_start": {"demonstrations": 8},
    "rollout": {"group_size": 8},
    "learner": {"lr": 0.001},
    "curriculum": {"type": "learnability"},
    "algorithm": {"type": "dapo"},
}


def evaluation(step: int, stage: str, passes: list[float]) -> dict[str, Any]:
    value = sum(passes) / len(passes)
    return {
        "kind": "eval", "step": step, "stage": stage, "split": "heldout", "seconds": 1.0,
        "eval/files/pass@1": {"value": value, "low": max(0.0, value - 0.1), "high": min(1.0, value + 0.1)},
        "eval/files/tasks": len(passes), "eval/files/families": len(passes), "eval/files/ungraded": 1,
        "eval/files/passes": {f"t{n}": share for n, share in enumerate(passes)},
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "quick"
    folder.mkdir()
    steps = [
        {"kind": "step", "step": n, "seconds": 900.0, "rollout/episodes": 16, "rollout/tokens": 100,
         "curriculum/files/tasks_seen": 2.0 * n}
        for n in range(1, 5)
    ]  # fmt: skip
    rows = [
        evaluation(0, "start", [0.0] * 20),
        {"kind": "warm_start", "step": 0, "warm_start/solved": 8, "warm_start/loss": 0.5, "seconds": 10.0},
        evaluation(0, "sft", [0.0] * 15 + [1.0] * 5),
        *steps[:2],
        evaluation(2, "rl", [0.0] * 10 + [1.0] * 10),
        {"kind": "alarm", "step": 3, "name": "entropy", "text": "entropy\nfell"},
        *steps[2:],
        evaluation(4, "end", [1.0] * 20),
    ]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = {"agentrl": "0.1.0", "commit": "abc", "python": "3.11.7", "packages": {"torch": "2.13"}}
    (folder / "environment.json").write_text(json.dumps(made))
    (folder / "sources.json").write_text(json.dumps({"environment files": "Files-1234"}))
    return folder


def test_a_card_tells_the_evidence(run: Path) -> None:
    card = model_card.write(run, 4)
    front = yaml.safe_load(card.split("---")[1])
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "tool-use", "agentrl"],
        "base_model": "smol",
    }
    assert [line for line in card.splitlines() if line.startswith("| ") and "files" in line] == [
        "| before training | files | 0 | 0.000 | 0.000 to 0.100 | 20 | 1 |",
        "| after the warm start | files | 0 | 0.250 | 0.150 to 0.350 | 20 | 1 |",
        "| during RL | files | 2 | 0.500 | 0.400 to 0.600 | 20 | 1 |",
        "| after RL | files | 4 | 1.000 | 0.900 to 1.000 | 20 | 1 |",
    ]
    for said in (
        "trained from `smol` by supervised fine-tuning on an expert's episodes, then 4 steps of reinforcement learning",
        "Step 4 against the warm start: better: +75.0 points",
        "- **files**: levels 1, 2, namespace sandboxes, 8 tasks seen",
        "- RL: 4 steps, 64 episodes in groups of 8, 400 sampled tokens, learning rate 0.001, curriculum learnability",
        "- seed 7, 1.00 hours",
        "- Alarm `entropy` at step 3: entropy fell",
        "- agentrl 0.1.0 (abc)",
        "- environment files: source `Files-1234`",
    ):
        assert said in card
    assert "/home/somebody" not in card and "not evaluated itself" not in card


def test_an_earlier_checkpoint_is_not_praised_for_the_last(run: Path) -> None:
    card = model_card.write(run, 3)
    assert "1.000" not in card
    assert "**This policy, after step 3, was not evaluated itself**; the newest above is of step 2." in card
    assert "Alarm" in card and "Alarm" not in model_card.write(run, 2)


def test_a_run_that_measured_nothing_says_so(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")
    card = model_card.write(run, 0, adapter=True)
    assert "Not measured: the run made no evaluation." in card
    assert "- It was never measured on held-out tasks." in card
    assert "A LoRA adapter for `smol`" in card


def test_a_card_has_the_evaluations_of_the_very_policy(run: Path) -> None:
    """Those of other weights, and those that are not finished, are left out."""

    def evaluated(name: str, *identities: str, finished: bool = True) -> None:
        folder = run / "evaluations" / name
        folder.mkdir(parents=True)
        policies = [{"name": "p", "identity": identity} for identity in identities]
        (folder / "evaluation.json").write_text(json.dumps({"policies": policies, "key": "secret"}))
        rate = {"value": 0.5, "low": 0.4, "high": 0.6}
        figures = {"pass@1": rate, "pass@8": rate | {"value": 0.75, "high": 0.9}, "all@8": rate, "tasks": 40}
        report = {
            "protocol": {"hash": name, "task_count": 40, "split": "heldout", "sampling": {"temperature": 1.0}},
            "policies": [{"environments": {"files": figures}} for _ in identities],
        }
        if finished:
            (folder / "report.json").write_text(json.dumps(report))

    evaluated("base-and-it", "base", "it")
    evaluated("another", "another")
    evaluated("unfinished", "it", finished=False)
    section = model_card.write(run, 4, identity="it").split("## Measured afterwards\n\n")[1].split("\n\n## ")[0]
    assert section == (
        "`agentrl eval`, 40 tasks of the split `heldout`, temperature 1.0, protocol `base-and-it`:\n\n"
        "| environment | figure | value | 95 % interval | tasks | ungraded |\n"
        "|---|---|---|---|---|---|\n"
        "| files | pass@1 | 0.500 | 0.400 to 0.600 | 40 | 0 |\n"
        "| files | pass@8 | 0.750 | 0.400 to 0.900 | 40 | 0 |"
    )
    assert "Measured afterwards" not in model_card.write(run, 4)
