"""Opens a run's folder: made once, locked while in use, never overwritten by accident.

runs/<name>/
  recipe.yaml         the whole resolved recipe
  environment.json    the folder's format, versions, machine, git commit
  metrics.jsonl       one line per step, evaluation and alarm; written by metrics.py alone
  trajectories/       what the policy did, and what became of it; written by rollout/store.py, read by records.py
  checkpoints/        written by learn/checkpoint.py
  audit.json          what experts do in its environments: what the reward-hacking watch compares with
  judge.json          what the judge was asked, and how well it agreed with labels; where a verifier asks one
  rubric.json         versions of the rubric, where the judge proposes criteria
  engine/             logs of the servers that the run started
  tensorboard/        the metrics once more, where TensorBoard is installed
  key                 seeds the verifiers' secrets; readable by the owner alone, never copied anywhere
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from agentrl import __version__
from agentrl import recipe as recipes
from agentrl.errors import RecipeError, StorageError, UserError
from agentrl.recipe import Recipe

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "gymnasium",
    "pydantic",
    "numpy",
    "httpx",
    "sglang",
    "docker",
    "ray",
)
FORMAT = 2
"""Format of run folders. Format 1, of version 0.1.0 and before, had no number and other metric and recipe keys."""
MAY_CHANGE = {"run.steps", "run.tokens", "run.max_hours", "run.disk_gb", "run.out", "checkpoint", "eval"}
MAY_CHANGE |= {"audit", "cluster", "sandboxes", "trackers"}
MAY_CHANGE |= {"learner.ranks", "learner.rank_timeout_s"}  # a change of ranks is said aloud
# A run that is resumed elsewhere may use other servers.
MAY_CHANGE |= {f"rollout.engine.{name}" for name in recipes.SglangEngine.model_fields if name != "type"}
MAY_CHANGE |= {f"judge.{name}" for name in ("budget.calls", "budget.tokens", "concurrency", "timeout_s", "calibration")}
MAY_CHANGE |= {f"judge.calibration.{name}" for name in recipes.JudgeCalibration.model_fields}
# Which model judges must stay the same; where it is reached may not.
MAY_CHANGE |= {f"judge.engine.{name}" for name in recipes.SglangJudge.model_fields if name not in ("type", "model")}
MAY_CHANGE |= {f"judge.engine.{name}" for name in ("url", "key_variable", "requests_per_minute", "max_batch")}
"""Keys that may differ when a run is resumed: they do not change what a step computes."""


class RunFolder:
    """An open, locked run folder."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self.metrics = path / "metrics.jsonl"
        self.trajectories = path / "trajectories"
        self.checkpoints = path / "checkpoints"
        self.judge = path / "judge.json"
        self.rubric = path / "rubric.json"
        for folder in (self.trajectories, self.checkpoints):
            folder.mkdir(exist_ok=True)

    @property
    def key(self) -> bytes:
        """Return the run's key, which is made once."""
        path = self.path / "key"
        if not path.exists():
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(32))
        return path.read_bytes()

    def same_sources(self, versions: Mapping[str, str]) -> None:
        """Refuse to resume a run whose environments or verifiers have other sources or settings than when it began."""
        path = self.path / "sources.json"
        if not path.exists():
            _write(path, json.dumps(dict(versions), indent=2) + "\n")
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name, version in versions.items() if before.get(name, version) != version]
        if changed:
            raise UserError(
                f"{self.path}: the source of {', '.join(changed)} has changed since the run began, so its scores would "
                f"not compare; restore it, start a new run, or delete {path} if the change does not matter"
            )

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_run(recipe: Recipe, *, resume: bool) -> RunFolder:
    """Make the folder of a run, or with `resume` open it again. Never overwrites what a run has made."""
    path = recipe.run.out / recipe.run.name
    exists = (path / "recipe.yaml").is_file()
    if begun(path) and not resume:
        raise UserError(f"{path} already holds a run; add --resume to continue it, or --set run.name=ANOTHER")
    if resume and not exists:
        raise UserError(f"{path} holds no run to resume; leave out --resume to start one")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        if resume:
            check_format(path)
            _same_recipe(path, recipe)
        else:
            free = shutil.disk_usage(path).free
            if free < 64 << 20:
                raise StorageError(f"{path}: only {free >> 20} MiB are free on this disk; a run needs at least 64")
            _write(path / "environment.json", json.dumps({"format": FORMAT, **environment()}, indent=2) + "\n")
            _write(path / "recipe.yaml", recipes.dump(recipe))  # last: its presence marks the folder as a run
    except OSError as error:
        raise StorageError(
            f"{path}: {error.strerror or error}; choose another folder with --set run.out=DIR"
        ) from error
    return RunFolder(path, lock)


def check_format(path: Path) -> None:
    """Refuse a run folder that another version of agentrl made in a format that this one cannot read."""
    try:
        version = json.loads((path / "environment.json").read_text(encoding="utf-8")).get("format", 1)
    except (OSError, ValueError, AttributeError):
        version = 1
    if version != FORMAT:
        maker = "an earlier version" if version < FORMAT else "a later version"
        raise UserError(
            f"{path} was made by {maker} of agentrl (run folder format {version}, this version reads {FORMAT}); "
            "continue it with that version, or start a new run with --set run.name=ANOTHER"
        )


def begun(path: Path) -> bool:
    """Return whether a run has anything to lose. One that failed before its first row may be started again."""
    rows = path / "metrics.jsonl"
    folders = (path / name for name in ("checkpoints", "trajectories"))
    return (rows.is_file() and rows.stat().st_size > 0) or any(f.is_dir() and any(f.iterdir()) for f in folders)


def environment() -> dict[str, Any]:
    """Return what a run depends on: versions, machine, commit."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip() if shutil.which("git") else ""  # fmt: skip
    return {
        "agentrl": __version__,
        "commit": commit,
        "python": platform.python_version(),
        "packages": versions,
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def _lock(path: Path) -> int:
    handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise UserError(f"{path} is in use by another agentrl process; wait until it ends, or stop it") from None
    return handle


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _same_recipe(path: Path, recipe: Recipe) -> None:
    """Refuse to resume with a recipe that would compute something else, and name the keys that differ."""
    before = recipes.load(path / "recipe.yaml").model_dump(mode="json", by_alias=True)
    after = recipe.model_dump(mode="json", by_alias=True)
    differing = [
        f"{key}: was {old!r}, is {new!r}"
        for key, old, new in _differences(before, after, "")
        if key not in MAY_CHANGE and key.split(".")[0] not in MAY_CHANGE
    ]
    if differing:
        raise RecipeError(
            f"{path} was started with another recipe, so it cannot be resumed with this one; "
            "restore these keys or choose another run.name:\n  " + "\n  ".join(differing)
        )


def _differences(a: Any, b: Any, key: str) -> list[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        names = list(dict.fromkeys([*a, *b]))
        return [d for n in names for d in _differences(a.get(n), b.get(n), f"{key}.{n}".lstrip("."))]
    return [] if a == b else [(key, a, b)]
