"""`JsonState`: a JSON document must say what the task expects, besides the places that were declared free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from agentrl.types import Json, Task, Verdict
from agentrl.verifiers.base import Artifact, Context, Submission, Verifier
from agentrl.verifiers.values import EXACT, Compare, Malformed, parse_json


class JsonState(Verifier):
    """Compares a JSON file with what the task expects: strict JSON, exact types, every difference counted."""

    def __init__(
        self,
        expected: Callable[[Task], Json],
        *,
        path: str,
        allow: Sequence[str] = (),
        compare: Compare = EXACT,
        max_bytes: int = 1 << 20,
    ) -> None:
        """
        Args:
            expected: the document that a task asks for.
            path: the file, in the workspace.
            allow: patterns of JSON pointers (`/orders/*/updated`) that may hold anything: declared side effects.
            compare: how exact numbers must agree, at the leaves.
            max_bytes: a longer file fails.
        """
        self.artifacts = (Artifact(path=path, max_bytes=max_bytes),)
        self.expected, self.path, self.allow, self.compare = expected, path, tuple(allow), compare
        self.max_bytes = max_bytes

    async def probe(self, context: Context) -> None:
        """Nothing outside this process is needed."""

    async def verify(self, submission: Submission, context: Context) -> Verdict:
        entry = submission.artifacts.get(self.path, {}).get("")
        try:
            if entry is None or entry.kind != "file":
                raise Malformed(f"there is no file {self.path}")
            found = parse_json(entry.content, max_bytes=self.max_bytes)
        except Malformed as error:
            return Verdict(score=0.0, evidence=(str(error),), verifier=self.version)
        wanted = self.expected(submission.task)
        wrong = [p for p in differences(wanted, found, self.compare) if not any(fnmatchcase(p, a) for a in self.allow)]
        lines = [f"{len(wrong)} places differ", *(f"differs: {pointer[:200] or '/'}" for pointer in wrong[:20])]
        return Verdict(
            score=0.0 if wrong else 1.0,
            breakdown={"differences": float(len(wrong))},
            evidence=tuple(lines),
            verifier=self.version,
        )


def differences(wanted: Any, found: Any, compare: Compare, at: str = "") -> Iterator[str]:
    """JSON pointers of every place where two documents differ, the highest that says it all."""
    if type(wanted) is dict and type(found) is dict:
        for key in {**wanted, **found}:
            pointer = f"{at}/{key.replace('~', '~0').replace('/', '~1')}"
            if key not in wanted or key not in found:
                yield pointer
            else:
                yield from differences(wanted[key], found[key], compare, pointer)
    elif type(wanted) is list and type(found) is list and len(wanted) == len(found):
        for i, (a, b) in enumerate(zip(wanted, found, strict=True)):
            yield from differences(a, b, compare, f"{at}/{i}")
    elif not compare.same(wanted, found):
        yield at
