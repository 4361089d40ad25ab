"""Training, reading and auditing runs from Python."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl import recipe as recipes
from agentrl.errors import RecipeError, UserError
from agentrl.sdk import resolve

TINY: dict[str, Any] = {
    "run": {"name": "tiny", "steps": 1, "seed": 3},
    "model": {"type": "scratch", "layers": 1, "width": 32, "heads": 2, "vocabulary": 300, "context": 512},
    "envs": [{"name": "countdown", "levels": [1]}],
    "rollout": {"group_size": 2, "max_turns": 2, "max_tokens": 16},
    "learner": {"groups_per_step": 2, "lr": 1.0e-3},
    "warm_start": {"demonstrations": 16, "epochs": 2},
    # A policy this small scores nothing: without the filter every group is trained on.
    "group_filter": {"dynamic_sampling": False},
    "eval": None,
}


def test_overrides_name_keys_or_hold_parts_of_sections() -> None:
    path = Path(__file__).resolve().parents[1] / "recipes" / "quickstart.yaml"
    changed = resolve(path, {"run__steps": 3, "run": {"name": "other"}, "envs__0__levels": [2], "learner": {"lr": 0.5}})
    assert (changed.run.steps, changed.run.name, changed.envs[0].levels, changed.learner.lr) == (3, "other", [2], 0.5)
    assert changed.run.seed == recipes.load(path).run.seed
    again = resolve(changed, {"audit": None, "run__out": Path("elsewhere")})
    assert (again.audit, again.run.out, again.run.steps) == (None, Path("elsewhere"), 3)
    with pytest.raises(RecipeError, match="steps"):
        resolve(path, {"run__stepps": 3})


def weights(run: agentrl.RunFiles) -> dict[str, bytes]:
    newest = max((run.path / "checkpoints").iterdir())
    return {str(p.relative_to(newest)): p.read_bytes() for p in newest.rglob("*.safetensors")}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> agentrl.RunFiles:
    return agentrl.train(TINY, run__out=str(tmp_path_factory.mktemp("runs")))


def test_a_run_is_data(tiny: agentrl.RunFiles) -> None:
    run = agentrl.load_run(tiny.path)
    assert (tiny.finished, run.finished) == (True, None)
    assert repr(run).startswith(f"RunFiles({tiny.path}: ")
    assert run.recipe["run"]["name"] == "tiny"
    assert run.columns()["step"] == [row["step"] for row in run.rows()] == [1]
    assert list(run.metrics().index) == [1]
    assert run.metrics()["audit/looked"].tolist() == run.columns()["audit/looked"]
    kinds = {stored.note.kind for stored in run.trajectories()}
    assert kinds == {"train"}
    assert list(run.trajectories(env="files")) == []
    assert run.evaluations() == []
    assert run.audit()["suspicious"] is False


def test_without_pandas_it_says_what_to_do(tiny: agentrl.RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"pip install 'agentrl\[notebook\]'; columns\(\) gives the same"):
        tiny.metrics()


def test_the_watch_changes_no_weight(tiny: agentrl.RunFiles, tmp_path: Path) -> None:
    """With the watch and without it: the same weights to the bit, also in a thread beside a running loop."""

    async def in_a_loop() -> agentrl.RunFiles:
        return agentrl.train(TINY, run__out=str(tmp_path), audit=None)

    unwatched = asyncio.run(in_a_loop())
    assert "audit/looked" not in unwatched.rows()[0]
    assert weights(unwatched) == weights(tiny) != {}


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run there; name a run's folder"):
        agentrl.load_run(tmp_path)


def test_errors_of_the_thread_arrive() -> None:
    async def cell() -> None:
        agentrl.train({**TINY, "run": {"name": "x", "steps": -1}})

    with pytest.raises(RecipeError, match=r"run\.steps"):
        asyncio.run(cell())
