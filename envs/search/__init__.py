"""Search: answer questions of one to four hops over a corpus that is invented for each question."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.envs import Environment, tool
from agentrl.types import Split, Task, ToolCall
from agentrl.verifiers.answer import Answer

from .corpus import LEVELS, problem
from .index import Index

Id = Annotated[int, Field(ge=1, le=9_999)]


def _right(task: Task, answer: str) -> bool:
    """Accept the name itself in any case, with or without a full stop; no article, no list, no sentence."""
    return answer.isascii() and answer.removesuffix(".").lower() == task.secret["answer"].lower()


def may_be_name(answer: str) -> bool:
    """Tell whether an answer has the shape of a name: one or two words."""
    words = answer.removesuffix(".").split()
    return 0 < len(words) <= 2 and all(map(str.isalpha, words))


class Search(Environment):
    """Answer questions from documents."""

    levels = range(min(LEVELS), max(LEVELS) + 1)
    size = 10_000
    verifier = Answer(check=_right)
    system = (
        "Answer the question from the documents: search finds them, open shows what one says. Call one tool per "
        "message, and open a document before you rely on it. If documents disagree, the newest is right. As soon as a "
        "document tells the answer, call answer with the name alone."
    )
    one_call_per_message = True
    objections = 3
    max_turns = 24

    def task(self, split: Split, level: int, index: int) -> Task:
        drawn = problem(split, level, index)
        return Task(
            id=f"search/{split}/{level}/{index}",
            split=split,
            level=level,
            tags=(f"hops-{LEVELS[level].hops}", *sorted(drawn.relations)),
            prompt=drawn.question,
            setup={"documents": [{"title": d.title, "date": d.date, "facts": d.facts} for d in drawn.documents]},
            secret={"answer": drawn.answer, "steps": drawn.steps()},
        )

    def start(self) -> None:
        self._index = Index(self.given.setup["documents"])
        self._opened = False

    def objection(self, answer: str) -> str:
        """Send an answer back that no document can have told, or that is no name."""
        if self._opened:
            return "" if may_be_name(answer) else "Call answer with the name alone, without any other word."
        return (
            "No document was opened yet. Call search with a name of the question, open what it finds, then call answer "
            "with the name alone."
        )

    def stop(self) -> None:
        self._index.close()

    @tool(output_limit=1_000)
    def search(self, query: str) -> str:
        """Search the documents for words.

        Args:
            query: words, such as a name
        """
        ids = self._index.search(query)
        lines = [f"id {id}: {self._index.heading(id)}" for id in ids]
        return "\n".join(lines) or "nothing found; search for a name of the question or of a document"

    @tool(output_limit=2_000)
    def open(self, id: Id) -> str:
        """Read a document.

        Args:
            id: its id, as search gave it
        """
        text = self._index.text(id)
        self._opened = True
        return text

    @tool(terminal=True)
    def answer(self, name: str) -> str:
        """End with the answer to the question.

        Args:
            name: the name alone
        """
        return name

    def expert(self, task: Task) -> list[ToolCall | str]:
        calls: list[ToolCall | str] = []
        for name, ids in task.secret["steps"]:
            calls.append(ToolCall(name="search", arguments={"query": name}))
            calls += [ToolCall(name="open", arguments={"id": id}) for id in ids]
        return [*calls, ToolCall(name="answer", arguments={"name": task.secret["answer"]})]

    def alternatives(self, task: Task) -> list[list[ToolCall | str]]:
        """Return other right solutions: one document and the answer, other spellings, reading in another order."""
        answer, calls = task.secret["answer"], self.expert(task)[:-1]
        return [[*calls[:2], answer], [*calls, f"{answer}."], [*calls, answer.lower()], [*calls[::-1], f" {answer}\n"]]


EXPORT = Search
