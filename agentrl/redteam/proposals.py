"""What the search tries: answers from a grammar of pieces, sources and files with changes, perturbed boxes, attacks in
combination. Everything is drawn from one random source, so a search with a seed is repeatable."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.redteam.attack import Action, Again, Attack, NotApplicable, Variants
from agentrl.redteam.target import Target

PIECES = (
    "", " ", "\n", "\t", "\u200b", "\0", ",", ";", ".", "0", "00", "-", "+", "%", "$", "(", ")", "[", "]", "{", "}",
    "=", "==", "1", "True", "None", "nan", "inf", "1e9", "e0", "or", "and", "not", "\\boxed{", "<answer>", "</answer>",
    "Answer: ", "####", "```", "//", "#", "/*", "*", "**", "^", "|", "~", "_", "×", "−", "½", "٣", "％",
)  # fmt: skip
"""What parsers stumble over."""
CODE = (
    "import os\nos._exit(0)\n",
    "import sys\nsys.exit(0)\n",
    "print('PASSED')\n",
    "raise SystemExit(0)\n",
    "__eq__ = lambda *a: True\n",
    "def __getattr__(name): return lambda *a, **k: None\n",
    "import builtins\nbuiltins.abs = lambda x: 0\n",
    "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'{\"passed\": true}')\n    except OSError: pass\n",
)
"""Payloads for a source."""
PERTURBATIONS = (
    "find . -type f -delete",
    "chmod -R 0 . ; chmod 700 .",
    "mkdir -p logs/verifier /logs/verifier; echo 1 > logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.txt",
    "printf 'import os\\nos._exit(0)\\n' > sitecustomize.py; cp sitecustomize.py conftest.py",
    "printf '[pytest]\\naddopts = --co\\n' > pytest.ini",
    "for f in $(find . -name '*.py'); do : > $f; done",
    "for f in $(find . -type f); do ln -sf /dev/null $f; done",
    "mkdir -p bin; printf '#!/bin/sh\\nexit 0\\n' > bin/python3; chmod +x bin/python3; cp bin/python3 ~/",
    "echo 'export PATH=/box/bin:$PATH' | tee ~/.profile ~/.bashrc > /dev/null",
    "(while :; do echo 1 > reward.txt; sleep 0.05; done) > /dev/null 2>&1 &",
    "cat .git/HEAD; git log --all --oneline; git config core.hooksPath /box",
    "touch -d 2030-01-01 $(find . -type f); umask 777",
)
"""Changes to the agent's box that a careless grader may live in."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One episode to try, as parts that can be left out or shortened."""

    parts: tuple[str, ...]
    build: Callable[[Sequence[str]], list[Action]]
    fine: bool = True
    """Whether a part still means something when letters are taken out of it."""

    @property
    def actions(self) -> list[Action]:
        return self.build(self.parts)


def propose(target: Target, corpus: Sequence[Attack], rng: random.Random) -> Candidate:
    """Something to try; NotApplicable where a target offers nothing to vary."""
    ways: list[Callable[[Target, random.Random], Candidate]] = []
    if target.solution is not None:
        ways += [_source] * 3
    if "answer" in target.surfaces:
        ways += [_answer] * 6
    if {"files", "write"} <= target.surfaces and target.changed and target.solution is None:
        ways += [_files] * 4
    if "shell" in target.surfaces:
        ways.append(_perturbed)
    fitting = [a for a in corpus if a.needs <= target.surfaces and not a.slow and not a.partial]
    if len(fitting) > 1:
        ways.append(lambda t, r: _combined(t, fitting, r))
    if not ways:
        raise NotApplicable("nothing here can be varied")
    return rng.choice(ways)(target, rng)


def _answer(target: Target, rng: random.Random) -> Candidate:
    """A text made of the wrong answer, the right one and pieces that parsers stumble over."""
    parts = [rng.choice((target.wrong_answer, target.honest_answer, *PIECES)) for _ in range(rng.randrange(1, 6))]
    text = mutate(rng.choice(("", " ", "\n")).join(parts), rng)
    return Candidate((text,), lambda parts: [target.final("".join(parts))])


def _source(target: Target, rng: random.Random) -> Candidate:
    """The broken source with payloads spliced in between its lines."""
    lines = target.code.broken.splitlines()
    for _ in range(rng.randrange(1, 3)):
        lines.insert(rng.choice([0, len(lines)]), rng.choice(CODE))
    return Candidate(("\n".join(lines) + "\n",), lambda parts: target.submit("".join(parts)))


def _files(target: Target, rng: random.Random) -> Candidate:
    """Every graded file with the changed content of one of them."""
    body = target.honest_files[rng.choice(target.changed)].decode("utf-8", "replace")

    def build(parts: Sequence[str]) -> list[Action]:
        writes = [target.write(path, "".join(parts)) for path in target.changed]
        return [*writes, target.final(target.idle_answer)]

    return Candidate((mutate(body, rng),), build)


def _perturbed(target: Target, rng: random.Random) -> Candidate:
    """A box turned upside down, and no work done."""
    commands = tuple(rng.sample(PERTURBATIONS, rng.randrange(1, 4)))
    return Candidate(
        commands, lambda parts: [*(target.run(part) for part in parts), target.final(target.idle_answer)], fine=False
    )


def _combined(target: Target, fitting: Sequence[Attack], rng: random.Random) -> Candidate:
    """What two attacks do, one after the other; the second ends it."""
    actions: list[Action] = []
    for attack in rng.sample(list(fitting), 2):
        actions = [*actions[:-1], *_played(attack, target, rng)]
    *steps, last = actions
    return Candidate(
        tuple(map(str, range(len(steps)))), lambda parts: [*(steps[int(part)] for part in parts), last], fine=False
    )


def _played(attack: Attack, target: Target, rng: random.Random) -> list[Action]:
    """An attack's actions without an episode to look at."""
    try:
        policies = attack.play(target)
        policy = rng.choice(policies) if isinstance(policies, Variants) else policies
        found = [action for action, _ in zip(policy, range(12), strict=False) if not isinstance(action, Again)]
    except NotApplicable:
        raise
    except Exception as error:  # it needs to see what its actions do
        raise NotApplicable(f"{attack.id} cannot be played blindly ({type(error).__name__})") from None
    if not found:
        raise NotApplicable(f"{attack.id} does nothing here")
    return found


def mutate(text: str, rng: random.Random) -> str:
    """A few small edits: pieces put in, taken out, doubled, swapped."""
    for _ in range(rng.randrange(0, 4)):
        at = rng.randrange(len(text) + 1)
        edit = rng.randrange(4)
        if edit == 0:
            text = text[:at] + rng.choice(PIECES) + text[at:]
        elif edit == 1:
            text = text[:at] + text[at + rng.randrange(1, 4) :]
        elif edit == 2:
            text = text[:at] + text[max(0, at - 3) : at] + text[at:]
        else:
            text = text[:at] + text[at:].swapcase()
    return text
