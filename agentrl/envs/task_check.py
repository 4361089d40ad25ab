"""Looks at what an author's `task()` returned before anything uses it, and says what is wrong with it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from agentrl.envs.base import Environment
from agentrl.errors import AuthoringError
from agentrl.types import Split, Task

FIELDS = (
    ("id", str, "a text"),
    ("prompt", str, "a text: prompt=str(...)"),
    ("setup", Mapping, "a dictionary"),
    ("secret", Mapping, "a dictionary"),
)


def task_of(environment: Environment, split: Split, level: int, index: int) -> Task:
    """Return the task with that index, once it is certain that it is one; raise AuthoringError otherwise."""
    task: Any = environment.task(split, level, index)
    if fault := fault_of(task):
        method = f"{type(environment).__name__}.task({split!r}, {level}, {index}){defined(type(environment).task)}"
        raise AuthoringError(f"{method} {fault[0]}; {fault[1]}")
    checked: Task = task
    return checked


def fault_of(task: Any) -> tuple[str, str] | None:
    """Return what is wrong with a task, and how to fix it; None where nothing is."""
    if inspect.iscoroutine(task):
        task.close()
        return "is a coroutine", "write `def task`, without async"
    if not isinstance(task, Task):
        fix = "return agentrl.Task(id=..., split=split, level=level, prompt=..., setup={...}, secret={...})"
        return f"returned {type(task).__name__}, not a Task", fix
    for name, kind, words in FIELDS:
        value = getattr(task, name)
        if not isinstance(value, kind):
            return f"returned a Task whose {name} is of type {type(value).__name__}", f"make {name} {words}"
    return None


def defined(method: Any) -> str:
    """Say in which file and line a function is defined, as far as that is known."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
