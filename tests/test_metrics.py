"""Metrics: rows are written safely, hold what a round says, and every key is declared."""

import asyncio
import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import declared_metrics, judges, metrics
from agentrl.audit.watch import Watch
from agentrl.catalogue import CHECKOUT
from agentrl.curriculum.replay import Replay
from agentrl.curriculum.sampler import Sampler, Source
from agentrl.envs import load
from agentrl.errors import Fault
from agentrl.recipe import (
    AuditSection,
    Curriculum,
    EvolveSection,
    JudgeCalibration,
    LearnabilityCurriculum,
    LevelsCurriculum,
    PoolsCurriculum,
    ReplaySection,
    RubricReward,
    StagedCurriculum,
    UniformCurriculum,
)
from agentrl.rollout.inflight import FATES
from agentrl.types import Conversation, Group, Outcome, Round, Segment, Task, Trajectory, Verdict

CURRICULA: list[Curriculum] = [
    LearnabilityCurriculum(),
    UniformCurriculum(type="uniform"),
    LevelsCurriculum(type="levels"),
    StagedCurriculum(type="staged"),
    PoolsCurriculum(type="pools"),
]
TASK = Task(id="files/train/1/0", split="train", level=1, prompt="")


def episode(group: int, index: int, score: float | None, tokens: int = 2, ending: Any = "done") -> Trajectory:
    """An episode with a prompt token and some sampled ones, of version 3."""
    size = tokens + 1
    segment = Segment(
        np.ones(size, dtype=np.int32),
        np.array([0.0] + [-1.0] * tokens, dtype=np.float32),
        np.array([-1] + [3] * tokens, dtype=np.int32),
        np.array([0] + [2] * tokens, dtype=np.uint8),
    )
    fault = None if score is not None else Fault(component="engine", blame="infra", cause="gone")
    outcome = Outcome(ending=ending, grade="graded" if fault is None else "infra_error", score=score, fault=fault)
    timings = {"engine": 1.0, "tools": 0.5, "verifier": 0.25}
    return Trajectory(
        task=TASK, group=group, index=index, seed=0, segments=(segment,), messages=(), outcome=outcome, timings=timings
    )


def group(number: int, *episodes: Trajectory, censored: bool = False) -> Group:
    return Group(number=number, env="files", task=TASK, trajectories=episodes, censored=censored)


def round_() -> Round:
    kept = group(0, episode(0, 0, 1.0, 4), episode(0, 1, 0.0, 2, "max_turns"), episode(0, 2, None))
    dropped = group(1, episode(1, 0, 0.0), episode(1, 1, 0.0, 2, "agent_error"), censored=True)
    return Round(number=0, kept=(kept,), dropped=(dropped,), timings={"rollout": 2.0, "learner": 3.0})


def forced_row() -> metrics.Row:
    """The row of an episode of five tokens, with forced ones in two places."""
    whole = episode(0, 0, 1.0, 4)
    ids, sources = whole.segments[0].token_ids, np.array([2, 3, 3, 2, 3], np.uint8)
    mask = sources == 2
    logprobs, versions = np.where(mask, -1.0, 0.0).astype(np.float32), np.where(mask, 3, -1).astype(np.int32)
    segment = Segment(ids, logprobs, versions, sources)
    kept = group(0, replace(whole, segments=(segment,)))
    return metrics.step_row(Round(number=0, kept=(kept,)), {}, version=5, informative=[])


def test_turns_whose_thinking_was_closed_are_counted() -> None:
    assert forced_row()["rollout/think_forced"] == 2


def test_alarms_are_counted_by_environment_and_name_their_cause() -> None:
    fault = Fault(component="environment", blame="agent", cause="TypeError: x", line="tools.py:12")
    broken = Outcome(ending="agent_error", grade="graded", score=0.0, fault=fault, alarm=True)
    graded = replace(episode(0, 1, 0.0), outcome=broken, verdict=Verdict(score=0.0))
    kept = group(0, replace(episode(0, 0, 0.0), outcome=broken), graded)
    row = metrics.step_row(Round(number=0, kept=(kept,)), {}, version=5, informative=[])
    assert (row["rollout/grading_alarms"], row["rollout/episode_alarms"]) == (1, {"files": 1})
    assert row["rollout/alarm_cause"] == "files: TypeError: x at tools.py:12"


def test_a_round_by_hand() -> None:
    assert metrics.step_row(round_(), {"learn/loss": 0.5}, version=5, informative=[True, False]) == {
        "rollout/score": 0.25,
        "rollout/score_std": 0.25,
        "rollout/informative": 0.5,
        "rollout/all_pass": 0.0,
        "rollout/all_fail": 0.5,
        "rollout/groups_kept": 1,
        "rollout/groups_dropped": 1,
        "rollout/groups_stopped": 1,
        "rollout/episodes": 5,
        "rollout/reported": 0.0,
        "rollout/ungraded": 1,
        "rollout/grading_alarms": 0,
        "rollout/episode_alarms": {},
        "rollout/alarm_cause": "",
        "rollout/truncated": 0.25,
        "rollout/agent_errors": 0.25,
        "rollout/tokens": 12,
        "rollout/tokens_dropped": 4,
        "rollout/tokens_mean": 2.5,
        "rollout/tokens_max": 4,
        "rollout/staleness_mean": 2.0,
        "rollout/staleness_max": 2,
        "rollout/engine_seconds": 5.0,
        "rollout/tool_seconds": 2.5,
        "rollout/verifier_seconds": 1.25,
        "rollout/round_seconds": 2.0,
        "rollout/pause_seconds": 3.0,
        "learn/loss": 0.5,
    }


def compaction_row() -> dict[str, Any]:
    """A round of two episodes whose context is compacted: one in two conversations, one in a single one."""
    task = Conversation(kind="task", opening=2, messages=())
    long = replace(episode(0, 0, 1.0, 6), conversations=(task, replace(task, kind="drop")))
    long = replace(long, segments=(*long.segments, episode(0, 0, 1.0, 8).segments[0]))
    kept = group(0, long, replace(episode(0, 1, 0.0), conversations=(task,)))
    return metrics.step_row(Round(number=0, kept=(kept,)), {}, version=5, informative=[True])


def test_compacted_episodes_are_told_where_there_are_any() -> None:
    row = compaction_row()
    compacted = ("rollout/compacted", "rollout/conversations_mean", "rollout/context_max")
    assert [row[name] for name in compacted] == [0.5, 1.5, 9]
    assert not {*compacted} & metrics.step_row(round_(), {}, version=5, informative=[]).keys()


TRAFFIC = {"ready_groups": 1, "running_groups": 2, "stale_groups": 3, "spared_rollouts": 4}


def test_what_became_of_tokens_is_told_by_the_length_of_their_episodes() -> None:
    tokens = {"trained": {"512": 900, "8": 30, "64": 60}, "dropped": {"8": 5}, "stale": {}, "thrown": {"1024": 7}}
    row = metrics.traffic_row(TRAFFIC, tokens, {"cached_tokens": 1.0, "prompt_tokens": 4.0, "hold_s": 0.5})
    assert row == {
        "rollout/groups_ready": 1,
        "rollout/groups_in_flight": 2,
        "rollout/groups_stale": 3,
        "rollout/episodes_spared": 4,
        "rollout/tokens_trained_by_length": {"8": 30, "64": 60, "512": 900},
        "rollout/tokens_dropped_by_length": {"8": 5},
        "rollout/tokens_stale_by_length": {},
        "rollout/tokens_thrown_by_length": {"1024": 7},
        "rollout/prompt_cache": 0.25,
        "learn/publish_hold_seconds": 0.5,
    }
    assert list(row["rollout/tokens_trained_by_length"]) == ["8", "64", "512"]


def test_an_evaluation_is_told_per_environment() -> None:
    summaries: dict[str, dict[str, Any]] = {
        "files": {"pass@1": {"value": 0.5}, "passes": {"files/heldout/1/0": 0.5}, "family": {"files/heldout/1/0": "f"}},
        "sql": {"pass@1": {"value": 1.0}, "passes": {"sql/heldout/1/0": 1.0}},
    }
    row = metrics.eval_row("rl", "heldout", 2.0, summaries)
    assert [row[key] for key in ("stage", "split", "seconds")] == ["rl", "heldout", 2.0]
    assert row["eval/sql/pass@1"] == {"value": 1.0}
    assert metrics.by_environment(row) == summaries
    assert metrics.passes(row) == {"files/heldout/1/0": 0.5, "sql/heldout/1/0": 1.0}
    assert metrics.families(row) == {"files/heldout/1/0": "f"}


def curriculum_rows() -> list[dict[str, Any]]:
    rows = []
    for recipe, tasks in itertools.product(CURRICULA, (None, 4)):
        sources = [Source(name="files", environment=load("files")(), tasks=tasks)]
        sampler = Sampler(recipe, sources, 0)
        number = sampler.next().group
        sampler.observe([group(number, episode(number, 0, 1.0), episode(number, 1, 0.0))])
        rows.append(dict(sampler.metrics()))
    return rows


def learner_row() -> dict[str, Any]:
    from agentrl.learn.step_report import Mismatch, StepReport

    mismatch = Mismatch(mean=0.0, max=0.0, judged=0.0, ess=1.0, histogram=(0,) * 11, current=1.0)
    numbers = {name: 1 for name in StepReport.__dataclass_fields__ if name != "mismatch"}
    return StepReport(mismatch=mismatch, **numbers).metrics()


def players_row() -> dict[str, Any]:
    scheduler = dict.fromkeys(("ready_groups", "running_groups", "stale_groups", "spared_rollouts"), 0)
    players = {"players": 3, "players_lost": 1, "rollouts_lost": 8, "rollouts_repeated": 9, "rollouts_late": 2}
    players |= {"servers": 4, "servers_lost": 1}
    return metrics.traffic_row(scheduler, {}, players)


def test_players_of_a_cluster_are_told_where_there_are_any() -> None:
    row = players_row()
    assert {name: value for name, value in row.items() if "groups" not in name and value} == {
        "rollout/players": 3,
        "rollout/players_lost": 1,
        "rollout/episodes_lost": 8,
        "rollout/episodes_repeated": 9,
        "rollout/episodes_late": 2,
        "rollout/servers": 4,
        "rollout/servers_lost": 1,
    }


def reward_rows() -> list[dict[str, Any]]:
    """What verifiers and judge gave: one episode that failed, one that was judged, one that could not be."""
    parts = [{"verifier": 0.0}, {"verifier": 1.0, "judge": 0.5}, {"verifier": 1.0, "judge": 0.0, "judge.unjudged": 1.0}]
    judged = [replace(episode(0, n, 0.5), verdict=Verdict(score=0.5, breakdown=part)) for n, part in enumerate(parts)]
    row = judges.reward_row(Round(number=0, kept=(group(0, *judged),)))
    assert row == {"reward/verifier": 2 / 3, "reward/judge": 0.25, "reward/judged": 2, "reward/unjudged": 1}
    section = RubricReward.model_validate({"type": "rubric", "criteria": [{"name": "a", "question": "Is it so?"}]})
    rubric = judges.EvolvingRubric(section, EvolveSection(every=5), JudgeCalibration(), None)
    nobody: Any = None
    grown = asyncio.run(rubric.step(1, round_(), nobody, {}, lambda text: None))
    return [dict(row), dict(grown), *map(dict, [judges.reward_row(round_())])]


def watch_rows() -> list[dict[str, Any]]:
    """What the reward-hacking watch sees in a round, and what it writes where it fails."""
    audited = replace(episode(0, 0, 1.0), audit=Verdict(score=0.0))
    seen = Round(number=1, kept=(group(0, audited, episode(0, 1, 0.0)),))
    level = str(audited.task.level)
    evals = [{"kind": "eval", "step": 1, "eval/files/levels": {level: 0.5}}]
    before = [{"kind": "step", "step": 1, "audit/levels": {f"files/{level}": [1, 2]}}]
    kept = [replace(one, env="files") for one in seen.kept]
    seen = replace(seen, kept=tuple(kept))
    watch = Watch(AuditSection(), {}, 0)
    return [watch.look(2, seen, before, evals), watch.look(1, None)]  # type: ignore[arg-type]


def test_every_key_is_declared_and_every_declared_key_is_written() -> None:
    """The rows of fake rounds, and those of real runs that the repository keeps."""
    evidence = sorted((CHECKOUT / "docs" / "evidence").glob("**/metrics.jsonl"))
    rows = [row for path in evidence for row in metrics.read(path)]
    rows += [metrics.step_row(round_(), learner_row(), version=5, informative=[True]), *curriculum_rows()]
    rows += [metrics.traffic_row({**TRAFFIC, "long_rounds": 1}, {fate: {"8": 5} for fate in FATES}, {})]
    rows += [compaction_row(), forced_row(), Replay(ReplaySection(), lambda env, trajectory: False).row()]
    rows += [judges.named("http://127.0.0.1:9/v1#judge").step_row(), players_row(), *watch_rows()]
    rows += reward_rows()
    assert len(evidence) > 10 and [key for row in rows for key in metrics.undeclared(row)] == []
    assert metrics.undeclared({"score": 1.0, "rollout/scores": 1.0, "eval/a/b/score": 1.0}) == [
        "score", "rollout/scores", "eval/a/b/score",
    ]  # fmt: skip
    names = [metric.name for metric in declared_metrics.METRICS]
    assert len(set(names)) == len(names)
    written = {key for row in rows for key in row}
    generic = {_generic(key) for key in written}
    assert [name for name in names if name not in generic] == []


def _generic(key: str) -> str:
    group, *rest = key.split("/")
    name = "pass@<k>" if rest and rest[-1].startswith("pass@") else (rest or [group])[-1]
    return "/".join([group, *(["<environment>"] if len(rest) == 2 else []), name]) if rest else key


def test_every_metric_says_what_it_means() -> None:
    assert [m.name for m in declared_metrics.METRICS if not m.meaning.endswith(".") or len(m.meaning) > 200] == []


@pytest.mark.parametrize("value", [float("inf"), float("nan"), [1.0, float("nan")], {"a": float("-inf")}])
def test_values_that_are_not_finite_become_null(tmp_path: Path, value: Any) -> None:
    log = metrics.Metrics(tmp_path / "metrics.jsonl")
    row = log.log("step", 0, {"learn/loss": value})
    log.close()
    assert "null" in json.dumps(row["learn/loss"], allow_nan=False)


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = metrics.Metrics(path)
    for step in range(4):
        log.log("step", step, {"learn/loss": float("nan") if step == 1 else step})
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # a crash while writing
    again = metrics.Metrics(path, resume_step=2)
    again.log("step", 3, {"learn/loss": 9})
    again.close()
    rows = list(metrics.read(path))
    times = [row.pop("time") for row in rows]
    assert times == sorted(times) and abs(times[-1] - time.time()) < 60
    assert rows == [
        {"kind": "step", "step": 0, "learn/loss": 0},
        {"kind": "step", "step": 1, "learn/loss": None},
        {"kind": "step", "step": 2, "learn/loss": 2},
        {"kind": "step", "step": 3, "learn/loss": 9},
    ]
