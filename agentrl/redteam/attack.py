"""An attack: a small policy that tries to be scored for work it did not do, found by the name of its function.

    attacks/a_comparison.py        family A, from the module's name
        @attack("python")          what it needs of a target
        def always_equal(t): ...   id "A.always_equal"; the docstring is its title

The function gets a `Target` and yields actions (tool calls, then perhaps a final message); each `yield` returns what
the policy would see. It raises `NotApplicable` where a target gives it nothing to work with.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from agentrl.errors import UserError
from agentrl.types import ToolCall

if TYPE_CHECKING:
    from agentrl.redteam.target import Target

Action = ToolCall | str
Policy = Iterable["Action | Again"]
"""A generator that is sent what the policy sees, or simply a list of actions."""

F = TypeVar("F", bound="Callable[[Target], Plays]")

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
}

FIXES = {
    "A": "Bring results back as data (JSON), accept an allow-list of types, compare with `type(a) is type(b)` outside.",
    "B": "Let nothing the code under test can write decide: the verdict is formed in a process it cannot reach.",
    "C": "Keep the test framework and its configuration out of the agent's tree; demand positive evidence for each id.",
    "D": "Grade in a fresh box from a pinned image that carries over declared artifacts and nothing else.",
    "E": "Kill the agent's processes before grading; copy out regular files only, read by the host, following nothing.",
    "F": "Keep expected values out of every box; generate inputs from a secret and compare on the trusted side.",
    "G": "Draw hidden inputs afresh from a secret seed and measure the mutation score of the specification.",
    "H": "Take limits and clocks from outside the box; exhaustion inside it is a 0, never an excuse.",
    "I": "Demand exactly one answer in a strict grammar; never eval; bound the parser's time; ambiguity is a failure.",
    "J": "Frame untrusted text, freeze the prompt, swap the order, demand structured output, calibrate on gold labels.",
}


class Variants(list[Policy]):
    """Several episodes that try one idea in different ways; the attack succeeds when any of them does."""


class Again:
    """Yielded in place of an action: the episode ends ungraded, and the next one of the same task begins."""


Plays = Policy | Variants


class NotApplicable(Exception):
    """The target offers nothing that this attack could work on."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to cheat."""

    id: str
    family: str
    title: str
    needs: frozenset[str]
    """Surfaces of a target, all of which it takes: see `target.SURFACES`."""
    play: Callable[[Target], Plays]
    fix: str
    """What to change in a verifier that falls to it."""
    slow: bool = False
    """It waits for a time limit."""
    partial: bool = False
    """It does part of the honest work, which may honestly earn a part of the score: only full marks are a breach."""


def attack(*needs: str, fix: str = "", slow: bool = False, partial: bool = False) -> Callable[[F], F]:
    """Mark a function of an attack module; `needs` names the surfaces it works on."""

    def mark(function: F) -> F:
        function.__agentrl_attack__ = (frozenset(needs), fix, slow, partial)  # type: ignore[attr-defined]
        return function

    return mark


def attacks() -> dict[str, Attack]:
    """Every attack, by id: those of this package, then those of `attacks/` in each folder of AGENTRL_PATH."""
    package = importlib.import_module("agentrl.redteam.attacks")
    found: dict[str, Attack] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda i: i.name):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        family = info.name.split("_")[0].upper()
        if family not in FAMILIES:
            raise UserError(
                f"attack file {module.__file__} must begin with the letter of its family "
                f"({', '.join(f.lower() for f in FAMILIES)}) and an underscore, e.g. b_my_attack.py"
            )
        for name, function in vars(module).items():
            marked = getattr(function, "__agentrl_attack__", None)
            if marked is None or function.__module__ != module.__name__:
                continue
            needs, fix, slow, partial = marked
            id = f"{family}.{name}"
            if id in found:
                raise UserError(f"two attacks are called {id}: rename the one in {module.__file__}")
            title = (inspect.getdoc(function) or name).split("\n")[0].rstrip(".")
            found[id] = Attack(id, family, title, needs, function, fix or FIXES[family], slow, partial)
    return found
