"""File trees, JSON documents and git repositories: what was asked for, and nothing else."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.sandboxes.base import Entry
from agentrl.verifiers.final_state import FinalState, GitExpected, GitState, JsonState, Repository
from agentrl.verifiers.values import Compare, Malformed

LONG = 3_000 if os.environ.get("AGENTRL_FULL") else 100
pytestmark = pytest.mark.timeout(3600)
Score = Callable[..., float]
TREE = {"out/a.txt": "hello\n", "out/b": b"\x00\x01", "gone": None}


def tree(**options: Any) -> FinalState:
    return FinalState(lambda task: TREE, **options)


def test_the_tree_that_was_asked_for(score: Score, submit: Any) -> None:
    right = {"out": Entry("dir", mode=0o755), "out/a.txt": "hello\n", "out/b": b"\x00\x01"}
    assert score(tree(), submit(files=right)) == 1.0
    wrong: list[dict[str, Any]] = [
        {},
        {"out/a.txt": "hello\n"},
        {**right, "out/a.txt": "hello"},
        {**right, "out/a.txt": Entry("link", b"/etc/passwd")},
        {**right, "out/a.txt": Entry("special")},
        {**right, "out/a.txt": Entry("dir")},
        {**right, "gone": ""},
        {**right, "left behind": "x"},
        {**right, "empty": Entry("dir")},
        {**right, "trap": Entry("special")},
        {**right, "link": Entry("link", b"out")},
        {"Out/a.txt": "hello\n", "Out/b": b"\x00\x01"},
        {"out/a.txt\u200b": "hello\n", "out/b": b"\x00\x01"},
    ]
    assert [score(tree(), submit(files=files)) for files in wrong] == [0.0] * len(wrong)


def test_declared_side_effects_and_looser_comparisons(score: Score, submit: Any) -> None:
    right = {"out/a.txt": "hello\n", "out/b": b"\x00\x01"}
    assert score(tree(allow=["*.log", "cache*"]), submit(files={**right, "x/y.log": "", "cache/z": "1"})) == 1.0
    assert score(tree(allow=["*.log"]), submit(files={**right, "x/y.log": "", "x/z": "1"})) == 0.0
    assert score(tree(final_newline="any"), submit(files={**right, "out/a.txt": "hello"})) == 1.0
    assert score(tree(empty_folders="ignore"), submit(files={**right, "e": Entry("dir")})) == 1.0
    assert score(tree(score="fraction"), submit(files={"out/a.txt": "hello\n"})) == pytest.approx(2 / 3)
    assert score(tree(score="fraction"), submit(files={"out/a.txt": "hello\n", "stray": ""})) == 0.0


def test_the_last_newline_is_one_newline(score: Score, submit: Any) -> None:
    """`any` accepts that the last newline is missing or was added, and nothing more."""
    verifier = FinalState(lambda task: {"a": "hello\n", "b": "hello", "empty": "", "line": "\n"}, final_newline="any")
    right = {"a": "hello\n", "b": "hello", "empty": "", "line": "\n"}
    for path, content, expected in (
        ("a", "hello", 1.0),
        ("b", "hello\n", 1.0),
        ("a", "hello\n\n", 0.0),
        ("b", "hello\n\n", 0.0),
        ("a", "hello" + "\n" * 100_000, 0.0),
        ("a", "hello\r\n", 0.0),
        ("a", "\nhello\n", 0.0),
        ("a", "hello \n", 0.0),
        ("empty", "\n", 0.0),
        ("line", "", 0.0),
    ):
        assert score(verifier, submit(files={**right, path: content})) == expected, (path, content[:20])


def test_a_file_that_was_to_be_left_alone_keeps_every_byte(score: Score, submit: Any) -> None:
    """The tolerance is for what the task has written: `before` says what it finds."""
    before = {"kept": Entry(content=b"one\n"), "changed": Entry(content=b"two\n")}
    after = {"kept": Entry(content=b"one\n"), "changed": Entry(content=b"three\n")}
    verifier = FinalState(lambda task: after, before=lambda task: before, final_newline="any")
    assert score(verifier, submit(files={"kept": "one\n", "changed": "three"})) == 1.0
    assert score(verifier, submit(files={"kept": "one", "changed": "three\n"})) == 0.0
    assert score(verifier, submit(files={"kept": "one\n\n", "changed": "three\n"})) == 0.0


def test_modes_links_and_content_checks(score: Score, submit: Any) -> None:
    wanted: dict[str, Any] = {
        "run": Entry(content=b"#!", mode=0o755),
        "l": Entry("link", b"run"),
        "n": lambda content: content.isdigit(),
    }
    verifier = FinalState(lambda task: wanted, modes=True)
    right = {"run": Entry(content=b"#!", mode=0o755), "l": Entry("link", b"run"), "n": b"123"}
    assert score(verifier, submit(files=right)) == 1.0
    assert score(verifier, submit(files={**right, "run": Entry(content=b"#!", mode=0o644)})) == 0.0
    assert score(verifier, submit(files={**right, "run": Entry(content=b"#!", mode=0o4755)})) == 0.0
    assert score(verifier, submit(files={**right, "l": Entry("link", b"n")})) == 0.0
    assert score(verifier, submit(files={**right, "n": b"x"})) == 0.0


def test_a_task_that_expects_nothing_is_our_own_fault(graded: Callable[..., Any], submit: Any) -> None:
    outcome, _ = graded(FinalState(lambda task: {}), submit())
    assert (outcome.score, outcome.alarm) == (0.0, True)


DOCUMENT = {"total": 3, "rate": 0.5, "items": [{"id": 1, "ok": True}], "at": "now"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"total":3,"rate":0.5,"items":[{"id":1,"ok":true}],"at":"now"}', 1.0),
        ('{"at":"later","items":[{"ok":true,"id":1}],"rate":0.5,"total":3}', 1.0),
        ('{"total":3.0,"rate":0.5,"items":[{"id":1,"ok":true}],"at":"now"}', 0.0),
        ('{"total":3,"rate":0.5,"items":[{"id":1,"ok":1}],"at":"now"}', 0.0),
        ('{"total":3,"rate":0.5,"items":[{"id":1,"ok":true}]}', 1.0),
        ('{"total":3,"rate":0.5,"items":[{"id":1,"ok":true}],"at":"now","more":null}', 0.0),
        ('{"total":3,"total":3,"rate":0.5,"items":[{"id":1,"ok":true}],"at":"now"}', 0.0),
        ('{"total":NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
        ("\ufeff{}", 0.0),
    ],
)
def test_documents(content: str, expected: float, score: Score, submit: Any) -> None:
    verifier = JsonState(lambda task: DOCUMENT, path="out.json", allow=["/at"])
    assert score(verifier, submit(files={"": content}, at="out.json")) == expected


def test_a_document_with_tolerance(score: Score, submit: Any) -> None:
    verifier = JsonState(lambda task: {"x": 0.3}, path="o", compare=Compare(tolerance=1e-9))
    assert score(verifier, submit(files={"": '{"x": 0.30000000000000004}'}, at="o")) == 1.0
    assert score(verifier, submit(files={"": Entry("link", b"/x")}, at="o")) == 0.0
    assert score(verifier, submit(at="o")) == 0.0


# git --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Callable[[str], dict[str, Entry]]:
    """A repository with a deep history; the argument is a command to run in it before its `.git` is read."""
    names = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {**names, "PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}

    def run(command: str) -> dict[str, Entry]:
        subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=env, check=True, capture_output=True)
        git = tmp_path / ".git"
        found = {}
        for path in sorted(git.rglob("*")):
            if path.is_symlink():
                found[str(path.relative_to(git))] = Entry("link", os.readlink(path).encode())
            elif path.is_file():
                found[str(path.relative_to(git))] = Entry(content=path.read_bytes())
        return found

    run(
        "git init -q -b main; i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); done > big; mkdir s;"
        "echo x > s/a;"
        "ln -s big l; git add -A; git commit -qm one; git checkout -qb topic;"
        "for i in 1 2 3 4; do echo $i > big.tmp; cat big >> big.tmp; mv big.tmp big; git commit -qam c$i; done;"
        "printf '#!/bin/sh\\n' > run; chmod +x run; git add run; git commit -qm 'last one'"
    )
    return run


LAYOUTS = [
    "true",
    "git gc -q --aggressive",
    "git repack -qadf && git pack-refs --all",
    "git gc -q; git tag -d x || true",
]


def test_repositories_are_read_like_git_reads_them(
    repository: Callable[[str], dict[str, Entry]], tmp_path: Path
) -> None:
    for layout in LAYOUTS:
        found = Repository(repository(layout))
        big = (tmp_path / "big").read_bytes()
        assert found.files("topic") == {
            "big": Entry(content=big),
            "l": Entry("link", b"big", 0o777),
            "run": Entry(content=b"#!/bin/sh\n", mode=0o755),
            "s/a": Entry(content=b"x\n"),
        }
        assert (found.head, found.commit("topic").message, len(found.ancestors("topic"))) == ("topic", "last one", 6)
        assert set(found.references) == {"refs/heads/main", "refs/heads/topic"}


def test_git_state(repository: Callable[[str], dict[str, Entry]], tmp_path: Path, score: Score, submit: Any) -> None:
    entries = repository("true")
    base = Repository(entries).commit("main").id
    files = Repository(entries).files("topic")
    wanted = GitExpected(
        branches={"topic": files},
        keeps={"main": base, "topic": base},
        head="topic",
        check=lambda r: len(r.references) == 2,
    )
    verifier = GitState(lambda task: wanted)
    assert score(verifier, submit(files=entries, at=".git")) == 1.0
    hooked = {**entries, "hooks/post-checkout": b"#!/bin/sh\nexit 1\n", "config": b"[core]\n\tfsmonitor = /tmp/evil\n"}
    assert score(verifier, submit(files=hooked, at=".git")) == 1.0
    name, loose = next((path, e) for path, e in entries.items() if path.startswith("objects/"))
    wrong: list[dict[str, Entry | bytes]] = [
        {},
        {**entries, "refs/tags/v1": base.encode()},
        {**entries, "refs/heads/extra": base.encode()},
        {**entries, "HEAD": b"ref: refs/heads/main\n"},
        {**entries, "refs/heads/topic": base.encode()},
        {**entries, "refs/heads/topic": b"ref: refs/heads/main"},
        {**entries, "refs/heads/topic": b"0" * 40},
        {**entries, "objects/info/alternates": b"/somewhere/objects\n"},
        {**entries, name: loose.content[:-3]},
        {**entries, "objects/00/" + "0" * 38: loose.content},
        {**entries, "objects/link": Entry("link", b"/etc")},
        {**entries, "objects/pack/pack-" + "1" * 40 + ".pack": b"PACK" + b"\x00" * 100},
    ]
    assert [score(verifier, submit(files=files, at=".git")) for files in wrong] == [0.0] * len(wrong)
    rewritten = repository("git checkout -q --orphan fresh; git commit -qm all; git branch -qM fresh topic")
    assert score(verifier, submit(files=rewritten, at=".git")) == 0.0


@settings(max_examples=LONG)
@given(st.data())
def test_fuzz_a_damaged_pack_is_refused_or_harmless(data: st.DataObject) -> None:
    pack = _pack()
    damaged = bytearray(pack)
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    body = bytes(damaged[:-20])
    import hashlib

    sealed = body + hashlib.sha1(body).digest()  # so that the damage gets past the trailer
    try:
        found = Repository({"objects/pack/pack-aa.pack": Entry(content=sealed)})
    except Malformed:
        return
    assert all(len(name) == 40 for name in found._objects)


def _pack() -> bytes:
    """A small pack with a blob, and a delta on it by offset."""
    import hashlib
    import struct
    import zlib

    base = b"0123456789" * 10
    delta = bytes([100, 105, 0x90, 100, 5]) + b"hello"
    first = bytes([0x80 | 3 << 4 | 100 & 15, 100 >> 4]) + zlib.compress(base)
    back = len(first)
    second = bytes([6 << 4 | len(delta)]) + bytes([back]) + zlib.compress(delta)
    body = b"PACK" + struct.pack(">II", 2, 2) + first + second
    return body + hashlib.sha1(body).digest()
