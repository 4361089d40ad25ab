"""The part of a checkpoint that ranks write: safetensors files, which any number of ranks can read.

    model/model-00001-of-00003.safetensors   the policy, whole, as transformers loads it; written by rank 0
    shards/rank-00000-of-00002.safetensors   a rank's rows of master weights, moments and reference
    shards/learner.json                      counters, and coefficients that follow a target

Ranks hold rows (dimension 0) of every tensor. A file says where its rows begin, so that a rank of another number reads
the rows it needs from whichever files have them. Nothing here is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.errors import StorageError

FOLDER = "shards"
COUNTERS = "learner.json"
KINDS = ("master", "exp_avg", "exp_avg_sq", "reference")


def write_counters(folder: Path, counters: Mapping[str, Any]) -> None:
    """Write the learner's counters below a checkpoint's folder."""
    (folder / FOLDER / COUNTERS).write_text(json.dumps(dict(counters)), encoding="utf-8")


def read_counters(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's counters and the folder of its shards."""
    counters: dict[str, Any] = json.loads((folder / FOLDER / COUNTERS).read_text(encoding="utf-8"))
    return counters | {"shards": str(folder / FOLDER)}


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
        self._files: list[Any] = [safe_open(path, framework="pt") for path in sorted(folder.glob("rank-*.safetensors"))]
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
        stored: Tensor | None = self._files[0].get_tensor(key)[0] if key in self._keys[0] else None
        return stored

    def generator(self, number: int) -> Tensor | None:
        """Return the state of a rank's random generator."""
        stored: Tensor | None = self._files[number].get_tensor("rng") if "rng" in self._keys[number] else None
        return stored


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


def rows_of(count: int, number: int, ranks: int) -> tuple[int, int]:
    """Return the rows that a rank has, as FSDP divides them."""
    chunk = -(-count // ranks)
    return min(count, number * chunk), min(count, (number + 1) * chunk)
