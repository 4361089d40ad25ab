"""`HiddenTests`: functions and classes, each run of each case in a fresh sandbox, compared on the trusted side.

cases(task, rng) ── runs ──> sandbox 1: candidate + inputs ──> JSON ──┐
(rng from the group's secret) sandbox 2: candidate + inputs ──> JSON ──┼──> check, here
                              ...                                      ┘
"""

from __future__ import annotations

import asyncio
import base64
import builtins
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Literal

from agentrl.errors import AgentError, AuthoringError, VerifierError
from agentrl.sandboxes.base import Entry, ExecResult, Limits, SandboxSpec
from agentrl.types import Json, Task, Trust, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier
from agentrl.verifiers.busy import again_if_starved
from agentrl.verifiers.inner import LOADER, compiled
from agentrl.verifiers.values import Malformed, decode, parse_json

from .cases import Case, Raised, Result, Returned, Step
from .groups import cases_of, secret_rng

Score = Literal["all", "fraction"]
REPLY_LIMIT = 1 << 20
MAX_CALLS = 24
"""How many calls are made in the one process that repeats them, unless the candidate is slow."""
SLOW = "took longer than"
_PROGRAM = compiled(__package__ or "", "inside")


class HiddenTests(Verifier):
    """Grades Python functions and classes on cases the agent never sees."""

    def __init__(
        self,
        cases: Callable[[Task, random.Random], Sequence[Case]],
        *,
        artifact: str = "solution.py",
        module: str | None = None,
        score: Score = "all",
        seconds: float = 5.0,
        memory_mb: int = 256,
        image: str = "host",
        concurrency: int = 8,
        repeat: bool = True,
    ) -> None:
        """
        Args:
            cases: the hidden cases of a task, drawn from a random source that the group's secret seeds. They are drawn
                once for all rollouts of a group, so a check must keep nothing from one rollout for the next.
            artifact: the candidate's file, or folder ("" for the whole workspace), in the agent's workspace.
            module: the module to import from it; by default the file's name.
            score: all or nothing, or the share of cases that pass.
            seconds: wall time of one run; a run that takes longer fails its case.
            memory_mb: memory of one run.
            image: the root of the grading sandboxes.
            concurrency: how many runs are in progress at once.
            repeat: make the single calls of several cases again and again in one process, in a random order; every
                answer must be right. Turn it off for functions that are meant to remember: then code that is right
                only on its first calls, or that keeps its first answer, may pass.
        """
        if module is None and not artifact.endswith(".py"):
            raise AuthoringError(f"HiddenTests: name the module to import from the folder {artifact!r}")
        self.artifacts = (Artifact(path=artifact),)
        self.cases, self.artifact, self.score = cases, artifact, score
        self.module = module or artifact.removesuffix(".py").rsplit("/", 1)[-1]
        self.seconds, self.concurrency, self.repeat = seconds, concurrency, repeat
        self.spec = SandboxSpec(image=image, limits=Limits(memory_mb=memory_mb, seconds=seconds, processes=32))

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        try:
            sources = candidate_files(submission, self.artifact)
        except Malformed as error:
            return Verdict(score=0.0, evidence=(str(error),), verifier=self.version)
        cases = await cases_of(self.cases, submission.task, context.secret)
        if not cases:
            raise VerifierError(f"task {submission.task.id} has no hidden cases: everything would pass")

        single = [at for at, case in enumerate(cases) if [len(steps) for steps in case.runs] == [1]]
        walls: list[float] = []
        wrong_again: dict[int, str] = {}

        async def one(at: int) -> str:
            if not self.repeat or not single or at != single[-1]:
                return await self._case(cases[at], sources, context, walls)
            rng = secret_rng(submission.task, context.secret + b"repeats")
            calls = repeated(single, rng, min([MAX_CALLS, *(self.seconds / 4 / wall for wall in walls)]))
            outcome = await self._repeated(calls, cases, sources, context)
            if isinstance(outcome, str) and self.score == "fraction":  # another case may have ended the process
                outcome = await self._repeated([at] * 3, cases, sources, context)
            wrong_again.update({at: outcome} if isinstance(outcome, str) else outcome)
            return wrong_again.get(at, "")

        failures = await work_through(len(cases), one, self.concurrency, stop=self.score == "all")
        failures = [failure or wrong_again.get(at, "") for at, failure in enumerate(failures)]
        names = [f"{case.name or f'case {i}'} ({case.kind})" for i, case in enumerate(cases)]
        return verdict_on(self, self.score, names, failures, "hidden cases passed")

    async def _case(self, case: Case, sources: Mapping[str, str], context: Context, walls: list[float]) -> str:
        """Return why the case failed, or "", and add what its runs took to `walls`."""
        results: list[list[Result]] = []
        for steps in case.runs:
            start = monotonic()
            outcome = await self._run(steps, sources, context)
            walls.append(monotonic() - start)
            if isinstance(outcome, str):
                return outcome
            results.append(outcome)
        return checked(case, results)

    async def _repeated(
        self, calls: Sequence[int], cases: Sequence[Case], sources: Mapping[str, str], context: Context
    ) -> dict[int, str] | str:
        """Make the calls of cases one after the other in one process. Return which were wrong, or why none returned."""
        outcome = await self._run([cases[at].runs[0][0] for at in calls], sources, context, 2 * self.seconds)
        if isinstance(outcome, str):
            return outcome
        failures = [(at, checked(cases[at], [[result]])) for at, result in zip(calls, outcome, strict=True)]
        return {at: failure for at, failure in failures if failure}

    async def _run(
        self, steps: Sequence[Step], sources: Mapping[str, str], context: Context, seconds: float | None = None
    ) -> list[Result] | str:
        """Return the result of each step of one run, or why there are none."""
        try:
            return await self._steps(steps, sources, context, seconds or self.seconds)
        except Malformed as error:
            return str(error)
        except AgentError as error:
            return f"the sandbox died: {error}"

    async def _steps(
        self, steps: Sequence[Step], sources: Mapping[str, str], context: Context, seconds: float
    ) -> list[Result]:
        order: dict[str, Any] = {"files": sources, "module": self.module, "steps": [step.form() for step in steps]}
        message = _PROGRAM + json.dumps(order).encode()

        async def run() -> ExecResult:
            async with context.boxes.box(self.spec) as box:
                return await box.aio.python(LOADER, message, timeout=seconds, reply_limit=REPLY_LIMIT)

        done = await again_if_starved(run, lambda done: done.timed_out, seconds)
        if done.timed_out:
            raise Malformed(f"{SLOW} {self.seconds:g} s")
        if not done.reply:
            raise Malformed(f"ended without a result (exit code {done.exit_code})")
        return _results(parse_json(done.reply, max_bytes=REPLY_LIMIT), steps)


def checked(case: Case, results: Sequence[Sequence[Result]]) -> str:
    """Return why the results of a case's runs are not right, or ""."""
    try:
        return "" if case.check(results) is True else "wrong"
    except Exception as error:  # a check may fail on what the candidate returned: that is no pass
        return f"its check could not read the result ({type(error).__name__})"


def repeated(single: Sequence[int], rng: random.Random, limit: float) -> list[int]:
    """Return which cases of one call each are made in one process: the last one, some others, all several times.

    A memo without a key fails at the second case, and code that is right for its first calls only at one of the many
    repeats. The number of calls stays below `limit`, but each of at most five cases is asked at least twice, and one
    that is alone three times.
    """
    asked = [single[-1], *rng.sample(single[:-1], min(4, len(single) - 1))]
    calls = [*asked * 2, single[-1]]
    calls += [rng.choice(asked) for _ in range(int(limit) - len(calls))]
    rng.shuffle(calls)
    return calls


async def work_through(count: int, one: Callable[[int], Awaitable[str]], concurrency: int, *, stop: bool) -> list[str]:
    """Return why each case failed; "" where it passed.

    With `stop`, no case starts after the first failure, otherwise after the third timeout: a candidate that hangs costs
    little more than its time limit, however many cases there are. With `stop`, the first case runs alone and each that
    passes allows one more at once: wrong code mostly fails early, and seven more sandboxes would be wasted on it.
    """
    failures = ["not run, earlier cases failed"] * count
    waiting = iter(range(count))
    places = asyncio.Semaphore(1 if stop else concurrency)
    broken, slow, closed = False, 0, concurrency - 1 if stop else 0

    async def work() -> None:
        nonlocal broken, slow, closed
        for at in waiting:
            async with places:
                if broken:
                    return
                failures[at] = await one(at)
            slow += failures[at].startswith(SLOW)
            broken = broken or slow >= 3 or (stop and failures[at] != "")
            if closed:
                closed -= 1
                places.release()

    workers = [asyncio.ensure_future(work()) for _ in range(min(concurrency, count))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return failures


def verdict_on(
    verifier: Verifier,
    score: Score,
    names: Sequence[str],
    failures: Sequence[str],
    passed: str,
    trust: Trust = "sealed",
) -> Verdict:
    """Return the verdict on named cases or tests, each with the reason why it failed, or ""."""
    count = sum(failure == "" for failure in failures)
    share = count / len(failures)
    lines = [f"{name}: {failure}" for name, failure in zip(names, failures, strict=True) if failure]
    return Verdict(
        score=share if score == "fraction" or share == 1.0 else 0.0,
        breakdown={"passed": share},
        evidence=(f"{count} of {len(failures)} {passed}", *lines[:39]),
        trust=trust,
        verifier=verifier.version,
    )


def _results(reply: Json, steps: Sequence[Step]) -> list[Result]:
    """Return the reply as one result per step; a reply of any other form is `Malformed`."""
    if type(reply) is not dict or set(reply) != {"steps"} or type(reply["steps"]) is not list:
        raise Malformed("the reply does not have the required form")
    if len(reply["steps"]) != len(steps):
        raise Malformed("the reply has the wrong number of steps")
    results: list[Result] = []
    for line, step in zip(reply["steps"], steps, strict=True):
        if type(line) is not dict:
            raise Malformed("a step without a result")
        names = line.get("raise")
        if set(line) == {"raise"} and type(names) is list and len(names) < 50:
            results.append(Raised(_lineage(names)))
        elif set(line) == ({"return", "args"} if step.observe else {"return"}):
            args = line.get("args", [])
            if type(args) is not list or len(args) > 100:
                raise Malformed("a step with invalid arguments")
            results.append(Returned(decode(line["return"]), tuple(decode(arg) for arg in args)))
        else:
            raise Malformed("a step that neither returned nor raised")
    return results


def _lineage(names: list[Any]) -> tuple[str, ...]:
    """Return the nearest built-in class that an exception claims and the bases of that class, as they are here. A class
    with several built-in bases is no error of each kind."""
    nearest = getattr(builtins, names[0], None) if names and type(names[0]) is str else None
    if not isinstance(nearest, type) or not issubclass(nearest, BaseException):
        return ()
    return tuple(kind.__name__ for kind in nearest.__mro__ if kind is not object)


def candidate_files(submission: Submission, artifact: str) -> dict[str, str]:
    """Return what the agent left at `artifact`, as the sandbox gets it: regular files by path, in base64."""
    name = artifact.rsplit("/", 1)[-1]
    return {path or name: base64.b64encode(entry.content).decode() for path, entry in regular(submission, artifact)}


def regular(submission: Submission, artifact: str) -> list[tuple[str, Entry]]:
    """Return the regular files at `artifact`; a link, a special file or nothing at all is `Malformed`."""
    entries = submission.artifacts.get(artifact, {})
    refused = [path for path, entry in entries.items() if entry.kind in ("link", "special")]
    if refused:
        raise Malformed(f"{len(refused)} links or special files among the artifacts, such as {refused[0][:100]!r}")
    regular_files = [(path, entry) for path, entry in entries.items() if entry.kind == "file"]
    if not regular_files:
        raise Malformed(f"there is no file at {artifact or 'the workspace'!r}")
    return regular_files
