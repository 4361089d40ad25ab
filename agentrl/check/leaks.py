"""Finds a secret's values where they should not be: by marking them, or by searching for those nothing explains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from agentrl.hashing import canonical
from agentrl.types import Task

SHORTEST = 6
"""Shorter values are found everywhere by chance."""


def canaries(task: Task) -> tuple[Task, tuple[str, ...]]:
    """Replace every text in the task's secret by a mark of its own; return the task and the marks."""
    marks: list[str] = []

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            marks.append(f"canary-{len(marks)}-of-the-secret")
            return marks[-1]
        if isinstance(value, bytes):
            return mark("").encode()
        if isinstance(value, Mapping):
            return {key: mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(mark(item) for item in value)
        if is_dataclass(value) and not isinstance(value, type):
            texts = {f.name: getattr(value, f.name) for f in fields(value)}
            return replace(value, **{name: mark(text) for name, text in texts.items() if isinstance(text, bytes)})
        return value

    return replace(task, secret=mark(dict(task.secret))), tuple(marks)


def distinctive(task: Task) -> tuple[str, ...]:
    """Return the texts of the secret that neither prompt nor setup holds, and that are long enough to be recognised."""
    public = task.prompt + canonical(task.setup)
    shown = [task.prompt, *texts(task.setup)]
    values = []
    for text in texts(list(task.secret.values())):  # the keys are the author's own names, the same for every task
        clean = text.strip()
        if len(clean) >= SHORTEST and clean not in public and not any(clean in other for other in shown):
            values.append(clean)
    return tuple(dict.fromkeys(values))


def find_in(text: str, values: tuple[str, ...]) -> str:
    """Return the first of the values that the text holds; "" when it holds none."""
    return next((value for value in values if value in text), "")


def texts(value: Any) -> Iterator[str]:
    """Yield every text in a nested value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield value.decode("utf-8", "replace")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from texts(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from texts(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from texts(getattr(value, f.name))
