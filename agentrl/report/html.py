"""`agentrl report`: a run, or two beside each other, as one HTML file without a single request, or as Markdown.

The HTML file holds the viewer's own page with its data: the pictures and tables are the same. It runs no script but
those inside it, named by their hashes; what a model wrote is data, shown as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentrl import metrics
from agentrl.errors import UserError
from agentrl.report.terminal import sparkline
from agentrl.report.viewer import queries
from agentrl.report.viewer.runs import RunView, find, shared

STATIC = Path(__file__).parent / "viewer" / "static"
SCRIPTS = ("vendor/htm-preact.umd.js", "vendor/uPlot.iife.min.js", "charts.js", "views.js", "app.js")
STYLES = ("vendor/uPlot.min.css", "style.css")
LIMIT = 3 << 20
"""Bytes of trajectories that a report holds at most."""
SAMPLE = 24
"""Trajectories of each run that a report holds at most."""
TOKENS = 3000
"""Tokens of each of them."""


def open_runs(paths: Sequence[Path]) -> list[RunView]:
    """Open the runs that a report is about."""
    views: list[RunView] = []
    for path in paths:
        named = find([path])
        if len(named) != 1 or next(iter(named.values())) != path.resolve():
            raise UserError(f"{path}: no run there; name a run's own folder")
        name = path.resolve().name
        views.append(RunView(path.resolve(), name if name not in [v.name for v in views] else f"{name}~2"))
    return views


def page(views: Sequence[RunView]) -> str:
    """Return the report as one HTML file."""
    first = views[0]
    data: dict[str, Any] = {
        "start": _address("compare", first.name, views[1].name) if len(views) > 1 else _address("run", first.name),
        "made": time.strftime("made %Y-%m-%d", time.gmtime()),
        "runs": {"runs": [view.summary() for view in views], "redteam": False},
    }
    for view in views:
        data |= _run(view, LIMIT // len(views))
    for other in views[1:]:
        data[_address("run", first.name, "shared", other.name)] = shared(first, other)
    return _document(data, " and ".join(view.name for view in views))


def _run(view: RunView, limit: int) -> dict[str, Any]:
    data: dict[str, Any] = {
        _address("run", view.name, "overview"): view.overview(),
        _address("run", view.name, "curriculum"): queries.curriculum(view.index),
        _address("run", view.name, "facets"): queries.facets(view.index),
    }
    chosen, size = {}, 0
    for key in sample(view):
        trajectory = view.trajectory(key, limit=TOKENS)
        size += len(json.dumps(trajectory))
        if trajectory is not None and size < limit:
            chosen[key] = trajectory
    for key, trajectory in chosen.items():
        trajectory["group"] = [row for row in trajectory["group"] if row["key"] in chosen]
        data[_address("run", view.name, "one", key)] = trajectory
    rows = [list(trajectory["columns"].values()) for trajectory in chosen.values()]
    listing = {"total": len(rows), "passed": 0, "graded": 0, "page": 0, "size": max(1, len(rows))}
    data[_address("run", view.name, "rows")] = {**listing, "columns": queries.SHOWN, "rows": rows, "text_share": None}
    return data


def sample(view: RunView) -> list[str]:
    """Choose trajectories that a reader wants to see: alarms, the newest evaluation, one whole group, the newest."""
    wanted = (
        "select key from t where alarm = 1 order by id desc limit 4",
        "select key from t where kind = 'eval' and score = 1 order by id desc limit 4",
        "select key from t where kind = 'eval' and score < 1 order by id desc limit 4",
        "select key from t where kind = 'train' and grp = (select max(grp) from t where kept = 1) order by idx limit 8",
        "select key from t where kind = 'train' order by id desc limit 4",
    )
    keys = [key for sql in wanted for (key,) in view.index.query(sql)]
    return list(dict.fromkeys(keys))[:SAMPLE]


def _address(*path: str) -> str:
    """Return an address as the page asks for it (encodeURIComponent)."""
    return "/".join(quote(part, safe="-_.!~*'()") for part in path)


def _document(data: dict[str, Any], title: str) -> str:
    start = "window.AGENTRL_REPORT = JSON.parse(document.getElementById('data').textContent)"
    scripts = [start, *((STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS)]
    styles = [(STATIC / name).read_text(encoding="utf-8") for name in STYLES]
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = title.replace("&", "&amp;").replace("<", "&lt;")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="content-security-policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<title>{head} · agentrl</title>\n<link rel="icon" href="data:,">',
            *(f"<style>{style}</style>" for style in styles),
            '</head>\n<body>\n<div id="app"></div>',
            f'<script type="application/json" id="data">{text}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>\n</html>\n",
        ]
    )


def _hashes(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


# Markdown --------------------------------------------------------------------------------------------------------


def markdown(views: Sequence[RunView]) -> str:
    """Return the report as Markdown, for a pull request."""
    lines = []
    for view in views:
        lines += [f"## {_escape(view.name)}", "", *_markdown(view)]
    for other in views[1:]:
        lines += [
            "## Compared",
            "",
            _escape(shared(views[0], other)["verdict"]) or "No evaluation on the same tasks.",
            "",
        ]
    return "\n".join(lines)


def _markdown(view: RunView) -> list[str]:
    overview = view.overview()
    lines = [
        f"{overview['state']}, step {overview['step']} of {overview['steps']}; {', '.join(overview['envs'])}; "
        f"{overview['model']}; {overview['algorithm']}",
        "",
    ]
    if overview["verdict"]:
        lines += [f"**{_escape(overview['verdict'])}**", ""]
    if overview["evals"]:
        levels = sorted({level for row in overview["evals"] for level in row.get("levels", {})}, key=int)
        lines += _table(
            [
                "environment",
                "step",
                "stage",
                "pass@1 [95 %]",
                *(f"level {level}" for level in levels),
                "tasks",
                "ungraded",
            ],
            [
                [row["env"], row["step"], row["stage"], _interval(row["pass@1"])]
                + [_figure(row.get("levels", {}).get(level)) for level in levels]
                + [row.get("tasks"), row.get("ungraded")]
                for row in overview["evals"]
            ],
        )
    curves = [(name, [v for v in values if v is not None]) for name, values in overview["curves"].items()]
    lines += _table(
        ["curve", "first", "last", "over the run"],
        [[name, _figure(v[0]), _figure(v[-1]), f"`{sparkline(_scaled(v))}`"] for name, v in curves if v],
    )
    total = sum(overview["totals"].values()) or 1.0
    lines += _table(
        ["stage", "seconds", "share"],
        [[name, f"{s:.0f}", f"{s / total:.0%}"] for name, s in overview["totals"].items() if s],
    )
    for row in overview["alarms_list"]:
        lines.append(f"- **alarm {_escape(row['name'])}**, step {row['step']}: {_escape(row['text'])}")
    return [*lines, ""]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    if not rows:
        return []
    cells = [[text if str(text).startswith("`") else _escape(text) for text in row] for row in rows]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in cells), ""]


def _escape(text: Any) -> str:
    """Return text that Markdown takes as text, on one line."""
    flat = " ".join(str("–" if text is None else text).split())
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|~!&@" else c for c in flat)


def _interval(score: metrics.Row) -> str:
    return f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _scaled(values: Sequence[float], width: int = 40) -> list[float]:
    low, high = min(values), max(values)
    stride = max(1, -(-len(values) // width))
    return [(v - low) / (high - low) if high > low else 0.5 for v in values[::stride]]


def report(run: Path, *, compare: Path | None, md: bool, out: Path | None) -> str:
    """Write a report; return where it lies, or its text for Markdown without a file."""
    views = open_runs([run, *([compare] if compare else [])])
    try:
        text = markdown(views) if md else page(views)
    finally:
        for view in views:
            view.close()
    if md and out is None:
        return text
    path = out or Path(f"{'-'.join(view.name for view in views)}.html")
    path.write_text(text, encoding="utf-8", errors="replace")
    return f"written: {path} ({len(text.encode('utf-8', 'replace')) / 1e6:.1f} MB)"
