"""Git repositories are read as data: pinned and hashed, and nothing that they hold or configure runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.errors import UserError
from agentrl.repos import git, root
from agentrl.repos.lock import lock_of
from tests.repos import gits, tiny

FILES = {"tinysums/__init__.py": tiny.CODE, "tests/test_sums.py": tiny.TESTS, "pyproject.toml": tiny.PYPROJECT}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    git.files.cache_clear()
    yield tmp_path / "cache"


def test_a_repository_is_pinned_to_a_commit_and_read_without_a_checkout(tmp_path: Path) -> None:
    """What is not committed, links and submodules are left out; an older commit has its own files."""
    folder = tmp_path / "repo"
    first, second = gits.repository(folder, [{"a.py": "1\n"}, {"a.py": "2\n", "b/c.py": "3\n"}])
    (folder / "a.py").write_text("not committed")
    (folder / "link").symlink_to("/etc/passwd")
    gits.git(folder, "add", "link")
    gits.git(folder, "update-index", "--add", "--cacheinfo", f"160000,{first},sub")
    gits.git(folder, "commit", "--quiet", "-m", "a link and a submodule")
    third = gits.git(folder, "rev-parse", "HEAD")
    now = git.pin(str(folder), git.DEPTH)
    assert (now.where, git.files(now, third)) == (f"git+file://{folder}@{third}", {"a.py": b"2\n", "b/c.py": b"3\n"})
    then = git.pin(f"git+file://{folder}@{first}")
    assert (then.commit, git.files(then, first)) == (first, {"a.py": b"1\n"})
    assert [commit.id for commit in git.commits(now, 10)] == [third, second, first]
    assert git.changed(now, git.commits(now, 10)[1]) == ["a.py", "b/c.py"]
    assert git.pin(f"git+file://{folder}@main").commit == third


def test_nothing_that_a_repository_configures_runs(tmp_path: Path) -> None:
    """Hooks, filters, a file system monitor, aliases and upload hooks of the folder: none is started."""
    folder, flag = tmp_path / "repo", tmp_path / "ran"
    gits.repository(folder, [{**FILES, ".gitattributes": "*.py filter=evil diff=evil export-ignore\n"}])
    script = tmp_path / "evil.sh"
    script.write_text(f"#!/bin/sh\necho $0 >> {flag}\ncat\n")
    script.chmod(0o755)
    for key in ("filter.evil.smudge", "filter.evil.clean", "filter.evil.process", "core.fsmonitor", "core.sshCommand",
                "diff.external", "diff.evil.textconv", "uploadpack.packObjectsHook", "core.pager", "core.askPass",
                "credential.helper", "core.alternateRefsCommand", "core.gitProxy"):  # fmt: skip
        gits.git(folder, "config", key, str(script))
    for hook in ("post-checkout", "post-merge", "reference-transaction", "post-index-change", "pre-auto-gc"):
        (folder / ".git" / "hooks" / hook).write_text(script.read_text())
        (folder / ".git" / "hooks" / hook).chmod(0o755)
    (folder / ".git" / "info" / "attributes").write_text("* filter=evil\n")
    pinned = git.pin(str(folder))
    assert git.files(pinned, pinned.commit)["tests/test_sums.py"] == tiny.TESTS.encode()
    assert not flag.exists()


def test_the_lock_of_a_repository_gives_its_tree_again_or_says_that_it_differs(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "repo"
    first, _ = gits.repository(folder, [FILES, {"tinysums/__init__.py": "other = 1\n"}])
    lock = lock_of(f"git+file://{folder}@{first}", (), lambda text: None)
    assert (lock.kind, lock.where, lock.version) == ("git", f"git+file://{folder}@{first}", "1.0")
    read_again = root.source_of(lock)
    assert read_again.files["tinysums/__init__.py"] == tiny.CODE.encode()
    with pytest.raises(UserError, match="its hash differs"):
        root.source_of(root.Lock.from_json({**lock.to_json(), "sha256": "0" * 64}))
    assert lock_of(str(folder), (), lambda text: None).sha256 != lock.sha256


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("git@host:x/y.git", "fetched over https"),
        ("ssh://host/x.git", "fetched over https"),
        ("git+ext::sh -c whoami", "fetched over https"),
        ("https://me:secret@host/x.git", "no user, password"),
        ("https://host/x.tar.gz", "names an archive"),
        ("git+file:///nowhere/at/all", "there is no folder"),
        ("git+https://host/x@--upload-pack=evil", "no branch, tag or commit"),
        ("git+https://127.0.0.1:9/x.git", "cannot be read by git"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_with_the_reason(what: str, said: str, cache: Path) -> None:
    assert git.is_git(what)
    with pytest.raises(UserError, match=said):
        git.pin(what)
    assert not cache.exists() or list(cache.rglob("*.pack")) == []


def test_a_repository_without_that_commit_or_too_large_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing half fetched stays behind."""
    folder = tmp_path / "repo"
    gits.repository(folder, [{"a.py": "1\n"}])
    with pytest.raises(UserError, match="no such branch, tag or commit"):
        git.pin(f"git+file://{folder}@nothere")
    with pytest.raises(UserError, match="cannot be read by git|no such branch"):
        git.pin(f"git+file://{folder}@{'1' * 40}")
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot be read by git"):
        git.pin(str(tmp_path / "empty"))
    (folder / "noise").write_bytes(__import__("random").Random(0).randbytes(300_000))
    gits.git(folder, "add", "noise")
    gits.git(folder, "commit", "--quiet", "-m", "noise")
    monkeypatch.setattr(git, "MAX_PACK", 100_000)
    with pytest.raises(UserError, match="larger than"):
        git.pin(str(folder))
    monkeypatch.undo()
    monkeypatch.setenv("AGENTRL_CACHE", str(cache))
    monkeypatch.setattr(git, "MAX_FILES", 0)
    pinned = git.pin(str(folder))
    with pytest.raises(UserError, match="holds more than"):
        git.files(pinned, pinned.commit)
    assert [path.name for path in (cache / "repos" / "git").iterdir()] == [pinned.folder.name]
