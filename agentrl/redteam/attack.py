"""Attacks: small scripts that try to be scored for work they did not do. Each is found by its function's name.

    attacks/a_comparison.py        family A, from the module's name
        @attack("python")          the surfaces that it needs
        def always_equal(t): ...   id "A.always_equal"; the docstring is its title

The function gets a `Target` and yields actions (tool calls, then perhaps a final message); each `yield` returns what
the policy would see. It raises `NotApplicable` where a target gives it nothing to work with.

Attacks on the loops around a verifier (families K to M) are coroutines marked `@loop_attack(...)`: they get a `Stand`
and the loops to play through, and return what came of it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from agentrl.errors import UserError
from agentrl.redteam.play import Action, Again, NotApplicable, Script, Variants
from agentrl.redteam.target import Target

__all__ = [
    "FAMILIES",
    "Action",
    "Again",
    "Attack",
    "NotApplicable",
    "Plays",
    "Script",
    "Variants",
    "attack",
    "attacks",
    "family_of",
    "loop_attack",
]

Plays = Script | Variants
Trial = Callable[..., Awaitable[Any]]
"""Gets a `loops.Stand` and `loops.Loops`; returns a `trials.Observed`."""
F = TypeVar("F", bound=Callable[[Target], Plays])
L = TypeVar("L", bound=Callable[..., Any])

FAMILIES = {
    "A": "Comparison and types",
    "B": "Forging the outcome",
    "C": "The test framework",
    "D": "The environment that survives",
    "E": "Survivors and races",
    "F": "Leaks",
    "G": "Weak specifications",
    "H": "Measured resources",
    "I": "Answer parsers",
    "J": "Judges and formats",
    "K": "Drop: an episode vanishes",
    "L": "Freeze: others are made late",
    "M": "Evaluation: inflated figures",
}

FIXES = {
    "A": "Bring results back as data (JSON), accept an allow-list of types, compare with `type(a) is type(b)` outside.",
    "B": "Let nothing the code under test can write decide: the verdict is formed in a process it cannot reach.",
    "C": "Keep the test framework and its configuration out of the agent's tree; demand positive evidence for each id.",
    "D": "Grade in a fresh sandbox from a pinned image that carries over declared artifacts and nothing else.",
    "E": "Kill the agent's processes before grading; copy out regular files only, read by the host, following nothing.",
    "F": "Keep expected values out of every sandbox; generate inputs from a secret and compare on the trusted side.",
    "G": "Draw hidden inputs from a fresh secret seed and measure the mutation score of the specification.",
    "H": "Take limits and clocks from outside the sandbox; exhaustion inside it is a 0, never an excuse.",
    "I": "Demand exactly one answer in a strict grammar; never eval; bound the parser's time; ambiguity is a failure.",
    "J": "Frame untrusted text, freeze the prompt, swap the order, demand structured output, calibrate on gold labels.",
    "K": "Grade every episode that began: what recurs with the same tokens while the system works scores 0.",
    "L": "Bound what a policy's text and tools may cost: linear parsers, deadlines, workers that can be killed.",
    "M": "Count what has no grade as failed, draw a fresh random key, report each environment and level by itself.",
}


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to cheat."""

    id: str
    family: str
    title: str
    needs: frozenset[str]
    """Every surface that a target must have: see `target.SURFACES`."""
    play: Callable[[Target], Plays]
    fix: str
    """What to change in a verifier that it breaks."""
    slow: bool = False
    """It waits for a time limit."""
    partial: bool = False
    """It does part of the work, which may rightly earn part of the score: only a full score is a breach."""
    trial: Trial | None = None
    """For attacks on the loops: plays through rollouts, scheduler and evaluation."""


def attack(*needs: str, fix: str = "", slow: bool = False, partial: bool = False) -> Callable[[F], F]:
    """Register a function of an attack module; `needs` names the surfaces it works on."""

    def register(function: F) -> F:
        function.__agentrl_attack__ = (frozenset(needs), fix, slow, partial)  # type: ignore[attr-defined]
        return function

    return register


def loop_attack(*needs: str, fix: str = "") -> Callable[[L], L]:
    """Register a coroutine of an attack module that plays through rollouts, scheduler and evaluation."""

    def register(function: L) -> L:
        function.__agentrl_attack__ = (frozenset(needs), fix, True, False)  # type: ignore[attr-defined]
        return function

    return register


def _not_alone(target: Target) -> Plays:
    raise NotApplicable("it plays through rollouts, scheduler and evaluation")


def family_of(name: str) -> str | None:
    """Return the letter of the family that is called by its letter or the beginning of its name; None if none is."""
    wanted = name.strip().lower()
    named = [letter for letter, title in FAMILIES.items() if wanted and title.lower().startswith(wanted)]
    return wanted.upper() if wanted.upper() in FAMILIES else named[0] if len(named) == 1 else None


def attacks() -> dict[str, Attack]:
    """Return every attack by id: those of this package, then those of `attacks/` in each folder of AGENTRL_PATH."""
    package = importlib.import_module("agentrl.redteam.attacks")
    corpus: dict[str, Attack] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda i: i.name):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        family = info.name.split("_")[0].upper()
        if family not in FAMILIES:
            raise UserError(
                f"the name of attack file {module.__file__} must begin with the letter of its family "
                f"({', '.join(f.lower() for f in FAMILIES)}) and an underscore, e.g. b_my_attack.py"
            )
        for name, function in vars(module).items():
            registered = getattr(function, "__agentrl_attack__", None)
            if registered is None or function.__module__ != module.__name__:
                continue
            needs, fix, slow, partial = registered
            id = f"{family}.{name}"
            if id in corpus:
                raise UserError(f"two attacks are called {id}: rename the one in {module.__file__}")
            title = (inspect.getdoc(function) or name).split("\n")[0].rstrip(".")
            through_loops = inspect.iscoroutinefunction(function)
            play, trial = (_not_alone, function) if through_loops else (function, None)
            corpus[id] = Attack(id, family, title, needs, play, fix or FIXES[family], slow, partial, trial)
    return corpus
