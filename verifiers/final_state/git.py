"""`GitState`: a repository's branches must hold what the task expects, and its history must be intact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from agentrl.errors import AuthoringError
from agentrl.sandboxes.base import Entry, off_loop
from agentrl.types import Task, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier
from agentrl.verifiers.values import Malformed

from .document import verdict_on
from .gitobjects import Repository


@dataclass(frozen=True, slots=True, kw_only=True)
class GitExpected:
    """What a repository must look like."""

    branches: Mapping[str, Mapping[str, Entry | bytes | str]] = field(default_factory=dict)
    """Branch → all files of its last commit. An `Entry` also fixes kind and mode."""
    keeps: Mapping[str, str] = field(default_factory=dict)
    """Branch → a commit that must still be part of its history."""
    head: str | None = None
    """The branch that must be checked out."""
    check: Callable[[Repository], bool] | None = None
    """A further check of the parsed repository; only `True` is a pass."""


class GitState(Verifier):
    """Compares a repository's references and contents, parsed here from its bytes; git itself never runs."""

    def __init__(
        self,
        expected: Callable[[Task], GitExpected],
        *,
        path: str = ".git",
        allow: Sequence[str] = ("refs/stash", "refs/remotes/*"),
        max_bytes: int = 16 << 20,
    ) -> None:
        """
        Args:
            expected: what a task asks for.
            path: the `.git` folder in the workspace.
            allow: patterns of references that may exist besides the expected branches: declared side effects.
            max_bytes: a larger repository fails.
        """
        self.artifacts = (Artifact(path=path, max_bytes=max_bytes, max_files=10_000),)
        self.expected, self.path, self.allow = expected, path, tuple(allow)

    async def probe(self, context: Context) -> None:
        """Nothing outside this process is needed."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        expected = self.expected(submission.task)
        if not expected.branches and expected.check is None:
            raise AuthoringError("GitState: expect some branch or give a check; otherwise any repository would pass")
        try:
            differences = await off_loop(self._differences, expected, submission.artifacts.get(self.path, {}))
        except Malformed as error:
            differences = [f"the repository cannot be read: {error}"]
        return verdict_on(differences, self.version)

    def _differences(self, expected: GitExpected, entries: Mapping[str, Entry]) -> list[str]:
        repository = Repository(entries)
        lines: list[str] = []
        for branch, tree in expected.branches.items():
            if f"refs/heads/{branch}" not in repository.references:
                lines.append(f"branch {branch}: missing")
            else:
                lines += _tree(branch, tree, repository.files(branch))
        for branch, commit in expected.keeps.items():
            if f"refs/heads/{branch}" not in repository.references or commit not in repository.ancestors(branch):
                lines.append(f"branch {branch}: its history was rewritten")
        if expected.head is not None and repository.head != expected.head:
            lines.append("another branch is checked out")
        known = {f"refs/heads/{branch}" for branch in (*expected.branches, *expected.keeps)}
        for reference in repository.references:
            if reference not in known and not any(fnmatchcase(reference, pattern) for pattern in self.allow):
                lines.append(f"side effect: {reference[:100]!r}")
        if expected.check is not None and not lines and expected.check(repository) is not True:
            lines.append("the repository does not hold what was asked for")
        return lines


def _tree(branch: str, expected: Mapping[str, Entry | bytes | str], actual: Mapping[str, Entry]) -> list[str]:
    """Return how the files of a branch differ."""
    lines = []
    for path in {**expected, **actual}:
        if path not in actual or path not in expected:
            lines.append(f"{branch}: {path[:100]!r} {'is missing' if path not in actual else 'was not asked for'}")
            continue
        want, have = expected[path], actual[path]
        if isinstance(want, Entry):
            same = (want.kind, want.content) == (have.kind, have.content)
            same = same and (want.kind == "link" or want.mode & 0o111 == have.mode & 0o111)
        else:
            same = have.kind == "file" and have.content == (want.encode() if isinstance(want, str) else want)
        if not same:
            lines.append(f"{branch}: {path!r} differs")
    return lines
