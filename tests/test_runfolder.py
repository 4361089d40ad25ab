"""Run folders: made once, locked, resumed only with the same recipe, never overwritten."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from agentrl import recipe as recipes
from agentrl.errors import RecipeError, StorageError, UserError
from agentrl.runfolder import open_run


def recipe(out: Path, **changes: Any) -> recipes.Recipe:
    data: dict[str, Any] = {"run": {"name": "r", "out": str(out)}, "model": {"path": "m"}, "envs": [{"name": "files"}]}
    for key, value in changes.items():
        data[key] = {**data.get(key, {}), **value}
    return recipes.build(data)


def test_a_new_run_keeps_its_recipe_and_environment(tmp_path: Path) -> None:
    with open_run(recipe(tmp_path), resume=False) as run:
        assert recipes.load(run.path / "recipe.yaml") == recipe(tmp_path)
        environment = json.loads((run.path / "environment.json").read_text())
        assert {"agentrl", "python", "packages", "machine"} <= set(environment) and environment["format"] == 2
        assert sorted(p.name for p in run.path.iterdir()) == [
            ".lock", "checkpoints", "environment.json", "recipe.yaml", "trajectories",
        ]  # fmt: skip


def test_the_key_is_made_once_and_is_the_owners_alone(tmp_path: Path) -> None:
    with open_run(recipe(tmp_path), resume=False) as run:
        key = run.key
        assert (len(key), run.key) == (32, key)
        assert stat.S_IMODE((run.path / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "made", ["metrics.jsonl", "checkpoints/step-000000", "trajectories/trajectories-000000.jsonl.gz"]
)
def test_a_second_run_of_one_name_asks(tmp_path: Path, made: str) -> None:
    with open_run(recipe(tmp_path), resume=False) as run:
        (run.path / made).write_text("something")
    with pytest.raises(UserError, match="--resume"):
        open_run(recipe(tmp_path), resume=False)
    open_run(recipe(tmp_path), resume=True).close()


def test_a_run_that_failed_before_its_first_row_starts_again_with_what_was_fixed(tmp_path: Path) -> None:
    with open_run(recipe(tmp_path), resume=False) as run:
        (run.path / "metrics.jsonl").touch()
    corrected = recipe(tmp_path, model={"path": "elsewhere"})
    with open_run(corrected, resume=False) as run:
        assert recipes.load(run.path / "recipe.yaml") == corrected


def test_resuming_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        open_run(recipe(tmp_path), resume=True)


@pytest.mark.parametrize(("number", "maker"), [(None, "an earlier"), (1, "an earlier"), (3, "a later")])
def test_a_folder_of_another_format_is_refused(tmp_path: Path, number: int | None, maker: str) -> None:
    with open_run(recipe(tmp_path), resume=False) as run:
        file = run.path / "environment.json"
        environment = json.loads(file.read_text())
        file.write_text(json.dumps({**environment, "format": number} if number else {"agentrl": "0.1.0"}))
    with pytest.raises(UserError, match=f"was made by {maker} version of agentrl"):
        open_run(recipe(tmp_path), resume=True)


def test_two_processes_cannot_share_a_run(tmp_path: Path) -> None:
    with open_run(recipe(tmp_path), resume=False), pytest.raises(UserError, match="in use"):
        open_run(recipe(tmp_path), resume=True)


def test_a_changed_recipe_is_refused_key_by_key(tmp_path: Path) -> None:
    open_run(recipe(tmp_path), resume=False).close()
    open_run(recipe(tmp_path, run={"steps": 7}), resume=True).close()
    with pytest.raises(RecipeError, match=r"learner\.lr: was 1e-06, is 0\.1"):
        open_run(recipe(tmp_path, learner={"lr": 0.1}), resume=True)


def test_a_run_may_go_on_with_other_servers_of_the_same_kind(tmp_path: Path) -> None:
    launched = {"engine": {"type": "sglang", "servers": 2, "flags": ["--attention-backend", "triton"]}}
    attached = {"engine": {"type": "sglang", "urls": ["http://127.0.0.1:30000"]}}
    open_run(recipe(tmp_path, rollout=launched), resume=False).close()
    open_run(recipe(tmp_path, rollout=attached), resume=True).close()
    with pytest.raises(RecipeError, match=r"rollout\.engine\.type: was 'sglang', is 'transformers'"):
        open_run(recipe(tmp_path, rollout={"engine": {"type": "transformers"}}), resume=True)


def test_a_folder_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"run\.out"):
        open_run(recipe(tmp_path / "file"), resume=False)
