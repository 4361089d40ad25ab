"""The code in docs/verifiers.md runs, and the verifiers it builds do what the page says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.sandboxes.base import Entry
from agentrl.verifiers.base import Boxes, Submission

PAGE = Path(__file__).resolve().parents[2] / "docs" / "verifiers.md"
MEDIAN = "def median(n):\n    n = sorted(n)\n    if not n: raise ValueError\n    return n[len(n) // 2]\n"


def test_the_page(boxes: Boxes, score: Callable[..., float], submit: Any) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)

    def files(at: str, **parts: str) -> Submission:
        made: Submission = submit(
            files={path.replace("__", "/"): Entry(content=text.encode()) for path, text in parts.items()}, at=at
        )
        return made

    assert score(names["verifier"], files("solution.py", **{"": MEDIAN}), boxes=boxes) == 1.0
    assert score(names["verifier"], files("solution.py", **{"": MEDIAN.replace("sorted", "list")}), boxes=boxes) == 0.0
    assert score(names["repository"], files("", **{"money.py": "total = sum"}), boxes=boxes) == 1.0
    assert score(names["tree"], files("", **{"out/report.txt": "3 lines\n", "a.log": ""})) == 1.0
    assert score(names["document"], files("out.json", **{"": '{"total": 3, "created": 0}'})) == 1.0
    assert score(names["city"], submit("paris", city="Paris")) == 1.0
    assert score(names["length"], submit("150 cm")) == 1.0
    assert score(names["roots"], submit(r"so \boxed{3, 2}")) == 1.0
    assert score(names["square"], submit("1 + x*x + 2*x")) == 1.0
