"""A profile through a server that runs already: one server serves any number of environments."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentrl import recipe as recipes
from agentrl.curriculum.profile import run
from agentrl.rollout.sglang_server import Server

pytestmark = pytest.mark.timeout(600)


def test_environments_are_profiled_on_one_attached_server(server: Server, model_folder: Path, tmp_path: Path) -> None:
    if not server.alive:
        asyncio.run(server.start())
    recipe = recipes.build(
        {
            "run": {"name": "p", "out": str(tmp_path)},
            "model": {"type": "scratch"},
            "envs": [{"name": "files"}],
            "rollout": {"engine": {"type": "sglang", "urls": [server.url]}, "max_tokens": 8, "max_turns": 2},
        }
    )
    for name, levels in (("countdown", 6), ("files", 6)):
        out = tmp_path / f"{name}.json"
        assert run(recipe, name, model=model_folder, tasks=1, samples=2, out=out, say=lambda text: None) == 0
        found = json.loads(out.read_text())
        assert (found["env"], found["engine"], found["model"]) == (name, "sglang", model_folder.name)
        assert [(row["tasks"], row["ungraded"]) for row in found["levels"]] == [(1, 0)] * levels
