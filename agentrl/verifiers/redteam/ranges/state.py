"""Ranges whose work is a state: files, JSON documents, SQLite databases, git repositories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.types import Task
from agentrl.verifiers.final_state import FinalState
from agentrl.verifiers.redteam.ranges.base import Range, problem

START = {
    "inbox/a.txt": "alpha 3\n",
    "inbox/b.txt": "beta 14\n",
    "inbox/notes/c.txt": "gamma 159\n",
    "keep.txt": "do not touch\n",
}
END = {
    "archive/a.txt": "alpha 3\n",
    "archive/b.txt": "beta 14\n",
    "inbox/notes/c.txt": "gamma 159\n",
    "keep.txt": "do not touch\n",
    "out/total.txt": "176\n",
}


def _tree(task: Task) -> Mapping[str, str]:
    tree: Mapping[str, str] = task.secret["tree"]
    return tree


class Trees(Range):
    """Move and write files; the tree decides."""

    verifier = FinalState(_tree, empty_folders="ignore")

    def problems(self) -> Sequence[Task]:
        prompt = (
            "Move inbox/a.txt and inbox/b.txt to archive/, and write the sum of all the numbers that were in inbox, "
            "notes included, to out/total.txt. Touch nothing else."
        )
        commands = ["mkdir -p archive out && mv inbox/a.txt inbox/b.txt archive/ && echo 176 > out/total.txt"]
        return (problem("tidy", prompt, files=START, commands=commands, tree=END),)
