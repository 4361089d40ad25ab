"""Writes a report: a matrix for the terminal, JUnit and SARIF for other tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from rich.console import Group
from rich.table import Table
from rich.text import Text

from agentrl import __version__
from agentrl.redteam.attack import FAMILIES
from agentrl.redteam.quality import shortfalls
from agentrl.redteam.report import Finding, Report

COLUMNS = ("held", "gained", "evaded", "hung", "accepted", "void", "not applicable")
NAMES = {"accepted": "known", "not applicable": "n/a"}
"""Columns whose heading is shorter than the result they count."""
_STYLES = {"gained": "bold red", "evaded": "bold red", "hung": "bold red", "held": "green", "accepted": "yellow"}


def overview(reports: Sequence[Report]) -> Table:
    """Show several targets, such as a folder of tasks: one line each."""
    table = Table(box=None, pad_edge=False)
    for column in ("target", "controls", "tried", "succeeded", "which"):
        table.add_column(column, justify="left" if column in ("target", "which") else "right", no_wrap=True)
    for report in reports:
        right = sum(control.ok for control in report.controls)
        which = ", ".join(finding.id for finding in report.breaches[:4]) + (" ..." if len(report.breaches) > 4 else "")
        cells = (f"{right} of {len(report.controls)}", str(report.tried), str(len(report.breaches)), which)
        table.add_row(visible(report.target), *cells, style="" if report.ok else "red")
    return table


def screen(report: Report) -> Group:
    """Show controls, the matrix family × outcome, and each breach with its evidence, fix and episode."""
    bad = [c for c in report.controls if not c.ok]
    head = Text(f"{report.target} on {report.backend}: ", style="bold")
    good = len(report.controls) - len(bad)
    head.append(f"controls {good} of {len(report.controls)} right", style="red" if bad else "green")
    head.append(f", {report.tried} attacks tried, ")
    head.append(f"{len(report.breaches)} succeeded", style="red" if report.breaches else "green")
    head.append(f", {report.seconds:.0f} s", style="dim")
    table = Table(box=None, pad_edge=False)
    table.add_column("family", no_wrap=True)
    for column in COLUMNS:
        table.add_column(NAMES.get(column, column), justify="right", style=_STYLES.get(column, "dim"), no_wrap=True)
    for family, counts in report.matrix().items():
        if not counts.total():
            continue  # it was not asked for
        cells = [str(counts[column]) if counts[column] else "·" for column in COLUMNS]
        table.add_row(f"{family}  {FAMILIES[family]}", *cells)
    parts: list[Any] = [head, table, Text(visible(report.coverage), style="dim")]
    parts += [Text(visible(note), style="dim") for note in report.notes]
    parts += [Text(f"out of reach: {visible(gap)}", style="red") for gap in report.gaps]
    for control in bad:
        why = visible("; ".join(control.evidence[:3]))
        line = f"control {control.name} on {control.task}: expected {control.expected:g}, got {control.score}: {why}"
        parts.append(Text(line, style="red"))
    for finding in report.breaches:
        parts.append(_breach(finding))
    if report.quality:
        parts += [Text("\nquality", style="bold"), *(Text(f"  {line}") for line in quality_lines(report.quality))]
    return Group(*parts)


def quality_lines(measured: Mapping[str, Any]) -> list[str]:
    """Put into words what `--quality` measured; what falls short comes last."""
    mutation, others, flakes, cost = (measured[name] for name in ("mutation", "alternatives", "flakes", "cost_ms"))
    total = mutation["killed"] + mutation["survived"]
    lines = [
        f"mutants killed: {mutation['killed']} of {total}, {mutation['equivalent']} more are equivalent",
        *(f"  survived: {line}" for line in mutation["survivors"]),
        f"other right solutions refused: {others['false_negatives']} of {others['tried']}",
        *(f"  refused: {line}" for line in others["missed"]),
        f"flakes of the oracle: {flakes['failed']} of {flakes['tried']} beside {flakes['busy_processes']} busy "
        f"processes (at most {flakes['upper_95']:.1%} with 95% confidence)",
        f"a verdict takes {cost['p50']:g} ms, at most {cost['max']:g} ms",
        f"the stronger policy scores higher in {measured['discrimination']:.0%} of the pairs",
    ]
    if not total:
        lines[0] = "mutants: none could be made here"
    if not others["tried"]:
        lines.append("no other solutions are known: give the environment alternatives(task)")
    return [*lines, *(f"falls short: {line}" for line in shortfalls(measured))]


def _breach(finding: Finding) -> Text:
    text = Text(f"\n{finding.id}  {finding.title}\n", style="bold red")
    text.append(
        f"  {finding.result} on {finding.task}: score {finding.score} where wrong work earns {finding.baseline}\n", ""
    )
    for line in finding.evidence[:5]:
        text.append(f"  evidence: {visible(line[:300])}\n", "default")
    text.append(f"  fix: {finding.fix}\n", "yellow")
    for line in "\n".join(episode(finding)).split("\n"):
        text.append(f"    {line}\n", "dim")
    return text


def episode(finding: Finding) -> list[str]:
    """List what was played, one line per call and message, with control characters written out."""
    lines = []
    for message in finding.transcript[2:]:
        for call in message.tool_calls:
            lines.append(f"{call.name}({json.dumps(dict(call.arguments))[:600]})")
        if message.content:
            lines.append(f"{message.role}: {message.content[:600]}")
    return [visible(line) for line in lines]


def visible(text: str) -> str:
    """Write out every control and invisible character of an attacker's text."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def junit(report: Report) -> str:
    """Write one JUnit test case for each control and attack."""
    failures = len(report.breaches) + sum(not c.ok for c in report.controls) + len(report.gaps)
    skipped = sum(not f.tried for f in report.findings)
    total = len(report.controls) + len(report.findings) + len(report.gaps)
    suite = ElementTree.Element(
        "testsuite",
        name=f"redteam.{report.target}",
        tests=str(total),
        failures=str(failures),
        errors="0",
        skipped=str(skipped),
        time=f"{report.seconds:.3f}",
    )
    for c in report.controls:
        case = ElementTree.SubElement(suite, "testcase", classname="control", name=f"{c.name} {c.task}", time="0")
        if not c.ok:
            ElementTree.SubElement(case, "failure", message=_clean(f"expected {c.expected:g}, got {c.score}"))
    for gap in report.gaps:
        case = ElementTree.SubElement(suite, "testcase", classname="coverage", name=_clean(gap[:80]), time="0")
        ElementTree.SubElement(case, "failure", message=_clean(gap))
    for f in report.findings:
        case = ElementTree.SubElement(suite, "testcase", classname=f.family, name=f.id, time=f"{f.seconds:.3f}")
        if f.succeeded:
            failure = ElementTree.SubElement(case, "failure", message=_clean(f"{f.title}: {f.result}, {f.score}"))
            failure.text = _clean("\n".join([*f.evidence, f"fix: {f.fix}", *episode(f)]))
        elif not f.tried:
            ElementTree.SubElement(case, "skipped", message=_clean("; ".join(f.evidence) or f.result))
    return ElementTree.tostring(suite, encoding="unicode")


def _clean(text: str) -> str:
    """Replace the control characters that XML cannot hold."""
    return "".join(c if c in "\n\t" or c >= " " and c not in "￾￿" else "?" for c in text)


def sarif(report: Report) -> str:
    """Write SARIF 2.1.0: a rule for each attack, a result for each breach."""
    rules = [
        {"id": f.id, "shortDescription": {"text": f.title}, "help": {"text": f.fix}} for f in report.findings if f.tried
    ]
    results = [
        {
            "ruleId": f.id,
            "level": "error",
            "message": {"text": f"{f.title}: {f.result}, score {f.score}. {' '.join(f.evidence)[:1000]}"},
            "locations": [{"logicalLocations": [{"name": report.target, "fullyQualifiedName": f.task}]}],
        }
        for f in report.breaches
    ]
    driver = {"name": "agentrl redteam", "version": __version__, "rules": rules}
    document = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(document, indent=2) + "\n"
