"""The fallback for suites that cannot be proxied: tests and agent code in one process, watched as well as can be.

For each expected test, in fresh boxes that see that one test alone: the test must report a pass, together with a nonce
that only this run was given; and its canaries (see canaries.py) must report a failure. Agent code that runs inside the
test process can in the end forge all of it, which is why the verdict's trust is `shared` and not more.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files

from agentrl.errors import AgentError, VerifierError
from agentrl.sandboxes.base import Entry, SandboxSpec
from agentrl.verifiers.base import Context
from agentrl.verifiers.values import Malformed, parse_json

from .bundle import pytest_zip
from .canaries import canaries
from .functions import work_through

_INSIDE = files(__package__ or "").joinpath("inside_shared.py").read_text(encoding="utf-8")


async def run_shared(
    tests: Mapping[str, bytes],
    ids: Sequence[str],
    repository: Mapping[str, Entry],
    spec: SandboxSpec,
    seconds: float,
    times: int,
    context: Context,
) -> tuple[set[str], list[str]]:
    """The tests that passed with all canaries failing, and remarks."""

    async def judge(at: int) -> str:
        name = ids[at]
        nonce = hashlib.sha256(context.secret + f"shared {at} {name}".encode()).hexdigest()[:24]
        outcome = await _one(tests, name, repository, spec, seconds, times, nonce, context)
        if outcome != "passed":
            return outcome
        for what, there in _canaries(tests, name, nonce[::-1]):
            if await _one(there, name, repository, spec, seconds, 1, nonce, context) != "failed":
                return f"its canary ({what}) did not fail, so its pass is worth nothing"
        return ""

    failures = await work_through(len(ids), judge, 4, stop=False)
    notes = [f"{name}: {failure}" for name, failure in zip(ids, failures, strict=True) if failure]
    return {name for name, failure in zip(ids, failures, strict=True) if not failure}, notes


def _canaries(tests: Mapping[str, bytes], name: str, nonce: str) -> list[tuple[str, dict[str, bytes]]]:
    """What was done to the test, and the test files with it done."""
    file, _, test = name.partition("::")
    try:
        changed = list(canaries(tests[file].decode(), test, nonce))
    except (LookupError, SyntaxError, UnicodeDecodeError) as error:
        raise VerifierError(f"{name}: no canary can be made of it ({error})") from None
    return [(what, {**tests, file: source.encode()}) for what, source in changed]


async def _one(
    tests: Mapping[str, bytes],
    name: str,
    repository: Mapping[str, Entry],
    spec: SandboxSpec,
    seconds: float,
    times: int,
    nonce: str,
    context: Context,
) -> str:
    """What became of one test: `passed`, `failed`, or why neither can be said."""
    files_ = {**{path: entry.content for path, entry in repository.items() if not _meddles(path)}, **tests}
    order = {
        "files": {path: base64.b64encode(content).decode() for path, content in files_.items()},
        "pytest": base64.b64encode(pytest_zip()).decode(),
        "test": name,
        "nonce": nonce,
        "times": times,
    }
    try:
        async with context.boxes.box(spec) as box:
            done = await box.aio.python(_INSIDE, json.dumps(order).encode(), timeout=seconds, reply_limit=1_000)
        if done.timed_out:
            return "took too long"
        reply = parse_json(done.reply, max_bytes=1_000)
    except Malformed:
        return "no report"
    except AgentError:
        return "the box died"
    if type(reply) is not dict or set(reply) != {"nonce", "test", "phases"} or reply["nonce"] != nonce:
        return "a report that is not ours"
    if reply["test"] != name or type(reply["phases"]) is not list:
        return "a report on another test"
    if reply["phases"] == ["setup", "call", "teardown"] * times:
        return "passed"
    return "failed" if "call failed" in reply["phases"] else "skipped, expected to fail, or broken outside the test"


def _meddles(path: str) -> bool:
    """Whether an agent's file would configure the test run itself."""
    return path.rsplit("/", 1)[-1] in (
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "tox.ini",
        "setup.cfg",
        "pytest.toml",
    )
