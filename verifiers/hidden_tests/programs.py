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
from agentrl.verifiers.busy import again_if_starved
from agentrl.verifiers.values import Malformed

from .functions import SLOW, Score, regular, verdict_on, work_through
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


class Run:
    """One run of a program and the result that it must have."""

    def __init__(
        self,
        *argv: str,
        stdin: bytes | str = b"",
        files: Mapping[str, bytes | str] | None = None,
        stdout: bytes | str | None = None,
        text: Text = "exact",
        exit_code: int | None = 0,
        written: Mapping[str, bytes | str | None] | None = None,
        check: Callable[[Ran], bool] | None = None,
        name: str = "",
    ) -> None:
        """A case: `run("python3", "tool.py", "-n", stdin="a\\n", stdout="1\\n")`.

        Args:
            argv: the command.
            stdin: what it reads.
            files: input files, placed beside the candidate's; they replace the candidate's where names collide.
            stdout: the expected output.
            text: how output is compared: `exact`; `trailing` ignores white space at line and file ends; `tokens`
                compares what white space separates.
            exit_code: the expected exit code.
            written: files that must be in the workspace afterwards; None: must not be.
            check: a further check; only `True` is a pass.
            name: shown in the evidence.
        """
        if stdout is None and not written and check is None:
            raise AuthoringError(f"run({' '.join(argv)}): expect some output, some file, or give a check")
        self.argv, self.stdin, self.files = argv, _bytes(stdin), dict(files or {})
        self.stdout, self.text, self.exit_code = None if stdout is None else _bytes(stdout), text, exit_code
        self.written = {path: None if data is None else _bytes(data) for path, data in (written or {}).items()}
        self.check, self.name = check, name


run = Run


class ProgramTests(Verifier):
    """Grades a program by running it, each case in a fresh sandbox."""

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
            cases: the hidden runs of a task, drawn from a random source that the group's secret seeds; once for all
                rollouts of a group.
            artifact: the program's file, or folder ("" for the whole workspace), in the agent's workspace.
            score: all or nothing, or the share of runs that are right.
            seconds: wall time of one run.
            memory_mb: memory of one run.
            image: the root of the grading sandboxes.
            concurrency: how many runs are in progress at once.
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
        names = [case.name or f"run {i}" for i, case in enumerate(cases)]
        return verdict_on(self, self.score, names, failures, "hidden runs were right")

    async def _case(self, case: Run, files: Mapping[str, Entry], context: Context) -> str:
        kept = {path: entry for path, entry in files.items() if not any(_collide(path, ours) for ours in case.files)}
        spec = SandboxSpec(image=self.image, files={**kept, **case.files}, limits=self.limits)

        async def run() -> str:
            try:
                async with context.boxes.box(spec) as box:
                    ran = await self._exec(case, box)
            except Malformed as error:
                return str(error)
            except AgentError as error:
                return f"the sandbox died: {error}"
            return self._failure(case, ran)

        return await again_if_starved(run, lambda failure: failure.startswith(SLOW), self.seconds)

    async def _exec(self, case: Run, box: Sandbox) -> Ran:
        done = await box.aio.exec(case.argv, stdin=case.stdin, timeout=self.seconds)
        if done.timed_out:
            raise Malformed(f"{SLOW} {self.seconds:g} s")
        if done.truncated:
            raise Malformed("wrote more output than is read")
        files: dict[str, Entry] = {}
        if case.written or case.check is not None:
            await box.aio.kill_all()
            files = await box.aio.collect()
        return Ran(done.exit_code, done.stdout, done.stderr, files)

    def _failure(self, case: Run, ran: Ran) -> str:
        """Return why a run was not as expected, or ""."""
        if case.exit_code is not None and ran.exit_code != case.exit_code:
            return f"exit code {ran.exit_code}"
        if case.stdout is not None and _comparable(ran.stdout, case.text) != _comparable(case.stdout, case.text):
            return "wrong output"
        for path, content in case.written.items():
            entry = ran.files.get(path)
            if content is None and entry is not None:
                return f"{path} should not exist"
            if content is not None and (entry is None or entry.kind != "file" or entry.content != content):
                return f"{path} is missing or differs"
        try:
            return "" if case.check is None or case.check(ran) is True else "wrong"
        except Exception as error:  # a check may fail on what the program wrote: that is no pass
            return f"its check could not read the result ({type(error).__name__})"


def _collide(theirs: str, ours: str) -> bool:
    """Return whether one path is the other, or lies below it."""
    return theirs == ours or theirs.startswith(ours + "/") or ours.startswith(theirs + "/")


def _comparable(output: bytes, text: Text) -> object:
    if text == "tokens":
        return output.split()
    if text == "trailing":
        return [line.rstrip() for line in output.rstrip().split(b"\n")]
    return output


def _bytes(text: bytes | str) -> bytes:
    return text.encode() if isinstance(text, str) else text
