"""Reasoning: questions of the package reasoning-gym, only with scorers that withstand our attacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.envs import Environment, tool
from agentrl.envs.splits import draw
from agentrl.errors import AuthoringError
from agentrl.types import Done, Split, Task, ToolCall

from .datasets import LEVELS, allowed, entry, installed, knob, size
from .scorers import Reasoned


class Reasoning(Environment):
    """Answer questions that need thought."""

    levels = LEVELS
    size = 10_000
    verifier = Reasoned()
    system = "Think, then submit the answer alone: nothing before it, nothing after it."
    max_turns = 4

    def __init__(self, *, datasets: Sequence[str] | None = None) -> None:
        """
        Args:
            datasets: which to draw from, in turn; by default the fast ones that pass all checks.
        """
        super().__init__()
        installed()
        known = allowed()
        names = tuple(datasets or (name for name, verdict in known.items() if verdict.get("mix")))
        for name in names:
            if name not in known:
                fit = ", ".join(other for other, verdict in known.items() if "refused" not in verdict)
                raise AuthoringError(f"reasoning: there is no dataset {name!r}; there are: {fit}")
            if why := known[name].get("refused"):
                raise AuthoringError(f"reasoning: {name} cannot be trained on: {why}; choose another one")
        self._names = names

    def task(self, split: Split, level: int, index: int) -> Task:
        name = self._names[index % len(self._names)]

        def make(rng: Any) -> tuple[int, dict[str, Any]]:
            number = rng.randrange(size(name))
            return number, entry(name, knob(name, level), number)

        number, drawn = draw(
            split, level, index, env=f"reasoning {name}", make=make, content=lambda pair: str(pair[1]["question"])
        )
        scorer = allowed()[name]["scorer"]
        return Task(
            id=f"reasoning/{split}/{level}/{index}",
            split=split,
            level=level,
            tags=(name,),
            prompt=drawn["question"],
            secret={"dataset": name, "number": number, "gold": drawn["answer"], "scorer": scorer},
        )

    @tool(terminal=True)
    def submit(self, answer: str) -> Done:
        """Give the answer; this ends the task.

        Args:
            answer: the answer alone
        """
        return Done(answer)

    def expert(self, task: Task) -> list[ToolCall | str]:
        return [ToolCall(name="submit", arguments={"answer": task.secret["gold"]})]

    def alternatives(self, task: Task) -> list[list[ToolCall | str]]:
        """Return other right spellings: variations that the scorer promises to accept."""
        gold = str(task.secret["gold"])
        spellings = [f"  {gold}\n"]
        match task.secret["scorer"]:
            case "words":
                spellings.append("\n".join("  ".join(line.split()) + " " for line in gold.splitlines()))
            case "numeric":
                spellings.append(gold if "." in gold else f"{gold}.0")
            case "make 24" | "make the target" | "integral":
                spellings.append(f"({gold})")
            case "mapping":
                spellings.append(", ".join(reversed(gold.split(", "))))
        return [[ToolCall(name="submit", arguments={"answer": spelling})] for spelling in spellings]


EXPORT = Reasoning
