"""`agentrl model export RUN`: writes a run's policy as a folder that transformers and SGLang load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import StorageError, UserError
from agentrl.hashing import folder_identity
from agentrl.learn import checkpoint
from agentrl.learn.hub import model_folder
from agentrl.learn.model import load_model, merged_state, precision, save_model
from agentrl.recipe import PretrainedModel, Recipe
from agentrl.report import model_card


def export(run: Path, to: Path, *, merge: bool = True, step: int | None = None) -> Path:
    """Write the policy of a run's newest checkpoint (or that of `step`) to the new folder `to`.

    LoRA is merged into the base model's weights; with `merge=False` the adapter is written by itself. A model card,
    README.md, says what the run's files tell of the policy.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"{to} exists already; name another folder")
    saved = _find(run, step)
    to.parent.mkdir(parents=True, exist_ok=True)
    writing = to.with_name(f".writing-{to.name}")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        if merge and (saved.model / "adapter_config.json").is_file():
            _merge(saved, writing)
        else:
            shutil.copytree(saved.model, writing)
        adapter = (writing / "adapter_config.json").is_file()
        (writing / "README.md").write_text(
            model_card.write(run, saved.step, identity=folder_identity(saved.model), adapter=adapter), encoding="utf-8"
        )
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
        raise UserError(f"{run} is no run folder: it has no checkpoints/")
    if step is not None:
        path = folder / f"step-{step:06d}"
        if not path.is_dir():
            steps = ", ".join(str(int(p.name[5:])) for p in sorted(folder.glob("step-*"))) or "none"
            raise UserError(f"{run} has no checkpoint of step {step}; there are: {steps}")
        return checkpoint.load(path)
    newest = checkpoint.latest(folder)
    if newest is None:
        raise UserError(f"{run} has no checkpoint yet")
    return newest


def _merge(saved: checkpoint.Checkpoint, to: Path) -> None:
    section = Recipe.model_validate(saved.recipe).model
    assert isinstance(section, PretrainedModel), "only pretrained models take LoRA"
    if section.dtype == "auto":  # as the base model is stored, whatever this machine is fast at
        stored = precision("auto", torch.device("cpu"), model_folder(section.path, section.revision))
        section = section.model_copy(update={"dtype": str(stored).removeprefix("torch.")})
    model, _ = load_model(section, folder=saved.model, device="cpu")
    base: Any
    base, tokenizer = load_model(section.model_copy(update={"lora": None}), device="cpu")
    base.load_state_dict(merged_state(model), strict=False)
    save_model(base, tokenizer, to)
