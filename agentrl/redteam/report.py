"""The result of a red-team run as frozen data; `formats.py` writes it in other formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from agentrl.redteam.attack import FAMILIES
from agentrl.types import Message

Result = Literal["held", "gained", "evaded", "hung", "void", "not applicable"]
"""held: no more than wrong work earns. gained: more. evaded: grading broke or the episode vanished, so the 0 never
came. hung: it ran into the time limit, or made others late. void: it ended up doing the work. not applicable: it has
nothing to work on."""
BREACHES: tuple[Result, ...] = ("gained", "evaded", "hung")
_ORDER: tuple[Result, ...] = ("gained", "evaded", "hung", "held", "void", "not applicable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """An episode without cheating, which shows that the verifier works at all."""

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
    """The result of one attack: the worst over all tasks and variants it was tried on."""

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
    """Whether the baseline file lists it: known, and not counted."""

    @property
    def succeeded(self) -> bool:
        return self.result in BREACHES and not self.accepted

    @property
    def tried(self) -> bool:
        return self.result in (*BREACHES, "held")


def worst(findings: Sequence[Finding]) -> Finding:
    """Return the one to report of an attack's findings."""
    return min(findings, key=lambda f: (_ORDER.index(f.result), -(f.score or 0.0)))


def worst_of_each(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the worst finding of each attack; accepted ones only where there is no other."""
    by_attack: dict[str, list[Finding]] = {}
    for finding in findings:
        by_attack.setdefault(finding.id, []).append(finding)
    return tuple(worst([f for f in several if not f.accepted] or several) for several in by_attack.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run of the suite against one target."""

    target: str
    backend: str
    controls: tuple[Control, ...]
    findings: tuple[Finding, ...]
    quality: Mapping[str, Any] = field(default_factory=dict)
    """Filled by `--quality`."""
    surfaces: tuple[str, ...] = ()
    """The surfaces that the tasks expose, all together."""
    gaps: tuple[str, ...] = ()
    """What the attacks could not reach, and how to change that; each is a failure. See `coverage.gaps`."""
    notes: tuple[str, ...] = ()
    """How the target was run, where that is not the same for all: for a scorer, how it was called and by what."""
    seconds: float = 0.0

    @property
    def tried(self) -> int:
        return sum(f.tried for f in self.findings)

    @property
    def coverage(self) -> str:
        """How much was tried, and why the rest was not, in one line."""
        reasons = Counter(_reason(f) for f in self.findings if not f.tried)
        line = f"{self.tried} of {len(self.findings)} attacks tried (surfaces: {', '.join(self.surfaces) or 'none'})"
        return line + "".join(f"; {count} not: {reason}" for reason, count in reasons.most_common())

    @property
    def breaches(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.succeeded)

    @property
    def ok(self) -> bool:
        """No attack succeeded, every control was right, and nothing that decides the score was out of reach."""
        return not self.breaches and not self.gaps and all(c.ok for c in self.controls)

    def matrix(self) -> dict[str, Counter[str]]:
        """Count the results of each family."""
        table: dict[str, Counter[str]] = {family: Counter() for family in FAMILIES}
        for f in self.findings:
            table[f.family]["accepted" if f.accepted else f.result] += 1
        return table

    def data(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {
            "target": self.target,
            "backend": self.backend,
            "ok": self.ok,
            "controls": _controls(self.controls),
            "tried": self.tried,
            "succeeded": len(self.breaches),
            "surfaces": list(self.surfaces),
            "coverage": self.coverage,
            "gaps": list(self.gaps),
            **({"notes": list(self.notes)} if self.notes else {}),
            "attacks": [_attack(f) for f in self.findings],
            **({"quality": dict(self.quality)} if self.quality else {}),
            "seconds": round(self.seconds, 2),
        }


def together(target: str, reports: Sequence[Report]) -> dict[str, Any]:
    """Merge reports into one of the same form: each attack with its worst result; `targets` holds them one by one."""
    whole = Report(
        target=target,
        backend=reports[0].backend,
        controls=tuple(control for report in reports for control in report.controls),
        findings=worst_of_each(f for report in reports for f in report.findings),
        surfaces=tuple(sorted({surface for report in reports for surface in report.surfaces})),
        gaps=tuple(f"{report.target}: {gap}" for report in reports for gap in report.gaps),
        seconds=sum(report.seconds for report in reports),
    )
    return {**whole.data(), "targets": [report.data() for report in reports]}


def _reason(finding: Finding) -> str:
    if finding.result == "void":
        return "it ended up doing the work"
    return finding.evidence[0] if finding.evidence else "no reason was given"


def _controls(controls: Sequence[Control]) -> dict[str, Any]:
    by_name: dict[str, list[Control]] = {}
    for control in controls:
        by_name.setdefault(control.name, []).append(control)
    return {
        name: {
            "expected": several[0].expected,
            "score": next((c.score for c in several if not c.ok), several[0].score),
            "ok": all(c.ok for c in several),
            "tasks": len(several),
        }
        for name, several in by_name.items()
    }


def _attack(finding: Finding) -> dict[str, Any]:
    data = {f.name: getattr(finding, f.name) for f in fields(finding) if f.name != "transcript"}
    return {
        **data,
        "succeeded": finding.succeeded,
        "evidence": list(finding.evidence),
        "fix": finding.fix if finding.succeeded else "",
        "seconds": round(finding.seconds, 3),
    }
