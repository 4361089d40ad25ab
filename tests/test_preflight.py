"""`train --dry-run`: whether an environment can be forked, and whether the teacher fits, is tried before a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from agentrl import recipe as recipes
from agentrl.learn import memory
from agentrl.preflight import preflight
from tests.tiny_run import TINY

PLAIN = '''\
import threading

from agentrl import Environment, Task, Verdict, Verifier


class Always(Verifier):
    async def verify(self, submission, context):
        return Verdict(score=1.0)

    async def probe(self, context):
        pass


class Plain(Environment):
    """Say something."""

    verifier = Always()

    def start(self):
        self.kept = KEPT

    def task(self, split, level, index):
        return Task(id=f"plain/{split}/{level}/{index}", split=split, level=level, prompt="Say something.")

    def expert(self, task):
        return ["Something."]


EXPORT = Plain
'''


def tried(tmp_path: Path, env: str, **sections: Any) -> tuple[int, list[str]]:
    path = tmp_path / "recipe.yaml"
    said: list[str] = []
    data = {**TINY, "run": {**TINY["run"], "out": str(tmp_path / "runs")}, "envs": [{"name": env}], **sections}
    path.write_text(yaml.safe_dump({**data, "warm_start": None}))
    return preflight(recipes.load(path), say=said.append), said


def test_an_environment_that_cannot_be_forked_is_found(member: Callable[[str, str], str], tmp_path: Path) -> None:
    good, bad = (
        member("forked", PLAIN.replace("KEPT", "[1]")),
        member("unforked", PLAIN.replace("KEPT", "threading.Lock()")),
    )
    branching = {"algorithm": {"type": "vineppo"}}
    code, said = tried(tmp_path, good, **branching)
    assert code == 0 and "ok       forks of forked: an episode can be forked (0 KiB)" in said
    code, said = tried(tmp_path, bad, **branching)
    assert code == 1 and "algorithm.credit: branch forks episodes, but Plain.kept (lock) cannot be copied" in said[-1]


def test_a_disk_that_checkpoints_would_fill_fails(
    member: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = member("spacious", PLAIN.replace("KEPT", "[1]"))
    code, said = tried(tmp_path, name)
    assert code == 0 and any(line.startswith("ok       disk: ") for line in said)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    code, said = tried(tmp_path, name)
    assert code == 1 and "0 MiB are free, checkpoints take" in said[-1]
    monkeypatch.setattr(memory, "disk", lambda recipe, fit: ("little", "the disk may become full"))
    assert tried(tmp_path, name)[1][-1] == "failed   the disk may become full"


def test_an_environment_that_only_a_path_finds_is_tried(
    member: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = member("elsewhere", PLAIN.replace("KEPT", "[1]"))
    monkeypatch.delenv("AGENTRL_PATH")
    code, said = tried(tmp_path, str(tmp_path / "envs" / name))
    assert (code, said[-1]) == (0, "ready to train")


def test_a_teacher_that_is_missing_or_speaks_otherwise_is_found(
    member: Callable[[str, str], str], tmp_path: Path
) -> None:
    import transformers

    from agentrl.learn.model import scratch_tokenizer

    env = member("taught", PLAIN.replace("KEPT", "[1]"))
    code, said = tried(tmp_path, env, teacher={"path": str(tmp_path / "nowhere")})
    assert code == 1 and "nowhere" in said[-1]
    tokenizer = scratch_tokenizer(["quite other words"], 290)
    shape: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16}
    hub: Any = transformers
    config = hub.LlamaConfig(**shape, num_hidden_layers=1, num_attention_heads=1)
    hub.LlamaForCausalLM(config).save_pretrained(tmp_path / "t")
    tokenizer.save_pretrained(tmp_path / "t")
    code, said = tried(tmp_path, env, teacher={"path": str(tmp_path / "t"), "device": "cpu", "dtype": "float32"})
    assert code == 1 and "vocabulary" in said[-1], said
