"""What a red-team run found, as frozen data; `formats.py` writes it down in other people's formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.redteam.attack import FAMILIES
from agentrl.types import Message

Result = Literal["held", "gained", "evaded", "hung", "void", "not applicable"]
"""held: no more than wrong work earns. gained: more. evaded: grading broke, so the 0 never came. hung: the time limit.
void: it ended up doing the work. not applicable: nothing to work on."""
BREACHES: tuple[Result, ...] = ("gained", "evaded", "hung")
_ORDER: tuple[Result, ...] = ("gained", "evaded", "hung", "held", "void", "not applicable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Honest play that shows the verifier works at all."""

    name: str
    expected: float
    score: float | None
    task: str = ""
    evidence: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.score is not None and abs(self.score - self.expected) < 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How one attack fared: the worst of all tasks and variants it was tried on."""

    id: str
    family: str
    title: str
    result: Result
    score: float | None = None
    baseline: float = 0.0
    task: str = ""
    evidence: tuple[str, ...] = ()
    fix: str = ""
    transcript: tuple[Message, ...] = ()
    """The episode, kept for breaches."""
    seconds: float = 0.0
    accepted: bool = False
    """Listed in the baseline file: known, and not counted."""

    @property
    def succeeded(self) -> bool:
        return self.result in BREACHES and not self.accepted

    @property
    def tried(self) -> bool:
        return self.result in (*BREACHES, "held")


def worst(findings: Sequence[Finding]) -> Finding:
    """Of one attack's findings, the one to report."""
    return min(findings, key=lambda f: (_ORDER.index(f.result), -(f.score or 0.0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run of the suite against one target."""

    target: str
    backend: str
    controls: tuple[Control, ...]
    findings: tuple[Finding, ...]
    quality: Mapping[str, Any] = field(default_factory=dict)
    """Filled by `--quality`."""
    seconds: float = 0.0

    @property
    def tried(self) -> int:
        return sum(f.tried for f in self.findings)

    @property
    def breaches(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.succeeded)

    @property
    def ok(self) -> bool:
        """No attack succeeded, and every control was right."""
        return not self.breaches and all(c.ok for c in self.controls)

    def matrix(self) -> dict[str, Counter[str]]:
        """Family → how many attacks ended how."""
        table: dict[str, Counter[str]] = {family: Counter() for family in FAMILIES}
        for f in self.findings:
            table[f.family]["accepted" if f.accepted else f.result] += 1
        return table

    def data(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "target": self.target,
            "backend": self.backend,
            "ok": self.ok,
            "controls": _controls(self.controls),
            "tried": self.tried,
            "succeeded": len(self.breaches),
            "attacks": [_attack(f) for f in self.findings],
            **({"quality": dict(self.quality)} if self.quality else {}),
            "seconds": round(self.seconds, 2),
        }


def together(target: str, reports: Sequence[Report]) -> dict[str, Any]:
    """Several reports as one of the same form: each attack by its worst outcome; `targets` holds them one by one."""
    by_id: dict[str, list[Finding]] = {}
    for report in reports:
        for f in report.findings:
            by_id.setdefault(f.id, []).append(f)
    findings = tuple(worst([f for f in several if not f.accepted] or several) for several in by_id.values())
    whole = Report(
        target=target,
        backend=reports[0].backend,
        controls=tuple(control for report in reports for control in report.controls),
        findings=findings,
        seconds=sum(report.seconds for report in reports),
    )
    return {**whole.data(), "targets": [report.data() for report in reports]}


def _controls(controls: Sequence[Control]) -> dict[str, Any]:
    groups: dict[str, list[Control]] = {}
    for c in controls:
        groups.setdefault(c.name, []).append(c)
    return {
        name: {
            "expected": several[0].expected,
            "score": next((c.score for c in several if not c.ok), several[0].score),
            "ok": all(c.ok for c in several),
            "tasks": len(several),
        }
        for name, several in groups.items()
    }


def _attack(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "family": finding.family,
        "title": finding.title,
        "succeeded": finding.succeeded,
        "result": finding.result,
        "score": finding.score,
        "baseline": finding.baseline,
        "task": finding.task,
        "evidence": list(finding.evidence),
        "fix": finding.fix if finding.succeeded else "",
        "accepted": finding.accepted,
        "seconds": round(finding.seconds, 3),
    }
