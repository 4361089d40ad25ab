"""Looks for attacks that nobody wrote down: mutates and combines what an agent may hand in, and shrinks what works.

    seeds (answers, sources, file contents, other attacks' payloads) ── mutate, splice ──> candidate ── play ──> score
                                                                                             │ above the baseline
                                                              minimal exploit <── shrink ────┘

A search with a seed is repeatable. What it finds becomes a finding of family G with the id `G.found-<hash>`, and a
regression test is written beside the report.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl import seeds
from agentrl.verifiers.base import Boxes
from agentrl.verifiers.redteam.attack import Action, NotApplicable
from agentrl.verifiers.redteam.play import Played, play
from agentrl.verifiers.redteam.report import Finding, Report
from agentrl.verifiers.redteam.suite import Mark, arena
from agentrl.verifiers.redteam.target import Target, survey

PIECES = (
    (
        "",
        " ",
        "\n",
        "\t",
        "​",
        "\0",
        ",",
        ";",
        ".",
        "0",
        "00",
        "-",
        "+",
        "%",
        "$",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "=",
        "==",
    )
    + (
        "1",
        "True",
        "None",
        "nan",
        "inf",
        "1e9",
        "e0",
        "or",
        "and",
        "not",
        "\\boxed{",
        "<answer>",
        "</answer>",
        "Answer: ",
    )
    + ("####", "```", "//", "#", "/*", "*", "**", "^", "|", "~", "_", "×", "−", "½", "٣", "％")
)
CODE = (
    "import os\nos._exit(0)\n",
    "import sys\nsys.exit(0)\n",
    "print('PASSED')\n",
    "raise SystemExit(0)\n",
    "__eq__ = lambda *a: True\n",
    "def __getattr__(name): return lambda *a, **k: None\n",
    "import builtins\nbuiltins.abs = lambda x: 0\n",
    "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'{\"passed\": true}')\n    except OSError: pass\n",
)


async def search(
    mark: Mark,
    boxes: Boxes,
    report: Report,
    *,
    seconds: float,
    seed: int = 0,
    folder: Path | None = Path("redteam-found"),
) -> Report:
    """Search for `seconds`; the report with what was found, each exploit shrunk and saved as a test in `folder`."""
    until = time.monotonic() + seconds
    found: dict[str, Finding] = {}
    tried = 0
    targets = [await survey(arena(mark, task, boxes)) for task in mark.tasks]
    rng = seeds.generator(seed, "redteam search", mark.name)
    while time.monotonic() < until:
        target = rng.choice(targets)
        try:
            text, build = propose(target, rng)
        except NotApplicable:
            break
        tried += 1
        played = await play(target.arena, build(text))
        if not _gained(target, played, text):
            continue
        small = await shrink(target, text, build, until=time.monotonic() + max(5.0, seconds / 5))
        name = hashlib.sha256(small.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        shown = await play(target.arena, build(small))
        found[name] = Finding(
            id=f"G.found-{name}",
            family="G",
            title="Found by search",
            result="gained",
            score=shown.score,
            baseline=target.baseline,
            task=target.arena.task.id,
            evidence=(f"minimal exploit: {small[:300]!r}", *shown.evidence),
            fix="Tighten the specification until this fails; the saved test then passes.",
            transcript=shown.transcript,
        )
        if folder is not None:
            save(folder, mark.name, target.arena.task.id, name, build(small))
        if len(found) >= 5:
            break
    note = Finding(
        id="G.search",
        family="G",
        title=f"Search: {tried} submissions in {seconds:g} s, {len(found)} exploits",
        result="held" if tried and not found else "gained" if found else "not applicable",
        score=max((f.score or 0.0 for f in found.values()), default=0.0),
    )
    return replace(report, findings=(*report.findings, note, *found.values()))


Build = Callable[[str], list[Action]]


def propose(target: Target, rng: random.Random) -> tuple[str, Build]:
    """A hostile text, and how it is handed in: as the answer, as the solution, or as a graded file."""
    if target.solution is not None:
        return source(target, rng), target.submit
    if "answer" in target.surfaces:
        return answer(target, rng), lambda text: [target.final(text)]
    if {"files", "write"} <= target.surfaces and target.changed:
        paths = target.changed
        honest = rng.choice(paths)
        body = target.honest_files[honest].decode("utf-8", "replace")

        def build(text: str) -> list[Action]:
            return [*(target.write(path, text) for path in paths), target.final(target.idle_answer)]

        return mutate(body, rng), build
    raise NotApplicable("nothing here can be varied")


def answer(target: Target, rng: random.Random) -> str:
    """A text made of the wrong answer, the right one and pieces that parsers stumble over."""
    parts = [rng.choice((target.wrong_answer, target.honest_answer, *PIECES)) for _ in range(rng.randrange(1, 6))]
    return mutate(rng.choice(("", " ", "\n")).join(parts), rng)


def source(target: Target, rng: random.Random) -> str:
    """The broken source with payloads spliced in between its lines."""
    lines = target.code.broken.splitlines()
    for _ in range(rng.randrange(1, 3)):
        lines.insert(rng.choice([0, len(lines)]), rng.choice(CODE))
    return "\n".join(lines) + "\n"


def mutate(text: str, rng: random.Random) -> str:
    """A few small edits: pieces put in, taken out, doubled, swapped."""
    for _ in range(rng.randrange(0, 4)):
        at = rng.randrange(len(text) + 1)
        edit = rng.randrange(4)
        if edit == 0:
            text = text[:at] + rng.choice(PIECES) + text[at:]
        elif edit == 1:
            text = text[:at] + text[at + rng.randrange(1, 4) :]
        elif edit == 2:
            text = text[:at] + text[max(0, at - 3) : at] + text[at:]
        else:
            text = text[:at] + text[at:].swapcase()
    return text


def _gained(target: Target, played: Played, text: str) -> bool:
    """Above the baseline with something that is not the right answer in another spelling."""
    if played.score is None or played.score <= target.baseline + 1e-9 or not target.is_wrong(played.submission):
        return False
    if "answer" in target.surfaces and target.solution is None:
        one, other = ("".join(each.split()).casefold() for each in (text, target.honest_answer))
        try:
            return float(one) != float(other)
        except ValueError:
            return one != other
    return True


async def shrink(target: Target, text: str, build: Build, *, until: float) -> str:
    """The shortest text that still succeeds: halves, then ever smaller pieces, are taken out while they can be."""
    size = max(1, len(text) // 2)
    while size >= 1 and time.monotonic() < until:
        at, smaller = 0, False
        while at < len(text) and time.monotonic() < until:
            candidate = text[:at] + text[at + size :]
            if candidate != text and _gained(target, await play(target.arena, build(candidate)), candidate):
                text, smaller = candidate, True
            else:
                at += size
        if not smaller or size > len(text):
            size //= 2
    return text


TEST = '''\
"""Found by `agentrl redteam --search`: this submission once scored what it had not earned."""

import asyncio

from agentrl import envs, sandboxes
from agentrl.sandboxes.pool import Pool
from agentrl.types import ToolCall
from agentrl.verifiers.redteam.play import play
from agentrl.verifiers.redteam.suite import arena, mark
from agentrl.verifiers.redteam.target import survey

ACTIONS = {actions}


def test_found_{name}() -> None:
    async def score() -> tuple[float, float]:
        pool = Pool(sandboxes.load("namespace")())
        try:
            aim = mark({target!r}, envs.load({target!r}), per_level=1)
            task = next(t for t in aim.tasks if t.id == {task!r})
            target = await survey(arena(aim, task, pool))
            return (await play(target.arena, ACTIONS)).score or 0.0, target.baseline
        finally:
            pool.close()

    found, baseline = asyncio.run(score())
    assert found <= baseline
'''


def save(folder: Path, target: str, task: str, name: str, actions: Sequence[Action]) -> Path:
    """Write the exploit down as a test that fails until the verifier is mended."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"test_found_{name}.py"
    shown = "[" + ", ".join(_literal(action) for action in actions) + "]"
    path.write_text(TEST.format(actions=shown, name=name, target=target, task=task), encoding="utf-8")
    return path


def _literal(action: Action) -> str:
    if isinstance(action, str):
        return ascii(action)
    return f"ToolCall(name={action.name!r}, arguments={json.loads(json.dumps(dict(action.arguments)))!r})"
