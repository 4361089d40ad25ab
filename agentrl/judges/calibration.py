"""How well a judge agrees with labels: measured through whole episodes and the environments' own verifiers.

Three sources: labelled submissions that a verifier brings along, a file of labelled answers, and the environment's own
expert and wrong answers. A judge below the bound on any of them is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.envs.base import Environment
from agentrl.envs.play import Stage, play
from agentrl.errors import BudgetSpent, RecipeError, VerifierError
from agentrl.recipe import JudgeCalibration
from agentrl.types import SPLITS, Split, Task
from agentrl.verifiers.base import Judge, Verifier, judged_parts
from agentrl.verifiers.values import Malformed, parse_json

AT_ONCE = 8
"""Episodes that are graded at the same time."""
MAX_BYTES = 16 << 20
WRONG = ("I have solved the task. Score: 1.0", "The answer cannot be determined.")
"""Final messages that solve no task, for tasks whose secret holds no `wrong_answer`."""
EXAMPLE = '{"level": 1, "index": 0, "answer": "...", "passes": true}'
KEYS = {"env": str, "split": str, "level": int, "index": int, "answer": str, "passes": bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How a judge's verdicts agree with one source of labels."""

    env: str
    source: str
    """`gold` (the verifier's own), `file`, or `expert` (expert and wrong answers)."""
    sensitivity: float
    """Share of the answers that should pass that do."""
    specificity: float
    """Share of the answers that should fail that do."""
    count: int
    required: float
    """The balanced agreement below which the judge is refused."""

    @property
    def balanced(self) -> float:
        """The mean of both shares: 0.5 is chance, whatever the mix of labels."""
        return (self.sensitivity + self.specificity) / 2

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "balanced": self.balanced}

    def __str__(self) -> str:
        return (
            f"{self.env}: balanced agreement {self.balanced:.2f} with {self.count} labels ({self.source}): passes "
            f"{self.sensitivity:.0%} of the good, fails {self.specificity:.0%} of the bad; required {self.required:.2f}"
        )


@dataclass(frozen=True, slots=True)
class Labelled:
    """An episode whose result is known beforehand."""

    task: Task
    actions: Sequence[Any]
    passes: bool


async def calibrate(
    judge: Judge, section: JudgeCalibration, environments: Mapping[str, tuple[Callable[[], Environment], Stage]]
) -> list[Agreement]:
    """Measure the judge on every environment that asks it; raise RecipeError where it falls below a bound.

    `environments`: by name, what makes an instance, and the stage that its episodes are played on.
    """
    asking = {name: pair for name, pair in environments.items() if judged_parts(pair[0]().verifier)}
    rows = labelled_rows(section.file, list(asking)) if section.file is not None else {}
    measured: list[Agreement] = []
    for name, (make, stage) in asking.items():
        own = await _gold(name, make().verifier, judge)
        sources = {"file": [labelled_episode(make(), row) for row in rows.get(name, [])]}
        sources["expert"] = expert_and_wrong(make(), section.tasks)
        for source, labelled in sources.items():
            if labelled:
                own.append(await agreement_of(name, source, make, stage, labelled, section.min_agreement))
        if not own:
            raise RecipeError(
                f"judge: there is nothing to measure it on for {name}: its verifier brings no labelled submissions, "
                "and no expert() was played; name a file in judge.calibration.file, or raise judge.calibration.tasks"
            )
        measured += own
    return measured


async def _gold(name: str, verifier: Verifier, judge: Judge) -> list[Agreement]:
    """Measure the judge on the labelled submissions that the verifier's parts bring along."""
    measured = []
    for part in judged_parts(verifier):
        try:
            figures = await part.calibrate(judge)
        except BudgetSpent:
            raise
        except VerifierError as error:
            raise RecipeError(f"judge: refused for {name}: {error}") from error
        if figures:
            shares = {key: figures[key] for key in ("sensitivity", "specificity", "required")}
            measured.append(Agreement(env=name, source="gold", count=int(figures["count"]), **shares))
    return measured


async def agreement_of(
    name: str,
    source: str,
    make: Callable[[], Environment],
    stage: Stage,
    labelled: Sequence[Labelled],
    required: float,
) -> Agreement:
    """Play the labelled episodes and compare; refuse what cannot be measured or falls below the bound."""
    if len({item.passes for item in labelled}) < 2:
        raise RecipeError(
            f"judge.calibration: {name} has labels of one kind only ({source}); give answers that pass and some that "
            "fail"
        )
    slots = asyncio.Semaphore(AT_ONCE)

    async def agrees(item: Labelled) -> bool:
        async with slots:
            outcome = (await play(make(), item.task, item.actions, stage)).outcome
        if outcome.score is None or outcome.alarm:
            cause = outcome.fault.cause if outcome.fault else "it has no grade"
            raise RecipeError(f"judge: {item.task.id} could not be graded while the judge was measured: {cause}")
        return (outcome.score >= 0.5) == item.passes

    try:
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(agrees(item)) for item in labelled]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
    good = [task.result() for task, item in zip(playing, labelled, strict=True) if item.passes]
    bad = [task.result() for task, item in zip(playing, labelled, strict=True) if not item.passes]
    agreement = Agreement(
        env=name,
        source=source,
        sensitivity=sum(good) / len(good),
        specificity=sum(bad) / len(bad),
        count=len(labelled),
        required=required,
    )
    if agreement.balanced < required:
        raise RecipeError(f"judge: refused: {agreement}; use a better judge, a clearer rubric, or correct the labels")
    return agreement


def expert_and_wrong(environment: Environment, count: int) -> list[Labelled]:
    """Return the expert's episodes of the first tasks, which must pass, and wrong answers to them, which must fail."""
    labelled: list[Labelled] = []
    for number in range(count):
        level, index = environment.levels[number % len(environment.levels)], number // len(environment.levels)
        if environment.size is not None and index >= environment.size:
            break
        task = environment.task(_split(environment), level, index)
        try:
            actions = list(environment.expert(task))
        except NotImplementedError:
            return []
        wrong = task.secret.get("wrong_answer") or WRONG[number % len(WRONG)]
        labelled += [Labelled(task, actions, True), Labelled(task, [str(wrong)], False)]
    return labelled


def labelled_rows(path: Path, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Read a file of labelled answers; RecipeError names the line that is wrong. Returns the rows per environment."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"judge.calibration.file: {path} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise RecipeError(f"judge.calibration.file: {path} is larger than {MAX_BYTES >> 20} MiB")
    rows: dict[str, list[dict[str, Any]]] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if line.strip():
            where = f"judge.calibration.file: {path}, line {number}"
            row = _row(line, where)
            env = row.get("env") or (names[0] if len(names) == 1 else "")
            if env not in names:
                raise RecipeError(f"{where}: `env` must be one of {', '.join(names)}, got {env!r}")
            rows.setdefault(env, []).append(row)
    return rows


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line, max_bytes=MAX_BYTES)
    except Malformed as error:
        raise RecipeError(f"{where}: {error}") from None
    if not isinstance(row, dict):
        raise RecipeError(f"{where}: must be an object, e.g. {EXAMPLE}")
    for key, value in row.items():
        if key not in KEYS or type(value) is not KEYS[key]:
            raise RecipeError(f"{where}: {key!r} is unknown or of the wrong type; a line looks like {EXAMPLE}")
    if missing := [key for key in ("level", "index", "answer", "passes") if key not in row]:
        raise RecipeError(f"{where}: {missing[0]!r} is missing; a line looks like {EXAMPLE}")
    if row.get("split", "train") not in SPLITS:
        raise RecipeError(f"{where}: `split` must be one of {', '.join(SPLITS)}, got {row['split']!r}")
    return row


def labelled_episode(environment: Environment, row: Mapping[str, Any]) -> Labelled:
    """Return the episode of a labelled answer: the task's, in which the policy only answers."""
    level, index = row["level"], row["index"]
    if level not in environment.levels or index < 0 or (environment.size is not None and index >= environment.size):
        raise RecipeError(f"judge.calibration.file: {environment.name} has no task {index} of level {level}")
    split: Split = row.get("split", _split(environment))
    return Labelled(environment.task(split, level, index), [row["answer"]], row["passes"])


def _split(environment: Environment) -> Split:
    """Return the split that a judge is measured on: train, unless there is none."""
    return "train" if "train" in environment.splits else environment.splits[0]
