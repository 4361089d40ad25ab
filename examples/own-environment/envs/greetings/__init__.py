"""Greetings: the environment of the README, word for word."""

from agentrl import Environment, SandboxSpec, Task, ToolCall, tool
from agentrl.verifiers.final_state import FinalState


class Greetings(Environment):
    """Write a greeting into a file."""

    verifier = FinalState(lambda task: task.secret["tree"])

    def task(self, split, level, index):  # pure, random access
        text = f"Write hello {split}-{index} to out.txt."
        return Task(
            id=f"greetings/{split}/{level}/{index}",
            split=split,
            level=level,
            prompt=text,
            secret={"tree": {"out.txt": f"hello {split}-{index}\n"}},
        )

    def prepare(self, task, rng):
        return SandboxSpec()

    @tool
    def run(self, command: str) -> str:
        """Run a shell command.

        Args:
            command: what to run
        """
        return self.box.exec(["sh", "-c", command]).text

    def expert(self, task):  # a scripted solution, for checks and demonstrations
        words = task.prompt.removeprefix("Write ").removesuffix(" to out.txt.")
        return [ToolCall(name="run", arguments={"command": f"echo {words} > out.txt"}), "done"]


EXPORT = Greetings
