"""The part of a checkpoint that ranks write: safetensors files, which any number of ranks can read.

    model/model-00001-of-00003.safetensors   the policy, whole, as transformers loads it; written by rank 0
    shards/rank-00000-of-00002.safetensors   a rank's rows of master weights, moments and reference
    shards/learner.json                      counters

Ranks hold rows (dimension 0) of every tensor. A file says where its rows begin, so that a rank of another number reads
the rows it needs from whichever files have them. Nothing here is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.errors import RecipeError, StorageError

if TYPE_CHECKING:
    from agentrl.learn.rank_learner import RankLearner

FOLDER = "shards"
COUNTERS = "learner.json"
FILE_BYTES = 1 << 30
"""A file of the model is closed when it has this size; rank 0 holds one such part in memory."""
KINDS = ("master", "exp_avg", "exp_avg_sq", "reference")


def write_counters(folder: Path, counters: Mapping[str, int]) -> None:
    """Write the learner's counters below a checkpoint's folder."""
    (folder / FOLDER / COUNTERS).write_text(json.dumps(dict(counters)), encoding="utf-8")


def read_counters(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's counters and the folder of its shards."""
    counters: dict[str, Any] = json.loads((folder / FOLDER / COUNTERS).read_text(encoding="utf-8"))
    return counters | {"shards": str(folder / FOLDER)}


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
    from agentrl.learn.rank_learner import local

    learner.gather_nothing()
    tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
    starts, shapes = {}, {}
    for name, master in learner.optimizer.masters.items():
        shapes[name] = list(master.shape)
        starts[name] = _rows(master.shape[0], number, ranks)[0]
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


def write_whole(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a learner of one process as the file of a single rank."""
    masters = state["optimizer"]["masters"]
    tensors = {f"master:{name}": tensor.contiguous() for name, tensor in masters.items()}
    for place, name in enumerate(masters):
        moments = state["optimizer"]["adam"]["state"].get(place, {})
        tensors |= {f"{kind}:{name}": moments[kind].contiguous() for kind in KINDS if kind in moments}
        if "step" in moments:
            tensors[f"step:{name}"] = moments["step"].reshape(1)
    for name, tensor in (state["reference"] or {}).items():
        tensors[f"reference:{name}"] = tensor.contiguous()
    rows = {"starts": dict.fromkeys(masters, 0), "shapes": {n: list(t.shape) for n, t in masters.items()}}
    path = folder / "rank-00000-of-00001.safetensors"
    save_file(tensors, path, metadata={"agentrl": json.dumps(rows | {"rank": 0, "ranks": 1})})


class ShardReader:
    """Reads rows of the tensors in a folder of shards."""

    def __init__(self, folder: Path) -> None:
        self._files = [safe_open(path, framework="pt") for path in sorted(folder.glob("rank-*.safetensors"))]
        self._rows = [json.loads(file.metadata()["agentrl"]) for file in self._files]
        if not self._files or any(rows["ranks"] != len(self._files) for rows in self._rows):
            raise StorageError(f"{folder}: the files of some ranks are missing")
        self.ranks = len(self._files)
        self.shapes: dict[str, list[int]] = self._rows[0]["shapes"]
        self._keys = [set(file.keys()) for file in self._files]

    def has(self, kind: str) -> bool:
        """Tell whether the learner had such tensors."""
        return any(key.startswith(f"{kind}:") for keys in self._keys for key in keys)

    def read(self, kind: str, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows of a tensor from whichever files have them."""
        stop = self.shapes[name][0] if stop is None else stop
        parts = list(self._parts(kind, name, start, stop))
        whole = torch.cat(parts) if parts else torch.zeros(0, *self.shapes[name][1:])
        if len(whole) != stop - start:
            raise StorageError(f"{kind} of {name}: rows {start} to {stop} are not in the files")
        return whole

    def _parts(self, kind: str, name: str, start: int, stop: int) -> Iterator[Tensor]:
        for file, rows, keys in zip(self._files, self._rows, self._keys, strict=True):
            if f"{kind}:{name}" not in keys:
                continue
            stored = file.get_slice(f"{kind}:{name}")
            first = rows["starts"][name]
            low, high = max(start, first), min(stop, first + stored.get_shape()[0])
            if low < high:
                yield stored[low - first : high - first]

    def step(self, name: str) -> Tensor | None:
        """Return how many updates a parameter has had."""
        key = f"step:{name}"
        return self._files[0].get_tensor(key)[0] if key in self._keys[0] else None

    def generator(self, number: int) -> Tensor | None:
        """Return the state of a rank's random generator."""
        return self._files[number].get_tensor("rng") if "rng" in self._keys[number] else None


def load(folder: Path, learner: RankLearner, number: int, ranks: int) -> None:
    """Put this rank's rows of a checkpoint into a learner."""
    from agentrl.learn.rank_learner import local

    reader = ShardReader(folder)
    optimizer = learner.optimizer
    if reader.shapes.keys() != optimizer.masters.keys():
        raise RecipeError("the checkpoint trains other parameters than this recipe; did model or its lora change?")
    learner.gather_nothing()
    optimizer.forget()
    with torch.no_grad():
        for name, master in optimizer.masters.items():
            rows = _rows(master.shape[0], number, ranks)
            local(master).copy_(reader.read("master", name, *rows))
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


def whole_state(state: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of ranks as that of a learner of one process; `groups` are its optimizer's."""
    reader = ShardReader(Path(state["shards"]))
    names = list(reader.shapes)
    adam: dict[int, dict[str, Tensor]] = {}
    for place, name in enumerate(names):
        if (step := reader.step(name)) is not None:
            adam[place] = {kind: reader.read(kind, name) for kind in ("exp_avg", "exp_avg_sq")} | {"step": step}
    reference = {name: reader.read("reference", name) for name in names} if reader.has("reference") else None
    masters = {name: reader.read("master", name) for name in names}
    optimizer = {"masters": masters, "adam": {"state": adam, "param_groups": groups}}
    return {**state, "optimizer": optimizer, "reference": reference}


def _rows(count: int, number: int, ranks: int) -> tuple[int, int]:
    """Return the rows that a rank has, as FSDP divides them."""
    chunk = -(-count // ranks)
    return min(count, number * chunk), min(count, (number + 1) * chunk)


def _seal(path: Path) -> tuple[int, str]:
    """Flush a file to disk; return its size and hash."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stat().st_size, digest
