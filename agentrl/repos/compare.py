"""Runs an agent's own tests against versions of a package, and tells a fault that they noticed from a trick.

    sandbox T: pytest, the agent's tests  ──requests──>  host: allows, records, limits  ──>  sandbox A: one version
    `import package` is a stand-in        <──replies───                                 <──  of the package, rewritten

The report of T is the agent's own word. It cannot gain by it: T sees the package only through replies. A version with a
fault counts as noticed only where a reply differs from what the original replied to the same request, so chance, time
and the order of the runs do not help. Every version gets other lines, constants and unused variables first; if the
original replies differently then, the tests look at the code and not at what it does, and score 0.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import random
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Any

from agentrl.repos.mutate import _body, _functions, parse, parses
from agentrl.sandboxes.base import Entry, Limits, SandboxSpec
from agentrl.verifiers.base import Context
from agentrl.verifiers.busy import again_if_starved
from agentrl.verifiers.hidden_tests.bundle import pytest_zip
from agentrl.verifiers.hidden_tests.channel import FOLDER, NO_ANSWER, Channel, Gone
from agentrl.verifiers.hidden_tests.repository import place_for
from agentrl.verifiers.inner import source_of

MAX_REQUESTS = 5_000
MAX_TRANSCRIPT = 4 << 20
SECONDS = 20.0
"""Wall time of one run of the tests."""
REPLY_S = 5.0
"""Wall time of one reply: a version with a fault may never end."""
TESTS = "agentrl.verifiers.hidden_tests"
_OPERATIONS = (
    "import instance get call set delete len iter next str bool int float abs eq ne lt le gt ge contains add sub mul "
    "truediv floordiv mod pow matmul and_ or_ xor neg getitem setitem delitem answer"
)
OPERATIONS = frozenset(_OPERATIONS.split())
SPECIAL = frozenset({"__name__", "__qualname__", "__version__", "__enter__", "__exit__"})
FRAMES = r"(co|gi|cr|ag|tb)_\w+|f_(back|builtins|code|globals|lasti|lineno|locals|trace\w*)|func_code"
_LOOKING = (
    "code|globals|closure|dict|builtins|loader|spec|file|traceback|getattribute|import|class|mro|subclasses|bases"
)
LOOKING = re.compile(rf"__({_LOOKING}|reduce\w*)__|getsource|{FRAMES}")
"""Texts that would have the package's own functions, such as an attrgetter that it imports, look into its code."""
PLAIN = frozenset({"bool", "int", "float", "complex", "str", "bytes", "list", "tuple", "dict", "set", "frozenset"})
_NAMES = (
    "abs all any ascii bin bool bytes callable chr dict divmod enumerate filter float format frozenset hash hex id int "
    "iter len list map max min next oct ord pow print range repr reversed round set slice sorted str sum tuple type zip"
)
NAMES = _NAMES.split()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the tests said about one version, and all that they asked and were told."""

    passed: bool
    """Whether all of them passed, by their own report."""
    reported: bool
    """Whether they came to a report."""
    turns: tuple[tuple[str, str], ...]
    """Requests and replies, as canonical JSON."""
    refused: str = ""
    """What was asked and is not allowed."""
    late: bool = False
    """Whether somebody took longer than may be."""


def _inside(value: Any) -> list[Any]:
    """Return a value of JSON and everything in it."""
    pending, every = [value], []
    while pending:
        one = pending.pop()
        every.append(one)
        pending += one if isinstance(one, list) else one.values() if isinstance(one, dict) else []
    return every


def _plain(name: str) -> bool:
    """Return whether a built-in type may be handed to the package: of plain data, or an exception."""
    kind = getattr(builtins, name, None)
    return name in PLAIN or (isinstance(kind, type) and issubclass(kind, BaseException))


def refusal(request: Mapping[str, Any], packages: Sequence[str], issued: Set[tuple[str, str]]) -> str:
    """Return why a request may not be carried out, or "": it may use the package, and not look into it.

    `issued`: the names inside modules that replies have given so far; no others can be used.
    """
    op, name = str(request.get("op"))[:40], str(request.get("name"))[:200]
    if op not in OPERATIONS:
        return f"the operation {op!r}"
    if op == "import" and name.split(".")[0] not in packages:
        return f"the module {name[:40]!r}"
    hidden = name.startswith("__") and name not in SPECIAL
    if op in ("get", "set", "delete") and (hidden or "." in name or re.fullmatch(FRAMES, name)):
        return f"the attribute {name[:40]!r}"
    for value in _inside({key: value for key, value in request.items() if key not in ("op", "name")}):
        if isinstance(value, str) and LOOKING.search(value):
            return f"{value[:40]!r}, as a text for the package"
        if not isinstance(value, dict):
            continue
        if "module" in value and str(value["module"]).split(".")[0] not in packages:
            return f"the module {str(value['module'])[:40]!r}"
        if "m" in value and (str(value["m"]), str(value.get("n"))) not in issued:
            return f"the name {str(value.get('n'))[:40]!r}, which it was not given"
        if "builtin" in value and not _plain(str(value["builtin"])):
            return f"the built-in {str(value['builtin'])[:40]!r}"
    return ""


async def converse(
    tests: Mapping[str, bytes],
    path: str,
    version: Mapping[str, bytes],
    packages: Sequence[str],
    image: str,
    env: Mapping[str, str],
    context: Context,
) -> Conversation:
    """Run the tests of one file against one version of the package, in two fresh sandboxes."""
    limits = Limits(memory_mb=1024, seconds=SECONDS, processes=64)
    order = {"packages": list(packages), "believe": [], "ids": [path], "times": 1, "again": []}
    inside: dict[str, bytes | str] = {
        **tests,
        f"{FOLDER}/program.py": source_of(TESTS, "inside_tests"),
        f"{FOLDER}/pytest.zip": pytest_zip(),
        f"{FOLDER}/order.json": json.dumps(order),
    }
    code: dict[str, Any] = {name: Entry(content=data) for name, data in version.items()}
    code[f"{FOLDER}/program.py"] = source_of(TESTS, "inside_agent")
    specs = [SandboxSpec(image=image, files=files, limits=limits, env=dict(env)) for files in (inside, code)]

    async def once() -> Conversation:
        turns: list[tuple[str, str]] = []
        async with place_for(context.boxes), AsyncExitStack() as stack:
            channels = []
            for spec in specs:
                try:
                    channels.append(await Channel.open(await stack.enter_async_context(context.boxes.box(spec))))
                except Gone:
                    return Conversation(False, False, ())
                stack.push_async_callback(channels[-1].close)
            return await _relayed(channels[0], channels[1], packages, turns)

    return await again_if_starved(once, lambda told: told.late, SECONDS)


async def _relayed(
    tests: Channel, package: Channel, packages: Sequence[str], turns: list[tuple[str, str]]
) -> Conversation:
    """Carry requests and replies until the tests report."""
    message: dict[str, Any] = {"op": "start"}
    deadline, size, gone, late = monotonic() + SECONDS, 0, False, False
    issued: set[tuple[str, str]] = set()
    while True:
        try:
            request = await tests.ask(message, max(deadline - monotonic(), 0.1))
        except Gone as ended:
            return Conversation(False, False, tuple(turns), late=late or NO_ANSWER in str(ended))
        if request.get("op") == "done":
            ran, passed = request.get("ran"), request.get("passed")
            good = (
                type(ran) is list
                and len(ran) > 0
                and type(passed) is list
                and set(map(str, ran)) == set(map(str, passed))
            )
            return Conversation(good and request.get("errors") == 0, True, tuple(turns), late=late)
        if request.get("op") == "reset":
            message = {"return": None}
        else:
            why = refusal(request, packages, issued)
            if why or len(turns) >= MAX_REQUESTS or size > MAX_TRANSCRIPT:
                return Conversation(False, False, tuple(turns), why or "more requests than may be")
            message = {"raise": [["agentrl", "BoxGone"], "Exception"], "args": []}
            if not gone:
                try:
                    message = await package.ask(request, REPLY_S)
                except Gone as ended:
                    gone, late = True, NO_ANSWER in str(ended)
            issued |= {(str(v["m"]), str(v.get("n"))) for v in _inside(message) if isinstance(v, dict) and "m" in v}
        turn = (json.dumps(request, sort_keys=True), json.dumps(message, sort_keys=True))
        size += len(turn[0]) + len(turn[1])
        turns.append(turn)


def noticed(original: Conversation, other: Conversation) -> bool:
    """Return whether tests failed on a version because it answered one of their requests differently."""
    if not other.reported or other.passed:
        return False
    for (asked, told), (asked_too, told_too) in zip(original.turns, other.turns, strict=False):
        if asked != asked_too:
            return False  # the same replies led to another request: chance, time or order
        if told != told_too:
            return True
    return False


def rewritten(files: Mapping[str, bytes], rng: random.Random) -> dict[str, bytes]:
    """Return the code with other lines, constants and unused variables in every function. It does the same."""
    return {path: _disguised(data, rng) if path.endswith(".py") else data for path, data in sorted(files.items())}


def _disguised(data: bytes, rng: random.Random) -> bytes:
    if not parses(data):
        return data
    lines = data.splitlines(keepends=True)
    inserted: dict[int, bytes] = {}
    tree = parse(data)
    for top in tree.body[:1]:  # comments above the first statement shift every line
        first = min([top.lineno, *(d.lineno for d in getattr(top, "decorator_list", []))])
        inserted[first] = b"#\n" * rng.randrange(1, 40) if first > 2 or not lines[0].startswith(b"#") else b""
    for _, node in _functions("", tree):
        body = _body(node)
        if not body or body[0].lineno == node.lineno:
            continue
        at = min([body[0].lineno, *(d.lineno for d in getattr(body[0], "decorator_list", []))])
        text = b"".join(lines[node.lineno - 1 : node.end_lineno])
        indent = lines[at - 1][: len(lines[at - 1]) - len(lines[at - 1].lstrip())]
        plain = not lines[at - 1][len(indent) : body[0].col_offset].strip() and len(indent) == body[0].col_offset
        if plain and not re.search(rb"\b(locals|vars|dir|eval|exec|_getframe|currentframe|__class__)\b", text):
            inserted[at] = inserted.get(at, b"") + b"".join(indent + line for line in _noise(rng))
    out = [inserted.get(number, b"") + line for number, line in enumerate(lines, 1)]
    noisy = b"".join(out) + b"\n" + b"#" * rng.randrange(1, 200) + b"\n"
    return noisy if parses(noisy) else data


def _noise(rng: random.Random) -> list[bytes]:
    """Return statements that change nothing but what the code looks like."""
    name = "_" + "".join(rng.choices("abcdefghjkmnpqrstuvwxyz", k=8))
    lines = [f"# {rng.randrange(10**9)}\n" for _ in range(rng.randrange(4))]
    lines.append(f"{name} = {rng.randrange(1_000, 10**6)}\n")
    for _ in range(rng.randrange(1, 5)):
        operator = rng.choice(["+", "-", "*", "//", "%", "&", "|", "<", "<=", ">", ">=", "==", "!=", "and", "or"])
        lines.append(f"{name} = {name} {operator} {rng.choice([rng.randrange(1, 13), rng.randrange(1, 1_000)])}\n")
    lines.append(f"{name} = {', '.join(rng.sample(NAMES, 3))}\n")
    return [line.encode() for line in lines]


async def outcomes(conversations: Sequence[Any], rng: random.Random) -> list[Conversation]:
    """Await these coroutines, started in an order that the group's secret decides."""
    order = list(range(len(conversations)))
    rng.shuffle(order)
    results: dict[int, Conversation] = {}

    async def one(number: int) -> None:
        results[number] = await conversations[number]

    async with asyncio.TaskGroup() as group:
        for number in order:
            group.create_task(one(number))
    return [results[number] for number in range(len(conversations))]
