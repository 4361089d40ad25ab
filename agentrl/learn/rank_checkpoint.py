"""What a rank does for a checkpoint: writes its files, and reads its own rows. The format is that of shard_files.py."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from agentrl.errors import RecipeError, StorageError
from agentrl.learn.rank_learner import RankLearner, local
from agentrl.learn.shard_files import FOLDER, KINDS, ShardReader, rows_of

FILE_BYTES = 1 << 30
"""A file of the model is closed when it has this size; rank 0 holds one such part in memory."""


def write(folder: Path, learner: RankLearner, number: int, ranks: int) -> dict[str, tuple[int, str]]:
    """Write this rank's files of a checkpoint; return size and hash of each. All ranks call this."""
    own = folder / FOLDER / f"rank-{number:05d}-of-{ranks:05d}.safetensors"
    tensors, rows = _shards(learner, number, ranks)
    try:
        save_file(tensors, own, metadata={"agentrl": json.dumps(rows | {"rank": number, "ranks": ranks})})
        paths = [own]
        if not hasattr(learner.model, "peft_config"):  # an adapter is small: the driver writes it
            paths += _write_model(folder / "model", learner, number)
        return {str(path.relative_to(folder)): _seal(path) for path in paths}
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"rank {number} of the learner could not write its part of {folder.name}: {error}; is the disk full? Older "
            "checkpoints are untouched"
        ) from error


def _shards(learner: RankLearner, number: int, ranks: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    learner.gather_nothing()
    tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
    starts, shapes = {}, {}
    for name, master in learner.optimizer.masters.items():
        whole = learner.optimizer.parameters[name].shape
        shapes[name] = list(whole)
        starts[name] = rows_of(whole[0], number, ranks)[0]
        state = learner.optimizer.moments(name)
        parts = {"master": local(master)}
        parts |= {kind: local(state[kind]) for kind in KINDS if kind in state}
        if learner.reference is not None:
            parts["reference"] = learner.reference[name]
        tensors |= {f"{kind}:{name}": part.contiguous().cpu() for kind, part in parts.items()}
        if "step" in state:
            tensors[f"step:{name}"] = state["step"].reshape(1).cpu()
    return tensors, {"starts": starts, "shapes": shapes}


def _write_model(folder: Path, learner: RankLearner, number: int) -> list[Path]:
    """Write the whole policy in parts; rank 0 writes, the others only gather."""
    from transformers.core_model_loading import revert_weight_conversion

    inner = learner._inner
    paths: list[Path] = []
    part: dict[str, Tensor] = {}
    index: dict[str, str] = {}
    total = 0

    def close() -> None:
        path = folder / f"model-{len(paths) + 1:05d}.safetensors"
        save_file(part, path, metadata={"format": "pt"})
        index.update(dict.fromkeys(part, path.name))
        paths.append(path)
        part.clear()

    for bucket in learner.buckets():
        if number:
            continue
        named = revert_weight_conversion(inner, {n: t.to("cpu", copy=True) for n, t in bucket.items()})
        part.update({name: tensor.contiguous() for name, tensor in named.items()})
        total += sum(tensor.nbytes for tensor in named.values())
        if sum(tensor.nbytes for tensor in part.values()) >= FILE_BYTES:
            close()
    if number:
        return []
    persistent = inner.state_dict().keys()
    part.update({name: buffer.cpu() for name, buffer in inner.named_buffers() if name in persistent})
    if part:
        close()
    if len(paths) == 1:
        return [paths[0].rename(folder / "model.safetensors")]
    final = {p.name: folder / f"{p.stem}-of-{len(paths):05d}.safetensors" for p in paths}
    for path in paths:
        path.rename(final[path.name])
    content = {"metadata": {"total_size": total}, "weight_map": {n: final[f].name for n, f in sorted(index.items())}}
    listing = folder / "model.safetensors.index.json"
    listing.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return [*final.values(), listing]


def load(folder: Path, learner: RankLearner, number: int, ranks: int) -> None:
    """Put this rank's rows of a checkpoint into a learner."""
    reader = ShardReader(folder)
    optimizer = learner.optimizer
    if reader.shapes.keys() != optimizer.masters.keys():
        raise RecipeError("the checkpoint trains other parameters than this recipe; did model or its lora change?")
    learner.gather_nothing()
    optimizer.forget()
    with torch.no_grad():
        for name, master in optimizer.masters.items():
            parameter = optimizer.parameters[name]
            rows = rows_of(parameter.shape[0], number, ranks)
            local(master).copy_(reader.read("master", name, *rows))
            local(parameter).copy_(local(master))
            if (step := reader.step(name)) is not None:
                moments = {kind: torch.zeros_like(master.detach()) for kind in ("exp_avg", "exp_avg_sq")}
                for kind, tensor in moments.items():
                    local(tensor).copy_(reader.read(kind, name, *rows))
                optimizer.remember(name, step, moments)
            if learner.reference is not None and reader.has("reference"):
                learner.reference[name].copy_(reader.read("reference", name, *rows))
    generator = reader.generator(number) if reader.ranks == ranks else None
    if generator is not None:
        torch.set_rng_state(generator)


def _seal(path: Path) -> tuple[int, str]:
    """Flush a file to disk; return its size and hash."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest
