"""Alarms for the classic ways a run goes wrong: each says what was seen and what to do. Reads metric rows only."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from agentrl.evaluation import gain
from agentrl.metrics import Row, families, passes
from agentrl.statistics import wilson

WINDOW = 10
"""Steps that are compared with the first as many."""
MISMATCH, STALE_MISMATCH = 0.02, 0.1
"""Nats per token between engine and learner, for tokens of the learner's own version and for older ones; 0.003 is
normal."""
OWN = 0.05
"""Share of a step's tokens below which older ones decide."""
MOST_REFUTED, MOST_SUSPICIOUS = 0.1, 0.15
"""Shares of rewarded episodes that the lower end of the interval must pass: refuted by the audit verifier, or
suspicious."""
HELDOUT_GAP, GAP_GROWTH = 0.4, 0.3
"""How much more often training passes than held-out tasks do before it is told, and how much that must have grown."""
SILENT = 3
"""Steps in a row without any signal that raise an alarm."""


def spoiled(step: Row) -> bool:
    """Whether all episodes of a step failed for reasons outside the policy."""
    return bool(0 < step.get("rollout/episodes", 0) <= step.get("rollout/ungraded", 0))


def alarms(steps: Sequence[Row], evals: Sequence[Row]) -> dict[str, str]:
    """Return the alarms that a run's rows so far give cause for, by name; the caller shows each name once."""
    raised: dict[str, str] = {}
    if not steps:
        return raised
    last = steps[-1]
    if last.get("learn/skipped"):
        raised["not finite"] = (
            f"step {last['step']}: a loss or gradient was not finite, so the update was skipped; lower learner.lr, or "
            "set model.float32_head: true"
        )
    if last.get("rollout/ungraded", 0) > 0.2 * max(1, last.get("rollout/episodes", 0)):
        raised["infrastructure"] = (
            f"step {last['step']}: {last['rollout/ungraded']} of {last['rollout/episodes']} episodes failed for "
            "reasons outside the policy; see `fault` in trajectories/ and the server's log"
        )
    if last.get("rollout/branches_void", 0) > 0.2 * max(1, last.get("rollout/branches", 0)) or (
        last.get("rollout/unforkable", 0) > last.get("rollout/branches", 0)
    ):
        raised["branches"] = (
            f"step {last['step']}: {last['rollout/branches_void']} of {last['rollout/branches']} continuations were "
            f"void, and {last['rollout/unforkable']} turns could not be forked, so that their states have no value of "
            f"their own; the first: {last['rollout/branch_cause']}"
        )
    if last.get("rollout/grading_alarms", 0):
        raised["grading"] = (
            f"step {last['step']}: {last['rollout/grading_alarms']} submission(s) broke grading twice on fresh "
            "sandboxes and scored 0; read their trajectories: the policy may be attacking the verifier"
        )
    if episodes := last.get("rollout/episode_alarms"):
        counts = ", ".join(f"{count} in {env}" for env, count in episodes.items())
        raised["episode"] = (
            f"step {last['step']}: episodes broke again when they were repeated and scored 0 ({counts}); the first: "
            f"{last['rollout/alarm_cause']}; fix the environment, or the policy will learn to avoid what breaks it"
        )
    if len(steps) >= SILENT and not any(row.get("rollout/informative") or spoiled(row) for row in steps[-SILENT:]):
        raised["signal"] = (
            f"no group carried a signal for {SILENT} steps, so nothing was learnt: every episode of each group scored "
            "the same; choose easier or harder envs[].levels, warm-start longer, or look at trajectories/"
        )
    raised |= _mismatch(last) | _hacked(steps)
    untrained = [row for row in evals if row["step"] == 0]
    since = [*untrained[-1:], *(row for row in evals if row["step"] > 0)]  # a warm start's gain is none of RL's
    if len(since) > 1 and since[-1]["step"] == last["step"] - 1:  # the first step after it: once for each
        raised |= _fallen(since[0], since[-1])
    if len(steps) >= 2 * WINDOW:
        raised |= _drifts(steps, since)
    return raised


def _mismatch(last: Row) -> dict[str, str]:
    nats = last.get("learn/mismatch_judged", last.get("learn/mismatch_mean"))
    own = last.get("learn/on_policy", 1.0)
    if nats is None or nats <= (MISMATCH if own >= OWN else STALE_MISMATCH):
        return {}
    advice = (
        "the engine computes something else: check rollout.temperature, model.path, the engine's flags and version"
        if own >= OWN
        else "the samples are old: lower async.max_staleness or learner.lr"
    )
    return {
        "mismatch": f"step {last['step']}: engine and learner disagree by {nats:.3g} nats per token on average (0.003 "
        f"is normal; {own:.0%} of the tokens come from the learner's own version); {advice}"
    }


def _hacked(steps: Sequence[Row]) -> dict[str, str]:
    """What the reward-hacking watch saw in the last steps; see agentrl/audit/watch.py."""
    raised: dict[str, str] = {}
    rows = steps[-WINDOW:]
    refuted, graded = (sum(row.get(f"audit/{name}") or 0 for row in rows) for name in ("refuted", "graded_rewarded"))
    if graded >= 10 and wilson(refuted, graded).low > MOST_REFUTED:
        raised["audit"] = (
            f"step {rows[-1]['step']}: the audit verifier refutes {refuted} of {graded} rewarded episodes of the "
            f"last {len(rows)} steps: the policy may have found a loophole in the reward; `agentrl audit` lists them"
        )
    suspicious, paid = (sum(row.get(f"audit/{name}") or 0 for row in rows) for name in ("suspicious", "rewarded"))
    if paid >= 20 and wilson(suspicious, paid).low > MOST_SUSPICIOUS:
        worst = next((row["audit/worst"] for row in reversed(rows) if row.get("audit/worst")), "")
        raised["suspicious"] = (
            f"step {rows[-1]['step']}: {suspicious} of {paid} rewarded episodes of the last {len(rows)} steps look "
            f"like reward hacking; the newest: {worst}; `agentrl audit` lists them"
        )
    gaps = [row["audit/heldout_gap"] for row in steps if row.get("audit/heldout_gap") is not None]
    if len(gaps) > WINDOW and gaps[-1] > HELDOUT_GAP and gaps[-1] > gaps[0] + GAP_GROWTH:
        raised["held-out gap"] = (
            f"step {rows[-1]['step']}: training passes {100 * gaps[-1]:.0f} points more often than held-out tasks of "
            f"the same levels ({100 * gaps[0]:.0f} at first): the policy may learn tasks by heart, or a loophole "
            "of the training split; set curriculum.repeats, add tasks, and look at `agentrl audit`"
        )
    return raised


def _fallen(before: Row, after: Row) -> dict[str, str]:
    change = gain(passes(before), passes(after), families(after))
    if change.high >= 0:
        return {}
    points = f"{-100 * change.value:.1f} points [{-100 * change.high:.1f}, {-100 * change.low:.1f}]"
    advice = "the reward may not be what you want (group_filter.overlong, process rewards), or learner.lr is too high"
    return {"worse": f"held-out success fell since RL began, by {points}: read the newest trajectories; {advice}"}


def _drifts(steps: Sequence[Row], evals: Sequence[Row]) -> dict[str, str]:
    raised: dict[str, str] = {}
    entropy = _then_and_now(steps, "learn/entropy")
    if entropy and entropy[1] < 0.1 * entropy[0]:
        raised["entropy"] = (
            f"entropy fell from {entropy[0]:.3g} to {entropy[1]:.3g} nats per token: the policy has stopped exploring; "
            "raise algorithm.clip_high, add algorithm.entropy_bonus, or lower learner.lr"
        )
    length = _then_and_now(steps, "rollout/tokens_mean")
    if length and length[1] > 2 * length[0]:
        raised["length"] = (
            f"episodes grew from {length[0]:.0f} to {length[1]:.0f} tokens: set group_filter.overlong: fail if many "
            "are cut off, or lower rollout.max_tokens"
        )
    signal = [row.get("rollout/informative") for row in steps[-WINDOW:]]
    if all(value is not None and value < 0.1 for value in signal):
        raised["signal"] = (
            f"fewer than one group in ten carried a signal for {WINDOW} steps: the tasks are too easy or too hard; "
            "widen envs[].levels, or warm-start longer"
        )
    score = _then_and_now(steps, "rollout/score")
    if score and len(evals) >= 3 and score[1] > score[0] + 0.2:
        first, last = (fmean(passes(row).values() or [0.0]) for row in (evals[0], evals[-1]))
        if last < first + 0.05:
            raised["hacking"] = (
                f"training score rose from {score[0]:.2f} to {score[1]:.2f}, held-out success did not "
                f"({first:.2f} to {last:.2f}): read the newest trajectories; the policy may have found a "
                "loophole (`agentrl redteam`)"
            )
    return raised


def _then_and_now(steps: Sequence[Row], name: str) -> tuple[float, float] | None:
    then = [row[name] for row in steps[:WINDOW] if row.get(name) is not None]
    now = [row[name] for row in steps[-WINDOW:] if row.get(name) is not None]
    return (fmean(then), fmean(now)) if then and now else None
