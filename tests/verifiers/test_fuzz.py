"""Fuzz targets for all that the trusted side reads: replies, answers, artifacts, repositories. No crash, no hang, no
wrong pass.

Each target runs for a moment here. AGENTRL_FULL=1 runs them in turn for ten minutes, with fresh seeds, and leaves a
record in docs/evidence/.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import socket
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from agentrl.errors import AgentError
from agentrl.sandboxes import tree
from agentrl.sandboxes.base import Entry, ExecResult
from agentrl.types import Task, Verdict
from agentrl.verifiers.answer import Answer
from agentrl.verifiers.base import Context, Submission
from agentrl.verifiers.final_state import FinalState, GitExpected, GitState, JsonState
from agentrl.verifiers.final_state.database import _checked
from agentrl.verifiers.hidden_tests import Raised, Returned, example
from agentrl.verifiers.hidden_tests.channel import Channel, Gone
from agentrl.verifiers.hidden_tests.functions import _results, candidate_files
from agentrl.verifiers.judge.prompt import Criterion, read_reply
from agentrl.verifiers.values import Malformed, encode, parse_json

FULL = os.environ.get("AGENTRL_FULL") == "1"
SHORT = 60
"""Examples of each target in an ordinary run."""
MINUTES = 10
SLOWEST = 2.0
"""Seconds of processor time after which one example counts as hung."""
TASK = Task(id="fuzz/1", split="train", level=1, prompt="")

Target = Callable[[Any], None]
TARGETS: dict[str, tuple[st.SearchStrategy[Any], Target]] = {}


def target(strategy: st.SearchStrategy[Any]) -> Callable[[Target], Target]:
    """A fuzz target: what it is fed, and the function that must neither crash, nor hang, nor let pass what is wrong."""

    def register(function: Target) -> Target:
        TARGETS[function.__name__] = (strategy, function)
        return function

    return register


def fuzz(name: str, examples: int, number: int | None = None) -> int:
    """Run one target; how many examples it saw."""
    strategy, function = TARGETS[name]
    seen = 0

    def one(value: Any) -> None:
        nonlocal seen
        seen += 1
        began = time.thread_time()
        function(value)
        assert time.thread_time() - began < SLOWEST, "it took too long"

    one.__name__ = name
    run = given(value=strategy)(one)
    loud = [HealthCheck.too_slow, HealthCheck.data_too_large]
    if number is None:
        settings(max_examples=examples, suppress_health_check=loud)(run)()
    else:
        fresh = settings(max_examples=examples, database=None, derandomize=False, suppress_health_check=loud)
        seed(number)(fresh(run))()
    return seen


def verdict(coroutine: Coroutine[Any, Any, Verdict]) -> bool:
    """Whether a verifier that waits for nothing passes a submission."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        assert done.value.score in (0.0, 1.0)
        return bool(done.value.score == 1.0)
    raise AssertionError("it waited for something")


CONTEXT = Context(secret=b"fuzz", boxes=None)  # type: ignore[arg-type]


# What comes back from a box ---------------------------------------------------------------------------------------

EXPECTED = {"total": 17, "names": ["ann", "bob"]}
CASE = example("solve", 1, expect=EXPECTED)
RIGHT = {"steps": [{"return": encode(EXPECTED)}]}
DUMP = {
    "tables": {"t": {"columns": [["a", "TEXT"]], "sql": "CREATE TABLE t (a TEXT)", "rows": [[{"i": "1"}, None]]}},
    "others": {"view v": {"table": "v", "sql": "CREATE VIEW v AS SELECT 1"}},
    "settings": {"user_version": "0"},
}
REPLY = {"instructs_examiner": False, "answers": {"correct": "yes"}}

WORDS = (
    "steps return raise args i f b l t s z d o type 17 ann bob total names tables others columns sql rows settings "
    "broken instructs_examiner answers correct yes no"
)
words = st.sampled_from(WORDS.split())
trees: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-20, 20) | st.floats() | words | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=25,
)


@st.composite
def damaged(draw: st.DrawFn, document: Any) -> Any:
    """A document with some of its parts replaced by something else."""
    if draw(st.integers(0, 5)) == 0:
        return draw(trees)
    if isinstance(document, dict):
        kept = {key: draw(damaged(value)) for key, value in document.items() if draw(st.integers(0, 9))}
        return {**kept, **draw(st.dictionaries(words, trees, max_size=1))} if draw(st.integers(0, 5)) == 0 else kept
    if isinstance(document, list):
        return [draw(damaged(item)) for item in document]
    return document


@target(damaged(RIGHT) | trees)
def replies_of_a_candidate(reply: Any) -> None:
    try:
        results = _results(parse_json(json.dumps(reply)), CASE.runs[0])
    except Malformed:
        return
    assert len(results) == 1 and type(results[0]) in (Returned, Raised)
    turned = dict(reversed(EXPECTED.items()))
    right = type(results[0]) is Returned and repr(results[0].value) in (repr(EXPECTED), repr(turned))
    assert CASE.check([results]) is right


@target(damaged(DUMP) | trees)
def dumps_of_a_database(reply: Any) -> None:
    try:
        found = _checked(parse_json(json.dumps(reply)))
    except Malformed:
        return
    assert set(found) == {"tables", "others", "settings"}
    assert all(type(row) is list for table in found["tables"].values() for row in table["rows"])


@target(damaged(REPLY).map(json.dumps) | st.text(max_size=60))
def replies_of_a_judge(reply: str) -> None:
    try:
        points = read_reply(reply, [Criterion("correct", "?")])
    except Malformed:
        return
    assert points is None or points in ({"correct": 1.0}, {"correct": 0.5}, {"correct": 0.0})


class Saying:
    """A box, and a program in it that answers everything with this."""

    def __init__(self, answer: bytes | Exception) -> None:
        self.answer = answer

    @property
    def aio(self) -> Saying:
        return self

    async def exec(self, argv: list[str], **options: Any) -> ExecResult:
        return ExecResult(exit_code=0)

    async def write(self, line: bytes, *, timeout: float) -> None:
        assert b"\n" not in line

    async def read(self, *, timeout: float) -> bytes:
        await asyncio.sleep(0)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        return None


@target(
    st.binary(max_size=80)
    | damaged({"return": encode(EXPECTED)}).map(lambda d: json.dumps(d).encode())
    | st.just(AgentError("the program has ended"))
    | st.just(TimeoutError())
)
def messages_of_the_protocol(answer: bytes | Exception) -> None:
    async def ask() -> Any:
        box: Any = Saying(answer)
        channel = Channel(box, box)
        try:
            return await channel.ask({"op": "call"}, 1.0)
        except Gone:
            return None
        finally:
            await channel.close()

    reply = asyncio.run(ask())
    if reply is not None:
        assert type(reply) is dict and isinstance(answer, bytes) and json.loads(answer) == reply


# Answers ----------------------------------------------------------------------------------------------------------

PIECES = (
    "408|4|0|8|00|1|2|3|816|x|y|(|)|{|}|[|]|+|-|*|/|^|**|=|,|.|;|e|E|e2|%|$|m|cm|km| |\n|\t|\0|nan|inf|True|not|or"
    "|sqrt(|<answer>|</answer>|<Answer>|\\boxed{|\\boxed|\\fbox{|\\frac{|±|−|×|÷|½|４|٣|⁴|é|\u200b|\u202e"
)
texts = st.lists(st.sampled_from(PIECES.split("|")), max_size=9).map("".join) | st.text(max_size=30)


def passes(verifier: Answer, text: str) -> bool:
    return verdict(verifier.verify(Submission(task=TASK, answer=text), CONTEXT))


@target(texts)
def numbers(text: str) -> None:
    if passes(Answer(lambda task: 408, kind="numeric"), text):
        assert text.isascii() and Fraction(text.strip().replace(",", "")) == 408
    if passes(Answer(lambda task: "4.08", kind="numeric", units={"m": 1, "cm": Fraction(1, 100)}), text):
        assert text.strip().endswith("m")


@target(texts)
def sets_and_rows(text: str) -> None:
    rows = [sorted(map(int, re.findall(r"\d+", text))), [int(n) for n in re.findall(r"\d+", text)]]
    for kind, found in zip(("set", "ordered"), rows, strict=True):
        verifier = Answer(lambda task: [2, 3], kind=kind, items="numeric")
        if passes(verifier, text) and text.isascii() and not set(text) & set("./eE-+"):
            assert found == [2, 3]


@target(texts)
def expressions(text: str) -> None:
    square = Answer(lambda task: "x^2 + 2*x + 1", kind="expression", names=["x"])
    if passes(square, text) and re.fullmatch(r"[0-9x+*() -]*", text) and "**" not in text:
        assert all(eval(text.strip(), {"x": x}) == (x + 1) ** 2 for x in (0, 3, -7))  # digits, x, + - * ( ) alone


@target(texts)
def extraction(text: str) -> None:
    for how, start, end in (("tag", "<answer>", "</answer>"), ("boxed", "\\boxed{", "}")):
        if passes(Answer(lambda task: "408", extract=how), text):
            assert text.count(start) == 1 and text.partition(start)[2].partition(end)[0].strip() == "408"
    if passes(Answer(lambda task: "408"), text):
        assert text.strip() == "408"


# Artifacts --------------------------------------------------------------------------------------------------------

names = st.sampled_from(["a", "b", "d", "d/a", "d/b", "out.json", ".git", "..", "x y", "ü", "-rf", "solution.py"])
entries = st.builds(
    Entry,
    st.sampled_from(["file", "dir", "link", "special"]),
    st.sampled_from([b"", b"1\n", b"1", b"2\n", b"../../etc/passwd", b"\xff\xfe"]) | st.binary(max_size=8),
    st.sampled_from([0o644, 0o755, 0o4755, 0]),
)
TREE: dict[str, Entry | str] = {"a": "1\n", "d/b": Entry(content=b"2\n", mode=0o644)}


@target(st.dictionaries(names, entries, max_size=4) | st.just({"a": Entry(content=b"1\n"), "d/b": TREE["d/b"]}))
def file_trees(found: Mapping[str, Entry]) -> None:
    passed = verdict(
        FinalState(lambda task: TREE, modes=True).verify(Submission(task=TASK, artifacts={"": found}), CONTEXT)
    )
    right = found.get("a") is not None and (found["a"].kind, found["a"].content) == ("file", b"1\n")
    right = right and found.get("d/b") == Entry(content=b"2\n", mode=0o644)
    strays = {path for path, entry in found.items() if not (path == "d" and entry.kind == "dir")} - {"a", "d/b"}
    odd = "d" in found and found["d"].kind != "dir"  # no file system holds it, and it must not pass either
    assert not passed or (right and not strays - {"d"})
    assert passed or not right or bool(strays) or odd
    try:
        sources = candidate_files(Submission(task=TASK, artifacts={"": found}), "")
    except Malformed:
        return
    assert all(entry.kind in ("file", "dir") for entry in found.values()) and len(sources) >= 1


@target(
    damaged({"total": 3, "names": ["a"]}).map(lambda d: json.dumps(d).encode())
    | st.binary(max_size=30)
    | st.sampled_from([b'{"total": 3, "names": ["a"], "total": 3}', b'{"names":["a"],"total":3.0}', b"[" * 9000])
)
def documents(content: bytes) -> None:
    verifier = JsonState(lambda task: {"total": 3, "names": ["a"]}, path="out.json")
    submission = Submission(task=TASK, artifacts={"out.json": {"": Entry(content=content)}})
    if verdict(verifier.verify(submission, CONTEXT)):
        found = json.loads(content)
        assert repr(found) in ("{'total': 3, 'names': ['a']}", "{'names': ['a'], 'total': 3}")


@target(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(["a", "b", "..x", "new\nline", "ü", "c" * 200]), min_size=1, max_size=3),
            st.sampled_from(["file", "dir", "link", "fifo", "socket", "hard", "sparse"]),
        ),
        max_size=8,
    )
)
def folders(steps: list[tuple[list[str], str]]) -> None:
    """The intake itself, on a real folder: it follows nothing, waits for nothing, and keeps to its limits."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        outside = root.parent / f"{root.name}-outside"
        for parts, kind in steps:
            _make(root.joinpath(*parts), kind, outside)
        descriptor = os.open(root, tree.FOLDER)
        try:
            found = tree.collect(descriptor, "", max_bytes=1000, max_files=20)
        except AgentError:
            assert any(kind == "sparse" for _, kind in steps) or len(list(root.rglob("*"))) > 20
            return
        finally:
            os.close(descriptor)
        assert set(found) == {str(path.relative_to(root)) for path in root.rglob("*")}
        assert sum(len(entry.content) for entry in found.values() if entry.kind == "file") <= 1000
        for path, entry in found.items():
            real = root / path
            kind = "link" if real.is_symlink() else "dir" if real.is_dir() else "file" if real.is_file() else "special"
            assert entry.kind == kind


def _make(path: Path, kind: str, outside: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "dir":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(outside)
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
        elif kind == "hard":
            os.link(next(p for p in path.parent.iterdir() if p.is_file() and not p.is_symlink()), path)
        elif kind == "sparse":
            with path.open("xb") as file:
                file.truncate(1 << 40)
        else:
            with path.open("xb") as file:
                file.write(b"text")
    except (OSError, StopIteration):
        return


# Git --------------------------------------------------------------------------------------------------------------

WANTED = {"a": b"1\n", "d/b": b"2\n"}
REPOSITORY = GitState(lambda task: GitExpected(branches={"main": WANTED}, head="main"))


def stored(objects: dict[str, Entry], kind: str, data: bytes) -> bytes:
    """An object, laid down like git does; its name."""
    raw = f"{kind} {len(data)}\0".encode() + data
    name = hashlib.sha1(raw).hexdigest()
    objects[f"objects/{name[:2]}/{name[2:]}"] = Entry(content=zlib.compress(raw))
    return bytes.fromhex(name)


def repository(files: Mapping[str, bytes], mode: bytes = b"100644") -> dict[str, Entry]:
    """A repository whose branch main holds these files."""
    objects: dict[str, Entry] = {}

    def folder(prefix: str) -> bytes:
        lines = {}
        for path, content in files.items():
            if path.startswith(prefix):
                head, slash, _ = path[len(prefix) :].partition("/")
                if head not in lines:
                    below = folder(f"{prefix}{head}/") if slash else stored(objects, "blob", content)
                    lines[head] = (b"40000 " if slash else mode + b" ") + head.encode() + b"\0" + below
        return stored(objects, "tree", b"".join(line for _, line in sorted(lines.items())))

    commit = b"tree " + folder("").hex().encode() + b"\nauthor a <a> 0 +0000\n\nmessage\n"
    objects["refs/heads/main"] = Entry(content=stored(objects, "commit", commit).hex().encode() + b"\n")
    return {**objects, "HEAD": Entry(content=b"ref: refs/heads/main\n")}


@target(
    st.tuples(
        st.dictionaries(
            st.sampled_from(["a", "d/b", "d/c", "..", "d/.git", "e", ""]), st.binary(max_size=4), max_size=3
        )
        | st.just(WANTED),
        st.sampled_from([b"100644", b"100644", b"100755", b"120000", b"160000", b"40000"]),
        st.lists(st.tuples(st.integers(0, 30), st.integers(0, 400), st.integers(0, 255)), max_size=2),
    )
)
def repositories(given: tuple[Mapping[str, bytes], bytes, list[tuple[int, int, int]]]) -> None:
    files, mode, damage = given
    found = repository(files, mode)
    for which, at, value in damage:
        path = sorted(found)[which % len(found)]
        content = bytearray(found[path].content)
        if content:
            content[at % len(content)] = value
        found[path] = Entry(content=bytes(content))
    try:
        wrong = REPOSITORY._differences(REPOSITORY.expected(TASK), found)
    except Malformed:
        return
    right = dict(files) == WANTED and mode in (b"100644", b"100755")
    assert bool(wrong) or right
    assert not wrong or not right or bool(damage)


def test_trees_that_hold_each_other_a_billion_times_are_refused() -> None:
    objects = repository({})
    below = stored(objects, "tree", b"")
    for _ in range(30):
        below = stored(objects, "tree", b"40000 a\0" + below + b"40000 b\0" + below)
    commit = stored(objects, "commit", b"tree " + below.hex().encode() + b"\n\nbomb\n")
    objects["refs/heads/main"] = Entry(content=commit.hex().encode())
    began = time.thread_time()
    with pytest.raises(Malformed, match="too deep or too wide"):
        REPOSITORY._differences(REPOSITORY.expected(TASK), objects)
    assert time.thread_time() - began < SLOWEST


# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_fuzz(name: str) -> None:
    assert fuzz(name, SHORT) >= SHORT // 4  # small spaces are exhausted sooner


@pytest.mark.skipif(not FULL, reason="ten minutes of fuzzing run with AGENTRL_FULL=1")
@pytest.mark.timeout(3600)
def test_ten_minutes_of_fuzzing_find_nothing(evidence: Callable[[str, Any], None]) -> None:
    began, worked, number = time.monotonic(), time.process_time(), int(time.time())
    first = number
    seen: Counter[str] = Counter()
    while time.monotonic() - began < 60 * MINUTES:
        for name in TARGETS:
            seen[name] += fuzz(name, 400, number)
        number += 1
    assert set(seen) == set(TARGETS) and min(seen.values()) >= 100  # fuzz() itself raises at the first find
    evidence(
        "soak-fuzz",
        {
            "seconds": round(time.monotonic() - began),
            "processor_seconds": round(time.process_time() - worked),
            "examples": sum(seen.values()),
            "by_target": dict(seen),
            "first_seed": first,
            "found": 0,
        },
    )


PUMPED = [
    '"',
    '\\"',
    "\\\\",
    "{",
    "[",
    "[[",
    '{"a":',
    "(",
    "-",
    "1",
    "9",
    ",",
    ".",
    "<",
    "</",
    "<answer>",
    "\\boxed{",
    "```",
    "#",
    "\\frac{",
    "x^",
    "e",
    "\n",
    "x(",
    "a&nbsp;",
    "é",
    "/*",
    "=",
]
LENGTH = 60_000


@pytest.mark.parametrize("start", ["", '"', "<answer>4", "<answer>4</answer><", "\\boxed{", '{"a": "', "4"])
def test_what_is_repeated_a_hundred_thousand_times_costs_no_more_than_its_length(start: str) -> None:
    """A parser that goes back over what it has read would take minutes, and with it the whole run."""
    answers = [
        Answer(lambda task: "4", extract=how, kind=kind)
        for how in ("whole", "tag", "boxed", "last_line")
        for kind in ("exact", "numeric", "set", "expression")
    ]
    for unit in [*PUMPED, " ", "\t"]:
        text = start + unit * (LENGTH // len(unit))
        began = time.thread_time()
        for read in (parse_json, lambda text: read_reply(text, [Criterion("correct", "?")])):
            try:
                read(text)
            except Malformed:
                continue
        for verifier in answers:
            passes(verifier, text)
        assert time.thread_time() - began < SLOWEST, unit
