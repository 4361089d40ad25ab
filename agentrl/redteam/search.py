"""Searches for attacks that nobody wrote down: mutates and combines what an agent may do, and shrinks what works.

    proposals (answers, sources, files, perturbed sandboxes, combined attacks) ── play ──> score
                                                                        │ above the baseline
                                         minimal exploit <── shrink ────┘

A search with a seed is repeatable. Each exploit becomes a finding of family G with the id `G.found-<hash>`, and a
regression test is written.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentrl import seeds
from agentrl.redteam.attack import attacks
from agentrl.redteam.play import Action, NotApplicable, Played, play
from agentrl.redteam.proposals import Candidate, propose
from agentrl.redteam.report import Finding, Report
from agentrl.redteam.suite import AttackTarget
from agentrl.redteam.target import Target
from agentrl.types import ToolCall
from agentrl.verifiers.base import Boxes

ENOUGH = 5
"""Exploits after which the search stops: a verifier with five holes needs fixing, not more searching."""
BARREN = 200
"""Failed proposals in a row after which there is nothing to vary."""


async def search(
    attack_target: AttackTarget,
    boxes: Boxes,
    report: Report,
    *,
    seconds: float,
    seed: int = 0,
    folder: Path | None = Path("redteam-found"),
    again: str = "",
) -> Report:
    """Search for `seconds` and add the exploits to the report; each is shrunk and saved as a test in `folder`.

    `again`: the `Request(...)` that leads to this target, as the saved test will write it.
    """
    until = time.monotonic() + seconds
    exploits: dict[str, Finding] = {}
    tried = barren = 0
    targets = await attack_target.survey(boxes)
    corpus = list(attacks().values())
    rng = seeds.generator(seed, "redteam search", attack_target.name)
    while time.monotonic() < until and len(exploits) < ENOUGH and barren < BARREN:
        target = rng.choice(targets)
        try:
            candidate = propose(target, corpus, rng)
        except NotApplicable:
            barren += 1
            continue
        tried, barren = tried + 1, 0
        if not _gained(target, await play(target.arena, candidate.actions)):
            continue
        small = await shrink(target, candidate, until=time.monotonic() + max(5.0, seconds / 5))
        name = hashlib.sha256(repr(small.actions).encode("utf-8", "surrogatepass")).hexdigest()[:8]
        exploits[name] = _finding(name, target, small, await play(target.arena, small.actions))
        if folder is not None:
            save(folder, attack_target.name, target.arena.task.id, name, small.actions, again)
    if exploits:
        return replace(report, findings=(*report.findings, *exploits.values()))
    title = f"Search: {tried} submissions in {seconds:g} s, none of them gained"
    note = Finding(id="G.search", family="G", title=title, result="held" if tried else "not applicable", score=0.0)
    return replace(report, findings=(*report.findings, note))


def _finding(name: str, target: Target, small: Candidate, shown: Played) -> Finding:
    exploit = "; ".join(_literal(action) for action in small.actions)
    return Finding(
        id=f"G.found-{name}",
        family="G",
        title="Found by search",
        result="gained",
        score=shown.score,
        baseline=target.baseline,
        task=target.arena.task.id,
        evidence=(f"minimal exploit: {exploit[:400]}", *shown.evidence),
        fix="Tighten the specification until this fails; the saved test then passes.",
        transcript=shown.messages,
    )


def _gained(target: Target, played: Played) -> bool:
    """Whether it scored above the baseline with something else than the right answer in another spelling."""
    if played.score is None or played.score <= target.baseline + 1e-9 or not target.is_wrong(played.submission):
        return False
    if "answer" in target.surfaces and target.solution is None and played.submission is not None:
        texts = (played.submission.answer, target.honest_answer)
        one, other = ("".join(text.split()).casefold() for text in texts)
        try:
            return float(one) != float(other)
        except ValueError:
            return one != other
    return True


async def shrink(target: Target, candidate: Candidate, *, until: float) -> Candidate:
    """Return the smallest that still succeeds: leave out parts, then ever smaller pieces of the others."""

    async def works(parts: Sequence[str]) -> bool:
        return _gained(target, await play(target.arena, candidate.build(parts)))

    parts = list(candidate.parts)
    for at in reversed(range(len(parts))):
        fewer = [*parts[:at], *parts[at + 1 :]]
        if (fewer or not candidate.fine) and time.monotonic() < until and await works(fewer):
            parts = fewer
    for at in range(len(parts) if candidate.fine else 0):
        size = max(1, len(parts[at]) // 2)
        while size >= 1 and time.monotonic() < until:
            start, smaller = 0, False
            while start < len(parts[at]) and time.monotonic() < until:
                shorter = parts[at][:start] + parts[at][start + size :]
                if await works([*parts[:at], shorter, *parts[at + 1 :]]):
                    parts[at], smaller = shorter, True
                else:
                    start += size
            if not smaller or size > len(parts[at]):
                size //= 2
    return replace(candidate, parts=tuple(parts))


TEST = '''\
"""Found by `agentrl redteam --search`: this episode once scored what it had not earned."""

import asyncio

from agentrl import sandboxes
from agentrl.sandboxes.pool import Pool
from agentrl.types import ToolCall
from agentrl.redteam.command import Request, attack_targets
from agentrl.redteam.play import play
from agentrl.redteam.target import survey

REQUEST = {request}
ACTIONS: list[ToolCall | str] = [{actions}]


def test_found_{name}() -> None:
    async def score() -> tuple[float, float]:
        pool = Pool(sandboxes.load(REQUEST.backend)())
        try:
            attacked = next(one for one in attack_targets(REQUEST) if one.name == {target!r})
            task = next(task for task in attacked.tasks if task.id == {task!r})
            target = await survey(attacked.arena(task, pool))
            return (await play(target.arena, ACTIONS)).score or 0.0, target.baseline
        finally:
            pool.close()

    exploit, baseline = asyncio.run(score())
    assert exploit <= baseline
'''


def save(folder: Path, target: str, task: str, name: str, actions: Sequence[Action], again: str) -> None:
    """Write the exploit as a test that fails until the verifier is fixed."""
    folder.mkdir(parents=True, exist_ok=True)
    script = ", ".join(_literal(action) for action in actions)
    request = again or f"Request(target={target!r})"
    text = TEST.format(actions=script, name=name, target=target, task=task, request=request)
    (folder / f"test_found_{name}.py").write_text(text, encoding="utf-8")


def _literal(action: Action) -> str:
    if isinstance(action, ToolCall):
        return f"ToolCall(name={action.name!r}, arguments={ascii(json.loads(json.dumps(dict(action.arguments))))})"
    return ascii(action)
