"""What the search tries: answers built from pieces, changed sources and files, perturbed sandboxes, combined attacks.
Everything is drawn from one random source, so a search with a seed is repeatable."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.redteam.attack import Attack
from agentrl.redteam.play import Action, NotApplicable, Stop, Variants
from agentrl.redteam.target import Target

PIECES = (
    "", " ", "\n", "\t", "\u200b", "\0", ",", ";", ".", "0", "00", "-", "+", "%", "$", "(", ")", "[", "]", "{", "}",
    "=", "==", "1", "True", "None", "nan", "inf", "1e9", "e0", "or", "and", "not", "\\boxed{", "<answer>", "</answer>",
    "Answer: ", "####", "```", "//", "#", "/*", "*", "**", "^", "|", "~", "_", "×", "−", "½", "٣", "％",
)  # fmt: skip
"""Texts that confuse parsers."""
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
"""Payloads for a source file."""
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
"""Changes to the agent's sandbox that a careless grader may depend on."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One episode to try, as parts that can be left out or shortened."""

    parts: tuple[str, ...]
    build: Callable[[Sequence[str]], list[Action]]
    fine: bool = True
    """Whether a part still means something when letters are removed from it."""

    @property
    def actions(self) -> list[Action]:
        return self.build(self.parts)


def propose(target: Target, corpus: Sequence[Attack], rng: random.Random) -> Candidate:
    """Draw something to try; NotApplicable where a target offers nothing to vary."""
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
    """Answer with a text made of the wrong answer, the right one and pieces that confuse parsers."""
    parts = [rng.choice((target.wrong_answer, target.honest_answer, *PIECES)) for _ in range(rng.randrange(1, 6))]
    text = mutate(rng.choice(("", " ", "\n")).join(parts), rng)
    return Candidate((text,), lambda parts: [target.final("".join(parts))])


def _source(target: Target, rng: random.Random) -> Candidate:
    """Submit the broken source with payloads before or after its lines."""
    lines = target.code.broken.splitlines()
    for _ in range(rng.randrange(1, 3)):
        lines.insert(rng.choice([0, len(lines)]), rng.choice(CODE))
    return Candidate(("\n".join(lines) + "\n",), lambda parts: target.submit("".join(parts)))


def _files(target: Target, rng: random.Random) -> Candidate:
    """Write the changed content of one graded file into all of them."""
    body = target.honest_files[rng.choice(target.changed)].decode("utf-8", "replace")

    return Candidate((mutate(body, rng),), lambda parts: target.drop(dict.fromkeys(target.changed, "".join(parts))))


def _perturbed(target: Target, rng: random.Random) -> Candidate:
    """Perturb the sandbox and do no work."""
    commands = tuple(rng.sample(PERTURBATIONS, rng.randrange(1, 4)))
    return Candidate(
        commands, lambda parts: [*(target.run(part) for part in parts), target.final(target.idle_answer)], fine=False
    )


def _combined(target: Target, fitting: Sequence[Attack], rng: random.Random) -> Candidate:
    """Do what two attacks do, one after the other; the second ends the episode."""
    actions: list[Action] = []
    for attack in rng.sample(list(fitting), 2):
        actions = [*actions[:-1], *_played(attack, target, rng)]
    *steps, last = actions
    return Candidate(
        tuple(map(str, range(len(steps)))), lambda parts: [*(steps[int(part)] for part in parts), last], fine=False
    )


def _played(attack: Attack, target: Target, rng: random.Random) -> list[Action]:
    """Return an attack's actions without playing an episode."""
    try:
        plays = attack.play(target)
        script = rng.choice(plays) if isinstance(plays, Variants) else plays
        actions = [action for action, _ in zip(script, range(12), strict=False) if not isinstance(action, Stop)]
    except NotApplicable:
        raise
    except Exception as error:  # it needs to see what its actions do
        raise NotApplicable(f"{attack.id} cannot be played blindly ({type(error).__name__})") from None
    if not actions:
        raise NotApplicable(f"{attack.id} does nothing here")
    return actions


def mutate(text: str, rng: random.Random) -> str:
    """Make a few small edits: insert, delete, repeat, swap case."""
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
