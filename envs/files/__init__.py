"""Files: chores with files and text in a shell, graded on the final files."""

from __future__ import annotations

import base64
import random
import shlex
from dataclasses import dataclass

from agentrl import seeds
from agentrl.envs import Environment, tool
from agentrl.envs.splits import Shuffle, draw
from agentrl.sandboxes.base import Entry, Limits, SandboxSpec
from agentrl.types import Split, Task, ToolCall
from agentrl.verifiers.final_state import FinalState

from . import chores
from .chores import FOLDER_CHORES, Chore, Tree
from .names import FILES, WORDS, Names
from .text import DEEP_CHORES, MANY_CHORES, TEXT_CHORES

PAIRS = len(FILES) * (len(FILES) - 1)
SINGLE = 3 * PAIRS + 2 * len(WORDS) * len(FILES)
"""The number of level 1 tasks: three kinds with two file names, two with a word and a file name."""
_SINGLES = Shuffle(SINGLE, "files 1")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a task asks for, before its files are made."""

    chores: tuple[Chore, ...]
    names: Names

    def content(self) -> str:
        """Return what decides the split: the sentences, in any order."""
        return " ".join(sorted(chore.text for chore in self.chores))

    def trees(self) -> tuple[Tree, Tree]:
        """Return the workspace before and after, with one or two files that the chores must leave alone."""
        before: Tree = {}
        for chore in self.chores:
            for path, value in chore.needs.items():
                content = value() if callable(value) else value
                before[path] = Entry(content=content.encode()) if isinstance(content, str) else content
        for _ in range(self.names.rng.randint(1, 2)):
            before[self.names.file("txt")] = chores.line(self.names.word())
        after = dict(before)
        for chore in self.chores:
            chore.effect(after)
        return before, after


def _single(number: int) -> Plan:
    """Return the level 1 task with that number; every number has its own prompt."""
    rng = seeds.generator(0, "files 1", number)
    names = Names(rng)
    if number < 3 * PAIRS:
        kind, pair = divmod(number, PAIRS)
        first, second = divmod(pair, len(FILES) - 1)
        a, b = FILES[first], FILES[second + (second >= first)]
        todo = (chores.move, chores.copy, chores.delete)[kind](names.take(a), names.take(b), names.word())
    else:
        kind, pair = divmod(number - 3 * PAIRS, len(WORDS) * len(FILES))
        word, a = WORDS[pair // len(FILES)], names.take(FILES[pair % len(FILES)])
        content = rng.choice([w for w in WORDS if w != word])
        todo = (chores.write, chores.append)[kind](word, a, content)
    return Plan((todo,), names)


def _several(level: int, rng: random.Random) -> Plan:
    """Return a task of level 2 or more."""
    names = Names(rng)
    if level == 2:
        todo = [chores.simple(names) for _ in range(2)]
    elif level == 3:
        todo = [make(names) for make in rng.sample(FOLDER_CHORES, 2)] + [chores.simple(names)]
    elif level == 4:
        todo = [make(names) for make in rng.sample(TEXT_CHORES, 2)]
    elif level == 5:
        todo = [rng.choice(MANY_CHORES)(names), rng.choice(TEXT_CHORES)(names)]
    else:
        deep, wide = rng.sample(DEEP_CHORES, 2), rng.choice(MANY_CHORES[:4])
        todo = [make(names) for make in (*deep, wide)]
    rng.shuffle(todo)
    return Plan(tuple(todo), names)


def plan(split: Split, level: int, index: int) -> Plan:
    """Return what the task with that index asks for."""
    if level == 1:
        return _single(_SINGLES.number(split, index))
    return draw(split, level, index, env="files", make=lambda rng: _several(level, rng), content=Plan.content)


class Files(Environment):
    """Work on files with a shell."""

    levels = range(1, 7)
    size = 10_000
    verifier = FinalState(
        lambda task: task.secret["tree"],
        before=lambda task: task.setup["files"],
        modes=True,
        final_newline="any",
    )
    system = "Do the task with the shell, then say done."
    max_turns = 6

    def task(self, split: Split, level: int, index: int) -> Task:
        asked = plan(split, level, index)
        before, after = asked.trees()
        return Task(
            id=f"files/{split}/{level}/{index}",
            split=split,
            level=level,
            tags=tuple(sorted({chore.tag for chore in asked.chores})),
            prompt=" ".join(chore.text for chore in asked.chores),
            setup={"files": before},
            secret={"tree": after, "commands": [chore.command for chore in asked.chores]},
        )

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec:
        # Its commands take milliseconds; one that waits for a key (vi, tail -f) would hold up a whole round.
        return SandboxSpec(files=task.setup["files"], limits=Limits(seconds=4.0))

    @tool
    def run(self, command: str) -> str:
        """Run a shell command.

        Args:
            command: what to run
        """
        return self.box.exec(["sh", "-c", command]).text

    def expert(self, task: Task) -> list[ToolCall | str]:
        calls = [ToolCall(name="run", arguments={"command": command}) for command in task.secret["commands"]]
        return [*calls, "done"]

    def alternatives(self, task: Task) -> list[list[ToolCall | str]]:
        """Return other right solutions: all commands in one call; the workspace emptied and written again."""
        once = " && ".join(f"{{ {command}; }}" for command in task.secret["commands"])
        lines = ["find . -mindepth 1 -delete"]
        for path, entry in sorted(task.secret["tree"].items()):
            lines += _written(path, Entry(content=entry.encode()) if isinstance(entry, str) else entry)
        return [[ToolCall(name="run", arguments={"command": text}), "done"] for text in (once, "\n".join(lines))]


def _written(path: str, entry: Entry | None) -> list[str]:
    """Return the shell lines that make one entry."""
    if entry is None:
        return []
    name, text = shlex.quote(path), base64.b64encode(entry.content).decode()
    make = {
        "dir": f"mkdir -p {name}",
        "link": f"ln -s {shlex.quote(entry.content.decode())} {name}",
        "file": f"echo {text} | base64 -d > {name}",
    }[entry.kind]
    mode = [] if entry.kind == "link" else [f"chmod {entry.mode:o} {name}"]
    return [f"mkdir -p $(dirname {name})", make, *mode]


EXPORT = Files
