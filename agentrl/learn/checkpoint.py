"""Checkpoints: atomic, complete, rotated; a torn one is found out and the one before it is used.

    .writing-000040/ ── every file written and synced ── COMPLETE (sizes and hashes) ── rename ──> step-000040/
        model/       a transformers folder, or a LoRA adapter: what `eval`, `model export` and an engine load
        learner.pt   float32 masters, AdamW's moments, reference, counters
        state.pt     curriculum, queue, metrics, recipe, random generators
        COMPLETE     JSON: step, and for each file its size and SHA-256

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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import StorageError
from agentrl.learn.model import save_model

if TYPE_CHECKING:
    from agentrl.learn.learner import Learner

MARKER = "COMPLETE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read and found whole."""

    folder: Path
    step: int
    """The learner's steps when it was written."""
    learner: Mapping[str, Any]
    """For `Learner.load_state_dict`."""
    sampler: Any
    scheduler: Any
    metrics: Any
    recipe: Mapping[str, Any]
    """As `Recipe.model_dump(mode="json")` gave it."""
    generators: Mapping[str, Any]
    """States of the global random generators; `restore_generators` puts them back."""
    warnings: tuple[str, ...] = ()
    """Newer checkpoints that could not be used, and why."""

    @property
    def model(self) -> Path:
        """The folder to load the model from: `load_model(section, folder=...)`."""
        return self.folder / "model"


def save(
    folder: Path,
    learner: Learner,
    sampler_state: Any = None,
    scheduler_state: Any = None,
    metrics_state: Any = None,
    *,
    keep: int = 2,
) -> Path:
    """Write a checkpoint below `folder`, then rotate. States are plain data (numbers, text, arrays, lists).

    Raises StorageError when it cannot be written; checkpoints that are there already stay as they are.
    """
    final = folder / f"step-{learner.steps:06d}"
    writing = folder / f".writing-{learner.steps:06d}"
    state = {
        "sampler": _as_tensors(sampler_state),
        "scheduler": _as_tensors(scheduler_state),
        "metrics": _as_tensors(metrics_state),
        "recipe": learner.recipe.model_dump(mode="json", by_alias=True),
        "generators": _generators(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        writing.mkdir()
        save_model(learner.model, learner.tokenizer, writing / "model")
        torch.save(learner.state_dict(), writing / "learner.pt")
        torch.save(state, writing / "state.pt")
        _read(writing / "state.pt")  # what cannot be read back must fail now, not when the run is resumed
        files = {str(p.relative_to(writing)): _seal(p) for p in sorted(writing.rglob("*")) if p.is_file()}
        _write(writing / MARKER, json.dumps({"step": learner.steps, "files": files}, indent=1))
        _sync_folder(writing / "model")
        _sync_folder(writing)
        if final.exists():  # the same step again: the old one steps aside until the new one has its name
            final.rename(folder / f".aside-{final.name}")
        writing.rename(final)
        _sync_folder(folder)
        _tidy(folder)
    except pickle.UnpicklingError as error:
        shutil.rmtree(writing, ignore_errors=True)
        raise TypeError(f"a checkpoint's states must be plain data: {error}") from error
    except (OSError, RuntimeError, ValueError) as error:
        shutil.rmtree(writing, ignore_errors=True)
        raise _storage_error(folder, error) from error
    rotate(folder, keep)
    return final


def rotate(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    for old in _newest_first(folder)[keep:]:
        doomed = old.rename(old.with_name(f".writing-old-{old.name}"))  # never leave half a checkpoint under its name
        shutil.rmtree(doomed, ignore_errors=True)


def _tidy(folder: Path) -> None:
    """Finish or undo what a kill left half done."""
    for aside in folder.glob(".aside-*"):
        name = folder / aside.name.removeprefix(".aside-")
        if name.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(name)
    for left in folder.glob(".writing-*"):
        shutil.rmtree(left)


def latest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint, or None where there is none at all.

    One that is torn or unreadable is passed over, and said so in `warnings`; when none is left, StorageError.
    """
    problems: list[str] = []
    _tidy(folder)
    for candidate in _newest_first(folder):
        try:
            return load(candidate, warnings=tuple(problems))
        except StorageError as error:
            problems.append(str(error))
    if problems:
        raise StorageError(
            f"{folder}: no checkpoint can be read: {'; '.join(problems)}. Start the run anew under another name, or "
            "put back a copy of a checkpoint"
        )
    return None


def load(folder: Path, *, warnings: tuple[str, ...] = ()) -> Checkpoint:
    """One checkpoint, every file checked against its hash."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        for name, (size, digest) in marker["files"].items():
            path = folder / name
            if path.stat().st_size != size or _digest(path) != digest:
                raise StorageError(f"{folder.name}: {name} is not what was written")
        state = _read(folder / "state.pt")
        return Checkpoint(
            folder=folder,
            step=marker["step"],
            learner=_read(folder / "learner.pt"),
            sampler=_as_arrays(state["sampler"]),
            scheduler=_as_arrays(state["scheduler"]),
            metrics=_as_arrays(state["metrics"]),
            recipe=state["recipe"],
            generators=state["generators"],
            warnings=warnings,
        )
    except FileNotFoundError as error:
        raise StorageError(f"{folder.name}: {Path(error.filename).name} is missing; it was never finished") from error
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise StorageError(f"{folder.name}: unreadable: {type(error).__name__}: {error}") from error


def restore_generators(states: Mapping[str, Any]) -> None:
    """Put back Python's, numpy's and torch's global generators."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


def _generators() -> dict[str, Any]:
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (kind, [int(k) for k in keys], int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _newest_first(folder: Path) -> list[Path]:
    return sorted((p for p in folder.glob("step-*") if p.is_dir()), key=lambda p: int(p.name[5:]), reverse=True)


def _as_tensors(value: Any) -> Any:
    """numpy arrays as tensors, which a reader that runs no code can load."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, dict):
        return {k: _as_tensors(v) for k, v in value.items()}
    return type(value)(map(_as_tensors, value)) if isinstance(value, list | tuple) else value


def _as_arrays(value: Any) -> Any:
    """The way back."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {k: _as_arrays(v) for k, v in value.items()}
    return type(value)(map(_as_arrays, value)) if isinstance(value, list | tuple) else value


def _read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)  # data only: a checkpoint runs no code


def _seal(path: Path) -> tuple[int, str]:
    """Bring a file to the disk; its size and hash."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return path.stat().st_size, _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


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
    # torch and safetensors report a full disk in words of their own; what is free tells it apart.
    if full or free < 1 << 20:
        why = f"the disk is full ({free >> 20} MiB free); make room, or lower checkpoint.keep"
    else:
        why = f"{type(error).__name__}: {error}"
    return StorageError(f"{folder}: this checkpoint could not be written: {why}. Older checkpoints are untouched")
