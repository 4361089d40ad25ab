"""What experts do in an environment: how much they work, what they touch, what they write. A run keeps it, in
audit.json, so that its folder can be audited where the environment is not installed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.audit import words
from agentrl.envs.base import Environment
from agentrl.types import Split, Task, ToolCall

FILE = "audit.json"
TASKS = 4
"""Tasks per level that are looked at; fewer where an environment has many levels."""
MOST = 24
"""Tasks per environment, about."""
_PATH = re.compile(
    r"(?<![\w./+-])(?:[\w.-]{1,64}/){0,8}[\w.-]{0,64}\.[A-Za-z]\w{0,7}\b|(?<![\w./+-])(?:[\w.-]{1,64}/){1,8}[\w-]{1,64}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the experts of one environment do, over some of its tasks and all solutions that it knows of each."""

    least_calls: Mapping[str, int] = field(default_factory=dict)
    """Tool calls of the shortest solution, by level; over levels that were not looked at nothing is known."""
    answer_chars: int | None = None
    """Characters of the longest final message; None: nothing is known."""
    answers_differ: bool = False
    """Whether hardly two tasks have the same final message."""
    answers_new: bool = False
    """Whether no final message stands in its task's prompt as it is."""
    tools: frozenset[str] = frozenset()
    places: frozenset[str] = frozenset()
    """Where files lie that experts name, as `place` writes it."""
    words: frozenset[str] = frozenset()
    """Hits of words.py that experts' own scripts give."""

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON data."""
        sets = {name: sorted(getattr(self, name)) for name in ("tools", "places", "words")}
        plain = {name: getattr(self, name) for name in ("answer_chars", "answers_differ", "answers_new")}
        return {"least_calls": dict(self.least_calls), **plain, **sets}


def of(environment: Environment, levels: Iterable[int], split: Split = "train") -> Reference:
    """Look at an environment's experts. Nothing is played; one without an expert gives an empty reference."""
    chosen = list(levels)
    count = max(2, min(TASKS, MOST // max(1, len(chosen))))
    least: dict[str, int] = {}
    answers: list[str] = []
    repeated = False
    tools: set[str] = set()
    places: set[str] = set()
    own: set[str] = set()
    for level in chosen:
        for index in range(min(count, environment.size_of(split, level) or count)):
            scripts = list(_solutions(environment, split, level, index))
            for script in scripts:
                texts = [part for text in written(script) for part in words.unpacked(text)]
                own |= {words.key(hit) for text in texts for _, hit in words.hits(text)}
                places |= {place(path) for text in texts for path in _PATH.findall(text)}
                tools |= {action.name for action in script if isinstance(action, ToolCall)}
                calls = sum(isinstance(action, ToolCall) for action in script)
                least[str(level)] = min(calls, least.get(str(level), calls))
            answers += [answer(script) for script in scripts[:1]]
            prompt = words.key(environment.task(split, level, index).prompt) if scripts else ""
            repeated = repeated or any(words.key(answer(script)) in prompt for script in scripts)
    return Reference(
        least_calls=least,
        answer_chars=max(map(len, answers), default=None),
        answers_differ=len(answers) > 1 and len(set(answers)) > 0.9 * len(answers),
        answers_new=bool(answers) and not repeated,
        tools=frozenset(tools),
        places=frozenset(places),
        words=frozenset(own),
    )


def _solutions(environment: Environment, split: Split, level: int, index: int) -> Iterator[Sequence[ToolCall | str]]:
    """Yield the expert's script of a task, then the other right solutions that the environment knows."""
    with suppress(Exception):  # an expert is a convenience: where it fails, less is known
        task = environment.task(split, level, index)
        yield environment.expert(task)
        others: Callable[[Task], Sequence[Sequence[ToolCall | str]]] | None
        others = getattr(environment, "alternatives", None)
        if others is not None:
            yield from others(task)


def written(script: Sequence[ToolCall | str]) -> Iterator[str]:
    """Yield what a script writes: its messages and the text in its calls' arguments."""
    for action in script:
        if isinstance(action, ToolCall):
            yield from texts_of(action.arguments)
        else:
            yield action


def texts_of(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield every text inside a value of JSON's kind."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping) and depth < 16:
        for inner in value.values():
            yield from texts_of(inner, depth + 1)
    elif isinstance(value, list | tuple) and depth < 16:
        for inner in value:
            yield from texts_of(inner, depth + 1)


def answer(script: Sequence[ToolCall | str]) -> str:
    """Return what a script ends with: its last message, or the arguments of its last call."""
    last = script[-1] if script else ""
    return last if isinstance(last, str) else final_call(last)


def final_call(call: ToolCall) -> str:
    """Return a call's arguments as one text."""
    return " ".join(texts_of(call.arguments)) or call.name


def place(path: str) -> str:
    """Return where a file lies, without its name: how deep, and its suffix."""
    folders, _, name = path.strip("/").rpartition("/")
    depth = folders.count("/") + 1 if folders else 0
    hidden = "." if name.startswith(".") else ""
    suffix = name.lstrip(".").rpartition(".")[2].lower() if "." in name.lstrip(".") else ""
    return "*/" * depth + f"{hidden}*" + (f".{suffix}" if suffix else "")


def save(folder: Path, references: Mapping[str, Reference]) -> None:
    """Write a run's references, unless they are there."""
    path = folder / FILE
    if not path.exists():
        data = {name: reference.as_data() for name, reference in references.items()}
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps({"format": 1, "experts": data}, indent=1) + "\n", encoding="utf-8")
        part.replace(path)


def load(folder: Path) -> dict[str, Reference]:
    """Read a run's references by environment; nothing where the run kept none."""
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))["experts"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {
        name: Reference(
            least_calls=entry["least_calls"],
            answer_chars=entry["answer_chars"],
            answers_differ=entry["answers_differ"],
            answers_new=entry["answers_new"],
            tools=frozenset(entry["tools"]),
            places=frozenset(entry["places"]),
            words=frozenset(entry["words"]),
        )
        for name, entry in data.items()
    }
