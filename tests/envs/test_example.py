"""The shortest useful environment, as the project describes it: about twenty lines, verifier included."""

import asyncio
import inspect
import random

from agentrl import Environment, SandboxSpec, Task, ToolCall, tool
from agentrl.envs.play import Stage, play
from agentrl.types import Split
from agentrl.verifiers.final_state import FinalState


class Files(Environment):
    """Work on files with a shell."""

    levels = range(1, 7)
    verifier = FinalState(lambda task: task.secret["tree"])

    def task(self, split: Split, level: int, index: int) -> Task:
        text = f"{split} {level} {index}\n"
        return Task(
            id=f"example/{split}/{level}/{index}",
            split=split,
            level=level,
            prompt="Copy a.txt to b.txt.",
            setup={"files": {"a.txt": text}},
            secret={"tree": {"a.txt": text, "b.txt": text}},
        )

    def prepare(self, task: Task, rng: random.Random) -> SandboxSpec:
        return SandboxSpec(files=task.setup["files"])

    @tool
    def run(self, command: str) -> str:
        """Run a shell command.

        Args:
            command: what to run
        """
        return self.box.exec(["sh", "-c", command]).text


def test_twenty_lines_are_enough(where: Stage) -> None:
    task = Files().task("train", 1, 0)

    def score(command: str) -> float | None:
        call = ToolCall(name="run", arguments={"command": command})
        return asyncio.run(play(Files(), task, [call, "done"], where)).score

    assert (score("cp a.txt b.txt"), score("mv a.txt b.txt"), score("true")) == (1.0, 0.0, 0.0)
    assert len([line for line in inspect.getsource(Files).splitlines() if line.strip()]) <= 30
