"""Alarms for the classic ways a run goes wrong: each says what was seen and what to do. Reads metric rows only."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from agentrl.evaluation import gain
from agentrl.metrics import Row

WINDOW = 10
"""Steps that are compared with the first as many."""


def alarms(steps: Sequence[Row], evals: Sequence[Row]) -> dict[str, str]:
    """What the rows of a run so far give cause to say, by name; a caller says each name once."""
    found: dict[str, str] = {}
    if not steps:
        return found
    last = steps[-1]
    if last.get("skipped"):
        found["not finite"] = (
            f"step {last['step']}: a loss or gradient was not finite, the update was left out; lower learner.lr, or "
            "set model.float32_head: true"
        )
    if last.get("infra_errors", 0) > 0.2 * max(1, last.get("rollouts", 0)):
        found["infrastructure"] = (
            f"step {last['step']}: {last['infra_errors']} of {last['rollouts']} rollouts failed for reasons outside "
            "the policy; see `fault` in trajectories/ and the server's log"
        )
    if last.get("grading_alarms", 0):
        found["grading"] = (
            f"step {last['step']}: {last['grading_alarms']} submission(s) broke grading twice on fresh boxes and "
            "scored 0; read their trajectories: the policy may be attacking the verifier"
        )
    untrained = [row for row in evals if row["step"] == 0]
    since = [*untrained[-1:], *(row for row in evals if row["step"] > 0)]  # a warm start's gain is none of RL's
    if len(since) > 1 and since[-1]["step"] == last["step"] - 1:  # the first step after it: once for each
        found |= _fallen(since[0], since[-1])
    if len(steps) >= 2 * WINDOW:
        found |= _drifts(steps, since)
    return found


def _fallen(before: Row, after: Row) -> dict[str, str]:
    change = gain(before["passes"], after["passes"], after.get("family"))
    if change.high >= 0:
        return {}
    points = f"{-100 * change.value:.1f} points [{-100 * change.high:.1f}, {-100 * change.low:.1f}]"
    advice = "what is rewarded may not be what is wanted (gates.overlong, process rewards), or learner.lr is too high"
    return {"worse": f"held-out success fell since RL began, by {points}: read the newest trajectories; {advice}"}


def _drifts(steps: Sequence[Row], evals: Sequence[Row]) -> dict[str, str]:
    found: dict[str, str] = {}
    entropy = _then_and_now(steps, "entropy")
    if entropy and entropy[1] < 0.1 * entropy[0]:
        found["entropy"] = (
            f"entropy fell from {entropy[0]:.3g} to {entropy[1]:.3g} nats a token: the policy has stopped exploring; "
            "raise algorithm.clip_high, add algorithm.entropy_bonus, or lower learner.lr"
        )
    length = _then_and_now(steps, "sampled_mean")
    if length and length[1] > 2 * length[0]:
        found["length"] = (
            f"rollouts grew from {length[0]:.0f} to {length[1]:.0f} tokens: set gates.overlong: fail if many are cut "
            "off, or lower rollout.max_tokens"
        )
    signal = [row.get("informative") for row in steps[-WINDOW:]]
    if all(value is not None and value < 0.1 for value in signal):
        found["signal"] = (
            f"fewer than one group in ten carried a signal for {WINDOW} steps: the tasks are too easy or too hard; "
            "widen envs[].levels, or warm-start longer"
        )
    score = _then_and_now(steps, "score")
    if score and len(evals) >= 3 and score[1] > score[0] + 0.2:
        heldout = [row["pass@1"]["value"] for row in evals]
        if heldout[-1] < heldout[0] + 0.05:
            found["hacking"] = (
                f"training score rose from {score[0]:.2f} to {score[1]:.2f}, held-out success did not "
                f"({heldout[0]:.2f} to {heldout[-1]:.2f}): read the newest trajectories; the policy may have found a "
                "hole (`agentrl redteam`)"
            )
    return found


def _then_and_now(steps: Sequence[Row], name: str) -> tuple[float, float] | None:
    then = [row[name] for row in steps[:WINDOW] if row.get(name) is not None]
    now = [row[name] for row in steps[-WINDOW:] if row.get(name) is not None]
    return (fmean(then), fmean(now)) if then and now else None
