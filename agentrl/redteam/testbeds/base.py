"""The workspace that every testbed shares: a shell, a way to write files, and a final message."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

from agentrl.envs.base import Environment
from agentrl.envs.tools import tool
from agentrl.sandboxes.base import Entry, Limits, SandboxSpec
from agentrl.types import Split, Task, ToolCall

SEED_STEP = {"train": 0, "heldout": 1, "test": 2}


class Testbed(Environment):
    """Tasks whose files are put in a sandbox with a shell. Subclasses list problems; a problem is one task."""

    system = "You work in a small Linux workspace. Use the tools, then end with a final message."
    limits: ClassVar[Limits] = Limits(memory_mb=256, processes=48, disk_mb=64, seconds=5.0)

    problems: ClassVar[tuple[Task, ...]] = ()
    """The tasks in order; `task` picks one by its index."""

    def task(self, split: Split, level: int, index: int) -> Task:
        return self.problems[(index * 3 + SEED_STEP[split]) % len(self.problems)]

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec | None:
        files: Mapping[str, Entry | bytes | str] = task.setup.get("files", {})
        return SandboxSpec(files=files, limits=self.limits)

    @tool
    def run(self, command: str) -> str:
        """Run a shell command in the workspace.

        Args:
            command: what to run
        """
        return self.box.exec(["sh", "-c", command]).text

    @tool
    def write(self, path: str, content: str) -> str:
        """Write a text file of the workspace.

        Args:
            path: where, relative to the workspace
            content: the whole text
        """
        self.box.write(path, content.encode())
        return f"wrote {len(content)} characters to {path}"

    def expert(self, task: Task) -> Sequence[ToolCall | str]:
        steps = [ToolCall(name="run", arguments={"command": c}) for c in task.secret.get("commands", ())]
        steps += [
            ToolCall(name="write", arguments={"path": path, "content": content})
            for path, content in task.secret.get("writes", {}).items()
        ]
        return [*steps, str(task.secret.get("answer", "done"))]


def problem(
    name: str,
    prompt: str,
    *,
    files: Mapping[str, Entry | bytes | str] | None = None,
    **secret: object,
) -> Task:
    """Make one task of a testbed; `secret` holds what the expert and the verifier know."""
    return Task(id=name, split="train", level=1, prompt=prompt, setup={"files": files or {}}, secret=secret)
