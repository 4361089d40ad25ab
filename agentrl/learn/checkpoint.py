"""Checkpoints are atomic, complete and rotated; a damaged one is detected, and the one before it is used.

    .writing-000040/ ── every file written and synced ── COMPLETE (sizes and hashes) ── rename ──> step-000040/
        model/       a transformers folder, or a LoRA adapter: what `eval`, `model export` and an engine load
        learner.pt   float32 masters, AdamW's moments, reference, counters; with `learner.ranks` shards/ instead
        state.pt     curriculum, queue, metrics, recipe, random generators
        COMPLETE     JSON: format, step, and for each file its size and SHA-256

A kill at any moment leaves either the old checkpoints, or the old ones and the new one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import StorageError
from agentrl.learn.shard_files import FOLDER, read_counters

if TYPE_CHECKING:
    from agentrl.learn.learner import Learner
    from agentrl.learn.sharded import ShardedLearner

MARKER = "COMPLETE"
FORMAT = 2
"""Counts changes after which older checkpoints can no longer be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, read from disk."""

    folder: Path
    step: int
    """The learner's steps when it was written."""
    learner: Mapping[str, Any]
    """For `Learner.load_state_dict`."""
    sampler: Any
    scheduler: Any
    metrics: Any
    recipe: Mapping[str, Any]
    """The result of `Recipe.model_dump(mode="json")`."""
    generators: Mapping[str, Any]
    """States of the global random generators, for `restore_generators`."""
    warnings: tuple[str, ...] = ()
    """Newer checkpoints that could not be read, and why."""

    @property
    def model(self) -> Path:
        """Return the folder to load the model from: `load_model(section, folder=...)`."""
        return self.folder / "model"


def save(
    folder: Path,
    learner: Learner | ShardedLearner,
    sampler_state: Any = None,
    scheduler_state: Any = None,
    metrics_state: Any = None,
    *,
    keep: int = 2,
) -> Path:
    """Write a checkpoint below `folder`, then rotate. States are plain data (numbers, text, arrays, lists).

    Raise StorageError when it cannot be written; existing checkpoints stay as they are.
    """
    final = folder / f"step-{learner.steps:06d}"
    writing = folder / f".writing-{learner.steps:06d}"
    state = {
        "sampler": sampler_state,
        "scheduler": scheduler_state,
        "metrics": metrics_state,
        "recipe": learner.recipe.model_dump(mode="json", by_alias=True),
        "generators": _generators(),
    }
    # numpy arrays as tensors, which `weights_only` can load
    state = _convert(state, np.ndarray, lambda array: torch.from_numpy(array.copy()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        writing.mkdir()
        sealed = learner.write(writing)
        torch.save(state, writing / "state.pt")
        _read(writing / "state.pt")  # what cannot be read must fail now, not on resume
        written = {str(p.relative_to(writing)): p for p in sorted(writing.rglob("*")) if p.is_file()}
        files = {name: sealed.get(name) or _seal(path) for name, path in written.items()}
        marker = {"format": FORMAT, "step": learner.steps, "files": files}
        (writing / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")
        _seal(writing / MARKER)
        for inner in (*(p for p in writing.rglob("*") if p.is_dir()), writing):
            _sync_folder(inner)
        if final.exists():  # the same step again: keep the old one aside until the new one has its name
            final.rename(folder / f".aside-{final.name}")
        writing.rename(final)
        _sync_folder(folder)
        _tidy(folder)
    except pickle.UnpicklingError as error:
        shutil.rmtree(writing, ignore_errors=True)
        raise TypeError(f"a checkpoint's states must be plain data: {error}") from error
    except (OSError, RuntimeError, ValueError) as error:
        failure = _storage_error(folder, error)  # looks at the free space, so before it is given back
        shutil.rmtree(writing, ignore_errors=True)
        raise failure from error
    rotate(folder, keep)
    return final


def rotate(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for old in _newest_first(folder)[keep:]:
        renamed = old.rename(old.with_name(f".writing-old-{old.name}"))  # a half-deleted one must not keep its name
        shutil.rmtree(renamed, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Finish or undo what a kill interrupted; only for the run that writes here."""
    for aside in folder.glob(".aside-*"):
        name = folder / aside.name.removeprefix(".aside-")
        if name.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(name)
    for unfinished in folder.glob(".writing-*"):
        shutil.rmtree(unfinished)


def latest(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint, or None where there is none at all.

    Checkpoints that cannot be read are skipped and named in `warnings`; when none is left, raise StorageError. Nothing
    in the folder is changed: the run it belongs to may be writing there.
    """
    problems: list[str] = []
    named = _newest_first(folder)
    aside = [p for p in folder.glob(".aside-step-*") if folder / p.name.removeprefix(".aside-") not in named]
    for candidate in sorted([*named, *aside], key=_step, reverse=True):
        try:
            return load(candidate, warnings=tuple(problems))
        except StorageError as error:
            problems.append(str(error))
    if problems:
        raise StorageError(
            f"{folder}: no checkpoint can be read: {'; '.join(problems)}. Start the run again under another name, or "
            "restore a copy of a checkpoint"
        )
    return None


def load(folder: Path, *, warnings: tuple[str, ...] = ()) -> Checkpoint:
    """Read one checkpoint and check every file against its hash."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if (written := marker.get("format", 1)) != FORMAT:
            raise StorageError(
                f"{folder.name}: this checkpoint was written by another version of agentrl (format {written}, this one "
                f"reads {FORMAT}); train again or use that version"
            )
        for name, (size, digest) in marker["files"].items():
            path = folder / name
            if path.stat().st_size != size or _digest(path) != digest:
                raise StorageError(f"{folder.name}: {name} differs from what was written")
        state = _read(folder / "state.pt")
        return Checkpoint(
            folder=folder,
            step=marker["step"],
            learner=read_counters(folder) if (folder / FOLDER).is_dir() else _read(folder / "learner.pt"),
            recipe=state["recipe"],
            generators=state["generators"],
            warnings=warnings,
            **{name: _convert(state[name], Tensor, Tensor.numpy) for name in ("sampler", "scheduler", "metrics")},
        )
    except FileNotFoundError as error:
        raise StorageError(f"{folder.name}: {Path(error.filename).name} is missing; it was never finished") from error
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise StorageError(f"{folder.name}: unreadable: {type(error).__name__}: {error}") from error


def restore_generators(states: Mapping[str, Any]) -> None:
    """Restore Python's, numpy's and torch's global random generators."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(_convert(states["numpy"], Tensor, Tensor.numpy))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


def _generators() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _newest_first(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("step-*") if p.is_dir()), key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _convert(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Apply a function to all values of a kind inside nested dictionaries, lists and tuples."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {k: _convert(v, kind, function) for k, v in value.items()}
    return type(value)(_convert(v, kind, function) for v in value) if isinstance(value, list | tuple) else value


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)  # runs no code of the checkpoint


def _seal(path: Path) -> tuple[int, str]:
    """Flush a file to disk; return its size and hash."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return path.stat().st_size, _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot sync a folder
            os.fsync(handle)
    finally:
        os.close(handle)


def _storage_error(folder: Path, error: Exception) -> StorageError:
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    # torch and safetensors report a full disk in their own words, so look at the free space too.
    if full or free < 1 << 20:
        reason = f"the disk is full ({free >> 20} MiB free); free some space, or lower checkpoint.keep"
    else:
        reason = f"{type(error).__name__}: {error}"
    return StorageError(f"{folder}: this checkpoint could not be written: {reason}. Older checkpoints are untouched")
