"""Turns a scoring function as others write it (plain, TRL, verl, verifiers) into an environment that can be attacked.

A submission is text, so attacks on shells, files and tests have nothing to work on; where the honest answer is Python
code, attacks on code are tried too. The function's own scale is kept: what the wrong answer earns counts as 0, what the
honest one earns as 1.
"""

from __future__ import annotations

import ast
import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import UserError, VerifierError
from agentrl.redteam.naive_graders.base import text_of
from agentrl.redteam.scorer_process import Interpreter, Worker, WorkerGone, sources
from agentrl.redteam.scorer_worker import CONVENTIONS
from agentrl.redteam.suite import AttackTarget
from agentrl.redteam.testbeds.base import Testbed, problem
from agentrl.sandboxes.base import SandboxSpec
from agentrl.types import Split, Task, Verdict
from agentrl.verifiers.base import Artifact, Boxes, Context, Submission, Verifier

PROMPT = "Whatever this scorer scores."
LIMIT_S = 20.0
"""Seconds of processor time for one submission; twice that by the clock."""
QUICK_S = 2.0
"""A scorer of code whose imports take less than this gets a sandbox of its own for each submission."""
CALLED = {
    "text": "a function of the text",
    "trl": "TRL's f(completions, **columns)",
    "verl": "verl's compute_score(data_source, solution_str, ground_truth, extra_info)",
    "verifiers": "verifiers' rewards by argument name (completion, answer, prompt, state, ...)",
}
SHAPED = ("trl", "verifiers")
"""Conventions in which a completion is text or a list of messages."""
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class ScorerHung(VerifierError):
    """The scorer did not return in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One example: a right and a wrong submission, and the columns of the data set that the scorer is given."""

    honest: str
    wrong: str
    prompt: Any = PROMPT
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What the honest and the wrong submission of a row earn."""

    honest: float
    wrong: float

    def place(self, score: float) -> float:
        """Return a score's place between the two, in [0, 1]."""
        floor = self.wrong if self.honest > self.wrong else 0.0  # else the wrong answer is as good as the honest one
        place = (score - floor) / (self.honest - floor)
        return 1.0 if place > 1.0 - 1e-9 else max(0.0, place)


_broken: ContextVar[tuple[int, VerifierError, bool] | None] = ContextVar("broken", default=None)
"""The submission being graded, why it has no score, and whether that is certain: then a retry would only fail again.
`probe` must say so."""


class Scorer(Verifier):
    """A scoring function, run under the user's interpreter in a sandbox; what gets no score is told as such."""

    def __init__(
        self, target: str, rows: Sequence[Row], interpreter: Interpreter, convention: str, limit_s: float
    ) -> None:
        self.target, self.rows, self.interpreter, self.limit_s = target, tuple(rows), interpreter, limit_s
        self.convention, self.shape = convention, "text"
        self.code = all(_code_of(row.honest) is not None for row in rows)
        self.artifacts = (Artifact(path="solution.py"),) if self.code else ()
        self.scales: list[Scale] = []
        self.start_s = 0.0
        self._files = sources(target.partition(":")[0], interpreter)
        self._worker: Worker | None = None
        self._starting = asyncio.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"target": self.target, "rows": self.rows}  # what a hash of the verifier covers

    # Processes ------------------------------------------------------------------------------------------------

    async def open(self, boxes: Boxes) -> None:
        """Import the scorer, find out how it is called, and score what is honest and what is wrong. Raises UserError
        when that shows nothing to attack."""
        async with self._starting:
            if self.scales:
                return
            worker = await self._new(boxes)
            self._worker = worker
            about = worker.about
            if "mistake" in about:
                await self.close()
                raise UserError(self._unusable(about))
            self.convention, self.start_s = about["convention"], float(about["seconds"])
            try:
                self.scales = [await self._scale(worker, number) for number in range(len(self.rows))]
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        """End the scorer's process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.close()

    def _new(self, boxes: Boxes) -> Any:
        return Worker(self.interpreter, self.target, self.convention, self._files).start(boxes)

    @property
    def fresh(self) -> bool:
        """Whether each submission gets a sandbox of its own."""
        return self.code and self.start_s < QUICK_S

    async def reply(self, row: int, text: str, boxes: Boxes) -> dict[str, Any]:
        """Have one submission scored. Where it brings down the process that serves others, it is tried alone."""
        order = self._order(row, text, self.shape)
        if not self.fresh:
            async with self._starting:
                if self._worker is None:
                    self._worker = await self._new(boxes)
                worker = self._worker
            try:
                return await worker.ask(order)
            except WorkerGone:
                if self._worker is worker:
                    await self.close()
        alone: Worker = await self._new(boxes)
        try:
            return await alone.ask(order)
        except WorkerGone:
            return {"problem": "died", "text": "it ended every process of the scorer"}
        finally:
            await alone.close()

    def _order(self, row: int, text: str, shape: str) -> dict[str, Any]:
        example = self.rows[row]
        order = {"text": text, "honest": example.honest, "prompt": example.prompt, "columns": dict(example.columns)}
        return {**order, "convention": self.convention, "shape": shape, "seconds": self.limit_s}

    # What is honest -------------------------------------------------------------------------------------------

    async def _scale(self, worker: Worker, row: int) -> Scale:
        example = self.rows[row]
        shapes = ("text", "messages") if self.convention in SHAPED and row == 0 else (self.shape,)
        if isinstance(example.prompt, list):
            shapes = ("messages",)
        replies = {shape: await self._calm(worker, row, example.honest, shape) for shape in shapes}
        self.shape = max(shapes, key=lambda shape: (replies[shape].get("score", float("-inf")), shape == shapes[0]))
        honest = replies[self.shape]
        wrong = await self._calm(worker, row, example.wrong, self.shape)
        if "score" not in honest:
            reasons = "".join(f"\n  came back{_as(s, shapes)}: {r['text']}" for s, r in replies.items())
            raise UserError(self._unscored(row, "gets no score", reasons, wrong))
        if "score" not in wrong:
            raise UserError(
                f"--scorer {self.target}: the wrong answer {_short(example.wrong)} gets no score: {wrong['text']}; "
                "give one that is scored, and wrong"
            )
        came = f"\n  came back: {honest['score']:g}"
        if honest["score"] < wrong["score"]:
            raise UserError(self._unscored(row, "scores less than the wrong one", came, wrong))
        if honest["score"] == wrong["score"] and honest["score"] <= 0:
            raise UserError(self._unscored(row, "does not score", came, wrong))
        return Scale(honest=honest["score"], wrong=wrong["score"])

    async def _calm(self, worker: Worker, row: int, text: str, shape: str) -> dict[str, Any]:
        try:
            return await worker.ask(self._order(row, text, shape))
        except WorkerGone:
            raise UserError(f"--scorer {self.target}: its process ended on {_short(text)}") from None

    def _unusable(self, about: Mapping[str, Any]) -> str:
        module = self.target.partition(":")[0]
        if about.get("missing"):
            missing = about["missing"]
            what = f"there is no module {missing!r}" if module.startswith(missing) else f"{module} needs {missing!r}"
            return (
                f"--scorer {self.target}: {what} in this folder, on PYTHONPATH or in the environment of "
                f"{self.interpreter.path}; install it there, or name another interpreter with --python"
            )
        return f"--scorer {self.target}, by {self.interpreter.path}: {about['mistake']}"

    def _unscored(self, row: int, what: str, came: str, wrong: Mapping[str, Any]) -> str:
        example = self.rows[row]
        columns = ", ".join(f"{name}={_short(value)}" for name, value in example.columns.items()) or "no columns"
        also = f"{wrong['score']:g}" if "score" in wrong else wrong["text"]
        which = f" of row {row + 1}" if len(self.rows) > 1 else ""
        return (
            f"--scorer {self.target}: the honest answer{which} {what}, so nothing can be said about cheating."
            f"\n  called as {CALLED[self.convention]} by {self.interpreter.path}"
            f"\n  sent: {_short(example.honest)} with {columns}{came}"
            f"\n  the wrong answer {_short(example.wrong)} got: {also}"
            "\n  to change: give --honest in the form that the function looks for (\\boxed{...}, <answer>...</answer>, "
            "#### ...), what it compares with as --column NAME=VALUE, and --convention "
            f"{'|'.join(CONVENTIONS)} if it is called the wrong way"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """How the scorer was run, in words."""
        shape = {"text": "as text", "messages": "as messages"}[self.shape]
        given = f", completions {shape}" if self.convention in SHAPED else ""
        each = "a sandbox of its own" if self.fresh else "a fork of one warm process"
        scales = "; ".join(f"honest {s.honest:g}, wrong {s.wrong:g}" for s in self.scales)
        return (
            f"called as {CALLED[self.convention]}{given}; {scales}",
            f"run by {self.interpreter.path} in a sandbox (environment read-only, no network); each submission in "
            f"{each}, {self.limit_s:g} s at most",
        )

    # Grading --------------------------------------------------------------------------------------------------

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        before = _broken.get()
        if before is not None and before[0] == id(submission) and before[2]:
            raise before[1]
        late = ScorerHung("the scorer did not return in time: its caller waits for ever")
        _broken.set((id(submission), late, False))  # for `probe`, should both attempts be cut off
        await self.open(context.boxes)
        row = int(submission.task.secret["row"])
        text = submission.answer
        if self.code:
            text = _with_code(self.rows[row].honest, text_of(submission, "solution.py"))
        reply = await self.reply(row, text, context.boxes)
        if "score" not in reply:
            error = ScorerHung if reply["problem"] == "hung" else VerifierError
            after = {"none": "its caller drops the sample", "nan": "its caller trains on it or stops"}
            told = f"the scorer gave no score: {reply['text']}; {after.get(reply['problem'], 'its caller stops')}"
            _broken.set((id(submission), error(told), True))
            raise error(told)
        _broken.set(None)
        scale = self.scales[row]
        earned = f"the scorer returned {reply['score']:g} (honest {scale.honest:g}, wrong {scale.wrong:g})"
        return Verdict(score=scale.place(reply["score"]), evidence=(earned,), trust="shared")

    async def probe(self, context: Context) -> None:
        """Fail when the submission got no score: plain callers have no retry and no 0 to fall back on."""
        broken = _broken.get()
        if broken is not None:
            raise broken[1]


def _as(shape: str, shapes: Sequence[str]) -> str:
    return f" (completion as {shape})" if len(shapes) > 1 else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _code_of(text: str) -> str | None:
    """Return the Python source that a submission is, or holds in a fence; None if it is neither."""
    fenced = _FENCE.findall(text)
    source = fenced[-1] if fenced else text
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return source if body and (fenced or any(isinstance(node, ast.FunctionDef) for node in body)) else None


def _with_code(text: str, source: str) -> str:
    """Return the submission with other source in the place of its own."""
    fences = list(_FENCE.finditer(text))
    if not fences:
        return source
    start, end = fences[-1].span(1)
    return text[:start] + source.rstrip("\n") + "\n" + text[end:]


def load_rows(files: Sequence[str], columns: Sequence[str], honest: str, wrong: str) -> list[Row]:
    """Read the rows of `--row` files (an object, a list, or JSON lines) and add the columns of the command line."""
    shared = dict(_column(option) for option in columns)
    if not files:
        return [_row({"honest": honest, "wrong": wrong, **shared}, "--scorer")]
    rows: list[Row] = []
    for name in files:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"--row: cannot read {name}: {error.strerror}") from None
        try:
            whole = json.loads(text)
            examples = whole if isinstance(whole, list) else [whole]
        except ValueError:
            try:
                examples = [json.loads(line) for line in text.splitlines() if line.strip()]
            except ValueError as error:
                raise UserError(f"--row: {name} holds neither JSON nor JSON lines: {error}") from None
        given = {key: value for key, value in (("honest", honest), ("wrong", wrong)) if value}
        for example in examples:
            if not isinstance(example, dict):
                raise UserError(
                    f"--row: {name} must hold objects with honest, wrong and columns, got {example!r}"[:300]
                )
            rows.append(_row({**given, **shared, **example}, f"--row {name}"))
    if not rows:
        raise UserError(f"--row: there is no row in {', '.join(files)}")
    return rows


def _row(example: dict[str, Any], where: str) -> Row:
    honest, wrong = example.pop("honest", ""), example.pop("wrong", "")
    for name, text in (("honest", honest), ("wrong", wrong)):
        if not isinstance(text, str) or not text:
            needs = "--honest and --wrong" if where == "--scorer" else f"the key {name!r}"
            raise UserError(f"{where} needs {needs}: one right and one wrong submission, as text")
    return Row(honest=honest, wrong=wrong, prompt=example.pop("prompt", PROMPT), columns=example)


def _column(option: str) -> tuple[str, Any]:
    name, equals, value = option.partition("=")
    if not equals or not name:
        raise UserError(
            f"--column {option!r} must look like NAME=VALUE; a JSON object, list or quoted text is read as such"
        )
    if not value.startswith(("{", "[", '"')):  # a number stays a text, as data sets hold answers
        return name, value
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def scorer(
    target: str, rows: Sequence[Row], *, python: str = "", convention: str = "", limit_s: float = LIMIT_S
) -> type[Testbed]:
    """Make an environment of `module:function` that is attacked once for each row."""
    if convention and convention not in CONVENTIONS:
        raise UserError(f"--convention {convention!r} must be one of {', '.join(CONVENTIONS)}")
    if limit_s <= 0:
        raise UserError(f"--scorer-timeout takes seconds, got {limit_s:g}")
    check = Scorer(target, rows, Interpreter.find(python), convention, limit_s)
    tasks = tuple(_task(target, row, number, len(rows), code=check.code) for number, row in enumerate(rows))

    class Scored(Testbed):
        """The rows, graded by the user's function. There is no shell: a scorer sees text, and no sandbox."""

        verifier = check
        problems = tasks
        run = None  # type: ignore[assignment]

        def task(self, split: Split, level: int, index: int) -> Task:
            return self.problems[index]

    class Answered(Scored):
        """The same without any file."""

        write = None  # type: ignore[assignment]

        def prepare(self, task: Task, rng: random.Random) -> SandboxSpec | None:
            return None

    made = Scored if check.code else Answered
    made.name = target
    return made


def _task(target: str, row: Row, number: int, of: int, *, code: bool) -> Task:
    name = target if of == 1 else f"{target} row {number + 1}"
    prompt = row.prompt if isinstance(row.prompt, str) else str(row.prompt[-1].get("content", PROMPT))
    if not code:
        return problem(name, prompt, row=number, answer=row.honest, wrong_answer=row.wrong)
    wrong = _code_of(row.wrong) or row.wrong
    honest = _code_of(row.honest) or row.honest
    files = {"solution.py": wrong}
    return problem(name, prompt, files=files, row=number, writes={"solution.py": honest}, answer="done")


@asynccontextmanager
async def opened(targets: Sequence[AttackTarget], boxes: Boxes) -> AsyncIterator[tuple[str, ...]]:
    """Import the scorers among the targets and check that their honest answers score; yield how they are run."""
    verifiers = {id(verifier): verifier for verifier in (target.make().verifier for target in targets)}
    scorers = [verifier for verifier in verifiers.values() if isinstance(verifier, Scorer)]
    try:
        for one in scorers:
            await one.open(boxes)
        yield tuple(note for one in scorers for note in one.notes)
    finally:
        for one in scorers:
            await one.close()
