"""What a policy or agent code wrote is read in bounded time, however it was written to be slow."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from agentrl.sandboxes.base import Entry, ExecResult
from agentrl.types import Verdict
from agentrl.verifiers.answer import Answer
from agentrl.verifiers.answer.expression import equivalent, parse
from agentrl.verifiers.base import Context, Submission, Verifier
from agentrl.verifiers.final_state.gitobjects import Repository
from agentrl.verifiers.grade import grade
from agentrl.verifiers.hidden_tests import HiddenTests, example
from agentrl.verifiers.values import Compare, Malformed, decode, encode, parse_json
from tests.pace import within

PRIME = (1 << 61) - 1
"""The modulus of Python's hash of numbers: its multiples all hash to 0."""
ENOUGH_S = 0.9
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("text", ["^".join("1" * 40), "1^(" * 25 + "1" + ")" * 25, "1^-" * 30 + "1"])
def test_a_tower_of_powers_is_read_once_per_level(text: str) -> None:
    """Each exponent is worked out once, not again for every power above it."""
    with within(ENOUGH_S):
        tree = parse(text)
        assert (tree.value(), equivalent(tree, parse("1"), b"secret")) == (1, True)


@pytest.mark.parametrize(
    "text",
    [
        "+".join(f"1/{10**59 + n}" for n in range(100)),
        "*".join(f"{10**59 + n}/{10**58 + n}" for n in range(100)),
        "(" + "+".join(f"1/{10**59 + n}" for n in range(90)) + ")^2",
        "x^(" + "+".join(f"1/{10**59 + n}" for n in range(90)) + ")",
        "+".join(["2^(1/(1/(" + "1" * 50 + "-" + "1" * 50 + "+2)))"] * 20),
        "((7^999)^999)^9",
        "+".join(["1/3"] * 60_000),
    ],
    ids=["sum", "product", "power", "exponent", "zero", "bits", "parts"],
)
def test_the_worst_expressions_take_well_under_a_second(text: str) -> None:
    with within(ENOUGH_S), suppress(ValueError):
        tree = parse(text, names=["x"])
        tree.value()
        equivalent(tree, tree, b"secret")


def numbers(count: int) -> list[Any]:
    return [{"i": str(PRIME * n)} for n in range(1, count)]


def frozensets(width: int, depth: int, at: int = 0) -> list[Any]:
    """Return forms of different frozensets that hash alike on every level."""
    if depth == 0:
        return [{"i": str(PRIME * (at * width + n + 1))} for n in range(width)]
    return [{"z": frozensets(width, depth - 1, at * width + n)} for n in range(width)]


@pytest.mark.parametrize(
    "form",
    [
        {"s": numbers(25_000)},
        {"z": numbers(25_000)},
        {"d": [[key, None] for key in numbers(20_000)]},
        {"s": [{"t": [key]} for key in numbers(15_000)]},
        {"s": [{"z": [key]} for key in numbers(15_000)]},
        {"l": [{"s": numbers(2_500)} for _ in range(10)]},
        {"s": frozensets(7, 4)},
    ],
    ids=["set", "frozenset", "dict", "tuples", "nested", "many", "deep"],
)
def test_members_that_hash_alike_are_refused_at_once(form: Any) -> None:
    reply = json.dumps(form)
    assert len(reply) <= 1 << 20
    with within(ENOUGH_S), suppress(Malformed):
        decode(parse_json(reply))
    with pytest.raises(Malformed, match="hash alike"):
        decode(form)


def test_a_list_of_numbers_that_hash_alike_is_refused_too() -> None:
    """A check of an author's may well put a list into a set."""
    with pytest.raises(Malformed, match="hash alike"):
        decode({"l": numbers(20_000)})
    assert decode({"l": numbers(2) * 10_000}) == [PRIME] * 10_000


@pytest.mark.parametrize(
    "value",
    [
        {-1, -2},
        {(x, y, z) for x in range(-9, 3) for y in range(-9, 3) for z in range(-9, 3)},
        {2**n for n in range(2_000)},
        {2.0**n for n in range(-1_000, 1_000)},
        {frozenset({-1, n}) for n in range(-50, 50)},
        set(range(20_000)),
        [3**n for n in range(1_000)],
    ],
    ids=["pair", "coordinates", "powers", "floats", "frozensets", "many", "list"],
)
def test_honest_values_that_hash_alike_by_chance_are_read(value: Any) -> None:
    assert decode(parse_json(json.dumps(encode(value)))) == value


@pytest.mark.parametrize("compare", [Compare(order=False), Compare(order=False, tolerance=1e-6)])
@pytest.mark.parametrize("kind", [int, float])
def test_lists_without_order_are_compared_in_bounded_time(compare: Compare, kind: type) -> None:
    expected = [kind(n) for n in range(5_000)]
    with within(ENOUGH_S):
        assert compare.same(expected, expected[::-1])
        assert not compare.same(expected, [kind(-1)] * 5_000)
        assert not compare.same([[kind(0)] * 20, *([kind(n)] for n in range(4_999))], [[kind(0)] * 20] * 5_000)


def test_lists_without_order_agree_where_some_matching_does() -> None:
    near = Compare(order=False, tolerance=0.1)
    assert near.same([1.0, 1.15], [1.08, 0.95])
    assert near.same([(1.0, 2), (1.05, 1)], [(1.01, 1), (1.04, 2)])
    assert Compare(order=False, numbers=True).same([1, 2.0, 3], [3.0, 1, 2])
    assert Compare(order=False, sequences=True).same([[1], (2,)], ((2,), [1]))
    assert not Compare(order=False).same([1, 2.0], [1.0, 2])
    assert Compare(order=False).same([None, True, "a", b"a", {1: 2}, {3}, 1], [{3}, {1: 2}, b"a", "a", True, 1, None])


def header(kind: int, size: int) -> bytes:
    data, size = bytearray([kind << 4 | size & 15]), size >> 4
    while size:
        data[-1] |= 128
        data.append(size & 127)
        size >>= 7
    return bytes(data)


def number(value: int) -> bytes:
    data = bytearray()
    while True:
        data.append(value & 127 | (128 if value > 127 else 0))
        value >>= 7
        if not value:
            return bytes(data)


def pack(*entries: tuple[int, bytes, bytes]) -> dict[str, Entry]:
    """Return a repository of one pack, with entries of (kind, base, content)."""
    body = b"PACK" + struct.pack(">II", 2, len(entries))
    for kind, base, content in entries:
        body += header(kind, len(content)) + base + zlib.compress(content, 9)
    return {"objects/pack/pack-0.pack": Entry(content=body + hashlib.sha1(body).digest()), "HEAD": Entry(content=b"")}


def blob_name(content: bytes) -> bytes:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).digest()


BASE = b"x" * 70_000
ONE_BYTE = b"\x90\x01"
"""Copy one byte of the base: two bytes of a delta that compress a thousandfold."""


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([(3, b"", BASE)] + [(7, blob_name(BASE), number(len(BASE)) + number(n) + ONE_BYTE * n)
         for n in range(2_000_000, 2_000_016)], "instructions"),
        ([(3, b"", BASE)] + [(7, blob_name(BASE), number(len(BASE)) + number(60_000 + n) + ONE_BYTE * (60_000 + n))
         for n in range(300)], "instructions"),
        ([(7, b"\1" * 20, b"\0" * (8 << 20)) for _ in range(30)], "too many bytes"),
        ([(3, b"", BASE)] + [(7, blob_name(BASE), number(len(BASE)) + number(0) + b"\0" * 8_000_000)] * 20, "bytes"),
        ([(3, b"", bytes(8 << 20)) for _ in range(30)], "too many bytes"),
    ],
    ids=["long deltas", "many deltas", "no base", "unused", "blobs"],
)  # fmt: skip
def test_a_small_pack_that_unpacks_to_much_work_is_refused_at_once(entries: Any, why: str) -> None:
    repository = pack(*entries)
    assert sum(len(entry.content) for entry in repository.values()) < 400_000
    with within(ENOUGH_S), pytest.raises(Malformed, match=why):
        Repository(repository)


def tree_entry(mode: str, name: str, target: bytes) -> bytes:
    return f"{mode} {name}\0".encode() + target


def test_a_tree_with_endless_names_or_entries_is_refused_at_once() -> None:
    """Neither the length of the paths nor the number of entries grows with what is listed again and again."""
    empty = blob_name(b"")
    wide = b"".join(tree_entry("100644", f"{n:x}", empty) for n in range(40_000))
    for names in (["n" * 1_000_000], [f"a{n}" for n in range(200)]):
        inner = hashlib.sha1(f"tree {len(wide)}\0".encode() + wide).digest()
        top = b"".join(tree_entry("40000", name, inner) for name in names)
        root = hashlib.sha1(f"tree {len(top)}\0".encode() + top).hexdigest()
        commit = f"tree {root}\nauthor a\n\nm\n".encode()
        repository = Repository(pack((3, b"", b""), (2, b"", wide), (2, b"", top), (1, b"", commit)))
        name = hashlib.sha1(f"commit {len(commit)}\0".encode() + commit).hexdigest()
        with within(ENOUGH_S), pytest.raises(Malformed, match="too deep or too wide|too long"):
            repository.files(name)


class Sleeps(Verifier):
    """Takes a quarter of a second."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        for _ in range(5):
            await asyncio.sleep(0.05)
        return Verdict(score=1.0)

    async def probe(self, context: Context) -> None:
        """All is well."""


def test_a_neighbours_deadline_does_not_run_while_the_event_loop_stands_still(submit: Any) -> None:
    async def beside() -> Any:
        async def block() -> None:
            for _ in range(4):
                await asyncio.sleep(0.15)
                time.sleep(0.6)  # what a parser does that never ends

        blocker = asyncio.ensure_future(block())
        outcome, _ = await grade(Sleeps(), submit(), Context(secret=b"s", boxes=None, deadline_s=0.45))  # type: ignore[arg-type]
        await blocker
        return outcome

    outcome = asyncio.run(beside())
    assert (outcome.grade, outcome.score, outcome.alarm, outcome.fault) == ("graded", 1.0, False, None)


class StarvedBox:
    """Its first runs are reported as too slow, after the event loop stood still."""

    def __init__(self, starved: int) -> None:
        self.starved, self.runs, self.aio = starved, 0, self

    def box(self, spec: object) -> Any:
        return self

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def python(self, source: str, message: bytes, *, timeout: float, reply_limit: int) -> ExecResult:
        self.runs += 1
        await asyncio.sleep(0.05)
        if self.runs <= self.starved:
            time.sleep(timeout)
            await asyncio.sleep(0)
            return ExecResult(exit_code=-9, timed_out=True)
        if self.starved < 0:
            return ExecResult(exit_code=-9, timed_out=True)
        steps = [{"return": {"i": "3"}}] * 1
        return ExecResult(exit_code=0, reply=json.dumps({"steps": steps}).encode())


@pytest.mark.parametrize(("starved", "score", "runs"), [(1, 1.0, 2), (0, 1.0, 1), (-1, 0.0, 1), (9, 0.0, 3)])
def test_a_run_that_was_late_while_this_process_starved_is_made_again(
    starved: int, score: float, runs: int, submit: Any
) -> None:
    box = StarvedBox(starved)
    cases = HiddenTests(lambda task, rng: [example("f", 1, expect=3)], seconds=0.4, repeat=False)
    context = Context(secret=b"s", boxes=box)
    submission = submit(files={"": "def f(x): return 3"}, at="solution.py")
    outcome, _ = asyncio.run(grade(cases, submission, context))
    assert (outcome.score, box.runs) == (score, runs)


def test_an_answer_that_is_a_tower_of_powers_is_wrong_at_once(score: Callable[..., float], submit: Any) -> None:
    with within(ENOUGH_S, time.process_time):
        assert score(Answer(lambda task: "2", kind="expression"), submit("^".join("1" * 55))) == 0.0
