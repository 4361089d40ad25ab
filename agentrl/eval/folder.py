"""The files of an evaluation: its protocol with a hash, its key, every episode as it ends, and the report.

<run>/evaluations/<name>/
  evaluation.json     protocol and its hash, key, policies; readable by the owner alone, for the key's sake
  1/  2/  ...         one folder per policy: trajectories-000000.jsonl.gz (rollout/store.py), spent.json of an endpoint
  report.json         every figure, once all is played; report.md is the table

An interrupted evaluation is resumed by the same command: episodes that ended are read, not played again, under the same
key. A finished one is never touched; the same command then begins another, under a new key.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import records
from agentrl.codec import Stored
from agentrl.engines.spending import Spending
from agentrl.errors import StorageError, UserError
from agentrl.evaluation import Problem, splits_of
from agentrl.hashing import digest, task_hash
from agentrl.recipe import EvalSection, Recipe, RolloutSection
from agentrl.rollout import store

FORMAT = 1
REPORT = "report.json"
BUDGET = (
    *("max_turns", "max_tokens", "max_turn_tokens", "max_context"),
    *("episode_seconds", "tool_seconds", "verify_seconds", "retries"),
)
Protocol = dict[str, Any]


def protocol(
    problems: Sequence[Problem],
    rollout: RolloutSection,
    section: EvalSection,
    seed: int,
    versions: Mapping[str, str],
    judge: str = "",
    strategy: Mapping[str, str] | None = None,
) -> Protocol:
    """Return everything that a score depends on besides the policy, with its hash. The number of tries is no part.

    `judge` names the model that judges, where an environment asks one; `strategy` what later tries are told.
    """
    parts: Protocol = {
        "split": splits_of(problems),
        "tasks": digest([[p.key, p.env, p.task.level, task_hash(p.task, secret=True)] for p in problems]),
        "task_count": len(problems),
        "budget": {name: getattr(rollout, name) for name in BUDGET},
        "sampling": {"temperature": section.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k, "seed": seed},
        "versions": dict(versions),
        **({"compaction": rollout.compaction.model_dump()} if rollout.compaction else {}),
        **({"judge": judge} if judge else {}),
        **({"strategy": dict(strategy)} if strategy else {}),
    }
    return {**parts, "hash": digest(parts)[:16]}


def differences(a: Protocol, b: Protocol) -> list[str]:
    """Say in what two protocols differ; nothing where they are the same."""
    lines = []
    for name in sorted((a.keys() | b.keys()) - {"hash"}):
        one, other = a.get(name), b.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            keys = sorted(one.keys() | other.keys())
            lines += [
                f"{name}.{key}: {one.get(key)} and {other.get(key)}" for key in keys if one.get(key) != other.get(key)
            ]
        elif one != other:
            lines.append(f"{name}: {one} and {other}")
    return lines


@dataclass(frozen=True, slots=True)
class EvalFolder:
    """An open, locked folder of one evaluation."""

    path: Path
    record: Mapping[str, Any]
    """The content of evaluation.json."""
    resumed: bool

    @property
    def key(self) -> bytes:
        """The key of its hidden cases."""
        return bytes.fromhex(self.record["key"])

    def side(self, number: int) -> Path:
        """Return the folder of a policy, counted from 1."""
        return self.path / str(number)

    @contextmanager
    def spending(self, number: int, spending: Spending) -> Iterator[None]:
        """Continue the count of what a policy's endpoint was paid, and keep it."""
        file = self.side(number) / "spent.json"
        if file.exists():
            spent = json.loads(file.read_text(encoding="utf-8"))
            spending.prompt, spending.completion = int(spent["prompt"]), int(spent["completion"])
        try:
            yield
        finally:
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(file, json.dumps({"prompt": spending.prompt, "completion": spending.completion}) + "\n")

    def write(self, report: Mapping[str, Any], markdown: str) -> None:
        """Write the report: after this the evaluation counts as finished."""
        _write(self.path / "report.md", markdown + "\n")
        shown = {name: value for name, value in report.items() if name != "key"}  # the owner alone may read that
        _write(self.path / REPORT, json.dumps(shown, indent=1) + "\n")


def rows(folder: Path) -> dict[tuple[int, int], Stored]:
    """Return the episodes that a policy's folder holds, by group and index."""
    return {(s.trajectory.group, s.trajectory.index): s for s in store.read(folder)}


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record and the report of a finished evaluation."""
    try:
        record = json.loads((path / records.EVALUATION).read_text(encoding="utf-8"))
        report = json.loads((path / REPORT).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: this evaluation is not finished; run its command again to resume it") from error
    except (OSError, ValueError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from error
    if record.get("format") != FORMAT:
        raise UserError(f"{path}: an evaluation of format {record.get('format')}; this version reads {FORMAT}")
    return record, report


@contextmanager
def open_folder(
    parent: Path,
    out: Path | None,
    rules: Protocol,
    policies: Sequence[Mapping[str, str]],
    *,
    recipe: Recipe,
    fresh: bool = False,
) -> Iterator[EvalFolder]:
    """Open the folder of an evaluation: the newest unfinished one of the same protocol and policies, or a new one.

    `out` names the folder itself. `policies` tell their `name`, and an `identity` that changes with the weights.
    """
    if fresh and out is not None and (out / records.EVALUATION).exists():
        raise UserError(f"{out} holds an evaluation already; --fresh needs another --out")
    wanted = {"format": FORMAT, "protocol": rules, "policies": [dict(p) for p in policies]}
    try:
        path = out if out is not None else _unfinished(parent, wanted) if not fresh else None
        path = path or _new(parent, rules["hash"], policies)
        path.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            record, resumed = _record(path, wanted, recipe)
            yield EvalFolder(path, record, resumed)
    except OSError as error:
        raise StorageError(f"{error.filename or parent}: {error.strerror}; choose another folder with --out") from error


def _unfinished(parent: Path, wanted: Mapping[str, Any]) -> Path | None:
    for record in sorted(parent.glob(f"*/{records.EVALUATION}"), key=lambda p: p.stat().st_mtime, reverse=True):
        if not (record.parent / REPORT).exists() and _matches(record, wanted):
            return record.parent
    return None


def _matches(record: Path, wanted: Mapping[str, Any]) -> bool:
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
        return all(content[name] == json.loads(json.dumps(value)) for name, value in wanted.items())
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _new(parent: Path, hashed: str, policies: Sequence[Mapping[str, str]]) -> Path:
    slug = re.sub(r"[^A-Za-z0-9]+", "-", policies[0]["name"]).strip("-")[-40:]
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{slug}-{hashed[:8]}"
    number = 1
    while (path := parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def _record(path: Path, wanted: Mapping[str, Any], recipe: Recipe) -> tuple[dict[str, Any], bool]:
    """Read the folder's record, or write it with a fresh key."""
    file = path / records.EVALUATION
    if file.exists():
        if not _matches(file, wanted):
            raise UserError(
                f"{path} holds another evaluation (other tasks, budget, versions or policies); choose another --out"
            )
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content, True
    if any(entry.name != ".lock" for entry in path.iterdir()):
        raise UserError(f"{path} is not empty and holds no evaluation; choose another --out")
    # Drawn now, one for all policies: none of them can have met its hidden cases.
    content = {**wanted, "key": os.urandom(32).hex(), "recipe": recipe.model_dump(mode="json", by_alias=True)}
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as opened:
        json.dump(content, opened, indent=1)
    return content, False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"{path} is in use by another agentrl process; wait until it ends, or use --fresh"
            ) from None
        yield
    finally:
        os.close(handle)


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
