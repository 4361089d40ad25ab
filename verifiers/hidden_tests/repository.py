"""`RepositoryTests`: a hidden pytest suite against a whole repository, without a shared process.

    sandbox T: pytest, hidden tests    host: relays JSON,           sandbox A: the agent's repository,
    `import theirs` is a stand-in ───> counts, limits, fails  ────> no tests, no expectations;
    passes and failures            <── what gets no answer    <──   a fresh one for each test

T holds no agent code, so its report can be believed; A holds nothing worth stealing. Where a suite cannot run this way
(it subclasses the agent's classes, or shares files with its code), `mode="shared"` runs both in one process and says
so: see shared.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any, Literal
from weakref import WeakKeyDictionary

from agentrl.errors import AuthoringError, SandboxError
from agentrl.sandboxes.base import Entry, Limits, SandboxSpec
from agentrl.types import Verdict
from agentrl.verifiers.base import Artifact, Boxes, Context, Submission, Verifier
from agentrl.verifiers.busy import again_if_starved
from agentrl.verifiers.inner import source_of
from agentrl.verifiers.values import Malformed

from .bundle import pytest_zip
from .channel import FOLDER, NO_ANSWER, Channel, Gone
from .functions import SLOW, Score, regular, verdict_on
from .shared import run_shared

MAX_OPERATIONS = 5_000
"""Operations that one test may ask of the agent's code."""
TESTS_TIMEOUT_S = 60.0
"""Seconds that the tests themselves may take between two requests; the agent's time is counted separately."""
UNFINISHED = "did not finish"
"""How the reason of the test begins in which the tests' own program hung or ended."""
_GONE: dict[str, Any] = {"raise": [["agentrl", "BoxGone"], "Exception"], "args": []}
"""What the tests get for an answer once the agent's sandbox is gone."""


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
        env: Mapping[str, str] | None = None,
        tests_seconds: float = TESTS_TIMEOUT_S,
        names: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """
        Args:
            tests: the hidden test files, by path; conftest.py too.
            ids: pytest's id of every test that must pass, such as `test_money.py::test_sum[eur]`.
            packages: top-level names that tests import from the repository.
            artifact: where the repository is in the agent's workspace; "" is all of it.
            mode: `proxied`, or `shared` for suites that cannot be: one process, canaries, a lower trust grade.
            believe: special methods of agent objects whose yes or no the tests may believe, such as `__eq__`.
            score: all or nothing, or the share of the tests that pass.
            fresh: a fresh sandbox for the agent's code per test, or one for the suite.
            twice: run each test by itself, then all of them in one process of the agent's code, and a few that the
                group's secret picks three times more; all must pass. Turn it off for a suite whose tests cannot be
                repeated: then code that is right only at first, or keeps its first answer, may pass.
            seconds: wall time that the agent's code may take in one test.
            memory_mb: memory of each sandbox.
            image: the root of the sandboxes.
            env: environment variables of the sandboxes, such as a PYTHONPATH.
            tests_seconds: seconds that the tests themselves may take between two requests of the agent's code.
            names: what `from module import *` brings into a test, by module. The agent's code does not choose names
                in a test, so a test that imports everything of a module that is not named here fails.
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
        self.env, self.tests_seconds = dict(env or {}), tests_seconds
        self.names = {module: list(members) for module, members in (names or {}).items()}

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        try:
            entries = {path or self.artifact: entry for path, entry in regular(submission, self.artifact)}
        except Malformed as error:
            return Verdict(score=0.0, evidence=(str(error),), verifier=self.version)
        repository = {path: entry for path, entry in entries.items() if not path.startswith(FOLDER)}
        failures = await self.failures(repository, context)
        passed = "hidden tests passed"
        if self.believe:
            passed += f"; believed of the agent's objects: {', '.join(self.believe)}"
        return verdict_on(self, self.score, self.ids, failures, passed, self.mode)

    async def probe(self, context: Context) -> None:
        if self.mode != "shared":
            place_for(context.boxes)
        await super().probe(context)

    async def failures(self, repository: Mapping[str, Entry], context: Context) -> list[str]:
        """Return why each test failed with these files of the agent's; "" where it passed."""
        if self.mode == "shared":
            spec = SandboxSpec(image=self.image, limits=self.limits, env=self.env)
            return await run_shared(self.tests, self.ids, repository, spec, self.times, context)
        return await again_if_starved(
            lambda: _Session(self, repository, context).run(), lambda whys: any(map(_late, whys)), self.seconds
        )


def chosen(ids: Sequence[str], secret: bytes) -> list[str]:
    """Return the tests that run more often: a few, which the group's secret picks."""
    return random.Random(hashlib.sha256(b"again\0" + secret).digest()).sample(list(ids), min(3, len(ids)))


def _late(why: str) -> bool:
    """Return whether a test failed for want of time."""
    return SLOW in why or NO_ANSWER in why


def place_for(boxes: Boxes) -> asyncio.Semaphore:
    """Return what bounds the gradings that use these sandboxes at once. Each needs two: if every place were held by
    one that waits for its second, none would ever end."""
    limit: int = getattr(boxes, "limit", 2)
    if limit < 2:
        raise SandboxError("these hidden tests need two sandboxes at once, and there is room for one: raise the limit")
    loop = asyncio.get_running_loop()
    known = _places.get(boxes)
    if known is None or known[0] is not loop:
        known = _places[boxes] = (loop, asyncio.Semaphore(limit // 2))
    return known[1]


_places: WeakKeyDictionary[Boxes, tuple[asyncio.AbstractEventLoop, asyncio.Semaphore]] = WeakKeyDictionary()


class _Session:
    """One grading: the tests' sandbox, the agent's current sandbox, and the relay between them."""

    def __init__(self, verifier: RepositoryTests, repository: Mapping[str, Entry], context: Context) -> None:
        self.verifier, self.context = verifier, context
        program = source_of(__package__ or "", "inside_agent")
        self.agent_spec = SandboxSpec(
            image=verifier.image,
            files={**repository, f"{FOLDER}/program.py": program},
            limits=verifier.limits,
            env=verifier.env,
        )
        order: dict[str, Any] = {
            name: getattr(verifier, name) for name in ("packages", "believe", "ids", "times", "names")
        }
        order["again"] = chosen(verifier.ids, context.secret) if verifier.times > 1 else []
        files: dict[str, bytes | str] = {
            **verifier.tests,
            f"{FOLDER}/program.py": source_of(__package__ or "", "inside_tests"),
            f"{FOLDER}/pytest.zip": pytest_zip(),
            f"{FOLDER}/order.json": json.dumps(order),
        }
        self.tests_spec = SandboxSpec(image=verifier.image, files=files, limits=verifier.limits, env=verifier.env)
        self.stack, self.agent_stack = AsyncExitStack(), AsyncExitStack()
        self.agent: Channel | None = None
        self.test = ""
        self.operations = 0
        self.spent = 0.0
        self.failed: dict[str, str] = {}

    async def run(self) -> list[str]:
        """Return why each test failed; "" where it passed."""
        async with place_for(self.context.boxes), self.stack, self.agent_stack:
            try:
                done = await self._relay()
            except Gone as gone:
                return [
                    f"{UNFINISHED if name == self.test else 'the suite did not finish'}: {gone}"
                    for name in self.verifier.ids
                ]
        if done["errors"] or "" in self.failed:
            why = f": {self.failed['']}" if "" in self.failed else ""
            return [f"the suite could not be collected{why}"] * len(self.verifier.ids)
        if set(done["ran"]) != set(self.verifier.ids):
            return ["the tests that ran are not the tests that were expected"] * len(self.verifier.ids)
        failed = {**dict.fromkeys(set(self.verifier.ids) - set(done["passed"]), "did not pass"), **self.failed}
        return [failed.get(name, "") for name in self.verifier.ids]

    async def _relay(self) -> dict[str, Any]:
        """Answer the tests' requests until they send their report."""
        await self._reset("")
        box = await self.stack.enter_async_context(self.context.boxes.box(self.tests_spec))
        tests = await Channel.open(box)
        self.stack.push_async_callback(tests.close)
        message: dict[str, Any] = {"op": "start"}
        while True:
            request = await tests.ask(message, self.verifier.tests_seconds)
            if request.get("op") == "done":
                return request
            message = await self._answer(request)

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one request of the tests in the agent's sandbox."""
        if request.get("op") == "reset":
            await self._reset(str(request["test"]), request.get("keep") is True)
            return {"return": None}
        self.operations += 1
        left = self.verifier.seconds - self.spent
        if self.agent is not None and (self.operations > MAX_OPERATIONS or left <= 0):
            await self._fail("too many operations" if left > 0 else f"{SLOW} {self.verifier.seconds:g} s")
        if self.agent is None:
            return _GONE
        start = monotonic()
        try:
            return await self.agent.ask(request, left)
        except Gone as gone:
            await self._fail(str(gone))
            return _GONE
        finally:
            self.spent += monotonic() - start

    async def _fail(self, why: str) -> None:
        """Give up the agent's sandbox: the test that it serves has failed, whatever the test itself makes of it."""
        self.failed.setdefault(self.test, why)
        self.agent = None
        await self.agent_stack.aclose()

    async def _reset(self, test: str, keep: bool = False) -> None:
        self.test, self.operations, self.spent = test, 0, 0.0
        if self.agent is not None and test and (keep or self.verifier.fresh == "suite"):
            return
        self.agent = None
        await self.agent_stack.aclose()
        box = await self.agent_stack.enter_async_context(self.context.boxes.box(self.agent_spec))
        try:
            self.agent = await Channel.open(box)
        except Gone as gone:
            await self._fail(str(gone))
        else:
            self.agent_stack.push_async_callback(self.agent.close)
