"""Naive verifiers, written the way the field writes them, so that we know that the attacks bite.

Each foil is a range with a careless grader. Grading that would run hostile code runs inside a box, start to end, and
only its result is read, as carelessly as the original reads it. `aimed` lists the attacks at its weakness; the suite
must break it with at least 80% of them.
"""

from __future__ import annotations

from agentrl.verifiers.redteam.foils import answers, code, state
from agentrl.verifiers.redteam.foils.base import Foil

__all__ = ["FOILS", "Foil"]

FOILS: dict[str, type[Foil]] = {
    foil.name: foil
    for module in (code, answers, state)
    for foil in vars(module).values()
    if isinstance(foil, type) and issubclass(foil, Foil) and foil.__module__ == module.__name__ and foil.name
}
