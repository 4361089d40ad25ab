"""`FinalState`: the workspace must hold exactly the expected files, besides the side effects that were declared."""

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
"""What a path must be: an entry, a file's content, None for "must not exist", or a test of a file's bytes."""


class FinalState(Verifier):
    """Compares a tree of the workspace with the one that the task expects.

    A path that is neither expected nor matched by `allow` is a side effect, and side effects fail the submission.
    Folders that an expected file needs are expected with it.
    """

    def __init__(
        self,
        expected: Callable[[Task], Mapping[str, Content]],
        *,
        path: str = "",
        allow: Sequence[str] = (),
        modes: bool = False,
        final_newline: Literal["exact", "any"] = "exact",
        score: Literal["all", "fraction"] = "all",
        empty_folders: Literal["count", "ignore"] = "count",
        max_bytes: int = 4 << 20,
        max_files: int = 2_000,
    ) -> None:
        """
        Args:
            expected: the tree that a task asks for, by path below `path`.
            path: the part of the workspace that is looked at.
            allow: patterns (`*` also matches `/`) of paths that may exist besides: declared side effects.
            modes: compare permission bits too, for every `Entry`.
            final_newline: `any` forgives a missing or doubled newline at the end of a file.
            score: all or nothing, or the share of expected paths that are right (0 as soon as a side effect is found).
            empty_folders: whether a folder that nobody asked for is a side effect.
            max_bytes: more than this in all is a failure of the agent.
            max_files: likewise.
        """
        self.artifacts = (Artifact(path=path, max_bytes=max_bytes, max_files=max_files),)
        self.expected, self.path, self.allow, self.modes = expected, path, tuple(allow), modes
        self.final_newline, self.score, self.empty_folders = final_newline, score, empty_folders

    async def probe(self, context: Context) -> None:
        """Nothing outside this process is needed."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        found = submission.artifacts.get(self.path, {})
        expected = dict(self.expected(submission.task))
        if not expected:
            raise VerifierError(f"task {submission.task.id} expects nothing: an untouched workspace would pass")
        wrong = [line for path, content in expected.items() if (line := self._wrong(path, content, found.get(path)))]
        strays = self._strays(expected, found)
        share = 1.0 - len(wrong) / len(expected)
        score = 0.0 if strays or (self.score == "all" and wrong) else share
        lines = [f"{len(expected) - len(wrong)} of {len(expected)} expected paths are right", *wrong[:20]]
        lines += [f"side effect: {path[:200]!r}" for path in strays[:20]]
        return Verdict(
            score=score,
            breakdown={"paths": share, "side_effects": float(len(strays))},
            evidence=tuple(lines),
            verifier=self.version,
        )

    def _wrong(self, path: str, content: Content, entry: Entry | None) -> str | None:
        """Why a path is not what was expected, without saying what was; None when it is right."""
        if content is None:
            return None if entry is None else f"{path}: should not exist"
        if entry is None:
            return f"{path}: missing"
        wanted = content if isinstance(content, Entry) else None
        kind = wanted.kind if wanted else "file"
        if kind == "special":
            raise AuthoringError(f"FinalState: {path!r} cannot be expected to be a special file")
        if entry.kind != kind:
            return f"{path}: is a {entry.kind}, not a {kind}"
        if self.modes and wanted is not None and entry.mode & 0o7777 != wanted.mode & 0o7777:
            return f"{path}: has other permissions than asked for"
        if kind == "dir":
            return None
        if callable(content):
            return None if content(entry.content) is True else f"{path}: content does not hold what was asked for"
        want = wanted.content if wanted else content.encode() if isinstance(content, str) else content
        assert isinstance(want, bytes)
        if kind == "file" and self.final_newline == "any":
            same = entry.content.rstrip(b"\n") == want.rstrip(b"\n")
        else:
            same = entry.content == want
        return None if same else f"{path}: content differs"

    def _strays(self, expected: Mapping[str, Content], found: Mapping[str, Entry]) -> list[str]:
        """Paths that nobody asked for."""
        needed = set(expected)
        for path, content in expected.items():
            while content is not None and (path := posixpath.dirname(path)):
                needed.add(path)
        sheltering: set[str] = set()  # folders whose files are judged one by one
        for path, entry in found.items():
            while entry.kind != "dir" and (path := posixpath.dirname(path)) and path not in sheltering:
                sheltering.add(path)
        strays = []
        for path, entry in sorted(found.items()):
            if path in needed or any(fnmatchcase(path, pattern) for pattern in self.allow):
                continue
            if entry.kind == "dir" and (self.empty_folders == "ignore" or path in sheltering):
                continue
            strays.append(path)
        return strays
