"""The report as one self-contained HTML page: the matrix, the controls, each breach with its episode and its fix.

Attackers write the evidence and the transcripts: all of it is escaped, and the page may load and run nothing.
"""

from __future__ import annotations

from html import escape

from agentrl import __version__
from agentrl.redteam.attack import FAMILIES
from agentrl.redteam.formats import COLUMNS, NAMES, episode, quality_lines, visible
from agentrl.redteam.report import BREACHES, Finding, Report

STYLE = """
:root { --ink: #1c2430; --soft: #5d6878; --line: #dfe4ea; --page: #ffffff; --card: #f6f8fa; --bad: #b3261e;
  --bad-soft: #fbe9e7; --good: #1a7f37; --good-soft: #e6f4ea; --warn: #8a5a00; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --soft: #9aa5b4; --line: #313944; --page: #14181e;
  --card: #1c222b; --bad: #ff8a80; --bad-soft: #3b1f1d; --good: #7ddc97; --good-soft: #17301f; --warn: #f0c060; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .8rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
.verdict { border-radius: .5rem; padding: .8rem 1.1rem; margin: 1.2rem 0; font-weight: 600; }
.verdict.good { background: var(--good-soft); color: var(--good); }
.verdict.bad { background: var(--bad-soft); color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { color: var(--soft); font-weight: 500; }
td.zero { color: var(--line); } .gained, .evaded, .hung, .wrong { color: var(--bad); font-weight: 600; }
.held, .right { color: var(--good); } .accepted { color: var(--warn); }
article, details { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; margin: .7rem 0; }
article details { background: none; border: 0; padding: 0; margin: .3rem 0 0; } article details[open] { padding: 0; }
article { padding: .9rem 1.1rem; border-left: 4px solid var(--bad); } article h3 { margin: 0; font-size: 1rem; }
details { padding: 0 1rem; } summary { padding: .55rem 0; cursor: pointer; } details[open] { padding-bottom: .8rem; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--page); border: 1px solid var(--line);
  border-radius: .4rem; padding: .7rem .9rem; max-height: 28rem; overflow-y: auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_page(report: Report) -> str:
    """Write the whole page."""
    title = f"Red team: {escape(report.target)}"
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="soft">backend {escape(report.backend)}, {report.seconds:.0f} s, agentrl {__version__}</p>',
        _verdict(report),
        "<h2>Families and outcomes</h2>",
        _matrix(report),
        "<h2>Controls</h2>",
        _controls(report),
    ]
    if report.breaches:
        parts += ["<h2>What succeeded</h2>", *map(_breach, report.breaches)]
    if report.quality:
        lines = "".join(f"<li>{escape(line.strip())}</li>" for line in quality_lines(report.quality))
        parts += ["<h2>Quality</h2>", f"<ul>{lines}</ul>"]
    parts += ["<h2>Every attack</h2>", *(_family(report, family) for family in FAMILIES)]
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{STYLE}</style>"
    )
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _verdict(report: Report) -> str:
    wrong = sum(not c.ok for c in report.controls)
    words = f"{len(report.breaches)} of {report.tried} attacks succeeded"
    words += f", {wrong} of {len(report.controls)} controls failed" if wrong else ", every control is right"
    return f'<p class="verdict {"good" if report.ok else "bad"}">{words}.</p>'


def _breach(finding: Finding) -> str:
    evidence = "".join(f"<dt>evidence</dt><dd>{escape(visible(line[:1000]))}</dd>" for line in finding.evidence[:8])
    played = escape("\n".join(episode(finding)))
    return (
        f"<article><h3><code>{escape(finding.id)}</code> {escape(finding.title)}</h3><dl>"
        f'<dt>outcome</dt><dd class="{finding.result}">{finding.result}, score {_score(finding.score)} where wrong '
        f"work earns {finding.baseline:g}</dd><dt>task</dt><dd>{escape(finding.task)}</dd>{evidence}"
        f"<dt>fix</dt><dd>{escape(finding.fix)}</dd></dl>"
        + (f"<details><summary>The episode</summary><pre>{played}</pre></details>" if played else "")
        + "</article>"
    )


def _controls(report: Report) -> str:
    rows = []
    for name in dict.fromkeys(c.name for c in report.controls):
        several = [c for c in report.controls if c.name == name]
        bad = [c for c in several if not c.ok]
        said = "; ".join(f"{escape(c.task)}: {_score(c.score)}" for c in bad) or "right everywhere"
        rows.append(
            f"<tr><td>{escape(name)}</td><td>{several[0].expected:g}</td><td>{len(several)}</td>"
            f'<td class="{"wrong" if bad else "right"}">{said}</td></tr>'
        )
    head = "<thead><tr><th>control</th><th>expected</th><th>tasks</th><th>found</th></tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _matrix(report: Report) -> str:
    rows = []
    for family, counts in report.matrix().items():
        if counts.total():
            cells = "".join(
                f'<td class="{c.split()[0]}">{counts[c]}</td>' if counts[c] else '<td class="zero">·</td>'
                for c in COLUMNS
            )
            rows.append(f"<tr><td>{family} {escape(FAMILIES[family])}</td>{cells}</tr>")
    head = "".join(f"<th>{NAMES.get(c, c)}</th>" for c in COLUMNS)
    table = f"<table><thead><tr><th>family</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _family(report: Report, family: str) -> str:
    findings = [f for f in report.findings if f.family == family]
    if not findings:
        return ""
    rows = []
    for f in findings:
        outcome = "accepted" if f.accepted else f.result
        why = escape(visible("; ".join(f.evidence)[:300]))
        rows.append(
            f"<dt><code>{escape(f.id)}</code></dt><dd>{escape(f.title)}: "
            f'<span class="{outcome.split()[0]}">{outcome}</span>{f", score {_score(f.score)}" if f.tried else ""}'
            f"{f' <span class=soft>({why})</span>' if why else ''}</dd>"
        )
    fallen = sum(f.result in BREACHES for f in findings)
    words = f"{len(findings)} attacks" + (f", {fallen} succeeded" if fallen else "")
    return f"<details><summary>{family} {escape(FAMILIES[family])}: {words}</summary><dl>{''.join(rows)}</dl></details>"


def _score(score: float | None) -> str:
    return "none" if score is None else f"{score:g}"
