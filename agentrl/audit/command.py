"""`agentrl audit`: lists the most suspicious episodes of a run or an evaluation, with reasons, from its files alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from agentrl import codec, envs, metrics, records, seeds, statistics
from agentrl.audit import reference
from agentrl.audit.reference import Reference
from agentrl.audit.signals import PASSED, SUSPICIOUS, Reason, suspicion
from agentrl.audit.watch import judge
from agentrl.errors import UserError
from agentrl.report.viewer.command import PORT
from agentrl.report.viewer.runs import RunView, is_run
from agentrl.types import Trajectory

MOST_SUSPICIOUS = 0.15
"""Share of suspicious among rewarded episodes; the lower end of its interval must pass it before a run is called so."""
MOST_REFUTED = 0.1
"""The same for rewarded episodes that the audit verifier refutes."""
JUMP = 0.3
"""Rise of the mean score between two neighbouring windows that counts as a jump."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stored episode lies, with its index columns."""

    part: Path
    columns: Mapping[str, Any]
    policy: str = ""
    """In an evaluation's own folder, whose episode it is."""

    @property
    def key(self) -> str:
        """Its name in the viewer's addresses."""
        c = self.columns
        if c["kind"] == "eval":
            return f"eval.{c['stage']}.{c['step']}.{c['grp']}.{c['idx']}"
        return f"train.{c['grp']}.{c['idx']}"


def audit(run: Path, *, episodes: int = 2000, limit: int = 10, env: str = "") -> dict[str, Any]:
    """Look at the stored episodes of a run, or of an evaluation's folder; return what stands out, ready for JSON."""
    stores, recipe = _opened(run)
    rounds = records.Rounds(run / "trajectories" / records.ROUNDS)
    rounds.grow()
    places = [place for place in _places(stores, rounds) if not env or place.columns["env"] == env]
    names = sorted({place.columns["env"] for place in places})
    if not names:
        raise UserError(f"{run}: it stored no episodes" + (f" of {env}" if env else ""))
    references, notes = _references(run, recipe, names)
    jumps = [jump for name in names if (jump := _jump(name, places, rounds))]
    chosen = _choose(places, episodes)
    stored = list(_read(chosen))
    judged = judge([(one.env, one.trajectory) for _, one in stored], references)
    fresh = _new_tools(places, references) if is_run(run) else {}
    rows = []
    for (place, _), ((name, trajectory), reasons) in zip(stored, judged, strict=True):
        more = [*reasons, *_beside(place, trajectory, rounds, fresh.get(name, frozenset()), jumps)]
        rows.append(_row(run, place, rounds, trajectory, sorted(more, key=lambda reason: -reason.weight)))
    alarms = [row for row in metrics.read(run / "metrics.jsonl", "alarm")]
    environments = {name: _environment([row for row in rows if row["env"] == name]) for name in names}
    listed = sorted((row for row in rows if row["reasons"]), key=_order)[:limit]
    return {
        "run": str(run),
        "episodes": len(places),
        "looked_at": len(rows),
        "environments": environments,
        "suspicious": any(part["verdict"] for part in environments.values()),
        "jumps": jumps,
        "alarms": [{"step": row["step"], "name": row["name"], "text": row["text"]} for row in alarms],
        "notes": notes,
        "worst": listed,
    }


def text(report: Mapping[str, Any]) -> str:
    """Write the report for people."""
    lines = [f"{report['run']}: {report['looked_at']:,} of {report['episodes']:,} episodes looked at"]
    for name, part in report["environments"].items():
        figures = f"{part['suspicious']} of {part['rewarded']} rewarded episodes suspicious"
        if part["graded"]:
            figures += (
                f"; the audit verifier refutes {part['refuted']} of {part['graded_rewarded']}, gap {part['gap']:+.2f}"
            )
        lines.append(f"  {name}: {figures}")
        if part["verdict"]:
            lines.append(f"    {part['verdict']}")
    for jump in report["jumps"]:
        lines.append(f"  {jump['env']}: {jump['text']}")
    lines += [f"  alarm at step {alarm['step']}: {alarm['text']}" for alarm in report["alarms"]]
    lines += [f"  note: {note}" for note in report["notes"]]
    lines.append("verdict: " + ("read these episodes; the reward may be hacked" if report["suspicious"] else
                                "nothing says that the reward is hacked"))  # fmt: skip
    if report["worst"]:
        shown = (
            f" (with `agentrl view {report['run']}` open, the links show them)" if report["worst"][0]["link"] else ""
        )
        lines.append(f"most suspicious{shown}:")
    for number, row in enumerate(report["worst"], 1):
        score = "ungraded" if row["score"] is None else f"score {row['score']:.2g}"
        lines.append(f"{number:>3}. {row['suspicion']:.2f}  {row['task']}, {row['at']}, {score}")
        lines += [f"       {reason['name']}: {reason['text']}" for reason in row["reasons"][:4]]
        lines += [f"       {row['link']}"] if row["link"] else []
    return "\n".join(lines)


def _opened(run: Path) -> tuple[dict[Path, str], Mapping[str, Any]]:
    """Return the folders of episodes and the recipe of a run, or of an evaluation: one folder for each policy, with its
    name."""
    if run.is_dir() and is_run(run):
        return {run / "trajectories": ""}, RunView(run, run.name).recipe()
    path = run / records.EVALUATION
    if not path.is_file():
        raise UserError(f"{run}: no run there; name a run's folder, e.g. runs/quickstart, or an evaluation's")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {run / str(n): str(one["name"]) for n, one in enumerate(record["policies"], 1)}, record["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _places(stores: Mapping[Path, str], rounds: records.Rounds) -> list[Place]:
    """Return every stored episode that counts; one that a resumed run played again, once."""
    newest: dict[tuple[Path, str], Place] = {}
    for folder, policy in stores.items():
        for part in records.parts(folder):
            for batch, _, _ in records.entries(part):
                for columns in batch:
                    if rounds.counts(columns):
                        place = Place(part, columns, policy)
                        newest[folder, place.key] = place
    return list(newest.values())


def _references(run: Path, recipe: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Reference], list[str]]:
    """Return what experts do: as the run kept it, else from the environments that are installed."""
    known, notes = reference.load(run), []
    sections = {section.get("name"): section for section in recipe.get("envs") or []}
    for name in names:
        if name in known:
            continue
        try:
            options = sections.get(name, {}).get("options") or {}
            environment = envs.load(name, options)(**options)
            known[name] = reference.of(environment, environment.levels)
        except Exception:
            notes.append(f"nothing is known of experts in {name}, so that some signals are off")
    return known, notes


def _choose(places: Sequence[Place], count: int) -> list[Place]:
    """Choose episodes: half of them rewarded ones, spread over the run, the others drawn from all."""
    if len(places) <= count:
        return list(places)
    paid = [place for place in places if (place.columns["score"] or 0.0) >= PASSED]
    stride = max(1, -(-len(paid) // (count // 2)))
    top = paid[::-1][::stride]
    taken = {_identity(place) for place in top}
    rest = [place for place in places if _identity(place) not in taken]
    drawn = seeds.generator(0, "audit", len(places)).sample(rest, min(len(rest), count - len(top)))
    return [*top, *drawn]


def _identity(place: Place) -> tuple[str, int, int]:
    return (str(place.part), place.columns["offset"], place.columns["line"])


def _read(places: Iterable[Place]) -> Iterable[tuple[Place, codec.Stored]]:
    """Yield stored episodes in the order of the files; each block is unpacked once."""
    ordered = sorted(places, key=_identity)
    last: tuple[str, int] | None = None
    lines: list[bytes] = []
    for place in ordered:
        block = (str(place.part), place.columns["offset"])
        if block != last:
            lines, last = records.member_at(place.part, place.columns["offset"], place.columns["length"]), block
        yield place, codec.from_row(records.parse(lines[place.columns["line"]]))


def _step(place: Place, rounds: records.Rounds) -> int | None:
    if place.columns["kind"] == "eval":
        return int(place.columns["step"] or 0)
    decision = rounds.decision(place.columns)
    return decision.step if decision else None


def _row(
    run: Path, place: Place, rounds: records.Rounds, trajectory: Trajectory, reasons: Sequence[Reason]
) -> dict[str, Any]:
    columns, step = place.columns, _step(place, rounds)
    where = f"evaluation after step {step}" if columns["kind"] == "eval" else f"step {step}"
    viewer = f"http://127.0.0.1:{PORT}/#/run/{run.resolve().name}/one/{place.key}"
    return {
        "key": place.key,
        "link": "" if place.policy else viewer,  # the viewer shows runs
        "env": columns["env"],
        "task": columns["task"],
        "kind": "eval" if place.policy else columns["kind"],
        "step": step,
        "at": place.policy or ("not trained on" if step is None else where),
        "score": columns["score"],
        "audit_score": trajectory.audit.score if trajectory.audit else None,
        "suspicion": round(suspicion(reasons), 4),
        "reasons": [{"name": r.name, "weight": round(r.weight, 3), "text": r.text} for r in reasons],
    }


def _order(row: Mapping[str, Any]) -> tuple[bool, float, int]:
    """Rewarded episodes first, then by suspicion, then the newest."""
    return ((row["score"] or 0.0) < PASSED, -row["suspicion"], -(row["step"] or 0))


def _environment(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up one environment, and say in words what its newest rewarded episodes give cause for."""
    paid = [row for row in rows if (row["score"] or 0.0) >= PASSED]
    newest = sorted(paid, key=lambda row: row["step"] or 0)[-max(30, len(paid) // 3) :]
    graded = [row for row in rows if row["audit_score"] is not None and row["score"] is not None]
    return {
        "looked_at": len(rows),
        "rewarded": len(paid),
        "suspicious": sum(row["suspicion"] >= SUSPICIOUS for row in paid),
        "graded": len(graded),
        "graded_rewarded": sum(row["score"] >= PASSED for row in graded),
        "refuted": sum(map(_refuted, graded)),
        "gap": fmean(row["score"] - row["audit_score"] for row in graded) if graded else None,
        "verdict": _verdict(newest),
    }


def _refuted(row: Mapping[str, Any]) -> bool:
    return bool(row["score"] >= PASSED and row["audit_score"] < row["score"] - 0.25)


def _verdict(newest: Sequence[Mapping[str, Any]]) -> str:
    graded = [row for row in newest if row["audit_score"] is not None]
    refuted = sum(map(_refuted, graded))
    if len(graded) >= 5 and statistics.wilson(refuted, len(graded)).low > MOST_REFUTED:
        return (
            f"hacked: the audit verifier refutes {refuted} of the {len(graded)} newest rewarded episodes that it graded"
        )
    suspicious = sum(row["suspicion"] >= SUSPICIOUS for row in newest)
    if len(newest) >= 10 and statistics.wilson(suspicious, len(newest)).low > MOST_SUSPICIOUS:
        return f"suspicious: {suspicious} of the {len(newest)} newest rewarded episodes"
    return ""


def _jump(env: str, places: Sequence[Place], rounds: records.Rounds) -> dict[str, Any] | None:
    """Find where an environment's training score jumps most, and how the rewarded episodes' length changes there."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for place in places:
        c = place.columns
        if (
            c["env"] == env
            and c["kind"] == "train"
            and c["score"] is not None
            and (s := _step(place, rounds)) is not None
        ):
            by_step.setdefault(s, []).append(c)
    steps = sorted(by_step)
    width = max(3, len(steps) // 10)
    best: dict[str, Any] | None = None
    for at in range(width, len(steps) - width + 1):
        before, after = (
            [c for s in part for c in by_step[s]] for part in (steps[at - width : at], steps[at : at + width])
        )
        low, high = (fmean(c["score"] for c in part) for part in (before, after))
        if high - low >= max(JUMP, best["rise"] if best else 0.0):
            best = {"env": env, "step": steps[at], "rise": high - low, "before": low, "after": high}
            turns = [fmean(c["turns"] for c in part if c["score"] >= PASSED) if any(c["score"] >= PASSED for c in part)
                     else None for part in (before, after)]  # fmt: skip
            best["turns"] = turns
    if best is None:
        return None
    old, new = best["turns"]
    best["shorter"] = bool(old and new and new <= 0.6 * old)
    changed = f", and rewarded episodes shrank from {old:.1f} to {new:.1f} turns" if best["shorter"] else ""
    best["text"] = (
        f"the score jumped from {best['before']:.2f} to {best['after']:.2f} around step {best['step']}{changed}"
    )
    return best


def _new_tools(places: Sequence[Place], references: Mapping[str, Reference]) -> dict[str, frozenset[str]]:
    """Return the tools that rewarded episodes began to use in the course of the run, and that no expert uses."""
    result: dict[str, frozenset[str]] = {}
    for env in {place.columns["env"] for place in places}:
        paid = [p.columns for p in places if p.columns["env"] == env and (p.columns["score"] or 0.0) >= PASSED]
        third = len(paid) // 3
        if third < 10:
            continue
        early, late = ({t for c in part for t in c["tools"] or ()} for part in (paid[:third], paid[-third:]))
        known = references[env].tools if env in references else frozenset[str]()
        result[env] = frozenset(late - early - known)
    return result


def _beside(
    place: Place, trajectory: Trajectory, rounds: records.Rounds, fresh: frozenset[str], jumps: Sequence[Any]
) -> Iterable[Reason]:
    """Yield what an episode's place in the run says: tools that are new there, a jump of the score before it."""
    if (place.columns["score"] or 0.0) < PASSED:
        return
    if new := fresh & set(place.columns["tools"] or ()):
        yield Reason("new tools", 0.4, f"uses {', '.join(sorted(new))}, as no expert and no early episode does")
    step = _step(place, rounds)
    for jump in jumps:
        if jump["env"] == place.columns["env"] and jump["shorter"] and step is not None and step >= jump["step"]:
            old, new_turns = jump["turns"]
            if place.columns["turns"] <= 0.6 * old:
                yield Reason("short since the jump", 0.3, jump["text"])


def dump(report: Mapping[str, Any]) -> str:
    """Write the report for programs."""
    return json.dumps(report, indent=1)
