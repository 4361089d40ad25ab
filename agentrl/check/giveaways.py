"""Finds a solution that lies in the open: at one and the same place of the prompt or setup, task after task.

That a secret's value also stands in the prompt says little by itself: options are listed, and documents to be searched
hold what is searched for. But when one fixed rule ("the word after `answer:`", "the third number", `setup["answer"]`)
gives the solution of nearly every task of a level, a policy only has to copy. Short values need no exception: many
tasks rule out chance.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.envs.play import Action
from agentrl.types import Task, ToolCall

TASKS = 24
"""Tasks of each level that a rule is tried on."""
SHARE = 0.9
"""The share of them that a rule must solve: by chance, with two options, it does so twice in 100,000 cases."""
FEWEST = 5
"""With fewer tasks than these, only values of `SHORTEST` characters or more count: short ones meet by chance."""
SHORTEST = 6
FILE = "the file "
ANNOUNCES = ("answer", "solution", "expected", "correct", "secret", "target", "hint", "result", "key")
"""Words that announce a solution in a longer text of the setup."""
_WORD = re.compile(r"\w+(?:[.,'’-]\w+)*|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Seen:
    """One task as it is looked at: with the expert's solution, and the files that its sandbox starts with."""

    task: Task
    expert: tuple[Action, ...]
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Giveaway:
    """A rule that leads to a value of the secret which the expert submits."""

    path: str
    """Where the value lies in the secret, e.g. `secret['answer']`."""
    rule: str
    """Where it can be copied from."""
    count: int
    """How many tasks the rule leads to it in."""
    scripts: tuple[tuple[Task, tuple[Action, ...]], ...]
    """Tasks with a solution that consists of the value and of what is the same for all tasks: to be played."""


def giveaways(seen: Sequence[Seen]) -> list[Giveaway]:
    """Return what can be copied in nearly every one of these tasks, which are of one level."""
    used: dict[str, list[tuple[Seen, str]]] = {}
    for one in seen:
        submitted = "\n".join(text for action in one.expert for text in _texts(action))
        for path, value in leaves(one.task.secret, "secret"):
            if value and _places(value, submitted):
                used.setdefault(path, []).append((one, value))
    results = []
    for path, cases in used.items():
        rule = _rule(cases, len(seen))
        if rule is not None:
            results += [Giveaway(path, *rule, scripts) for scripts in _constant_scripts(cases)]
    return results


def _constant_scripts(cases: list[tuple[Seen, str]]) -> Iterator[tuple[tuple[Task, tuple[Action, ...]], ...]]:
    """Yield the ways to submit the value alone: as the final message, or in place of it in what else is constant."""

    def alone(one: Seen, value: str) -> tuple[Action, ...]:
        return (value,)

    def ending(one: Seen, value: str) -> tuple[Action, ...]:
        return one.expert[-1:]

    def last_call(one: Seen, value: str) -> tuple[Action, ...]:
        calls = [action for action in one.expert if isinstance(action, ToolCall)]
        return (*calls[-1:], *(action for action in one.expert[-1:] if isinstance(action, str)))

    for form in (alone, ending, last_call):
        scripts = tuple((one.task, form(one, value)) for one, value in cases)
        holes = {_with_hole(script, value) for (_, script), (_, value) in zip(scripts, cases, strict=True)}
        if len(holes) == 1 and all(script for _, script in scripts):
            yield scripts


def _with_hole(script: Sequence[Action], value: str) -> str:
    """Write a script as text, with the value left out."""
    lines = []
    whole = re.compile(rf"(?<!\w){re.escape(_plain(value))}(?!\w)")
    for action in script:
        name = action.name if isinstance(action, ToolCall) else "message"
        for text in _texts(action):
            lines.append(f"{name}: {whole.sub(chr(0), _plain(text))}")
    return "\n".join(lines)


def _texts(action: Action) -> Iterator[str]:
    if isinstance(action, ToolCall):
        yield from (text for _, text in leaves(dict(action.arguments), ""))
    elif isinstance(action, str):
        yield action


def _rule(cases: list[tuple[Seen, str]], total: int) -> tuple[str, int] | None:
    """Return the rule that gives these values most often, with how often, if that is nearly always."""
    if len(cases) < FEWEST and min(len(value) for _, value in cases) < SHORTEST:
        return None
    most_common = Counter(value.casefold() for _, value in cases).most_common(1)[0][1]
    if len(cases) >= FEWEST and most_common > 0.8 * len(cases):
        return None  # a constant; canary_floor and floor_gap look for those
    rules: Counter[str] = Counter()
    for one, value in cases:
        rules.update(dict.fromkeys(rules_for(one, value)).keys())  # each once, the most specific first
    for rule, count in rules.most_common(1):
        looked = sum(bool(one.files) for one, _ in cases) if rule.startswith(FILE) else len(cases)
        if count >= math.ceil(SHARE * max(looked, 0.5 * total if looked == len(cases) else 0)):
            return rule, count
    return None


def rules_for(one: Seen, value: str) -> Iterator[str]:
    """Yield every rule that leads to this value in one task, and to no other value."""
    yield from _in_text(one.task.prompt, value, "the prompt")
    pattern_values: dict[str, set[str]] = {}
    files = [(f"{FILE}{path!r}", text) for path, text in one.files.items()]
    for path, text in (*leaves(one.task.setup, "setup"), *files):
        pattern = re.sub(r"\[[^\]]*\]", "[*]", path)
        pattern_values.setdefault(pattern, set()).add(_plain(text))
        if _plain(text) == _plain(value):
            yield path
        elif len(text) < 2_000:
            for rule in _in_text(text, value, path):
                if any(word in rule.casefold() for word in ANNOUNCES):
                    yield rule
    for pattern, texts in pattern_values.items():
        if texts == {_plain(value)} and "[*]" in pattern:
            yield pattern


def _in_text(text: str, value: str, where: str) -> Iterator[str]:
    """Yield rules for a value in running text: its number from either end, and the words before or after it."""
    words = [_plain(word) for word in _WORD.findall(text)]
    wanted = [_plain(word) for word in _WORD.findall(value)]
    if not wanted or len(words) > 4_000:
        return
    size = len(wanted)
    starts = [at for at in range(len(words) - size + 1) if words[at : at + size] == wanted]
    if not starts:
        return
    for at in starts:
        yield f"word {at + 1} of {where}"
        yield f"word {len(words) - at} of {where} from its end"
        for length in (1, 2, 3):
            before = words[max(0, at - length) : at]
            if len(before) == length and _always(words, before, wanted, after=True):
                yield f"what follows {' '.join(before)!r} in {where}"
            behind = words[at + size : at + size + length]
            if len(behind) == length and _always(words, behind, wanted, after=False):
                yield f"what precedes {' '.join(behind)!r} in {where}"
    numbers = [_plain(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]
    for at, number in enumerate(numbers):
        if number == _plain(value):
            yield f"number {at + 1} of {where}"
            yield f"number {len(numbers) - at} of {where} from its end"
    for at, line in enumerate(text.splitlines()):
        if _plain(line) == _plain(value):
            yield f"line {at + 1} of {where}"


def _always(words: list[str], anchor: list[str], wanted: list[str], *, after: bool) -> bool:
    """Tell whether the anchor stands next to nothing but the wanted words."""
    size = len(anchor)
    for at in range(len(words) - size + 1):
        if words[at : at + size] == anchor:
            beside = words[at + size : at + size + len(wanted)] if after else words[max(0, at - len(wanted)) : at]
            if beside != wanted:
                return False
    return True


def leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield every value in a nested one as text, with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from leaves(item, f"{path}[{at}]")
    elif isinstance(value, bytes):
        yield path, value.decode("utf-8", "replace").strip()
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield path, str(value).strip()


def _places(value: str, text: str) -> bool:
    """Tell whether the text holds the value as whole words."""
    return re.search(rf"(?<!\w){re.escape(_plain(value))}(?!\w)", _plain(text)) is not None


def _plain(text: str) -> str:
    """Bring a value to one spelling: no case, no outer space, numbers without a useless `.0`."""
    clean = text.strip().casefold()
    return clean[:-2] if re.fullmatch(r"-?\d+\.0", clean) else clean
