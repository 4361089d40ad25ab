"""`JsonState`: a JSON document must hold what the task expects, except in places that may hold anything."""

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
            path: the file in the workspace.
            allow: patterns of JSON pointers (`/orders/*/updated`) that may hold anything: declared side effects.
            compare: how exactly the leaves must agree.
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
            document = parse_json(entry.content, max_bytes=self.max_bytes)
        except Malformed as error:
            return Verdict(score=0.0, evidence=(str(error),), verifier=self.version)
        pointers = differences(self.expected(submission.task), document, self.compare)
        wrong = [pointer for pointer in pointers if not any(fnmatchcase(pointer, a) for a in self.allow)]
        return verdict_on([f"differs: {pointer[:200] or '/'}" for pointer in wrong], self.version)


def differences(expected: Any, actual: Any, compare: Compare, at: str = "") -> Iterator[str]:
    """Yield the JSON pointer of every place where two documents differ, and of no place below it."""
    if type(expected) is dict and type(actual) is dict:
        for key in {**expected, **actual}:
            pointer = f"{at}/{key.replace('~', '~0').replace('/', '~1')}"
            if key not in expected or key not in actual:
                yield pointer
            else:
                yield from differences(expected[key], actual[key], compare, pointer)
    elif type(expected) is list and type(actual) is list and len(expected) == len(actual):
        for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
            yield from differences(a, b, compare, f"{at}/{i}")
    elif not compare.same(expected, actual):
        yield at


def verdict_on(differences: Sequence[str], version: str) -> Verdict:
    """Return the verdict on a state that has these differences from the expected one."""
    return Verdict(
        score=0.0 if differences else 1.0,
        breakdown={"differences": float(len(differences))},
        evidence=(f"{len(differences)} differences", *differences[:20]),
        verifier=version,
    )
