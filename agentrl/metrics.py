"""Writes a run's figures to metrics.jsonl, from which progress, alarms and reports all read.

A row has a `kind` (step, eval, warm_start, alarm), a `step` and a `time`. Its figures are grouped: `rollout/score`,
`learn/loss`, `curriculum/level`, `eval/<environment>/pass@1`. METRICS declares each of them; docs/metrics.md shows it.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.errors import StorageError
from agentrl.types import Round, Trajectory, forced_turns

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of one figure."""

    name: str
    """Its key. `<environment>` stands for the name of an environment, `<k>` for a number."""
    unit: str
    """What it is counted in; `share` is a number from 0 to 1."""
    meaning: str
    """What it says, in one sentence."""


METRICS: tuple[Metric, ...] = (
    Metric("kind", "text", "What the row is about: step, eval, warm_start or alarm."),
    Metric("step", "steps", "Learner steps done when the row was written."),
    Metric("time", "seconds", "Time of day, since 1970."),
    Metric("seconds", "seconds", "Wall time of the step, evaluation or warm start; a step's excludes evaluations."),
    Metric("stage", "text", "eval: start (untrained), sft (after the warm start), rl (during RL) or end."),
    Metric("split", "text", "eval: the split that the tasks come from."),
    Metric("name", "text", "alarm: its name; each is raised once per run."),
    Metric("text", "text", "alarm: what was seen, and what to do."),
    Metric("rollout/score", "score", "Mean score of the round's graded episodes, dropped groups included."),
    Metric("rollout/score_std", "score", "Standard deviation of the scores within a group, mean over groups."),
    Metric("rollout/informative", "share", "Groups that carry a signal: the algorithm can tell their episodes apart by "
           "the scores that the group filter counts, or by process rewards where it uses these."),
    Metric("rollout/all_pass", "share", "Groups in which every episode scored 1."),
    Metric("rollout/all_fail", "share", "Groups in which every episode scored 0."),
    Metric("rollout/groups_kept", "groups", "Groups that the learner trained on."),
    Metric("rollout/groups_dropped", "groups", "Groups that the group filter dropped, or that were too old."),
    Metric("rollout/groups_stopped", "groups", "Groups that were stopped early."),
    Metric("rollout/groups_ready", "groups", "Finished groups that wait for the learner when the step ends."),
    Metric("rollout/groups_in_flight", "groups", "Groups under way when the step ends."),
    Metric("rollout/groups_stale", "groups", "Groups dropped because they were too old, over the run so far."),
    Metric("rollout/long_rounds", "rounds", "With `async.mode: tail`: rounds that waited for long groups, so far."),
    Metric("rollout/episodes", "episodes", "Episodes of the round, dropped groups included."),
    Metric("rollout/episodes_spared", "episodes", "Episodes that never began because half a group agreed, so far."),
    Metric("rollout/reported", "share", "Graded episodes whose score another framework reported (trust `reported`)."),
    Metric("rollout/ungraded", "episodes", "Episodes without a score: infrastructure or the verifier failed."),
    Metric("rollout/grading_alarms", "episodes", "Submissions that broke grading twice on fresh sandboxes: score 0."),
    Metric("rollout/episode_alarms", "episodes", "Episodes that broke again when repeated: score 0, by environment."),
    Metric("rollout/alarm_cause", "text", "What the first of these alarms was: environment, exception and line."),
    Metric("rollout/truncated", "share", "Graded episodes that a budget ended."),
    Metric("rollout/agent_errors", "share", "Graded episodes that ended because the agent broke its own sandbox."),
    Metric("rollout/think_forced", "turns", "Turns whose thinking was closed at `rollout.think_tokens`, if any."),
    Metric("rollout/tokens", "tokens", "Tokens sampled for the round, dropped groups included."),
    Metric("rollout/tokens_dropped", "tokens", "Tokens sampled for groups that were dropped."),
    Metric("rollout/tokens_trained_by_length", "tokens", "Tokens trained on so far, by the length of their episode: "
           "under 512 those of episodes of 257 to 512 sampled tokens, and so on."),
    Metric("rollout/tokens_dropped_by_length", "tokens", "The same, of groups that the group filter dropped."),
    Metric("rollout/tokens_stale_by_length", "tokens", "The same, of groups that were too old."),
    Metric("rollout/tokens_thrown_by_length", "tokens", "The same, of episodes that ended after their group had."),
    Metric("rollout/tokens_mean", "tokens", "Sampled tokens per graded episode, mean."),
    Metric("rollout/tokens_max", "tokens", "Sampled tokens of the longest graded episode."),
    Metric("rollout/compacted", "share", "Graded episodes in several conversations (`rollout.compaction`)."),
    Metric("rollout/conversations_mean", "count", "Conversations per graded episode, with `rollout.compaction`."),
    Metric("rollout/context_max", "tokens", "The longest sequence of a graded episode, with `rollout.compaction`."),
    Metric("rollout/tokens_per_second", "tokens/s", "`rollout/tokens` over the wall time of the whole step."),
    Metric("rollout/staleness_mean", "versions", "Age of the kept episodes' oldest token when trained on, mean."),
    Metric("rollout/staleness_max", "versions", "The same, of the oldest episode."),
    Metric("rollout/engine_seconds", "seconds", "Time that episodes waited for the engine, summed over episodes."),
    Metric("rollout/tool_seconds", "seconds", "Time that episodes spent in tools, summed over episodes."),
    Metric("rollout/verifier_seconds", "seconds", "Time that grading took, summed over episodes."),
    Metric("rollout/round_seconds", "seconds", "Wall time that the learner waited for this round."),
    Metric("rollout/pause_seconds", "seconds", "Wall time between the previous round and the wait for this one."),
    Metric("rollout/prompt_cache", "share", "Prompt tokens that the engine had in its cache, over the run so far."),
    Metric("replay/size", "episodes", "With `replay`: rare successes in store."),
    Metric("replay/stored", "episodes", "Those that the step's groups added."),
    Metric("replay/joined", "episodes", "Stored successes that joined a group which had failed as a whole."),
    Metric("replay/refused", "episodes", "Rare successes not stored, since a budget ended them or the watch objects."),
    Metric("rollout/branches", "episodes", "With `credit: branch`: continuations that were played to value states."),
    Metric("rollout/branches_void", "episodes", "Those without a score: another state than their turn's, or other "
           "trouble outside the policy."),
    Metric("rollout/branch_tokens", "tokens", "Tokens of `rollout/tokens` that continuations sampled."),
    Metric("rollout/branch_score", "score", "Mean score of the continuations."),
    Metric("rollout/branch_seconds", "seconds", "Time that episodes took to keep their states, summed over episodes."),
    Metric("rollout/unforkable", "turns", "Turns before which an episode could not be forked: they have no value."),
    Metric("rollout/branch_cause", "text", "Why the first continuation was void, or the first turn had none."),
    Metric("rollout/players", "players", "With a cluster: players that are ready when the step ends."),
    Metric("rollout/players_lost", "players", "Players that died, fell silent or became unfit, so far."),
    Metric("rollout/episodes_lost", "episodes", "Episodes that were lost with their player or its node, so far."),
    Metric("rollout/episodes_repeated", "episodes", "Episodes begun again on another player, with the same seeds."),
    Metric("rollout/episodes_late", "episodes", "Second answers of episodes that were believed lost; dropped, so far."),
    Metric("rollout/servers", "servers", "With servers on a cluster: those that serve when the step ends."),
    Metric("rollout/servers_lost", "servers", "Servers that died or fell silent, so far."),
    Metric("judge/calls", "questions", "Questions that verifiers asked the judge since the last step."),
    Metric("judge/tokens", "tokens", "Tokens of these questions and their answers."),
    Metric("judge/failures", "questions", "Questions that the judge did not answer, after all retries."),
    Metric("reward/verifier", "score", "With rewards.judged: mean score of the verifier alone."),
    Metric("reward/judge", "score", "Mean score that the judge gave to the episodes it was asked about."),
    Metric("reward/judged", "episodes", "Episodes that the judge was asked about."),
    Metric("reward/unjudged", "episodes", "Of them: those that it could not read or that instruct it; they score 0."),
    Metric("reward/rubric", "version", "With rewards.judged.evolve: the newest version of the rubric."),
    Metric("audit/looked", "episodes", "Episodes that the reward-hacking watch looked at again: the best rewarded, and "
           "as many drawn from the others."),
    Metric("audit/rewarded", "episodes", "Of them: those that scored at least 0.5."),
    Metric("audit/suspicious", "episodes", "Of these: those that its signals call suspicious."),
    Metric("audit/attempts", "episodes", "Suspicious ones that scored less: attempts."),
    Metric("audit/signals", "episodes", "Suspicious episodes by signal."),
    Metric("audit/worst", "text", "The most suspicious rewarded episode, and why."),
    Metric("audit/error", "text", "What kept the watch from looking; it never stops a run."),
    Metric("audit/graded", "episodes", "Episodes that an audit verifier graded too."),
    Metric("audit/graded_rewarded", "episodes", "Of them: those that the reward gave at least 0.5."),
    Metric("audit/refuted", "episodes", "Of these: those that the audit verifier gave at least 0.25 less."),
    Metric("audit/score", "score", "Mean score of the audit verifier."),
    Metric("audit/gap", "score", "Reward minus audit score, mean over the episodes that have both."),
    Metric("audit/levels", "episodes", "Passed and graded episodes of the round, by environment and level."),
    Metric("audit/heldout_gap", "share", "Passes of the ten steps before the newest evaluation minus its own, on "
           "the same levels. A curriculum that prefers easier tasks raises it; its growth tells more."),
    Metric("learn/version", "versions", "Policy version after the step."),
    Metric("learn/updates", "updates", "Optimizer steps applied."),
    Metric("learn/skipped", "updates", "Optimizer steps left out because loss or gradient was not finite."),
    Metric("learn/loss", "", "Loss, mean over the optimizer steps."),
    Metric("learn/grad_norm", "", "Norm of the gradient before clipping, mean over the optimizer steps."),
    Metric("learn/lr", "", "Learning rate."),
    Metric("learn/entropy", "nats/token", "Entropy of the policy, mean over sampled tokens."),
    Metric("learn/kl", "nats/token", "Divergence (k3) of the new policy from the one that the step started with."),
    Metric("learn/reference_kl", "nats/token", "Divergence from the reference model, where loss or reward has one."),
    Metric("learn/kl_coefficient", "", "Weight of that divergence in this step, with `kl_target`."),
    Metric("learn/entropy_bonus", "", "Weight of the entropy in this step, with `entropy_target`."),
    Metric("learn/clip_fraction", "share", "Sampled tokens whose gradient the algorithm clipped."),
    Metric("learn/ratio_p01", "", "1st percentile of the ratio of new to old probability."),
    Metric("learn/ratio_p99", "", "99th percentile of that ratio."),
    Metric("learn/ratio_max", "", "Largest ratio."),
    Metric("learn/correction", "", "Mean factor of the off-policy correction; 1 without one."),
    Metric("learn/explained_variance", "share", "Variance of the critic's targets that its values explain; 1 at best."),
    Metric("learn/value_error", "", "Root of the critic's mean squared error."),
    Metric("learn/teacher_kl", "nats/token", "Mean of log π − log π_teacher over the policy's tokens: the reverse KL."),
    Metric("learn/teacher_seconds", "seconds", "Wall time of the teacher's scoring; part of `learn/seconds`."),
    Metric("learn/positive_nll", "nats/token", "Mean negative logprob on solved episodes, with `positive_nll`."),
    Metric("learn/mismatch_mean", "nats/token", "Mean difference between the learner's and the engine's logprobs, over "
           "tokens of the learner's own version where there are any."),
    Metric("learn/mismatch_max", "nats/token", "Largest such difference."),
    Metric("learn/mismatch_judged", "nats/token", "What `learner.max_mismatch` is compared with: that mean, or the one "
           "over all tokens where fewer than a hundred are of the learner's own version."),
    Metric("learn/mismatch_ess", "share", "Effective sample size of learner over engine probabilities; 1: they agree."),
    Metric("learn/mismatch_histogram", "tokens", "Tokens by log π_learner − log π_engine, with borders at "
           "±0.01, 0.03, 0.1, 0.3 and 1."),
    Metric("learn/on_policy", "share", "Sampled tokens that the learner's own version sampled."),
    Metric("learn/tokens", "tokens", "Tokens of one pass over the batch, prompts and observations included."),
    Metric("learn/tokens_computed", "tokens", "Tokens that went through the model, shared prefixes once."),
    Metric("learn/tokens_sampled", "tokens", "Sampled tokens among them: those in the loss."),
    Metric("learn/tokens_per_second", "tokens/s", "`learn/tokens` over the time that the learner worked on them."),
    Metric("learn/micro_batches", "batches", "Micro-batches of one pass."),
    Metric("learn/memory_gib", "GiB", "Peak memory in use on the accelerator; 0 on a CPU."),
    Metric("learn/memory_reserved_gib", "GiB", "Peak memory that the process reserved there."),
    Metric("learn/seconds", "seconds", "Wall time from the round to new weights: advantages, packing and updates."),
    Metric("learn/publish_seconds", "seconds", "Wall time until the engine had the new weights."),
    Metric("learn/publish_hold_seconds", "seconds", "Of it: until requests stood still."),
    Metric("learn/publish_send_seconds", "seconds", "Of it: sending."),
    Metric("learn/publish_check_seconds", "seconds", "Of it: comparing checksums."),
    Metric("curriculum/level", "level", "Mean level of the round's groups."),
    Metric("curriculum/score_histogram", "groups", "The round's groups by mean score, in ten bins from 0 to 1."),
    Metric("curriculum/calibration_error", "score", "Mean distance of predicted and realised scores; old ones fade."),
    Metric("curriculum/calibration_predicted", "score", "Mean prediction per tenth of predicted p; -1: none."),
    Metric("curriculum/calibration_realised", "score", "Mean score per tenth of predicted p; -1: none."),
    Metric("curriculum/<environment>/tasks_seen", "tasks", "Tasks drawn at least once."),
    Metric("curriculum/<environment>/coverage", "share", "Tasks drawn at least once, where their number is finite."),
    Metric("curriculum/<environment>/in_band", "share", "learnability: seen tasks believed to be in the band."),
    Metric("curriculum/<environment>/solved", "share", "learnability: seen tasks believed to be above the band."),
    Metric("curriculum/<environment>/hopeless", "share", "learnability: seen tasks believed to be below the band."),
    Metric("curriculum/<environment>/believed_histogram", "tasks", "learnability: seen tasks by believed pass rate, in "
           "ten bins from 0 to 1."),
    Metric("curriculum/<environment>/level_p", "score", "learnability: believed pass rate of each level, where there "
           "are several."),
    Metric("curriculum/<environment>/strata", "strata", "learnability: combinations of level and tags seen so far."),
    Metric("curriculum/<environment>/longest_wait", "draws", "learnability: draws since the stratum that has waited "
           "longest was drawn."),
    Metric("curriculum/<environment>/most_lost", "logits", "learnability: largest believed fall of a level below its "
           "best."),
    Metric("curriculum/<environment>/tasks_apart", "logits", "learnability: how far tasks of one stratum lie apart."),
    Metric("curriculum/<environment>/fresh", "share", "learnability: draws of tasks that were never drawn before."),
    Metric("curriculum/<environment>/stage", "level", "staged: the newest level that is open."),
    Metric("curriculum/<environment>/stage_score", "score", "staged: recent mean score on that level."),
    Metric("curriculum/<environment>/pool_easy", "tasks", "pools: tasks in the easy pool."),
    Metric("curriculum/<environment>/pool_normal", "tasks", "pools: tasks in the normal pool."),
    Metric("curriculum/<environment>/pool_hard", "tasks", "pools: tasks in the hard pool."),
    Metric("eval/<environment>/pass@<k>", "share", "Unbiased pass@k: value, low and high of the 95 % interval."),
    Metric("eval/<environment>/score", "score", "Mean score; an episode without a grade counts as 0."),
    Metric("eval/<environment>/levels", "share", "Episodes that scored 1, by level."),
    Metric("eval/<environment>/tasks", "tasks", "Tasks tried."),
    Metric("eval/<environment>/families", "families", "Families among them: variants of one task count once."),
    Metric("eval/<environment>/tries", "episodes", "Episodes played."),
    Metric("eval/<environment>/ungraded", "episodes", "Episodes without a grade: they count as failed."),
    Metric("eval/<environment>/truncated", "share", "Episodes that a budget ended."),
    Metric("eval/<environment>/turns_per_success", "turns", "Turns of the episodes that scored 1, mean."),
    Metric("eval/<environment>/tokens_per_success", "tokens", "Sampled tokens of all episodes over successes."),
    Metric("eval/<environment>/tool_errors", "calls", "Tool calls answered with an error, per episode."),
    Metric("eval/<environment>/passes", "share", "Passed tries of each task, by task id."),
    Metric("eval/<environment>/family", "text", "Family of each task that has one, by task id."),
    Metric("warm_start/demonstrations", "episodes", "Episodes that the expert played."),
    Metric("warm_start/solved", "episodes", "Those that scored 1, which were trained on."),
    Metric("warm_start/loss", "nats/token", "Loss at the end."),
    Metric("warm_start/examples", "trajectories", "With `warm_start.data`: trajectories in the file."),
    Metric("warm_start/data", "text", "With `warm_start.data`: the beginning of the file's SHA-256."),
    Metric("warm_start/margin", "number", "Preferences: β times how much likelier good trajectories became than bad."),
    Metric("warm_start/accuracy", "share", "Preferences: pairs whose chosen trajectory is ahead at the end."),
    Metric("warm_start/skipped", "count", "Preferences: updates that were not finite, and left out."),
    Metric("warm_start/demonstration_seconds", "seconds", "Wall time of playing them, before `seconds`."),
)  # fmt: skip
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
