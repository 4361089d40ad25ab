"""`agentrl data`: makes a data set from runs, and says what was left out and why.

runs ── select ── pair ── dedupe ── decontaminate ── per task ── exact? ── file
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agentrl.data.pairs import PER_TASK, Pair, pairs
from agentrl.data.select import Item, RunSource, Selection, collect
from agentrl.data.similar import Contamination, distinct
from agentrl.data.write import Form, check_target, record, write
from agentrl.errors import UserError
from agentrl.hashing import digest
from agentrl.rollout.data_lines import LineError
from agentrl.rollout.examples import examples_of

One = TypeVar("One", Item, Pair)

ANY_LENGTH = 1 << 31
REASONS = {
    "ungraded": "without a score (infrastructure or verifier trouble)",
    "broken": "broke their episode, with an alarm",
    "environment": "of other environments",
    "level": "of other levels",
    "step": "of other steps",
    "score": "of other scores",
    "suspicious": "look like reward hacking",
    "compacted": "of several conversations (rollout.compaction)",
    "unpaired": "not paired",
    "exact": "exact duplicates",
    "near": "near duplicates",
    "held-out split": "of a held-out split",
    "held-out task": "the same task as a held-out one",
    "given file": "close to a text of a given file",
    "per task": "beyond the number per task",
    "inexact": "whose tokens are not what their messages render to",
}
"""What the report calls each reason, in the order in which they are looked at."""


def make(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    form: Form = "tokens",
    paired: bool = False,
    selection: Selection | None = None,
    per_task: int | None = None,
    near: float = 0.9,
    against: Sequence[str | Path] = (),
) -> dict[str, Any]:
    """Make a data set from runs and write it; return what was kept and left out, ready for JSON.

    By default it holds solved trajectories; with `paired`, the best against the worst of each group. `against` names
    files whose texts must not occur; held-out tasks of the runs' environments are always left out.
    """
    target = Path(out)
    check_target(target)
    if not runs:
        raise UserError("name at least one run")
    wanted = selection or Selection(score=(0.0, 1.0) if paired else (1.0, 1.0))
    contamination = Contamination()
    for path in against:
        contamination.add_file(Path(path))
    everything = Selection(levels=wanted.levels, envs=wanted.envs, steps=wanted.steps, suspicious=wanted.suspicious)
    items, counts = collect(runs, everything if paired else wanted)
    if paired:
        most = PER_TASK if per_task is None else per_task
        chosen = pairs(items, per_task=most, score=wanted.score)
        counts["unpaired"] = len(items) - 2 * len(chosen)
        lines = _lines(chosen, form, None, near, contamination, counts)
    else:
        lines = _lines(items, form, per_task, near, contamination, counts)
    if not lines:
        raise UserError(f"nothing is left of {counts['read']:,} trajectories: {_said(counts)}")
    write(lines, target)
    return {
        "out": str(target),
        "form": form,
        "lines": len(lines),
        "pairs": paired,
        "tasks": len({(line["env"], line["task"]) for line in lines}),
        "read": counts.pop("read", 0),
        "left_out": {name: counts[name] for name in REASONS if counts[name]},
    }


def _lines(
    ones: Sequence[One],
    form: Form,
    per_task: int | None,
    near: float,
    contamination: Contamination,
    counts: Counter[str],
) -> list[dict[str, Any]]:
    """Return the lines of what is distinct, clean and exact."""
    places, duplicates = distinct([one.text() for one in ones], near)
    counts.update(duplicates)
    clean = _clean([ones[place] for place in places], contamination, counts)
    return _exact(_bounded(clean, per_task, counts), form, counts)


def _clean(ones: Sequence[One], contamination: Contamination, counts: Counter[str]) -> list[One]:
    """Leave out what a policy will be judged by."""
    kept: list[One] = []
    looked: set[Path] = set()
    for one in ones:
        item = _item(one)
        if item.run.path not in looked:
            looked.add(item.run.path)
            contamination.add_heldout(item.run.recipe)
    for one in ones:
        why = contamination.why(_item(one).trajectory.task)
        counts[why] += bool(why)
        kept += [] if why else [one]
    return kept


def _bounded(ones: Sequence[One], per_task: int | None, counts: Counter[str]) -> list[One]:
    """Keep the best of each task: the highest scores, then the fewest sampled tokens."""
    if per_task is None:
        return list(ones)
    order = sorted(range(len(ones)), key=lambda n: (-_item(ones[n]).score, _item(ones[n]).trajectory.sampled_tokens, n))
    taken: Counter[tuple[str, str]] = Counter()
    kept = []
    for place in order:
        taken[ones[place].task] += 1
        if taken[ones[place].task] <= per_task:
            kept.append(place)
    counts["per task"] += len(ones) - len(kept)
    return [ones[place] for place in sorted(kept)]


def _exact(ones: Sequence[One], form: Form, counts: Counter[str]) -> list[dict[str, Any]]:
    """Return the lines that a warm start will take, by the very function with which it reads them."""
    lines = []
    if form == "tokens":
        _one_tokenizer({_item(one).run.path: _item(one).run for one in ones}.values())
    for number, one in enumerate(ones, 1):
        line = json.loads(json.dumps(record(one, form)))
        try:
            examples_of(number, line, _item(one).run.renderer, context=ANY_LENGTH)
        except LineError:
            counts["inexact"] += 1
            continue
        lines.append(line)
    return lines


def _one_tokenizer(sources: Iterable[RunSource]) -> None:
    by_vocabulary = {digest(source.renderer.tokenizer.backend_tokenizer.get_vocab()): source for source in sources}
    if len(by_vocabulary) > 1:
        first, second, *_ = by_vocabulary.values()
        raise UserError(
            f"{first.path} and {second.path} have different tokenizers; use --form chat, or a file for each"
        )


def _item(one: Item | Pair) -> Item:
    return one.chosen if isinstance(one, Pair) else one


def _said(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[name]:,} {words}" for name, words in REASONS.items() if counts.get(name))


def text(report: Mapping[str, Any]) -> str:
    """Write the report for people."""
    what = "pairs" if report["pairs"] else "trajectories"
    lines = [f"{report['out']}: {report['lines']:,} {what} of {report['tasks']:,} tasks, as {report['form']}"]
    lines.append(f"read {report['read']:,} training episodes; left out:")
    lines += [f"  {count:>7,}  {REASONS[name]}" for name, count in report["left_out"].items()]
    return "\n".join(lines)


def dump(report: Mapping[str, Any]) -> str:
    """Write the report for programs."""
    return json.dumps(report, indent=1)


def bounds(text: str | None, default: tuple[float, float]) -> tuple[float, float]:
    """Read `0.5-1` or `0.5` as the lowest and highest score."""
    if text is None:
        return default
    low, _, high = text.partition("-")
    try:
        wanted = (float(low), float(high or 1.0))
    except ValueError:
        wanted = (1.0, 0.0)
    if not 0.0 <= wanted[0] <= wanted[1] <= 1.0:
        raise UserError(f"--score takes numbers from 0 to 1 such as 0.5 or 0.5-0.9, got {text!r}")
    return wanted


def step_range(text: str | None) -> tuple[int, int] | None:
    """Read `10-40` as the first and last step."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
        raise UserError(f"--steps takes steps such as 10-40, got {text!r}")
    return int(first), int(last or first)
