"""A taskset written with verifiers itself: look a word up with a tool, then say what it means. Its reward is as lenient
as such rewards often are: the fact must be somewhere in the last reply."""

import verifiers.v1 as vf  # noqa: TID251

FACTS = {f"word{n}": f"meaning{n}" for n in range(12)}


class Data(vf.TaskData):
    word: str
    answer: str


class LookUp(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def says_it(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class Facts(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def lookup(self, word: str) -> str:
        """Return what a word means."""
        return FACTS.get(word, "unknown")


class Config(vf.TasksetConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Glossary(vf.Taskset[LookUp, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Facts(config.tools)]

    def load(self):
        for word, fact in FACTS.items():
            data = Data(id=word, name=word, prompt=f'What does "{word}" mean?', word=word, answer=fact)
            yield LookUp(data, self.config.task)


__all__ = ["Glossary"]
