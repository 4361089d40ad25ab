"""`RepositoryTests`: a hidden pytest suite against a whole repository, without a shared process.

    box T: pytest, hidden tests        host: relays JSON,           box A: the agent's repository,
    `import theirs` is a stand-in ───> counts, bounds, spoils ────> no tests, no expectations;
    passes and failures            <── what cannot be answered <──  a fresh one for each test

T holds no agent code, so its report can be believed; A holds nothing worth stealing. Where a suite cannot be run so
(it subclasses the agent's classes, shares files with its code), `mode="shared"` runs both in one process and says so:
see shared.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from importlib.resources import files
from time import monotonic
from typing import Any, Literal

from agentrl.errors import AuthoringError
from agentrl.sandboxes.base import Entry, Limits, SandboxSpec
from agentrl.types import Trust, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier
from agentrl.verifiers.values import Malformed

from .bundle import pytest_zip
from .channel import FOLDER, Channel, Gone
from .functions import Score, regular
from .shared import run_shared

_PACKAGE = files(__package__ or "")
MAX_OPERATIONS = 5_000
"""Operations that one test may ask of the agent's code."""
PATIENCE = 60.0
"""Seconds that the tests themselves may take between two requests; the agent's time is counted apart."""


class RepositoryTests(Verifier):
    """Grades a repository by a pytest suite that it never sees. Exactly the expected tests must pass."""

    def __init__(
        self,
        tests: Mapping[str, str | bytes],
        ids: Sequence[str],
        *,
        packages: Sequence[str],
        artifact: str = "",
        mode: Literal["proxied", "shared"] = "proxied",
        believe: Sequence[str] = (),
        score: Score = "all",
        fresh: Literal["test", "suite"] = "test",
        twice: bool = True,
        seconds: float = 10.0,
        memory_mb: int = 512,
        image: str = "host",
    ) -> None:
        """
        Args:
            tests: the hidden test files, by path; conftest.py too.
            ids: pytest's id of every test that must pass, such as `test_money.py::test_sum[eur]`.
            packages: top-level names that tests import from the repository.
            artifact: where the repository lies in the agent's workspace; "" is all of it.
            mode: `proxied`, or `shared` for suites that cannot be: one process, canaries, a lower trust grade.
            believe: special methods of agent objects whose yes or no the tests may believe, such as `__eq__`.
            score: all or nothing, or the share of the tests that pass.
            fresh: a fresh box for the agent's code for each test, or one for the suite.
            twice: run each test two times in one process of the agent's code; both must pass. Without it, code that is
                right only on the first call of a process may pass; a suite whose tests change what outlives them may
                need that.
            seconds: wall time that the agent's code may take in one test.
            memory_mb: memory of each box.
            image: the root the boxes have.
        """
        if not ids or len(set(ids)) != len(ids):
            raise AuthoringError("RepositoryTests: name the id of every test that must pass, each once")
        missing = {name.split("::")[0] for name in ids} - set(tests)
        if missing:
            raise AuthoringError(f"RepositoryTests: there is no test file {', '.join(sorted(missing))}")
        if not packages:
            raise AuthoringError("RepositoryTests: name the packages that the tests import from the repository")
        self.artifacts = (Artifact(path=artifact),)
        self.tests = {path: text.encode() if isinstance(text, str) else text for path, text in tests.items()}
        self.ids, self.packages, self.artifact, self.mode = tuple(ids), tuple(packages), artifact, mode
        self.believe, self.score, self.fresh, self.seconds = tuple(believe), score, fresh, seconds
        self.times = 2 if twice else 1
        self.image, self.limits = image, Limits(memory_mb=memory_mb, seconds=seconds, processes=64)

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        try:
            found = {path or self.artifact: entry for path, entry in regular(submission, self.artifact)}
        except Malformed as error:
            return Verdict(score=0.0, evidence=(str(error),), verifier=self.version)
        repository = {path: entry for path, entry in found.items() if not path.startswith(FOLDER)}
        notes: list[str] = []
        trust: Trust = "proxied"
        if self.mode == "shared":
            trust = "shared"
            spec = SandboxSpec(image=self.image, limits=self.limits)
            passed, notes = await run_shared(self.tests, self.ids, repository, spec, self.seconds, self.times, context)
        else:
            async with _Session(self, repository, context) as session:
                passed, notes = await session.run()
        return self._verdict(passed, notes, trust)

    def _verdict(self, passed: set[str], notes: Sequence[str], trust: Trust) -> Verdict:
        right = [name for name in self.ids if name in passed]
        share = len(right) / len(self.ids)
        lines = [f"{len(right)} of {len(self.ids)} hidden tests passed", *notes]
        lines += [f"{name}: did not pass" for name in self.ids if name not in passed]
        if self.believe:
            lines.append(f"believed of the agent's objects: {', '.join(self.believe)}")
        return Verdict(
            score=share if self.score == "fraction" or share == 1.0 else 0.0,
            breakdown={"passed": share},
            evidence=tuple(lines[:40]),
            trust=trust,
            verifier=self.version,
        )


class _Session:
    """One grading: the tests' box, the agent's box of the moment, and the relay between them."""

    def __init__(self, verifier: RepositoryTests, repository: Mapping[str, Entry], context: Context) -> None:
        self.verifier, self.context = verifier, context
        program = _program("inside_agent.py")
        self.agent_spec = SandboxSpec(
            image=verifier.image, files={**repository, f"{FOLDER}/program.py": program}, limits=verifier.limits
        )
        order = {
            "packages": verifier.packages,
            "believe": verifier.believe,
            "ids": verifier.ids,
            "times": verifier.times,
        }
        self.tests_spec = SandboxSpec(
            image=verifier.image,
            files={
                **verifier.tests,
                f"{FOLDER}/program.py": _program("inside_tests.py"),
                f"{FOLDER}/pytest.zip": pytest_zip(),
                f"{FOLDER}/order.json": json.dumps(order),
            },
            limits=verifier.limits,
        )
        self.stack, self.agent_stack = AsyncExitStack(), AsyncExitStack()
        self.agent: Channel | None = None
        self.test = ""
        self.operations = 0
        self.spent = 0.0
        self.spoiled: dict[str, str] = {}

    async def __aenter__(self) -> _Session:
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self.agent_stack.aclose()
        finally:
            await self.stack.aclose()

    async def run(self) -> tuple[set[str], list[str]]:
        """The tests that passed, and remarks."""
        await self._reset("")
        box = await self.stack.enter_async_context(self.context.boxes.box(self.tests_spec))
        tests = await Channel.open(box)
        self.stack.push_async_callback(tests.close)
        message: dict[str, Any] = {"op": "start"}
        try:
            while True:
                request = await tests.ask(message, PATIENCE)
                if request.get("op") == "done":
                    break
                message = await self._answer(request)
        except Gone as gone:
            return set(), [f"the suite did not come to its end: {gone}"]
        if request["errors"] or "" in self.spoiled:
            return set(), [f"the suite could not be collected{': ' + self.spoiled[''] if '' in self.spoiled else ''}"]
        notes = [f"{name}: {why}" for name, why in self.spoiled.items()]
        if set(request["ran"]) != set(self.verifier.ids):
            return set(), ["the tests that ran are not the tests that were expected"]
        return set(request["passed"]) - set(self.spoiled), notes

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request of the tests in the agent's box."""
        if request.get("op") == "reset":
            await self._reset(str(request["test"]))
            return {"return": None}
        self.operations += 1
        left = self.verifier.seconds - self.spent
        if self.agent is not None and (self.operations > MAX_OPERATIONS or left <= 0):
            await self._lose("too many operations" if left > 0 else f"took longer than {self.verifier.seconds:g} s")
        if self.agent is None:
            return {"raise": [["agentrl", "BoxGone"], "Exception"], "args": []}
        began = monotonic()
        try:
            return await self.agent.ask(request, left)
        except Gone as gone:
            await self._lose(str(gone))
            return {"raise": [["agentrl", "BoxGone"], "Exception"], "args": []}
        finally:
            self.spent += monotonic() - began

    async def _lose(self, why: str) -> None:
        """The agent's box is of no more use: the test it serves has failed, whatever the test itself makes of it."""
        self.spoiled.setdefault(self.test, why)
        self.agent = None
        await self.agent_stack.aclose()

    async def _reset(self, test: str) -> None:
        self.test, self.operations, self.spent = test, 0, 0.0
        if self.agent is not None and test and self.verifier.fresh == "suite":
            return
        self.agent = None
        await self.agent_stack.aclose()
        box = await self.agent_stack.enter_async_context(self.context.boxes.box(self.agent_spec))
        try:
            self.agent = await Channel.open(box)
        except Gone as gone:
            await self._lose(str(gone))
        else:
            self.agent_stack.push_async_callback(self.agent.close)


def _program(name: str) -> bytes:
    return _PACKAGE.joinpath(name).read_bytes()
