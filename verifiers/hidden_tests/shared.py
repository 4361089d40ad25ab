"""The fallback for suites that cannot be proxied: tests and agent code in one process, watched as well as can be.

Each expected test runs alone in fresh sandboxes. It must report a pass, together with a nonce that only this run was
given, and its canaries (see canaries.py), run as many times, must report a failure each time. Agent code that runs
inside the test process can in the end forge all of it, which is why the verdict's trust is `shared` and not more.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence

from agentrl.errors import AgentError, VerifierError
from agentrl.sandboxes.base import Entry, ExecResult, SandboxSpec
from agentrl.verifiers.base import Context
from agentrl.verifiers.busy import again_if_starved
from agentrl.verifiers.inner import LOADER, compiled
from agentrl.verifiers.values import Malformed, parse_json

from .bundle import pytest_zip
from .canaries import canaries
from .functions import work_through

_PROGRAM = compiled(__package__ or "", "inside_shared")
MORE = 3
"""How often the one test that the group's secret picks runs once more: code may be right only the first few times."""
_CONFIGURATION = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pytest.toml")
"""Files of the agent's that would configure the test run itself."""


async def run_shared(
    tests: Mapping[str, bytes],
    ids: Sequence[str],
    repository: Mapping[str, Entry],
    spec: SandboxSpec,
    times: int,
    context: Context,
) -> list[str]:
    """Return why each test failed; "" where it passed and all its canaries failed."""
    code = {p: entry.content for p, entry in repository.items() if p.rsplit("/", 1)[-1] not in _CONFIGURATION}

    async def judge(at: int) -> str:
        name = ids[at]
        nonce = hashlib.sha256(context.secret + f"shared {at} {name}".encode()).hexdigest()[:24]
        more = MORE if times > 1 and at == int(hashlib.sha256(context.secret).hexdigest(), 16) % len(ids) else 0
        outcome = await _run({**code, **tests}, name, nonce, times + more, spec, context)
        if outcome != "passed":
            return outcome
        for what, changed in _canaries(tests, name, nonce[::-1]):
            if await _run({**code, **changed}, name, nonce, times + more, spec, context) != "failed":
                return f"its canary ({what}) did not fail, so its pass is worth nothing"
        return ""

    return await work_through(len(ids), judge, 4, stop=False)


def _canaries(tests: Mapping[str, bytes], name: str, nonce: str) -> list[tuple[str, dict[str, bytes]]]:
    """Return what was changed in the test, and the test files with that change."""
    file, _, test = name.partition("::")
    try:
        changed = list(canaries(tests[file].decode(), test, nonce))
    except (LookupError, SyntaxError, UnicodeDecodeError) as error:
        raise VerifierError(f"{name}: cannot turn it into a canary ({error})") from None
    return [(what, {**tests, file: source.encode()}) for what, source in changed]


async def _run(
    files: Mapping[str, bytes], name: str, nonce: str, times: int, spec: SandboxSpec, context: Context
) -> str:
    """Run one test. Returns `passed`, `failed`, or why it is neither."""
    order = {
        "files": {path: base64.b64encode(content).decode() for path, content in files.items()},
        "pytest": base64.b64encode(pytest_zip()).decode(),
        "test": name,
        "nonce": nonce,
        "times": times,
    }
    message = _PROGRAM + json.dumps(order).encode()

    async def run() -> ExecResult:
        async with context.boxes.box(spec) as box:
            return await box.aio.python(LOADER, message, timeout=spec.limits.seconds, reply_limit=1_000)

    try:
        done = await again_if_starved(run, lambda done: done.timed_out, spec.limits.seconds)
        if done.timed_out:
            return "took too long"
        reply = parse_json(done.reply, max_bytes=1_000)
    except Malformed:
        return "no report"
    except AgentError:
        return "the sandbox died"
    if type(reply) is not dict or set(reply) != {"nonce", "test", "phases"} or reply["nonce"] != nonce:
        return "a report that is not ours"
    if reply["test"] != name or type(reply["phases"]) is not list:
        return "a report on another test"
    if reply["phases"] == ["setup", "call", "teardown"] * times:
        return "passed"
    if reply["phases"] == ["setup", "call failed", "teardown"] * times:
        return "failed"
    return "passed only sometimes, skipped, expected to fail, or broken outside the test"
