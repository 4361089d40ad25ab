"""Writes a report down: a matrix for people, HTML, JUnit and SARIF for the tools around them."""

from __future__ import annotations

import html
import json
from typing import Any
from xml.etree import ElementTree

from rich.console import Group
from rich.table import Table
from rich.text import Text

from agentrl import __version__
from agentrl.verifiers.redteam.attack import FAMILIES
from agentrl.verifiers.redteam.report import Finding, Report

COLUMNS = ("held", "gained", "evaded", "hung", "accepted", "void", "not applicable")
_STYLES = {"gained": "bold red", "evaded": "bold red", "hung": "bold red", "held": "green", "accepted": "yellow"}


def screen(report: Report, *, transcripts: bool = True) -> Group:
    """Controls, the matrix family × outcome, and each breach with its evidence and its fix."""
    bad = [c for c in report.controls if not c.ok]
    head = Text(f"{report.target} on {report.backend}: ", style="bold")
    good = len(report.controls) - len(bad)
    head.append(f"controls {good} of {len(report.controls)} right", style="red" if bad else "green")
    head.append(f", {report.tried} attacks tried, ")
    head.append(f"{len(report.breaches)} succeeded", style="red" if report.breaches else "green")
    head.append(f" ({report.seconds:.0f} s)", style="dim")
    table = Table(box=None, pad_edge=False)
    table.add_column("family", no_wrap=True)
    for column in COLUMNS:
        name = "n/a" if column == "not applicable" else column
        table.add_column(name, justify="right", style=_STYLES.get(column, "dim"))
    for family, counts in report.matrix().items():
        cells = [str(counts[column]) if counts[column] else "·" for column in COLUMNS]
        table.add_row(f"{family}  {FAMILIES[family]}", *cells)
    parts: list[Any] = [head, table]
    for control in bad:
        why = "; ".join(control.evidence[:3])
        line = f"control {control.name} on {control.task}: expected {control.expected:g}, got {control.score}: {why}"
        parts.append(Text(line, style="red"))
    for finding in report.breaches:
        parts.append(_breach(finding, transcripts))
    return Group(*parts)


def _breach(finding: Finding, transcript: bool) -> Text:
    text = Text(f"\n{finding.id}  {finding.title}\n", style="bold red")
    text.append(
        f"  {finding.result} on {finding.task}: score {finding.score} where wrong work earns {finding.baseline}\n", ""
    )
    for line in finding.evidence[:5]:
        text.append(f"  evidence: {line[:300]}\n", "default")
    text.append(f"  fix: {finding.fix}\n", "yellow")
    if transcript:
        for line in _episode(finding):
            text.append(f"    {line}\n", "dim")
    return text


def _episode(finding: Finding) -> list[str]:
    lines = []
    for message in finding.transcript[2:]:
        for call in message.tool_calls:
            lines.append(f"{call.name}({json.dumps(dict(call.arguments))[:600]})")
        if message.content:
            lines.append(f"{message.role}: {message.content[:600]}")
    return lines


def html_page(report: Report) -> str:
    """One self-contained page."""
    rows = []
    for family, counts in report.matrix().items():
        cells = "".join(f'<td class="{c.split()[0]}">{counts[c] or "·"}</td>' for c in COLUMNS)
        rows.append(f"<tr><th>{family} {html.escape(FAMILIES[family])}</th>{cells}</tr>")
    details = []
    for f in report.findings:
        episode = html.escape("\n".join(_episode(f)))
        body = f"<p>{html.escape('; '.join(f.evidence)[:1000])}</p>"
        if f.succeeded:
            body += f"<p><b>Fix:</b> {html.escape(f.fix)}</p><pre>{episode}</pre>"
        opened = " open" if f.succeeded else ""
        summary = f"{html.escape(f.id)} — {html.escape(f.title)}: {f.result}, score {f.score}"
        details.append(f'<details class="{f.result.split()[0]}"{opened}><summary>{summary}</summary>{body}</details>')
    controls = "".join(
        f"<li>{c.name} on {html.escape(c.task)}: expected {c.expected:g}, got {c.score}</li>" for c in report.controls
    )
    style = (
        "body{font:15px/1.5 system-ui;max-width:70rem;margin:2rem auto;padding:0 1rem}"
        "td{text-align:right;padding:0 1rem}th{text-align:left}.gained,.evaded,.hung{color:#b00}.held{color:#070}"
        "pre{white-space:pre-wrap;background:#f6f6f6}"
    )
    title = f"Red team: {html.escape(report.target)}"
    head = "".join(f"<th>{c}</th>" for c in COLUMNS)
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{style}</style><h1>{title}</h1>'
        f"<p>{report.tried} tried, {len(report.breaches)} succeeded, backend {html.escape(report.backend)}.</p>"
        f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table><h2>Controls</h2><ul>{controls}</ul>"
        f"<h2>Attacks</h2>{''.join(details)}\n"
    )


def junit(report: Report) -> str:
    """One test case for each control and attack."""
    failures = len(report.breaches) + sum(not c.ok for c in report.controls)
    skipped = sum(not f.tried for f in report.findings)
    total = len(report.controls) + len(report.findings)
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
    for f in report.findings:
        case = ElementTree.SubElement(suite, "testcase", classname=f.family, name=f.id, time=f"{f.seconds:.3f}")
        if f.succeeded:
            failure = ElementTree.SubElement(case, "failure", message=_clean(f"{f.title}: {f.result}, {f.score}"))
            failure.text = _clean("\n".join([*f.evidence, f"fix: {f.fix}", *_episode(f)]))
        elif not f.tried:
            ElementTree.SubElement(case, "skipped", message=_clean("; ".join(f.evidence) or f.result))
    return ElementTree.tostring(suite, encoding="unicode")


def _clean(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(c if c in "\n\t" or c >= " " and c not in "￾￿" else "?" for c in text)


def sarif(report: Report) -> dict[str, Any]:
    """SARIF 2.1.0: a rule for each attack, a result for each breach."""
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
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def sarif_text(report: Report) -> str:
    """The SARIF document as text."""
    return json.dumps(sarif(report), indent=2) + "\n"
