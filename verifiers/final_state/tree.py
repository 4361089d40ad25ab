"""`FinalState`: the workspace must hold exactly the expected files, besides declared side effects."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from agentrl.errors import AuthoringError, VerifierError
from agentrl.sandboxes.base import Entry
from agentrl.types import Task, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier

Content = Entry | bytes | str | None | Callable[[bytes], bool]
"""What a path must be: an entry, a file's content, None for "must not exist", or a check of a file's bytes."""


class FinalState(Verifier):
    """Compares a tree of the workspace with the one that the task expects.

    A path that is neither expected nor matched by `allow` is a side effect, and a side effect fails the submission. The
    folders of an expected file are expected with it.
    """

    def __init__(
        self,
        expected: Callable[[Task], Mapping[str, Content]],
        *,
        path: str = "",
        allow: Sequence[str] = (),
        before: Callable[[Task], Mapping[str, Content]] | None = None,
        modes: bool = False,
        final_newline: Literal["exact", "any"] = "exact",
        score: Literal["all", "fraction"] = "all",
        empty_folders: Literal["count", "ignore"] = "count",
        max_bytes: int = 4 << 20,
        max_files: int = 2_000,
    ) -> None:
        """
        Args:
            expected: the tree that a task asks for, by path relative to `path`.
            path: the part of the workspace that is compared.
            allow: patterns (`*` also matches `/`) of other paths that may exist: declared side effects.
            before: the tree that the episode begins with. A file that is expected as it was must keep every byte,
                whatever `final_newline` says.
            modes: compare permission bits too, for every `Entry`.
            final_newline: `any` accepts that the newline at the end of a file is missing, or that one was added.
            score: all or nothing, or the share of expected paths that are right (0 if there is a side effect).
            empty_folders: whether an unexpected empty folder is a side effect.
            max_bytes: a larger tree fails.
            max_files: a tree with more files fails.
        """
        self.artifacts = (Artifact(path=path, max_bytes=max_bytes, max_files=max_files),)
        self.expected, self.path, self.allow, self.modes = expected, path, tuple(allow), modes
        self.final_newline, self.score, self.empty_folders = final_newline, score, empty_folders
        self.before = before

    async def probe(self, context: Context) -> None:
        """Nothing outside this process is needed."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        entries = submission.artifacts.get(self.path, {})
        expected = dict(self.expected(submission.task))
        if not expected:
            raise VerifierError(f"task {submission.task.id} expects nothing: an untouched workspace would pass")
        before = self.before(submission.task) if self.before else {}
        wrong = []
        for path, content in expected.items():
            kept = path in before and before[path] == content
            if line := self._wrong(path, content, entries.get(path), exact=kept or self.final_newline == "exact"):
                wrong.append(line)
        side_effects = self._side_effects(expected, entries)
        share = 1.0 - len(wrong) / len(expected)
        score = 0.0 if side_effects or (self.score == "all" and wrong) else share
        lines = [f"{len(expected) - len(wrong)} of {len(expected)} expected paths are right", *wrong[:20]]
        lines += [f"side effect: {path[:200]!r}" for path in side_effects[:20]]
        return Verdict(
            score=score,
            breakdown={"paths": share, "side_effects": float(len(side_effects))},
            evidence=tuple(lines),
            verifier=self.version,
        )

    def _wrong(self, path: str, content: Content, entry: Entry | None, exact: bool) -> str | None:
        """Return why a path is not as expected, without saying what is expected; None if it is right."""
        if content is None:
            return None if entry is None else f"{path}: should not exist"
        if entry is None:
            return f"{path}: missing"
        expected = content if isinstance(content, Entry) else None
        kind = expected.kind if expected else "file"
        if kind == "special":
            raise AuthoringError(f"FinalState: {path!r} cannot be expected to be a special file")
        if entry.kind != kind:
            return f"{path}: is a {entry.kind}, not a {kind}"
        if self.modes and expected is not None and entry.mode & 0o7777 != expected.mode & 0o7777:
            return f"{path}: has other permissions than asked for"
        if kind == "dir":
            return None
        if callable(content):
            return None if content(entry.content) is True else f"{path}: content does not hold what was asked for"
        right = expected.content if expected else content.encode() if isinstance(content, str) else content
        assert isinstance(right, bytes)
        actual = entry.content
        if kind == "file" and not exact and actual.strip(b"\n") and right.strip(b"\n"):
            actual, right = actual.removesuffix(b"\n"), right.removesuffix(b"\n")
        return None if actual == right else f"{path}: content differs"

    def _side_effects(self, expected: Mapping[str, Content], entries: Mapping[str, Entry]) -> list[str]:
        """Return the paths that are neither expected nor allowed."""
        needed = set(expected)
        for path, content in expected.items():
            while content is not None and (path := posixpath.dirname(path)):
                needed.add(path)
        occupied: set[str] = set()  # folders whose files are judged one by one
        for path, entry in entries.items():
            while entry.kind != "dir" and (path := posixpath.dirname(path)) and path not in occupied:
                occupied.add(path)
        return [
            path
            for path, entry in sorted(entries.items())
            if path not in needed
            and not any(fnmatchcase(path, pattern) for pattern in self.allow)
            and not (entry.kind == "dir" and (self.empty_folders == "ignore" or path in occupied))
        ]
