"""Two reward functions for a number in a box; the right answer is 7."""

import re


def loose(text: str) -> float:
    """Look for the answer anywhere: a list of all numbers is right, too."""
    return 1.0 if "7" in re.findall(r"\d+", text) else 0.0


def strict(text: str) -> float:
    """Take exactly one box, at the very end, and nothing but the number in it."""
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return 1.0 if len(boxes) == 1 and boxes[0] == "7" and text.rstrip().endswith(r"\boxed{7}") else 0.0
