"""`ProgramTests`: command-line programs. Arguments, input and files in; bytes, exit code and files out."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentrl.errors import AgentError, AuthoringError, VerifierError
from agentrl.sandboxes.base import Entry, Limits, Sandbox, SandboxSpec
from agentrl.types import Task, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier
from agentrl.verifiers.values import Malformed

from .functions import SLOW, Score, regular, work_through
from .groups import cases_of

Text = Literal["exact", "trailing", "tokens"]


@dataclass(frozen=True, slots=True)
class Ran:
    """What a program did."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    files: Mapping[str, Entry] = field(default_factory=dict)
    """The workspace afterwards, where the case looks at files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the program and what must come of it. At least one expectation is needed."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    files: Mapping[str, bytes | str] = field(default_factory=dict)
    """Input files, laid beside the candidate's; they win where names collide."""
    stdout: bytes | None = None
    text: Text = "exact"
    """exact; `trailing`: forgive white space at line and file ends; `tokens`: compare what white space separates."""
    exit_code: int | None = 0
    written: Mapping[str, bytes | None] = field(default_factory=dict)
    """Files that must lie in the workspace afterwards; None: must not."""
    check: Callable[[Ran], bool] | None = None
    """A further test; only `True` is a pass."""
    name: str = ""

    @property
    def looks_at_files(self) -> bool:
        return bool(self.written) or self.check is not None


def run(
    *argv: str,
    stdin: bytes | str = b"",
    files: Mapping[str, bytes | str] | None = None,
    stdout: bytes | str | None = None,
    text: Text = "exact",
    exit_code: int | None = 0,
    written: Mapping[str, bytes | str | None] | None = None,
    check: Callable[[Ran], bool] | None = None,
    name: str = "",
) -> Run:
    """A case: `run("python3", "tool.py", "-n", stdin="a\\n", stdout="1\\n")`."""
    if stdout is None and not written and check is None:
        raise AuthoringError(f"run({' '.join(argv)}): expect some output, some file, or give a check")
    return Run(
        argv=argv,
        stdin=_bytes(stdin),
        files=files or {},
        stdout=None if stdout is None else _bytes(stdout),
        text=text,
        exit_code=exit_code,
        written={path: None if content is None else _bytes(content) for path, content in (written or {}).items()},
        check=check,
        name=name,
    )


class ProgramTests(Verifier):
    """Grades a program by running it, each case in a fresh box."""

    def __init__(
        self,
        cases: Callable[[Task, random.Random], Sequence[Run]],
        *,
        artifact: str,
        score: Score = "all",
        seconds: float = 5.0,
        memory_mb: int = 256,
        image: str = "host",
        concurrency: int = 4,
    ) -> None:
        """
        Args:
            cases: the hidden runs of a task, from a random source that follows from the group's secret; drawn once for
                all rollouts of a group.
            artifact: the program's file, or folder ("" for the whole workspace), in the agent's workspace.
            score: all or nothing, or the share of runs that are right.
            seconds: wall time of one run.
            memory_mb: memory of one run.
            image: the root the grading boxes have.
            concurrency: runs under way at once.
        """
        self.artifacts = (Artifact(path=artifact),)
        self.cases, self.artifact, self.score = cases, artifact, score
        self.seconds, self.concurrency, self.image = seconds, concurrency, image
        self.limits = Limits(memory_mb=memory_mb, seconds=seconds, processes=32)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        name = self.artifact.rsplit("/", 1)[-1]
        try:
            files = {path or name: entry for path, entry in regular(submission, self.artifact)}
        except Malformed as error:
            return Verdict(score=0.0, evidence=(str(error),), verifier=self.version)
        cases = await cases_of(self.cases, submission.task, context.secret)
        if not cases:
            raise VerifierError(f"task {submission.task.id} has no hidden runs: everything would pass")

        async def one(at: int) -> str:
            return await self._case(cases[at], files, context)

        failures = await work_through(len(cases), one, self.concurrency, stop=self.score == "all")
        passed = sum(failure == "" for failure in failures)
        share = passed / len(cases)
        lines = [f"{passed} of {len(cases)} hidden runs were right"]
        lines += [f"{case.name or f'run {i}'}: {failures[i]}" for i, case in enumerate(cases) if failures[i]]
        return Verdict(
            score=share if self.score == "fraction" or share == 1.0 else 0.0,
            breakdown={"passed": share},
            evidence=tuple(lines[:40]),
            verifier=self.version,
        )

    async def _case(self, case: Run, files: Mapping[str, Entry], context: Context) -> str:
        kept = {path: entry for path, entry in files.items() if not any(_collide(path, ours) for ours in case.files)}
        spec = SandboxSpec(image=self.image, files={**kept, **case.files}, limits=self.limits)
        try:
            async with context.boxes.box(spec) as box:
                ran = await self._exec(case, box)
        except Malformed as error:
            return str(error)
        except AgentError as error:
            return f"the box died: {error}"
        return self._wrong(case, ran)

    async def _exec(self, case: Run, box: Sandbox) -> Ran:
        done = await box.aio.exec(case.argv, stdin=case.stdin, timeout=self.seconds)
        if done.timed_out:
            raise Malformed(f"{SLOW} {self.seconds:g} s")
        if done.truncated:
            raise Malformed("wrote more output than is read")
        files: dict[str, Entry] = {}
        if case.looks_at_files:
            await box.aio.kill_all()
            files = await box.aio.collect()
        return Ran(done.exit_code, done.stdout, done.stderr, files)

    def _wrong(self, case: Run, ran: Ran) -> str:
        if case.exit_code is not None and ran.exit_code != case.exit_code:
            return f"exit code {ran.exit_code}"
        if case.stdout is not None and _shape(ran.stdout, case.text) != _shape(case.stdout, case.text):
            return "other output"
        for path, content in case.written.items():
            entry = ran.files.get(path)
            if content is None and entry is not None:
                return f"{path} should not exist"
            if content is not None and (entry is None or entry.kind != "file" or entry.content != content):
                return f"{path} is missing or differs"
        try:
            return "" if case.check is None or case.check(ran) is True else "wrong"
        except Exception as error:  # a check may stumble over what the program wrote: that is no pass
            return f"its check could not read the result ({type(error).__name__})"


def _collide(theirs: str, ours: str) -> bool:
    """Whether one path is the other, or lies below it."""
    return theirs == ours or theirs.startswith(ours + "/") or ours.startswith(theirs + "/")


def _shape(output: bytes, text: Text) -> object:
    if text == "tokens":
        return output.split()
    if text == "trailing":
        return [line.rstrip() for line in output.rstrip().split(b"\n")]
    return output


def _bytes(text: bytes | str) -> bytes:
    return text.encode() if isinstance(text, str) else text
