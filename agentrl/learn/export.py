"""`agentrl model export RUN`: a run's policy as a folder that transformers and SGLang load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from agentrl.errors import StorageError, UserError
from agentrl.learn import checkpoint
from agentrl.learn.model import load_model, merged_state, save_model
from agentrl.recipe import PretrainedModel, Recipe


def export(run: Path, to: Path, *, merge: bool = True, step: int | None = None) -> Path:
    """Write the policy of a run's newest checkpoint (or that of `step`) to the new folder `to`.

    LoRA is merged into the base model's weights; with `merge=False` the adapter is written by itself.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists already; name another folder")
    found = _find(run, step)
    to.parent.mkdir(parents=True, exist_ok=True)
    writing = to.with_name(f".writing-{to.name}")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        if not (found.model / "adapter_config.json").is_file() or not merge:
            shutil.copytree(found.model, writing)
        else:
            _merge(found, writing)
        if to.exists():
            to.rmdir()
        writing.rename(to)
    except OSError as error:
        raise StorageError(f"{to}: could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return to


def _find(run: Path, step: int | None) -> checkpoint.Checkpoint:
    folder = run / "checkpoints"
    if not folder.is_dir():
        raise UserError(f"{run} is no run folder (it has no checkpoints/)")
    if step is not None:
        wanted = folder / f"step-{step:06d}"
        if not wanted.is_dir():
            there = ", ".join(str(int(p.name[5:])) for p in sorted(folder.glob("step-*"))) or "none"
            raise UserError(f"{run} has no checkpoint of step {step}; there are: {there}")
        return checkpoint.load(wanted)
    found = checkpoint.latest(folder)
    if found is None:
        raise UserError(f"{run} has no checkpoint yet")
    return found


def _merge(found: checkpoint.Checkpoint, to: Path) -> None:
    section = Recipe.model_validate(found.recipe).model
    assert isinstance(section, PretrainedModel), "only pretrained models take LoRA"
    model, _ = load_model(section, folder=found.model, device="cpu")
    state = merged_state(model)
    plain: Any
    plain, tokenizer = load_model(section.model_copy(update={"lora": None}), device="cpu")
    plain.load_state_dict(state, strict=False)
    save_model(plain, tokenizer, to)
