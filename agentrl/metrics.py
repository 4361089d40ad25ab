"""Writes a run's figures to metrics.jsonl, from which progress, alarms and reports all read.

A row has a `kind` (step, eval, warm_start, alarm), a `step` and a `time`. Its figures are grouped: `rollout/score`,
`learn/loss`, `curriculum/level`, `eval/<environment>/pass@1`. declared_metrics.py declares each of them, and
docs/metrics.md shows them.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.declared_metrics import METRICS
from agentrl.errors import StorageError
from agentrl.types import Round, Trajectory, forced_turns

Row = dict[str, Any]


"""Every figure that a row may hold."""


def undeclared(row: Mapping[str, Any]) -> list[str]:
    """Return the keys of a row that METRICS does not declare."""
    return [key for key in row if not _pattern().fullmatch(key)]


@cache
def _pattern() -> re.Pattern[str]:
    names = (re.escape(metric.name).replace("<environment>", "[^/]+").replace("<k>", r"\d+") for metric in METRICS)
    return re.compile("|".join(names))


class Metrics:
    """Appends rows to metrics.jsonl; each row has a `kind` and a `step`, and is on disk when `log` returns."""

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        """Open the file. With `resume_step`, rows that a lost attempt wrote after that step are removed first; -1 means
        that it left no checkpoint, so that only the evaluation of the untrained policy stays."""
        self.path = path
        if resume_step is not None and path.exists():
            _truncate(path, resume_step)
        self.rows: list[Row] = list(read(path))
        """All rows of the run."""
        self.readers: list[Callable[[Row], None]] = []
        """Called with each new row once it is written."""
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error

    def log(self, kind: str, step: int, values: Mapping[str, Any]) -> Row:
        """Write one row, with the time of day, and return it as it was written."""
        row: Row = {"kind": kind, "step": step, "time": round(time.time(), 3)}
        row |= {name: _plain(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror}; free some space, then resume with --resume") from error
        self.rows.append(row)
        for reader in self.readers:
            reader(row)
        return row

    def of(self, kind: str) -> list[Row]:
        """Return the rows of one kind."""
        return [row for row in self.rows if row["kind"] == kind]

    def close(self) -> None:
        self._file.close()


def read(path: Path, kind: str | None = None) -> Iterator[Row]:
    """Yield the rows of a run in order; a torn last line (a crash while writing) is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if kind is None or row.get("kind") == kind:
                yield row


def step_row(round_: Round, learn: Mapping[str, Any], version: int, informative: Sequence[bool]) -> Row:
    """Return the figures of a round (`rollout/...`) with those of the learner's report.

    `version` is the policy's version when the round was trained on; `informative` says for each group that has enough
    scores whether it carries a signal.
    """
    groups = [*round_.kept, *round_.dropped]
    episodes = [t for group in groups for t in group.trajectories]
    graded = [t for t in episodes if t.outcome.score is not None]
    alarmed = [(group.env, t) for group in groups for t in group.trajectories if t.outcome.alarm]
    lengths = [t.sampled_tokens for t in graded]
    compared = [group.scores for group in groups if len(group.scores) > 1]
    ages = [version - t.oldest_version for group in round_.kept for t in group.trajectories if t.oldest_version >= 0]
    branches = [branch for t in episodes for branch in t.branches]
    played = [*episodes, *branches]
    forced = sum(forced_turns(t.segments) for t in played)
    seconds = {name: sum(t.timings.get(name, 0.0) for t in played) for name in ("engine", "tools", "verifier")}
    unforkable = [why for t in episodes for why in t.ledger.get("unforkable", {}).values()]
    return {
        "rollout/score": _mean([t.outcome.score for t in graded if t.outcome.score is not None]),
        "rollout/score_std": _mean([float(np.std(scores)) for scores in compared]),
        "rollout/informative": _mean(informative),
        "rollout/all_pass": _mean([min(scores) == 1.0 for scores in compared]),
        "rollout/all_fail": _mean([max(scores) == 0.0 for scores in compared]),
        "rollout/groups_kept": len(round_.kept),
        "rollout/groups_dropped": len(round_.dropped),
        "rollout/groups_stopped": sum(group.censored for group in groups),
        "rollout/episodes": len(episodes),
        "rollout/reported": _mean([t.verdict is not None and t.verdict.trust == "reported" for t in graded]),
        "rollout/ungraded": len(episodes) - len(graded),
        "rollout/grading_alarms": sum(t.verdict is not None for _, t in alarmed),
        "rollout/episode_alarms": dict(Counter(env for env, t in alarmed if t.verdict is None)),
        "rollout/alarm_cause": _cause(*alarmed[0]) if alarmed else "",
        "rollout/truncated": _mean([t.outcome.cut_off for t in graded]),
        "rollout/agent_errors": _mean([t.outcome.ending == "agent_error" for t in graded]),
        **({"rollout/think_forced": forced} if forced else {}),
        "rollout/tokens": sum(t.sampled_tokens for t in played),
        "rollout/tokens_dropped": sum(t.spent_tokens for group in round_.dropped for t in group.trajectories),
        "rollout/tokens_mean": _mean(lengths),
        "rollout/tokens_max": max(lengths, default=0),
        "rollout/staleness_mean": _mean(ages),
        "rollout/staleness_max": max(ages, default=0),
        "rollout/engine_seconds": seconds["engine"],
        "rollout/tool_seconds": seconds["tools"],
        "rollout/verifier_seconds": seconds["verifier"],
        "rollout/round_seconds": round_.timings.get("rollout", 0.0),
        "rollout/pause_seconds": round_.timings.get("learner", 0.0),
        **(_branch_row(episodes, branches, unforkable) if branches or unforkable else {}),
        **(_compaction_row(graded) if any(t.conversations for t in graded) else {}),
        **learn,
    }


def _branch_row(episodes: Sequence[Trajectory], branches: Sequence[Trajectory], unforkable: Sequence[str]) -> Row:
    """Return the figures of the continuations that value states."""
    void = [b.outcome.fault.cause for b in branches if b.outcome.score is None and b.outcome.fault is not None]
    return {
        "rollout/branches": len(branches),
        "rollout/branches_void": len(void),
        "rollout/branch_tokens": sum(b.sampled_tokens for b in branches),
        "rollout/branch_score": _mean([b.outcome.score for b in branches if b.outcome.score is not None]),
        "rollout/branch_seconds": sum(t.timings.get("branching", 0.0) for t in episodes),
        "rollout/unforkable": len(unforkable),
        "rollout/branch_cause": next(iter([*void, *unforkable]), ""),
    }


def _compaction_row(graded: Sequence[Trajectory]) -> Row:
    """Return the figures of episodes whose context is compacted."""
    return {
        "rollout/compacted": _mean([len(t.conversations) > 1 for t in graded]),
        "rollout/conversations_mean": _mean([len(t.conversations) for t in graded]),
        "rollout/context_max": max(len(segment) for t in graded for segment in t.segments),
    }


def traffic_row(
    scheduler: Mapping[str, float], tokens: Mapping[str, Mapping[str, int]], engine: Mapping[str, float]
) -> Row:
    """Return what is under way and waiting, what became of tokens by the length of their episode, the engine's use of
    its cache, the parts of the last weight update, and how the players of a cluster fare."""
    publish = {part: engine[f"{part}_s"] for part in ("hold", "send", "check") if f"{part}_s" in engine}
    players = {
        "rollout/players": "players",
        "rollout/players_lost": "players_lost",
        "rollout/episodes_lost": "rollouts_lost",
        "rollout/episodes_repeated": "rollouts_repeated",
        "rollout/episodes_late": "rollouts_late",
        "rollout/servers": "servers",
        "rollout/servers_lost": "servers_lost",
    }
    return {
        "rollout/groups_ready": scheduler["ready_groups"],
        "rollout/groups_in_flight": scheduler["running_groups"],
        "rollout/groups_stale": scheduler["stale_groups"],
        "rollout/episodes_spared": scheduler["spared_rollouts"],
        **({"rollout/long_rounds": scheduler["long_rounds"]} if "long_rounds" in scheduler else {}),
        **{f"rollout/tokens_{fate}_by_length": _by_length(by_length) for fate, by_length in tokens.items()},
        "rollout/prompt_cache": engine.get("cached_tokens", 0.0) / max(1.0, engine.get("prompt_tokens", 0.0)),
        **{f"learn/publish_{part}_seconds": seconds for part, seconds in publish.items()},
        **{metric: engine[name] for metric, name in players.items() if name in engine},
    }


def eval_row(stage: str, split: str, seconds: float, summaries: Mapping[str, Mapping[str, Any]]) -> Row:
    """Return the row of an evaluation from a summary per environment."""
    figures = {f"eval/{env}/{name}": value for env, summary in summaries.items() for name, value in summary.items()}
    return {"stage": stage, "split": split, "seconds": seconds, **figures}


def by_environment(row: Mapping[str, Any]) -> dict[str, Row]:
    """Return the figures of an evaluation's row per environment, under their short names."""
    summaries: dict[str, Row] = {}
    for key, value in row.items():
        if key.startswith("eval/"):
            _, env, name = key.split("/", 2)
            summaries.setdefault(env, {})[name] = value
    return summaries


def passes(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of passed tries of each task of an evaluation's row, over all environments."""
    return {task: share for part in by_environment(row).values() for task, share in part["passes"].items()}


def families(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the family of each task of an evaluation's row that has one, over all environments."""
    return {task: name for part in by_environment(row).values() for task, name in part.get("family", {}).items()}


def _cause(env: str, trajectory: Trajectory) -> str:
    """Say which exception an alarm is about, and where it was raised."""
    fault = trajectory.outcome.fault
    if fault is None:
        return env
    return f"{env}: {fault.cause}" + (f" at {fault.line}" if fault.line else "")


def _by_length(tokens: Mapping[str, int]) -> dict[str, int]:
    return {length: tokens[length] for length in sorted(tokens, key=int)}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _truncate(path: Path, step: int) -> None:
    kept = [row for row in read(path) if row.get("step", 0) <= step or row.get("stage") == "start"]
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        for row in kept:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold; NaN and infinities become null, so that every reader can read the file."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
