"""Two reward functions for a number in a box; the right answer is 7."""

import re


def loose(text: str) -> float:
    """Look for the answer anywhere: a list of all numbers is right, too."""
    return 1.0 if "7" in re.findall(r"\d+", text) else 0.0


def strict(text: str) -> float:
    """Take one box and nothing beside it: no second answer, no "not" in front of it."""
    return 1.0 if re.fullmatch(r"\\boxed\{7\}", text.strip()) else 0.0
