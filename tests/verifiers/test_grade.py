"""What the boundary makes of a verifier's every way to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.errors import AuthoringError, BudgetSpent, Outage, SandboxDied, SandboxError, VerifierError
from agentrl.types import Outcome, Verdict
from agentrl.verifiers import hidden_tests, version
from agentrl.verifiers.base import Context, Submission, Verifier


class Scripted(Verifier):
    """Does one thing after another; the probe does the last of its own."""

    def __init__(self, *acts: Any, probe: Any = None) -> None:
        self.acts, self.probing = list(acts), probe

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        act = self.acts.pop(0)
        if isinstance(act, BaseException):
            raise act
        if act == "hang":
            await asyncio.sleep(3600)
        return act  # type: ignore[no-any-return]

    async def probe(self, context: Context) -> None:
        if self.probing is not None:
            raise self.probing


def test_a_verdict_passes_through_with_its_cost_and_version(graded: Callable[..., Any], submit: Any) -> None:
    outcome, verdict = graded(Scripted(Verdict(score=0.5)), submit())
    assert outcome == Outcome(ending="done", grade="graded", score=0.5)
    assert verdict.cost_s > 0.0
    assert verdict.verifier.startswith("Scripted-")


def test_the_agents_doing_is_a_zero_at_once(graded: Callable[..., Any], submit: Any) -> None:
    outcome, verdict = graded(Scripted(SandboxDied("out of memory")), submit())
    assert (outcome.grade, outcome.score, outcome.alarm, outcome.fault.blame) == ("graded", 0.0, False, "agent")
    assert verdict.score == 0.0


def test_trouble_that_does_not_recur_costs_nothing(graded: Callable[..., Any], submit: Any) -> None:
    outcome, _ = graded(Scripted(SandboxError("lost"), Verdict(score=1.0)), submit())
    assert outcome == Outcome(ending="done", grade="graded", score=1.0)


def test_what_breaks_grading_twice_while_the_house_is_well_scores_zero_with_an_alarm(
    graded: Callable[..., Any], submit: Any
) -> None:
    troubles = [
        (VerifierError("odd"), VerifierError("odd")),
        (SandboxError("lost"), KeyError("gold value 42")),
        ("hang", "hang"),
        (None, None),
        (1.0, 1.0),
        (AuthoringError("a path of the agent's"), AuthoringError("again")),
        (RecursionError(), MemoryError()),
        (Verdict(score=1.0, breakdown={"x": float("nan")}), Verdict(score=1.0, turn_scores=(float("inf"),))),
        (Verdict(score=1.0, turn_scores=(0.5, 1.5)), Verdict(score=1.0, turn_scores=(-0.01, 1.0))),
        (Verdict(score=1.0, turn_scores=(float("nan"),)), Verdict(score=1.0, turn_scores=(True,))),
    ]
    for first, second in troubles:
        outcome, verdict = graded(Scripted(first, second), submit(), deadline_s=0.05)
        assert (outcome.grade, outcome.score, outcome.alarm) == ("graded", 0.0, True)
        assert verdict.score == 0.0
        assert "42" not in " ".join(verdict.evidence)


def test_a_broken_house_scores_nothing(graded: Callable[..., Any], submit: Any) -> None:
    lost = SandboxError("no boxes")
    outcome, verdict = graded(Scripted(lost, lost, probe=lost), submit())
    assert (outcome.grade, outcome.score, outcome.fault.blame, verdict) == ("infra_error", None, "infra", None)
    refusal = VerifierError("the judge is not calibrated")
    outcome, verdict = graded(Scripted(refusal, refusal, probe=refusal), submit())
    assert (outcome.grade, outcome.score, outcome.fault.blame, verdict) == ("verifier_error", None, "verifier", None)


def test_what_no_submission_can_cause_is_never_a_score(graded: Callable[..., Any], submit: Any) -> None:
    """Not even when everything works again before a probe could look."""
    outcome, verdict = graded(Scripted(Outage("the judge does not answer"), Verdict(score=1.0)), submit())
    assert (outcome.grade, outcome.score, outcome.fault.blame, verdict) == ("infra_error", None, "infra", None)
    outcome, verdict = graded(Scripted(BudgetSpent("10 of 10 calls"), Verdict(score=1.0)), submit())
    assert (outcome.grade, outcome.score, outcome.fault.blame, verdict) == ("verifier_error", None, "verifier", None)


def test_a_truncated_episode_is_graded_all_the_same(graded: Callable[..., Any], submit: Any) -> None:
    from dataclasses import replace

    outcome, _ = graded(Scripted(Verdict(score=1.0)), replace(submit(), ending="max_tokens"))
    assert outcome == Outcome(ending="max_tokens", grade="graded", score=1.0)


def test_the_version_follows_the_settings(submit: Any) -> None:
    from agentrl.verifiers.answer import Answer

    same = [Answer(lambda task: "a", kind="exact").version for _ in range(2)]
    assert same[0] == same[1]
    versions = {same[0], Answer(lambda task: "b").version, Answer(lambda task: "a", ignore_case=True).version}
    assert len(versions) == 3


def test_a_version_depends_on_the_shared_code_that_its_package_imports(tmp_path: Path) -> None:
    """How values are compared decides scores: a change of it is another verifier, also through a further import."""
    for name, text in {"values": "from agentrl.verifiers import tagged\n", "tagged": "A = 1\n", "busy": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
    source = "from agentrl.verifiers.values import Compare\nfrom agentrl.verifiers.absent import x\n"
    assert version._shared([source], tmp_path) == ["A = 1\n", "from agentrl.verifiers import tagged\n"]
    shipped = version._source(hidden_tests.HiddenTests.__module__, "HiddenTests")
    assert all((version.FOLDER / f"{name}.py").read_text() in shipped for name in ("values", "tagged", "inner"))
