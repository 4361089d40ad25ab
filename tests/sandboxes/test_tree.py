"""Reading a hostile tree from the host: nothing is followed, and the digest sees everything and only what counts."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import AgentError
from agentrl.sandboxes import Entry
from agentrl.sandboxes.base import MTIME, SandboxSpec
from agentrl.sandboxes.snapshot import restore, save
from agentrl.sandboxes.tree import CHUNK, bytes_hash, collect, digest_of, lay_out, records

names = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=8)
entries = st.one_of(
    st.builds(Entry, st.just("file"), st.binary(max_size=64), st.sampled_from([0o644, 0o600, 0o755, 0o400, 0o4711])),
    st.builds(Entry, st.just("link"), st.binary(min_size=1, max_size=20).map(lambda b: b.replace(b"\0", b"."))),
)
trees = st.dictionaries(names.filter(lambda n: n not in (".", "..") and len(n.encode()) < 200), entries, max_size=6)


def same(uid: int, gid: int) -> tuple[int, int]:
    return 7, 7


def folder(path: Path) -> int:
    path.mkdir(parents=True)
    path.chmod(0o755)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


@given(tree=trees)
def test_the_digest_depends_on_the_entries_alone(
    tree: dict[str, Entry], tmp_path_factory: pytest.TempPathFactory
) -> None:
    top = tmp_path_factory.mktemp("tree")
    spec = SandboxSpec(files=dict(tree)).entries()
    one, two = folder(top / "one"), folder(top / "two")
    try:
        lay_out(one, spec)
        lay_out(two, dict(reversed(spec.items())))
        assert digest_of(records(one, same)) == digest_of(records(two, same))
        collected = collect(one, "", max_bytes=1 << 20, max_files=100)
        assert {path: (e.kind, e.content) for path, e in collected.items()} == {
            p: (e.kind, e.content) for p, e in spec.items()
        }
        three = folder(top / "three")
        restore(three, save(one))
        assert digest_of(records(three, same)) == digest_of(records(one, same))
        os.close(three)
    finally:
        os.close(one)
        os.close(two)


@given(content=st.binary(max_size=300), zeros=st.integers(0, 3 * CHUNK))
def test_a_hole_counts_like_written_zeros(content: bytes, zeros: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    top = tmp_path_factory.mktemp("holes")
    for name in ("hole", "zeros"):
        (top / name).mkdir()
        with open(top / name / "f", "wb") as file:
            if name == "hole":
                file.seek(zeros)
            else:
                file.write(b"\0" * zeros)
            file.write(content)
            file.truncate(zeros + len(content))
        os.utime(top / name / "f", (MTIME, MTIME))
    seen = []
    for name in ("hole", "zeros"):
        descriptor = os.open(top / name, os.O_RDONLY)
        seen.append(records(descriptor, same)[b"f"])
        os.close(descriptor)
    assert seen[0] == seen[1] and seen[0].content == bytes_hash(b"\0" * zeros + content)


def test_a_swapped_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    box = folder(tmp_path / "box")
    os.symlink(tmp_path / "outside", "dir", dir_fd=box)
    os.symlink(tmp_path / "outside" / "secret", "file", dir_fd=box)
    for path in ("dir/secret", "dir/..", "file/x"):
        with pytest.raises(OSError):
            collect(box, path, max_bytes=100, max_files=10)
    assert [e.kind for e in collect(box, "", max_bytes=100, max_files=10).values()] == ["link", "link"]
    os.close(box)


def test_files_that_forbid_reading_are_read_and_left_as_they_were(tmp_path: Path) -> None:
    box = folder(tmp_path / "box")
    lay_out(box, {"d": Entry("dir", mode=0o000), "f": Entry("file", b"x", 0o000)})
    assert collect(box, "f", max_bytes=10, max_files=10) == {"": Entry("file", b"x", 0)}
    assert records(box, same)[b"f"].mode == 0 and records(box, same)[b"d"].mode == 0
    assert stat.S_IMODE(os.stat("f", dir_fd=box).st_mode) == 0
    os.chmod("d", 0o700, dir_fd=box)
    os.close(box)


def test_counts_and_sizes_are_bounded(tmp_path: Path) -> None:
    box = folder(tmp_path / "box")
    lay_out(box, {f"{n}": Entry("file", b"x" * 10) for n in range(5)})
    with pytest.raises(AgentError, match="more than 4 files"):
        collect(box, "", max_bytes=1000, max_files=4)
    with pytest.raises(AgentError, match="more than 49 bytes"):
        collect(box, "", max_bytes=49, max_files=10)
    assert len(collect(box, "", max_bytes=50, max_files=5)) == 5
    os.close(box)
