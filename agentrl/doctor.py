"""Says what works on this machine, what is missing, and the command that gets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    works: bool
    gives: tuple[str, ...] = ()
    """What it offers here; for a sandbox, what it keeps apart."""
    missing: tuple[str, ...] = ()
    """What is missing, in words."""
    fix: str = ""
    """The command that installs or enables it."""


def sandboxes() -> list[Finding]:
    """Every sandbox backend that can be found, tried for real."""
    from agentrl import catalogue
    from agentrl.errors import AgentRLError
    from agentrl.sandboxes import load

    found = []
    for name in catalogue.members("sandboxes"):
        try:
            backend = load(name)()
            try:
                seen = backend.available()
            finally:
                backend.close()
        except AgentRLError as error:
            found.append(Finding(name=name, works=False, missing=(str(error),)))
            continue
        gives = seen.isolates or (("nothing is isolated",) if seen.works else ())
        found.append(Finding(name=name, works=seen.works, gives=gives, missing=seen.missing, fix=seen.fix))
    return found


SECTIONS: dict[str, Callable[[], list[Finding]]] = {"sandboxes": sandboxes}
"""What the doctor looks at, in order; each section finds things and never raises for one that is missing."""


def examine() -> dict[str, list[Finding]]:
    """All sections."""
    return {name: look() for name, look in SECTIONS.items()}


def as_json(report: dict[str, list[Finding]]) -> dict[str, list[dict[str, Any]]]:
    """The report as plain data."""
    return {name: [asdict(finding) for finding in findings] for name, findings in report.items()}


def as_text(report: dict[str, list[Finding]]) -> str:
    """The report for a person at a terminal."""
    lines: list[str] = []
    for section, findings in report.items():
        lines += [section]
        for finding in findings:
            lines.append(f"  {finding.name}: {'works' if finding.works else 'does not work here'}")
            lines += [f"    + {text}" for text in finding.gives]
            lines += [f"    - {text}" for text in finding.missing]
            lines += [f"    fix: {finding.fix}"] if finding.fix else []
    return "\n".join(lines)
