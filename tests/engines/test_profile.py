"""Profiles and evaluations through a server that runs already, whatever it holds."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import recipe as recipes
from agentrl.engines.base import Sampling, Weights
from agentrl.engines.sglang.engine import SglangEngine
from agentrl.engines.sglang.server import Server
from agentrl.eval import command as eval_command
from agentrl.profile import run
from agentrl.recipe import Recipe

TOLERANCE = 0.15 if os.environ.get("AGENTRL_DEVICE") == "cuda" else 1e-4

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def recipe(server: Server, tmp_path: Path) -> Recipe:
    if not server.alive:
        asyncio.run(server.start())
    return recipes.build(
        {
            "run": {"name": "p", "out": str(tmp_path)},
            "model": {"type": "scratch"},
            "envs": [{"name": "files"}],
            "rollout": {"engine": {"type": "sglang", "urls": [server.url]}, "max_tokens": 8, "max_turns": 2},
        }
    )


def test_environments_are_profiled_on_one_attached_server(recipe: Recipe, model_folder: Path, tmp_path: Path) -> None:
    for name, levels in (("countdown", 6), ("files", 6)):
        out = tmp_path / f"{name}.json"
        assert run(recipe, name, model=model_folder, tasks=1, samples=2, out=out, say=lambda text: None) == 0
        found = json.loads(out.read_text())
        assert (found["env"], found["engine"], found["model"]) == (name, "sglang", model_folder.name)
        assert [(row["tasks"], row["ungraded"]) for row in found["levels"]] == [(1, 0)] * levels


@pytest.mark.parametrize("how", ["profile", "eval"])
def test_the_server_is_given_the_model_that_is_asked_about(
    how: str, server: Server, recipe: Recipe, model_folder: Path, model: Any, forward: Callable[..., list[float]]
) -> None:
    prompt = [5, 17, 99, 201]

    async def said() -> tuple[tuple[int, ...], tuple[float, ...]]:
        engine = SglangEngine(urls=[server.url])
        await engine.start()
        try:
            found = await engine.generate(prompt, Sampling(max_tokens=4, temperature=0.0))
            others = {name: -parameter.detach() for name, parameter in model.named_parameters()}
            await engine.publish(Weights(version=1, tensors=others))
        finally:
            await engine.close()
        return found.token_ids, found.logprobs

    asyncio.run(said())  # whatever it held, now it holds something else
    if how == "profile":
        run(recipe, "countdown", model=model_folder, tasks=1, samples=1, say=lambda text: None)
    else:
        target = eval_command.find(str(model_folder), recipe=recipe)
        eval_command.run(target, None, ks=[1], tasks=1, say=lambda text: None)
    token_ids, logprobs = asyncio.run(said())
    assert logprobs == pytest.approx(forward(prompt, token_ids), abs=TOLERANCE)
