"""Questions about a run's trajectories, answered from the viewer's index: filters, groups, tasks, the curriculum."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agentrl.errors import UserError
from agentrl.report.viewer.index import Index

PAGE = 100
"""Rows per page."""
SHOWN = (
    "key", "kind", "stage", "step", "time", "env", "task", "level", "grp", "idx", "score", "ending", "grade", "alarm",
    "kept", "reason", "advantage", "predicted", "turns", "tokens", "version", "oldest", "tool_errors", "created",
    "changed", "deleted", "seconds", "tools", "note",
)  # fmt: skip
"""Columns of a table of trajectories."""
SORTS = {name: name for name in SHOWN if name not in ("tools", "note", "key")}
SCORES = {
    "pass": "score = 1",
    "fail": "score = 0",
    "partial": "score > 0 and score < 1",
    "ungraded": "score is null",
}
KEPT = {"kept": "kept = 1", "dropped": "kept = 0", "undecided": "kept is null and kind = 'train'"}
EXACT = {"env": str, "level": int, "ending": str, "grade": str, "kind": str, "stage": str, "grp": int, "reason": str}
FILTERS = (*EXACT, "score", "kept", "from", "to", "tool", "text", "task", "alarm")
"""What a table can be filtered by."""


def where(index: Index, filters: Mapping[str, str]) -> tuple[str, list[Any]]:
    """Return the condition of a filter, and its values."""
    parts, values = ["1"], []
    try:
        for name, kind in EXACT.items():
            if filters.get(name):
                parts.append(f"{name} = ?")
                values.append(kind(filters[name]))
        for name, sign in (("from", ">="), ("to", "<=")):
            if filters.get(name):
                parts.append(f"step {sign} ?")
                values.append(int(filters[name]))
        for name, choices in (("score", SCORES), ("kept", KEPT)):
            if filters.get(name):
                parts.append(choices[filters[name]])
    except (ValueError, KeyError) as error:
        raise UserError(f"this filter cannot be read: {error}") from None
    if filters.get("alarm"):
        parts.append("alarm = 1")
    if filters.get("tool"):
        parts.append("instr(tools, ?)")
        values.append(f"|{filters['tool']}|")
    if filters.get("task"):
        parts.append("instr(lower(task), ?)")
        values.append(filters["task"].lower())
    if words := [word for word in _words(filters.get("text", "")) if word]:
        index.texts.progress()
        parts.append("id in (select rowid from words where words match ?)")
        values.append(" AND ".join(f'"{word}"*' for word in words))
    return " and ".join(parts), values


def _words(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text).split()[:20]


def browse(index: Index, filters: Mapping[str, str], *, sort: str = "", page: int = 0) -> dict[str, Any]:
    """Return one page of the trajectories that match, newest first by default."""
    condition, values = where(index, filters)
    down = sort.startswith("-") or not sort
    column = SORTS.get(sort.lstrip("-"), "id")
    order = f"{column} {'desc' if down else 'asc'}, id desc"
    ((count, passed, graded),) = index.query(
        f"select count(*), sum(score = 1), count(score) from t where {condition}", values
    )
    start = max(0, page) * PAGE
    rows = index.query(
        f"select {','.join(SHOWN)} from t where {condition} order by {order} limit {PAGE} offset {start}", values
    )
    share = index.texts.progress() if filters.get("text") else None
    return {
        "total": count,
        "passed": passed or 0,
        "graded": graded,
        "page": page,
        "size": PAGE,
        "columns": SHOWN,
        "rows": rows,
        "text_share": share,
        "behind": index.behind,
    }


def facets(index: Index) -> dict[str, Any]:
    """Return the values that filters can take, with how many trajectories have each."""
    answer: dict[str, Any] = {}
    names = ("env", "level", "ending", "grade", "kind", "stage", "reason")
    columns = ",".join(names)
    combined = index.query(f"select {columns}, count(*) from t group by {columns}")  # one pass over the table
    for place, name in enumerate(names):
        counts: dict[Any, int] = {}
        for row in combined:
            if row[place] not in (None, ""):
                counts[row[place]] = counts.get(row[place], 0) + row[-1]
        answer[name] = sorted(counts.items())
    tools: dict[str, int] = {}
    for text, count in index.query("select tools, count(*) from t where tools <> '' group by 1"):
        for tool in text.strip("|").split("|"):
            tools[tool] = tools.get(tool, 0) + count
    answer["tool"] = sorted(tools.items(), key=lambda pair: -pair[1])[:200]
    (answer["steps"],) = index.query("select min(step), max(step) from t")
    ((answer["total"], answer["alarms"]),) = index.query("select count(*), coalesce(sum(alarm), 0) from t")
    return answer


def table(
    index: Index, condition: str, values: list[Any], order: str = "kind, stage, step, grp, idx"
) -> list[dict[str, Any]]:
    """Return at most 200 rows as dictionaries."""
    rows = index.query(f"select {','.join(SHOWN)} from t where {condition} order by {order} limit 200", values)
    return [dict(zip(SHOWN, row, strict=True)) for row in rows]


def siblings(index: Index, key: str) -> list[dict[str, Any]]:
    """Return all rollouts of a trajectory's group; of an evaluation, its tries of the same task."""
    head = index.query("select kind, stage, coalesce(step, -1), grp from t where key=?", (key,))
    if not head:
        return []
    kind, stage, step, group = head[0]
    if kind == "train":
        return table(index, "kind = 'train' and grp = ?", [group], "idx")
    return table(index, "kind = 'eval' and stage = ? and step = ? and grp = ?", [stage, step, group], "idx")


def of_task(index: Index, task: str) -> list[dict[str, Any]]:
    """Return the trajectories of one task, in the order of the run."""
    return table(index, "task = ?", [task], "coalesce(step, 1 << 60), kind, stage, grp, idx")


def shared_tasks(a: Index, b: Index) -> list[dict[str, Any]]:
    """Return the tasks that two runs have in common, with how often each solved them in its evaluations or training."""
    sql = "select task, env, level, kind, count(*), avg(coalesce(score, 0) = 1) from t group by task, kind"
    first, second = ({(row[0], row[3]): row for row in index.query(sql)} for index in (a, b))
    common = [
        {"task": row[0], "env": row[1], "level": row[2], "kind": row[3], "tries": [row[4], second[key][4]]}
        | {"rates": [row[5], second[key][5]]}
        for key, row in first.items()
        if key in second
    ]
    common.sort(key=lambda item: (item["kind"] != "eval", -abs(item["rates"][1] - item["rates"][0]), item["task"]))
    return common[:1000]


def curriculum(index: Index, bins: int = 24) -> dict[str, Any]:
    """Return where the rollouts went, and what was believed of their tasks against what came of them."""
    ((low, high),) = index.query("select min(step), max(step) from t where kind = 'train' and step is not null")
    if low is None:
        return {"levels": [], "believed": [], "bins": []}
    width = max(1, -(-(high - low + 1) // bins))
    levels = index.query(
        "select env, level, (step - ?) / ?, count(*), avg(score), avg(kept) from t where kind = 'train' and step is "
        "not null group by 1, 2, 3 order by 1, 2, 3",
        (low, width),
    )
    believed = index.query(
        "select env, min(9, cast(predicted * 10 as int)), count(*), avg(predicted), avg(score) from t where "
        "kind = 'train' and predicted is not null and score is not null group by 1, 2 order by 1, 2"
    )
    dropped = index.query("select reason, count(*) from t where kept = 0 group by 1 order by 2 desc")
    edges = [low + n * width for n in range(-(-(high - low + 1) // width))]
    return {"levels": levels, "believed": believed, "bins": edges, "width": width, "dropped": dropped}


def parsed(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored row with the values of free form as data."""
    loaded = {
        name: json.loads(row[name]) if row.get(name) else None
        for name in ("outcome", "verdict", "audit", "ledger", "timings", "conversations")
    }
    task = {**row["task"], "setup": json.loads(row["task"]["setup"])}
    return {**row, **loaded, "task": task}
