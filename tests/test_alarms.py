"""Each classic failure raises its alarm, and a healthy run raises none."""

from typing import Any

import pytest

from agentrl.alarms import alarms

HEALTHY = {
    "rollout/score": 0.5, "learn/entropy": 1.0, "rollout/tokens_mean": 100.0, "rollout/informative": 0.8,
    "rollout/episodes": 64, "rollout/ungraded": 0,
}  # fmt: skip


def rows(count: int = 30, last: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """A run whose second half carries other values."""
    return [{"kind": "step", "step": n, **HEALTHY, **((last or {}) if n >= count // 2 else {})} for n in range(count)]


def evals(*values: float, every: int = 10) -> list[dict[str, Any]]:
    """Evaluations on 100 tasks, half of each of two environments, the first before the first step."""
    return [
        {
            "kind": "eval",
            "step": number * every,
            **{
                f"eval/{env}/passes": {str(task): float(task < 100 * value) for task in range(start, 100, 2)}
                for start, env in enumerate(("files", "countdown"))
            },
        }
        for number, value in enumerate(values)
    ]


def test_a_healthy_run_is_left_alone() -> None:
    assert alarms(rows(), evals(0.3, 0.4, 0.5)) == {}
    assert alarms([], []) == {}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"learn/entropy": 0.05}, "entropy"),
        ({"rollout/tokens_mean": 250.0}, "length"),
        ({"rollout/informative": 0.0}, "signal"),
        ({"learn/skipped": 1}, "not finite"),
        ({"rollout/ungraded": 40}, "infrastructure"),
        ({"rollout/grading_alarms": 2}, "grading"),
        (
            {"rollout/branches": 9, "rollout/branches_void": 2, "rollout/unforkable": 0, "rollout/branch_cause": "x"},
            "branches",
        ),
        ({"rollout/episode_alarms": {"files": 2}, "rollout/alarm_cause": "files: TypeError: x at a.py:1"}, "episode"),
    ],
)
def test_each_failure_has_its_alarm(change: dict[str, Any], name: str) -> None:
    assert list(alarms(rows(last=change), evals(0.3, 0.4, 0.5))) == [name]


def test_a_run_that_learns_nothing_is_told_after_three_steps() -> None:
    silent = [{**row, "rollout/informative": 0.0} for row in rows()[:3]]
    assert alarms(silent[:2], []) == {}
    assert list(alarms(silent, [])) == ["signal"]
    assert alarms([*silent[:2], {**silent[2], "rollout/informative": 0.1}], []) == {}
    failed = [{**row, "rollout/ungraded": row["rollout/episodes"]} for row in silent]
    assert list(alarms(failed, [])) == ["infrastructure"], "easier tasks would not help"


@pytest.mark.parametrize(
    ("own", "judged", "raised"),
    [(1.0, 0.008, []), (1.0, 0.03, ["mismatch"]), (0.0, 0.08, []), (0.0, 0.2, ["mismatch"]), (1.0, 0.56, ["mismatch"])],
)
def test_a_mismatch_far_above_the_normal_is_told_long_before_it_stops_the_run(
    own: float, judged: float, raised: list[str]
) -> None:
    """Normal is 0.003 nats per token, at most 0.008; tokens of older versions differ because the policy has moved."""
    figures = {"learn/mismatch_mean": judged, "learn/mismatch_judged": judged, "learn/on_policy": own}
    assert list(alarms(rows(last=figures), [])) == raised
    few_own = {"learn/mismatch_mean": 1.5, "learn/mismatch_judged": 0.01, "learn/on_policy": 0.003}
    assert alarms(rows(last=few_own), []) == {}
    assert list(alarms(rows(last={"learn/mismatch_mean": judged, "learn/on_policy": own}), [])) == raised


def test_a_score_that_only_training_sees_is_suspicious() -> None:
    assert list(alarms(rows(last={"rollout/score": 0.9}), evals(0.30, 0.31, 0.30))) == ["hacking"]
    assert alarms(rows(last={"rollout/score": 0.9}), evals(0.3, 0.5, 0.7)) == {}


def test_a_warm_start_does_not_hide_it() -> None:
    """What the untrained model scored is no measure: the warm start had made it better before RL began."""
    assert list(alarms(rows(last={"rollout/score": 0.9}), [*evals(0.0), *evals(0.30, 0.31, 0.30)])) == ["hacking"]


def test_held_out_success_that_falls_is_told_at_once() -> None:
    few = rows(12)[:12]
    assert few[-1]["step"] == 11
    text = alarms(few, [*evals(0.0), *evals(0.30, 0.15)])  # the evaluation after step 10, as step 11 ends
    assert list(text) == ["worse"] and "15.0 points" in text["worse"]
    assert alarms(few, [*evals(0.0), *evals(0.30, 0.29)]) == {}, "one task in a hundred is chance"
    assert alarms(few, evals(0.30)) == {}
    assert alarms(rows(13), [*evals(0.0), *evals(0.30, 0.15)]) == {}, "once for each evaluation"
    alike = [{**row, "eval/files/family": {str(task): "one" for task in range(15, 30)}} for row in evals(0.30, 0.15)]
    assert alarms(few, alike) == {}, "all that fell is one family"
