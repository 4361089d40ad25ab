"""Words: rearrange letters as told; an environment whose levels and tags differ, for a policy that trains in minutes.

A task names one or two of six operations (its tags) and three to twenty letters; the level is how many of each. There
are no tools: the only message is the answer. `benchmarks/curriculum_words.py` compares curricula on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from agentrl.envs import Environment
from agentrl.envs.splits import draw
from agentrl.types import Split, Task, ToolCall
from agentrl.verifiers.answer import Answer

LETTERS = "abcdefghijklmnop"
LEVELS = {1: (1, 3), 2: (1, 8), 3: (2, 8), 4: (1, 16), 5: (2, 16), 6: (2, 20)}
"""By level, the number of operations and of letters."""
OPERATIONS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "copy": list,
    "turn": lambda word: list(reversed(word)),
    "roll": lambda word: [*word[1:], word[0]],
    "swap": lambda word: [word[-1], *word[1:-1], word[0]],
    "sort": sorted,
    "next": lambda word: [LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)] for letter in word],
}


class Words(Environment):
    """Rearrange letters."""

    levels = range(min(LEVELS), max(LEVELS) + 1)
    system = ""
    verifier = Answer(expected=lambda task: task.secret["answer"])
    max_turns = 1

    def task(self, split: Split, level: int, index: int) -> Task:
        operations, letters = LEVELS[level]

        def make(rng: random.Random) -> tuple[list[str], str]:
            return rng.sample(list(OPERATIONS), operations), "".join(rng.choices(LETTERS, k=letters))

        # The letters decide the split, whatever is done with them.
        names, word = draw(split, level, index, env="words", make=make, content=lambda made: made[1])
        answer = list(word)
        for name in names:
            answer = OPERATIONS[name](answer)
        return Task(
            id=f"words/{split}/{level}/{index}",
            split=split,
            level=level,
            tags=tuple(names),
            prompt=f"{' '.join(names)} : {' '.join(word)}",
            secret={"answer": " ".join(answer)},
        )

    def expert(self, task: Task) -> list[ToolCall | str]:
        return [task.secret["answer"]]


EXPORT = Words
