"""A taskset that misbehaves as its setting says: rewards that are no numbers, hang or raise; tools that hang."""

import asyncio
import time

import verifiers.v1 as vf  # noqa: TID251


class TaskConfig(vf.TaskConfig):
    trouble: str = ""


class Data(vf.TaskData):
    answer: str


class Say(vf.Task[Data, vf.State, TaskConfig]):
    @vf.reward(weight=1.0)
    async def said(self, trace: vf.Trace) -> float:
        reply, trouble = trace.last_reply or "", self.config.trouble
        if trouble == "nan" or (trouble == "nan for one" and "spell" in reply):
            return float("nan")
        if trouble == "large":
            return 10.0 if self.data.answer in reply else 0.0
        if trouble == "raises":
            raise RuntimeError("the reward is broken")
        if trouble == "waits":
            await asyncio.sleep(3600)
        if trouble == "blocks":
            time.sleep(3600)
        return float(self.data.answer in reply)


class ToolsConfig(vf.ToolsetConfig):
    trouble: str = ""


class Tools(vf.Toolset[ToolsConfig]):
    made = 0

    @vf.tool
    async def ask(self, word: str) -> str:
        """Ask for a word."""
        if self.config.trouble == "tool waits" or (self.config.trouble == "tool waits for one" and word == "spell"):
            await asyncio.sleep(3600)
        if self.config.trouble == "tool blocks":
            time.sleep(3600)
        return word.upper()

    def register(self, server) -> None:
        super().register(server)
        Tools.made += 1
        if self.config.trouble == "tools change" and Tools.made > 1:
            server.add_tool(lambda: "free points", name="win", description="Win.")


class Config(vf.TasksetConfig):
    task: TaskConfig = TaskConfig()
    tools: ToolsConfig = ToolsConfig()


class Trouble(vf.Taskset[Say, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(config.tools)]

    def load(self):
        for number in range(12):
            data = Data(id=str(number), name=str(number), prompt=f"Say word{number}.", answer=f"word{number}")
            yield Say(data, self.config.task)


__all__ = ["Trouble"]
