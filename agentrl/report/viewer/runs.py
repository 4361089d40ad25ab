"""Runs as the viewer sees them: found in folders, read from their files, summed up for the page and the report."""

from __future__ import annotations

import json
import math
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from agentrl import declared_metrics, metrics, statistics
from agentrl.errors import UserError
from agentrl.report.viewer import queries, tokens
from agentrl.report.viewer.index import Index

POINTS = 1500
"""Of a curve, at most; longer ones are thinned."""
TEXT = 100_000
"""Characters of one message that the page gets, unless it asks for all."""
TOKENS = 20_000
"""Tokens of one trajectory that the page gets."""
CURVES = (
    "rollout/score", "rollout/informative", "learn/loss", "learn/entropy", "learn/grad_norm", "learn/kl",
    "learn/clip_fraction", "learn/mismatch_mean", "rollout/tokens_mean", "rollout/truncated",
    "rollout/tokens_per_second", "rollout/staleness_mean", "curriculum/level", "curriculum/calibration_error",
    "learn/memory_gib", "seconds",
)  # fmt: skip
"""Metrics that a run's page draws, where the run has them."""
STAGES = ("rollout/round_seconds", "learn/seconds", "learn/publish_seconds")
"""Parts of a step's wall time, one after another."""


class RunView:
    """One run's folder, opened for reading."""

    def __init__(self, path: Path, name: str, *, cache: Path | None = None, patience: float = math.inf) -> None:
        """`patience`: seconds that opening takes at most; the rest of a long run comes in afterwards."""
        self.path, self.name = path, name
        self._cache, self._patience = cache, patience
        self._late = 0
        """How often something was taken in after opening."""
        self._index: Index | None = None
        self._lock = threading.RLock()
        self._rows: list[metrics.Row] = []
        self._read: tuple[int, int] = (0, 0)
        """Inode of metrics.jsonl, and how far it was read."""

    def __repr__(self) -> str:
        return f"RunView({self.name})"

    @property
    def index(self) -> Index:
        """The run's trajectories; opened when first asked for."""
        with self._lock:
            if self._index is None:
                self._index = Index(self.path, cache=self._cache)
                self._index.grow(self._patience)
                if self._index.behind:
                    threading.Thread(target=self._finish, args=(self._index,), daemon=True, name="index").start()
            return self._index

    def _finish(self, index: Index) -> None:
        """Take in the rest of a long run a little at a time, and rest as long in between: questions come first."""
        with suppress(sqlite3.ProgrammingError):  # closed meanwhile
            while index.behind:
                began = time.monotonic()
                index.grow(0.0)
                self._late += 1
                time.sleep(time.monotonic() - began)

    def close(self) -> None:
        """Close what was opened."""
        with self._lock:
            if self._index is not None:
                self._index.close()
                self._index = None

    def rows(self) -> list[metrics.Row]:
        """Return the run's metric rows so far; a resume may have replaced the file."""
        path = self.path / "metrics.jsonl"
        with self._lock:
            try:
                status = path.stat()
            except FileNotFoundError:
                return []
            inode, end = self._read
            if status.st_ino != inode or status.st_size < end:
                self._rows, end = [], 0
            if status.st_size > end:
                with path.open("rb") as file:
                    file.seek(end)
                    data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                for line in whole.splitlines():
                    try:
                        row = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(row, dict) and "kind" in row:
                        self._rows.append(row)
                end += len(whole)
            self._read = (status.st_ino, end)
            return list(self._rows)

    def stamp(self) -> tuple[int, int, int, int]:
        """Return a value that changes whenever the run has written something, or more of it was taken in."""
        files = [self.path / "metrics.jsonl", self.path / "trajectories" / "rounds.index"]
        sizes = [path.stat().st_size if path.exists() else 0 for path in files]
        parts = sorted((self.path / "trajectories").glob("trajectories-*.jsonl.gz"))
        size = parts[-1].stat().st_size if parts else 0
        return (sizes[0], sizes[1], size + len(parts) * (1 << 40), self._late)

    def recipe(self) -> dict[str, Any]:
        """Return the recipe as plain data."""
        try:
            recipe = yaml.safe_load((self.path / "recipe.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return recipe if isinstance(recipe, dict) else {}

    def state(self, rows: Sequence[metrics.Row], steps: int) -> str:
        """Return `running`, `done` or `stopped`."""
        if _locked(self.path / ".lock"):
            return "running"
        done = any(row["kind"] == "eval" and row.get("stage") == "end" for row in rows)
        last = max((row["step"] for row in rows if row["kind"] == "step"), default=0)
        if done or (steps and last >= steps):
            return "done"
        changed = (self.path / "metrics.jsonl").stat().st_mtime if rows else 0.0
        return "running" if time.time() - changed < 30 else "stopped"

    def summary(self) -> dict[str, Any]:
        """Return what a list of runs says about this one."""
        rows, recipe = self.rows(), self.recipe()
        planned = (recipe.get("run") or {}).get("steps", 0)
        steps = [row for row in rows if row["kind"] == "step"]
        evals = [row for row in rows if row["kind"] == "eval"]
        heldout = [
            _evaluation(row, env, part) for row in evals[-1:] for env, part in metrics.by_environment(row).items()
        ]
        return {
            "id": self.name,
            "state": self.state(rows, planned),
            "step": steps[-1]["step"] if steps else 0,
            "steps": planned,
            "score": steps[-1].get("rollout/score") if steps else None,
            "scores": _thin([row.get("rollout/score") for row in steps], 60),
            "heldout": heldout,
            "envs": [env.get("name") for env in recipe.get("envs") or []],
            "model": _model(recipe),
            "algorithm": (recipe.get("algorithm") or {}).get("type", ""),
            "alarms": sum(row["kind"] == "alarm" for row in rows),
            "seconds": sum(row.get("seconds") or 0.0 for row in rows),
            "began": rows[0]["time"] if rows else None,
            "changed": rows[-1]["time"] if rows else None,
        }

    def overview(self, curves: Sequence[str] = ()) -> dict[str, Any]:
        """Return everything that a run's page draws from its metrics."""
        rows = self.rows()
        steps = [row for row in rows if row["kind"] == "step"]
        names = sorted({name for row in steps for name, value in row.items() if _drawable(name, value)})
        chosen = [name for name in (curves or CURVES) if name in names]
        thinned = _every(steps, POINTS)
        numbers = [row["step"] for row in thinned]
        warm = [row for row in rows if row["kind"] == "warm_start"]
        return {
            **self.summary(),
            "names": names,
            "meanings": {metric.name: f"{metric.meaning} ({metric.unit})" for metric in declared_metrics.METRICS},
            "curves": {name: [row.get(name) for row in thinned] for name in chosen},
            "x": numbers,
            "evals": [
                _evaluation(row, env, part)
                for row in rows
                if row["kind"] == "eval"
                for env, part in metrics.by_environment(row).items()
            ],
            "verdict": gain(rows),
            "alarms_list": [row for row in rows if row["kind"] == "alarm"],
            "stages": {name: [row.get(name) or 0.0 for row in thinned] for name in (*STAGES, "seconds")},
            "totals": _totals(steps, [row for row in rows if row["kind"] == "eval"], warm),
            "curriculum": _beliefs(thinned),
            "warm_start": warm,
            "recipe": self._text("recipe.yaml"),
            "environment": self._text("environment.json"),
        }

    def trajectory(self, key: str, *, full: bool = False, limit: int = TOKENS) -> dict[str, Any] | None:
        """Return one trajectory for the page: messages, at most `limit` tokens, verdict, ledger, what became of it."""
        row = self.index.row(key)
        if row is None:
            return None
        (columns,) = queries.table(self.index, "key = ?", [key]) or [{}]
        whole = queries.parsed(row)
        segments, left = [], limit
        for segment in whole.pop("segments"):
            ids = segment["token_ids"][:left]
            shown = {name: segment[name][: len(ids)] for name in ("logprobs", "versions", "sources")}
            count = len(segment["token_ids"])
            segments.append({**shown, "ids": ids, "texts": tokens.texts(self.path, ids), "count": count})
            left -= len(ids)
        messages = [_cut(message, full) for message in whole.pop("messages")]
        whole["conversations"] = [
            {**part, "messages": [_cut(message, full) for message in part["messages"]]}
            for part in whole.get("conversations") or ()
        ]
        task = whole["task"] if full else _cut_task(whole["task"])
        group = queries.siblings(self.index, key)
        return {**whole, "task": task, "messages": messages, "segments": segments, "columns": columns, "group": group}

    def _text(self, name: str) -> str:
        path = self.path / name
        return path.read_text(encoding="utf-8", errors="replace")[:200_000] if path.is_file() else ""


def gain(rows: Sequence[metrics.Row]) -> str:
    """Say in words what RL changed: the last evaluation against the one that RL began with, task by task."""
    evals = [row for row in rows if row["kind"] == "eval"]
    before = [row for row in evals if row.get("stage") in ("start", "sft")][-1:]
    after = [row for row in evals if row["step"] > 0][-1:]
    if not before or not after:
        return ""
    earlier = "the warm start" if before[0]["stage"] == "sft" else "the untrained policy"
    said = difference(before[0], after[0])
    return f"after step {after[0]['step']} against {earlier}: {said}" if said else ""


def difference(before: metrics.Row, after: metrics.Row) -> str:
    """Say in words how two evaluations of the same tasks differ; nothing where they share none."""
    first, second = metrics.passes(before), metrics.passes(after)
    tasks = sorted(first.keys() & second.keys())
    if not tasks or before.get("split") != after.get("split"):
        return ""
    named = metrics.families(after)
    families = [named.get(task, "") for task in tasks] if named else None
    return statistics.verdict(
        statistics.paired([first[t] for t in tasks], [second[t] for t in tasks], families=families)
    )


def last_evaluation(view: RunView) -> metrics.Row | None:
    """Return a run's newest evaluation."""
    evals = [row for row in view.rows() if row["kind"] == "eval"]
    return evals[-1] if evals else None


def shared(a: RunView, b: RunView) -> dict[str, Any]:
    """Return what two runs have in common: their tasks, and how the second's newest evaluation compares."""
    first, second = last_evaluation(a), last_evaluation(b)
    said = difference(first, second) if first and second and a is not b else ""
    text = f"newest evaluations, {b.name} against {a.name}: {said}" if said else ""
    return {"tasks": queries.shared_tasks(a.index, b.index), "verdict": text}


def find(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the runs that paths name, by a short name each: run folders, or folders that hold some."""
    folders: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: no such folder; name a run's folder, or a folder of runs")
        if is_run(path):
            folders.append(path)
        else:
            folders += sorted(inner for inner in path.iterdir() if inner.is_dir() and is_run(inner))
    named: dict[str, Path] = {}
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        name, count = folder.name, 2
        while name in named:
            name, count = f"{folder.name}~{count}", count + 1
        named[name] = folder
    return named


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run."""
    return (path / "recipe.yaml").is_file() and ((path / "metrics.jsonl").exists() or (path / "trajectories").is_dir())


def _locked(path: Path) -> bool:
    """Return whether a process of this machine holds a run. Taking the lock to try it would get in the run's way."""
    try:
        inode = path.stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return False
    return any(f":{inode} " in line and "FLOCK" in line for line in locks.splitlines())


def _model(recipe: dict[str, Any]) -> str:
    model = recipe.get("model") or {}
    if model.get("type") == "scratch":
        return f"scratch, {model.get('layers')} × {model.get('width')}"
    return Path(str(model.get("path", ""))).name


def _drawable(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and name not in ("step", "time")


def _evaluation(row: metrics.Row, env: str, part: metrics.Row) -> dict[str, Any]:
    figures = {name: value for name, value in part.items() if name not in ("passes", "family")}
    return {"step": row["step"], "stage": row.get("stage", ""), "split": row.get("split", ""), "env": env, **figures}


def _totals(steps: Sequence[Any], evals: Sequence[Any], warm: Sequence[Any]) -> dict[str, float]:
    """Return the seconds of the whole run by stage."""
    parts = {name: sum(row.get(name) or 0.0 for row in steps) for name in STAGES}
    rest = sum(row.get("seconds") or 0.0 for row in steps) - sum(parts.values())
    fine = sum((row.get("seconds") or 0.0) + (row.get("warm_start/demonstration_seconds") or 0.0) for row in warm)
    return {
        "rollouts": parts["rollout/round_seconds"],
        "learning": parts["learn/seconds"],
        "publishing weights": parts["learn/publish_seconds"],
        "other": max(0.0, rest),
        "evaluations": sum(row.get("seconds") or 0.0 for row in evals),
        "warm start": fine,
    }


def _beliefs(steps: Sequence[Any]) -> dict[str, Any]:
    """Return what the curriculum believed of each environment, step by step."""
    answer: dict[str, Any] = {}
    for name in ("in_band", "solved", "hopeless", "level_p", "coverage", "tasks_seen"):
        for row in steps:
            for key, value in row.items():
                if key.startswith("curriculum/") and key.endswith(f"/{name}"):
                    env = key.split("/")[1]
                    answer.setdefault(env, {}).setdefault(name, []).append([row["step"], value])
    return answer


def _every(rows: Sequence[Any], count: int) -> list[Any]:
    stride = -(-len(rows) // count) if rows else 1
    return [*rows[:-1:stride], *rows[-1:]] if stride > 1 else list(rows)


def _thin(values: Sequence[Any], count: int) -> list[Any]:
    return _every(values, count)


def _cut(message: dict[str, Any], full: bool) -> dict[str, Any]:
    if full:
        return message
    lengths = {name: len(message[name]) for name in ("content", "thinking") if len(message[name]) > TEXT}
    calls = [{**call, "arguments": call["arguments"][:TEXT]} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls, **{name: message[name][:TEXT] for name in lengths}, "cut": lengths}


def _cut_task(task: dict[str, Any]) -> dict[str, Any]:
    setup = json.dumps(task["setup"], indent=1, ensure_ascii=False)
    return {**task, "prompt": task["prompt"][:TEXT], "setup": setup[:TEXT]}
